"""The surroundings of one rank that plays alone: the other ranks of its plan, which are not there, and values drawn at
random.

1. The group (`alone`): torch's "fake" process group of the plan's size. Its collectives take no time: a gather copies
   this rank's own part, a sum is this rank's own term.

2. Stages (`AbsentStages`): a link whose receives are drawn at random, and whose sends go nowhere.

3. Links (`Slept`): each collective sleeps for as long as the cost model says, by itself: nothing overlaps, as the
   price of a plan has it too.

4. Values of which a plan knows only shapes (`DrawnValues`).

    parameters            normal, of a standard deviation of 0.02
    buffers, constants    uniform between 0.5 and 1.5: they may be variances
    inputs                normal
    bool                  True: a mask that hides nothing
    whole numbers         uniform in [0, limit), where the limit is that of the tables which they are an index of; 0 or
                          1 where they are an index of none

   The limits (`index_limits`) follow from the operators: a token is below the rows of its embedding, a target below the
   number of classes. A value that is computed from others hands its limit on to them. Example: tokens that are cut,
   flattened and then looked up have the limit of that table.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..cost.cost_model import CostModel
from ..errors import SettingError
from ..graph import Graph, Op, Value
from ..layout import Digits, merge
from ..partition.partitioner import between
from ..pipeline.pipeline_plan import PipelinePlan, Transfer
from ..pipeline.schedules import Schedule
from ..redistribution import CollectiveKind
from ..runtime.distributed.process_groups import Group, ProcessGroups
from ..torch_private import FakeStore, TorchDispatchMode, pytree

__all__ = ["AbsentStages", "DrawnValues", "NamedGroups", "Slept", "alone", "index_limits"]

# -- ranks that are not there


@contextlib.contextmanager
def alone(rank: int, devices: int) -> Iterator[None]:
    """Be one rank of many inside the ``with`` block, the only one that is there.

    Raises:
        SettingError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise SettingError(
            f"a rehearsal plays one of {devices} ranks by itself, and this process is rank {dist.get_rank()} of a "
            f"process group of {dist.get_world_size()}",
            legal="a process without a process group",
        )
    dist.init_process_group("fake", rank=rank, world_size=devices, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class NamedGroups(ProcessGroups):
    """Process groups whose digits are found by the group's name.

    Attributes:
        digits: name of a group -> its digits.
    """

    def __init__(self, devices: int, rank: int, base: int = 0) -> None:
        super().__init__(devices, rank, base, exchanges=False, share=False)
        self.digits: dict[str, Digits] = {}

    def seen(self, digits: Digits) -> Group:
        """The group of the ranks that differ from this one in `digits` alone."""
        made = super().seen(digits)
        self.digits[made.name] = merge(sorted(digits, key=lambda d: -d.stride))
        return made


#: The beginning of an operator's name -> the collective, and which of its tensors a rank sends: the first or the last.
_COLLECTIVES = {
    "all_reduce": (CollectiveKind.ALL_REDUCE, 0),
    "allreduce": (CollectiveKind.ALL_REDUCE, 0),
    "all_gather": (CollectiveKind.ALL_GATHER, -1),
    "allgather": (CollectiveKind.ALL_GATHER, -1),
    "reduce_scatter": (CollectiveKind.REDUCE_SCATTER, -1),
    "all_to_all": (CollectiveKind.ALL_TO_ALL, -1),
    "alltoall": (CollectiveKind.ALL_TO_ALL, -1),
}


class Slept(TorchDispatchMode):
    """While it is active, a collective takes the time that the cost model says.

    Args:
        costs: of the plan.
        groups: the groups on which collectives run.
        wait: waits for the device.

    Attributes:
        seconds: slept so far.
    """

    def __init__(self, costs: CostModel, groups: NamedGroups, wait: Callable[[], None]) -> None:
        super().__init__()
        self.costs, self.groups, self.wait = costs, groups, wait
        self.seconds = 0.0

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if function.namespace in ("c10d", "_c10d_functional"):
            self._collective(function, args)
        return function(*args, **(kwargs or {}))

    def _collective(self, function: Any, args: tuple[object, ...]) -> None:
        name = function.overloadpacket.__name__.strip("_")
        kind, place = next((c for start, c in _COLLECTIVES.items() if name.startswith(start)), (None, 0))
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        digits = next((self.groups.digits[name] for name in _names(args) if name in self.groups.digits), None)
        if kind is not None and tensors and digits:
            self.sleep(self.costs.collective(kind, digits, tensors[place].nbytes))

    def sleep(self, seconds: float) -> None:
        """Sleep, once the device has done what it was told."""
        self.wait()
        time.sleep(seconds)
        self.seconds += seconds


def _names(arguments: tuple[object, ...]) -> Iterator[str]:
    """Yield the texts among a collective's arguments, and the names of its process groups."""
    for argument in arguments:
        if isinstance(argument, str):
            yield argument
        elif isinstance(argument, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, TypeError):  # another object, such as the reduction
                yield dist.ProcessGroup.unbox(argument).group_name


class AbsentStages:
    """The link of one rank to stages that are not there.

    Args:
        plan: the plan.
        rank: in the world.
        values: draws what is received.
        joined: by output of the model, its shape on this rank.
        slept: sleeps for each message; None: messages take no time.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        rank: int,
        values: DrawnValues,
        joined: list[tuple[int, ...] | None],
        slept: Slept | None,
    ) -> None:
        self.plan, self.rank, self.values, self.joined, self.slept = plan, rank, values, joined, slept
        self.mine = {stage.number for stage in plan.of_rank(rank)}
        self._inside: dict[tuple[Hashable, ...], Tensor] = {}
        self._drawn: dict[tuple[Hashable, ...], Tensor] = {}

    def begin(self, schedule: Schedule) -> None:
        """Begin a step."""
        self._inside.clear()

    def send(self, transfer: Transfer, micro: int, back: bool, tensor: Tensor) -> None:
        """Keep a value for a stage of this rank; any other goes nowhere."""
        if {transfer.source, transfer.target} <= self.mine:
            self._inside[transfer.name, transfer.target, micro, back] = tensor

    def receive(self, transfer: Transfer, micro: int, back: bool) -> Tensor:
        """A value of a stage of this rank, or a drawn one."""
        if {transfer.source, transfer.target} <= self.mine:
            return self._inside.pop((transfer.name, transfer.target, micro, back))
        key = transfer.name, transfer.source, transfer.target, back
        if key not in self._drawn:
            layout = transfer.layout if back else transfer.arriving
            self._drawn[key] = self.values.draw(transfer.value, layout.local_shape(transfer.value.shape))
        if self.slept is not None:
            (peer,) = self.plan.peers(transfer, self.rank, back)
            costs = self.slept.costs
            digits = between(costs.cluster, peer, self.rank)
            self.slept.sleep(costs.collective(CollectiveKind.SEND, digits, transfer.nbytes))
        return self._drawn[key].clone()

    def exchange(self) -> None:
        """Nothing: a message is there when it is received."""

    def finish(self, results: list[Tensor | None]) -> list[Tensor | None]:
        """All outputs; zeros in place of those of other stages."""
        device = self.values.device
        return [torch.zeros(shape or (), device=device) if r is None else r for r, shape in zip(results, self.joined)]


# -- values drawn at random


#: Standard deviation of parameters, that of GPT-2's.
SPREAD = 0.02

#: Operator -> (its argument with the table, its argument with the indices, the table's dim: a number, or the argument
#: that has it).
_LOOKUPS: dict[str, tuple[int, int, int | str]] = {
    "embedding": (0, 1, 0),
    "embedding_bag": (0, 1, 0),
    "index_select": (0, 2, "1"),
    "index_add": (0, 2, "1"),
    "index_copy": (0, 2, "1"),
    "index_fill": (0, 2, "1"),
    "gather": (0, 2, "1"),
    "scatter": (0, 2, "1"),
    "scatter_add": (0, 2, "1"),
    "scatter_reduce": (0, 2, "1"),
    "take_along_dim": (0, 1, "2"),
}

#: Losses of (scores, classes): the scores' dim of the classes is 1, or 0 without a batch.
_LOSSES = ("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward")


class DrawnValues:
    """Draws values on a device.

    Args:
        graphs: the graphs in whose operators values are an index.
        device: on which values are drawn.
    """

    def __init__(self, graphs: Sequence[Graph], device: torch.device) -> None:
        self.device = device
        self.limits: dict[str, int] = {}
        for graph in graphs:
            for name, limit in index_limits(graph).items():
                self.limits[name] = min(limit, self.limits.get(name, limit))

    def parameter(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A parameter, or the slice of one."""
        return self._normal(shape, dtype, SPREAD)

    def buffer(self, value: Value, shape: Sequence[int]) -> Tensor:
        """A buffer or constant, or the slice of one."""
        if not value.dtype.is_floating_point:
            return self.draw(value, shape)
        return torch.empty(tuple(shape), device=self.device).uniform_(0.5, 1.5).to(value.dtype)

    def draw(self, value: Value, shape: Sequence[int]) -> Tensor:
        """An input, a value that another stage sends, or the slice of one."""
        if value.dtype.is_floating_point or value.dtype.is_complex:
            return self._normal(shape, value.dtype, 1.0)
        if value.dtype == torch.bool:
            return torch.ones(tuple(shape), dtype=torch.bool, device=self.device)
        limit = max(1, self.limits.get(value.name, 2))
        return torch.randint(0, limit, tuple(shape), dtype=torch.int64, device=self.device).to(value.dtype)

    def _normal(self, shape: Sequence[int], dtype: torch.dtype, spread: float) -> Tensor:
        if not dtype.is_floating_point and not dtype.is_complex:
            return torch.ones(tuple(shape), dtype=dtype, device=self.device)
        made = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(tuple(shape), dtype=made, device=self.device).mul_(spread).to(dtype)


def index_limits(graph: Graph) -> dict[str, int]:
    """Name of a value of whole numbers -> the number that it must stay below, where an operator uses it as an index."""
    limits: dict[str, int] = {}

    def lower(value: Value, limit: int) -> None:
        if not value.dtype.is_floating_point and value.dtype != torch.bool:
            limits[value.name] = min(limit, limits.get(value.name, limit))

    for op in reversed(graph.ops):
        used = dict(_indices(op))
        for value, limit in used.items():
            lower(value, limit)
        made = [limits[v.name] for v in op.outputs if v is not None and v.name in limits]
        for value in op.inputs if made else ():
            if value not in used:
                lower(value, min(made))
    return limits


def _indices(op: Op) -> Iterator[tuple[Value, int]]:
    """Yield the values that an operator uses as an index, each with its limit."""
    args: Mapping[int, object] = dict(enumerate(op.args))
    if op.kind in _LOOKUPS:
        table_at, index_at, where = _LOOKUPS[op.kind]
        table, index = args.get(table_at), args.get(index_at)
        dim = where if isinstance(where, int) else args.get(int(where), op.kwargs.get("dim"))
        if isinstance(table, Value) and isinstance(index, Value) and isinstance(dim, int) and table.shape:
            yield index, table.shape[dim]
    elif op.kind in _LOSSES:
        scores, classes = args.get(0), args.get(1)
        if isinstance(scores, Value) and isinstance(classes, Value) and scores.shape:
            yield classes, scores.shape[1 if len(scores.shape) > 1 else 0]
    elif op.kind in ("index", "index_put", "_unsafe_index"):
        table, indices = args.get(0), args.get(1)
        for dim, index in enumerate(indices if isinstance(indices, (list, tuple)) else ()):
            if isinstance(index, Value) and isinstance(table, Value) and dim < len(table.shape):
                yield index, table.shape[dim]
    elif op.kind == "one_hot":
        classes, count = args.get(0), args.get(1, op.kwargs.get("num_classes"))
        if isinstance(classes, Value) and isinstance(count, int) and count > 0:
            yield classes, count

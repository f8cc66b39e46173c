"""The problem that a planner solves, the table of planners, and the parts of a problem that marks and the parts of a
batch imply.

A planner decides a strategy for each operator of a graph: a function of a `PlanningProblem` that returns `Decisions`.
The decorator `planner` enters it under the name of its mode:

    @planner("mine", searches=True)
    def mine(problem: PlanningProblem) -> Decisions: ...

    sw.plan(net, inputs, parallel_mode="mine")

The modes "stand_alone" and "hybrid_parallel" have no planner: the former is for one device, the latter runs operators
as they stand.

`implied_devices`: the number of devices that the marks of a model imply. A mark ((2, 4), (4, 1)) of x @ w cuts the
three factors 2, 4 and 1 ways, and so implies 8 devices. Marks that imply 8 and 6 devices imply 24 together.
`global_inputs`: the whole batch of which a process feeds a part.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ..capture.export import capture
from ..capture.module_calls import LossFunction
from ..capture.source_lines import stack_level
from ..cluster import Cluster
from ..cost.cost_model import CostModel
from ..errors import SettingError
from ..graph import Graph, Op
from ..layout import Layout, digits_size
from ..partition.local_program import Decisions, InputPlacement
from ..partition.parameter_sharding import OptimizerParallel
from ..rules import bound_rule, find_rule
from ..torch_private import pytree
from .search_space import EdgeCosts

__all__ = [
    "CUT",
    "PLANNERS",
    "Planner",
    "PlanningProblem",
    "PriceBook",
    "devices_of_call",
    "global_inputs",
    "implied_devices",
    "modes",
    "planner",
    "planners",
    "warn_of_ignored_marks",
]

# -- the problem, the planners


#: The most operators that a warning names.
MOST = 8


#: Storage that a search may choose for a parameter: cut over all replicas, and gathered again in the backward or kept
#: until then.
CUT = OptimizerParallel(-1, 0, "level3")


class PriceBook:
    """Prices that several plans share, such as those of a pipeline's stages."""

    def __init__(self) -> None:
        self._known: dict[Hashable, EdgeCosts] = {}

    def of(self, cluster: Cluster, devices: int, *rules: Hashable) -> EdgeCosts:
        """The prices on the innermost devices of a cluster, under settings that say which strategies are legal."""
        key = cluster, devices, rules
        if key not in self._known:
            self._known[key] = EdgeCosts(CostModel(cluster, devices))
        return self._known[key]


@dataclass(frozen=True)
class PlanningProblem:
    """Everything that decides a plan.

    Attributes:
        graph: the captured program, with marks on its operators.
        devices: the number of devices.
        input_placement: the layouts of the inputs, and the handling of the results.
        on_missing_rule: "error", or "replicate" to run an operator without a rule whole.
        stored: layouts of parameters and buffers that are settled already.
        uneven: pad dims that their cuts do not divide, where the operator allows it.
        cost_model: prices of a step; None: those of the default cluster of `devices` devices.
        hsdp: ZeRO/FSDP sharding (optimizer parallel) of the other parameters.
        memory: the limit in bytes a device, at any moment; None: no limit. With a limit, outputs of operators may be
            recomputed in the backward, and where `hsdp` is None parameters may be stored cut over their replicas.
        optimizer: used with `memory`: the optimizer that keeps state for each parameter, see
            `memory_timeline.optimizer_bytes`.
        cut: used with `memory`: the storage that a parameter may have.
        deliveries: prices by the same cost model that other searches share; None: the search has its own.
    """

    graph: Graph
    devices: int
    input_placement: InputPlacement
    on_missing_rule: str = "error"
    stored: Mapping[str, Layout] | None = None
    uneven: bool = False
    cost_model: CostModel | None = None
    hsdp: OptimizerParallel | None = None
    memory: float | None = None
    optimizer: str | float | None = None
    cut: OptimizerParallel = CUT
    deliveries: EdgeCosts | None = None

    @cached_property
    def costs(self) -> CostModel:
        """Prices of a step, and the links between the devices."""
        return self.cost_model or CostModel(Cluster.of(None, self.devices), self.devices)


@dataclass(frozen=True)
class Planner:
    """A mode that decides strategies.

    Attributes:
        name: the mode.
        decide: the function. It raises StrategyError, LayoutError or MissingRuleError for an operator that cannot
            follow its mark or has no rule, and PlanError where no plan is allowed.
        searches: True where it compares the seconds of plans; one process then searches for all.
        fits_memory: True where it keeps a limit of memory.
    """

    name: str
    decide: Callable[[PlanningProblem], Decisions]
    searches: bool = False
    fits_memory: bool = False

    def __call__(self, problem: PlanningProblem) -> Decisions:
        return self.decide(problem)


#: Mode -> its planner.
PLANNERS: dict[str, Planner] = {}


def planner(
    name: str, *, searches: bool = False, fits_memory: bool = False
) -> Callable[[Callable[[PlanningProblem], Decisions]], Callable[[PlanningProblem], Decisions]]:
    """Enter a planner under the name of its mode. The function itself stays as it is.

    Args:
        name: the mode.
        searches: True where it compares the seconds of plans.
        fits_memory: True where it keeps `PlanningProblem.memory`.
    """

    def entered(decide: Callable[[PlanningProblem], Decisions]) -> Callable[[PlanningProblem], Decisions]:
        PLANNERS[name] = Planner(name, decide, searches, fits_memory)
        return decide

    return entered


def planners(*, searches: bool = False, fits_memory: bool = False) -> tuple[str, ...]:
    """The modes that have a planner.

    Args:
        searches: True: only those that search.
        fits_memory: True: only those that keep a limit of memory.
    """
    return tuple(name for name, p in PLANNERS.items() if p.searches >= searches and p.fits_memory >= fits_memory)


#: The modes that ignore the strategies of `shardwright.shard`.
IGNORING = ("stand_alone", "hybrid_parallel", "data_parallel")


def warn_of_ignored_marks(graph: Graph, mode: str) -> None:
    """Warn of the marked operators of a graph where the mode ignores their strategies."""
    marked = [f"{op.name} ({op.mark.source})" for op in graph.ops if op.mark is not None]
    if mode not in IGNORING or not marked:
        return
    named = ", ".join(marked[:MOST]) + (f" and {len(marked) - MOST} more" if len(marked) > MOST else "")
    warnings.warn(
        f'parallel_mode="{mode}" ignores the strategies of {named}; modes that follow them: '
        + ", ".join(name for name in PLANNERS if name not in IGNORING),
        stacklevel=stack_level(),
    )


def modes() -> tuple[str, ...]:
    """All parallel modes."""
    return ("stand_alone", "hybrid_parallel", *PLANNERS)


# -- implied devices, implied inputs


def implied_devices(graph: Graph) -> int:
    """The number of devices that the marks of a model imply: the least number that all marks fit.

    Args:
        graph: a captured call of the model. Marks of operators that the call does not run do not count.

    Returns:
        The least common multiple of the numbers that the marks imply one by one. A tuple implies the product of its
            cuts over the operator's factors, a `Layout` its own number of devices.

    Raises:
        SettingError: no operator that runs is marked.
    """
    counts = []
    for op in graph.ops:
        if op.mark is None:
            continue
        counts.append(_devices_of(op))
        for strategy in (op.mark.in_strategy, op.mark.out_strategy):
            for entry in strategy if isinstance(strategy, (tuple, list)) else ():
                counts.append(entry.devices if isinstance(entry, Layout) else _product(entry))
    if not counts:
        raise SettingError(
            "how many devices? No launcher says, nor does the mark of an operator that the model runs",
            legal="shardwright.init(devices=8), or `shardwright run --devices 8`",
        )
    return math.lcm(*counts)


def devices_of_call(
    net: nn.Module, loss_fn: LossFunction | None, args: tuple[object, ...], kwargs: dict[str, object] | None = None
) -> int:
    """The number of devices that the marks of the operators in one call of a model imply.

    Args:
        net, loss_fn: the model and its loss; None: it has none.
        args, kwargs: the arguments of the call, for the whole batch; the target is the last of `args`.

    Raises:
        SettingError: no operator that runs is marked.
    """
    return implied_devices(capture(net, args, kwargs, loss_fn=loss_fn))


def _product(cuts: object) -> int:
    return math.prod(c for c in cuts if isinstance(c, int) and c > 0) if isinstance(cuts, (tuple, list)) else 1


def _devices_of(op: Op) -> int:
    """The number of devices that the tuples of a mark cut for: the product of the cuts over the operator's factors."""
    described = find_rule(op)
    cuts: dict[object, object] = {}
    if described is not None and isinstance(op.mark.in_strategy, (tuple, list)):
        inputs = bound_rule(op, described).inputs
        for place, entry in zip(op.mark.order, op.mark.in_strategy):
            if isinstance(entry, (tuple, list)):
                cuts.update((dim[0], cut) for dim, cut in zip(inputs[place], entry) if len(dim) == 1)
    return _product(tuple(cuts.values()))


def global_inputs(
    args: tuple[object, ...], kwargs: dict[str, object], devices: int, dataset: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The whole batch of which a process feeds a part, as meta tensors.

    Args:
        args, kwargs: the arguments that one process feeds.
        devices: the number of devices.
        dataset: "full_batch": the arguments are the whole batch already; "data_parallel": dim 0 of every tensor is
            one of `devices` parts; a tuple or list: by tensor in order, a `Layout` or a tuple of cuts. Every other
            value, and a tensor without a fitting entry, leaves the shape as it is.

    Returns:
        `args` and `kwargs` with every tensor replaced by a meta tensor of the whole batch's shape.
    """
    if dataset == "full_batch":
        return args, kwargs
    tensors = iter(range(1_000_000))

    def whole(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        index, shape = next(tensors), list(leaf.shape)
        if dataset == "data_parallel":
            cuts = (devices,) + (1,) * (len(shape) - 1) if shape else ()
        elif isinstance(dataset, (tuple, list)) and index < len(dataset):
            entry = dataset[index]
            cuts = tuple(map(digits_size, entry.dims or ())) if isinstance(entry, Layout) else entry
        else:
            cuts = (1,) * len(shape)
        if not isinstance(cuts, (tuple, list)) or len(cuts) != len(shape) or not all(isinstance(c, int) for c in cuts):
            cuts = (1,) * len(shape)  # the planner reports a wrong `dataset`
        return torch.empty(
            [s * c for s, c in zip(shape, cuts)], dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad
        )

    return pytree.tree_map(whole, (args, kwargs))

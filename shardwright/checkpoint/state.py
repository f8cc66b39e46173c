"""What a rank has of a model's and an optimizer's tensors, under the names by which a checkpoint knows them.

    model.<name>                     parameters and buffers, as ``state_dict`` names them; a tied one by its first name
    loss_fn.<name>                   those of the loss, where it is a module that has some
    optimizer.<parameter>.<key>      what the optimizer keeps for a parameter

A rank has a box of each: its slice, the whole, or nothing. Of a `layerwise_parallel` parameter the whole is that of all
ranks, stacked along a first dim.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.annotations import whole_shape
from ..capture.manual import is_own, stacked
from ..errors import CheckpointError
from ..json_values import dtype_name
from ..layout import Digit, Layout, group_of
from ..partition.uneven import true_slice
from ..pipeline.pipeline_plan import PipelinePlan
from ..planfile.encoding import spell_layout
from ..process import stream
from ..runtime.distributed.coordination import SingleRank
from ..sharded_plan import Plan

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Box",
    "CheckpointedModel",
    "LocalTensor",
    "TensorPlacement",
    "generators",
    "restore_generators",
    "state_names",
]

Box = tuple[slice, ...]


@dataclass(frozen=True)
class TensorPlacement:
    """Where a tensor lies.

    Attributes:
        shape: of the whole.
        layout: on the ranks from `first` on; None: nobody has said.
        own: whether it is each rank's own, stacked along dim 0.
        box: what this rank has of it; None: nothing.
        holders: the ranks that have this box, and may write it.
    """

    shape: tuple[int, ...]
    layout: Layout | None
    first: int
    own: bool
    box: Box | None
    holders: tuple[int, ...]

    @property
    def words(self) -> dict[str, Any] | None:
        """As `manifest.Entry.layout` says it."""
        if self.layout is None:
            return None
        words = {"devices": self.layout.devices, "first": self.first, "layout": spell_layout(self.layout)}
        return words | {"own": True} if self.own else words


@dataclass(frozen=True)
class LocalTensor:
    """A tensor on this rank.

    Attributes:
        name: in a checkpoint.
        dtype: as torch calls it.
        local: what is here of it, of the shape of the place's box; None: nothing.
        state: the tensor in an optimizer's state that it is of; None: it is the model's. In-place operations on a
            DTensor count in its own version, not in that of its slice.
    """

    name: str
    dtype: str
    place: TensorPlacement
    local: Tensor | None
    state: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape


class CheckpointedModel:
    """A model, and what a checkpoint calls its tensors.

    Args:
        model: a `shardwright.AutoParallel`, or a module.
        ranks: that hold it.

    Attributes:
        tensors: name -> parameter or buffer.
        aliases: another name of a tensor -> its first.
        extra: name -> the module that has a state of its own making (``get_extra_state``).
        plan: the latest, None where there is none.

    Raises:
        CheckpointError: not a module.
    """

    def __init__(self, model: nn.Module, ranks: SingleRank) -> None:
        from ..parallel.auto_parallel import AutoParallel  # above this room

        if not isinstance(model, nn.Module):
            raise CheckpointError(
                f"{type(model).__name__} is no model", source="the model", legal="the AutoParallel, or an nn.Module"
            )
        self.wrapper = model if isinstance(model, AutoParallel) else None
        self.net: nn.Module = model.net if isinstance(model, AutoParallel) else model
        self.ranks = ranks
        self.plan: Plan | PipelinePlan | None = model.plan if self.planned else None
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.extra: dict[str, nn.Module] = {}
        self._places: dict[tuple[Any, ...], TensorPlacement] = {}
        loss = self.wrapper.loss_fn if self.wrapper is not None else None
        names: dict[int, str] = {}
        for prefix, module in (("model.", self.net), *((("loss_fn.", loss),) if isinstance(loss, nn.Module) else ())):
            for name, value in module.state_dict(keep_vars=True).items():
                if not isinstance(value, Tensor):
                    self.extra[prefix + name] = module.get_submodule(name.rpartition(".")[0])
                elif id(value) in names:
                    self.aliases[prefix + name] = names[id(value)]
                else:
                    self.tensors[prefix + name] = value
                    names[id(value)] = prefix + name

    @property
    def planned(self) -> bool:
        """Whether its wrapper has been called."""
        return self.wrapper is not None and bool(self.wrapper._programs)

    @property
    def waits(self) -> bool:
        """Whether its parameters are still to become slices, or have no values."""
        if self.wrapper is None or self.planned:
            return False
        return (self.ranks.world > 1 and self.wrapper.parallel_mode != "stand_alone") or self.unborn is not None

    @property
    def unborn(self) -> str | None:
        """The first tensor that has no values, or None."""
        return next((name for name, tensor in self.tensors.items() if tensor.is_meta), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor."""
        tensor = self.tensors[name]
        if self._apart(tensor):
            return (self.ranks.world, *tensor.shape)
        return tuple(whole_shape(tensor))

    def parameter_name(self, name: str) -> str:
        """What an optimizer's entry calls a parameter: its name in the graph."""
        return name.removeprefix("model.")

    def held(self) -> Iterator[LocalTensor]:
        """All tensors of the model."""
        for name, tensor in self.tensors.items():
            yield LocalTensor(name, dtype_name(tensor.dtype), *self.placed(name, tensor))

    def placed(self, name: str, tensor: Tensor) -> tuple[TensorPlacement, Tensor | None]:
        """Where a tensor lies, and what is here of it.

        Raises:
            CheckpointError: a DTensor of somebody else's.
        """
        shape, world = self.shape(name), self.ranks.world
        if shape != tuple(tensor.shape) and not self._apart(tensor):
            return TensorPlacement(shape, None, 0, False, None, ()), None  # of another stage
        if self._apart(tensor):
            layout = Layout.of(world, ((Digit(world, 1),),) + ((),) * tensor.dim())
            box = (slice(self.ranks.rank, self.ranks.rank + 1), *map(slice, [0] * tensor.dim(), tensor.shape))
            return TensorPlacement(shape, layout, 0, True, box, (self.ranks.rank,)), tensor.detach().unsqueeze(0)
        return self.place_of(name, tensor, *self._said(name, tensor))

    def place_of(
        self, name: str, tensor: Tensor, layout: Layout | None, first: int = 0, own: bool = False
    ) -> tuple[TensorPlacement, Tensor]:
        """Where a tensor lies, and what is here of it.

        Args:
            layout, first, own: of a plain tensor, which every rank has whole.

        Raises:
            CheckpointError: a DTensor of somebody else's.
        """
        from torch.distributed.tensor import DTensor  # a second to import, and of use to processes alone

        if not isinstance(tensor, DTensor):
            box = tuple(map(slice, [0] * tensor.dim(), tensor.shape))
            return TensorPlacement(
                tuple(tensor.shape), layout, first, own, box, (first if self.ranks.world > 1 else 0,)
            ), tensor.detach()
        key = tensor.device_mesh, tensor.placements, tensor.shape
        if key not in self._places:
            self._places[key] = self._of_slices(name, tensor)
        with torch.no_grad():  # with gradients each of the two would go through the dispatch of DTensors
            return self._places[key], tensor.to_local().detach()

    def _of_slices(self, name: str, tensor: DTensor) -> TensorPlacement:
        from ..runtime.distributed.dtensors import layout_of

        mesh = tensor.device_mesh
        layout = Layout.replicated(1, tensor.dim()) if mesh.size() == 1 else layout_of(tensor)
        if layout is None:
            raise CheckpointError(
                f"a DTensor of somebody else's making: {tensor.placements} on {mesh}",
                source=name,
                legal="a model that shardwright alone has distributed",
            )
        first = int(mesh.mesh.min())
        here = self.ranks.rank - first
        holders = tuple(first + r for r in group_of(here, layout.replicas))
        return TensorPlacement(
            tuple(tensor.shape), layout, first, False, true_slice(layout, tensor.shape, here), holders
        )

    def _apart(self, tensor: Tensor) -> bool:
        """Whether each rank has its own slice here, unstacked."""
        return self.ranks.world > 1 and is_own(tensor) and stacked(tensor) is None

    def _said(self, name: str, tensor: Tensor) -> tuple[Layout | None, int, bool]:
        """Layout, first rank, whether it is the ranks' own: of a tensor that is whole here, as the plan says."""
        own = stacked(tensor)
        if own is not None:
            return Layout.of(own, ((Digit(own, 1),),) + ((),) * (tensor.dim() - 1)), 0, True
        planned = self.plan.parameters.get(self.parameter_name(name)) if self.plan is not None else None
        if planned is None:
            return None, 0, False
        ranks = getattr(planned, "ranks", None)
        return planned.storage.without_partial(), 0 if ranks is None else ranks.start, False


# -- optimizers --------------------------------------------------------------------------------------------------------


def state_names(subject: CheckpointedModel, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """``id(parameter)`` of each parameter of an optimizer -> its name.

    Raises:
        CheckpointError: one that is not of the model.
    """
    names = {id(tensor): name for name, tensor in subject.tensors.items()}
    out = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"{type(optimizer).__name__} has in group {number} a parameter of shape "
                    f"{tuple(parameter.shape)} that is none of the model's",
                    source="the optimizer",
                    legal="an optimizer of model.parameters()",
                )
            out[id(parameter)] = names[id(parameter)]
    return out


def optimizer_state(
    subject: CheckpointedModel, optimizer: torch.optim.Optimizer
) -> tuple[list[LocalTensor], dict[str, dict[str, Any]]]:
    """What an optimizer keeps: tensors, and parameter -> key -> what is no tensor.

    Raises:
        CheckpointError: a tensor of which nobody can tell how it lies.
    """
    names, tensors, others = state_names(subject, optimizer), [], {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            place, local = subject.placed(name, parameter)
            if local is None:
                continue
            for key, value in optimizer.state.get(parameter, {}).items():
                called = f"optimizer.{subject.parameter_name(name)}.{key}"
                if not isinstance(key, str) or "." in key:
                    raise CheckpointError(
                        f"the key {key!r} of its state cannot be a name", source=called, legal="a word"
                    )
                if isinstance(value, Tensor):
                    tensors.append(_state(subject, called, value, parameter, place))
                else:
                    others.setdefault(name, {})[key] = value
    return tensors, others


def _state(
    subject: CheckpointedModel, called: str, value: Tensor, parameter: Tensor, place: TensorPlacement
) -> LocalTensor:
    from torch.distributed.tensor import DTensor

    dtype = dtype_name(value.dtype)
    if isinstance(value, DTensor):
        return LocalTensor(called, dtype, *subject.place_of(called, value, None), value)
    if value.shape == parameter.shape and value.dim() and not isinstance(parameter, DTensor):
        stacks = place.own and subject.ranks.world > 1
        return LocalTensor(called, dtype, place, value.detach().unsqueeze(0) if stacks else value.detach(), value)
    if value.dim() and isinstance(parameter, DTensor):
        raise CheckpointError(
            f"a plain tensor of shape {tuple(value.shape)}, of a parameter that is cut: nobody can tell how it lies",
            source=called,
            legal="an optimizer whose state is made by torch.zeros_like",
        )
    if place.own and subject.ranks.world > 1 and value.dim():
        raise CheckpointError(
            f"a tensor of shape {tuple(value.shape)}, of a parameter that is each rank's own",
            source=called,
            legal="a state of the parameter's shape",
        )
    devices = place.layout.devices if place.layout is not None else None
    layout = Layout.replicated(devices, value.dim()) if devices is not None else None
    return LocalTensor(called, dtype, *subject.place_of(called, value, layout, place.first), value)


# ----------------------------------------------------------------------------------------------------
# The state of all random numbers of a process: the stream of programs that draw, and the generators of torch, of its
# accelerator, of numpy and of Python.
# ----------------------------------------------------------------------------------------------------


def generators() -> dict[str, Any]:
    """The states of now."""
    state = {
        "stream": stream.state_dict(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Go on with the states that `generators` has told; those that are not told of stay as they are."""
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    if "torch" in state:
        torch.set_rng_state(_tensor(state["torch"]))
    if "stream" in state:
        # The stream belongs to the seed of torch's generator, of which it takes a number: so before it and after it.
        kept = torch.get_rng_state()
        stream.load_state_dict(state["stream"])
        if "torch" in state:
            torch.set_rng_state(kept)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

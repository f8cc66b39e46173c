"""The state of a run that a checkpoint holds: the tensors of a model and an optimizer on one rank, random states, and
``state.json`` with everything else.

1. The tensors of a rank, under their checkpoint names (`CheckpointedModel`).

       model.<name>                    parameters and buffers, by their ``state_dict`` names; a tied one by its first
                                       name
       loss_fn.<name>                  those of the loss, where it is a module that has some
       optimizer.<parameter>.<key>     the optimizer's state of a parameter

   A rank has one box of each tensor: its slice, the whole, or nothing. The whole of a `layerwise_parallel` parameter is
   the stack of all ranks' values along a new dim 0. Example, a weight (8, 8) cut in two along dim 0 by ranks 0 and 1:
   the box of rank 1 is rows 4 to 7; a `layerwise_parallel` weight (8, 8) on 2 ranks is stored as (2, 8, 8), and the box
   of rank 1 is ``[1:2, 0:8, 0:8]``.

2. The random state of a process (`generators`, `restore_generators`): the stream of programs that draw random numbers,
   and the generators of torch, its accelerator, numpy and Python.

3. ``state.json`` (`state_text`, `read_state`): the state other than tensors, with the types and bounds that its values
   must have.

       id, step            of the save, as in the manifest
       extra               the user's values
       optimizer           null, or its kind, its groups (names of parameters, settings), and states that are no tensors
       schedulers          kind and state of each, in order
       modules             name -> the state of a module with ``get_extra_state``
       tied                further name of a tied tensor -> its first name
       random, data        of each rank, equal ones once: ``{"ranks": [0, 0, 1], "states": [...]}``

   Values are spelt as in `json_values`. `read_state` checks everything before anything of it is used. Settings of an
   optimizer (`check_settings`) have the kind of the setting that the optimizer has: a number, a truth value, a text, or
   as many of these; one of both may be None. Numbers of the names in `_BOUNDS` lie within their bounds:

       saved lr 0.1, present lr 0.01: taken      "0.1", True, -0.1, infinite: an error that names group and setting
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..accelerators import random_states, set_random_states
from ..capture.annotations import whole_shape
from ..capture.hybrid_models import is_own, stacked
from ..errors import CheckpointError, shown
from ..json_files.json_reader import kind_of, parse, read_object
from ..json_files.json_values import decode, dtype_name
from ..layout import Digit, Layout, group_of
from ..parallel.auto_parallel import AutoParallel
from ..partition.padded_dims import true_slice
from ..pipeline.pipeline_plan import PipelinePlan
from ..planfile.encoding import spell_layout
from ..process_runtime import stream
from ..runtime.distributed.rank_messages import SingleRank
from ..sharded_plan import Plan
from .manifest import Manifest

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "STATE",
    "Box",
    "CheckpointedModel",
    "LocalTensor",
    "Resumable",
    "TensorPlacement",
    "check_generators",
    "check_settings",
    "generators",
    "read_state",
    "restore_generators",
    "state_names",
    "state_text",
    "value_of",
]

# -- tensors, random states


Box = tuple[slice, ...]


@dataclass(frozen=True)
class TensorPlacement:
    """The placement of a tensor, as one rank sees it.

    Attributes:
        shape: the shape of the whole tensor.
        layout: the layout over the ranks from `first` on; None: unknown.
        first: the first rank of the layout.
        per_rank: True where each rank has its own value, stacked along dim 0.
        box: the part of the tensor on this rank; None: nothing.
        holders: the ranks that hold this box, any of which may write it.
    """

    shape: tuple[int, ...]
    layout: Layout | None
    first: int
    per_rank: bool
    box: Box | None
    holders: tuple[int, ...]

    @property
    def encoded(self) -> dict[str, object] | None:
        """The placement in the form of `manifest.TensorEntry.layout`."""
        if self.layout is None:
            return None
        encoded = {"devices": self.layout.devices, "first": self.first, "layout": spell_layout(self.layout)}
        return encoded | {"own": True} if self.per_rank else encoded


@dataclass(frozen=True)
class LocalTensor:
    """A tensor on this rank.

    Attributes:
        name: its name in a checkpoint.
        dtype: the dtype's name in torch, such as "float32".
        place: its placement.
        local: the values on this rank, of the shape of the placement's box; None: nothing.
        state: the tensor object of the optimizer's state; None for a tensor of the model. In-place operations on a
            DTensor count in the version of the DTensor itself, not in that of its local slice.
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
    """A model and the checkpoint names of its tensors.

    Args:
        model: a `shardwright.AutoParallel`, or a module.
        ranks: the ranks that hold it.

    Attributes:
        tensors: name -> parameter or buffer.
        aliases: further name of a tied tensor -> its first name.
        extra: name -> module with a state of its own (``get_extra_state``).
        plan: the latest plan, or None.

    Raises:
        CheckpointError: `model` is not a module.
    """

    def __init__(self, model: nn.Module, ranks: SingleRank) -> None:
        if not isinstance(model, nn.Module):
            raise CheckpointError(
                f"{type(model).__name__} is no model", source="the model", legal="the AutoParallel, or an nn.Module"
            )
        self.wrapper = model if isinstance(model, AutoParallel) else None
        self.net: nn.Module = model.net if isinstance(model, AutoParallel) else model
        self.ranks = ranks
        self.plan: Plan | PipelinePlan | None = self.wrapper.plan if self.planned and self.wrapper is not None else None
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.extra: dict[str, nn.Module] = {}
        self._places: dict[tuple[Hashable, ...], TensorPlacement] = {}
        loss = self.wrapper.loss_fn if self.wrapper is not None else None
        names: dict[Tensor, str] = {}
        for prefix, module in (("model.", self.net), *((("loss_fn.", loss),) if isinstance(loss, nn.Module) else ())):
            for name, value in module.state_dict(keep_vars=True).items():
                if not isinstance(value, Tensor):
                    self.extra[prefix + name] = module.get_submodule(name.rpartition(".")[0])
                elif value in names:
                    self.aliases[prefix + name] = names[value]
                else:
                    self.tensors[prefix + name] = value
                    names[value] = prefix + name

    @property
    def planned(self) -> bool:
        """True once the wrapper has been called."""
        return self.wrapper is not None and bool(self.wrapper._programs)

    @property
    def waits(self) -> bool:
        """True while the parameters are still to become slices, or have no values."""
        if self.wrapper is None or self.planned:
            return False
        return (self.ranks.world > 1 and self.wrapper.parallel_mode != "stand_alone") or self.unborn is not None

    @property
    def unborn(self) -> str | None:
        """The name of the first tensor that has no values, or None."""
        return next((name for name, tensor in self.tensors.items() if tensor.is_meta), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        tensor = self.tensors[name]
        if self._apart(tensor):
            return (self.ranks.world, *tensor.shape)
        return tuple(whole_shape(tensor))

    def parameter_name(self, name: str) -> str:
        """The name of a parameter in the graph, as used in an optimizer's entries."""
        return name.removeprefix("model.")

    def local_tensors(self) -> Iterator[LocalTensor]:
        """All tensors of the model, as this rank has them."""
        for name, tensor in self.tensors.items():
            yield LocalTensor(name, dtype_name(tensor.dtype), *self.placed(name, tensor))

    def placed(self, name: str, tensor: Tensor) -> tuple[TensorPlacement, Tensor | None]:
        """The placement of a tensor of the model, and its values on this rank (None where there are none).

        Raises:
            CheckpointError: a DTensor that Shardwright has not made.
        """
        shape, world = self.shape(name), self.ranks.world
        if shape != tuple(tensor.shape) and not self._apart(tensor):
            return TensorPlacement(shape, None, 0, False, None, ()), None  # a tensor of another stage
        if self._apart(tensor):
            layout = Layout.of(world, ((Digit(world, 1),),) + ((),) * tensor.dim())
            box = (slice(self.ranks.rank, self.ranks.rank + 1), *map(slice, [0] * tensor.dim(), tensor.shape))
            return TensorPlacement(shape, layout, 0, True, box, (self.ranks.rank,)), tensor.detach().unsqueeze(0)
        return self.place_of(name, tensor, *self._layout_of(name, tensor))

    def place_of(
        self, name: str, tensor: Tensor, layout: Layout | None, first: int = 0, per_rank: bool = False
    ) -> tuple[TensorPlacement, Tensor]:
        """The placement of a tensor, and its values on this rank.

        Args:
            name: the tensor, as errors name it.
            tensor: a DTensor, or a plain tensor that every rank has whole.
            layout, first, per_rank: the fields of `TensorPlacement`, for a plain tensor.

        Raises:
            CheckpointError: a DTensor that Shardwright has not made.
        """
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  a second to import, useful to processes alone

        if not isinstance(tensor, DTensor):
            box = tuple(map(slice, [0] * tensor.dim(), tensor.shape))
            return TensorPlacement(
                tuple(tensor.shape), layout, first, per_rank, box, (first if self.ranks.world > 1 else 0,)
            ), tensor.detach()
        key = tensor.device_mesh, tensor.placements, tensor.shape
        if key not in self._places:
            self._places[key] = self._of_slices(name, tensor)
        with torch.no_grad():  # with gradients both calls would go through the dispatch of DTensors
            return self._places[key], tensor.to_local().detach()

    def _of_slices(self, name: str, tensor: DTensor) -> TensorPlacement:
        from ..runtime.distributed.dtensors import layout_of  # noqa: PLC0415  imports DTensor, a second

        mesh = tensor.device_mesh
        layout = Layout.replicated(1, tensor.dim()) if mesh.size() == 1 else layout_of(tensor)
        if layout is None:
            raise CheckpointError(
                f"a DTensor that another library made: {tensor.placements} on {mesh}",
                source=name,
                legal="a model that shardwright alone has distributed",
            )
        first = int(mesh.mesh.min())
        rank_in_layout = self.ranks.rank - first
        holders = tuple(first + r for r in group_of(rank_in_layout, layout.replicas))
        return TensorPlacement(
            tuple(tensor.shape), layout, first, False, true_slice(layout, tensor.shape, rank_in_layout), holders
        )

    def _apart(self, tensor: Tensor) -> bool:
        """True where each rank has its own value here, not stacked."""
        return self.ranks.world > 1 and is_own(tensor) and stacked(tensor) is None

    def _layout_of(self, name: str, tensor: Tensor) -> tuple[Layout | None, int, bool]:
        """Layout, first rank and ``per_rank`` flag of a tensor that is whole here, as the plan has them."""
        stacked_devices = stacked(tensor)
        if stacked_devices is not None:
            return Layout.of(stacked_devices, ((Digit(stacked_devices, 1),),) + ((),) * (tensor.dim() - 1)), 0, True
        planned = self.plan.parameters.get(self.parameter_name(name)) if self.plan is not None else None
        if planned is None:
            return None, 0, False
        ranks = getattr(planned, "ranks", None)
        return planned.storage.without_partial(), 0 if ranks is None else ranks.start, False


class Resumable(Protocol):
    """An object that a run continues with: a scheduler, or the position in the data."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: object, /) -> object: ...


# -- optimizers --------------------------------------------------------------------------------------------------------


def state_names(subject: CheckpointedModel, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Parameter of an optimizer -> its name in the model.

    Raises:
        CheckpointError: a parameter that is not the model's.
    """
    names = {tensor: name for name, tensor in subject.tensors.items()}
    out = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"{type(optimizer).__name__} has in group {number} a parameter of shape "
                    f"{tuple(parameter.shape)} that is none of the model's",
                    source="the optimizer",
                    legal="an optimizer of model.parameters()",
                )
            out[parameter] = names[parameter]
    return out


def optimizer_state(
    subject: CheckpointedModel, optimizer: torch.optim.Optimizer
) -> tuple[list[LocalTensor], dict[str, dict[str, object]]]:
    """The state of an optimizer: its tensors, and parameter -> key -> value for everything that is not a tensor.

    Raises:
        CheckpointError: a tensor whose placement is unknown.
    """
    names = state_names(subject, optimizer)
    tensors: list[LocalTensor] = []
    scalars: dict[str, dict[str, object]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
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
                    scalars.setdefault(name, {})[key] = value
    return tensors, scalars


def _state(
    subject: CheckpointedModel, called: str, value: Tensor, parameter: Tensor, place: TensorPlacement
) -> LocalTensor:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  a second to import

    dtype = dtype_name(value.dtype)
    if isinstance(value, DTensor):
        return LocalTensor(called, dtype, *subject.place_of(called, value, None), value)
    if value.shape == parameter.shape and value.dim() and not isinstance(parameter, DTensor):
        stacks = place.per_rank and subject.ranks.world > 1
        return LocalTensor(called, dtype, place, value.detach().unsqueeze(0) if stacks else value.detach(), value)
    if value.dim() and isinstance(parameter, DTensor):
        raise CheckpointError(
            f"a plain tensor of shape {tuple(value.shape)}, of a parameter that is cut: its placement is unknown",
            source=called,
            legal="an optimizer whose state is made by torch.zeros_like",
        )
    if place.per_rank and subject.ranks.world > 1 and value.dim():
        raise CheckpointError(
            f"a tensor of shape {tuple(value.shape)}, of a parameter that is each rank's own",
            source=called,
            legal="a state of the parameter's shape",
        )
    devices = place.layout.devices if place.layout is not None else None
    layout = Layout.replicated(devices, value.dim()) if devices is not None else None
    return LocalTensor(called, dtype, *subject.place_of(called, value, layout, place.first), value)


# -- random numbers of a process ---------------------------------------------------------------------------------------


def generators() -> dict[str, Any]:
    """The current random states of this process, by generator."""
    state = {
        "stream": stream.state_dict(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }
    return state | random_states()


def restore_generators(state: dict[str, Any]) -> None:
    """Set the random states that `generators` has returned; a generator without an entry keeps its state."""
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    set_random_states(state)
    if "torch" in state:
        torch.set_rng_state(_tensor(state["torch"]))
    if "stream" in state:
        # The stream belongs to the seed of torch's generator, and loading it draws a number there: so torch's generator
        # is set both before and after.
        before = torch.get_rng_state()
        stream.load_state_dict(state["stream"])
        if "torch" in state:
            torch.set_rng_state(before)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# -- state.json


STATE = "state.json"

_LEGAL = "a checkpoint that is whole"

#: Settings of torch's optimizers and of what schedulers add to them -> the bounds of their numbers.
_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("lr", "initial_lr", "max_lr", "min_lr"), (0, math.inf)),
    **dict.fromkeys(("eps", "weight_decay", "momentum", "lr_decay", "lambd", "t0", "momentum_decay"), (0, math.inf)),
    **dict.fromkeys(("etas", "step_sizes", "base_momentum", "max_momentum", "rho"), (0, math.inf)),
    "betas": (0, 1),
}


def state_text(save_id: str, state: Mapping[str, object], source: str) -> bytes:
    """The text of ``state.json``, one member a line, its id first.

    Raises:
        CheckpointError: a value that could not be read again, with its place: an integer of too many digits, a text
            that is no Unicode, values that are nested too deep.
    """
    members = {"id": save_id, **state}
    parse(
        json.dumps(members), CheckpointError, "the state to be saved", source, "values that JSON can hold", lines=False
    )
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in members.items())
    return ("{" + ",\n ".join(lines) + "}\n").encode()


def read_state(folder: Path, manifest: Manifest, text: str | None = None) -> dict[str, Any]:
    """The state of a checkpoint.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        text: the text of the file, where it is not in the folder.

    Raises:
        CheckpointError: it cannot be read, or a value has another type; with its place.
    """
    path, name = folder / STATE, "the state of the run"
    state = (
        read_object(path, CheckpointError, name, _LEGAL)[1]
        if text is None
        else parse(text, CheckpointError, name, str(path), _LEGAL)
    )

    def check(good: bool, place: str, value: object, legal: str) -> None:
        if not good:
            raise CheckpointError(f"the state of the run: {place} is {shown(value)}", source=str(path), legal=legal)

    def texts(value: object) -> bool:
        return isinstance(value, list) and all(isinstance(text, str) for text in value)

    state = {
        "extra": None,
        "optimizer": None,
        "schedulers": [],
        "modules": {},
        "tied": {},
        "random": None,
        "data": None,
    } | state
    check(state.get("id") == manifest.id, "id", state.get("id"), f'the id of the manifest, "{manifest.id}"')
    check(
        type(state.get("step")) is int and state["step"] == manifest.step,
        "step",
        state.get("step"),
        f"the step of the manifest, {manifest.step}",
    )
    for key in ("modules", "tied"):
        check(isinstance(state[key], dict), key, state[key], "an object")
    for alias, name in state["tied"].items():
        check(isinstance(name, str), f"tied[{alias!r}]", name, "the name of a tensor")
    check(isinstance(state["schedulers"], list), "schedulers", state["schedulers"], "a list")
    for number, entry in enumerate(state["schedulers"]):
        good = isinstance(entry, dict) and isinstance(entry.get("kind"), str) and "state" in entry
        check(good, f"schedulers[{number}]", entry, '{"kind": "StepLR", "state": …}')
    optimizer = state["optimizer"]
    if optimizer is not None:
        good = isinstance(optimizer, dict) and isinstance(optimizer.get("kind"), str)
        check(good and isinstance(optimizer.get("groups"), list), "optimizer", optimizer, '{"kind": …, "groups": […]}')
        for number, group in enumerate(optimizer["groups"]):
            good = isinstance(group, dict) and texts(group.get("parameters")) and "settings" in group
            check(good, f"optimizer.groups[{number}]", group, '{"parameters": […], "settings": {…}}')
        scalars = optimizer.setdefault("scalars", {})
        good = isinstance(scalars, dict) and all(isinstance(settings, dict) for settings in scalars.values())
        check(good, "optimizer.scalars", scalars, "an object of objects")
    for key in ("random", "data"):
        entry = state[key]
        if entry is None:
            continue
        good = isinstance(entry, dict) and all(isinstance(entry.get(name), list) for name in ("ranks", "states"))
        check(good, key, entry, '{"ranks": [0, …], "states": [{…}, …]}')
        numbers, states = entry["ranks"], entry["states"]
        good = bool(numbers) and all(type(i) is int and 0 <= i < len(states) for i in numbers)
        check(good, f"{key}.ranks", numbers, f"for each rank the number of a state, below {len(states)}")
        good = all(isinstance(entry_state, dict) if key == "random" else True for entry_state in states)
        check(good, f"{key}.states", states, "a list of objects")
    return state


def value_of(encoded: object, place: str, folder: Path) -> Any:
    """A value of the state.

    Args:
        encoded: the value as it is written.
        place: its place in the file, for errors.
        folder: the checkpoint.

    Raises:
        CheckpointError: no such value is ever written.
    """
    try:
        return decode(encoded)
    except ValueError as error:
        raise CheckpointError(
            f"the state of the run: {place} cannot be read: {error}", source=str(folder / STATE), legal=_LEGAL
        ) from None


# -- settings of an optimizer ------------------------------------------------------------------------------------------


def check_settings(present: Mapping[str, object], saved: object, number: int, folder: Path) -> dict[str, object]:
    """The saved settings of a parameter group, with the types and bounds of the present ones.

    Args:
        present: the parameter group.
        saved: the saved settings.
        number: the number of the group.
        folder: the checkpoint.

    Raises:
        CheckpointError: a setting of another kind, or out of its bounds.
    """

    def wrong(key: str, value: object, legal: str) -> NoReturn:
        raise CheckpointError(
            f"the optimizer's group {number}: {key} is {shown(value)}", source=str(folder / STATE), legal=legal
        )

    if not isinstance(saved, dict) or not all(isinstance(key, str) for key in saved):
        wrong("settings", saved, "an object")
    for key, value in saved.items():
        if key == "params":
            wrong(key, value, "settings alone")
        lost = value is None and key in _BOUNDS and present.get(key) is not None
        if key in present and (lost or not _alike(present[key], value)):
            wrong(key, value, f"a value like that of the optimizer, {shown(present[key])}")
        low, high = _BOUNDS.get(key, (-math.inf, math.inf))
        for x in _numbers(value):
            if key in _BOUNDS and not (low <= x <= high and math.isfinite(x)):
                wrong(key, value, f"a number from {low}" + (f" to {high}" if high < math.inf else ""))
            if key in _BOUNDS and isinstance(x, bool):
                wrong(key, value, "a number")
    return saved


def _alike(one: object, other: object) -> bool:
    """True where a setting may take the place of another."""
    if one is None or other is None:
        return True
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return _kind(one) == _kind(other)


def _kind(value: object) -> object:
    if isinstance(value, (bool, np.bool_)):
        return bool
    return Number if isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1) else type(value)


def _numbers(value: object) -> Sequence[Any]:
    """The numbers of a setting: itself, or those of a list."""
    if isinstance(value, (list, tuple)):
        return [x for entry in value for x in _numbers(entry)]
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return [value.item()]
    return [value] if isinstance(value, (int, float)) else []


# -- random states -----------------------------------------------------------------------------------------------------


def check_generators(state: Mapping[str, object], folder: Path) -> None:
    """Check that the random states can be set, on generators of their own.

    Raises:
        CheckpointError: a state that its generator does not take.
    """
    tries = {
        "python": lambda value: random.Random().setstate(value),
        "numpy": lambda value: np.random.RandomState().set_state(value),
        "torch": lambda value: torch.Generator().set_state(torch.frombuffer(bytearray(value), dtype=torch.uint8)),
        "stream": _check_stream,
    }
    for key, value in state.items():
        try:
            if key in tries:
                tries[key](value)
            elif not isinstance(value, bytes):
                raise TypeError(f"it is {kind_of(value)}")
        except Exception as error:  # of any kind: each generator has its own
            raise CheckpointError(
                f"the state of the run: random[{key!r}] cannot be set: {type(error).__name__}: {error}",
                source=str(folder / STATE),
                legal=_LEGAL,
            ) from None


def _check_stream(stream: Any) -> None:
    seed, calls = stream["seed"], stream["calls"]
    if type(seed) is not int or type(calls) is not int or not -(1 << 63) <= seed < 1 << 64 or not 0 <= calls < 1 << 63:
        raise ValueError(f"{shown(stream)} is no seed with a number of calls")

"""Stored tensors into a model and its optimizer: which is which, whether they fit, and each rank's slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .reading import Stored
from .state import Place, Subject, state_names
from .words import dtype_of, from_words, word_of

__all__ = ["Filling"]

#: What torch's optimizers keep beside tensors of the parameter's shape, even where that has no dims.
_NUMBERS = ("step", "mu_product", "eta", "mu")


class Filling:
    """Which stored tensor goes where.

    Args:
        strict: whether names must be the same, and dtypes where we have saved them: a Hugging Face folder may hold more, of
            other floating-point dtypes.
        state: the other things that were saved.

    Raises:
        CheckpointError: of another model: names, shapes or dtypes, those that differ.
    """

    def __init__(self, subject: Subject, stored: Stored, strict: bool, state: Mapping[str, Any]) -> None:
        self.subject, self.stored, self.state = subject, stored, state
        self.tied: dict[str, str] = dict(state.get("tied", {}))
        source, own = str(stored.folder), stored.manifest is not None
        if subject.wrapper is None and subject.unborn is not None:
            raise CheckpointError(f"the model's {_bare(subject.unborn)!r} has no memory to load into", source=source,
                                  legal="an AutoParallel of it, or a module that is not on the meta device")
        known = [n for n in stored.names if not n.startswith("optimizer.")]
        self.sources: dict[str, str] = {}  # a tensor's name here -> its name there
        called: dict[str, list[str]] = {name: [name] for name in subject.tensors}
        for alias, name in subject.aliases.items():
            called[name].append(alias)
        for name, names in called.items():
            there = next((n for n in names if n in known), None) or next((self.tied[n] for n in names if n in self.tied), None)
            if there is not None:
                self.sources[name] = there
        missing = [name for name in subject.tensors if name not in self.sources]
        expected = {n for names in called.values() for n in names} | set(self.sources.values())
        extra = [n for n in known if n not in expected]
        if missing and (strict or not self.sources):
            raise CheckpointError(f"a checkpoint of another model: it has no {_listed(missing)}"
                                  + (f", and has {_listed(extra)}" if extra else ""), source=source,
                                  legal="the model that was saved, or strict=False for what they have in common")
        if extra and strict and own:
            raise CheckpointError(f"a checkpoint of another model: it has {_listed(extra)}, which the model does not",
                                  source=source, legal="the model that was saved, or strict=False")
        for name, there in self.sources.items():
            shape, dtype = stored.shape(there), stored.entries[there].dtype
            if shape != subject.shape(name):
                words = stored.entries[there].layout or {}
                what = f"the slices of {shape[0]} ranks, each its own" if words.get("own") else f"of shape {shape}"
                raise CheckpointError(f"a checkpoint of another model: its {_bare(there)!r} is {what}, the model's is "
                                      f"{subject.shape(name)}", source=source, legal="a model of the same shapes")
            mine = word_of(subject.tensors[name].dtype)
            if dtype != mine and (strict and own or not _alike(dtype, mine)):
                raise CheckpointError(f"its {_bare(there)!r} is {dtype}, the model's is {mine}", source=source,
                                      legal="a model of the same dtypes" + (", or strict=False, which converts"
                                                                           if _alike(dtype, mine) else ""))
        self._states: dict[str, list[str]] = {}  # a parameter's name there -> the keys of its state
        for name in stored.names:
            if name.startswith("optimizer."):
                parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
                self._states.setdefault(parameter, []).append(key)

    def name_here(self, there: str) -> str:
        """What the model calls a tensor that is stored under a name."""
        there = self.tied.get(there, there)
        return next((name for name, source in self.sources.items() if source == there), there)

    def into(self, optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
        """What takes the values, once the parameters are what they will be; all ranks call it at the same time."""
        def take() -> None:
            error: Exception | None = None
            subject = Subject(self.subject.wrapper or self.subject.net, self.subject.ranks)
            try:
                with self.stored, torch.no_grad():
                    for held in subject.held():
                        if held.name in self.sources and held.local is not None:
                            self._fill(held.local, self.sources[held.name], held.place)
                    if optimizer is not None:
                        self._fill_state(subject, optimizer)
            except Exception as raised:  # the others have to hear of it
                error = raised
            subject.ranks.agreed(error)
        return take

    def _fill(self, local: Tensor, name: str, place: Place) -> None:
        self.stored.read_into(local, name, place.box)
        torch.autograd.graph.increment_version(local)

    def _fill_state(self, subject: Subject, optimizer: torch.optim.Optimizer) -> None:
        scalars = self.state["optimizer"]["scalars"]
        names = state_names(subject, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                here = names[id(parameter)]
                there = self.sources.get(here)
                place, local = subject.placed(here, parameter)
                if local is None or there is None:
                    continue
                called = there.removeprefix("model.")
                kept = optimizer.state.get(parameter, {})
                made = {key: self._state(f"optimizer.{called}.{key}", key, parameter, place, local, group, kept.get(key))
                        for key in self._states.get(called, ())}
                made |= {key: from_words(value) for key, value in scalars.get(there, {}).items()}
                if made:
                    optimizer.state[parameter] = made
                else:
                    optimizer.state.pop(parameter, None)

    def _state(self, name: str, key: str, parameter: Tensor, place: Place, local: Tensor, group: Mapping[str, Any],
               kept: Any) -> Tensor:
        """A tensor of an optimizer's state: as the parameter lies, where it has its shape; in the memory of the one that is
        there, `kept`, where it fits."""
        from torch.distributed.tensor import DTensor  # a second to import, and of use to processes alone
        shape, dtype = self.stored.shape(name), self.stored.dtype(name)
        if not shape and (place.shape or key in _NUMBERS):
            steps = key == "step" and not (group.get("fused") or group.get("capturable"))  # as torch's own loading has it
            made = torch.empty((), dtype=dtype, device="cpu" if steps else local.device)
            self.stored.read_into(made, name)
            return made
        if shape == place.shape:
            if _as_it_lies(kept, parameter, dtype):
                self._fill(kept.to_local() if isinstance(kept, DTensor) else kept.view(local.shape), name, place)
                return kept
            made = torch.empty_like(local, dtype=dtype, memory_format=torch.contiguous_format)
            self.stored.read_into(made, name, place.box)
            if isinstance(parameter, DTensor):
                return DTensor.from_local(made, parameter.device_mesh, parameter.placements, run_check=False,
                                          shape=parameter.shape, stride=parameter.stride())
            return made.view(parameter.shape)
        made = self.stored.read(name).to(local.device)
        if isinstance(parameter, DTensor):
            from torch.distributed.tensor import Replicate
            return DTensor.from_local(made, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False)
        return made


def _as_it_lies(kept: Any, parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether a value of an optimizer's state is a tensor of this dtype that lies as its parameter does, in memory without
    gaps: fresh memory takes longer than the reading."""
    from torch.distributed.tensor import DTensor
    if not isinstance(kept, Tensor) or isinstance(kept, DTensor) != isinstance(parameter, DTensor):
        return False
    if isinstance(kept, DTensor):
        if (kept.device_mesh, kept.placements) != (parameter.device_mesh, parameter.placements):
            return False
        local = kept.to_local(), parameter.to_local()
    else:
        local = kept, parameter
    return local[0].shape == local[1].shape and kept.shape == parameter.shape and local[0].is_contiguous() and \
        (kept.dtype, kept.device, kept.layout) == (dtype, parameter.device, torch.strided) and not kept.requires_grad and \
        local[0].data_ptr() != local[1].data_ptr()


def _bare(name: str) -> str:
    return name.removeprefix("model.")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(repr(_bare(n)) for n in names[:4]) + more


def _alike(one: str, other: str) -> bool:
    """Whether values of one dtype become another's as plain torch does it silently."""
    a, b = dtype_of(one), dtype_of(other)
    return a.is_floating_point and b.is_floating_point or a == b

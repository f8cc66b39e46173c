"""`load_checkpoint`: resume from a checkpoint under any plan and on any number of devices.

    folders, manifest, a share of all bytes ── agree ── names, shapes ── agree ── settings, random state, … ── slices

Each rank finds the folders that it sees (`stored_checkpoint`), checks the manifest and its share of the bytes, then
names and shapes. It restores settings and random state, and reads its slices. Nothing is changed before all ranks have
found everything sound.

`LoadPlan` matches stored tensors with the tensors of a model and its optimizer, checks that they fit, and reads each
rank's slices. The slices are read at once where the parameters have their final form. A model that is still to be cut
into slices reads them at the end of its first planning (`AutoParallel._awaited`).

Example: 8 ranks have saved ``fc.weight`` [32, 16] as slices [4, 16]. A run on 2 devices, whose plan cuts dim 0 2 ways,
has slices [16, 16]: rank 0 reads the first 4 stored slices, rank 1 the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, shown
from ..json_files.json_values import dtype_name, dtype_named
from ..launch.progress import each, phase
from ..runtime.deferred_init import filled_later
from ..runtime.distributed.rank_messages import ProcessRanks, SingleRank, ranks_of_now
from .run_state import (
    STATE,
    CheckpointedModel,
    Resumable,
    TensorPlacement,
    check_generators,
    check_settings,
    read_state,
    restore_generators,
    state_names,
    value_of,
)
from .save import several, wait_for_last
from .stored_checkpoint import SeenCheckpoint, StoredTensors, fetch, seen_by_all

__all__ = ["LoadPlan", "Restored", "load_checkpoint"]


# -- stored tensors into a model and its optimizer --

#: Keys of scalars in the state of torch's optimizers: never read as a tensor of the parameter's shape, even where the
#: parameter has no dims.
_NUMBERS = ("step", "mu_product", "eta", "mu")


class LoadPlan:
    """The stored tensor of each tensor of a model and its optimizer.

    Args:
        subject: the model.
        stored: the tensors of the checkpoint.
        strict: names must be the same, and dtypes too where Shardwright has saved them: a Hugging Face folder may
            hold more tensors, and other floating-point dtypes.
        state: the saved values other than tensors (``state.json``).

    Raises:
        CheckpointError: a checkpoint of another model, with the names, shapes or dtypes that differ.
    """

    def __init__(
        self, subject: CheckpointedModel, stored: StoredTensors, strict: bool, state: Mapping[str, Any]
    ) -> None:
        self.subject, self.stored, self.state = subject, stored, state
        self.tied: dict[str, str] = dict(state.get("tied", {}))
        source, ours = str(stored.folder), stored.manifest is not None
        if subject.wrapper is None and subject.unborn is not None:
            raise CheckpointError(
                f"the model's {_bare(subject.unborn)!r} has no memory to load into",
                source=source,
                legal="an AutoParallel of it, or a module that is not on the meta device",
            )
        known = [n for n in stored.names if not n.startswith("optimizer.")]
        self.sources: dict[str, str] = {}  # name in the model -> name in the checkpoint
        called: dict[str, list[str]] = {name: [name] for name in subject.tensors}
        for alias, name in subject.aliases.items():
            called[name].append(alias)
        for name, names in called.items():
            stored_name = next((n for n in names if n in known), None) or next(
                (self.tied[n] for n in names if n in self.tied), None
            )
            if stored_name is not None:
                self.sources[name] = stored_name
        missing = [name for name in subject.tensors if name not in self.sources]
        expected = {n for names in called.values() for n in names} | set(self.sources.values())
        extra = [n for n in known if n not in expected]
        if missing and (strict or not self.sources):
            raise CheckpointError(
                f"a checkpoint of another model: it has no {_listed(missing)}"
                + (f", and has {_listed(extra)}" if extra else ""),
                source=source,
                legal="the model that was saved, or strict=False for what they have in common",
            )
        if extra and strict and ours:
            raise CheckpointError(
                f"a checkpoint of another model: it has {_listed(extra)}, which the model does not",
                source=source,
                legal="the model that was saved, or strict=False",
            )
        for name, stored_name in self.sources.items():
            shape, dtype = stored.shape(stored_name), stored.entries[stored_name].dtype
            if shape != subject.shape(name):
                encoded = stored.entries[stored_name].layout or {}
                what = f"the slices of {shape[0]} ranks, each its own" if encoded.get("own") else f"of shape {shape}"
                raise CheckpointError(
                    f"a checkpoint of another model: its {_bare(stored_name)!r} is {what}, the model's is "
                    f"{subject.shape(name)}",
                    source=source,
                    legal="a model of the same shapes",
                )
            mine = dtype_name(subject.tensors[name].dtype)
            if dtype != mine and ((strict and ours) or not _alike(dtype, mine)):
                raise CheckpointError(
                    f"its {_bare(stored_name)!r} is {dtype}, the model's is {mine}",
                    source=source,
                    legal="a model of the same dtypes"
                    + (", or strict=False, which converts" if _alike(dtype, mine) else ""),
                )
        self._states: dict[str, list[str]] = {}  # parameter's name in the checkpoint -> keys of its state
        for name in stored.names:
            if name.startswith("optimizer."):
                parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
                self._states.setdefault(parameter, []).append(key)

    def name_in_model(self, stored_name: str) -> str:
        """The name in the model of a stored tensor."""
        stored_name = self.tied.get(stored_name, stored_name)
        return next((name for name, source in self.sources.items() if source == stored_name), stored_name)

    def into(self, optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
        """A function that reads the values.

        All ranks call it together, once the parameters have their final form.
        """

        def take() -> None:
            error: Exception | None = None
            subject = CheckpointedModel(self.subject.wrapper or self.subject.net, self.subject.ranks)
            try:
                with self.stored, torch.no_grad():
                    for tensor in each(
                        subject.local_tensors(), "load of a checkpoint", "tensors", len(subject.tensors)
                    ):
                        if tensor.name in self.sources and tensor.local is not None:
                            self._fill(tensor.local, self.sources[tensor.name], tensor.place)
                    if optimizer is not None:
                        self._fill_state(subject, optimizer)
            except Exception as raised:  # agreed on below, so that all ranks raise it
                error = raised
            subject.ranks.agreed(error)
            if self.stored.served:  # the same on all ranks
                try:
                    with self.stored, torch.no_grad():
                        fetch(self.stored, cast(ProcessRanks, subject.ranks))
                except Exception as raised:  # agreed on below, so that all ranks raise it
                    error = raised
                subject.ranks.agreed(error)

        return take

    def _fill(self, local: Tensor, name: str, place: TensorPlacement) -> None:
        self.stored.read_into(local, name, place.box)
        torch.autograd.graph.increment_version(local)

    def _fill_state(self, subject: CheckpointedModel, optimizer: torch.optim.Optimizer) -> None:
        scalars, folder = self.state["optimizer"]["scalars"], self.stored.folder
        names = state_names(subject, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                own_name = names[parameter]
                stored_name = self.sources.get(own_name)
                place, local = subject.placed(own_name, parameter)
                if local is None or stored_name is None:
                    continue
                called = stored_name.removeprefix("model.")
                present = optimizer.state.get(parameter, {})
                made = {
                    key: self._state(f"optimizer.{called}.{key}", key, parameter, place, local, group, present.get(key))
                    for key in self._states.get(called, ())
                }
                made |= {
                    key: value_of(value, f"optimizer.scalars[{stored_name!r}]", folder)
                    for key, value in scalars.get(stored_name, {}).items()
                }
                if made:
                    optimizer.state[parameter] = made
                else:
                    optimizer.state.pop(parameter, None)

    def _state(
        self,
        name: str,
        key: str,
        parameter: Tensor,
        place: TensorPlacement,
        local: Tensor,
        group: Mapping[str, object],
        present: Any,
    ) -> Tensor:
        """A tensor of an optimizer's state, placed as its parameter where it has the parameter's shape.

        The memory of the present state, `present`, is reused where it fits.
        """
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  a second to import, useful to processes alone

        shape, dtype = self.stored.shape(name), self.stored.dtype(name)
        if not shape and (place.shape or key in _NUMBERS):
            steps = key == "step" and not (
                group.get("fused") or group.get("capturable")
            )  # torch's own loading places it the same way
            made = torch.empty((), dtype=dtype, device="cpu" if steps else local.device)
            self.stored.read_into(made, name)
            return made
        if shape == place.shape:
            if _as_it_lies(present, parameter, dtype):
                self._fill(
                    present.to_local() if isinstance(present, DTensor) else present.view(local.shape), name, place
                )
                return present
            made = torch.empty_like(local, dtype=dtype, memory_format=torch.contiguous_format)
            self.stored.read_into(made, name, place.box)
            if isinstance(parameter, DTensor):
                return DTensor.from_local(
                    made,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            return made.view(parameter.shape)
        made = torch.empty(shape, dtype=dtype, device=local.device)
        self.stored.read_into(made, name)
        if isinstance(parameter, DTensor):
            from torch.distributed.tensor import Replicate  # noqa: PLC0415  a second to import

            return DTensor.from_local(
                made, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False
            )
        return made


def _as_it_lies(present: object, parameter: Tensor, dtype: torch.dtype) -> bool:
    """True where `present` is a tensor of this dtype, placed as its parameter, in contiguous memory of its own.

    Its memory is then reused: allocating fresh memory takes longer than the reading.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  a second to import

    if not isinstance(present, Tensor) or isinstance(present, DTensor) != isinstance(parameter, DTensor):
        return False
    if isinstance(present, DTensor):
        assert isinstance(parameter, DTensor)
        if (present.device_mesh, present.placements) != (parameter.device_mesh, parameter.placements):
            return False
        local = present.to_local(), parameter.to_local()
    else:
        local = present, parameter
    return (
        local[0].shape == local[1].shape
        and present.shape == parameter.shape
        and local[0].is_contiguous()
        and (present.dtype, present.device, present.layout) == (dtype, parameter.device, torch.strided)
        and not present.requires_grad
        and local[0].data_ptr() != local[1].data_ptr()
    )


def _bare(name: str) -> str:
    return name.removeprefix("model.")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(repr(_bare(n)) for n in names[:4]) + more


def _alike(one: str, other: str) -> bool:
    """True where plain torch converts values of one dtype to the other silently."""
    a, b = dtype_named(one), dtype_named(other)
    return (a.is_floating_point and b.is_floating_point) or a == b


@dataclass(frozen=True)
class Restored:
    """The result of a load.

    Attributes:
        step: the step of the run; None for a Hugging Face folder.
        extra: the ``extra`` value that was saved.
        path: the checkpoint's folder.

    Example:
        >>> saving = sw.save_checkpoint(model, optimizer, "runs/7", step=3, extra={"seed": 5})
        >>> restored = sw.load_checkpoint(model, optimizer, "runs/7")
        >>> restored.step, restored.extra
        (3, {'seed': 5})
    """

    step: int | None
    extra: object
    path: Path


@phase("load of a checkpoint")
def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    step: int | None = None,
    schedulers: object = (),
    data: object = None,
    strict: bool = True,
    missing_ok: bool = False,
) -> Restored | None:
    """Load a checkpoint, with several processes on every rank.

    The plan, the number of devices and the pipeline stages may differ from those of the save, and the model may be a
    plain module. Each rank reads its own slices only, besides its share of the check for damage.

    The usual call comes before the first call of the model. It restores settings, schedulers, random state and data
    position at once; each rank reads its slices when the model's first call has planned them. Under the plan of the
    save, the run then continues bit for bit as it would have.

    Args:
        model: the `AutoParallel`, or a module.
        optimizer: an optimizer of the kind and groups that were saved; None: its state is not loaded.
        path: the folder of a run, or of one checkpoint; or of a Hugging Face model (``model.safetensors``, or shards
            with an index), which is loaded into `model` alone, converted to its dtypes. Ranks may give paths of their
            own: each reads what it sees, and other ranks send it the rest.
        step: the step to load; None: the highest.
        schedulers, data: see `save_checkpoint`. Data positions that differ between ranks need the number of ranks of
            the save. Random states that differ between ranks need it too; with another number of ranks they stay as
            they are.
        strict: names and dtypes must be those of the model; otherwise the tensors in common are loaded, and
            converted.
        missing_ok: return None where `path` has no checkpoint. A warning names a folder inside of it that has one.

    Returns:
        The step, the ``extra`` value and the folder; None where `missing_ok` is set and there is no checkpoint.

    Raises:
        CheckpointError: no such checkpoint, with the steps that exist; a damaged or mixed-up file, with its name;
            another model, with the names and shapes; another optimizer; ranks that have different checkpoints, with
            both folders. Raised on every rank alike, before anything is changed.

    Example:
        >>> saving = sw.save_checkpoint(model, optimizer, "runs/7", step=3)
        >>> sw.load_checkpoint(model, optimizer, "runs/7").step
        3
    """
    ranks = ranks_of_now()
    wait_for_last()
    seen = seen_by_all(path, step, missing_ok, ranks)
    if seen is None:
        return None
    loaded, error = None, None
    try:
        loaded = _Loaded(
            seen,
            CheckpointedModel(model, ranks),
            optimizer,
            several(schedulers),
            cast("Resumable | None", data),
            strict,
        )
    except Exception as raised:  # agreed on below, so that all ranks raise it
        error = raised
    ranks.agreed(error)
    assert loaded is not None  # agreed raises where this rank has an error
    try:
        loaded.restore()
    except Exception as raised:  # from a scheduler or a sampler
        error = raised
    ranks.agreed(error)
    loaded.fill()
    return Restored(loaded.step, loaded.extra, seen.folder)


class _Loaded:
    """A checkpoint that all ranks have found sound, and that fits this rank's model.

    Raises:
        CheckpointError: the checkpoint does not fit.
    """

    def __init__(
        self,
        seen: SeenCheckpoint,
        subject: CheckpointedModel,
        optimizer: torch.optim.Optimizer | None,
        schedulers: Sequence[Resumable],
        data: Resumable | None,
        strict: bool,
    ) -> None:
        self.stored, self.folder = seen.stored, seen.folder
        self.subject, self.optimizer = subject, optimizer
        self.schedulers, self.data = schedulers, data
        ranks = subject.ranks
        manifest = self.stored.manifest
        if manifest is None:
            self.step, self.state, self.extra = None, {}, None
        else:
            self.step = manifest.step
            self.state = read_state(self.folder, manifest, seen.state)
            self.extra = value_of(self.state["extra"], "extra", self.folder)
        self.filling = LoadPlan(subject, self.stored, strict, self.state)
        self.groups = self._groups() if optimizer is not None else []
        self.scheduled = self._scheduled()
        self.position = self._of_rank("data", ranks) if data is not None else None
        if data is not None and self.position is None:
            self._wrong("it has no position in the data", "data=None")
        self.random = self._generators(ranks)
        check_generators(self.random, self.folder)
        self.modules = {
            name: value_of(encoded, f"modules[{name!r}]", self.folder)
            for name, encoded in self.state.get("modules", {}).items()
            if name in subject.extra
        }

    def restore(self) -> None:
        """Restore everything but tensors."""
        subject = self.subject
        for group, settings in self.groups:
            for key, value in settings.items():
                setting = group.get(key)
                if isinstance(setting, torch.Tensor) and isinstance(value, torch.Tensor):
                    setting.copy_(value)
                else:
                    group[key] = value
        for scheduler, state in zip(self.schedulers, self.scheduled):
            self._give(scheduler.load_state_dict, state, type(scheduler).__name__)
        if self.data is not None and self.position is not None:
            self._give(self.data.load_state_dict, self.position["state"], type(self.data).__name__)
        for name, value in self.modules.items():
            self._give(subject.extra[name].set_extra_state, value, name)
        restore_generators(self.random)

    def _give(self, take: Callable[[object], object], state: object, name: str) -> None:
        """Give an object of the user its state.

        Raises:
            CheckpointError: the object does not take it.
        """
        try:
            take(state)
        except Exception as error:  # of any kind: the object is the user's
            raise CheckpointError(
                f"{name} does not take the state that was saved: {type(error).__name__}: {error}",
                source=str(self.folder / STATE),
                legal="an object like the one that was saved",
            ) from error

    def fill(self) -> None:
        """Fill the tensors, at once or with the first call of the model."""
        subject, take = self.subject, self.filling.into(self.optimizer)
        if subject.waits:
            assert subject.wrapper is not None
            subject.wrapper._awaited[:] = [take]
            filled_later(subject.wrapper, (subject.tensors[name] for name in self.filling.sources))
        else:
            take()

    def _wrong(self, what: str, legal: str) -> NoReturn:
        raise CheckpointError(what, source=str(self.folder), legal=legal)

    def _groups(self) -> list[tuple[dict[str, object], dict[str, object]]]:
        """Each of the optimizer's parameter groups, with the saved settings.

        Raises:
            CheckpointError: another kind of optimizer, or other groups.
        """
        assert self.optimizer is not None
        saved, kind = self.state.get("optimizer"), type(self.optimizer).__name__
        if saved is None:
            self._wrong(f"it has no state of an optimizer, and the {kind} is to have one", "optimizer=None")
        if saved["kind"] != kind:
            keys = sorted({name.rpartition(".")[2] for name in self.stored.names if name.startswith("optimizer.")})
            self._wrong(
                f"it has the state of {saved['kind']} ({', '.join(keys) or 'none yet'}), and the optimizer is {kind}",
                f"{saved['kind']}, or optimizer=None",
            )
        names = state_names(self.subject, self.optimizer)
        mine = [[names[p] for p in group["params"]] for group in self.optimizer.param_groups]
        theirs = [[self.filling.name_in_model(n) for n in group["parameters"]] for group in saved["groups"]]
        if [sorted(g) for g in mine] != [sorted(g) for g in theirs]:
            differs = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs)) if sorted(a) != sorted(b)), min(len(mine), len(theirs))
            )
            own_names, stored_names = (set(g[differs]) if differs < len(g) else set() for g in (mine, theirs))
            odd = sorted(own_names ^ stored_names)[:3]
            self._wrong(
                f"its optimizer has {len(theirs)} groups of {[len(g) for g in theirs]} parameters, this one "
                f"{len(mine)} of {[len(g) for g in mine]}; group {differs} differs in {', '.join(odd)}",
                "the same groups",
            )
        made = []
        for number, (group, encoded) in enumerate(zip(self.optimizer.param_groups, saved["groups"])):
            settings = value_of(encoded["settings"], f"optimizer.groups[{number}].settings", self.folder)
            made.append((group, check_settings(group, settings, number, self.folder)))
        return made

    def _scheduled(self) -> list[object]:
        """The saved states of the schedulers.

        Raises:
            CheckpointError: other schedulers were saved.
        """
        if not self.schedulers:
            return []
        saved = self.state.get("schedulers", [])
        mine, theirs = [type(s).__name__ for s in self.schedulers], [s["kind"] for s in saved]
        if mine != theirs:
            self._wrong(f"it has the schedulers {theirs}, and {mine} are to be restored", "the same, in the same order")
        return [value_of(s["state"], f"schedulers[{number}].state", self.folder) for number, s in enumerate(saved)]

    def _of_rank(self, key: str, ranks: SingleRank) -> Any:
        """The value of `key` that this rank saved; None where no rank saved one.

        Raises:
            CheckpointError: the ranks' values differ, and the number of ranks has changed.
        """
        saved = self.state.get(key)
        if saved is None:
            return None
        by_rank, states = saved["ranks"], saved["states"]
        if len(states) > 1 and len(by_rank) != ranks.world:
            self._wrong(
                f"the position in the data is each rank's own, of {len(by_rank)} ranks, and there are {ranks.world}",
                f"{len(by_rank)} ranks, or data=None",
            )
        saved_value = value_of(states[by_rank[ranks.rank] if len(states) > 1 else 0], key, self.folder)
        if not isinstance(saved_value, dict) or "state" not in saved_value:
            self._wrong(f"its {key} is {shown(saved_value)}", "a checkpoint that is whole")
        return saved_value

    def _generators(self, ranks: SingleRank) -> dict[str, object]:
        """The random states that this rank continues with."""
        saved = self.state.get("random")
        if saved is None:
            return {}
        states = saved["states"]
        if len(saved["ranks"]) == ranks.world:
            return value_of(states[saved["ranks"][ranks.rank]], "random", self.folder)
        common = {key: value for key, value in states[0].items() if all(s.get(key) == value for s in states)}
        return value_of(common, "random", self.folder)

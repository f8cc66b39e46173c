"""``state.json``: the state of a run other than its tensors, with the types and bounds that its values must have.

    id, step            of the save, as in the manifest
    extra               the user's values
    optimizer           null, or its kind, its groups (names of parameters, settings), and states that are no tensors
    schedulers          kind and state of each, in order
    modules             name -> the state of a module with ``get_extra_state``
    tied                further name of a tied tensor -> its first name
    random, data        of each rank, equal ones once: ``{"ranks": [0, 0, 1], "states": [...]}``

Values are spelt as in `json_values`. `read_state` checks everything before anything of it is used.

Settings of an optimizer (`check_settings`) have the kind of the setting that the optimizer has: a number, a truth
value, a text, or as many of these; one of both may be None. Numbers of the names in `_BOUNDS` lie within their bounds:

    saved lr 0.1, present lr 0.01: taken      "0.1", True, -0.1, infinite: an error that names group and setting
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError, shown
from ..json_files.json_reader import kind_of, parse, read_object
from ..json_files.json_values import decode
from .manifest import Manifest

__all__ = ["STATE", "check_generators", "check_settings", "read_state", "state_text", "value_of"]

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
        good = isinstance(scalars, dict) and all(isinstance(held, dict) for held in scalars.values())
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
        good = all(isinstance(held, dict) if key == "random" else True for held in states)
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
        return [x for inner in value for x in _numbers(inner)]
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
        "python": lambda held: random.Random().setstate(held),
        "numpy": lambda held: np.random.RandomState().set_state(held),
        "torch": lambda held: torch.Generator().set_state(torch.frombuffer(bytearray(held), dtype=torch.uint8)),
        "stream": _check_stream,
    }
    for key, held in state.items():
        try:
            if key in tries:
                tries[key](held)
            elif not isinstance(held, bytes):
                raise TypeError(f"it is {kind_of(held)}")
        except Exception as error:  # of any kind: each generator has its own
            raise CheckpointError(
                f"the state of the run: random[{key!r}] cannot be set: {type(error).__name__}: {error}",
                source=str(folder / STATE),
                legal=_LEGAL,
            ) from None


def _check_stream(held: Any) -> None:
    seed, calls = held["seed"], held["calls"]
    if type(seed) is not int or type(calls) is not int or not -(1 << 63) <= seed < 1 << 64 or not 0 <= calls < 1 << 63:
        raise ValueError(f"{shown(held)} is no seed with a number of calls")

"""Guards: the Python state for which a captured program is valid, checked before each call.

A captured program is valid while its model reads the state that it read during the capture. Guards record, of one
capture:

    structure   submodules, parameters and buffers of every module (identity), hooks, `training`, `requires_grad`
    reads       attributes of modules and of plain objects, class attributes, globals, closure cells (`observed_state`)
    contents    of lists, dicts and sets that were read

A check compares all of it by identity, in loops that run in C: 30 to 60 us for a GPT of 12 layers. Values are compared
only where an object is another one: ``5.0`` in place of an equal ``5.0`` is no change.

Worked example: a forward reads ``self.beta``, which is ``2.0``. The guard is (``vars(net)``, ``"beta"``, the object
2.0). After ``net.beta = 5.0`` both the object and the value are others; `Guards.change` says "net.beta was 2.0 and is
5.0".
"""

from __future__ import annotations

import collections
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

__all__ = ["CONTAINERS", "HOOKS", "MISSING", "TABLES", "GuardedPlace", "Guards", "contents", "is_simple", "spelled"]


class _Missing:
    """The value of an empty place."""

    def __repr__(self) -> str:
        return "missing"

    def __deepcopy__(self, memo: dict[int, object]) -> _Missing:
        return self


MISSING = _Missing()

#: The dicts of a module that hold its parts, and the dicts of hooks on which a captured program depends.
TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")

CONTAINERS = (list, dict, set, collections.deque)

_SIMPLE = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
    slice,
    Enum,
    type(Ellipsis),
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)

_class_get = types.MappingProxyType.get


def is_simple(value: Any) -> bool:
    """True for a value that cannot change in place: numbers, strings, dtypes, functions, classes, tuples of these."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_simple, value))
    return isinstance(value, (_SIMPLE, _FUNCTIONS))


@dataclass(frozen=True, eq=False)
class GuardedPlace:
    """A place in which Python keeps a value.

    Args:
        owner: a dict (attributes, globals, a user's dict), a closure's cell, a class, or an object with slots.
        key: the key of the dict, or the name of the attribute.
        path: the user's name for the place: ``net.blocks.0.beta``.
    """

    owner: Any
    key: Any
    path: str

    @property
    def identity(self) -> tuple[int, Any]:
        """A key that is equal for the same place. A dict of such keys holds the places too: they keep the ids alive."""
        return id(self.owner), self.key

    def get(self) -> Any:
        """The value of the place; `MISSING` where it is empty."""
        owner = self.owner
        if isinstance(owner, dict):
            return dict.get(owner, self.key, MISSING)  # not the `get` of a subclass of the user
        if isinstance(owner, types.CellType):
            try:
                return owner.cell_contents
            except ValueError:
                return MISSING
        if isinstance(owner, type):
            return owner.__dict__.get(self.key, MISSING)
        return getattr(owner, self.key, MISSING)

    def set(self, value: Any) -> None:
        """Set the value of the place; `MISSING` removes it."""
        owner = self.owner
        if isinstance(owner, dict):
            if value is MISSING:
                owner.pop(self.key, None)
            else:
                owner[self.key] = value
        elif isinstance(owner, types.CellType):
            if value is MISSING:
                del owner.cell_contents
            else:
                owner.cell_contents = value
        elif value is MISSING:
            delattr(owner, self.key)
        else:
            setattr(owner, self.key, value)


def contents(container: Any) -> tuple[object, ...]:
    """The entries of a container, as a tuple; for a dict its keys, then its values."""
    return (*dict.keys(container), *dict.values(container)) if isinstance(container, dict) else tuple(container)


def _entries(container: Any) -> tuple[object, ...]:
    """The keys of a dict, the entries of another container."""
    return tuple(dict.keys(container)) if isinstance(container, dict) else tuple(container)


def _identical(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def _same(old: Any, new: Any) -> bool:
    """True where two values mean the same to a program."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    return isinstance(old, (*_SIMPLE, frozenset)) and repr(old) == repr(new) and (old == new or old != old)


def spelled(value: Any) -> str:
    """The text of a value in a message: the value where it is simple, otherwise its kind."""
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (types.FunctionType, type)):
        return value.__qualname__
    text = repr(value) if is_simple(value) or value is MISSING else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


class Guards:
    """The Python state for which one captured program is valid.

    `settle` records the values of the places; the constructor calls it.

    Args:
        modules: the modules of the model and of its loss, by path.
        places: the places that the capture has read.
        around: ``id`` of one of `modules` -> its kinds of hooks that run around the program, and are not part of it.
        counters: identities of places whose number changes at each call; the effects of the program hold the places.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        places: Iterable[GuardedPlace],
        around: Mapping[int, tuple[str, ...]] | None = None,
        counters: Collection[tuple[int, Any]] = (),
    ) -> None:
        self._modules = list(modules)
        self._counters = counters
        self._places = [place for place in places if place.identity not in counters]
        self._around, self._copied = around or {}, False
        self.settle()

    def settle(self) -> None:
        """Record the present values of all places."""
        own = [vars(module) for _, module in self._modules]
        tables, paths = [], []
        for (path, module), attributes in zip(self._modules, own):
            around = self._around.get(id(module), ())
            for kind in (*TABLES, *(h for h in HOOKS if h not in around)):
                tables.append(attributes[kind])
                paths.append((path, kind))
        for kind in HOOKS:
            tables.append(getattr(nn.modules.module, f"_global{kind}"))  # private torch name
            paths.append(("the whole of torch.nn", kind))
        self._tables, self._paths = tables, paths
        self._lengths = list(map(len, tables))
        self._empty = [t for t in tables if not t]
        self._full = [t for t in tables if t]
        self._full_paths = [at for at, t in zip(paths, tables) if t]
        self._counts = list(map(len, self._full))
        self._members = list(chain.from_iterable(map(dict.values, self._full)))
        self._keys = [tuple(t) for t in self._full]
        self._parameters = [p for a in own for p in a["_parameters"].values() if p is not None]
        self._trained = list(map(_requires_grad, self._parameters))
        found = {
            place.identity: place
            for place in (
                *(
                    GuardedPlace(a, key, f"{path}.{key}")
                    for (path, _), a in zip(self._modules, own)
                    for key in ("training", "forward")
                ),
                *self._places,
            )
        }
        self._containers: list[tuple[Any, tuple[object, ...], str]] = []
        seen: set[int] = set()
        for place in list(found.values()):
            self._contain(place.get(), place.path, seen, found)
        places = found.values()
        self._dict_places = [p for p in places if type(p.owner) is dict]
        self._dicts, self._names = [p.owner for p in self._dict_places], [p.key for p in self._dict_places]
        self._values = [p.get() for p in self._dict_places]
        self._class_places = [p for p in places if isinstance(p.owner, type)]
        self._classes, self._class_names = (
            [p.owner.__dict__ for p in self._class_places],
            [p.key for p in self._class_places],
        )
        self._class_values = [p.get() for p in self._class_places]
        self._cell_places = [p for p in places if isinstance(p.owner, types.CellType)]
        self._cells = [p.owner for p in self._cell_places]
        self._cell_values = [p.get() for p in self._cell_places]
        self._others = [
            (p, p.get())
            for p in places
            if not isinstance(p.owner, (type, types.CellType)) and type(p.owner) is not dict
        ]

    def _contain(self, value: Any, path: str, seen: set[int], found: dict[tuple[int, Any], GuardedPlace]) -> None:
        """Guard the contents of a container: its entries, or the keys of a dict, with a place for each value."""
        if isinstance(value, tuple):
            held = value
        elif not isinstance(value, CONTAINERS) or id(value) in seen:
            return
        else:
            seen.add(id(value))
            held = _entries(value)
            self._containers.append((value, held, path))
            if isinstance(value, dict):
                places = [GuardedPlace(value, key, f"{path}[{key!r}]") for key in held]
                found.update((p.identity, p) for p in places if p.identity not in self._counters)
                held = tuple(dict.values(value))
        for entry in held:
            self._contain(entry, path, seen, found)

    def hold(self) -> bool:
        """True where no guarded value has changed."""
        return not self._copied and (self._unchanged() or self.change() is None)

    def _unchanged(self) -> bool:
        """True where every guarded object is identical to the recorded one."""
        try:
            return (
                all(map(is_, map(dict.get, self._dicts, self._names, repeat(MISSING)), self._values))
                and not any(self._empty)
                and list(map(len, self._full)) == self._counts
                and all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._members))
                and list(map(_requires_grad, self._parameters)) == self._trained
                and all(
                    map(is_, map(_class_get, self._classes, self._class_names, repeat(MISSING)), self._class_values)
                )
                and all(map(is_, map(_cell_contents, self._cells), self._cell_values))
                and all(_identical(_entries(held), was) for held, was, _ in self._containers)
                and all(place.get() is was for place, was in self._others)
            )
        except ValueError:  # an empty cell
            return False

    def change(self) -> str | None:
        """The first change, in words; None where no value has changed.

        Where None is returned, objects that replaced equal ones are recorded.
        """
        for (path, kind), table, length in zip(self._paths, self._tables, self._lengths):
            if len(table) != length:
                return f"{path} has {len(table)} {_KINDS[kind]} and had {length}"
        was = iter(self._members)
        for (path, kind), table, keys in zip(self._full_paths, self._full, self._keys):
            for (key, now), before in zip(table.items(), was):
                if now is not before:
                    return f"{path}.{key} is another one" if kind in TABLES else f"{path} has other {_KINDS[kind]}"
            if tuple(table) != keys:
                return f"{path} names its {_KINDS[kind]} differently"
        for parameter, before in zip(self._parameters, self._trained):
            if parameter.requires_grad is not before:
                return f"{self._name(parameter)}.requires_grad was {before} and is {parameter.requires_grad}"
        recorded = [
            *zip(self._dict_places, self._values),
            *zip(self._class_places, self._class_values),
            *zip(self._cell_places, self._cell_values),
            *self._others,
        ]
        for place, before in recorded:
            now = place.get()
            if not _same(before, now):
                if (is_simple(before) and is_simple(now)) or MISSING in (before, now):
                    return f"{place.path} was {spelled(before)} and is {spelled(now)}"
                return f"{place.path} is another object: {spelled(now)}"
        for held, before, path in self._containers:
            now = _entries(held)
            if len(before) != len(now) or not all(map(_same, before, now)):
                return f"{path} holds something else than it did"
        self._values = [p.get() for p in self._dict_places]
        self._class_values = [p.get() for p in self._class_places]
        self._cell_values = [p.get() for p in self._cell_places]
        self._others = [(p, p.get()) for p, _ in self._others]
        self._containers = [(held, _entries(held), path) for held, _, path in self._containers]
        return None

    def parts_changed(self) -> bool:
        """True where parameters, buffers or submodules of the model have been added, removed or replaced."""
        return (
            self._copied
            or list(map(len, self._tables)) != self._lengths
            or not all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._members))
        )

    def only_mode_changed(self) -> bool:
        """True where nothing but `training` and `requires_grad` has changed, a change that needs no message."""
        values, trained = self._values, self._trained
        self._values = [
            place.get() if place.key == "training" else value for place, value in zip(self._dict_places, values)
        ]
        self._trained = list(map(_requires_grad, self._parameters))
        try:
            return not self._copied and self.hold()
        finally:
            self._values, self._trained = values, trained

    def __deepcopy__(self, memo: dict[int, object]) -> Guards:
        """Guards of no model: a copied model gets its guards when it is captured."""
        made = Guards((), ())
        made._copied = True
        return made

    def _name(self, parameter: torch.Tensor) -> str:
        return next(
            f"{path}.{key}"
            for (path, _), table in zip(self._paths, self._tables)
            for key, held in table.items()
            if held is parameter
        )


_KINDS = {
    "_parameters": "parameters",
    "_buffers": "buffers",
    "_modules": "submodules",
    "_forward_pre_hooks": "forward-pre hooks",
    "_forward_hooks": "forward hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward-pre hooks",
}
_requires_grad = attrgetter("requires_grad")
_cell_contents = attrgetter("cell_contents")

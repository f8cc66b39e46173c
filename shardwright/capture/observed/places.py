"""Places in which Python keeps values: entries of dicts, variables of closures, attributes of classes and objects.

Example: the attribute ``net.beta`` is the place of the dict ``vars(net)`` and the key "beta", with the path "net.beta".

The value of the place is that of the dict, such as 2.0; ``set(5.0)`` on the place means ``net.beta = 5.0``.
"""

from __future__ import annotations

import collections
import copy
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, MutableMapping, MutableSequence
from enum import Enum
from itertools import repeat
from typing import NamedTuple, TypeVar, overload

import torch
from torch import nn

__all__ = [
    "CALLED",
    "CONTAINERS",
    "MISSING",
    "Entry",
    "GuardedPlace",
    "PlaceReader",
    "contents",
    "entries",
    "filled",
    "is_simple",
    "place_key",
    "refill",
    "same",
    "same_content",
    "spelled",
]


K = TypeVar("K")
V = TypeVar("V")


class _Missing:
    """The value of an empty place."""

    def __repr__(self) -> str:
        return "missing"

    def __deepcopy__(self, memo: dict[int, object]) -> _Missing:
        return self


MISSING = _Missing()


class Entry(NamedTuple):
    """Key of an entry of a mapping that is no dict, such as the environment."""

    name: str


#: Key of a place whose value is what its owner returns: ``torch.get_default_dtype()``.
CALLED = "()"

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


def is_simple(value: object) -> bool:
    """True for a value that cannot change in place: numbers, strings, dtypes, functions, classes, tuples of these."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_simple, value))
    return isinstance(value, (_SIMPLE, _FUNCTIONS)) or _is_numpy_scalar(value)


def _is_numpy_scalar(value: object) -> bool:
    numpy = sys.modules.get("numpy") if type(value).__module__ == "numpy" else None
    return numpy is not None and isinstance(value, numpy.generic)


def place_key(owner: object, key: object) -> tuple[int, object]:
    """A key that is equal for the same place. A dict of such keys holds the places too: they keep the ids alive."""
    return id(owner), key


#: The value of a key in a dict, whatever methods its own class has; that of a name in the dict of a class.
_value_in_dict: Callable[[dict[object, object], object, object], object] = dict.get
_value_in_class: Callable[[types.MappingProxyType[str, object], str, object], object] = types.MappingProxyType.get


def _value_in_cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


class GuardedPlace:
    """A place in which Python keeps a value.

    Args:
        owner: a dict (attributes, globals, a user's dict), a closure's cell, a class, an object with slots; the
            environment, with an `Entry`; a function, with `CALLED`.
        key: the key of the dict, or the name of the attribute.
        path: the user's name for the place: ``net.blocks.0.beta``.

    Attributes:
        identity: see `place_key`.
    """

    __slots__ = ("identity", "key", "owner", "path")

    def __init__(self, owner: object, key: object, path: str) -> None:
        self.owner, self.key, self.path = owner, key, path
        self.identity: tuple[int, object] = (id(owner), key)

    def __repr__(self) -> str:
        return f"GuardedPlace({self.path})"

    def __deepcopy__(self, memo: dict[int, object]) -> GuardedPlace:
        return GuardedPlace(copy.deepcopy(self.owner, memo), copy.deepcopy(self.key, memo), self.path)

    def get(self) -> object:
        """The value of the place; `MISSING` where it is empty."""
        owner = self.owner
        if isinstance(owner, dict):
            return _value_in_dict(owner, self.key, MISSING)
        if self.key is CALLED:
            assert callable(owner)
            return owner()
        if isinstance(owner, type):
            return owner.__dict__.get(str(self.key), MISSING)
        if isinstance(owner, types.CellType):
            return _value_in_cell(owner)
        if isinstance(self.key, Entry):
            assert isinstance(owner, MutableMapping)
            return owner.get(self.key.name, MISSING)
        assert isinstance(self.key, str)  # the name of an attribute
        return getattr(owner, self.key, MISSING)

    def set(self, value: object) -> None:
        """Set the value of the place; `MISSING` removes it."""
        owner = self.owner
        if isinstance(owner, dict):
            kind = _plain(owner)
            if value is MISSING:
                kind.pop(owner, self.key, None)
            else:
                kind.__setitem__(owner, self.key, value)
        elif isinstance(self.key, Entry):
            assert isinstance(owner, MutableMapping)
            if value is MISSING:
                owner.pop(self.key.name, None)
            else:
                owner[self.key.name] = value
        elif isinstance(owner, types.CellType):
            if value is MISSING:
                del owner.cell_contents
            else:
                owner.cell_contents = value
        else:
            assert isinstance(self.key, str)  # the name of an attribute
            if value is MISSING:
                delattr(owner, self.key)
                return
            try:
                setattr(owner, self.key, value)
            except (AttributeError, TypeError):  # a frozen object
                object.__setattr__(owner, self.key, value)


class PlaceReader:
    """Reads the values of many places at once: no line of Python runs for most of them.

    Args:
        places: the places.

    Attributes:
        places: the same places, in the order in which `values` reads them.

    Example: the reader of ``net.beta`` and of ``Net.forward`` gives ``[2.0, <function Net.forward>]``.
    """

    def __init__(self, places: Collection[GuardedPlace]) -> None:
        of_dicts: list[tuple[GuardedPlace, dict[object, object], object]] = []
        of_classes: list[tuple[GuardedPlace, types.MappingProxyType[str, object], str]] = []
        of_cells: list[tuple[GuardedPlace, types.CellType]] = []
        of_objects: list[tuple[GuardedPlace, object, str]] = []
        one_by_one = []
        for place in places:
            owner, key = place.owner, place.key
            if isinstance(owner, dict):
                of_dicts.append((place, owner, key))
            elif isinstance(owner, types.CellType):
                of_cells.append((place, owner))
            elif not isinstance(key, str) or key is CALLED:
                one_by_one.append(place)
            elif isinstance(owner, type):
                of_classes.append((place, vars(owner), key))
            else:
                of_objects.append((place, owner, key))
        groups = (of_dicts, of_classes, of_cells, of_objects)
        self.places: list[GuardedPlace] = [each[0] for group in groups for each in group] + one_by_one
        self._dicts, self._keys = [owner for _, owner, _ in of_dicts], [key for *_, key in of_dicts]
        self._classes, self._names = [names for _, names, _ in of_classes], [name for *_, name in of_classes]
        self._cells = [cell for _, cell in of_cells]
        self._objects, self._attributes = [owner for _, owner, _ in of_objects], [name for *_, name in of_objects]
        self._one_by_one = one_by_one

    def values(self) -> list[object]:
        """The values of the places; `MISSING` of those that are empty."""
        return [
            *map(_value_in_dict, self._dicts, self._keys, repeat(MISSING)),
            *map(_value_in_class, self._classes, self._names, repeat(MISSING)),
            *map(_value_in_cell, self._cells),
            *map(getattr, self._objects, self._attributes, repeat(MISSING)),
            *[place.get() for place in self._one_by_one],
        ]


def contents(container: Iterable[object]) -> tuple[object, ...]:
    """The entries of a container, as a tuple; for a dict its keys, then its values."""
    return (*dict.keys(container), *dict.values(container)) if isinstance(container, dict) else tuple(container)


def _plain(container: dict[object, object]) -> type[dict[object, object]]:
    """The class of Python whose methods read and write a dict, whatever methods its own class has."""
    return collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict


def entries(container: Iterable[object]) -> tuple[object, ...]:
    """The keys of a dict in their order, the entries of another container."""
    return tuple(_plain(container).keys(container)) if isinstance(container, dict) else tuple(container)


@overload
def filled(container: dict[K, V]) -> dict[K, V]: ...
@overload
def filled(container: Iterable[object]) -> Collection[object]: ...
def filled(container: Iterable[object]) -> Collection[object]:
    """A plain copy of a container: a dict, a set or a list."""
    if isinstance(container, dict):
        return dict(_plain(container).items(container))
    return set(container) if isinstance(container, set) else list(container)


def refill(container: Collection[object], content: Collection[object]) -> None:
    """Give a container the content of an earlier copy, where it has another one."""
    if same_content(container, content):
        return
    if isinstance(container, dict):
        kind = _plain(container)
        kind.clear(container)
        assert isinstance(content, dict)
        for key, value in content.items():
            kind.__setitem__(container, key, value)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, content)
    else:
        assert isinstance(container, MutableSequence)
        container.clear()
        container.extend(content)


def same_content(container: Collection[object], content: Collection[object]) -> bool:
    """True where a container holds the same objects as an earlier copy, in the same order."""
    if isinstance(container, dict):
        kind = _plain(container)
        assert isinstance(content, dict)
        return list(kind.keys(container)) == list(content) and all(
            map(operator.is_, kind.values(container), content.values())
        )
    if isinstance(container, set):
        return bool(container == content)
    return len(container) == len(content) and all(map(operator.is_, container, content))


def same(old: object, new: object) -> bool:
    """True where two values mean the same to a program."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(same, old, new))
    if not isinstance(old, (*_SIMPLE, frozenset)) and not _is_numpy_scalar(old):
        return False
    return repr(old) == repr(new) and (old == new or old != old)


def spelled(value: object) -> str:
    """The text of a value in a message: the value where it is simple, otherwise its kind."""
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (types.FunctionType, type)):
        return value.__qualname__
    text = repr(value) if is_simple(value) or value is MISSING else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."

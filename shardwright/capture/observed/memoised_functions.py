"""Functions that cache their results (`functools.lru_cache`, `functools.cache`), while a model is captured.

Such a function computes a table of positions, say, at its first call, and returns the same tensor at every later
call. A capture runs the forward on tensors without values. The function would cache such a tensor, and the plain
model would receive it later.

A stand-in therefore replaces the function during a capture. The stand-in runs the function on real tensors, outside
of the capture: the function caches the result that one device would cache, and the program holds that tensor as a
constant.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import CaptureError
from ...torch_private import DisableTorchFunction, FakeTensor, pytree, untraced
from ..source_lines import is_users
from .places import GuardedPlace

__all__ = ["computed_for_real"]

_KEEPS = type(functools.lru_cache(len))
_LEGAL = "a function without functools.lru_cache, or one of numbers alone"

#: Types of values that hold no function: most entries of a file or a class.
_PLAIN = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        str,
        bytes,
        tuple,
        list,
        dict,
        collections.OrderedDict,
        set,
        frozenset,
        property,
        types.BuiltinFunctionType,
        types.MemberDescriptorType,
        types.GetSetDescriptorType,
    }
)

#: Types of values that hold nothing: `_File` compares the values themselves.
_SIMPLE = frozenset({type(None), bool, int, str, bytes})

#: Types of values of a file or a class that hold functions, or are functions.
_FIXED = (types.FunctionType, types.ModuleType, type, staticmethod, classmethod, _KEEPS)

#: Depth to which closures are followed.
_DEPTH = 3


class _StandIn:
    """A callable in place of a function that caches its results."""

    def __init__(self, function: Any) -> None:
        self.function, self.__module__, self.__doc__ = function, function.__module__, function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) for x in leaves):
            return self.function(*args, **kwargs)
        if any(isinstance(x, torch.Tensor) for x in leaves):
            raise CaptureError(
                f"{self._named} is given a tensor, and keeps what it made of it: one device computes it once, the "
                "captured program would at each call",
                legal=_LEGAL,
            )
        with DisableTorchFunction(), untraced():
            made = self.function(*args, **kwargs)
        if any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(made)):
            self.function.cache_clear()
            raise CaptureError(
                f"{self._named} keeps a tensor that it makes of the model's own: one device computes it once, the "
                "captured program would at each call",
                legal=_LEGAL,
            )
        return made

    @property
    def _named(self) -> str:
        return f"{getattr(self.function, '__qualname__', 'a function')}, which keeps its results,"

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


@contextlib.contextmanager
def computed_for_real(modules: list[tuple[str, nn.Module]], functions: list[Any]) -> Iterator[None]:
    """Put stand-ins in place of the functions that cache their results, while the context is active.

    Such functions are looked for in the files of the model's classes and functions, in the files from which these files
    import, in classes and closures, and in attributes of the model.

    Args:
        modules: the modules of the model and its loss, by path.
        functions: the loss, where it is a function.
    """
    put: list[tuple[GuardedPlace, Any]] = []
    stand_ins: dict[int, _StandIn] = {}

    def stood_for(value: Any) -> Any:
        around = type(value) if isinstance(value, (staticmethod, classmethod)) else None
        function = value if around is None else value.__func__
        stand_in = stand_ins.setdefault(id(function), _StandIn(function))
        return stand_in if around is None else around(stand_in)

    try:
        for place in _places(modules, functions):
            old = place.get()
            put.append((place, old))
            place.set(stood_for(old))
        yield
    finally:
        for place, old in reversed(put):
            place.set(old)


def _places(modules: list[tuple[str, nn.Module]], functions: list[Any]) -> list[GuardedPlace]:
    """The places that hold functions of the model that cache their results."""
    classes = dict.fromkeys(
        cls for _, m in modules for cls in type(m).__mro__ if _users_module(cls.__module__) is not None
    )
    attributes = [value for _, m in modules for value in vars(m).values()]
    names = [getattr(value, "__module__", None) for value in (*classes, *functions, *attributes)]
    waiting = [
        module
        for name in dict.fromkeys(n for n in names if isinstance(n, str))
        if (module := _users_module(name)) is not None
    ]
    files = {id(module) for module in waiting}
    covered: set[type] = set()
    places: list[GuardedPlace] = []
    closures: list[types.FunctionType] = []
    while waiting:
        found = _of_file(waiting.pop())
        places += found.kept
        closures += found.closures
        covered.update(found.own)
        classes.update(found.classes)
        for name in found.imported:
            module = sys.modules.get(name)
            if module is not None and id(module) not in files:
                files.add(id(module))
                waiting.append(module)
    for cls in classes:
        if cls not in covered:
            kept, further = _read_class(cls)
            places += kept
            closures += further
    for _, m in modules:
        for key, value in vars(m).items():
            kind = type(value)
            if kind is types.FunctionType:
                closures.append(value)
            elif kind not in _PLAIN and _keeps(value):
                places.append(GuardedPlace(vars(m), key, key))
    closures += [function for function in functions if type(function) is types.FunctionType]
    seen: set[int] = set()
    for function in closures:
        places += _cells(function, seen)
    return places


class _File(NamedTuple):
    """The objects of a file and its classes, for `_places`.

    Args:
        held: the entries of the file and of its classes: mappings that show every change.
        same: picks the entries that have to be the same objects as before: functions, classes, files and simple values.
        others: picks the other entries, which have to be of the same types. These are not kept alive.
        were, types: the objects and the types that were read.
        kept: the places of functions that cache their results.
        own: the classes of the file.
        classes: further classes of users in the file, as the keys of a dict.
        imported: the names of the users' files that the file's values come from.
        closures: the functions of its classes that have closures.
    """

    held: tuple[Mapping[str, Any], ...]
    same: Callable[[Sequence[Any]], tuple[Any, ...]]
    others: Callable[[Sequence[Any]], tuple[Any, ...]]
    were: tuple[Any, ...]
    types: tuple[type, ...]
    kept: tuple[GuardedPlace, ...]
    own: tuple[type, ...]
    classes: dict[type, None]
    imported: tuple[str, ...]
    closures: tuple[types.FunctionType, ...]

    @property
    def holds(self) -> bool:
        """True where file and classes are as they were read.

        A library of models has hundreds of files and forty thousand entries: no line of Python runs for each.
        """
        entries = tuple(chain.from_iterable(map(_values, self.held)))
        return (
            len(entries) == len(self.were) + len(self.types)
            and self.same(entries) == self.were
            and tuple(map(type, self.others(entries))) == self.types
        )


def _picking(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The function that picks entries by their places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda entries: tuple([entries[i] for i in places])


_values = methodcaller("values")

#: File -> what was read of it.
_KNOWN: weakref.WeakKeyDictionary[types.ModuleType, _File] = weakref.WeakKeyDictionary()


def _of_file(file: types.ModuleType) -> _File:
    """The objects of a file and its classes, read anew where they are others than before."""
    known = _KNOWN.get(file)
    if known is None or not known.holds:
        known = _KNOWN[file] = _read_file(file)
    return known


def _read_file(file: types.ModuleType) -> _File:
    kept: list[GuardedPlace] = []
    classes: dict[type, None] = {}
    imported: dict[str, None] = {}
    known: dict[Any, types.ModuleType | None] = {}  # many values come from few files
    held = vars(file)
    for key, value in list(held.items()):
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is types.FunctionType or issubclass(kind, type):
            name: Any = value.__module__
        elif issubclass(kind, types.ModuleType):
            name = value.__name__
        else:
            if _keeps(value):
                kept.append(GuardedPlace(held, key, key))
            if kind is not _KEEPS:
                continue
            name = value.__module__
        if name not in known:
            known[name] = _users_module(name)
        module = known[name]
        if module is None:
            continue
        if issubclass(kind, type):
            classes.setdefault(value)
        imported.setdefault(module.__name__)
    own = tuple([cls for cls in classes if cls.__module__ == file.__name__ and held.get(cls.__name__) is cls])
    closures: list[types.FunctionType] = []
    for cls in own:
        del classes[cls]
        further, functions = _read_class(cls)
        kept += further
        closures += functions
    everything = (held, *map(vars, own))
    entries = tuple(chain.from_iterable(map(_values, everything)))
    same = [i for i, value in enumerate(entries) if isinstance(value, _FIXED) or type(value) in _SIMPLE]
    others = sorted(set(range(len(entries))).difference(same))
    pick, rest = _picking(same), _picking(others)
    return _File(
        everything,
        pick,
        rest,
        pick(entries),
        tuple(map(type, rest(entries))),
        tuple(kept),
        own,
        classes,
        tuple(imported),
        tuple(closures),
    )


def _read_class(cls: type) -> tuple[list[GuardedPlace], list[types.FunctionType]]:
    """The places in a class of functions that cache their results, and the functions that have closures."""
    kept: list[GuardedPlace] = []
    closures: list[types.FunctionType] = []
    for key, value in vars(cls).items():
        if type(value) is types.FunctionType:
            if value.__closure__ is not None:
                closures.append(value)
        elif type(value) not in _PLAIN and _keeps(value):
            kept.append(GuardedPlace(cls, key, key))
    return kept, closures


def _keeps(value: Any) -> bool:
    """True for a function of the user that caches its results."""
    if type(value) is not _KEEPS:
        if not isinstance(value, (staticmethod, classmethod)) or type(value.__func__) is not _KEEPS:
            return False
        value = value.__func__
    code = getattr(getattr(value, "__wrapped__", None), "__code__", None)
    return code is not None and is_users(code.co_filename)


def _cells(function: types.FunctionType, seen: set[int], depth: int = 0) -> list[GuardedPlace]:
    """The places in a function's closure, and in those of the functions in it, of functions that cache their results.

    Args:
        seen: ids of the functions that were looked into.
    """
    found: list[GuardedPlace] = []
    if function.__closure__ is None or id(function) in seen or depth > _DEPTH:
        return found
    seen.add(id(function))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__):
        try:
            value = cell.cell_contents
        except ValueError:  # nothing yet
            continue
        if type(value) is types.FunctionType:
            found += _cells(value, seen, depth + 1)
        elif _keeps(value):
            found.append(GuardedPlace(cell, name, name))
    return found


#: Packages whose functions are not part of a model: the libraries beneath it, and test tools.
_BENEATH = frozenset({"torch", "numpy", "sympy", "scipy", "shardwright", "pandas", "pytest", "_pytest", "hypothesis"})


def _users_module(name: str | None) -> types.ModuleType | None:
    """The Python module of that name, where it belongs to the user or to a library of models; None otherwise."""
    if not name or name.split(".")[0] in _BENEATH:
        return None
    module = sys.modules.get(name)
    return module if is_users(getattr(module, "__file__", None) or "<") else None

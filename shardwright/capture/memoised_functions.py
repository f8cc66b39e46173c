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
from collections.abc import Iterator
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import CaptureError
from ..torch_private import DisableTorchFunction, FakeTensor, pytree, untraced
from .guards import MISSING, GuardedPlace
from .source_lines import is_users

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
        if isinstance(value, (staticmethod, classmethod)):
            return type(value)(stood_for(value.__func__))
        return stand_ins.setdefault(id(value), _StandIn(value))

    try:
        for place in list(_places(modules, functions)):
            old = place.get()
            put.append((place, old))
            place.set(stood_for(old))
        yield
    finally:
        for place, old in reversed(put):
            place.set(old)


def _places(modules: list[tuple[str, nn.Module]], functions: list[Any]) -> Iterator[GuardedPlace]:
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
    seen: set[int] = set()
    while waiting:
        file = waiting.pop()
        held, found = vars(file), _read(file)
        yield from [GuardedPlace(held, key, key) for key in found.kept]
        classes.update(dict.fromkeys(found.classes))
        for name in found.imported:
            module = sys.modules.get(name)
            if module is not None and id(module) not in files:
                files.add(id(module))
                waiting.append(module)
    for cls in classes:
        known = _read(cls)
        for function in known.closures:
            yield from _cells(function, seen, 0)
        yield from [GuardedPlace(cls, key, key) for key in known.kept]
    for _, imported in modules:
        for key, value in list(vars(imported).items()):
            if type(value) in _PLAIN:
                continue
            if _keeps(value):
                yield GuardedPlace(vars(imported), key, key)
            yield from _cells(value, seen, 0)
    for function in functions:
        yield from _cells(function, seen, 0)


class _Read(NamedTuple):
    """The objects of a file or a class, for `_places`.

    Args:
        types: the types of all that it holds, in order.
        fixed: key -> the object, for functions, classes and files: what was read is valid while it holds these, and
            objects of the same types. Other objects are not kept alive.
        kept: the keys of functions that cache their results.
        classes, imported: the classes of users in a file, and the names of the users' files that its values come from.
        closures: the functions of a class that have closures.
    """

    types: tuple[type, ...]
    fixed: dict[str, Any]
    kept: tuple[str, ...]
    classes: tuple[type, ...] = ()
    imported: tuple[str, ...] = ()
    closures: tuple[types.FunctionType, ...] = ()


#: Files, and classes that a file holds -> what was read of them: a library of models has hundreds of files.
_KNOWN: weakref.WeakKeyDictionary[types.ModuleType | type, _Read] = weakref.WeakKeyDictionary()


def _read(owner: types.ModuleType | type) -> _Read:
    """The objects of a file or a class, read anew where they are others than before."""
    held = vars(owner)
    known = _KNOWN.get(owner)
    if (
        known is None
        or len(known.types) != len(held)
        or not all(map(is_, known.types, map(type, held.values())))
        or not all(map(is_, map(held.get, known.fixed), known.fixed.values()))
    ):
        entries = list(held.items())
        known = _read_class(entries) if isinstance(owner, type) else _read_file(entries)
        if not isinstance(owner, type) or getattr(sys.modules.get(owner.__module__), owner.__name__, None) is owner:
            _KNOWN[owner] = known
    return known


def _fixed(held: list[tuple[str, Any]]) -> dict[str, Any]:
    """The objects of a file or a class that `_places` looks into."""
    return {key: v for key, v in held if isinstance(v, _FIXED)}


def _read_file(held: list[tuple[str, Any]]) -> _Read:
    kept: list[str] = []
    classes: dict[type, None] = {}
    imported: dict[str, None] = {}
    known: dict[Any, types.ModuleType | None] = {}  # many values come from few files
    for key, value in held:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is types.FunctionType or issubclass(kind, type):
            name: Any = value.__module__
        elif issubclass(kind, types.ModuleType):
            name = value.__name__
        else:
            if _keeps(value):
                kept.append(key)
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
    return _Read(tuple(type(v) for _, v in held), _fixed(held), tuple(kept), tuple(classes), tuple(imported))


def _read_class(held: list[tuple[str, Any]]) -> _Read:
    closures = [v for _, v in held if type(v) is types.FunctionType and v.__closure__ is not None]
    kept = [key for key, v in held if type(v) not in _PLAIN and type(v) is not types.FunctionType and _keeps(v)]
    return _Read(tuple(type(v) for _, v in held), _fixed(held), tuple(kept), closures=tuple(closures))


def _keeps(value: Any) -> bool:
    """True for a function of the user that caches its results."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if type(value) is not _KEEPS:
        return False
    code = getattr(getattr(value, "__wrapped__", None), "__code__", None)
    return code is not None and is_users(code.co_filename)


def _cells(function: Any, seen: set[int], depth: int) -> Iterator[GuardedPlace]:
    if not isinstance(function, types.FunctionType) or id(function) in seen or depth > _DEPTH:
        return
    seen.add(id(function))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        place = GuardedPlace(cell, name, name)
        value = place.get()
        if value is not MISSING:
            if _keeps(value):
                yield place
            yield from _cells(value, seen, depth + 1)


#: Packages whose functions are not part of a model: the libraries beneath it, and test tools.
_BENEATH = frozenset({"torch", "numpy", "sympy", "scipy", "shardwright", "pandas", "pytest", "_pytest", "hypothesis"})


def _users_module(name: str | None) -> types.ModuleType | None:
    """The Python module of that name, where it belongs to the user or to a library of models; None otherwise."""
    if not name or name.split(".")[0] in _BENEATH:
        return None
    module = sys.modules.get(name)
    return module if is_users(getattr(module, "__file__", None) or "<") else None

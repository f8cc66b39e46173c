"""Functions that cache their results (`functools.lru_cache`, `functools.cache`), while a model is captured.

Such a function computes a table of positions, say, at its first call, and returns the same tensor at every later
call. A capture runs the forward on tensors without values. The function would cache such a tensor, and the plain
model would receive it later.

A stand-in therefore replaces the function during a capture. The stand-in runs the function on real tensors, outside
of the capture: the function caches the result that one device would cache, and the program holds that tensor as a
constant.

Example: a forward adds ``positions(16)``, where ``positions``, under `functools.lru_cache`, returns
``torch.arange(n)``. The captured program has a constant of shape [16]. After the capture ``positions(16)`` returns an
ordinary tensor of the numbers 0 to 15.
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
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ...errors import CaptureError
from ...identity_tables import IdentityMap
from ...torch_private import DisableTorchFunction, FakeTensor, pytree, untraced
from ..source_lines import is_users
from .places import GuardedPlace

__all__ = ["MemoisedStandIn", "computed_for_real"]

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

#: Types of values that come from no file.
_OF_NO_FILE = _PLAIN - {types.BuiltinFunctionType}

#: Types of values that hold nothing: `_File` compares the values themselves.
_SIMPLE = frozenset({type(None), bool, int, str, bytes})

#: Types of values of a file or a class that hold functions, or are functions.
_FIXED = (types.FunctionType, types.ModuleType, type, staticmethod, classmethod, _KEEPS)

#: Depth to which closures are followed.
_DEPTH = 3


class Memoised(Protocol):
    """A function that caches its results, as `functools.lru_cache` returns it."""

    def __call__(self, *args: object, **kwargs: object) -> object: ...

    def cache_clear(self) -> None:
        """Forget all results."""


class MemoisedStandIn:
    """A callable in place of a function that caches its results."""

    def __init__(self, function: Memoised) -> None:
        self.function, self.__module__, self.__doc__ = function, function.__module__, function.__doc__

    def __call__(self, *args: object, **kwargs: object) -> object:
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

    def __get__(self, owner: object, kind: object = None) -> object:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> object:
        return getattr(self.function, name)


@contextlib.contextmanager
def computed_for_real(modules: list[tuple[str, nn.Module]], functions: Sequence[object]) -> Iterator[None]:
    """Put stand-ins in place of the functions that cache their results, while the context is active.

    Such functions are looked for in the files of the model's classes and functions, in the files from which these files
    import, in classes and closures, and in attributes of the model.

    Args:
        modules: the modules of the model and its loss, by path.
        functions: the loss, where it is a function.
    """
    put: list[tuple[GuardedPlace, object]] = []
    places, library = _places(modules, functions)
    stand_ins = dict(library.stand_ins)

    def of_function(function: object) -> MemoisedStandIn:
        assert isinstance(function, _KEEPS)
        return stand_ins.setdefault(function, MemoisedStandIn(function))

    def stood_for(value: object) -> object:
        if isinstance(value, staticmethod):
            return staticmethod(of_function(value.__func__))
        if isinstance(value, classmethod):
            return classmethod(of_function(value.__func__))
        return of_function(value)

    try:
        for names, _, replaced in library.swaps:
            names.update(replaced)
        for place in places:
            old = place.get()
            put.append((place, old))
            place.set(stood_for(old))
        yield
    finally:
        for place, old in reversed(put):
            place.set(old)
        for names, plain, _ in library.swaps:
            names.update(plain)


def _places(modules: list[tuple[str, nn.Module]], functions: Sequence[object]) -> tuple[list[GuardedPlace], _Library]:
    """The places that hold functions of the model that cache their results, but for those in files; and the library of
    these files."""
    classes = dict.fromkeys(
        cls for _, m in modules for cls in type(m).__mro__ if _users_module(cls.__module__) is not None
    )
    attributes = [value for _, m in modules for value in vars(m).values() if type(value) not in _OF_NO_FILE]
    names = [getattr(value, "__module__", None) for value in (*classes, *functions, *attributes)]
    waiting = [
        module
        for name in dict.fromkeys(n for n in names if isinstance(n, str))
        if (module := _users_module(name)) is not None
    ]
    library = _library(waiting)
    classes.update(library.classes)
    places = [*library.places]
    closures: list[types.FunctionType] = []
    for cls in classes:
        if cls not in library.defined:
            of_class, further = _read_class(cls)
            places += of_class
            closures += further
    for _, m in modules:
        for key, value in vars(m).items():
            kind = type(value)
            if kind is types.FunctionType:
                closures.append(value)
            elif kind not in _PLAIN and _keeps(value):
                places.append(GuardedPlace(vars(m), key, key))
    closures += [function for function in functions if type(function) is types.FunctionType]
    places += _in_closures(closures)[0]
    return list({place.identity: place for place in places}.values()), library


class _Entries(NamedTuple):
    """The entries of files and classes, and those that were read.

    A library of models has hundreds of files and forty thousand entries: no line of Python runs for each.

    Args:
        mappings: the entries of each file and each class: mappings that show every change.
        same: picks the entries that have to be the same objects as before: functions, classes, files and simple values.
        by_type: picks the other entries, which have to be of the same types. These are not kept alive.
        were, types: the objects and the types that were read.
    """

    mappings: tuple[Mapping[str, object], ...]
    same: Callable[[Sequence[object]], tuple[object, ...]]
    by_type: Callable[[Sequence[object]], tuple[object, ...]]
    were: tuple[object, ...]
    types: tuple[type, ...]

    @staticmethod
    def read(mappings: tuple[Mapping[str, object], ...]) -> _Entries:
        """The present entries."""
        entries = tuple(chain.from_iterable(map(_values, mappings)))
        same = [i for i, value in enumerate(entries) if isinstance(value, _FIXED) or type(value) in _SIMPLE]
        by_type = sorted(set(range(len(entries))).difference(same))
        pick, rest = _picking(same), _picking(by_type)
        return _Entries(mappings, pick, rest, pick(entries), tuple(map(type, rest(entries))))

    @property
    def hold(self) -> bool:
        """True where the entries are those that were read."""
        entries = tuple(chain.from_iterable(map(_values, self.mappings)))
        return (
            len(entries) == len(self.were) + len(self.types)
            and self.same(entries) == self.were
            and tuple(map(type, self.by_type(entries))) == self.types
        )


class _File(NamedTuple):
    """The objects of a file and its classes, for `_places`.

    Args:
        entries: those of the file and of its classes.
        places: those of functions that cache their results.
        defined: the classes of the file.
        classes: further classes of users in the file, as the keys of a dict.
        imported: the names of the users' files that the file's values come from.
        closures: the functions of its classes that have closures.
    """

    entries: _Entries
    places: tuple[GuardedPlace, ...]
    defined: tuple[type, ...]
    classes: dict[type, None]
    imported: tuple[str, ...]
    closures: tuple[types.FunctionType, ...]


def _picking(places: Sequence[int]) -> Callable[[Sequence[object]], tuple[object, ...]]:
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
    if known is None or not known.entries.hold:
        known = _KNOWN[file] = _read_file(file)
    return known


def _read_file(file: types.ModuleType) -> _File:
    places: list[GuardedPlace] = []
    classes: dict[type, None] = {}
    imported: dict[str, None] = {}
    known: dict[str | None, types.ModuleType | None] = {}  # many values come from few files
    file_names = vars(file)
    for key, value in list(file_names.items()):
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is types.FunctionType or issubclass(kind, type):
            name: str | None = value.__module__
        elif issubclass(kind, types.ModuleType):
            name = value.__name__
        else:
            if _keeps(value):
                places.append(GuardedPlace(file_names, key, key))
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
    defined = tuple([cls for cls in classes if cls.__module__ == file.__name__ and file_names.get(cls.__name__) is cls])
    closures: list[types.FunctionType] = []
    for cls in defined:
        del classes[cls]
        further, functions = _read_class(cls)
        places += further
        closures += functions
    return _File(
        _Entries.read((file_names, *map(vars, defined))),
        tuple(places),
        defined,
        classes,
        tuple(imported),
        tuple(closures),
    )


class _Library(NamedTuple):
    """The files from which the code of a model comes, directly or through the imports of other files.

    Args:
        files: the entries of each file, by its name; None for one that is not imported.
        entries: the entries of the files and of their classes.
        places: the places of functions that cache their results, in classes and closures.
        swaps: the names of each file that hold such functions: (the names of the file, the functions, their stand-ins).
            A library of models has hundreds of such names, most of them imported from one file.
        stand_ins: function -> its stand-in.
        cells: variables of closures with their values; those in `empty` have none.
        defined: the classes of the files.
        classes: further classes of users in the files, as the keys of a dict.
    """

    files: dict[str, dict[str, object] | None]
    entries: _Entries
    places: tuple[GuardedPlace, ...]
    swaps: tuple[tuple[dict[str, object], dict[str, Memoised], dict[str, MemoisedStandIn]], ...]
    stand_ins: dict[Memoised, MemoisedStandIn]
    cells: list[types.CellType]
    contents: list[object]
    empty: list[types.CellType]
    defined: frozenset[type]
    classes: dict[type, None]

    @property
    def holds(self) -> bool:
        """True where all is as it was read."""
        try:
            return (
                all(map(is_, map(_entries_of, self.files), self.files.values()))
                and self.entries.hold
                and all(map(is_, map(_contents, self.cells), self.contents))
                and all(cell == _EMPTY for cell in self.empty)
            )
        except ValueError:  # a cell is empty now
            return False


_EMPTY = types.CellType()
_contents = attrgetter("cell_contents")

#: The names of the files of models -> what was read of them and of the files from which they import.
_LIBRARIES: collections.OrderedDict[tuple[str, ...], _Library] = collections.OrderedDict()
#: The number of libraries that are remembered.
_KEPT_LIBRARIES = 8


def _entries_of(name: str) -> dict[str, object] | None:
    file = sys.modules.get(name)
    return None if file is None else vars(file)


def _library(files: list[types.ModuleType]) -> _Library:
    """The library of some files, read anew where it is another one than before."""
    names = tuple(file.__name__ for file in files)
    known = _LIBRARIES.pop(names, None)
    if known is None or not known.holds:
        known = _read_library(files)
    _LIBRARIES[names] = known
    while len(_LIBRARIES) > _KEPT_LIBRARIES:
        _LIBRARIES.popitem(last=False)
    return known


def _read_library(files: list[types.ModuleType]) -> _Library:
    waiting = list(files)
    entries: dict[str, dict[str, object] | None] = {file.__name__: vars(file) for file in files}
    mappings: list[Mapping[str, object]] = []
    defined: set[type] = set()
    classes: dict[type, None] = {}
    places: list[GuardedPlace] = []
    closures: list[types.FunctionType] = []
    while waiting:
        found = _of_file(waiting.pop())
        mappings += found.entries.mappings
        places += found.places
        closures += found.closures
        defined.update(found.defined)
        classes.update(found.classes)
        for name in found.imported:
            if name not in entries:
                entries[name] = _entries_of(name)
                if name in sys.modules:
                    waiting.append(sys.modules[name])
    further, cells = _in_closures(closures)
    filled = [cell for cell in cells if cell != _EMPTY]
    of_files = IdentityMap[object, tuple[dict[str, object], dict[str, Memoised]]](
        (names, (names, {})) for names in entries.values() if names is not None
    )
    elsewhere: list[GuardedPlace] = []
    for place in (*places, *further):
        function, file = place.get(), of_files.get(place.owner)
        if file is None or not isinstance(function, _KEEPS):
            elsewhere.append(place)
        else:
            file[1][str(place.key)] = function
    stand_ins = {f: MemoisedStandIn(f) for _, found in of_files.values() for f in found.values()}
    swaps = [(names, found, {k: stand_ins[f] for k, f in found.items()}) for names, found in of_files.values() if found]
    return _Library(
        entries,
        _Entries.read(tuple(mappings)),
        tuple(elsewhere),
        tuple(swaps),
        stand_ins,
        filled,
        list(map(_contents, filled)),
        [cell for cell in cells if cell == _EMPTY],
        frozenset(defined),
        classes,
    )


def _read_class(cls: type) -> tuple[list[GuardedPlace], list[types.FunctionType]]:
    """The places in a class of functions that cache their results, and the functions that have closures."""
    places: list[GuardedPlace] = []
    closures: list[types.FunctionType] = []
    for key, value in vars(cls).items():
        if type(value) is types.FunctionType:
            if value.__closure__ is not None:
                closures.append(value)
        elif type(value) not in _PLAIN and _keeps(value):
            places.append(GuardedPlace(cls, key, key))
    return places, closures


def _keeps(value: object) -> bool:
    """True for a function of the user that caches its results."""
    if type(value) is not _KEEPS:
        if not isinstance(value, (staticmethod, classmethod)) or type(value.__func__) is not _KEEPS:
            return False
        value = value.__func__
    code = getattr(getattr(value, "__wrapped__", None), "__code__", None)
    return code is not None and is_users(code.co_filename)


def _in_closures(functions: list[types.FunctionType]) -> tuple[list[GuardedPlace], list[types.CellType]]:
    """The places of functions that cache their results in closures, and in those of the functions in these; and the
    variables of all these closures."""
    places: list[GuardedPlace] = []
    cells: list[types.CellType] = []
    met: set[types.FunctionType] = set()
    level = functions
    for _ in range(_DEPTH + 1):
        inside: list[types.FunctionType] = []
        for function in level:
            if function.__closure__ is None or function in met:
                continue
            met.add(function)
            cells += function.__closure__
            for name, cell in zip(function.__code__.co_freevars, function.__closure__):
                try:
                    value = cell.cell_contents
                except ValueError:  # nothing yet
                    continue
                if type(value) is types.FunctionType:
                    inside.append(value)
                elif _keeps(value):
                    places.append(GuardedPlace(cell, name, name))
        level = inside
    return places, cells


#: Packages whose functions make no tensors of a model: the libraries beneath it, those for files, texts, downloads and
#: terminals, and test tools.
_BENEATH = frozenset(
    "torch triton numpy sympy scipy pandas shardwright PIL yaml jinja2 regex tokenizers safetensors huggingface_hub "
    "requests urllib3 httpx httpcore anyio filelock packaging psutil rich tqdm pytest _pytest hypothesis".split()
)


def _users_module(name: str | None) -> types.ModuleType | None:
    """The Python module of that name, where it belongs to the user or to a library of models; None otherwise."""
    if not name or name.split(".")[0] in _BENEATH:
        return None
    module = sys.modules.get(name)
    return module if is_users(getattr(module, "__file__", None) or "<") else None

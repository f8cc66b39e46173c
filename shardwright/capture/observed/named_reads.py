"""Reads that cannot be observed: names in the code of functions count as read.

    def forward(self, x):
        return x * SCALE * self.helper(Cfg)     the global SCALE, the class Cfg
    def helper(self, cls):                      followed from the forward, which names it
        return cls.K                            K of every class that is in reach: Cfg.K

Functions are followed from the forward that names them, to watch what they may write. The reads of a function count
only where the function runs: `NamedReads.trace` notes it in a light run.

Example: with ``SCALE = 3.0`` in the file and ``K = 2`` in the class, the forward above has read the places "SCALE",
with the value 3.0, and "Cfg.K", with the value 2.
"""

from __future__ import annotations

import builtins
import collections
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from ...identity_tables import IdentityMap, IdentitySet
from ..annotations import Operator
from ..source_lines import is_users
from .code_names import names_of, user_function
from .kept_state import KeptState, untraced_function
from .opaque_state import guarded_state
from .places import CALLED, CONTAINERS, GuardedPlace, is_simple
from .stand_ins import StandIns

__all__ = ["SEEN", "NamedReads", "is_users_class", "is_users_file"]

#: Depth to which functions are followed from the forward that names them, and to which the attributes of classes that
#: they name are looked at before the forward runs.
_DEPTH, _NEAR = 4, 1

#: Special methods that `Observation` replaces during a capture, or that nothing runs at a known time.
_EXCHANGED = frozenset({"__getattribute__", "__setattr__", "__del__"})

#: Special methods that no call of an object runs.
_NOT_CALLED = _EXCHANGED.union(
    "__init__ __new__ __init_subclass__ __set_name__ __class_getitem__ __repr__ __str__ __getstate__ "
    "__setstate__ __reduce__ __reduce_ex__ __copy__ __deepcopy__ __dir__ __sizeof__".split()
)

#: Functions of torch that tell a setting on which a program may depend.
_SETTINGS = frozenset(
    "get_default_device get_num_threads get_num_interop_threads get_float32_matmul_precision "
    "is_deterministic_algorithms_warn_only_enabled get_deterministic_debug_mode is_anomaly_enabled "
    "is_anomaly_check_nan_enabled".split()
)


_Source = tuple[int | None, int | None]
SEEN: _Source = (None, None)
#: A file; or a class, and its bases of the user.
_Holder = types.ModuleType | tuple[type, ...]


class _Users(dict[str, bool]):
    """File -> True where it is the user's."""

    def __missing__(self, file: str) -> bool:
        found = self[file] = is_users(file)
        return found


class NamedReads(KeptState):
    """The places that functions name, and those that were seen to be read.

    Attributes:
        running: True while the forward runs.
        ran: the code of the user's functions that have run, by its id; None: not known (`trace`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = False
        self.ran: dict[int, types.CodeType] | None = None
        #: Ids of the code of the functions that name places, None for reads that were seen -> these places.
        self._noted: dict[_Source, dict[tuple[int, object], GuardedPlace]] = {SEEN: {}}
        self._source: _Source = SEEN
        self._looked_at: set[tuple[int, object]] = set()
        self._users = _Users()
        self._scanned: IdentitySet[object] = IdentitySet()  # functions, codes and classes
        # Id of code -> functions too deep to be scanned before it runs.
        self._reached: dict[int, dict[int, types.FunctionType]] = {}
        self._waiting: collections.deque[tuple[types.FunctionType, int]] = collections.deque()  # still to be scanned
        self._depth = -1  # of the function that is being scanned
        self._identifiers: dict[int | None, frozenset[str]] = {}  # id of a function's code -> the names in it
        self._lineages: IdentityMap[type, tuple[type, ...]] = IdentityMap()  # class -> itself and its bases of the user
        #: Name -> the classes, each with its bases, and the files that have it, and the function that has found each.
        self._holders: dict[str, list[tuple[int | None, _Holder]]] = {}
        #: Class or file -> the functions that have found it.
        self._found_by: IdentityMap[type | types.ModuleType, set[int | None]] = IdentityMap()
        self._looked_through: set[tuple[int, bool, _Source]] = set()  # classes whose special methods count as read
        self._stand_ins: StandIns
        #: Names of a file -> those of stand-ins of builtin functions among them.
        self._inserted: IdentityMap[dict[str, object], list[str]] = IdentityMap()
        # False once something besides the kept state has decided which objects are in reach: see `found_alike`.
        self.repeatable = True
        # Places that are read and not recorded.
        self._passed: dict[tuple[int, object], tuple[GuardedPlace, object]] = {}
        self._absent: IdentityMap[dict[str, object], set[str]] = IdentityMap()  # names of a file -> names it has not
        self._listed: IdentityMap[dict[str, object], frozenset[str]] = IdentityMap()  # names of a file -> all of them
        self._imports: dict[str, types.ModuleType | None] = {}  # name of a file that is imported -> the file
        self._functions_replaced: list[GuardedPlace] = []  # places of functions that have stand-ins in some run
        self._namespaces: dict[tuple[int, object], GuardedPlace] = {}  # places in namespaces, which count as read
        #: The reads before the forward begins.
        self._begun: tuple[dict[tuple[int, object], GuardedPlace], set[tuple[int, bool, _Source]]] = {}, set()

    @property
    def reads(self) -> dict[tuple[int, object], GuardedPlace]:
        """The places that were read, by identity: those that were seen, and those that the functions name which have
        run, or may have run."""
        found: dict[tuple[int, object], GuardedPlace] = {}
        for source, places in self._noted.items():
            if self.ran is None or all(code is None or code in self.ran for code in source):
                found.update(places)
        return found

    def follow(self, other: NamedReads) -> None:
        """Take over what a second run of the same forward has observed."""
        self.ran = other.ran
        for source, places in other._noted.items():
            self._noted.setdefault(source, {}).update(places)

    def begin(self, numbers: Mapping[GuardedPlace, object], exported: bool = True, traced: bool = False) -> None:
        """Start recording: the forward begins.

        Args:
            numbers, exported: as of `KeptState.begin`.
            traced: True where the functions that run are noted. A debugger that traces goes on instead.
        """
        super().begin(numbers, exported)
        self.running = True
        if traced and sys.gettrace() is None:
            self.ran = {}
            sys.settrace(self.trace)

    def stop(self) -> None:
        """Stop tracing: the forward has ended."""
        if sys.gettrace() == self.trace:
            sys.settrace(None)

    def take_out(self) -> None:
        """Take the stand-ins of builtin functions out of the user's files."""
        for file_names, inserted in self._inserted.items():
            for name in inserted:
                file_names.pop(name, None)

    def _found(self, value: object, path: str) -> None:
        """Watch a value in reach of the forward."""
        raise NotImplementedError

    def _space(self, attributes: dict[str, object], path: str, module: nn.Module | None = None) -> None:
        """Watch a dict of attributes."""
        raise NotImplementedError

    def _note(self, place: GuardedPlace, scan: bool = True) -> None:
        """Record a read of a place, or that the function names it which is being scanned."""
        identity, noted = place.identity, self._noted.setdefault(self._source, {})
        if identity in noted:
            return
        noted[identity] = place
        if identity in self._looked_at:
            return
        self._looked_at.add(identity)
        value = untraced_function(place.get())
        if not is_simple(value):
            guarded_state(value, place.path)
        if self._stand_ins.may_replace(value):
            self._functions_replaced.append(place)
            if self._put_function(place, value):
                return
        elif (stand_in := self._stand_ins.of_object(value, place.path)) is not None:
            self.repeatable = False
            self.put_stand_in(place, value, stand_in)
            return
        self.keep_place(place)
        if scan:
            self._found(value, place.path)

    def _put_function(self, place: GuardedPlace, function: object) -> bool:
        """Put the stand-in of a function in its place; False where it has none in this run."""
        stand_in = self._stand_ins.function(function)
        if stand_in is not None:
            self.put_stand_in(place, function, stand_in)
        return stand_in is not None

    def _setting(self, function: Callable[[], object]) -> None:
        """Record the value of a setting of torch."""
        place = GuardedPlace(function, CALLED, f"torch.{function.__name__}()")
        self._noted.setdefault(self._source, {})[place.identity] = place

    def _scan(self, value: object) -> None:
        """Count the globals and cells in a function's code as read, and follow what they hold."""
        function = user_function(value)
        if function is None or function in self._scanned:
            return
        code = id(function.__code__)
        if self._depth == _DEPTH:
            self._reached.setdefault(code, {})[id(function)] = function
            if self.ran is not None and code in self.ran:
                self._scan_reached(code)
            return
        self._scanned.add(function)
        self._waiting.append((function, self._depth + 1))
        if self._depth >= 0:
            return
        source = self._source
        try:
            while self._waiting:
                function, self._depth = self._waiting.popleft()
                self._scan_function(function)
        finally:
            self._depth, self._source = -1, source

    def _scan_reached(self, code: int) -> None:
        """Scan the functions of code that runs."""
        source = self._source
        for function in self._reached.pop(code, {}).values():
            if function not in self._scanned:
                self._scanned.add(function)
                self._scan_function(function)
        self._source = source

    def _scan_function(self, function: types.FunctionType) -> None:
        code, named = function.__code__, function.__qualname__
        self._scanned.add(code)
        self._source = id(code), None
        self._space(vars(function), named)
        for name, path in (
            ("__code__", "the code of"),
            ("__defaults__", "a default of"),
            ("__kwdefaults__", "a default of"),
        ):
            self._note(GuardedPlace(function, name, f"{path} {named}"))
        cells = dict(zip(code.co_freevars, function.__closure__ or ()))
        self._scan_code(
            code, function.__globals__, {name: (cells[name], f"{name}, which {named} closes over,") for name in cells}
        )
        if self._depth <= _NEAR:
            self._named(names_of(code).identifiers)

    def trace(self, frame: types.FrameType, event: str, arg: object) -> None:
        """Note the code of a function of the user that begins to run: a function for `sys.settrace`."""
        code = frame.f_code
        if self._users[code.co_filename]:
            assert self.ran is not None
            if id(code) not in self.ran:
                self.ran[id(code)] = code
                if self.running:
                    self._runs(code, frame.f_globals)

    def _runs(self, code: types.CodeType, file_names: dict[str, object]) -> None:
        """Count the globals in code that runs as read, and the attributes of classes that it names."""
        source, depth, self._source = self._source, self._depth, (id(code), None)
        self._depth = _DEPTH  # what runs is seen to run: no function is followed
        try:
            self._scan_reached(id(code))
            if code not in self._scanned:
                self._scanned.add(code)
                self._scan_code(code, file_names, {})
            self._named(names_of(code).identifiers)
        finally:
            self._source, self._depth = source, depth

    def _scan_code(
        self, code: types.CodeType, file_names: dict[str, object], cells: dict[str, tuple[object, str]]
    ) -> None:
        names, file = names_of(code), file_names.get("__name__", "")
        inserted = self._inserted.setdefault(file_names, [])
        for kind, name, chain in names.reads:
            if kind == "cell" and name in cells:
                cell, path = cells[name]
                self._chain(GuardedPlace(cell, name, path), chain)
            elif kind == "global" and name in inserted:
                continue
            elif kind == "global" and name in file_names:
                self._chain(GuardedPlace(file_names, name, f"{file}.{name}"), chain)
            elif kind == "global":
                self._absent.setdefault(file_names, set()).add(name)
                self._insert(file_names, name)
        for module, name in names.imports:
            self._imported(module, name, file_names)
        if names.identifiers & {"eval", "exec"}:  # the text may name any global
            self._list(file_names)
            for name, value in [*file_names.items()]:
                if name in inserted:
                    continue
                if not name.startswith("__") and not isinstance(value, (types.ModuleType, types.FunctionType, type)):
                    self._chain(GuardedPlace(file_names, name, f"{file}.{name}"), ())

    def _insert(self, file_names: dict[str, object], name: str) -> None:
        """Put the stand-in of a builtin function into a file that names it."""
        stand_in = self._stand_ins.of_file(name)
        if stand_in is not None:
            file_names[name] = stand_in
            self._inserted.setdefault(file_names, []).append(name)

    def _list(self, names: dict[str, object]) -> None:
        """Note that all names of a file count."""
        if names not in self._listed:
            self._listed[names] = frozenset(names).difference(self._inserted.get(names, []))

    def _pass(self, place: GuardedPlace, value: object) -> None:
        """Note the value of a place that is read and not recorded."""
        self._passed.setdefault(place.identity, (place, value))

    def _chain(self, place: GuardedPlace, chain: tuple[str, ...]) -> None:
        """Count a name, and the attributes that are read from it one from the other, as read."""
        value = untraced_function(place.get())
        if isinstance(value, Operator) and not chain:
            self._pass(place, value)
            return
        if isinstance(value, types.ModuleType):
            self._pass(place, value)
            if not chain:
                self._file(value)
        else:
            self._note(place)
        for attribute in chain:
            if isinstance(value, types.ModuleType):
                if attribute not in vars(value):
                    self._absent.setdefault(vars(value), set()).add(attribute)
                    if attribute == "__dict__":
                        self._file(value)
                    return
                place = GuardedPlace(vars(value), attribute, f"{value.__name__}.{attribute}")
                if not is_users_file(value):
                    found = place.get()
                    self._of_library(value, place, found)
                    if not isinstance(found, types.ModuleType):
                        return
                    self._pass(place, found)
                    value = found
                    continue
            elif isinstance(value, type) and is_users_class(value):
                owner = next((b for b in value.__mro__ if attribute in b.__dict__), None)
                if owner is None or not is_users_class(owner):
                    return
                place = GuardedPlace(owner, attribute, f"{owner.__name__}.{attribute}")
            elif isinstance(value, types.FunctionType) and user_function(value) is value and attribute[:2] != "__":
                place = GuardedPlace(vars(value), attribute, f"{value.__qualname__}.{attribute}")
            else:
                return
            value = untraced_function(place.get())
            if isinstance(value, types.ModuleType):
                self._pass(place, value)
                continue
            self._note(place)

    def _of_library(self, module: types.ModuleType, place: GuardedPlace, value: object) -> None:
        """Count a function of torch or numpy that the user's code names as read: it may be replaced."""
        if module.__name__.split(".")[0] not in ("torch", "numpy"):
            return
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            self._noted.setdefault(self._source, {}).setdefault(place.identity, place)
            if place.key in _SETTINGS and module is torch:
                self._setting(value)

    def _imported(self, module: str, name: str, file_names: dict[str, object]) -> None:
        """Count a name that is imported inside of a function as read."""
        package = str(file_names.get("__package__") or str(file_names.get("__name__", "")).rpartition(".")[0])
        try:
            full = importlib.util.resolve_name(module, package)
        except ImportError:
            return
        file = self._imports[full] = sys.modules.get(full)
        if file is None or not is_users_file(file):
            return
        if name in vars(file):
            self._chain(GuardedPlace(vars(file), name, f"{full}.{name}"), ())
        else:
            self._absent.setdefault(vars(file), set()).add(name)
            submodule = sys.modules.get(f"{full}.{name}") if name else file
            self._imports[f"{full}.{name}" if name else full] = submodule
            if submodule is not None:
                self._file(submodule)

    def _named(self, identifiers: frozenset[str]) -> None:
        """Count the attributes of classes and files that the present function names as read."""
        code = self._source[0]
        if code in self._identifiers:
            return
        self._identifiers[code] = identifiers
        for word in identifiers & self._holders.keys():
            for found_by, holder in [*self._holders[word]]:
                self._members(code, found_by, holder, word)

    def _holder(self, owner: type | types.ModuleType, names: Iterable[str], holder: _Holder) -> None:
        """Count the attributes of a class, or the names of a file, that functions name as read.

        Args:
            owner: the class or file.
            names: its names.
            holder: the file, or the class and its bases.
        """
        found_by = self._source[0]
        finders = self._found_by.setdefault(owner, set())
        if found_by in finders or None in finders:
            return
        finders.add(found_by)
        names = {name for name in names if name[:2] != "__"}
        for name in names:
            self._holders.setdefault(name, []).append((found_by, holder))
        for code, identifiers in [*self._identifiers.items()]:
            for word in identifiers & names:
                self._members(code, found_by, holder, word)

    def _members(self, code: int | None, found_by: int | None, holder: _Holder, name: str) -> None:
        """Count a name of a file as read; or an attribute of a class, and that the classes which come before it have
        none of this name.

        Args:
            code: the function that names it.
            found_by: the function by which the file or class was found.
        """
        source, self._source = self._source, (code, found_by)
        if isinstance(holder, types.ModuleType):
            if name not in self._inserted.get(vars(holder), []):
                self._chain(GuardedPlace(vars(holder), name, f"{holder.__name__}.{name}"), ())
        else:
            holds = [name in vars(base) for base in holder]
            for index, base in enumerate(holder):
                if holds[index] or not any(holds[:index]):
                    self._note(GuardedPlace(base, name, f"{base.__name__}.{name}"))
        self._source = source

    def _file(self, module: types.ModuleType) -> None:
        """Count the names of a user's file that functions name as read: the file was passed on as a value."""
        if is_users_file(module):
            self._list(vars(module))
            self._holder(module, vars(module), module)

    def _lineage(self, cls: type, built: bool = False) -> None:
        """Count the attributes of a class that functions name as read.

        Args:
            built: an object of the class is in reach; its special methods count as read.
        """
        lineage = self._lineages.get(cls)
        if lineage is None:
            lineage = self._lineages[cls] = _lineage_of(cls)
            for base in lineage:
                if base not in self._scanned:
                    self._scanned.add(base)
                    self.keep_class(base)
                    for name, value in [*vars(base).items()]:
                        if isinstance(value, CONTAINERS):
                            self._found(value, f"{base.__name__}.{name}")
        self._holder(cls, {name for base in lineage for name in vars(base)}, lineage)
        if (id(cls), built, self._source) in self._looked_through:
            return
        self._looked_through.add((id(cls), built, self._source))
        left_out = _NOT_CALLED if built else _EXCHANGED
        for base in lineage:
            for name, value in [*vars(base).items()] if not issubclass(base, nn.Module) or built else ():
                if name[:2] == "__" and name not in left_out and user_function(value) is not None:
                    self._note(GuardedPlace(base, name, f"{base.__name__}.{name}"))

    # -- further runs --

    def found_alike(self) -> bool:
        """True where a further run of the forward would find the same objects to look at, given the kept state."""
        return (
            self.repeatable
            and all(untraced_function(place.get()) is value for place, value in self._passed.values())
            and all(names.isdisjoint(file_names) for file_names, names in self._absent.items())
            and all(file_names.keys() == names for file_names, names in self._listed.items())
            and all(sys.modules.get(name) is file for name, file in self._imports.items())
            and all(id(f.__code__) == code for code, reached in self._reached.items() for f in reached.values())
            and all(lineage == _lineage_of(lineage[0]) for lineage in self._lineages.values() if lineage)
        )

    def find_those_of(self, earlier: NamedReads) -> None:
        """Find what an earlier run of the same forward has found."""
        self._passed, self._imports = dict(earlier._passed), dict(earlier._imports)
        self._absent = IdentityMap((file_names, set(names)) for file_names, names in earlier._absent.items())
        self._listed, self._namespaces = IdentityMap(earlier._listed.items()), dict(earlier._namespaces)
        self._noted = {source: dict(places) for source, places in earlier._noted.items()}
        read, through = earlier._begun
        self._noted[SEEN] = read | self._namespaces
        self._looked_through = {entry for entry in earlier._looked_through if entry[2] != SEEN} | through
        self._looked_at, self._scanned = set(earlier._looked_at), IdentitySet(earlier._scanned)
        self._reached = {code: dict(functions) for code, functions in earlier._reached.items()}
        self._identifiers, self._lineages = dict(earlier._identifiers), IdentityMap(earlier._lineages.items())
        self._holders = {name: list(holders) for name, holders in earlier._holders.items()}
        self._found_by = IdentityMap((found, set(codes)) for found, codes in earlier._found_by.items())
        for place in earlier._functions_replaced:
            self._functions_replaced.append(place)
            self._put_function(place, place.get())
        for file_names, inserted in earlier._inserted.items():
            for name in inserted:
                self._insert(file_names, name)

    def note_begun(self) -> None:
        """Note the reads before the forward begins, which a further run has too."""
        self._begun = dict(self._noted[SEEN]), {entry for entry in self._looked_through if entry[2] == SEEN}


def _lineage_of(cls: type) -> tuple[type, ...]:
    """A class and its bases, as far as these are the user's."""
    return tuple(base for base in cls.__mro__ if is_users_class(base))


def is_users_file(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return is_users(file) if isinstance(file, str) else module.__name__ == "__main__"


def is_users_class(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    return module is not None and module is not builtins and is_users_file(module)

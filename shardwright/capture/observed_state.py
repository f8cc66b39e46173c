"""Observation: the Python state that a forward reads and writes while it is captured.

Reads of attributes are recorded where they happen. During the capture, `nn.Module` and the classes of the model's plain
objects have another ``__getattribute__``, which records reads by the user's code and by torch's own layers. Reads of
globals and closure cells cannot be observed: every global and cell in the bytecode of a forward, a hook, the loss, or
of a user function that these name, counts as read.

Writes are found by comparison. All state in reach of the forward is copied (one level, and the contents of lists, dicts
and sets) when it is first seen, and compared after the forward. At the end all state is restored.
"""

from __future__ import annotations

import dis
import functools
import operator
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..torch_private import hooks_of_all_modules
from .annotations import Operator
from .guards import CONTAINERS, HOOKS, MISSING, TABLES, GuardedPlace, is_simple
from .source_lines import is_users

__all__ = ["Change", "NameRead", "Observation", "names_read", "user_function"]

#: Attributes that every module has; guards check them separately.
_STANDARD = frozenset(vars(nn.Module()))
_LAYERS = torch.nn.__file__.rsplit("/", 1)[0] + "/"
_MODULE_FILE = nn.modules.module.__file__
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
#: Depth to which user functions are followed from the forward that names them.
_DEPTH = 4


@dataclass(frozen=True)
class Change:
    """A place that a forward has changed.

    Args:
        place: its owner is the container itself where a list or a set was changed, and its key None.
        old, new: the values; the contents of a list or a set.
    """

    place: GuardedPlace
    old: Any
    new: Any

    def watch(self) -> Callable[[], bool]:
        """A function that returns True once the place has changed, from this call on."""
        owner, place = self.place.owner, self.place
        if place.key is None and isinstance(owner, CONTAINERS):
            held = tuple(owner)
            return lambda: len(owner) != len(held) or any(a is not b for a, b in zip(owner, held))
        old = place.get()
        return lambda: place.get() is not old


@dataclass
class _Kept:
    """A dict or container, with its contents before the export, and at the beginning of the forward."""

    owner: Any
    before: Any
    begun: Any
    path: str


class _Relevant(dict[str, bool]):
    """File -> True where reads in it count."""

    def __missing__(self, file: str) -> bool:
        found = self[file] = _is_relevant(file)
        return found


class Observation:
    """The reads and writes of one capture, as a context.

    Args:
        modules: the model's modules and those of its loss, by path.
        functions: entry points of the user's code besides the modules' forwards, by their names: the loss, a function
            of models.

    Attributes:
        reads: the places that were read, by identity.
        written: the places of the attributes that were assigned, by identity.
    """

    def __init__(self, modules: list[tuple[str, nn.Module]], functions: list[tuple[str, Any]]) -> None:
        self.reads: dict[tuple[int, Any], GuardedPlace] = {}
        self.written: dict[tuple[int, Any], GuardedPlace] = {}
        self._modules, self._functions = list(modules), functions
        # The keys below hold ids. Every such object is kept alive here, so that no other object gets its id.
        self._paths: dict[int, str] = {}  # id of a dict of attributes, one of `_spaces` -> the path of its object
        self._spaces: list[_Kept] = []  # dicts of attributes, of parameters, buffers and submodules
        self._held: dict[int, _Kept] = {}  # id of a container -> the container
        self._places: dict[tuple[int, Any], tuple[GuardedPlace, Any]] = {}
        self._replaced: dict[
            tuple[int, Any], Any
        ] = {}  # identity of a place -> its number, while a counter replaces it
        self._generators: dict[int, tuple[Any, Any, str]] = {}
        self._relevant = _Relevant()
        self._scanned: dict[int, Any] = {}  # id of a function or class -> itself
        self._patched: list[tuple[type, str, Any]] = []
        self._classes: set[type] = set()
        self._seen: dict[int, Any] = {}  # id of an object -> itself
        self._on = False
        self._own: set[tuple[int, Any]] = set()  # attributes that torch's layers assign to themselves

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """All modules that the forward uses, including modules outside of the model."""
        return self._modules

    def __enter__(self) -> Observation:
        for path, module in self._modules:
            self._space(vars(module), path)
        _generators(self)
        for path, function in self._functions:
            self._found(function, path)
        for path, module in self._modules:
            forward = type(module).forward
            if user_function(forward) is not None:
                self._scan(forward, 0)
                for cls in type(module).__mro__:
                    self._class_containers(cls)
                self._class_place(type(module), "forward", path)
            for hooks in HOOKS[:2]:
                for hook in vars(module)[hooks].values():
                    self._found(hook, f"a hook of {path}")
        for table in (hooks_of_all_modules().forward_pre, hooks_of_all_modules().forward):
            for hook in table.values():
                if not getattr(hook, "of_shardwright", False):
                    self._found(hook, "a hook of all modules")
        self._watch(nn.Module)
        return self

    def begin(self, numbers: Mapping[GuardedPlace, Any]) -> None:
        """Start recording: the forward begins.

        Args:
            numbers: place -> its value during this forward.
        """
        for place, value in numbers.items():
            self._replaced[place.identity] = place.get()
            self._places.setdefault(place.identity, (place, place.get()))
            place.set(value)
        for kept in (*self._spaces, *self._held.values()):  # torch.export has put its own tensors into the model
            kept.begun = self._before(kept.owner)
        self._on = True

    def _before(self, owner: Any) -> Any:
        """A copy of a dict or container as it was before the forward."""
        if isinstance(owner, dict):
            held = dict(dict.items(owner))
            for (owned, key), number in self._replaced.items():
                if owned == id(owner) and key in held:
                    held[key] = number
            return held
        return set(owner) if isinstance(owner, set) else list(owner)

    def _kept(self, owner: Any, path: str) -> _Kept:
        before = self._before(owner)
        return _Kept(owner, before, before, path)

    def __exit__(self, *_: object) -> None:
        self._on = False
        for cls, name, old in reversed(self._patched):
            if old is MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, old)
        self._patched.clear()
        self.restore()
        for kept in (*self._spaces, *self._held.values()):
            _refill(kept.owner, kept.before)

    # -- reads --

    def _watch(self, cls: type) -> None:
        """Record the reads and assignments of attributes on objects of a class."""
        read: Callable[..., Any] = cls.__getattribute__
        assigned: Callable[..., None] = cls.__setattr__
        relevant, note, wrote = self._relevant, self._read, self._wrote

        def __getattribute__(self: Any, name: str) -> Any:
            if relevant[sys._getframe(1).f_code.co_filename]:
                note(self, name)
            return read(self, name)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            file = sys._getframe(1).f_code.co_filename
            if relevant[file]:
                wrote(self, name, file.startswith(_LAYERS))
            assigned(self, name, value)

        for name, ours in (("__getattribute__", __getattribute__), ("__setattr__", __setattr__)):
            before = cls.__dict__.get(name, MISSING)
            try:
                setattr(cls, name, ours)
            except (TypeError, AttributeError):
                return
            self._patched.append((cls, name, before))

    def _read(self, obj: Any, name: str) -> None:
        if not self._on or name in _STANDARD or (name.startswith("__") and name != "__dict__"):
            return
        try:
            attributes = object.__getattribute__(obj, "__dict__")
        except AttributeError:  # slots
            if id(obj) in self._seen:
                self._note(GuardedPlace(obj, name, f"{type(obj).__name__}.{name}"), scan=False)
            return
        key = id(attributes), name
        if key in self.reads or key in self.written:
            return
        path = self._paths.get(id(attributes))
        if path is None:  # the object was created by the forward, or passed to it
            return
        if name == "__dict__":
            for each in [*attributes]:
                if each not in _STANDARD:
                    self._read(obj, each)
            return
        if name in attributes:
            self._note(GuardedPlace(attributes, name, f"{path}.{name}"))
            return
        if isinstance(obj, nn.Module) and any(name in attributes[table] for table in TABLES):
            return
        self._note(GuardedPlace(attributes, name, f"{path}.{name}"))
        self._class_place(type(obj), name, path)

    def _class_place(self, cls: type, name: str, path: str) -> None:
        for base in cls.__mro__:
            if name in base.__dict__:
                if _is_users_class(base):
                    self._note(
                        GuardedPlace(base, name, f"{path}.{name}" if name == "forward" else f"{base.__name__}.{name}")
                    )
                return

    def _wrote(self, obj: Any, name: str, by_torch: bool) -> None:
        attributes = getattr(obj, "__dict__", None)
        path = self._paths.get(id(attributes)) if self._on else None
        if path is None:  # the object was created by the forward
            return
        if by_torch:  # such as the list of weights in an LSTM
            self._own.add((id(attributes), name))
        else:
            self._own.discard((id(attributes), name))
            self.written.setdefault((id(attributes), name), GuardedPlace(attributes, name, f"{path}.{name}"))

    def _note(self, place: GuardedPlace, scan: bool = True) -> None:
        """Record a read of a place."""
        if place.identity in self.reads:
            return
        self.reads[place.identity] = place
        value = place.get()
        if not isinstance(place.owner, dict) or id(place.owner) not in self._paths:
            self._places.setdefault(place.identity, (place, value))
        if scan:
            self._found(value, place.path)

    def _found(self, value: Any, path: str) -> None:
        """Watch a value in reach of the forward: its mutable contents are compared later, functions are followed."""
        if isinstance(value, (torch.Tensor, types.ModuleType)) or value is MISSING:
            return
        if (isinstance(value, tuple) and not is_simple(value)) or isinstance(value, CONTAINERS):
            if id(value) not in self._held:
                if not isinstance(value, tuple):
                    self._held[id(value)] = self._kept(value, path)
                for entry in list(dict.values(value)) if isinstance(value, dict) else list(value):
                    self._found(entry, path)
            return
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            for each in (value.fget, value.fset):
                self._found(each, path)
            return
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._scan(value, 0)
            return
        if _random_state(value) is not None:
            self._generators.setdefault(id(value), (value, _random_state(value), path))
            return
        if is_simple(value) or isinstance(value, Operator) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            if id(vars(value)) not in self._paths:  # a module outside of the model
                for inner, module in value.named_modules():
                    self._modules.append((f"{path}.{inner}" if inner else path, module))
                    self._space(vars(module), f"{path}.{inner}" if inner else path)
            return
        attributes = getattr(value, "__dict__", None)
        cls = type(value)
        if (
            cls.__flags__ & _HEAP_TYPE
            and not cls.__flags__ & _IMMUTABLE_TYPE
            and cls.__module__.split(".")[0] not in _NOT_USERS
        ):
            if attributes is not None:
                self._space(attributes, path)
            if cls not in self._classes:
                self._classes.add(cls)
                self._watch(cls)
            call = getattr(cls, "__call__", None)  # noqa: B004  looked at, not only asked for
            if isinstance(call, types.FunctionType):
                self._scan(call, 0)
        elif isinstance(
            value, types.SimpleNamespace
        ):  # a namespace cannot be watched: all its attributes count as read
            assert attributes is not None
            self._space(attributes, path)
            for name in attributes:
                self._note(GuardedPlace(attributes, name, f"{path}.{name}"))

    # -- globals and closures --

    def _scan(self, function: Any, depth: int) -> None:
        """Count the globals and cells in a function's code as read."""
        function = user_function(function)
        if function is None or id(function) in self._scanned or depth > _DEPTH:
            return
        self._scanned[id(function)] = function
        self._space(vars(function), function.__qualname__)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if isinstance(value, CONTAINERS):
                self._found(value, f"a default of {function.__qualname__}")
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        for kind, name, chain in names_read(function.__code__):
            if kind == "argument":
                continue
            if kind == "cell":
                if name not in cells:
                    continue
                place = GuardedPlace(cells[name], name, f"{name}, which {function.__qualname__} closes over,")
            elif name in function.__globals__:
                place = GuardedPlace(function.__globals__, name, f"{function.__module__}.{name}")
            else:
                continue
            value = place.get()
            if isinstance(value, (Operator, types.ModuleType)) and not chain:
                continue
            if not isinstance(value, types.ModuleType):
                self._reach(place, depth)
            for attribute in chain:
                if isinstance(value, types.ModuleType):
                    if (
                        value.__name__.split(".")[0] in _NOT_USERS
                        or attribute not in vars(value)
                        or not is_users(getattr(value, "__file__", None) or "<")
                    ):
                        break
                    place = GuardedPlace(vars(value), attribute, f"{value.__name__}.{attribute}")
                elif isinstance(value, type) and _is_users_class(value):
                    owner = next((b for b in value.__mro__ if attribute in b.__dict__), None)
                    if owner is None:
                        break
                    place = GuardedPlace(owner, attribute, f"{owner.__name__}.{attribute}")
                else:
                    break
                self._reach(place, depth)
                value = place.get()

    def _reach(self, place: GuardedPlace, depth: int) -> None:
        value = place.get()
        inner = user_function(value) if isinstance(value, (types.FunctionType, functools.partial)) else None
        if (isinstance(value, types.FunctionType) and inner is None) or isinstance(value, types.BuiltinFunctionType):
            return  # a function of a library: never replaced
        if isinstance(value, type) and not _is_users_class(value):
            return
        if isinstance(value, type):
            self._class_containers(value)
        self._note(place, scan=inner is None)
        if inner is not None:
            self._scan(inner, depth + 1)

    def _class_containers(self, cls: type) -> None:
        """Watch the lists and dicts of a class of the user."""
        if id(cls) not in self._scanned and _is_users_class(cls):
            self._scanned[id(cls)] = cls
            for name, value in list(vars(cls).items()):
                if isinstance(value, CONTAINERS):
                    self._found(value, f"{cls.__name__}.{name}")

    # -- writes --

    def _space(self, attributes: dict[str, object], path: str) -> None:
        if id(attributes) in self._paths:
            return
        self._paths[id(attributes)] = path
        self._spaces.append(self._kept(attributes, path))
        for name, value in attributes.items():
            if name in TABLES and isinstance(value, dict):
                self._spaces.append(self._kept(value, path))
            elif name not in _STANDARD and isinstance(value, CONTAINERS):
                self._found(value, f"{path}.{name}")

    def changes(self) -> Iterator[Change]:
        """The changes by the forward, compared with the present state."""
        self._on = False
        for kept in self._spaces:
            space, before, path = kept.owner, kept.begun, kept.path
            if _same_entries(space, before):
                continue
            for key in {**before, **dict(dict.items(space))}:
                old, new = before.get(key, MISSING), dict.get(space, key, MISSING)
                if old is not new and (id(space), key) not in self._own:
                    yield Change(GuardedPlace(space, key, f"{path}.{key}"), old, new)
        for place, old in self._places.values():
            new = place.get()
            looked_at = isinstance(place.owner, dict) and (
                id(place.owner) in self._paths or id(place.owner) in self._held
            )
            if new is not old and not looked_at:
                yield Change(place, old, new)
        for kept in self._held.values():
            held, before, path = kept.owner, kept.begun, kept.path
            if isinstance(held, dict):
                for key in {**before, **dict(dict.items(held))}:
                    old, new = before.get(key, MISSING), dict.get(held, key, MISSING)
                    if old is not new:
                        yield Change(GuardedPlace(held, key, f"{path}[{key!r}]"), old, new)
            elif (
                held != before
                if isinstance(held, set)
                else len(held) != len(before) or any(a is not b for a, b in zip(held, before))
            ):
                yield Change(GuardedPlace(held, None, path), tuple(before), tuple(held))

    def draws(self) -> tuple[str, Callable[[], Callable[[], bool]]] | None:
        """A random number generator from which the forward has drawn, and a function that starts to watch it.

        Generators of torch are not looked at. None where the forward has drawn from none.
        """
        for generator, before, path in self._generators.values():
            if not _equal_states(_random_state(generator), before):
                return path, functools.partial(_watch_draws, generator)
        return None

    def restore(self) -> None:
        """Restore the state from before the forward."""
        for kept in (*self._spaces, *self._held.values()):
            _refill(kept.owner, kept.begun)
        for place, old in self._places.values():
            if place.get() is not old:
                place.set(old)
        for generator, before, _ in self._generators.values():
            _set_random_state(generator, before)


_NOT_USERS = frozenset(
    {
        "torch",
        "builtins",
        "numpy",
        "collections",
        "types",
        "functools",
        "logging",
        "threading",
        "random",
        "enum",
        "abc",
        "typing",
        "weakref",
        "contextvars",
        "re",
        "pathlib",
        "_thread",
        "shardwright",
        "sympy",
    }
)


def _is_relevant(file: str) -> bool:
    return is_users(file) or (file.startswith(_LAYERS) and file != _MODULE_FILE)


def _is_users_class(cls: type) -> bool:
    return is_users(getattr(sys.modules.get(cls.__module__), "__file__", None) or "<")


def user_function(value: Any) -> types.FunctionType | None:
    """The user's own function behind a method, a partial or a wrapper of torch; None for a function of a library."""
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.MethodType):
            value = value.__func__
        elif (
            isinstance(value, types.FunctionType)
            and not is_users(value.__code__.co_filename)
            and hasattr(value, "__wrapped__")
        ):
            value = value.__wrapped__
        else:
            break
    if isinstance(value, types.FunctionType) and is_users(value.__code__.co_filename):
        return value
    return None


class NameRead(NamedTuple):
    """A name that a function's code refers to: ``trainer.net`` is the name ``trainer`` with the chain ``("net",)``.

    Attributes:
        kind: "global", "cell" (a variable of an enclosing function) or "argument" (the function's first one).
        name: the name.
        chain: the attributes that are read from it, one from the other.
    """

    kind: str
    name: str
    chain: tuple[str, ...]


#: Id of a code object -> itself, and the names in it. Hashing a code object takes longer than a walk of its names.
_NAMES: dict[int, tuple[types.CodeType, tuple[NameRead, ...]]] = {}
#: The number of code objects that are remembered.
_KEPT_NAMES = 4096


def names_read(code: types.CodeType) -> tuple[NameRead, ...]:
    """The names that a code object refers to, and the functions that it defines inside, each with its longest chain."""
    known = _NAMES.get(id(code))
    if known is None:
        if len(_NAMES) >= _KEPT_NAMES:
            _NAMES.clear()
        known = _NAMES[id(code)] = code, _names_in(code)
    return known[1]


def _names_in(code: types.CodeType) -> tuple[NameRead, ...]:
    found: dict[NameRead, None] = {}
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            inner = (read for read in names_read(each) if read.kind != "argument")
            found.update(
                dict.fromkeys(read for read in inner if read.kind == "global" or read.name in code.co_freevars)
            )
    first = code.co_varnames[:1] if code.co_argcount else ()
    current: NameRead | None = None
    for instruction in dis.get_instructions(code):
        kind, named = instruction.opname, instruction.argval
        if kind in ("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL"):
            continue
        if kind in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR") and current is not None:
            current = current._replace(chain=(*current.chain, named))
            continue
        if current is not None:
            found[current] = None
            current = None
        if kind in ("LOAD_GLOBAL", "STORE_GLOBAL"):
            current = NameRead("global", named, ())
        elif kind in ("LOAD_DEREF", "STORE_DEREF", "LOAD_CLASSDEREF") and named in code.co_freevars:
            current = NameRead("cell", named, ())
        elif kind.startswith(("LOAD_FAST", "LOAD_DEREF")):
            *others, last = named if isinstance(named, tuple) else (named,)  # one instruction may load two variables
            found.update(dict.fromkeys(NameRead("argument", other, ()) for other in others if other in first))
            current = NameRead("argument", last, ()) if last in first else None
    if current is not None:
        found[current] = None
    return tuple(found)


def _same_entries(held: dict[str, object], before: dict[str, object]) -> bool:
    """True where two dicts have the same keys in the same order, and the same objects."""
    return (
        dict.__len__(held) == len(before)
        and all(map(operator.eq, dict.keys(held), before))
        and all(map(operator.is_, dict.values(held), before.values()))
    )


def _refill(held: Any, before: Any) -> None:
    """Restore the contents of a container."""
    if isinstance(held, dict):
        if not _same_entries(held, before):
            dict.clear(held)
            dict.update(held, before)
    elif isinstance(held, set):
        if held != before:
            held.clear()
            held.update(before)
    elif len(held) != len(before) or any(a is not b for a, b in zip(held, before)):
        held.clear()
        held.extend(before)


# -- random number generators outside of torch --


def _generators(observation: Observation) -> None:
    kept = observation._generators
    kept[id(random._inst)] = random._inst, random.getstate(), "random"
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        one = numpy.random.mtrand._rand
        kept[id(one)] = one, _random_state(one), "numpy.random"


def _random_state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.random.Generator):
            return value.bit_generator.state
        if isinstance(value, numpy.random.RandomState):
            return value.get_state(legacy=False)
    return None


def _set_random_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    else:
        value.set_state(state)


def _watch_draws(generator: Any) -> Callable[[], bool]:
    before = _random_state(generator)
    return lambda: not _equal_states(_random_state(generator), before)


def _equal_states(a: Any, b: Any) -> bool:
    return _plain(a) == _plain(b)


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: _plain(v) for k, v in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state

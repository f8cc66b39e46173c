"""Stand-ins for what a forward takes from outside of the model, while it is captured.

    an iterator, a generator       in its place: an error where the forward takes the next value
    an open file                   what is written is repeated at each call; everything else is an error
    getattr, hasattr, setattr,     in the files of the user's functions that name them: reads of modules and classes
        vars, globals              are recorded, which no class shows
    copy.copy, copy.deepcopy       all attributes count as read
    open                           an error
    os.environ                     its reads and writes are recorded
    time.time() and its kin        a later time in the second capture (`second_run`), so that a branch on time shows
    os.urandom, secrets, uuid,     an error: numbers of the system
        random.Random() and
        numpy's default_rng()
        without a seed

Iterators, files and functions are replaced where the user's code finds them (`Observation`), and put back at the end.

Example: a forward with ``next(self.batches)``, where ``net.batches = iter([1, 2, 3])``, is an error: "the forward takes
the next value of net.batches, a list_iterator". After the capture ``net.batches`` is the same iterator, at 1.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import io
import os
import random
import secrets
import sys
import sysconfig
import threading
import time
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeGuard

from ...errors import PACKAGE_FOLDER, CaptureError
from ...identity_tables import IdentityMap
from ..source_lines import is_users
from .places import Entry

__all__ = ["Observer", "StandIns", "by_user", "original_of"]

#: Seconds by which the clocks of a second capture are ahead: ten years and a bit, odd in every unit down to 0.01 s.
LATER = 315_360_001.37

_PYTHON = sysconfig.get_path("stdlib") + "/"
#: The attribute of a stand-in that holds the function behind it.
_REPLACED = "of_shardwright_for"
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_INPUT = "the value as an input of the model, or a registered buffer that the forward updates"


_Function = Callable[..., object]


class Observer(Protocol):
    """The observation of the state that a forward reads and writes."""

    running: bool

    def asked(self, obj: object, name: str) -> None:
        """Record a read of an attribute by name."""

    def assigned(self, obj: object, name: str) -> None:
        """Record an assignment of an attribute by name, before it happens."""

    def asked_entry(self, owner: object, key: object, path: str) -> None:
        """Record a read of an entry of a module's names, or of the environment."""

    def assigned_entry(self, owner: object, key: object, path: str) -> None:
        """Record an assignment of such an entry, before it happens."""


def frames() -> Iterator[FrameType]:
    """The frames of the current call from the innermost, without frames of Shardwright."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
            yield frame
        frame = frame.f_back


def by_user() -> bool:
    """True where the user's code is the caller, directly or through Python's library; warnings are Python's own."""
    for frame in frames():
        file = frame.f_code.co_filename
        if is_users(file):
            return True
        if not file.startswith((_PYTHON, "<frozen")) or "-packages/" in file or file.endswith("/warnings.py"):
            return False
    return False


class _Iterator:
    """An iterator that gives nothing to the forward, and to other threads what it would give."""

    def __init__(self, original: Iterator[object], path: str, inside: Callable[[], bool]) -> None:
        self.original, self._path, self._inside = original, path, inside

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> object:
        if not self._inside():
            return next(self.original)
        raise CaptureError(
            f"the forward takes the next value of {self._path}, a {type(self.original).__name__}: the captured program "
            "would use this value at each call",
            legal=_INPUT,
        )

    def _sent(self, *_: object) -> object:
        return self.__next__()

    def __getattr__(self, name: str) -> object:
        return self._sent if name in ("send", "throw") and self._inside() else getattr(self.original, name)


class _File:
    """An open file whose writes by the forward are recorded."""

    def __init__(self, original: io.IOBase, path: str, inside: Callable[[], bool]) -> None:
        self.original, self._path, self._inside = original, path, inside

    def write(self, text: object) -> object:
        if not self._inside():
            return self.original.write(text)
        if not isinstance(text, str):
            self._refuse()
        print(text, end="", file=self)  # `watched_calls` records it
        return len(text)

    def writelines(self, lines: Iterable[object]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self._inside():
            self.original.flush()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise CaptureError(
            f"the forward uses {self._path}, an open file, for more than writing text, which the captured program "
            "would leave out",
            legal="the use of the file outside of the forward",
        )

    def __getattr__(self, name: str) -> object:
        found = getattr(self.original, name)
        return self._refuse if callable(found) and self._inside() else found


def _through(name: str) -> Callable[..., object]:
    def call(self: _File, *args: object) -> object:
        return self._refuse() if self._inside() else getattr(self.original, name)(*args)

    return call


for _name in ("__iter__", "__next__", "__enter__", "__exit__"):
    setattr(_File, _name, _through(_name))


class _Names(MutableMapping[str, object]):
    """The names of a file, as ``globals()`` and ``vars(module)`` give them."""

    def __init__(self, names: dict[str, object], path: str, observer: Observer) -> None:
        self._names, self._path, self._observer = names, path, observer

    def __getitem__(self, key: str) -> object:
        self._observer.asked_entry(self._names, key, f"{self._path}.{key}")
        return self._names[key]

    def __setitem__(self, key: str, value: object) -> None:
        self._observer.assigned_entry(self._names, key, f"{self._path}.{key}")
        self._names[key] = value

    def __delitem__(self, key: str) -> None:
        self._observer.assigned_entry(self._names, key, f"{self._path}.{key}")
        del self._names[key]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._names))

    def __len__(self) -> int:
        return len(self._names)


def original_of(value: object) -> Any:  # the object behind it
    """The object behind a stand-in; any other object itself."""
    return value.original if isinstance(value, (_Iterator, _File)) else getattr(value, _REPLACED, value)


class StandIns:
    """The stand-ins of one capture.

    Args:
        observer: records reads and writes.
        later: True where clocks are ahead.
    """

    def __init__(self, observer: Observer, later: bool) -> None:
        self._observer, self._later, self._thread = observer, later, threading.get_ident()
        # Function -> its stand-in in this run; None: it has one in another run.
        self._functions: IdentityMap[object, _Function | None] = IdentityMap()
        for owner, name, made in (*self._refused(), *self._copies(), *self._clocks()):
            plain = getattr(owner, name, None)
            if plain is None:
                continue
            stand_in = None
            if owner is not time or later:
                stand_in = made(plain)
                setattr(stand_in, _REPLACED, plain)
            self._functions[plain] = stand_in

    def _inside(self) -> bool:
        """True while the forward runs; other threads, of a data loader say, go on as ever."""
        return self._observer.running and threading.get_ident() == self._thread

    # -- functions that a module may keep: they hold no capture --

    def _clocks(self) -> Iterator[tuple[object, str, Callable[..., _Function]]]:
        inside = _inside_of(self)

        def ahead(by: float, plain: Callable[[], float]) -> _Function:
            def clock() -> float:
                return plain() + (by if inside() and is_users(_caller()) else 0)

            return clock

        for name in _CLOCKS:
            yield time, name, functools.partial(ahead, LATER)
            yield time, f"{name}_ns", functools.partial(ahead, int(LATER * 1e9))

    def _copies(self) -> Iterator[tuple[object, str, Callable[..., _Function]]]:
        inside = _inside_of(self)

        def copies(plain: _Function) -> _Function:
            def call(x: object, *args: object, **kwargs: object) -> object:
                observer = inside()
                if observer is not None and by_user():
                    observer.asked(x, "__dict__")
                return plain(x, *args, **kwargs)

            return call

        yield copy, "copy", copies
        yield copy, "deepcopy", copies

    def _refused(self) -> Iterator[tuple[object, str, Callable[..., _Function]]]:
        inside = _inside_of(self)

        def refused(name: str, seeded: bool, plain: _Function) -> _Function:
            def call(*args: object, **kwargs: object) -> object:
                seed = next(iter((*args, *kwargs.values())), None)
                if inside() and by_user() and not (seeded and seed is not None):
                    raise CaptureError(
                        f"the forward calls {name}"
                        + (" without a seed" if seeded else "")
                        + ", whose numbers differ at each call, and which the captured program would repeat",
                        legal="torch.rand in the forward, or the number as an input",
                    )
                return plain(*args, **kwargs)

            return call

        numpy = sys.modules.get("numpy")
        for owner, names, seeded in (
            (os, ("urandom",), False),
            (uuid, ("uuid1", "uuid4"), False),
            (secrets, ("randbelow", "randbits", "choice", "token_bytes", "token_hex", "token_urlsafe"), False),
            (getattr(numpy, "random", None), ("default_rng",), True),
        ):
            for name in names if owner is not None else ():
                yield owner, name, functools.partial(refused, f"{getattr(owner, '__name__', '')}.{name}", seeded)

    def may_replace(self, value: object) -> bool:
        """True for a function that has a stand-in in some run of a capture."""
        return value in self._functions

    def function(self, value: object) -> _Function | None:
        """The stand-in for a function of Python or numpy; None where the function itself is called."""
        return self._functions.get(value)

    def of_file(self, name: str) -> _Function | None:
        """The stand-in for a builtin function in a file of the user; None where the function itself is called."""
        return getattr(self, f"_{name}") if name in _OF_FILES else None

    def _getattr(self, obj: object, name: str, *default: object) -> object:
        self._observer.asked(obj, name)
        return getattr(obj, name, *default)

    def _hasattr(self, obj: object, name: str) -> bool:
        self._observer.asked(obj, name)
        return hasattr(obj, name)

    def _setattr(self, obj: object, name: str, value: object) -> None:
        self._observer.assigned(obj, name)
        setattr(obj, name, value)

    def _vars(self, *args: object) -> object:
        if not args:
            return sys._getframe(1).f_locals
        (obj,) = args
        if isinstance(obj, types.ModuleType):
            return _Names(vars(obj), obj.__name__, self._observer)
        for name in [*vars(obj)] if isinstance(obj, type) else ("__dict__",):
            self._observer.asked(obj, name)
        return vars(obj)

    def _globals(self) -> object:
        names = sys._getframe(1).f_globals
        return _Names(names, str(names.get("__name__", "globals")), self._observer)

    # -- objects --

    def of_object(self, value: object, path: str) -> object:
        """The stand-in for an iterator or an open file; None for any other object."""
        if type(value) in (_Iterator, _File, *weakref.ProxyTypes):
            return None
        if isinstance(value, io.IOBase):
            standard = (sys.stdout, sys.stderr, sys.stdin, sys.__stdout__, sys.__stderr__, sys.__stdin__)
            return None if any(value is each for each in standard) else _File(value, path, self._inside)
        if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)) and value.__name__ == "__next__":
            owner = value.__self__
            if not _gives(owner):
                return None
            step = functools.partial(_Iterator.__next__, _Iterator(owner, path, self._inside))
            setattr(step, _REPLACED, value)
            return step
        return _Iterator(value, path, self._inside) if _gives(value) else None

    @contextlib.contextmanager
    def put(self) -> Iterator[None]:
        """Put stand-ins in place of the functions of Python's library, while the context is active.

        A module that is imported meanwhile (``from copy import deepcopy``) gets the functions at the end. One that is
        written in C keeps a stand-in, which holds nothing of the capture.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(_put_back_in_modules, tuple(sys.modules))
            places = [(time, n) for n in (*_CLOCKS, *(f"{n}_ns" for n in _CLOCKS))] if self._later else []
            places += [(os, "urandom"), (uuid, "uuid1"), (uuid, "uuid4"), (copy, "copy"), (copy, "deepcopy")]
            places += [(secrets, n) for n in vars(secrets)]
            if "numpy" in sys.modules:
                places.append((sys.modules["numpy"].random, "default_rng"))
            for owner, name in places:
                stand_in = self.function(getattr(owner, name, None))
                if stand_in is not None:
                    _swap(stack, owner, name, stand_in)
            for owner in (builtins, io):
                _swap(stack, owner, "open", self._opened(owner.open))
            _swap(stack, random.Random, "seed", self._seeded(random.Random.seed))
            for name in ("random", "getrandbits"):
                plain = getattr(random.SystemRandom, name)
                _swap(stack, random.SystemRandom, name, self._of_system(plain))
            for name in ("__getitem__", "__setitem__", "__delitem__", "__iter__"):
                _swap(stack, type(os.environ), name, self._environment(name))
            yield

    def _opened(self, plain: _Function) -> _Function:
        def open_(file: object, mode: str = "r", *args: object, **kwargs: object) -> object:
            if self._inside() and by_user():
                reads = not set("wax+") & set(mode)
                raise CaptureError(
                    f"the forward opens the file {file!r}, which the captured program would not do: "
                    + ("what is read now would be used at each call" if reads else "nothing would be written again"),
                    legal="the file read in __init__, and its content kept in an attribute"
                    if reads
                    else "the file written outside of the forward, or print(text, file=an open file)",
                )
            return plain(file, mode, *args, **kwargs)

        return open_

    def _seeded(self, plain: _Function) -> _Function:
        def seed(generator: object, a: object = None, *args: object, **kwargs: object) -> object:
            if a is None and self._inside() and by_user():
                raise _system("seeds random.Random from the system")
            return plain(generator, a, *args, **kwargs)

        return seed

    def _of_system(self, plain: _Function) -> _Function:
        def draw(generator: object, *args: object) -> object:
            if self._inside() and by_user():
                raise _system("draws from random.SystemRandom")
            return plain(generator, *args)

        return draw

    def _environment(self, name: str) -> _Function:
        plain, observer = getattr(type(os.environ), name), self._observer

        def read(environment: Mapping[str, str], key: str) -> object:
            if environment is os.environ and self._inside() and by_user():
                observer.asked_entry(environment, Entry(key), f"os.environ[{key!r}]")
            return plain(environment, key)

        def write(environment: Mapping[str, str], key: str, *value: str) -> object:
            if environment is os.environ and self._inside() and by_user():
                observer.assigned_entry(environment, Entry(key), f"os.environ[{key!r}]")
            return plain(environment, key, *value)

        def each(environment: Mapping[str, str]) -> object:
            return plain(environment)

        stand_ins: dict[str, _Function] = {"__getitem__": read, "__iter__": each}
        return stand_ins.get(name, write)


def _inside_of(stand_ins: StandIns) -> Callable[[], Observer | None]:
    """A function that gives the observer while the forward runs, and keeps no capture alive."""
    reference = weakref.ref(stand_ins)

    def inside() -> Observer | None:
        found = reference()
        return found._observer if found is not None and found._inside() else None

    return inside


def _put_back_in_modules(known: tuple[str, ...]) -> None:
    """Put functions back where modules have imported their stand-ins.

    Args:
        known: the names of the modules that were there before the stand-ins.
    """
    for name in sys.modules.keys() - set(known) if tuple(sys.modules) != known else ():
        names = getattr(sys.modules.get(name), "__dict__", {})
        for key, value in [*names.items()]:
            if type(value) is types.FunctionType and hasattr(value, _REPLACED):
                names[key] = original_of(value)


#: Builtin functions that have stand-ins in files of the user.
_OF_FILES = frozenset({"getattr", "hasattr", "setattr", "vars", "globals"})


def _system(what: str) -> CaptureError:
    return CaptureError(
        f"the forward {what}: its numbers differ at each call, and the captured program would repeat them",
        legal="a seed, torch.rand in the forward, or the number as an input",
    )


def _caller() -> str:
    """The file of the innermost frame besides this package."""
    return next((frame.f_code.co_filename for frame in frames()), "")


def _gives(value: object) -> TypeGuard[Iterator[object]]:
    """True for an iterator that is not written by the user: nothing shows how far it is."""
    kind = type(value)
    if not hasattr(kind, "__next__"):
        return False
    step = kind.__next__
    code = getattr(step, "__code__", None)
    return code is None or not is_users(code.co_filename)


def _swap(stack: contextlib.ExitStack, owner: object, name: str, value: object) -> None:
    """Give an attribute another value until the stack ends."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)

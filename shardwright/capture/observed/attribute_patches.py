"""Patches by which a capture records the attributes that a forward reads and assigns.

Python updates every subclass of a class whose special method is replaced: 1,800 classes below `nn.Module` in a process
that has imported transformers and diffusers. The methods of `nn.Module` are therefore replaced once for all runs of a
capture (`modules_patched`). A run enters what the replaced methods call:

    with modules_patched():                  ``__getattribute__``, ``__setattr__`` and ``__call__`` are replaced
        with module_attributes(first): ...   `first` records the attributes of modules
        with module_attributes(again): ...   and now `again`
                                             the methods are those of before

A run sees the modules that its own thread uses. Captures inside of a capture, and captures by several threads at once,
share the patch; the last one to end puts the methods back. Classes of plain objects are patched by each run
(`attribute_methods`).

Example: a forward with ``self.count += 1`` inside of ``module_attributes(first)``. `first` records a read of "count"
and an assignment to "count". The same forward in another thread is not recorded.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Protocol, TypeVar

import torch
from torch import nn

from ..source_lines import is_users
from .places import MISSING
from .stand_ins import frames

__all__ = [
    "STANDARD",
    "WATCHED_PACKAGES",
    "AttributeObserver",
    "attribute_methods",
    "module_attributes",
    "module_calls",
    "modules_patched",
    "plain_module_methods",
    "put_attribute",
]

_TORCH = torch.__file__.rsplit("/", 1)[0] + "/"
_PYTHON = sysconfig.get_path("stdlib") + "/"
_MODULE_FILE = nn.modules.module.__file__

#: Attributes that every module has; guards check them separately.
STANDARD = frozenset(vars(nn.Module()))

#: Packages of torch whose objects are watched like the user's, and in whose files reads count.
WATCHED_PACKAGES = ("torch.nn", "torch.optim", "torch.amp", "torch.distributions", "torch.utils.data")
_WATCHED_FILES = tuple(_TORCH + name.split(".", 1)[1].replace(".", "/") + "/" for name in WATCHED_PACKAGES)
#: Files of Python's library that read the attributes of an object for the user.
_PASSING = tuple(
    _PYTHON + n for n in ("copy.py", "copyreg.py", "dataclasses.py", "functools.py", "argparse.py", "json/")
)


V = TypeVar("V")


class AttributeObserver(Protocol):
    """Records the attributes that a forward reads and assigns."""

    def attribute_read(self, obj: object, name: str) -> None:
        """Record a read of an attribute, before it happens."""

    def attribute_assigned(self, obj: object, name: str, by_torch: bool) -> None:
        """Record an assignment of an attribute, before it happens.

        Args:
            by_torch: True for an assignment by torch's own layers.
        """


class _Relevant(dict[str, bool | None]):
    """File -> True where reads in it count, None where those count that the user's code has it make."""

    def __missing__(self, file: str) -> bool | None:
        found = self[file] = (
            None
            if file.startswith(_PASSING)
            else is_users(file)
            or (file.startswith(_WATCHED_FILES) and file != _MODULE_FILE)
            or (file.startswith("<") and not file.startswith("<frozen"))
        )
        return found


_relevant = _Relevant()


def _for_user() -> bool:
    """True where the user's code has Python's library read an attribute."""
    for frame in frames():
        file = frame.f_code.co_filename
        if not file.startswith(_PYTHON) or "-packages/" in file:
            return is_users(file)
    return False


def attribute_methods(cls: type, observer: AttributeObserver) -> Iterator[tuple[str, Callable[..., object]]]:
    """The methods of a class that record the attributes of its objects, by their names."""
    read: Callable[..., object] = cls.__getattribute__
    assigned: Callable[..., None] = cls.__setattr__
    relevant, note_read, note_assigned = _relevant, observer.attribute_read, observer.attribute_assigned

    def __getattribute__(self: object, name: str) -> object:
        counts = relevant[sys._getframe(1).f_code.co_filename]
        if counts or (counts is None and _for_user()):
            note_read(self, name)
        return read(self, name)

    def __setattr__(self: object, name: str, value: object) -> None:
        file = sys._getframe(1).f_code.co_filename
        if relevant[file]:
            note_assigned(self, name, file.startswith(_WATCHED_FILES))
        assigned(self, name, value)

    yield "__getattribute__", __getattribute__
    yield "__setattr__", __setattr__


def put_attribute(owner: type, name: str, value: object) -> None:
    """Give a class an attribute; `MISSING` removes it."""
    if value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


# -- modules -----------------------------------------------------------------------------------------------------------

#: Thread -> the observer of the run inside of it.
_observers: dict[int, AttributeObserver] = {}
#: Thread -> the function that calls a module for the run inside of it: ``caller(call, module, *args, **kwargs)``.
_callers: dict[int, Callable[..., object]] = {}

_lock = threading.Lock()
_captures: list[object] = []  # those that share the patch
_replaced: dict[str, object] = {}  # name of a method of `nn.Module` -> the method before the patch


def _module_methods() -> Iterator[tuple[str, Callable[..., object]]]:
    """The methods of `nn.Module` that serve the runs of captures, by their names."""
    read, assigned, called = nn.Module.__getattribute__, nn.Module.__setattr__, nn.Module.__call__
    relevant, observers, callers, standard = _relevant, _observers, _callers, STANDARD

    def __getattribute__(self: nn.Module, name: str) -> object:
        if name not in standard and (observer := observers.get(get_ident())) is not None:
            counts = relevant[sys._getframe(1).f_code.co_filename]
            if counts or (counts is None and _for_user()):
                observer.attribute_read(self, name)
        return read(self, name)

    def __setattr__(self: nn.Module, name: str, value: torch.Tensor | nn.Module) -> None:  # as torch has it
        observer = observers.get(get_ident())
        if observer is not None:
            file = sys._getframe(1).f_code.co_filename
            if relevant[file]:
                observer.attribute_assigned(self, name, file.startswith(_WATCHED_FILES))
        assigned(self, name, value)

    def __call__(self: nn.Module, *args: object, **kwargs: object) -> object:
        caller = callers.get(get_ident())
        return called(self, *args, **kwargs) if caller is None else caller(called, self, *args, **kwargs)

    yield "__getattribute__", __getattribute__
    yield "__setattr__", __setattr__
    yield "__call__", __call__


@contextlib.contextmanager
def modules_patched() -> Iterator[None]:
    """Replace the methods of `nn.Module` while the context is active."""
    capture = object()
    with _lock:
        if not _captures:
            for name, method in [*_module_methods()]:
                _replaced[name] = vars(nn.Module).get(name, MISSING)
                setattr(nn.Module, name, method)
        _captures.append(capture)
    try:
        yield
    finally:
        with _lock:
            _captures.remove(capture)
            if not _captures:
                for name, before in _replaced.items():
                    put_attribute(nn.Module, name, before)
                _replaced.clear()


def plain_module_methods() -> list[object]:
    """The methods of `nn.Module` behind the patch."""
    return [method for method in _replaced.values() if method is not MISSING]


@contextlib.contextmanager
def module_attributes(observer: AttributeObserver) -> Iterator[None]:
    """Let an observer record the attributes of modules that this thread reads and assigns."""
    with modules_patched(), _entered(_observers, observer):
        yield


@contextlib.contextmanager
def module_calls(caller: Callable[..., object]) -> Iterator[None]:
    """Let ``caller(call, module, *args, **kwargs)`` make the calls of modules by this thread.

    Args:
        caller: ``call(module, *args, **kwargs)`` calls the module.
    """
    with modules_patched(), _entered(_callers, caller):
        yield


@contextlib.contextmanager
def _entered(table: dict[int, V], value: V) -> Iterator[None]:
    """Enter a value for this thread, in the place of that of a run around this one."""
    thread = get_ident()
    around = table.get(thread)
    table[thread] = value
    try:
        yield
    finally:
        if around is None:
            del table[thread]
        else:
            table[thread] = around

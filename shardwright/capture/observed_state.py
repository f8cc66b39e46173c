"""Observation: the Python state that a forward reads and writes while it is captured.

Reads of attributes are recorded where they happen. During the capture, `nn.Module` and the classes of the model's plain
objects have another ``__getattribute__``, which records reads by the user's code and by torch's own layers. Reads of
globals, closure cells, modules and classes cannot be observed. These count as read:

    globals and cells            those in the bytecode of a forward, a hook, the loss, or a function that these reach
    attributes of classes        those that such a function names: ``cls.K``, ``super().f``, ``type(self).K``
        and functions
    getattr(module, name),       what is asked for: stand-ins take the place of these functions
        globals()[name]
    functions                    their code and defaults

Writes are found by comparison: all state in reach of the forward is copied when it is first seen, and compared after
the forward (`kept_state`). At the end all state is restored.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..torch_private import hooks_of, hooks_of_all_modules, is_part
from .annotations import Operator
from .observed.code_names import user_function
from .observed.kept_state import Change
from .observed.named_reads import SEEN, NamedReads, is_users_class, is_users_file
from .observed.opaque_state import global_generators
from .observed.places import CONTAINERS, MISSING, GuardedPlace, is_simple
from .observed.stand_ins import StandIns, frames
from .source_lines import is_users

__all__ = ["Change", "Observation"]

#: Attributes that every module has; guards check them separately.
_STANDARD = frozenset(vars(nn.Module()))
_TORCH = torch.__file__.rsplit("/", 1)[0] + "/"
_PYTHON = sysconfig.get_path("stdlib") + "/"
_MODULE_FILE = nn.modules.module.__file__
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8

#: Packages of torch whose objects are watched like the user's, and in whose files reads count.
_WATCHED = ("torch.nn", "torch.optim", "torch.amp", "torch.distributions", "torch.utils.data")
_FILES = tuple(_TORCH + name.split(".", 1)[1].replace(".", "/") + "/" for name in _WATCHED)
#: Files of Python's library that read the attributes of an object for the user.
_PASSING = tuple(
    _PYTHON + n for n in ("copy.py", "copyreg.py", "dataclasses.py", "functools.py", "argparse.py", "json/")
)

#: Objects of Python's library that are no more than their attributes: all of them count as read.
_NAMESPACES = (
    types.SimpleNamespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    threading.local,
)

#: Types of most entries of containers.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


class _Relevant(dict[str, Any]):
    """File -> True where reads in it count, None where those count that the user's code has it make."""

    def __missing__(self, file: str) -> bool | None:
        found = self[file] = (
            None
            if file.startswith(_PASSING)
            else is_users(file)
            or (file.startswith(_FILES) and file != _MODULE_FILE)
            or (file.startswith("<") and not file.startswith("<frozen"))
        )
        return found


class Observation(NamedReads):
    """The reads and writes of one capture, as a context.

    Args:
        modules: the model's modules and those of its loss, by path.
        functions: entry points of the user's code besides the modules' forwards, by their names: the loss, a function
            of models.
        later: True for a second capture of a call, in which clocks are ahead.

    Attributes:
        written: the places of the attributes that were assigned, by identity.
    """

    def __init__(
        self, modules: list[tuple[str, nn.Module]], functions: list[tuple[str, Any]], later: bool = False
    ) -> None:
        super().__init__()
        self._stand_ins = StandIns(self, later)
        self.written: dict[tuple[int, Any], GuardedPlace] = {}
        self._modules, self._functions, self._relevant = list(modules), functions, _Relevant()
        self._patched: list[tuple[type, str, Any]] = []
        self._classes: set[type] = set()
        self._seen: dict[int, Any] = {}  # id of an object -> itself
        self._stack = contextlib.ExitStack()

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """All modules that the forward uses, including modules outside of the model."""
        return self._modules

    @property
    def files(self) -> list[dict[str, Any]]:
        """The globals of the user's functions that the forward names, or that are attributes of the modules."""
        held = (value for _, module in self._modules for value in vars(module).values())
        functions = [*self._scanned.values(), *filter(None, map(user_function, held))]
        found = (getattr(function, "__globals__", None) for function in functions)
        return list({id(names): names for names in found if names is not None}.values())

    def __enter__(self) -> Observation:
        try:
            self._stack.enter_context(self._stand_ins.put())
            self._look()
        except BaseException:  # of any kind: raised again
            self.__exit__()
            raise
        return self

    def _look(self) -> None:
        """Look at the model before its forward runs."""
        for path, module in self._modules:
            self._space(vars(module), path, module)
        for generator, path in global_generators():
            self.keep_opaque(generator, path)
        for setting in (torch.get_default_dtype, torch.are_deterministic_algorithms_enabled):
            self._setting(setting)
        for path, function in self._functions:
            self._found(function, path)
        for path, module in self._modules:
            for base in type(module).__mro__:
                self._note(GuardedPlace(base, "forward", f"{path if is_users_class(base) else base.__name__}.forward"))
                if "forward" in vars(base):
                    break
            self._lineage(type(module), built=True)
            for hooks in (hooks_of(module).forward_pre, hooks_of(module).forward):
                for hook in hooks.values():
                    self._found(hook, f"a hook of {path}")
        for table in (hooks_of_all_modules().forward_pre, hooks_of_all_modules().forward):
            for hook in table.values():
                if not getattr(hook, "of_shardwright", False):
                    self._found(hook, "a hook of all modules")
        self.keep_hooks()
        self._watch(nn.Module)

    def changes(self) -> Iterator[Change]:
        self.running = False
        return super().changes()

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.stop()
        for cls, name, old in reversed(self._patched):
            if old is MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, old)
        self._patched.clear()
        self.put_back()
        self.take_out()
        self._stack.close()

    # -- reads of attributes --

    def _watch(self, cls: type) -> None:
        """Record the reads and assignments of attributes on objects of a class."""
        read: Callable[..., Any] = cls.__getattribute__
        assigned: Callable[..., None] = cls.__setattr__
        relevant, note, wrote = self._relevant, self._read, self._wrote

        def __getattribute__(self: Any, name: str) -> Any:
            counts = relevant[sys._getframe(1).f_code.co_filename]
            if counts or (counts is None and _for_user()):
                note(self, name)
            return read(self, name)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            file = sys._getframe(1).f_code.co_filename
            if relevant[file]:
                wrote(self, name, file.startswith(_FILES))
            assigned(self, name, value)

        for method in (read, assigned):
            self._scan(method)
        for name, ours in (("__getattribute__", __getattribute__), ("__setattr__", __setattr__)):
            before = cls.__dict__.get(name, MISSING)
            try:
                setattr(cls, name, ours)
            except (TypeError, AttributeError):
                return
            self._patched.append((cls, name, before))

    def _read(self, obj: Any, name: str) -> None:
        if not self.running or name in _STANDARD or (name.startswith("__") and name != "__dict__"):
            return
        try:
            attributes = object.__getattribute__(obj, "__dict__")
        except AttributeError:  # slots
            attributes = None
        key = id(obj if attributes is None else attributes), name
        path = self._paths.get(key[0])
        if path is None or key in self._noted[SEEN] or key in self.written:
            return  # without a path the object was created by the forward, or passed to it
        if attributes is not None:
            if isinstance(obj, nn.Module) and is_part(attributes, name):
                return
            if name == "__dict__":
                for each in [*attributes]:
                    if each not in _STANDARD:
                        self._read(obj, each)
                return
            self._note(GuardedPlace(attributes, name, f"{path}.{name}"))
            self._kind_of(obj, path)
            if name in attributes and not _has_descriptor(type(obj), name):
                return
        slot = next((vars(cls)[name] for cls in type(obj).__mro__ if name in vars(cls)), None)
        if isinstance(slot, types.MemberDescriptorType):
            self._note(GuardedPlace(obj, name, f"{path}.{name}"))
            self._kind_of(obj, path)
        else:
            self._class_place(type(obj), name, path)

    def _kind_of(self, obj: Any, path: str) -> None:
        """Record that the class of an object was read."""
        if (id(obj), "__class__") in self._noted[SEEN] or isinstance(obj, nn.Module):
            return
        place = GuardedPlace(obj, "__class__", f"{path}.__class__")
        self._noted[SEEN][place.identity] = place
        self._lineage(type(obj), built=True)

    def _class_place(self, cls: type, name: str, path: str) -> None:
        """Record a read of an attribute that the class of an object has, or may get."""
        before: list[type] = []
        for base in cls.__mro__:
            if name in base.__dict__:
                if is_users_class(base):
                    before.append(base)
                break
            if is_users_class(base):
                before.append(base)
        else:
            return
        for base in before:
            self._note(GuardedPlace(base, name, f"{path}.{name}" if name == "forward" else f"{base.__name__}.{name}"))

    def _wrote(self, obj: Any, name: str, by_torch: bool) -> None:
        if not self.running:
            return
        attributes = getattr(obj, "__dict__", None)
        path = self._paths.get(id(attributes))
        if path is None:
            if attributes is None and id(obj) in self._paths:  # slots
                place = GuardedPlace(obj, name, f"{self._paths[id(obj)]}.{name}")
                self.keep_place(place)
                self.written.setdefault(place.identity, place)
            return  # otherwise the object was created by the forward
        if by_torch:  # such as the list of weights in an LSTM
            self._own.add((id(attributes), name))
        else:
            self._own.discard((id(attributes), name))
            self.written.setdefault((id(attributes), name), GuardedPlace(attributes, name, f"{path}.{name}"))

    def asked(self, obj: Any, name: str) -> None:
        """Record a read of an attribute by ``getattr``, where the attribute need not be there."""
        if not self.running or not isinstance(name, str):
            return
        if isinstance(obj, types.ModuleType):
            if is_users_file(obj):
                self._note(GuardedPlace(vars(obj), name, f"{obj.__name__}.{name}"))
        elif isinstance(obj, type):
            for base in obj.__mro__:
                if is_users_class(base):
                    self._note(GuardedPlace(base, name, f"{base.__name__}.{name}"))
                if name in vars(base):
                    break
        elif isinstance(obj, types.FunctionType):
            if user_function(obj) is obj:
                self._note(GuardedPlace(vars(obj), name, f"{obj.__qualname__}.{name}"))
        elif isinstance(obj, _NAMESPACES) and id(vars(obj)) in self._paths:
            self._note(self._of_namespace(obj, name))
        else:
            self._read(obj, name)

    def assigned(self, obj: Any, name: str) -> None:
        """Record an assignment by ``setattr``, before it happens."""
        if not self.running:
            return
        if isinstance(obj, types.ModuleType):
            self.assigned_entry(vars(obj), name, f"{obj.__name__}.{name}")
        elif not isinstance(obj, type):
            self._wrote(obj, name, by_torch=False)

    def asked_entry(self, owner: Any, key: Any, path: str) -> None:
        """Record a read of an entry of a file's names, or of the environment."""
        if self.running:
            self._note(GuardedPlace(owner, key, path))

    def assigned_entry(self, owner: Any, key: Any, path: str) -> None:
        """Record an assignment of such an entry, before it happens."""
        place = GuardedPlace(owner, key, path)
        if self.running and place.identity not in self.written:
            self.keep_place(place)
            self.written[place.identity] = place

    # -- values in reach --

    def _found(self, value: Any, path: str) -> None:
        """Watch a value in reach of the forward: its mutable contents are compared later, functions are followed."""
        if type(value) in weakref.ProxyTypes:
            value = value.__init__.__self__
        if value is MISSING or isinstance(value, torch.Tensor):
            return
        if isinstance(value, types.ModuleType):
            self._file(value)
            return
        if (isinstance(value, tuple) and not is_simple(value)) or isinstance(value, CONTAINERS):
            self._found_content(value, path)
            if type(value).__module__ in sys.stdlib_module_names or not hasattr(value, "__dict__"):
                return
        elif self._found_function(value, path) or is_simple(value) or isinstance(value, Operator):
            return
        if id(value) in self._seen or self.keep_opaque(value, path):
            return
        self._seen[id(value)] = value
        self._paths.setdefault(id(value), path)
        if isinstance(value, nn.Module):
            if id(vars(value)) not in self._paths:  # a module outside of the model
                for inner, module in value.named_modules():
                    self._modules.append((f"{path}.{inner}" if inner else path, module))
                    self._space(vars(module), f"{path}.{inner}" if inner else path, module)
                    self._lineage(type(module), built=True)
        elif isinstance(value, weakref.ref):
            self._found(value(), path)
        elif isinstance(value, _NAMESPACES):
            self._space(vars(value), path)
            for name in [*vars(value)]:
                if not (name.startswith("_") and "Weak" in type(value).__name__):
                    self._note(self._of_namespace(value, name))
        self._watched(value, path)

    def _watched(self, value: Any, path: str) -> None:
        """Watch the attributes of an object whose class allows it."""
        cls = type(value)
        if not cls.__flags__ & _HEAP_TYPE or cls.__flags__ & _IMMUTABLE_TYPE or isinstance(value, nn.Module):
            return
        if cls.__module__.split(".")[0] in _NOT_USERS and not cls.__module__.startswith(_WATCHED):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._space(attributes, path)
        if cls not in self._classes:
            self._classes.add(cls)
            self._watch(cls)

    def _found_content(self, value: Any, path: str) -> None:
        """Watch a container and its entries."""
        if not isinstance(value, tuple) and not self.keep_content(value, path):
            return
        if isinstance(value, dict):
            for key, entry in [*dict.items(value)]:
                if type(entry) in _PLAIN or isinstance(entry, type):
                    continue
                if not is_simple(entry):
                    stand_in = self._stand_ins.of_object(entry, f"{path}[{key!r}]")
                    if stand_in is not None:
                        self.put_stand_in(GuardedPlace(value, key, path), entry, stand_in)
                self._found(entry, path)
            return
        for index, entry in enumerate([*value]):
            if type(entry) in _PLAIN or isinstance(entry, type):
                continue
            stand_in = None if is_simple(entry) else self._stand_ins.of_object(entry, f"{path}[{index}]")
            if stand_in is not None and not isinstance(value, (set, tuple)):
                value[index] = self._held[id(value)].begun[index] = stand_in
            self._found(entry, path)

    def _found_function(self, value: Any, path: str) -> bool:
        """Follow a function, and the objects that it is bound to; False for any other value."""
        if isinstance(value, property):
            parts: Iterable[Any] = (value.fget, value.fset)
        elif isinstance(value, types.MethodType):
            parts = (value.__self__, value.__func__)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            parts = (value.func, value.args, value.keywords)
        elif isinstance(value, (functools.cached_property, functools.singledispatchmethod)):
            parts = (getattr(value, "func", None), getattr(value, "dispatcher", None))
        elif isinstance(value, (staticmethod, classmethod)):
            parts = (value.__func__,)
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            parts = () if isinstance(value.__self__, types.ModuleType) else (value.__self__,)
        elif isinstance(value, types.FunctionType):
            self._scan(value)
            registered = getattr(value, "registry", None)  # of functools.singledispatch
            parts = registered.values() if isinstance(registered, types.MappingProxyType) else ()
        elif isinstance(value, type):
            self._lineage(value)
            parts = ()
        else:
            return False
        for part in parts:
            self._found(part, path)
        return True

    def _of_namespace(self, value: Any, name: str) -> GuardedPlace:
        """The place of an attribute of a namespace; one of a thread depends on the thread that asks."""
        path = self._paths.get(id(value), type(value).__name__)
        return GuardedPlace(value if isinstance(value, threading.local) else vars(value), name, f"{path}.{name}")

    def _space(self, attributes: dict[str, Any], path: str, module: nn.Module | None = None) -> None:
        if self.keep_space(attributes, path, module):
            for name, value in [*attributes.items()]:
                if name not in _STANDARD and isinstance(value, CONTAINERS):
                    self._found(value, f"{path}.{name}")

    # -- functions, classes, files --


#: Packages whose objects are not watched.
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


def _has_descriptor(cls: type, name: str) -> bool:
    """True where a descriptor of the user comes before an attribute of the object itself."""
    found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    return found is not None and hasattr(type(found), "__set__")


def _for_user() -> bool:
    """True where the user's code has Python's library read an attribute."""
    for frame in frames():
        file = frame.f_code.co_filename
        if not file.startswith(_PYTHON) or "-packages/" in file:
            return is_users(file)
    return False

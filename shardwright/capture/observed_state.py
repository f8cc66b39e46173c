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

Example: a forward ``x * self.beta * SCALE``, with ``net.beta`` 2.0 and the global ``SCALE`` 3.0, has the reads
"net.beta", which was recorded, and "SCALE", from the bytecode. After ``net.beta = 5.0`` the model is captured anew.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter, is_

import torch
from torch import nn

from ..identity_tables import IdentitySet
from ..torch_private import hooks_of, hooks_of_all_modules, is_part
from .annotations import Operator
from .observed.attribute_patches import (
    STANDARD,
    WATCHED_PACKAGES,
    attribute_methods,
    module_attributes,
    plain_module_methods,
    put_attribute,
)
from .observed.code_names import user_function
from .observed.kept_state import PLAIN, Change
from .observed.named_reads import SEEN, NamedReads, is_users_class, is_users_file
from .observed.opaque_state import global_generators
from .observed.places import CONTAINERS, MISSING, GuardedPlace, is_simple, place_key
from .observed.stand_ins import StandIns

__all__ = ["Change", "Observation"]

_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8

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


class Observation(NamedReads):
    """The reads and writes of one capture, as a context.

    Args:
        modules: the model's modules and those of its loss, by path.
        functions: entry points of the user's code besides the modules' forwards, by their names: the loss, a function
            of models.
        later: True for a second capture of a call, in which clocks are ahead.
        earlier: the observation of an earlier run of the same forward. Where the state of the model is as it was, the
            look at it is taken over: a run of GPT-2 with 12 layers finds 300 functions in 150 modules.

    Attributes:
        written: the places of the attributes that were assigned, by identity.
    """

    def __init__(
        self,
        modules: list[tuple[str, nn.Module]],
        functions: Sequence[tuple[str, object]],
        later: bool = False,
        earlier: Observation | None = None,
    ) -> None:
        super().__init__()
        self._model, self._earlier = list(modules), earlier
        self._stand_ins = StandIns(self, later)
        self.written: dict[tuple[int, object], GuardedPlace] = {}
        self._modules, self._functions = list(modules), functions
        self._patched: list[tuple[type, str, object]] = []
        self._classes: set[type] = set()
        self._seen: IdentitySet[object] = IdentitySet()
        self._attributes: list[tuple[object, type, object]] = []  # objects, with their classes and attributes
        self._users_hooks: list[object] = []  # those of `_hooked` and of all modules
        self._hooked: list[nn.Module] = []
        self._seen_earlier: dict[tuple[int, object], GuardedPlace] = {}  # the reads that an earlier run has seen
        self._descriptors: dict[tuple[type, str], bool] = {}  # class, attribute -> what `_has_descriptor` has found
        self._files: tuple[int, list[dict[str, object]]] | None = None  # the number of functions, and their files
        self._stack = contextlib.ExitStack()

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """All modules that the forward uses, including modules outside of the model."""
        return self._modules

    @property
    def files(self) -> list[dict[str, object]]:
        """The globals of the user's functions that the forward names, or that are attributes of the modules."""
        if self._files is None or self._files[0] != len(self._scanned):
            values = (v for _, module in self._modules for v in vars(module).values() if type(v) not in PLAIN)
            functions = [*self._scanned, *filter(None, map(user_function, values))]
            found = (getattr(function, "__globals__", None) for function in functions)
            self._files = len(self._scanned), list(IdentitySet(names for names in found if names is not None))
        return self._files[1]

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
        earlier, self._earlier = self._earlier, None
        if earlier is not None and earlier._may_be_taken_over(self._model, self._functions):
            self._take_over(earlier)
        else:
            self._look_at_all()
        self.keep_hooks()
        self._stack.enter_context(module_attributes(self))
        for method in plain_module_methods():
            self._scan(method)
        self.note_begun()

    def _look_at_all(self) -> None:
        for path, module in self._modules:
            self._space(vars(module), path, module)
        for generator, path in global_generators():
            self.keep_opaque(generator, path)
        for setting in (torch.get_default_dtype, torch.are_deterministic_algorithms_enabled):
            self._setting(setting)
        for path, function in self._functions:
            if isinstance(function, functools.partial):  # nothing that is read leads to its arguments
                self._note(GuardedPlace({path: function}, path, path))
            self._found(function, path)
        for path, module in self._modules:
            for base in type(module).__mro__:
                self._note(GuardedPlace(base, "forward", f"{path if is_users_class(base) else base.__name__}.forward"))
                if "forward" in vars(base):
                    break
            self._lineage(type(module), built=True)
            for hook in _hooks_of(module):
                self._users_hooks.append(hook)
                self._found(hook, f"a hook of {path}")
        for hook in _hooks_of(None):
            self._users_hooks.append(hook)
            self._found(hook, "a hook of all modules")
        self._hooked = [module for _, module in self._modules]

    # -- further runs --

    def _take_over(self, earlier: Observation) -> None:
        """Look at what an earlier run of the forward has found."""
        self._modules = list(earlier._modules)
        self.keep_those_of(earlier)
        for path, module in self._modules:
            self.keep_hooks_of(module, path)
        for generator, path in global_generators():
            self.keep_opaque(generator, path)
        self._seen = IdentitySet(earlier._seen)
        self._hooked, self._users_hooks, self._files = earlier._hooked, earlier._users_hooks, earlier._files
        self.find_those_of(earlier)
        self._seen_earlier = earlier._noted[SEEN]
        for cls in earlier._classes:
            self._classes.add(cls)
            self._watch(cls)

    def _may_be_taken_over(self, modules: list[tuple[str, nn.Module]], functions: Sequence[tuple[str, object]]) -> bool:
        """True where a run with these arguments would find what this run has found."""
        return (
            _same_named(modules, self._model)
            and _same_named(functions, self._functions)
            and self.found_alike()
            and all(
                type(value) is cls and _attributes_of(value) is attributes
                for value, cls, attributes in self._attributes
            )
            and self._hooks_alike()
            and self.reaches_alike()
        )

    def _hooks_alike(self) -> bool:
        hooks = [hook for module in (*self._hooked, None) for hook in _hooks_of(module)]
        return len(hooks) == len(self._users_hooks) and all(map(is_, hooks, self._users_hooks))

    def _settle(self) -> None:
        """Keep what a further run may take over: the run has ended."""
        values = [*(module for _, module in self._modules), *self._seen]
        self._attributes = [(value, type(value), _attributes_of(value)) for value in values]
        self.forget_tensors()
        self._seen_earlier = {}

    def changes(self) -> Iterator[Change]:
        self.running = False
        return super().changes()

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.stop()
        for cls, name, old in reversed(self._patched):
            put_attribute(cls, name, old)
        self._patched.clear()
        self.put_back()
        self.take_out()
        self._stack.close()
        self._settle()

    # -- reads of attributes --

    def _watch(self, cls: type) -> None:
        """Record the reads and assignments of attributes on objects of a class."""
        for method in (cls.__getattribute__, cls.__setattr__):
            self._scan(method)
        for name, ours in [*attribute_methods(cls, self)]:
            before = cls.__dict__.get(name, MISSING)
            try:
                setattr(cls, name, ours)
            except (TypeError, AttributeError):
                return
            self._patched.append((cls, name, before))

    def attribute_read(self, obj: object, name: str) -> None:
        if not self.running or name in STANDARD or (name.startswith("__") and name != "__dict__"):
            return
        try:
            attributes = object.__getattribute__(obj, "__dict__")
        except AttributeError:  # slots
            attributes = None
        owner = obj if attributes is None else attributes
        key, seen = place_key(owner, name), self._noted[SEEN]
        if key in seen or key in self.written:
            return
        path = self._paths.get(owner)
        if path is None:
            return  # the object was created by the forward, or passed to it
        if attributes is not None:
            is_module = isinstance(obj, nn.Module)
            if is_module and is_part(attributes, name):
                return
            if name == "__dict__":
                for each in [*attributes]:
                    if each not in STANDARD:
                        self.attribute_read(obj, each)
                return
            known = self._seen_earlier.get(key)
            if known is not None and self._source is SEEN and key in self._looked_at:
                seen[key] = known
            else:
                self._note(GuardedPlace(attributes, name, f"{path}.{name}"))
            if not is_module:
                self._kind_of(obj, path)
            if name in attributes and not self._has_descriptor(type(obj), name):
                return
        slot = next((vars(cls)[name] for cls in type(obj).__mro__ if name in vars(cls)), None)
        if isinstance(slot, types.MemberDescriptorType):
            self._note(GuardedPlace(obj, name, f"{path}.{name}"))
            self._kind_of(obj, path)
        else:
            self._class_place(type(obj), name, path)

    def _kind_of(self, obj: object, path: str) -> None:
        """Record that the class of an object was read."""
        if isinstance(obj, nn.Module) or place_key(obj, "__class__") in self._noted[SEEN]:
            return
        place = GuardedPlace(obj, "__class__", f"{path}.__class__")
        self._noted[SEEN][place.identity] = place
        self._lineage(type(obj), built=True)

    def _has_descriptor(self, cls: type, name: str) -> bool:
        """True where a descriptor of the user comes before an attribute of the object itself."""
        known = self._descriptors.get((cls, name))
        if known is None:
            found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
            known = self._descriptors[cls, name] = found is not None and hasattr(type(found), "__set__")
        return known

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

    def attribute_assigned(self, obj: object, name: str, by_torch: bool) -> None:
        if not self.running:
            return
        attributes = getattr(obj, "__dict__", None)
        path = self._paths.get(attributes)
        if path is None:
            if attributes is None and obj in self._paths:  # slots
                place = GuardedPlace(obj, name, f"{self._paths[obj]}.{name}")
                self.keep_place(place)
                self.written.setdefault(place.identity, place)
            return  # otherwise the object was created by the forward
        if by_torch:  # such as the list of weights in an LSTM
            self._assigned_by_layers.add(place_key(attributes, name))
        else:
            place = GuardedPlace(attributes, name, f"{path}.{name}")
            self._assigned_by_layers.discard(place.identity)
            self.written.setdefault(place.identity, place)

    def asked(self, obj: object, name: str) -> None:
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
        elif isinstance(obj, _NAMESPACES) and vars(obj) in self._paths:
            self._note(self._of_namespace(obj, name))
        else:
            self.attribute_read(obj, name)

    def assigned(self, obj: object, name: str) -> None:
        """Record an assignment by ``setattr``, before it happens."""
        if not self.running:
            return
        if isinstance(obj, types.ModuleType):
            self.assigned_entry(vars(obj), name, f"{obj.__name__}.{name}")
        elif not isinstance(obj, type):
            self.attribute_assigned(obj, name, by_torch=False)

    def asked_entry(self, owner: object, key: object, path: str) -> None:
        """Record a read of an entry of a file's names, or of the environment."""
        if self.running:
            self._note(GuardedPlace(owner, key, path))

    def assigned_entry(self, owner: object, key: object, path: str) -> None:
        """Record an assignment of such an entry, before it happens."""
        place = GuardedPlace(owner, key, path)
        if self.running and place.identity not in self.written:
            self.keep_place(place)
            self.written[place.identity] = place

    # -- values in reach --

    def _found(self, value: object, path: str) -> None:
        """Watch a value in reach of the forward: its mutable contents are compared later, functions are followed."""
        if type(value) in weakref.ProxyTypes:
            self.repeatable = False
            value = attrgetter("__init__.__self__")(value)  # the object itself
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
        if value in self._seen or self.keep_opaque(value, path):
            return
        self._seen.add(value)
        self._paths.setdefault(value, path)
        if isinstance(value, nn.Module):
            if vars(value) not in self._paths:  # a module outside of the model
                for subpath, module in value.named_modules():
                    self._modules.append((f"{path}.{subpath}" if subpath else path, module))
                    self._space(vars(module), f"{path}.{subpath}" if subpath else path, module)
                    self._lineage(type(module), built=True)
        elif isinstance(value, weakref.ref):
            self.repeatable = False
            self._found(value(), path)
        elif isinstance(value, _NAMESPACES):
            self.repeatable &= not isinstance(value, threading.local) and "Weak" not in type(value).__name__
            self._space(vars(value), path)
            for name in [*vars(value)]:
                if not (name.startswith("_") and "Weak" in type(value).__name__):
                    place = self._of_namespace(value, name)
                    if self._source == SEEN:
                        self._namespaces[place.identity] = place
                    self._note(place)
        self._watched(value, path)

    def _watched(self, value: object, path: str) -> None:
        """Watch the attributes of an object whose class allows it."""
        cls = type(value)
        if not cls.__flags__ & _HEAP_TYPE or cls.__flags__ & _IMMUTABLE_TYPE or isinstance(value, nn.Module):
            return
        if cls.__module__.split(".")[0] in _NOT_USERS and not cls.__module__.startswith(WATCHED_PACKAGES):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._space(attributes, path)
        if cls not in self._classes:
            self._classes.add(cls)
            self._watch(cls)

    def _found_content(self, value: Collection[object], path: str) -> None:
        """Watch a container and its entries."""
        if not isinstance(value, tuple) and not self.keep_content(value, path):
            return
        if isinstance(value, dict):
            for key, entry in [*dict.items(value)]:
                if type(entry) in PLAIN or isinstance(entry, type):
                    continue
                if not is_simple(entry):
                    stand_in = self._stand_ins.of_object(entry, f"{path}[{key!r}]")
                    if stand_in is not None:
                        self.repeatable = False
                        self.put_stand_in(GuardedPlace(value, key, path), entry, stand_in)
                self._found(entry, path)
            return
        for index, entry in enumerate([*value]):
            if type(entry) in PLAIN or isinstance(entry, type):
                continue
            stand_in = None if is_simple(entry) else self._stand_ins.of_object(entry, f"{path}[{index}]")
            if stand_in is not None and isinstance(value, (list, collections.deque)):
                self.repeatable = False
                value[index] = stand_in
                self.begin_with(value, index, stand_in)
            self._found(entry, path)

    def _found_function(self, value: object, path: str) -> bool:
        """Follow a function, and the objects that it is bound to; False for any other value."""
        if isinstance(value, property):
            parts: Iterable[object] = (value.fget, value.fset)
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
            self.repeatable &= not parts  # a function may be registered at any time
        elif isinstance(value, type):
            self._lineage(value)
            parts = ()
        else:
            return False
        for part in parts:
            self._found(part, path)
        return True

    def _of_namespace(self, value: object, name: str) -> GuardedPlace:
        """The place of an attribute of a namespace; one of a thread depends on the thread that asks."""
        path = self._paths.get(value, type(value).__name__)
        return GuardedPlace(value if isinstance(value, threading.local) else vars(value), name, f"{path}.{name}")

    def _space(self, attributes: dict[str, object], path: str, module: nn.Module | None = None) -> None:
        if self.keep_space(attributes, path, module):
            for name, value in [*attributes.items()]:
                if name not in STANDARD and isinstance(value, CONTAINERS):
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


def _same_named(some: Sequence[tuple[str, object]], other: Sequence[tuple[str, object]]) -> bool:
    """True for the same objects with the same names."""
    return len(some) == len(other) and all(a == b and x is y for (a, x), (b, y) in zip(some, other))


def _attributes_of(value: object) -> object:
    """The dict of an object's attributes; None for one without."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _hooks_of(module: nn.Module | None) -> Iterator[object]:
    """The hooks of the user on a module; None: on all modules."""
    if module is None:
        tables = hooks_of_all_modules()
        # A capture puts a function around each of them.
        hooks = [inspect.unwrap(hook) for hook in (*tables.forward_pre.values(), *tables.forward.values())]
        yield from (hook for hook in hooks if not getattr(hook, "of_shardwright", False))
        return
    for hook in (*hooks_of(module).forward_pre.values(), *hooks_of(module).forward.values()):
        if not str(getattr(hook, "__module__", "")).startswith("shardwright."):
            yield hook

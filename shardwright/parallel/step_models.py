"""The models that a step function calls, found in what the function refers to.

A function refers to models by variables of enclosing functions, globals, defaults, the object that a method is bound
to, and the functions and objects that these refer to. The bytecode says which names and attributes are read:

    net(x)                      the model net
    trainer.net(x)              the model net of an object
    gan.generator(z)            the model generator, although gan is a module too: gan itself is not called
    net.zero_grad()             a model only where nothing else is one: net may be called elsewhere
    grad_fn(x, y)               a `ValueAndGrad`, and the models of its function

A model is a module with parameters. A module inside another one that is found is a part of it. Containers
(``nn.ModuleList``, lists, dicts) stand for their entries.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..capture.observed.code_names import names_read
from ..capture.source_lines import is_users
from ..errors import SettingError, place_text
from ..torch_private import COMPILED
from .value_and_grad import ValueAndGrad

__all__ = ["StepModels", "check_step", "name_of"]

#: Depth to which functions and objects are followed.
_DEPTH = 4

#: The most entries of a list or dict that are looked at.
_ENTRIES = 256

_MISSING = object()


class StepModels:
    """The search in one function.

    Args:
        function: the function.
        wrapper: the class of parallel models.

    Attributes:
        gradients: the `ValueAndGrad` that the function calls.
        wrapped: the names of parallel models that it calls.
    """

    def __init__(self, function: Callable[..., Any], wrapper: type[nn.Module]) -> None:
        self.gradients: list[ValueAndGrad] = []
        self.wrapped: list[str] = []
        self._wrapper = wrapper
        self._called: dict[nn.Module, str] = {}  # a module that is read by itself -> its name
        self._touched: dict[nn.Module, str] = {}  # a module of which an attribute is read -> its name
        self._seen: dict[int, Any] = {}  # id of an object -> itself, so that no other object gets its id
        self._methods: dict[tuple[int, int], Any] = {}  # ids of a function and its object -> both
        if not isinstance(function, (types.FunctionType, types.MethodType, functools.partial)):
            function = getattr(function, "__call__", function)  # noqa: B004  of an object whose class has it
        self._function(function, 0)

    @property
    def models(self) -> dict[str, nn.Module]:
        """Name -> model, in the order in which the code refers to them. A name has no dot."""
        inside = {id(part) for model in self._called for part in model.modules() if part is not model}
        found = {model: name for model, name in self._called.items() if id(model) not in inside}
        if not found:
            inside = {id(part) for model in self._touched for part in model.modules() if part is not model}
            found = {model: name for model, name in self._touched.items() if id(model) not in inside}
        return _named(found)

    # -- functions

    def _function(self, function: Any, depth: int) -> None:
        """Look at what a function refers to."""
        if isinstance(function, functools.partial):
            for value in function.args:
                self._value(value, "", depth)
            for name, value in function.keywords.items():
                self._value(value, name, depth)
            self._value(function.func, "function", depth)
            return
        bound = _MISSING
        if isinstance(function, types.MethodType):
            bound, function = function.__self__, function.__func__
        while isinstance(function, types.FunctionType) and not _is_written(function) and _inner(function) is not None:
            function = _inner(function)  # behind torch.no_grad(), torch.func.grad_and_value and other decorators
        if isinstance(function, (types.MethodType, ValueAndGrad)):
            self._value(function, name_of(function), depth)
            return
        if not isinstance(function, types.FunctionType) or not _is_written(function) or depth > _DEPTH:
            return
        if bound is _MISSING and id(function) in self._seen:
            return
        self._seen[id(function)] = function
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        positional = function.__defaults__ or ()
        defaults = dict(zip(parameters[len(parameters) - len(positional) :], positional)) | (
            function.__kwdefaults__ or {}
        )
        for name, value in defaults.items():
            self._value(value, name, depth)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        for kind, name, chain in names_read(function.__code__):
            if kind == "cell":
                value = _content(cells.get(name))
            elif kind == "global":
                value = function.__globals__.get(name, _MISSING)
            else:
                value = bound
            if value is not _MISSING:
                self._chain(value, name if value is not bound else "", chain, depth)

    def _chain(self, value: Any, name: str, chain: tuple[str, ...], depth: int) -> None:
        """Look at the end of ``name.attribute.attribute``."""
        for i, attribute in enumerate(chain):
            if isinstance(value, nn.Module):
                held = value._modules.get(attribute, _MISSING)
                if held is _MISSING or held is None:
                    held = inspect.getattr_static(value, attribute, _MISSING)
                    if _is_method(held):
                        self._method(held, value, depth)
                    self._touch(value, name)
                    return
            elif isinstance(value, types.ModuleType):
                held = vars(value).get(attribute, _MISSING)
            else:
                held = inspect.getattr_static(value, attribute, _MISSING)
                if _is_method(held):
                    self._method(held, value, depth)
                    return
            if held is _MISSING:
                return
            value, name = held, f"{name}.{attribute}".removeprefix(".")
            if i < len(chain) - 1 and isinstance(value, ValueAndGrad):
                return
        self._value(value, name, depth)

    def _method(self, held: Any, owner: Any, depth: int) -> None:
        """Look at a method, or a property's function, of an object that is read: the user's own ones alone."""
        if isinstance(held, property):
            held = held.fget
        if isinstance(held, (staticmethod, classmethod)):
            self._function(held.__func__, depth + 1)
        elif isinstance(held, types.FunctionType) and _is_written(held) and (id(held), id(owner)) not in self._methods:
            self._methods[id(held), id(owner)] = held, owner
            self._function(types.MethodType(held, owner), depth + 1)

    # -- values

    def _value(self, value: Any, name: str, depth: int) -> None:
        """Look at an object that a function reads by itself."""
        if isinstance(value, nn.Module):
            self._module(value, name, depth)
        elif isinstance(value, ValueAndGrad):
            if value not in self.gradients:
                self.gradients.append(value)
                self._function(value.function, depth + 1)
        elif isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            self._touch(value.__self__, name)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._function(value, depth + 1)
        elif isinstance(value, (list, tuple, set, frozenset, Mapping)):
            self._entries(value, name, depth)
        elif _is_users_object(value) and id(value) not in self._seen and depth < _DEPTH:
            self._seen[id(value)] = value
            call = inspect.getattr_static(type(value), "__call__", None)
            if isinstance(call, types.FunctionType):
                self._function(types.MethodType(call, value), depth + 1)
            for attribute, held in list(getattr(value, "__dict__", {}).items()):
                self._value(held, attribute, depth + 1)

    def _module(self, module: nn.Module, name: str, depth: int) -> None:
        if isinstance(module, self._wrapper):
            self.wrapped.append(name)
        elif isinstance(module, _CONTAINERS):
            self._entries(dict(module.named_children()), name, depth)
        elif any(True for _ in module.parameters()):
            self._called.setdefault(module, name)

    def _touch(self, module: nn.Module, name: str) -> None:
        if not isinstance(module, (self._wrapper, *_CONTAINERS)) and any(True for _ in module.parameters()):
            self._touched.setdefault(module, name)

    def _entries(self, held: Any, name: str, depth: int) -> None:
        if id(held) in self._seen or depth > _DEPTH:
            return
        self._seen[id(held)] = held
        entries = held.items() if isinstance(held, Mapping) else enumerate(held)
        for _, (key, value) in zip(range(_ENTRIES), list(entries)):
            self._value(value, f"{name}.{key}", depth + 1)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def _named(found: Mapping[nn.Module, str]) -> dict[str, nn.Module]:
    """The models by the last part of their names, or by the whole name where that is taken."""
    names: dict[str, nn.Module] = {}
    for model, name in found.items():
        parts = [part for part in name.split(".") if part] or [type(model).__name__.lower()]
        number = parts[-1].isdigit()
        short = "_".join(parts[-2:] if number else parts[-1:])
        candidates = [short, "_".join(parts), *(f"{short}_{i}" for i in range(2, len(found) + 2))]
        names[next(candidate for candidate in candidates if candidate not in names)] = model
    return names


def name_of(function: Any) -> str:
    """The name of a function in messages."""
    while isinstance(function, functools.partial):
        function = function.func
    written = getattr(function, "__func__", function)
    while isinstance(written, types.FunctionType) and not _is_written(written) and _inner(written) is not None:
        written = _inner(written)
    if not isinstance(written, types.FunctionType):
        return getattr(written, "__name__", None) or type(written).__name__
    name, code = written.__qualname__.rpartition("<locals>.")[2], written.__code__
    return f"{name} ({place_text(code.co_filename, code.co_firstlineno)})"


def _is_written(function: types.FunctionType) -> bool:
    """True for a function of the user's code, in a file or typed at a prompt."""
    file = function.__code__.co_filename
    return is_users(file) or (file.startswith("<") and not file.startswith("<frozen"))


def _inner(function: types.FunctionType) -> Any:
    return getattr(function, "__wrapped__", None)


def _is_method(held: Any) -> bool:
    return isinstance(held, (types.FunctionType, property, staticmethod, classmethod))


def _content(cell: Any) -> Any:
    try:
        return _MISSING if cell is None else cell.cell_contents
    except ValueError:  # assigned later
        return _MISSING


def _is_users_object(value: Any) -> bool:
    """True for an object whose class is written in the user's code."""
    if isinstance(value, (type, types.ModuleType, torch.Tensor, torch.optim.Optimizer, str, bytes, int, float)):
        return False
    call = getattr(type(value), "__init__", None)
    functions = [call, *(held for held in vars(type(value)).values())]
    return any(isinstance(f, types.FunctionType) and _is_written(f) for f in functions)


def check_step(function: Any) -> None:
    """Check that a function can be the step of an `AutoParallel`.

    Raises:
        SettingError: it is no function, or one whose call does not run its code.
    """
    name = name_of(function)
    if isinstance(function, type) or not callable(function):
        raise SettingError(
            f"{function!r} is not an nn.Module, nor a step function", legal="a model written for one device"
        )
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) and getattr(function, "__name__", "") in ("forward", "__call__"):
        raise SettingError(
            f"{name} is a method of a {type(owner).__name__}, which is a model itself",
            legal="AutoParallel of the model",
        )
    if hasattr(function, COMPILED):
        raise SettingError(
            f"{name} is compiled by torch.compile", legal="AutoParallel(…, compile=True) of the plain step function"
        )
    for kind, is_kind in (
        ("a generator", inspect.isgeneratorfunction),
        ("a coroutine", inspect.iscoroutinefunction),
        ("an asynchronous generator", inspect.isasyncgenfunction),
    ):
        if is_kind(function):
            raise SettingError(
                f"{name} is {kind}: a call returns before its code runs", legal="a function that returns its results"
            )

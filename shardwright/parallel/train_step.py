"""Step functions: ``AutoParallel(train_step)``, and the models that they call.

A step function is the user's Python for one step, written for one device: forward, loss, backward, optimizer. Each call
runs it as it is written. Meanwhile the models that it calls are parallel, and so are the functions that it hands to
`value_and_grad`:

    net(x)              the model alone is planned. Its outputs are the rows that this process feeds, and the loss is
                        computed from them by the step itself
    grad_fn(x, y)       the function is planned with the models that it calls: its loss is that of the whole batch

1. `StepModels` finds the models when the step is wrapped, or the user names them (``net=``). A function refers to
   models by variables of enclosing functions, globals, defaults, the object that a method is bound to, and the
   functions and objects that these refer to. The bytecode says which names and attributes are read:

    net(x)                      the model net
    trainer.net(x)              the model net of an object
    gan.generator(z)            the model generator, although gan is a module too: gan itself is not called
    net.zero_grad()             a model only where nothing else is one: net may be called elsewhere
    grad_fn(x, y)               a `ValueAndGrad`, and the models of its function

   A model is a module with parameters. A module inside another one that is found is a part of it. Containers
   (``nn.ModuleList``, lists, dicts) stand for their entries.

2. `capture.module_calls.redirected` leads their calls to the wrapper, by the module object: through which variable
   the step reaches the model makes no difference.

3. One wrapper plans one set of models. The wrapper of a step is that of all its models where each call needs all of
   them: one model, or functions that call all of them. Otherwise (a GAN whose step calls its two models by
   themselves) each set has a wrapper of its own: `StepFunction.parts`.

Example: the step of a GAN calls ``generator(z)`` and ``discriminator(x)`` by themselves: 2 sets of models, each with a
wrapper of its own. A step that calls ``net(x)`` alone has 1 set, and the wrapper is that of net.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import CodeType
from typing import Protocol

import torch
from torch import nn

from ..capture.module_calls import FunctionOfModels, LossFunction, as_written, redirected, together
from ..capture.observed.code_names import names_read
from ..capture.source_lines import is_users, stack_level
from ..errors import SettingError, place_text
from ..identity_tables import IdentityMap, IdentitySet
from ..torch_private import COMPILED
from .value_and_grad import ValueAndGrad, running
from .whole_model import refuse_calls_of_parts

__all__ = ["StepFunction", "StepModels", "Wrapper", "check_step", "name_of"]

# -- the models of a step


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

    def __init__(self, function: Callable[..., object], wrapper: type[nn.Module]) -> None:
        self.gradients: list[ValueAndGrad] = []
        self.wrapped: list[str] = []
        self._wrapper = wrapper
        self._called: dict[nn.Module, str] = {}  # a module that is read by itself -> its name
        self._touched: dict[nn.Module, str] = {}  # a module of which an attribute is read -> its name
        self._seen = IdentitySet[object]()
        self._methods = IdentityMap[object, set[types.FunctionType]]()  # object -> methods of its class
        if not isinstance(function, (types.FunctionType, types.MethodType, functools.partial)):
            function = getattr(function, "__call__", function)  # noqa: B004  of an object whose class has it
        self._function(function, 0)

    @property
    def models(self) -> dict[str, nn.Module]:
        """Name -> model, in the order in which the code refers to them. A name has no dot."""
        inside = IdentitySet(part for model in self._called for part in model.modules() if part is not model)
        found = {model: name for model, name in self._called.items() if model not in inside}
        if not found:
            inside = IdentitySet(part for model in self._touched for part in model.modules() if part is not model)
            found = {model: name for model, name in self._touched.items() if model not in inside}
        return _named(found)

    # -- functions

    def _function(self, function: object, depth: int) -> None:
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
        while isinstance(function, types.FunctionType) and not _is_written(function) and _wrapped(function) is not None:
            function = _wrapped(function)  # behind torch.no_grad(), torch.func.grad_and_value and other decorators
        if isinstance(function, (types.MethodType, ValueAndGrad)):
            self._value(function, name_of(function), depth)
            return
        if not isinstance(function, types.FunctionType) or not _is_written(function) or depth > _DEPTH:
            return
        if bound is _MISSING and function in self._seen:
            return
        self._seen.add(function)
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

    def _chain(self, value: object, name: str, chain: tuple[str, ...], depth: int) -> None:
        """Look at the end of ``name.attribute.attribute``."""
        for i, attribute in enumerate(chain):
            if isinstance(value, nn.Module):
                found = value._modules.get(attribute, _MISSING)
                if found is _MISSING or found is None:
                    found = inspect.getattr_static(value, attribute, _MISSING)
                    if _is_method(found):
                        self._method(found, value, depth)
                    self._touch(value, name)
                    return
            elif isinstance(value, types.ModuleType):
                found = vars(value).get(attribute, _MISSING)
            else:
                found = inspect.getattr_static(value, attribute, _MISSING)
                if _is_method(found):
                    self._method(found, value, depth)
                    return
            if found is _MISSING:
                return
            value, name = found, f"{name}.{attribute}".removeprefix(".")
            if i < len(chain) - 1 and isinstance(value, ValueAndGrad):
                return
        self._value(value, name, depth)

    def _method(self, method: object, owner: object, depth: int) -> None:
        """Look at a method, or a property's function, of an object that is read: the user's own ones alone."""
        if isinstance(method, property):
            method = method.fget
        if isinstance(method, (staticmethod, classmethod)):
            self._function(method.__func__, depth + 1)
        elif isinstance(method, types.FunctionType) and _is_written(method):
            seen = self._methods.setdefault(owner, set())
            if method not in seen:
                seen.add(method)
                self._function(types.MethodType(method, owner), depth + 1)

    # -- values

    def _value(self, value: object, name: str, depth: int) -> None:
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
        elif _is_users_object(value) and value not in self._seen and depth < _DEPTH:
            self._seen.add(value)
            call = inspect.getattr_static(type(value), "__call__", None)
            if isinstance(call, types.FunctionType):
                self._function(types.MethodType(call, value), depth + 1)
            for attribute, content in list(getattr(value, "__dict__", {}).items()):
                self._value(content, attribute, depth + 1)

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

    def _entries(self, container: Iterable[object], name: str, depth: int) -> None:
        if container in self._seen or depth > _DEPTH:
            return
        self._seen.add(container)
        entries = container.items() if isinstance(container, Mapping) else enumerate(container)
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


def name_of(function: object) -> str:
    """The name of a function in messages."""
    while isinstance(function, functools.partial):
        function = function.func
    written = getattr(function, "__func__", function)
    while isinstance(written, types.FunctionType) and not _is_written(written) and _wrapped(written) is not None:
        written = _wrapped(written)
    if not isinstance(written, types.FunctionType):
        return getattr(written, "__name__", None) or type(written).__name__
    name, code = written.__qualname__.rpartition("<locals>.")[2], written.__code__
    return f"{name} ({place_text(code.co_filename, code.co_firstlineno)})"


def _is_written(function: types.FunctionType) -> bool:
    """True for a function of the user's code, in a file or typed at a prompt."""
    file = function.__code__.co_filename
    return is_users(file) or (file.startswith("<") and not file.startswith("<frozen"))


def _wrapped(function: types.FunctionType) -> object:
    return getattr(function, "__wrapped__", None)


def _is_method(attribute: object) -> bool:
    return isinstance(attribute, (types.FunctionType, property, staticmethod, classmethod))


def _content(cell: types.CellType | None) -> object:
    try:
        return _MISSING if cell is None else cell.cell_contents
    except ValueError:  # assigned later
        return _MISSING


def _is_users_object(value: object) -> bool:
    """True for an object whose class is written in the user's code."""
    if isinstance(value, (type, types.ModuleType, torch.Tensor, torch.optim.Optimizer, str, bytes, int, float)):
        return False
    call = getattr(type(value), "__init__", None)
    functions = [call, *(attribute for attribute in vars(type(value)).values())]
    return any(isinstance(f, types.FunctionType) and _is_written(f) for f in functions)


def check_step(function: object) -> None:
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


# -- the step


#: The most functions of a step that are kept with their programs.
_FUNCTIONS = 16

Names = tuple[str, ...]


class Wrapper(Protocol):
    """A parallel model, as its step function sees it."""

    net: nn.Module
    loss_fn: LossFunction | None

    @property
    def leaves_unsummed(self) -> bool:
        """True under `no_sync`."""

    @property
    def in_processes(self) -> bool:
        """True where several processes train the model together."""

    def call_model(self, *args: object, **kwargs: object) -> object:
        """Call the model in parallel."""

    def call_function(self, entry: FunctionOfModels, *args: object, **kwargs: object) -> object:
        """Call a function of the model in parallel."""

    def infer(self, entry: FunctionOfModels | None, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Plan a call of the model, or of a function of it, without running it."""

    def with_same_settings(self, net: nn.Module) -> Wrapper:
        """A wrapper of another model of the step."""


class StepFunction:
    """A step function and its models.

    Args:
        function: the step function.
        named: the models, where the user names them: a model, several, or name -> model; None: they are found.
        has_loss: True where a `loss_fn` is given beside the step.
        wrapper: the class of parallel models.

    Attributes:
        models: name -> model.
        net: the one model, or all models as one module.
        apart: True where the step's wrapper plans nothing itself.
        parts: names of models -> the wrapper that plans them, besides the step's own.

    Raises:
        SettingError: no step function; no model; a parallel model; a `loss_fn` beside several models or beside a
            function with a loss.
    """

    def __init__(self, function: object, named: object, has_loss: bool, wrapper: type[nn.Module]) -> None:
        check_step(function)
        assert callable(function)
        self.function, self._wrapper = function, wrapper
        found = StepModels(function, wrapper)
        if found.wrapped:
            raise SettingError(
                f"{name_of(function)} calls {found.wrapped[0]!r}, which is a parallel model already",
                legal="a step of the plain model inside AutoParallel, or a call of the step as it is",
            )
        self.models = found.models if named is None else _models_of(named, wrapper)
        if not self.models:
            raise SettingError(
                f"{name_of(function)} is not an nn.Module, and no step function of one: it refers to no module with "
                "parameters, by a variable of an enclosing function, a global, a default, or the object it is bound to",
                legal="AutoParallel(step, net=model), or a step that calls the model by such a variable",
            )
        calls = [self._called_by(StepModels(grad.function, wrapper).models) for grad in found.gradients]
        every = tuple(self.models)
        if has_loss and len(every) > 1:
            raise SettingError(
                f"loss_fn beside a step with {len(every)} models, {_listed(every)}: whose loss is it?",
                legal="the loss inside the step; or sw.value_and_grad of a function that returns it",
            )
        if has_loss and any(calls):
            raise SettingError(
                f"loss_fn beside {name_of(found.gradients[0].function)}, which returns its loss itself",
                legal="AutoParallel(step) without loss_fn",
            )
        self.net = together(self.models)
        self.apart = len(every) > 1 and not (calls and all(names == every for names in calls))
        self.parts: dict[Names, Wrapper] = {}
        self._first = dict.fromkeys([*((n,) for n in every), *filter(None, calls)]) if self.apart else {}
        self._functions = IdentityMap[object, tuple[Names, FunctionOfModels | None]]()  # the last one called is last
        self._codes: dict[CodeType, int] = {}  # code of a function -> the number of functions of this code so far
        self._came = False  # True once a model has been called
        self._infers = False  # True while the first call of a model is only planned

    def begin(self, make: Callable[[nn.Module], Wrapper]) -> None:
        """Make the wrappers that are known before the first call.

        Args:
            make: makes a wrapper with the settings of the step's own.
        """
        for names in self._first:
            self.parts[names] = make(self._net(names))

    def run(self, main: Wrapper, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Call the step function with its models in parallel.

        Raises:
            SettingError: the step has called none of its models; in processes, a trained module that is none of them.
        """
        calls = {model: partial(self._call_model, main, name) for name, model in self.models.items()}
        several = main.in_processes  # where each rank would train a module that is not parallel by itself
        if several:
            refuse_calls_of_parts()
        with redirected(calls, others_allowed=not several), running(_Run(self, main)):
            result = self.function(*args, **kwargs)
        if not self._came or self._infers:
            raise SettingError(
                f"{name_of(self.function)} has called none of its models: {_listed(self.models)}",
                legal="AutoParallel(step, net=the module that the step calls)",
            )
        return result

    def inferred(self, main: Wrapper, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The layouts of the parameters in the first call that the step makes, up to which the step runs."""
        self._infers = True
        try:
            return self.run(main, args, kwargs)  # ends with `_Inferred`, or an error
        except _Inferred as found:
            return found.layouts
        finally:
            self._infers = False

    # -- calls

    def _call_model(self, main: Wrapper, name: str, *args: object, **kwargs: object) -> object:
        wrapper = self._of(main, (name,))
        with as_written():
            if self._infers:
                raise _Inferred(wrapper.infer(None, args, kwargs))
            self._came = True
            wrapper.__dict__["training"] = self.models[name].training
            return wrapper.call_model(*args, **kwargs)

    def call_function(
        self, main: Wrapper, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Call a function of the step's models as one program; a function that calls none, as it is written."""
        names, entry = self._known(main, function)
        if entry is None:
            return function(*args, **kwargs)
        wrapper = self._of(main, names)
        with as_written():
            if self._infers:
                raise _Inferred(wrapper.infer(entry, args, kwargs))
            self._came = True
            return wrapper.call_function(entry, *args, **kwargs)

    def wrapper_of(self, main: Wrapper, function: Callable[..., object]) -> Wrapper | None:
        """The wrapper that plans a function; None where the function calls no model."""
        names, entry = self._known(main, function)
        return None if entry is None else self._of(main, names)

    def _known(self, main: Wrapper, function: Callable[..., object]) -> tuple[Names, FunctionOfModels | None]:
        known = self._functions.pop(function, None)
        if known is None:
            self._note(function)
            names = self._called_by(StepModels(function, self._wrapper).models)
            if names and main.loss_fn is not None:
                raise SettingError(
                    f"loss_fn beside {name_of(function)}, which returns its loss itself",
                    legal="AutoParallel(step) without loss_fn",
                )
            entry = FunctionOfModels(function, self._net(names)) if names else None
            known = names, entry
            while len(self._functions) >= _FUNCTIONS:
                del self._functions[next(iter(self._functions))]
        self._functions[function] = known
        return known

    def _note(self, function: object) -> None:
        """Warn of a function that is defined anew in each call of the step."""
        code = getattr(function, "__code__", None)
        if code is None:
            return
        self._codes[code] = self._codes.get(code, 0) + 1
        if self._codes[code] == 3:
            warnings.warn(
                f"{name_of(function)} is another function object at each call of {name_of(self.function)}: each is "
                "captured and planned anew. Define it, and its value_and_grad, outside of the step",
                stacklevel=stack_level(),
            )

    # -- wrappers

    def _called_by(self, models: Mapping[str, nn.Module]) -> Names:
        """The names of those models of the step that are among `models`, or hold one of them."""
        wanted = IdentitySet(models.values())
        return tuple(n for n, m in self.models.items() if any(part in wanted for part in m.modules()))

    def _net(self, names: Names) -> nn.Module:
        return self.net if len(names) == len(self.models) else together({name: self.models[name] for name in names})

    def _of(self, main: Wrapper, names: Names) -> Wrapper:
        if not self.apart and len(names) == len(self.models):
            return main
        if names not in self.parts:
            self.parts[names] = main.with_same_settings(self._net(names))
        return self.parts[names]


class _Inferred(BaseException):
    """Ends the step. It is no Exception, so that the step does not catch it."""

    def __init__(self, layouts: object) -> None:
        self.layouts = layouts


class _Run:
    """One call of a step, as `ValueAndGrad` sees it."""

    def __init__(self, step: StepFunction, main: Wrapper) -> None:
        self._step, self._main = step, main

    def call_function(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        return self._step.call_function(self._main, function, args, kwargs)

    def parameters_of(self, function: Callable[..., object]) -> Iterable[nn.Parameter]:
        wrapper = self._step.wrapper_of(self._main, function)
        return (self._step.net if wrapper is None else wrapper.net).parameters()

    def check_summed(self, function: Callable[..., object]) -> None:
        if self._main.leaves_unsummed:
            raise SettingError(
                f"value_and_grad of {name_of(function)} under no_sync(): its gradients are handed out now, and no "
                "later backward sums them",
                legal="value_and_grad outside of no_sync(); or loss.backward() in the step",
            )


def _models_of(named: object, wrapper: type[nn.Module]) -> dict[str, nn.Module]:
    """The models that the user names.

    Raises:
        SettingError: something else than models.
    """
    if isinstance(named, nn.Module):
        named = {"net": named}
    elif isinstance(named, (list, tuple)):
        named = {f"net{i}": model for i, model in enumerate(named)}
    if (
        not isinstance(named, Mapping)
        or not named
        or not all(isinstance(m, nn.Module) and not isinstance(m, wrapper) for m in named.values())
        or not all(isinstance(n, str) and n.isidentifier() for n in named)
    ):
        raise SettingError(
            f"net={named!r}: not the models of a step", legal="a plain nn.Module, a list of them, or a dict by names"
        )
    return dict(named)


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last

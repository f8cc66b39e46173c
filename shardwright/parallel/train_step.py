"""Step functions: ``AutoParallel(train_step)``.

A step function is the user's Python for one step, written for one device: forward, loss, backward, optimizer. Each call
runs it as it is written. Meanwhile the models that it calls are parallel, and so are the functions that it hands to
`value_and_grad`:

    net(x)              the model alone is planned. Its outputs are the rows that this process feeds, and the loss is
                        computed from them by the step itself
    grad_fn(x, y)       the function is planned with the models that it calls: its loss is that of the whole batch

1. `step_models` finds the models when the step is wrapped, or the user names them (``net=``).
2. `capture.module_calls.redirected` leads their calls to the wrapper, by the module object: through which variable
   the step reaches the model makes no difference.
3. One wrapper plans one set of models. The wrapper of a step is that of all its models where each call needs all of
   them: one model, or functions that call all of them. Otherwise (a GAN whose step calls its two models by
   themselves) each set has a wrapper of its own: `StepFunction.parts`.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import CodeType
from typing import Any, Protocol

from torch import nn

from ..capture.module_calls import FunctionOfModels, as_written, redirected, together
from ..capture.source_lines import stack_level
from ..errors import SettingError
from .step_models import StepModels, check_step, name_of
from .value_and_grad import running
from .whole_model import refuse_calls_of_parts

__all__ = ["StepFunction", "Wrapper"]

#: The most functions of a step that are kept with their programs.
_FUNCTIONS = 16

Names = tuple[str, ...]


class Wrapper(Protocol):
    """A parallel model, as its step function sees it."""

    net: nn.Module
    loss_fn: Any

    @property
    def leaves_unsummed(self) -> bool:
        """True under `no_sync`."""

    @property
    def in_processes(self) -> bool:
        """True where several processes train the model together."""

    def call_model(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model in parallel."""

    def call_function(self, entry: FunctionOfModels, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the model in parallel."""

    def infer(self, entry: FunctionOfModels | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    def __init__(self, function: Any, named: Any, has_loss: bool, wrapper: type[nn.Module]) -> None:
        check_step(function)
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
        self._functions: OrderedDict[int, tuple[Any, Names, FunctionOfModels | None]] = OrderedDict()
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

    def run(self, main: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the step function with its models in parallel.

        Raises:
            SettingError: the step has called none of its models; in processes, a trained module that is none of them.
        """
        calls = {model: partial(self._call_model, main, name) for name, model in self.models.items()}
        several = main.in_processes  # where each rank would train a module that is not parallel by itself
        if several:
            refuse_calls_of_parts()
        with redirected(calls, others=not several), running(_Run(self, main)):
            result = self.function(*args, **kwargs)
        if not self._came or self._infers:
            raise SettingError(
                f"{name_of(self.function)} has called none of its models: {_listed(self.models)}",
                legal="AutoParallel(step, net=the module that the step calls)",
            )
        return result

    def inferred(self, main: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layouts of the parameters in the first call that the step makes, up to which the step runs."""
        self._infers = True
        try:
            return self.run(main, args, kwargs)  # ends with `_Inferred`, or an error
        except _Inferred as found:
            return found.layouts
        finally:
            self._infers = False

    # -- calls

    def _call_model(self, main: Wrapper, name: str, *args: Any, **kwargs: Any) -> Any:
        wrapper = self._of(main, (name,))
        with as_written():
            if self._infers:
                raise _Inferred(wrapper.infer(None, args, kwargs))
            self._came = True
            wrapper.__dict__["training"] = self.models[name].training
            return wrapper.call_model(*args, **kwargs)

    def call_function(
        self, main: Wrapper, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
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

    def wrapper_of(self, main: Wrapper, function: Callable[..., Any]) -> Wrapper | None:
        """The wrapper that plans a function; None where the function calls no model."""
        names, entry = self._known(main, function)
        return None if entry is None else self._of(main, names)

    def _known(self, main: Wrapper, function: Callable[..., Any]) -> tuple[Names, FunctionOfModels | None]:
        held = self._functions.get(id(function))
        if held is None:
            self._note(function)
            names = self._called_by(StepModels(function, self._wrapper).models)
            if names and main.loss_fn is not None:
                raise SettingError(
                    f"loss_fn beside {name_of(function)}, which returns its loss itself",
                    legal="AutoParallel(step) without loss_fn",
                )
            entry = FunctionOfModels(function, self._net(names)) if names else None
            held = self._functions[id(function)] = function, names, entry
            while len(self._functions) > _FUNCTIONS:
                self._functions.popitem(last=False)
        self._functions.move_to_end(id(function))
        return held[1:]

    def _note(self, function: Any) -> None:
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
        wanted = set(map(id, models.values()))
        return tuple(n for n, m in self.models.items() if any(id(part) in wanted for part in m.modules()))

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

    def __init__(self, layouts: Any) -> None:
        self.layouts = layouts


class _Run:
    """One call of a step, as `ValueAndGrad` sees it."""

    def __init__(self, step: StepFunction, main: Wrapper) -> None:
        self._step, self._main = step, main

    def call_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._step.call_function(self._main, function, args, kwargs)

    def parameters_of(self, function: Callable[..., Any]) -> Iterable[nn.Parameter]:
        wrapper = self._step.wrapper_of(self._main, function)
        return (self._step.net if wrapper is None else wrapper.net).parameters()

    def check_summed(self, function: Callable[..., Any]) -> None:
        if self._main.leaves_unsummed:
            raise SettingError(
                f"value_and_grad of {name_of(function)} under no_sync(): its gradients are handed out now, and no "
                "later backward sums them",
                legal="value_and_grad outside of no_sync(); or loss.backward() in the step",
            )


def _models_of(named: Any, wrapper: type[nn.Module]) -> dict[str, nn.Module]:
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

"""`value_and_grad` and `optimizer`: a step written as a function of its gradients.

    grad_fn = sw.value_and_grad(forward_fn, None, optimizer.parameters, has_aux=True)

    def train_step(x, y):
        (loss, logits), grads = grad_fn(x, y)
        optimizer(grads)
        return loss

1. Called by itself, `grad_fn` runs ``forward_fn`` as it is written, on one device.
2. Called by a step function inside `AutoParallel`, ``forward_fn`` is captured together with the models that it calls:
   loss and gradients are those of the whole batch in every mode, and pipelines have their loss.

Gradients lie as ``parameter.grad`` would: plain tensors in one process, slices (DTensors) in processes. The ``grad`` of
the parameters themselves is left alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from ..errors import SettingError
from ..runtime.optimizer_guard import successor_of
from ..torch_private import pytree

__all__ = [
    "OptimizerParameters",
    "RunningStep",
    "ValueAndGrad",
    "optimizer",
    "running",
    "value_and_grad",
    "without_gradients",
]


class RunningStep(Protocol):
    """A step function while it runs, as `ValueAndGrad` sees it."""

    def call_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the step's models in parallel."""

    def parameters_of(self, function: Callable[..., Any]) -> Iterable[nn.Parameter]:
        """The parameters of the models that a function calls."""

    def check_summed(self, function: Callable[..., Any]) -> None:
        """Refuse gradients that no later backward would sum."""


#: The steps that run, the innermost last.
_RUNNING: list[RunningStep] = []


@contextlib.contextmanager
def running(step: RunningStep) -> Iterator[None]:
    """Let each `ValueAndGrad` that is called inside the ``with`` block call its function through `step`."""
    _RUNNING.append(step)
    try:
        yield
    finally:
        _RUNNING.pop()


class ValueAndGrad:
    """The result of `value_and_grad`.

    Attributes:
        function: the function whose value and gradients it returns.
    """

    def __init__(
        self, function: Callable[..., Any], grad_position: int | Sequence[int] | None, weights: Any, has_aux: bool
    ) -> None:
        self.function, self._has_aux = function, has_aux
        self._position, self._positions = grad_position, _positions(grad_position)
        self._weights = None if weights is None else _Weights(weights)
        if self._positions == () and self._weights is None:
            raise SettingError(
                "value_and_grad: neither inputs nor weights to differentiate by",
                legal="value_and_grad(forward_fn, None, optimizer.parameters)",
            )
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Call the function, and differentiate its loss.

        Returns:
            (the value of the function without its autograd graph, the gradients). Gradients of weights are a tuple in
            their order, or one gradient where one parameter was given; None for a parameter that the loss does not
            depend on. With inputs and weights: (gradients of inputs, gradients of weights).

        Raises:
            SettingError: the function returns no loss of one element; an input to differentiate by is no tensor of
                real or complex numbers; the call is under `no_sync`.
        """
        args, inputs = self._inputs(args)
        step = _RUNNING[-1] if _RUNNING else None
        with torch.enable_grad():
            if step is None:
                value = self.function(*args, **kwargs)
            else:
                step.check_summed(self.function)
                value = step.call_function(self.function, args, kwargs)
            loss = self._loss(value)
            weights = [] if self._weights is None else self._weights.now()
            others = () if step is None else step.parameters_of(self.function)
            with without_gradients([*weights, *others]):
                if loss.requires_grad:
                    scaler = None if self._weights is None else self._weights.scaler
                    (loss if scaler is None else scaler.scale(loss)).backward(inputs=_inputs_of(step, weights, inputs))
                gradients = tuple(p.grad for p in weights)
        value = pytree.tree_map_only(Tensor, Tensor.detach, value)
        of_inputs: Any = tuple(x.grad for x in inputs)
        of_inputs = of_inputs[0] if isinstance(self._position, int) else of_inputs
        if self._weights is None:
            return value, of_inputs
        of_weights = gradients[0] if self._weights.alone else gradients
        return value, (of_inputs, of_weights) if self._positions else of_weights

    def _inputs(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor]]:
        """The arguments of a call with leaves at the positions to differentiate by, and these leaves."""
        made, leaves = list(args), []
        for position in self._positions:
            x = args[position] if -len(args) <= position < len(args) else None
            if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
                raise SettingError(
                    f"value_and_grad: argument {position} of {_name(self.function)} is "
                    + ("missing" if x is None else f"{x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"),
                    legal="grad_position=None for gradients of weights alone, or the position of a tensor of floats",
                )
            made[position] = x.detach().requires_grad_()
            leaves.append(made[position])
        return tuple(made), leaves

    def _loss(self, value: Any) -> Tensor:
        loss = value[0] if self._has_aux and isinstance(value, (tuple, list)) and value else value
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        several = isinstance(value, (tuple, list)) and not self._has_aux
        raise SettingError(
            f"value_and_grad: {_name(self.function)} returns {what} for its loss",
            legal="has_aux=True where it returns (loss, …)" if several else "a tensor of one element, such as a mean",
        )


def _inputs_of(step: RunningStep | None, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor] | None:
    """The leaves that the backward fills; None: all. Programs hand gradients over to parameters by themselves."""
    return [*weights, *inputs] if step is None else None


@contextlib.contextmanager
def without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters have no gradients at the begin of the ``with`` block, and their own again after it."""
    held = {id(p): (p, p.grad) for p in parameters}
    for p, _ in held.values():
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in held.values():
            p.grad = gradient


def _positions(grad_position: int | Sequence[int] | None) -> tuple[int, ...]:
    positions = () if grad_position is None else (grad_position,) if isinstance(grad_position, int) else grad_position
    if not isinstance(positions, (tuple, list)) or not all(type(i) is int for i in positions):
        raise SettingError(
            f"value_and_grad: grad_position={grad_position!r}",
            legal="None, a position of an argument, or a tuple of them",
        )
    return tuple(positions)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


class _Weights:
    """The parameters to differentiate by. A list of parameters follows those that a first call has cut.

    Attributes:
        alone: True where one parameter was given, not a list.
    """

    def __init__(self, weights: Any) -> None:
        self.alone = isinstance(weights, Tensor)
        self._optimizer = weights.optimizer if isinstance(weights, OptimizerParameters) else weights
        self._held: list[Tensor] = []
        if isinstance(self._optimizer, torch.optim.Optimizer):
            return
        if isinstance(weights, nn.Module):
            weights = [p for p in weights.parameters() if p.requires_grad]
        held = [weights] if self.alone else list(weights) if isinstance(weights, Iterable) else [weights]
        wrong = next((x for x in held if not isinstance(x, Tensor) or not x.is_leaf), None)
        if wrong is not None or not held:
            raise SettingError(
                "value_and_grad: weights "
                + ("without a parameter" if not held else f"with a {type(wrong).__name__}, which is no parameter"),
                legal="net.parameters(), optimizer.parameters of sw.optimizer(…), a torch optimizer, or None",
            )
        self._held, self._optimizer = held, None

    @property
    def scaler(self) -> Any:
        """The gradient scaler of the optimizer, or None."""
        return getattr(self._optimizer, "scaler", None)

    def now(self) -> list[Tensor]:
        """The parameters, as the models hold them now."""
        if self._optimizer is not None:
            return list(OptimizerParameters(self._optimizer))
        self._held = list(map(successor_of, self._held))
        return self._held


def value_and_grad(
    function: Callable[..., Any],
    grad_position: int | Sequence[int] | None = 0,
    weights: Any = None,
    has_aux: bool = False,
) -> ValueAndGrad:
    """Make a function that returns the value of `function` and the gradients of its loss.

        grad_fn = sw.value_and_grad(forward_fn, None, optimizer.parameters, has_aux=True)
        (loss, logits), grads = grad_fn(x, y)

    In a step function inside `AutoParallel`, `function` is captured together with the models that it calls; the loss
    is then that of the whole batch, the same on every rank.

    Args:
        function: returns the loss, a tensor of one element; or with `has_aux` a tuple of the loss and other results.
        grad_position: the positional arguments by which the loss is differentiated: a position, several, or None.
        weights: the parameters by which it is differentiated: ``optimizer.parameters`` of an `optimizer`, a torch
            optimizer, a model, parameters, one parameter; None: by inputs alone.
        has_aux: True where `function` returns further results after the loss.

    Returns:
        The function; see `ValueAndGrad.__call__`.

    Raises:
        SettingError: neither positions nor weights, or other types of them.

    Example:
        >>> step = sw.value_and_grad(lambda x, y: loss_fn(net(x), y), None, list(net.parameters()))
        >>> loss, gradients = step(x, y)
        >>> [tuple(gradient.shape) for gradient in gradients]
        [(32, 16), (32,), (8, 32), (8,)]
    """
    if not callable(function):
        raise SettingError(f"value_and_grad({function!r})", legal="a function that returns a loss")
    return ValueAndGrad(function, grad_position, weights, bool(has_aux))


# -- optimizers that are called with gradients


class OptimizerParameters(Sequence[nn.Parameter]):
    """The parameters of an optimizer, in the order of its groups, as they are at the time of reading."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def _held(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @overload
    def __getitem__(self, index: int) -> nn.Parameter: ...

    @overload
    def __getitem__(self, index: slice) -> list[nn.Parameter]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self._held()[index]

    def __len__(self) -> int:
        return len(self._held())

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._held())


class _TakesGradients:
    """Mixed into an optimizer's class: ``optimizer(gradients)`` and ``optimizer.parameters``."""

    param_groups: list[dict[str, Any]]
    scaler: Any = None

    @property
    def parameters(self) -> OptimizerParameters:
        """The parameters, in the order in which `__call__` takes their gradients."""
        return OptimizerParameters(self)  # type: ignore[arg-type]  # it is an optimizer

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        """Step with these gradients; a parameter whose gradient is None is left as it is.

        Raises:
            SettingError: another number of gradients than of parameters.
        """
        held = list(self.parameters)
        listed = [gradients] if isinstance(gradients, Tensor) else list(gradients)
        if len(listed) != len(held):
            raise SettingError(
                f"{type(self).__name__}: {len(listed)} gradients for {len(held)} parameters",
                legal="the gradients of optimizer.parameters, in their order",
            )
        with without_gradients(held):
            for parameter, gradient in zip(held, listed):
                parameter.grad = gradient
            if self.scaler is None:
                self.step()  # type: ignore[attr-defined]  # it is an optimizer
            else:
                self.scaler.step(self)
                self.scaler.update()

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        function, (kind, *rest), *more = reduced
        return (_again, (function, kind.__bases__[1], *rest), *more)


def _again(function: Callable[..., Any], kind: type, *args: Any) -> Any:
    return function(_taking(kind), *args)


def _mixed(kind: type) -> type:
    return type(kind.__name__, (_TakesGradients, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


_taking: Callable[[type], type] = functools.cache(_mixed)


def optimizer(optimizer: torch.optim.Optimizer, scaler: Any = None) -> Any:
    """Make a torch optimizer callable with gradients, as steps with `value_and_grad` have it.

        optimizer = sw.optimizer(torch.optim.SGD(net.parameters(), lr=1e-2))
        optimizer(grads)        # the step with these gradients; optimizer.parameters: their order

    It stays the same object, so schedulers, checkpoints and ``optimizer.step()`` mean what they meant: its class
    becomes a subclass of its own class with these two names.

    Args:
        optimizer: the optimizer.
        scaler: a ``torch.amp.GradScaler``. `value_and_grad` by ``optimizer.parameters`` then returns gradients of the
            scaled loss; ``optimizer(grads)`` steps by ``scaler.step`` and calls ``scaler.update``.

    Returns:
        The optimizer itself.

    Raises:
        SettingError: no torch optimizer.

    Example:
        >>> steps = sw.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        >>> step = sw.value_and_grad(lambda x, y: loss_fn(net(x), y), None, steps.parameters)
        >>> loss, gradients = step(x, y)
        >>> steps(gradients)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(
            f"sw.optimizer({type(optimizer).__name__})",
            legal="sw.optimizer(torch.optim.SGD(net.parameters(), lr=1e-2))",
        )
    if not isinstance(optimizer, _TakesGradients):
        optimizer.__class__ = _taking(type(optimizer))
    if scaler is not None:
        vars(optimizer)["scaler"] = scaler
    return optimizer

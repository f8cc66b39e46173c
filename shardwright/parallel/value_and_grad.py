"""`value_and_grad` and `optimizer`: a step written as a function of its gradients; and models under ``torch.func``.

    grad_fn = sw.value_and_grad(forward_fn, None, optimizer.parameters, has_aux=True)

    def train_step(x, y):
        (loss, logits), grads = grad_fn(x, y)
        optimizer(grads)
        return loss

1. Called by itself, `grad_fn` runs ``forward_fn`` as it is written, on one device.
2. Called by a step function inside `AutoParallel`, ``forward_fn`` is captured together with the models that it calls:
   loss and gradients are those of the whole batch in every mode, and pipelines have their loss.
3. A model may also be called under ``torch.func.grad``, ``grad_and_value`` and ``vjp`` (`called_in_transform`):

       def loss_of(params, x, y):
           return loss_fn(torch.func.functional_call(model, params, (x,)), y)

       grads, loss = torch.func.grad_and_value(loss_of)(dict(model.named_parameters()), x, y)

   torch.func hands wrapped tensors to the model, which no program takes. A call is therefore one autograd function
   (`_Forward`), whose forward torch.func runs on the tensors themselves. The tensors that ``functional_call`` has put
   into the modules go out, and the model's own parameters come in. Where the values are others than the model's, the
   parameters hold them during the forward and the backward. The program runs, with its ordinary autograd graph; the
   backward (`_Backward`) runs that graph. Second derivatives, transforms inside one another, ``vmap`` and forward-mode
   derivatives are errors.

Gradients lie as ``parameter.grad`` would: plain tensors in one process, slices (DTensors) in processes. The ``grad`` of
the parameters themselves is left alone.

Example: ``net = nn.Linear(16, 8)`` and a batch of 32 rows on 8 devices, each of which computes 4 rows. The loss is that
of all 32 rows, and ``grads`` has 2 tensors, of the shapes [8, 16] and [8].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, SupportsIndex, overload

import torch
from torch import Tensor, nn

from ..capture.annotations import CUT, whole_shape
from ..capture.module_calls import ModelAndLoss
from ..errors import SettingError
from ..process_runtime import current
from ..runtime.replaced_parameters import successor_of
from ..torch_private import allow_hooks, forbid_hooks, forbidden_hooks, part_tables, pytree, transforms

__all__ = [
    "OptimizerParameters",
    "RunningStep",
    "ValueAndGrad",
    "called_in_transform",
    "optimizer",
    "running",
    "value_and_grad",
    "without_gradients",
]

# -- value_and_grad, optimizer


class RunningStep(Protocol):
    """A step function while it runs, as `ValueAndGrad` sees it."""

    def call_function(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Call a function of the step's models in parallel."""

    def parameters_of(self, function: Callable[..., object]) -> Iterable[nn.Parameter]:
        """The parameters of the models that a function calls."""

    def check_summed(self, function: Callable[..., object]) -> None:
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
        self, function: Callable[..., object], grad_position: int | Sequence[int] | None, weights: object, has_aux: bool
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

    def __call__(self, *args: object, **kwargs: object) -> tuple[Any, Any]:  # what the function returns; gradients
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
            further = () if step is None else step.parameters_of(self.function)
            with without_gradients([*weights, *further]):
                if loss.requires_grad:
                    scaler = None if self._weights is None else self._weights.scaler
                    (loss if scaler is None else scaler.scale(loss)).backward(inputs=_inputs_of(step, weights, inputs))
                gradients = tuple(p.grad for p in weights)
        value = pytree.tree_map_only(Tensor, Tensor.detach, value)
        gradients_of_inputs = tuple(x.grad for x in inputs)
        of_inputs = gradients_of_inputs[0] if isinstance(self._position, int) else gradients_of_inputs
        if self._weights is None:
            return value, of_inputs
        of_weights = gradients[0] if self._weights.alone else gradients
        return value, (of_inputs, of_weights) if self._positions else of_weights

    def _inputs(self, args: tuple[object, ...]) -> tuple[tuple[object, ...], list[Tensor]]:
        """The arguments of a call with leaves at the positions to differentiate by, and these leaves."""
        made, leaves = list(args), list[Tensor]()
        for position in self._positions:
            x = args[position] if -len(args) <= position < len(args) else None
            if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
                raise SettingError(
                    f"value_and_grad: argument {position} of {_name(self.function)} is "
                    + ("missing" if x is None else f"{x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"),
                    legal="grad_position=None for gradients of weights alone, or the position of a tensor of floats",
                )
            leaf = made[position] = x.detach().requires_grad_()
            leaves.append(leaf)
        return tuple(made), leaves

    def _loss(self, value: object) -> Tensor:
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
    gradients = {p: p.grad for p in parameters}
    for p in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in gradients.items():
            p.grad = gradient


def _positions(grad_position: int | Sequence[int] | None) -> tuple[int, ...]:
    positions = () if grad_position is None else (grad_position,) if isinstance(grad_position, int) else grad_position
    if not isinstance(positions, (tuple, list)) or not all(type(i) is int for i in positions):
        raise SettingError(
            f"value_and_grad: grad_position={grad_position!r}",
            legal="None, a position of an argument, or a tuple of them",
        )
    return tuple(positions)


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


class _Weights:
    """The parameters to differentiate by. A list of parameters follows those that a first call has cut.

    Attributes:
        alone: True where one parameter was given, not a list.
    """

    def __init__(self, weights: object) -> None:
        self.alone = isinstance(weights, Tensor)
        self._parameters: list[Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None
        optimizer = weights.optimizer if isinstance(weights, OptimizerParameters) else weights
        if isinstance(optimizer, torch.optim.Optimizer):
            self._optimizer = optimizer
            return
        if isinstance(weights, nn.Module):
            weights = [p for p in weights.parameters() if p.requires_grad]
        parameters = [weights] if self.alone else list(weights) if isinstance(weights, Iterable) else [weights]
        leaves = [x for x in parameters if isinstance(x, Tensor) and x.is_leaf]
        if len(leaves) < len(parameters) or not parameters:
            wrong = next((x for x in parameters if not isinstance(x, Tensor) or not x.is_leaf), None)
            raise SettingError(
                "value_and_grad: weights "
                + (
                    "without a parameter" if not parameters else f"with a {type(wrong).__name__}, which is no parameter"
                ),
                legal="net.parameters(), optimizer.parameters of sw.optimizer(…), a torch optimizer, or None",
            )
        self._parameters = leaves

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of the optimizer, or None."""
        return getattr(self._optimizer, "scaler", None)

    def now(self) -> list[Tensor]:
        """The parameters, as the models hold them now."""
        if self._optimizer is not None:
            return list(OptimizerParameters(self._optimizer))
        self._parameters = list(map(successor_of, self._parameters))
        return self._parameters


def value_and_grad(
    function: Callable[..., object],
    grad_position: int | Sequence[int] | None = 0,
    weights: object = None,
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

    def _now(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @overload
    def __getitem__(self, index: int) -> nn.Parameter: ...

    @overload
    def __getitem__(self, index: slice) -> list[nn.Parameter]: ...

    def __getitem__(self, index: int | slice) -> object:
        return self._now()[index]

    def __len__(self) -> int:
        return len(self._now())

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._now())


class _TakesGradients:
    """Mixed into an optimizer's class: ``optimizer(gradients)`` and ``optimizer.parameters``."""

    param_groups: list[dict[str, object]]
    scaler: torch.amp.GradScaler | None = None

    @property
    def parameters(self) -> OptimizerParameters:
        """The parameters, in the order in which `__call__` takes their gradients."""
        return OptimizerParameters(self)  # type: ignore[arg-type]  # it is an optimizer

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        """Step with these gradients; a parameter whose gradient is None is left as it is.

        Raises:
            SettingError: another number of gradients than of parameters.
        """
        assert isinstance(self, torch.optim.Optimizer)
        parameters = list(self.parameters)
        listed = [gradients] if isinstance(gradients, Tensor) else list(gradients)
        if len(listed) != len(parameters):
            raise SettingError(
                f"{type(self).__name__}: {len(listed)} gradients for {len(parameters)} parameters",
                legal="the gradients of optimizer.parameters, in their order",
            )
        with without_gradients(parameters):
            for parameter, gradient in zip(parameters, listed):
                parameter.grad = gradient
            if self.scaler is None:
                self.step()
            else:
                self.scaler.step(self)
                self.scaler.update()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        reduced = super().__reduce_ex__(protocol)
        assert isinstance(reduced, tuple)
        function, (kind, *rest), *more = reduced
        return (_again, (function, kind.__bases__[1], *rest), *more)


def _again(function: Callable[..., object], kind: type, *args: object) -> object:
    return function(_taking(kind), *args)


def _mixed(kind: type) -> type:
    return type(kind.__name__, (_TakesGradients, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


_taking: Callable[[type], type] = functools.cache(_mixed)


def optimizer(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> Any:
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


# -- calls under torch.func


_LEGAL = "torch.func.grad, grad_and_value or vjp of the model, once; or sw.value_and_grad"


def called_in_transform(
    holder: ModelAndLoss,
    parameters_by_name: dict[str, nn.Parameter],
    call: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """The result of a call under a transform of torch.func.

    Args:
        holder: the model and its loss, which may hold other tensors than their own now.
        parameters_by_name: the parameters of the model, by name, as the wrapper has been given them.
        call: the call of the model on its own parameters.
        args, kwargs: the arguments.

    Raises:
        SettingError: a transform inside another one; in processes, a first call, which cuts the parameters.
    """
    if len(transforms()) > 1:
        _refuse("a transform of torch.func inside another one, around a call")
    made = _Call(holder, parameters_by_name, call, args, kwargs)
    outputs = _Forward.apply(made, *made.tensors)
    return made.result(outputs)


class _Call:
    """One call.

    Attributes:
        tensors: the tensors in the modules' tables, each once, then those among the arguments.
    """

    def __init__(
        self,
        holder: ModelAndLoss,
        parameters_by_name: dict[str, nn.Parameter],
        call: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        self._call = call
        self._places: list[tuple[dict[object, object], object, Tensor]] = [
            (table, key, tensor)
            for module in holder.modules()
            for table in _tables(module)
            for key, tensor in table.items()
            if isinstance(tensor, Tensor)
        ]
        self._tensors = list(dict.fromkeys(tensor for _, _, tensor in self._places))
        named: dict[Tensor, str] = {x: name for name, x in reversed(list(holder.named_parameters()))}
        self._parameters_by_name = {
            x: successor_of(parameters_by_name[named[x]])
            for x in self._tensors
            if x in named and named[x] in parameters_by_name
        }
        if current().processes and any(not hasattr(p, CUT) for p in self._parameters_by_name.values()):
            raise SettingError(
                "the first call of the model is under torch.func: it cuts the parameters, which functional_call "
                "has replaced for its time",
                legal="one call before it, such as net(x) under torch.no_grad(); or sw.value_and_grad",
            )
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        inputs = [x for x in self._leaves if isinstance(x, Tensor)]
        self.tensors = [*self._tensors, *inputs]
        self._wanted = [x.requires_grad for x in self.tensors]
        self._values: list[tuple[Tensor, Tensor]] = []  # parameters, and the values that they have in this call
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] | None = None
        self._result_leaves: list[object] = []
        self._out_spec: pytree.TreeSpec | None = None

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the program on the tensors behind the wrapped ones; the outputs without their graph."""
        count = len(self._tensors)
        present: dict[Tensor, Tensor] = {}
        for x, tensor in zip(self._tensors, tensors):
            parameter = self._parameters_by_name.get(x)
            if parameter is None or tensor is parameter:
                present[x] = tensor
            else:
                present[x] = parameter
                self._values.append((parameter, tensor))
        self._inputs = [
            x.detach().requires_grad_() if wanted else x.detach()
            for x, wanted in zip(tensors[count:], self._wanted[count:])
        ]
        inputs = iter(self._inputs)
        leaves = [next(inputs) if isinstance(x, Tensor) else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        try:
            for table, key, tensor in self._places:
                table[key] = present[tensor]
            with torch.enable_grad(), _hooks_allowed(), _holding(self._values):
                result = self._call(*args, **kwargs)
        finally:
            for table, key, tensor in self._places:
                table[key] = tensor
        self._result_leaves, self._out_spec = pytree.tree_flatten(result)
        self._outputs = [x for x in self._result_leaves if isinstance(x, Tensor)]
        self._result_leaves = [None if isinstance(x, Tensor) else x for x in self._result_leaves]
        self._tensor_places = [i for i, x in enumerate(pytree.tree_leaves(result)) if isinstance(x, Tensor)]
        return tuple(x.detach() for x in self._outputs)

    def backward(self, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of `tensors`."""
        if self._outputs is None:
            raise SettingError("a second backward of a call under torch.func", legal=_LEGAL)
        outputs, self._outputs = self._outputs, None
        pairs = [(x, g) for x, g in zip(outputs, gradients) if x.requires_grad]
        parameters = [self._parameters_by_name.get(x) for x in self._tensors]
        trained = [p for p in parameters if p is not None]
        with without_gradients(trained), _hooks_allowed(), _holding(self._values):
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
            found = [None if p is None else p.grad for p in parameters]
        found += [x.grad for x in self._inputs]
        return tuple(g if wanted else None for g, wanted in zip(found, self._wanted))

    def result(self, outputs: Sequence[Tensor]) -> object:
        """The structure that the model returns."""
        leaves = list(self._result_leaves)
        for place, x in zip(self._tensor_places, outputs):
            leaves[place] = x
        assert self._out_spec is not None
        return pytree.tree_unflatten(leaves, self._out_spec)


def _tables(module: nn.Module) -> tuple[dict[object, object], dict[object, object]]:
    tables = part_tables(module)
    return tables["parameters"], tables["buffers"]


@contextlib.contextmanager
def _hooks_allowed() -> Iterator[None]:
    """Allow hooks on saved tensors, by which programs recompute: torch.func forbids them outside of its functions."""
    why = forbidden_hooks()
    if why is None:
        yield
        return
    allow_hooks()
    try:
        yield
    finally:
        forbid_hooks(why)


@contextlib.contextmanager
def _holding(values: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let parameters hold other values inside the ``with`` block. Versions of the parameters do not count it."""
    saved: list[tuple[Tensor, Tensor]] = []
    try:
        for parameter, value in values:
            memory, part = _memory(parameter, value)
            if part.data_ptr() != memory.data_ptr() or part.stride() != memory.stride():
                saved.append((memory, memory.clone()))
                memory.copy_(part)
        yield
    finally:
        for memory, before in saved:
            memory.copy_(before)


def _memory(parameter: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of a parameter on this rank, and the values for it; neither is part of any autograd graph.

    Raises:
        SettingError: values that lie otherwise than the parameter does.
    """
    if not hasattr(parameter, CUT):
        return parameter.data, value.detach()
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  processes alone use it

    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        mine = parameter.to_local().data
        if isinstance(value, DTensor) and value.placements == parameter.placements and value.shape == parameter.shape:
            return mine, value.to_local().detach()
    raise SettingError(
        f"torch.func.functional_call with {getattr(parameter, CUT)!r} as "
        + ("a DTensor of other cuts" if isinstance(value, DTensor) else "a plain tensor")
        + f", of which this rank has a slice of {list(whole_shape(parameter))}",
        legal="values made of model.named_parameters(), element by element",
    )


def _refuse(what: str) -> NoReturn:
    raise SettingError(f"{what} of a parallel model", legal=_LEGAL)


class _CallContext(Protocol):
    """The context of a call of `_Forward`."""

    call: _Call

    def mark_non_differentiable(self, *args: Tensor) -> None: ...


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call.forward(tensors)

    @staticmethod
    def setup_context(ctx: _CallContext, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
        call = inputs[0]
        assert isinstance(call, _Call)
        ctx.call = call
        ctx.mark_non_differentiable(*(x for x in output if not (x.is_floating_point() or x.is_complex())))

    @staticmethod
    def backward(ctx: _CallContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Backward.apply(ctx.call, *gradients)

    @staticmethod
    def vmap(info: object, in_dims: object, *args: object) -> NoReturn:
        _refuse("torch.func.vmap")

    @staticmethod
    def jvp(ctx: object, *tangents: object) -> NoReturn:
        _refuse("a forward-mode derivative")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return call.backward(gradients)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[object, ...], output: tuple[Tensor | None, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> NoReturn:
        _refuse("the second derivative")

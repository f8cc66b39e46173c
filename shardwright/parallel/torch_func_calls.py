"""Calls of a parallel model under ``torch.func.grad``, ``grad_and_value`` and ``vjp``.

    def loss_of(params, x, y):
        return loss_fn(torch.func.functional_call(model, params, (x,)), y)

    grads, loss = torch.func.grad_and_value(loss_of)(dict(model.named_parameters()), x, y)

torch.func hands wrapped tensors to the model, which no program takes. A call is therefore one autograd function
(`_Forward`), whose forward torch.func runs on the tensors themselves:

1. The tensors that ``functional_call`` has put into the modules go out, and the model's own parameters come in.
2. Where the values are others than the model's, the parameters hold them during the forward and the backward.
3. The program runs, with its ordinary autograd graph. The backward (`_Backward`) runs that graph and returns the
   gradients, which lie as ``parameter.grad`` does.

Second derivatives, transforms inside one another, ``vmap`` and forward-mode derivatives are errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..capture.annotations import CUT, whole_shape
from ..capture.export import ModelAndLoss
from ..errors import SettingError
from ..process import current
from ..runtime.optimizer_guard import successor_of
from ..torch_private import (
    allow_hooks,
    buffer_table,
    forbid_hooks,
    forbidden_hooks,
    parameter_table,
    pytree,
    transforms,
)
from .value_and_grad import without_gradients

__all__ = ["called_in_transform"]

_LEGAL = "torch.func.grad, grad_and_value or vjp of the model, once; or sw.value_and_grad"


def called_in_transform(
    holder: ModelAndLoss, own: dict[str, nn.Parameter], call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """The result of a call under a transform of torch.func.

    Args:
        holder: the model and its loss, which may hold other tensors than their own now.
        own: the parameters of the model, by name, as the wrapper has been given them.
        call: the call of the model on its own parameters.
        args, kwargs: the arguments.

    Raises:
        SettingError: a transform inside another one; in processes, a first call, which cuts the parameters.
    """
    if len(transforms()) > 1:
        _refuse("a transform of torch.func inside another one, around a call")
    made = _Call(holder, own, call, args, kwargs)
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
        own: dict[str, nn.Parameter],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> None:
        self._call = call
        self._places: list[tuple[dict[str, Any], str, Tensor]] = [
            (table, key, tensor)
            for module in holder.modules()
            for table in _tables(module)
            for key, tensor in table.items()
            if tensor is not None
        ]
        held = {id(tensor): tensor for _, _, tensor in self._places}
        named = {id(tensor): name for name, tensor in reversed(list(holder.named_parameters()))}
        self._own = {i: successor_of(own[named[i]]) for i in held if i in named and named[i] in own}
        if current().processes and any(not hasattr(p, CUT) for p in self._own.values()):
            raise SettingError(
                "the first call of the model is under torch.func: it cuts the parameters, which functional_call "
                "has replaced for its time",
                legal="one call before it, such as net(x) under torch.no_grad(); or sw.value_and_grad",
            )
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        inputs = [x for x in self._leaves if isinstance(x, Tensor)]
        self._ids = list(held)
        self.tensors = [*held.values(), *inputs]
        self._wanted = [x.requires_grad for x in self.tensors]
        self._values: list[tuple[Tensor, Tensor]] = []  # parameters, and the values that they have in this call
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] | None = None
        self._others: list[Any] = []
        self._out_spec: Any = None

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the program on the tensors behind the wrapped ones; the outputs without their graph."""
        count = len(self._ids)
        present: dict[int, Tensor] = {}
        for i, tensor in zip(self._ids, tensors):
            own = self._own.get(i)
            if own is None or tensor is own:
                present[i] = tensor
            else:
                present[i] = own
                self._values.append((own, tensor))
        self._inputs = [
            x.detach().requires_grad_() if wanted else x.detach()
            for x, wanted in zip(tensors[count:], self._wanted[count:])
        ]
        inputs = iter(self._inputs)
        leaves = [next(inputs) if isinstance(x, Tensor) else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        try:
            for table, key, tensor in self._places:
                table[key] = present[id(tensor)]
            with torch.enable_grad(), _hooks_allowed(), _holding(self._values):
                result = self._call(*args, **kwargs)
        finally:
            for table, key, tensor in self._places:
                table[key] = tensor
        self._others, self._out_spec = pytree.tree_flatten(result)
        self._outputs = [x for x in self._others if isinstance(x, Tensor)]
        self._others = [None if isinstance(x, Tensor) else x for x in self._others]
        self._tensor_places = [i for i, x in enumerate(pytree.tree_leaves(result)) if isinstance(x, Tensor)]
        return tuple(x.detach() for x in self._outputs)

    def backward(self, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of `tensors`."""
        if self._outputs is None:
            raise SettingError("a second backward of a call under torch.func", legal=_LEGAL)
        outputs, self._outputs = self._outputs, None
        pairs = [(x, g) for x, g in zip(outputs, gradients) if x.requires_grad]
        parameters = [self._own.get(i) for i in self._ids]
        trained = [p for p in parameters if p is not None]
        with without_gradients(trained), _hooks_allowed(), _holding(self._values):
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
            found = [None if p is None else p.grad for p in parameters]
        found += [x.grad for x in self._inputs]
        return tuple(g if wanted else None for g, wanted in zip(found, self._wanted))

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """The structure that the model returns."""
        leaves = list(self._others)
        for place, x in zip(self._tensor_places, outputs):
            leaves[place] = x
        return pytree.tree_unflatten(leaves, self._out_spec)


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return parameter_table(module), buffer_table(module)


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
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for parameter, value in values:
            memory, part = _memory(parameter, value)
            if part.data_ptr() != memory.data_ptr() or part.stride() != memory.stride():
                kept.append((memory, memory.clone()))
                memory.copy_(part)
        yield
    finally:
        for memory, before in kept:
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


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call.forward(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = inputs[0]
        ctx.mark_non_differentiable(*(x for x in output if not (x.is_floating_point() or x.is_complex())))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Backward.apply(ctx.call, *gradients)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        _refuse("torch.func.vmap")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse("a forward-mode derivative")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return call.backward(gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        _refuse("the second derivative")

"""How gradients come back to the parameters of the processes runtime.

A program computes on plain leaves that share the storage of the DTensor parameters. When a leaf's gradient is complete
it is summed over the ranks that hold terms of it, and put on the parameter as a DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .collectives import Bound

__all__ = ["Gradient", "leaf_of"]

#: What optimizers do to a parameter or their state element by element with a gradient, in place.
_ELEMENTWISE = frozenset({Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_, Tensor.lerp_, Tensor.addcmul_,
                          Tensor.addcdiv_, Tensor.copy_})


class Gradient(DTensor):
    """The gradient of a parameter. Its norm is a plain number, so that ``clip_grad_norm_`` can put together the norms of
    gradients which lie on different meshes."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function in _ELEMENTWISE and _placed_alike(args):
                # On the slices: a third of what DTensor's dispatch takes.
                function(*[a._local_tensor if isinstance(a, DTensor) else a for a in args], **(kwargs or {}))
                return args[0]
            if function is torch._foreach_mul_:  # of lists, DTensor takes those on one mesh alone
                return [gradient.mul_(factor) for gradient, factor in zip(args[0], _each(args[1], len(args[0])))]
            result = function(*args, **(kwargs or {}))
        if function is torch.linalg.vector_norm:
            return _plain(result)
        return [_plain(norm) for norm in result] if function is torch._foreach_norm else result


def _placed_alike(args: Sequence[Any]) -> bool:
    """Whether all tensors are DTensors of one placement, or numbers, and no gradient is recorded."""
    spec = getattr(args[0], "_spec", None)
    return spec is not None and not torch.is_grad_enabled() and all(
        getattr(a, "_spec", None) is spec for a in args if isinstance(a, Tensor))


def _each(factor: Any, count: int) -> Sequence[Any]:
    return factor if isinstance(factor, (list, tuple)) else [factor] * count


def _plain(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def leaf_of(parameter: nn.Parameter, sums: Sequence[Bound]) -> Tensor:
    """A plain leaf on the storage of a DTensor parameter; its gradient, once summed, goes to the parameter."""
    with torch.no_grad():
        leaf = parameter.to_local().detach()
    if not parameter.requires_grad:
        return leaf
    spec = parameter._spec  # private: mesh, placements, shape and strides in one, which the gradient shares

    def hand_over(filled: Tensor) -> None:
        gradient, filled.grad = filled.grad, None
        for step in sums:
            gradient = step(gradient)
        if parameter.grad is None:
            # Not `from_local`, which makes a spec of its own and an autograd node: 61 us against 4.
            parameter.grad = Gradient(gradient, spec, requires_grad=False)
        else:
            parameter.grad.to_local().add_(gradient)

    leaf.requires_grad_(True)
    leaf.register_post_accumulate_grad_hook(hand_over)
    return leaf

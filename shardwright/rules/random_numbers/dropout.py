"""Dropout in one operator: x · mask / (1-p) and the mask, whose numbers are those of `counter_rng`.

    forward      y, mask         one kernel where Triton compiles for the device, else the kernel of the mask and one
                                 product; the bits are those of ``x * mask * (1 / (1-p))``
    backward     g · mask / (1-p) in one kernel; one byte an element is saved

Of an element of bfloat16 a device's memory moves 5 bytes in each half, as for torch's own dropout.

Example: ``torch.ops.shardwright.drop(seed, [], x, [], x.shape, x.shape, number, 0.1)`` drops a tenth of a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_private import FakeTensor
from .counter_rng import PLAIN, placed_stream
from .word_arithmetic import signed

__all__ = ["drop", "mask_of", "masked", "scale_of"]

#: Kinds of devices for which torch has the product in one kernel, and dtypes that are multiplied in float32.
_FUSES, _IN_FLOAT32 = ("cuda", "xpu"), (torch.float32, torch.float16, torch.bfloat16)

_mask = torch.ops.shardwright.mask.default


def scale_of(p: float) -> float:
    """The factor of the elements that stay."""
    return 1 / (1 - p) if p < 1 else 0.0


def masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """x · mask · scale, in one kernel of a device."""
    if x.device.type in _FUSES and x.is_floating_point():
        return torch.ops.aten.native_dropout_backward.default(x, mask, scale)
    return x * mask * scale


class _Masked(torch.autograd.Function):
    """`masked` of a mask that is there, or is made in the same kernel; only the mask is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, scale: float, made: Any) -> tuple[Tensor, Tensor]:
        if mask is None:
            y, mask = made(x)
        else:
            y = masked(x, mask, scale)
        ctx.scale = scale
        ctx.save_for_backward(mask)
        ctx.mark_non_differentiable(mask)
        return y, mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: object) -> tuple[Tensor, None, None, None]:
        (mask,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a further derivative
            return gradient * mask * ctx.scale, None, None, None
        return masked(gradient, mask, ctx.scale), None, None, None


def one_kernel(
    seed: Tensor,
    starts: Sequence[Tensor],
    x: Tensor,
    dims: Sequence[int],
    size: Sequence[int],
    whole: Sequence[int],
    number: int,
    p: float,
    micro: Sequence[int],
) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """The kernel of a dropout and its mask; None where there is none, and for numbers that are fast. Arguments as of
    `_drop`."""
    if x.device.type == "cpu" or x.dtype not in _IN_FLOAT32 or not x.is_contiguous() or not x.numel():
        return None
    from . import dropout_kernel  # noqa: PLC0415  it imports Triton, which takes half a second and serves devices alone

    below = round((1 - p) * 2**32) - (1 << 31)
    if not dropout_kernel.available(x.device) or abs(below) == 1 << 31:
        return None
    at, (start, step), fast = placed_stream(seed, starts, dims, size, whole, number, micro)
    if fast is not None:
        return None
    rows = at.offsets_on(x.device) if at.rows else at.first
    return lambda x: dropout_kernel.drop(x, rows, at.run, signed(start), signed(step), below, scale_of(p))


def mask_of(
    seed: Tensor,
    starts: Sequence[Tensor],
    x: Tensor,
    dims: Sequence[int],
    size: Sequence[int],
    whole: Sequence[int],
    number: int,
    p: float,
    micro: Sequence[int] = (),
) -> Tensor:
    """The mask of a dropout; arguments as of `_drop`."""
    return PLAIN[_mask](seed, starts, x, dims, size, whole, number, 1 - p, torch.bool, None, micro)


def _drop(
    seed: Tensor,
    starts: Sequence[Tensor],
    x: Tensor,
    dims: Sequence[int],
    size: Sequence[int],
    whole: Sequence[int],
    number: int,
    p: float,
    micro: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """A dropout and its mask.

    Args:
        x: the rank's slice.
        p: the probability that an element is dropped.
        seed, starts, dims, size, whole, number, micro: as of the operator ``shardwright.mask``.
    """
    scale, where = scale_of(p), (dims, size, whole, number)
    if x.is_meta or seed.is_meta or isinstance(x, FakeTensor):
        mask = _mask(seed, starts, x, *where, 1 - p, torch.bool, None, micro)
        return _Masked.apply(x, mask, scale, None)
    fused = one_kernel(seed, starts, x, *where, p, micro)
    if fused is not None:
        return _Masked.apply(x, None, scale, fused) if x.requires_grad else fused(x)
    mask = mask_of(seed, starts, x, *where, p, micro)
    if not x.requires_grad:
        return masked(x, mask, scale), mask
    return _Masked.apply(x, mask, scale, None)


_library = torch.library.Library("shardwright", "FRAGMENT")
_library.define(
    "drop(Tensor seed, Tensor[] starts, Tensor x, int[] dims, int[] size, int[] whole, int number, float p, "
    "int[] micro=[]) -> (Tensor, Tensor)"
)
_library.impl("drop", _drop, "CompositeImplicitAutograd")

#: Its gradient is that of `_Masked`.
drop = torch.ops.shardwright.drop.default

PLAIN[drop] = _drop  # type: ignore[assignment]

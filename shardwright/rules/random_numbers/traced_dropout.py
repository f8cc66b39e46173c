"""The masks of `counter_rng` in operators that a compiler sees through, and fuses with what reads them.

The same bits as the operator ``shardwright.mask``. Seed, starts and positions stay tensors: the traced program is the
same in every step, reads no value of the seed, and makes no copy of its own on the host.

    position i of an element    Σ over dims of (start + number of the row) · stride in the whole tensor
    word                        mix(state + (i div 2) · step), as in `counter_rng`
    element                     half i mod 2 of the word, as a signed integer of 32 bits, below p·2³² − 2³¹

A seed that says "fast" gets these numbers too: they cost no more here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from .counter_rng import _GOLDEN, _MIX13, _MIX_GAMMA, _signed

__all__ = ["TRACED", "traced_mask"]

_ALTERNATING = _signed(0xAAAAAAAAAAAAAAAA)


def traced_mask(
    seed: Tensor,
    starts: Sequence[Tensor],
    like: Tensor | None,
    dims: Sequence[int],
    size: Sequence[int],
    whole: Sequence[int],
    number: int,
    p: float,
    dtype: torch.dtype,
    device: torch.device | None,
    micro: Sequence[int] = (),
) -> Tensor:
    """1 with probability p, else 0; the arguments are those of the operator ``shardwright.mask``."""
    on = like.device if like is not None else torch.device(device or "cpu")
    below = round(p * 2**32) - (1 << 31)
    if abs(below) == 1 << 31:
        return torch.full(tuple(size), below > 0, dtype=dtype, device=on)
    seed = seed.to(on)
    begin = {d: start.reshape(()).to(on) for d, start in zip(dims, starts)}
    at = torch.zeros((), dtype=torch.int64, device=on)
    stride = 1
    for d in range(len(size) - 1, -1, -1):
        rows, extent = torch.arange(size[d], device=on), whole[d]
        if d in begin:
            rows = rows + begin[d]
        if micro and d == micro[0]:
            piece = extent // micro[2]
            rows = rows // piece * (micro[1] * piece) + seed[3] * piece + rows % piece
            extent *= micro[1]
        at = at + (rows * stride).reshape((-1,) + (1,) * (len(size) - 1 - d))
        stride *= extent
    state, step = _key(seed, number)
    word = _mixed(state + (at >> 1) * step)
    half = torch.where((at & 1).bool(), word >> 32, (word << 32) >> 32)
    return (half < below).expand(tuple(size)).to(dtype)


def _key(seed: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """`counter_rng.key`, of the seed and the call in a tensor."""
    of_call = _mixed(_mixed(seed[0] + _signed(_GOLDEN)) + (seed[1] + 1) * _signed(_GOLDEN))
    state = _mixed(of_call + _signed((number + 1) * _GOLDEN))
    step = _mixed(state + _signed(_GOLDEN), _MIX_GAMMA) | 1
    regular = _ones(step ^ _shifted(step, 1)) < 24
    return state, torch.where(regular, step ^ _ALTERNATING, step)


def _mixed(z: Tensor, rounds: Sequence[tuple[int, int | None]] = _MIX13) -> Tensor:
    for shift, factor in rounds:
        z = z ^ _shifted(z, shift)
        if factor is not None:
            z = z * _signed(factor)
    return z


def _shifted(z: Tensor, shift: int) -> Tensor:
    """A shift to the right that fills with zeros: that of signed words copies the sign."""
    return (z >> shift) & ((1 << 64 - shift) - 1)


def _ones(z: Tensor) -> Tensor:
    """The number of bits that are 1."""
    z = z - (_shifted(z, 1) & 0x5555555555555555)
    z = (z & 0x3333333333333333) + (_shifted(z, 2) & 0x3333333333333333)
    z = (z + _shifted(z, 4)) & 0x0F0F0F0F0F0F0F0F
    return _shifted(z * 0x0101010101010101, 56)


#: Operator -> the function that a compiled program calls in its place.
TRACED: dict[Hashable, Callable[..., Tensor]] = {torch.ops.shardwright.mask.default: traced_mask}

"""The numbers of `counter_rng` in operators that a compiler sees through, and fuses with what reads them.

The bits are those of the operators ``shardwright.mask``, ``drop``, ``draw``, ``permutation`` and ``choose``; of normal
and exponential numbers the compiler's logarithm may round the last place otherwise. Seed, starts and positions stay
tensors: the traced program is the same in every step, reads no value of the seed, and makes no copy of its own on the
host.

    position i of an element    Σ over dims of (start + number of the row) · stride in the whole tensor
    word of a number            mix(state + i · step), as in `counter_rng`
    word of a mask's element    mix(state + (i div 2) · step); the element is half i mod 2, below p·2³² − 2³¹

A device without integers of 64 bits has the words in halves (`words.Halves`). A seed that says "fast" gets these
numbers too: they cost no more here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .counter_rng import chosen, has_doubles, has_words
from .dropout import drop, scale_of
from .word_arithmetic import GOLDEN, MIX_GAMMA, Halves, Whole

__all__ = ["Ability", "is_traced", "key_of", "traced"]

_ALTERNATING = 0xAAAAAAAAAAAAAAAA

Words = Whole | Halves


@dataclass(frozen=True)
class Ability:
    """The types with which a device computes.

    Attributes:
        words: integers of 64 bits.
        doubles: float64.
    """

    words: bool = True
    doubles: bool = True

    @classmethod
    def of(cls, device: torch.device) -> Ability:
        return cls(has_words(device.type), has_doubles(device.type))

    @property
    def kind(self) -> Any:
        """The class of words."""
        return Whole if self.words else Halves

    @property
    def widest(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.float64 if self.doubles else torch.float32


def _made_on(like: Tensor | None, device: torch.device | None) -> torch.device:
    return like.device if like is not None else torch.device(device or "cpu")


def key_of(seed: Tensor, number: int, ability: Ability) -> tuple[Any, Any]:
    """`counter_rng.key`, of the seed and the call in a tensor: words without dims."""
    kind = ability.kind
    constant = lambda x: kind.of(x, (), seed.device)
    initial, call = kind.of_word(seed[0]), kind.of_word(seed[1])
    of_call = initial.plus(constant(GOLDEN)).mixed().plus(call.plus(constant(1)).times(GOLDEN)).mixed()
    state = of_call.plus(constant((number + 1) * GOLDEN)).mixed()
    step = state.plus(constant(GOLDEN)).mixed(MIX_GAMMA)
    step = step.xor(constant(1)).where(~step.odd(), step)
    regular = step.xor(step.shifted(1)).ones() < 24
    return state, step.xor(constant(_ALTERNATING)).where(regular, step)


def _words(
    ability: Ability,
    on: torch.device,
    halved: bool,
    seed: Tensor,
    starts: Sequence[Tensor],
    dims: Sequence[int],
    size: Sequence[int],
    whole: Sequence[int],
    number: int,
    micro: Sequence[int],
) -> tuple[Any, Tensor]:
    """The words of the elements of a slice, and True where an element's position is odd.

    Args:
        halved: two elements share a word.
    """
    kind = ability.kind
    seed = seed.to(on)
    begin = {d: start.reshape(()).to(on, kind.integers) for d, start in zip(dims, starts)}
    at, stride = kind.of(0, (), on), 1
    for d in range(len(size) - 1, -1, -1):
        rows, extent = torch.arange(size[d], device=on, dtype=kind.integers), whole[d]
        if d in begin:
            rows = rows + begin[d]
        if micro and d == micro[0]:
            piece, k = extent // micro[2], kind.of_word(seed[3]).low()
            rows = rows // piece * (micro[1] * piece) + k * piece + rows % piece
            extent *= micro[1]
        at = at.plus(kind.wide(rows.reshape((-1,) + (1,) * (len(size) - 1 - d))).times(stride))
        stride *= extent
    state, step = key_of(seed, number, ability)
    return state.plus((at.shifted(1) if halved else at).times(step)).mixed(), at.odd()


def _mask(
    ability: Ability,
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
    """1 with probability p, else 0; the further arguments are those of the operator ``shardwright.mask``."""
    on = _made_on(like, device)
    below = round(p * 2**32) - (1 << 31)
    if abs(below) == 1 << 31:
        return torch.full(tuple(size), below > 0, dtype=dtype, device=on)
    word, odd = _words(ability, on, True, seed, starts, dims, size, whole, number, micro)
    return (word.half(odd) < below).to(dtype)


def _draw(
    ability: Ability,
    seed: Tensor,
    starts: Sequence[Tensor],
    like: Tensor | None,
    dims: Sequence[int],
    size: Sequence[int],
    whole: Sequence[int],
    number: int,
    kind: str,
    dtype: torch.dtype,
    device: torch.device | None,
    micro: Sequence[int] = (),
) -> Tensor:
    """Numbers; the further arguments are those of the operator ``shardwright.draw``."""
    on = _made_on(like, device)
    word, _ = _words(ability, on, False, seed, starts, dims, size, whole, number, micro)
    return word.numbers(kind, dtype, ability.doubles)


def _permutation(
    ability: Ability, seed: Tensor, number: int, count: int, dtype: torch.dtype, device: torch.device | None
) -> Tensor:
    word, _ = _words(ability, _made_on(None, device), False, seed, [], [], [count], [count], number, ())
    return word.order().to(dtype)


def _choose(
    ability: Ability,
    seed: Tensor,
    starts: Sequence[Tensor],
    weights: Tensor,
    dims: Sequence[int],
    whole: Sequence[int],
    number: int,
    count: int,
    replacement: bool,
    micro: Sequence[int] = (),
) -> Tensor:
    rows = list(weights.shape[:-1])

    def drawn(kind: str, columns: int) -> Tensor:
        size, of = [*rows, columns], [*whole, columns]
        return _draw(ability, seed, starts, weights, dims, size, of, number, kind, ability.widest, None, micro)

    return chosen(weights.to(ability.widest), drawn, count, replacement)


def _drop(
    ability: Ability,
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
    mask = _mask(ability, seed, starts, x, dims, size, whole, number, 1 - p, torch.bool, None, micro)
    return x * mask * scale_of(p), mask


_operators = torch.ops.shardwright
_TRACED: dict[Hashable, Callable[..., object]] = {
    _operators.mask.default: _mask,
    drop: _drop,
    _operators.draw.default: _draw,
    _operators.permutation.default: _permutation,
    _operators.choose.default: _choose,
}


def is_traced(target: Hashable) -> bool:
    """True for an operator that `traced` knows."""
    return target in _TRACED


def traced(target: Hashable, device: torch.device) -> Callable[..., Any]:
    """The function that a compiled program calls in place of an operator.

    Args:
        target: an operator that draws random numbers.
        device: on which the program runs.
    """
    return _bound(target, Ability.of(device))


@lru_cache
def _bound(target: Hashable, ability: Ability) -> Callable[..., Any]:
    function = _TRACED[target]

    def call(*args: object) -> object:
        return function(ability, *args)

    call.__name__ = call.__qualname__ = f"traced{function.__name__}"
    return call

"""Words of 64 bits as tensors, and the numbers that are made of them: on any device, and seen through by a compiler.

    `Whole`     integers of 64 bits
    `Halves`    two tensors of 32 bits, whose sums, products and shifts are those of 64 bits: for a device without such
                integers

The numbers of a word, without float64 where a device (mps, Ascend) has none:

    "uniform"        the upper 24 bits (11 in float16, 8 in bfloat16, 53 in float64)
    "integer"        the upper 63 bits
    "exponential"    -log u of the upper 53 bits; in float32 log u below ½, else log1p(-(1-u))
    "normal"         Φ⁻¹(u) of the same bits; in float32 by M. Wichura, "Algorithm AS 241: The Percentage Points of the
                     Normal Distribution", Applied Statistics 37, 1988, routine PPND7

u = (n + ½)/2⁵³, where n are the 53 bits. In float32 the distances of u from 0, from ½ and from 1 are taken from the
bits, each rounded once, so that no difference cancels: the numbers agree with those of float64 to 5·10⁻⁷ of their
value. Uniform numbers and integers have the same bits.

The operators make new tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["GOLDEN", "MIX13", "MIX_GAMMA", "Halves", "Rounds", "Whole", "right", "signed", "signed32"]

#: The rounds of a mixing function, each with the bits of its shift and its factor.
Rounds: TypeAlias = Sequence[tuple[int, int | None]]

GOLDEN = 0x9E3779B97F4A7C15
MIX13: Rounds = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None))
MIX_GAMMA: Rounds = ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), (33, None))

_LEAST = -1 << 31

#: Bits of a uniform number.
UNIFORM_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def signed(x: int) -> int:
    """The lower 64 bits of a number, as a signed number."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def signed32(x: int) -> int:
    """The lower 32 bits of a number, as a signed number."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def right(x: Tensor, bits: int) -> Tensor:
    """A shift of integers of 32 bits to the right that fills with zeros."""
    return (x >> bits) & ((1 << 32 - bits) - 1) if bits else x


class Whole:
    """Integers of 64 bits modulo 2⁶⁴.

    Attributes:
        x: the bits, as signed integers.
    """

    __slots__ = ("x",)

    #: The dtype of numbers of rows and of positions.
    integers = torch.int64

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @classmethod
    def of(cls, x: int, shape: Sequence[int], device: torch.device) -> Whole:
        """A number in every element of a shape."""
        return cls(torch.full(tuple(shape), signed(x), dtype=torch.int64, device=device))

    @classmethod
    def wide(cls, x: Tensor) -> Whole:
        """Non-negative integers."""
        return cls(x)

    @classmethod
    def of_word(cls, x: Tensor) -> Whole:
        """One integer of 64 bits, in a tensor."""
        return cls(x)

    def plus(self, other: Whole) -> Whole:
        return Whole(self.x + other.x)

    def xor(self, other: Whole) -> Whole:
        return Whole(self.x ^ other.x)

    def times(self, factor: int | Whole) -> Whole:
        """The product with a constant, or with other numbers."""
        return Whole(self.x * (signed(factor) if isinstance(factor, int) else factor.x))

    def shifted(self, bits: int) -> Whole:
        """The number shifted to the right, filled with zeros: a shift of signed numbers copies the sign."""
        return Whole((self.x >> bits) & ((1 << 64 - bits) - 1))

    def mixed(self, rounds: Rounds = MIX13) -> Whole:
        """`counter_rng._mix` of each number."""
        z = self
        for shift, factor in rounds:
            z = z.xor(z.shifted(shift))
            z = z if factor is None else z.times(factor)
        return z

    def odd(self) -> Tensor:
        return (self.x & 1).bool()

    def low(self) -> Tensor:
        """Non-negative numbers below 2³¹, as `integers`."""
        return self.x

    def half(self, upper: Tensor) -> Tensor:
        """The upper half where `upper`, else the lower one, as signed numbers."""
        return torch.where(upper, self.x >> 32, (self.x << 32) >> 32)

    def ones(self) -> Tensor:
        """The number of bits that are 1."""
        z = self.x - (self.shifted(1).x & 0x5555555555555555)
        z = (z & 0x3333333333333333) + ((z >> 2) & 0x3333333333333333)
        z = (z + (z >> 4)) & 0x0F0F0F0F0F0F0F0F
        return Whole(z * 0x0101010101010101).shifted(56).x

    def where(self, these: Tensor, other: Whole) -> Whole:
        """These numbers where a condition holds, else the others."""
        return Whole(torch.where(these, self.x, other.x))

    def numbers(self, kind: str, dtype: torch.dtype, doubles: bool) -> Tensor:
        """The numbers of words.

        Args:
            kind: one of `counter_rng.KINDS`.
            dtype: of the numbers.
            doubles: True where the device computes with float64.
        """
        if kind == "uniform":
            bits = UNIFORM_BITS[dtype]
            return self.shifted(64 - bits).x.to(dtype) * 2.0**-bits
        if kind == "integer":
            return self.shifted(1).x.to(dtype)
        if not doubles:
            return Halves((self.x >> 32).to(torch.int32), self.x.to(torch.int32)).numbers(kind, dtype)
        between = (self.shifted(11).x.to(torch.float64) + 0.5) * 2.0**-53
        return (torch.special.ndtri(between) if kind == "normal" else -torch.log(between)).to(dtype)

    def order(self) -> Tensor:
        """The places of the upper 63 bits of the numbers [n] in ascending order."""
        return self.shifted(1).x.argsort(stable=True)


class Halves:
    """Integers of 64 bits modulo 2⁶⁴ on a device without them, as two tensors of 32 bits, whose products wrap.

    A product needs the upper half of a product of two numbers of 32 bits, which follows from four products of 16 bits
    (D. Knuth, "The Art of Computer Programming", volume 2, 4.3.1).

    Attributes:
        upper, lower: the bits, as signed integers of 32 bits.
    """

    __slots__ = ("lower", "upper")

    #: The dtype of numbers of rows.
    integers = torch.int32

    def __init__(self, upper: Tensor, lower: Tensor) -> None:
        self.upper, self.lower = upper, lower

    @classmethod
    def of(cls, x: int, shape: Sequence[int], device: torch.device) -> Halves:
        """A number in every element of a shape."""
        upper, lower = (torch.full(tuple(shape), signed32(n), dtype=torch.int32, device=device) for n in (x >> 32, x))
        return cls(upper, lower)

    @classmethod
    def wide(cls, x: Tensor) -> Halves:
        """Non-negative integers of 32 bits."""
        return cls(torch.zeros_like(x), x)

    @classmethod
    def of_words(cls, x: Tensor) -> Halves:
        """Integers of 64 bits, which are looked at in halves: nothing is computed with them."""
        both = x.unsqueeze(-1).view(torch.int32)
        return cls(both[..., 1], both[..., 0])

    #: One integer of 64 bits, in a tensor.
    of_word = of_words

    def words(self) -> Tensor:
        """The same as integers of 64 bits: nothing is computed with them."""
        return torch.stack((self.lower, self.upper), -1).view(torch.int64).squeeze(-1)

    def unsqueezed(self) -> Halves:
        return Halves(self.upper[..., None], self.lower[..., None])

    def ravelled(self) -> Halves:
        return Halves(self.upper.ravel(), self.lower.ravel())

    def plus(self, other: Halves) -> Halves:
        lower = self.lower + other.lower
        carry = (lower ^ _LEAST) < (other.lower ^ _LEAST)  # as numbers without sign
        return Halves(self.upper + other.upper + carry, lower)

    def xor(self, other: Halves) -> Halves:
        return Halves(self.upper ^ other.upper, self.lower ^ other.lower)

    def times(self, factor: int | Halves) -> Halves:
        """The product with a constant, or with other numbers."""
        above: int | Tensor
        below: int | Tensor
        first: int | Tensor
        second: int | Tensor
        if isinstance(factor, int):
            above, below = signed32(factor >> 32), signed32(factor)
            first, second = factor >> 16 & 0xFFFF, factor & 0xFFFF
        else:
            above, below = factor.upper, factor.lower
            first, second = right(factor.lower, 16), factor.lower & 0xFFFF
        highest, lowest = right(self.lower, 16), self.lower & 0xFFFF
        one, other = highest * second, lowest * first
        carried = right(right(lowest * second, 16) + (one & 0xFFFF) + (other & 0xFFFF), 16)
        upper = highest * first + right(one, 16) + right(other, 16) + carried
        return Halves(upper + self.upper * below + self.lower * above, self.lower * below)

    def shifted(self, bits: int) -> Halves:
        """The number shifted to the right by 1 to 63 bits, filled with zeros."""
        if bits >= 32:
            return Halves.wide(right(self.upper, bits - 32))
        return Halves(right(self.upper, bits), right(self.lower, bits) | self.upper << 32 - bits)

    def mixed(self, rounds: Rounds = MIX13) -> Halves:
        """`counter_rng._mix` of each number."""
        z = self
        for shift, factor in rounds:
            z = z.xor(z.shifted(shift))
            z = z if factor is None else z.times(factor)
        return z

    def odd(self) -> Tensor:
        return (self.lower & 1).bool()

    def low(self) -> Tensor:
        """Non-negative numbers below 2³¹, as `integers`."""
        return self.lower

    def half(self, upper: Tensor) -> Tensor:
        """The upper half where `upper`, else the lower one."""
        return torch.where(upper, self.upper, self.lower)

    def ones(self) -> Tensor:
        """The number of bits that are 1."""
        return _ones32(self.upper) + _ones32(self.lower)

    def where(self, these: Tensor, other: Halves) -> Halves:
        """These numbers where a condition holds, else the others."""
        return Halves(torch.where(these, self.upper, other.upper), torch.where(these, self.lower, other.lower))

    def numbers(self, kind: str, dtype: torch.dtype, doubles: bool = False) -> Tensor:
        """The numbers of words, without float64; arguments as of `Whole.numbers`."""
        return _NUMBERS[kind](self, dtype)

    def order(self) -> Tensor:
        """The places of the upper 63 bits of the numbers [n] in ascending order."""
        word = self.shifted(1)
        places = (word.lower ^ _LEAST).argsort(stable=True)  # as numbers without sign
        return places[word.upper[places].argsort(stable=True)]


def _ones32(x: Tensor) -> Tensor:
    z = x - ((x >> 1) & 0x55555555)
    z = (z & 0x33333333) + ((z >> 2) & 0x33333333)
    z = (z + (z >> 4)) & 0x0F0F0F0F
    return ((z * 0x01010101) >> 24) & 0xFF


def _uniform(word: Halves, dtype: torch.dtype) -> Tensor:
    bits = UNIFORM_BITS[dtype]
    return right(word.upper, 32 - bits).to(dtype) * 2.0**-bits


def _fraction(upper: Tensor, lower: Tensor) -> Tensor:
    """(upper·2³² + lower + ½)/2⁵³ in float32, for an upper part of at most 21 bits."""
    below = right(lower, 16).to(torch.float32) * 65536.0 + ((lower & 0xFFFF).to(torch.float32) + 0.5)
    return (upper.to(torch.float32) * 2.0**32 + below) * 2.0**-53


def _exponential(word: Halves, dtype: torch.dtype) -> Tensor:
    n = word.shifted(11)
    below, above = _fraction(n.upper, n.lower), _fraction(~n.upper & 0x1FFFFF, ~n.lower)
    return -torch.where(n.upper >= 1 << 20, torch.log1p(-above), torch.log(below)).to(dtype)


def _normal(word: Halves, dtype: torch.dtype) -> Tensor:
    n = word.shifted(11)
    upper_half = n.upper >= 1 << 20
    flipped = upper_half.to(torch.int32) - 1  # all bits where u < ½
    upper, lower = (n.upper ^ flipped) & 0xFFFFF, n.lower ^ flipped
    distance, tail = _fraction(upper, lower), _fraction(~upper & 0xFFFFF, ~lower)  # |u - ½|, and min(u, 1-u)
    by = 0.180625 - distance * distance
    root = torch.sqrt(-torch.log(tail))
    middle = distance * _ratio(_MIDDLE, by)
    outer = torch.where(root <= 5.0, _ratio(_NEAR, root - 1.6), _ratio(_FAR, root - 5.0))
    size = torch.where(distance <= 0.425, middle, outer)
    return torch.where(upper_half, size, -size).to(dtype)


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: Tensor) -> Tensor:
    """A ratio of two polynomials, whose coefficients begin with that of degree 0."""
    above, below = (_polynomial(each, x) for each in coefficients)
    return above / below


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    made = x * coefficients[-1] + coefficients[-2]
    for each in reversed(coefficients[:-2]):
        made = x * made + each
    return made


#: Numerator and denominator of PPND7: in the middle, to 10⁻¹¹ from an end, beyond.
_MIDDLE = (3.3871327179, 50.434271938, 159.29113202, 59.109374720), (1.0, 17.895169469, 78.757757664, 67.187563600)
_NEAR = (1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103), (1.0, 0.73700164250, 0.12021132975)
_FAR = (6.6579051150, 3.0812263860, 0.42868294337, 0.017337203997), (1.0, 0.24197894225, 0.012258202635)


def _integer(word: Halves, dtype: torch.dtype) -> Tensor:
    return word.shifted(1).words().to(dtype)


_NUMBERS: dict[str, Callable[[Halves, torch.dtype], Tensor]] = {
    "uniform": _uniform,
    "normal": _normal,
    "exponential": _exponential,
    "integer": _integer,
}

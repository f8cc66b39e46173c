"""Places ahead in the numbers of torch's generator on the CPU, and tensors of which some rows are drawn alone.

The generator is the Mersenne twister MT19937: words of 32 bits, each bit of which obeys one linear recurrence of 19,937
terms. With p(t) its characteristic polynomial over the field of two elements, and ``tⁿ mod p = Σ gᵢ tⁱ``:

    word(k + n) = XOR over all i with gᵢ = 1 of word(k + i)

A jump over n words costs ``log₂ n`` squarings of a polynomial, once for each n, and 10,000 XORs of the state: some
30 ms, and 6 ms once n is known, whatever n is. Sources: M. Matsumoto, T. Nishimura, "Mersenne Twister", ACM TOMACS 8
(1998), for p; H. Haramoto et al., "Efficient jump ahead for F2-linear random number generators", INFORMS Journal on
Computing 20 (2008), for the jump.

Example: ``x.uniform_()`` of a float32 tensor [8, 4] takes 32 words, and row 3 has words 12 to 15. `fill_rows` jumps
over 12 words, draws row 3, and jumps over the 16 words after it.

``normal_`` makes 16 numbers of 16 words. Where the last 16 are not full, they are drawn anew, or to the full number of
words, by the dtype. torch promises none of this: `draws_by_place` compares a small tensor with its parts first, and
where they differ nothing is drawn alone.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Numbers", "draws_by_place", "jumped", "words_of"]

#: Words of the state, the distance of the second term, and the word of the twist, as published.
_N, _M, _TWIST = 624, 397, 0x9908B0DF
_DEGREE = 19937
#: The bytes of a generator's state before the words: seed, words left, a flag, the number of the next word.
_HEAD, _LEFT, _NEXT = 24, slice(8, 12), slice(16, 24)

#: Fewer words are drawn and dropped: as many as are drawn in the time of a jump.
JUMP = 1 << 21

#: Numbers that ``normal_`` makes together.
_LOT = 16

_UNIFORM, _NORMAL = torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default
_WORDS = {torch.float32: 1, torch.float64: 2, torch.float16: 1, torch.bfloat16: 1}


# -- jumps -------------------------------------------------------------------------------------------------------------


def _times(a: int, terms: tuple[int, ...]) -> int:
    """The product of a polynomial and a sum of powers."""
    out = 0
    for power in terms:
        out ^= a << power
    return out


@lru_cache(maxsize=1)
def _characteristic() -> tuple[int, ...]:
    """The powers of p(t) below the highest."""
    width, low = 32, 31
    short, long = [1], [0]
    for _ in range(width - low):
        short.append(_times(short[-1], (_N, _M)))
    long[0] = short[-1]
    for _ in range(low):
        long.append(_times(long[-1], (_N - 1, _M - 1)))
    out = long[low]
    for bit in range(width):
        if _TWIST >> bit & 1:
            out ^= long[low - 1 - bit] if bit < low else short[width - 1 - bit]
    return tuple(power for power in range(_DEGREE) if out >> power & 1)


@lru_cache(maxsize=64)
def _terms(n: int) -> np.ndarray:
    """The i with gᵢ = 1."""
    rest = max(0, n.bit_length() - _DEGREE.bit_length() + 1)
    g = 1 << (n >> rest)
    for bit in reversed(range(rest)):
        g = int("0".join(f"{g:b}"), 2) << (n >> bit & 1)  # the square has zeros between its bits
        while high := g >> _DEGREE:
            g = (g & (1 << _DEGREE) - 1) ^ _times(high, _characteristic())
    return np.flatnonzero(np.frombuffer(f"{g:b}".encode()[::-1], np.uint8) == ord("1"))


def _continued(words: np.ndarray, count: int) -> np.ndarray:
    """A state's words and the `count` words after them, before they are tempered."""
    out = np.empty(_N + count, np.uint32)
    out[:_N] = words
    for at in range(_N, _N + count, _N - _M):
        many = min(_N - _M, _N + count - at)
        old = out[at - _N : at - _N + many + 1]
        mixed = (old[:-1] & np.uint32(1 << 31)) | (old[1:] & np.uint32((1 << 31) - 1))
        twisted = (mixed >> np.uint32(1)) ^ (mixed & np.uint32(1)) * np.uint32(_TWIST)
        out[at : at + many] = out[at - _N + _M : at - _N + _M + many] ^ twisted
    return out


def jumped(state: Tensor, words: int) -> Tensor:
    """The state of torch's CPU generator after that many words.

    Args:
        state: as ``torch.get_rng_state()``; not written to.
    """
    out = state.clone()
    raw = out.numpy()
    left, following = raw[_LEFT].view(np.int32), raw[_NEXT].view(np.int64)
    if words < left[0]:
        left -= words
        following += words
        return out
    held = raw[_HEAD : _HEAD + 8 * _N].view(np.int64)
    # The new state is that in front of the next twist: all its words are used. Of its first word the highest bit
    # alone is right, and the twist reads no other.
    ahead = _continued(held.astype(np.uint32), _DEGREE)
    made = np.zeros(_N, np.uint32)
    for at in _terms(words - int(left[0]) + 1):
        made ^= ahead[at : at + _N]
    held[:] = made
    left[0], following[0] = 1, 0
    return out


# -- rows --------------------------------------------------------------------------------------------------------------


def words_of(fill: Any, dtype: torch.dtype, numel: int) -> int:
    """The words that a fill of a contiguous tensor takes.

    Args:
        fill: ``aten.uniform_`` or ``aten.normal_``.
        dtype, numel: of the tensor; at least 16 elements.
    """
    if fill is _NORMAL and numel % _LOT:
        narrow = dtype in (torch.float16, torch.bfloat16)
        numel += _LOT - numel % _LOT if narrow else _LOT
    return numel * _WORDS[dtype]


class Numbers:
    """The numbers of torch's default generator, in order: some are drawn, the others are passed over.

    Attributes:
        pending: words that are passed over before the next draw.
    """

    def __init__(self) -> None:
        self.pending = 0

    def arrive(self) -> None:
        """Bring the generator to the next number."""
        words, self.pending = self.pending, 0
        if words >= JUMP:
            torch.set_rng_state(jumped(torch.get_rng_state(), words))
        elif words:
            torch.empty(words, device="cpu").uniform_()

    def fill_rows(self, fill: Any, whole: Tensor, begin: int, end: int, *args: Any) -> None:
        """Give the elements of some rows the values that they have in a fill of the whole tensor.

        Args:
            fill: ``aten.uniform_`` or ``aten.normal_``; `draws_by_place` is true of it.
            whole: contiguous, at least 16 elements. Elements beside the rows may get any values.
            begin, end: the rows; none where they are equal.
            args: of the fill.
        """
        numel, words = whole.numel(), words_of(fill, whole.dtype, whole.numel())
        row, flat = numel // len(whole), whole.view(-1)
        first, last = begin * row, end * row
        if first == last:
            self.pending += words
            return
        if fill is _NORMAL:
            first = min(first, numel - _LOT) // _LOT * _LOT
            last = -(-last // _LOT) * _LOT
            if last > numel - _LOT:  # the last numbers, which may be drawn anew
                last = numel
        self.pending += first * _WORDS[whole.dtype]
        self.arrive()
        fill(flat[first:last], *args)
        drawn = words_of(fill, whole.dtype, last - first) if last == numel else (last - first) * _WORDS[whole.dtype]
        self.pending += words - first * _WORDS[whole.dtype] - drawn


@lru_cache(maxsize=32)
def draws_by_place(fill: Any, dtype: torch.dtype) -> bool:
    """True where a fill of a tensor by this torch draws what this file says, in parts as in the whole.

    The generator is left as it was.
    """
    if fill not in (_UNIFORM, _NORMAL) or dtype not in _WORDS:
        return False
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(11)
        start = torch.get_rng_state()
        return all(_as_whole(fill, dtype, start, rows, width) for rows, width in ((12, 8), (9, 11)))


def _as_whole(fill: Any, dtype: torch.dtype, start: Tensor, rows: int, width: int) -> bool:
    make = partial(torch.empty, rows, width, dtype=dtype, device="cpu")
    torch.set_rng_state(start)
    whole = fill(make())
    after = torch.rand(4, device="cpu")
    for begin, end in ((0, 1), (4, 7), (rows - 1, rows), (0, rows)):
        numbers, part = Numbers(), make()
        torch.set_rng_state(start)
        numbers.fill_rows(fill, part, begin, end)
        torch.set_rng_state(jumped(torch.get_rng_state(), numbers.pending))
        if not torch.equal(part[begin:end], whole[begin:end]) or not torch.equal(torch.rand(4, device="cpu"), after):
            return False
    return True

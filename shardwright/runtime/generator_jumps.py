"""Places ahead in the numbers of torch's generator on the CPU, and tensors of which some elements are drawn alone.

The generator is the Mersenne twister MT19937: words of 32 bits, each bit of which obeys one linear recurrence of 19,937
terms. With p(t) its characteristic polynomial over the field of two elements, and ``tⁿ mod p = Σ gᵢ tⁱ``:

    word(k + n) = XOR over all i with gᵢ = 1 of word(k + i)

A jump over n words costs ``log₂ n`` squarings of a polynomial, once for each n, and 10,000 XORs of the state: some
30 ms, and 6 ms once n is known, whatever n is. Sources: M. Matsumoto, T. Nishimura, "Mersenne Twister", ACM TOMACS 8
(1998), for p; H. Haramoto et al., "Efficient jump ahead for F2-linear random number generators", INFORMS Journal on
Computing 20 (2008), for the jump.

Example: ``x.uniform_()`` of a float32 tensor [8, 4] takes 32 words, and row 3 has words 12 to 15.
`Numbers.pieces` jumps over 12 words, draws row 3, and jumps over the 16 words after it.

``normal_`` makes 16 numbers of 16 words. Where the last 16 are not full, they are drawn anew, or to the full number of
words, by the dtype. torch promises none of this: `draws_by_place` compares a small tensor with its parts first, and
where they differ nothing is drawn alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Numbers", "draws_by_place", "jumped", "row_blocks", "truncates_by_place", "words_of"]

#: Words of the state, the distance of the second term, and the word of the twist, as published.
_N, _M, _TWIST = 624, 397, 0x9908B0DF
_DEGREE = 19937
#: The bytes of a generator's state before the words: seed, words left, a flag, the number of the next word.
_HEAD, _LEFT, _NEXT = 24, slice(8, 12), slice(16, 24)

#: Fewer words are drawn and dropped: as many as are drawn in the time of a jump.
JUMP = 1 << 21

#: Elements that are drawn at once where a part of them is kept.
BLOCK = 1 << 22

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


# -- pieces ------------------------------------------------------------------------------------------------------------


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

    def pieces(
        self,
        fill: Any,
        dtype: torch.dtype,
        numel: int,
        spans: Iterable[tuple[int, int]],
        *args: Any,
        into: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield some elements of the fill of a whole tensor.

        Args:
            fill: ``aten.uniform_`` or ``aten.normal_``; `draws_by_place` is true of it.
            dtype, numel: of the whole, which is contiguous and has at least 16 elements.
            spans: the first element of each piece, and the one after the last, in ascending order. Between two pieces
                of a ``normal_`` lie elements 16 k alone, and after the last of them no element or at least 16.
            args: of the fill.
            into: flat memory of the whole, in which the pieces lie; elements beside them may get any values. None: a
                piece has memory of its own.
        """
        at, words, each = 0, words_of(fill, dtype, numel), _WORDS[dtype]
        for first, last in spans:
            begin, end = _span(fill, numel, first, last)
            self.pending += begin * each - at
            self.arrive()
            drawn = torch.empty(end - begin, dtype=dtype, device="cpu") if into is None else into[begin:end]
            fill(drawn, *args)
            at = begin * each + (words_of(fill, dtype, end - begin) if end == numel else (end - begin) * each)
            yield drawn[first - begin : last - begin]
        self.pending += words - at

    def truncated(
        self,
        dtype: torch.dtype,
        numel: int,
        spans: Iterable[tuple[int, int]],
        mean: float,
        std: float,
        low: float,
        high: float,
    ) -> Iterator[Tensor]:
        """Yield the elements of a ``trunc_normal_`` of a whole tensor, piece after piece.

        torch draws the whole anew, and takes of each round the elements that were outside before. A piece is drawn as
        often as it has such elements; the generator goes on behind as many rounds as the piece with the most has.

        Args:
            dtype, numel, spans: as `pieces` takes them; the spans have all elements.
            mean, std: of the normal numbers.
            low, high: the bounds.
        """
        self.arrive()
        start, words, each = torch.get_rng_state(), words_of(_NORMAL, dtype, numel), _WORDS[dtype]
        rounds: list[tuple[Tensor, int]] = []  # the generator's state in each, and the word of the fill that is next
        for first, last in spans:
            values, outside = torch.empty(last - first, dtype=dtype, device="cpu"), None
            for turn in count():
                if turn == len(rounds):
                    rounds.append((jumped(start, turn * words), 0))
                state, at = rounds[turn]
                torch.set_rng_state(state)
                self.pending = first * each - at
                self.arrive()
                drawn = _NORMAL(torch.empty_like(values), mean, std)
                some = words_of(_NORMAL, dtype, last - first) if last == numel else (last - first) * each
                rounds[turn] = torch.get_rng_state(), first * each + some
                values = drawn if outside is None else torch.where(outside, drawn, values)
                outside = (values < low) | (values > high)
                if not outside.any():
                    break
            yield values
        torch.set_rng_state(start)
        self.pending = len(rounds) * words


def _span(fill: Any, numel: int, first: int, last: int) -> tuple[int, int]:
    """The elements that are drawn for some elements of a fill: numbers are made together."""
    if fill is _NORMAL:
        first = min(first, numel - _LOT) // _LOT * _LOT
        last = -(-last // _LOT) * _LOT
        if last > numel - _LOT:  # the last numbers, which may be drawn anew
            last = numel
    return first, last


def row_blocks(begin: int, end: int, width: int, numel: int) -> Iterator[tuple[int, int]]:
    """Yield rows of a tensor in blocks of some `BLOCK` elements, which `Numbers.pieces` can draw one after the other.

    Args:
        begin, end: the rows.
        width: elements of a row.
        numel: of the whole tensor.
    """
    step = max(_LOT, BLOCK // width // _LOT * _LOT)
    while begin < end:
        to = begin // _LOT * _LOT + step
        if to >= end or numel - to * width < 2 * _LOT:
            to = end
        yield begin, to
        begin = to


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
    numel = rows * width
    torch.set_rng_state(start)
    whole = fill(torch.empty(numel, dtype=dtype, device="cpu"))
    after = torch.rand(4, device="cpu")
    for first, last in ((0, width), (4 * width, 7 * width), (numel - width, numel), (0, numel)):
        numbers = Numbers()
        torch.set_rng_state(start)
        (part,) = numbers.pieces(fill, dtype, numel, [(first, last)])
        torch.set_rng_state(jumped(torch.get_rng_state(), numbers.pending))
        if not torch.equal(part, whole[first:last]) or not torch.equal(torch.rand(4, device="cpu"), after):
            return False
    return True


@lru_cache(maxsize=32)
def truncates_by_place(dtype: torch.dtype) -> bool:
    """True where ``trunc_normal_`` by this torch draws what `Numbers.truncated` draws, for bounds that more than 0.3 of
    all numbers are inside of.

    The generator is left as it was.
    """
    if not draws_by_place(_NORMAL, dtype):
        return False
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(12)
        start = torch.get_rng_state()
        for numel, bound in ((352, 1.0), (359, 20.0)):
            torch.set_rng_state(start)
            whole = nn.init.trunc_normal_(torch.empty(numel, dtype=dtype, device="cpu"), 0.0, 1.0, -bound, bound)
            after, numbers = torch.rand(4, device="cpu"), Numbers()
            torch.set_rng_state(start)
            pieces = [*numbers.truncated(dtype, numel, [(0, 160), (160, numel)], 0.0, 1.0, -bound, bound)]
            torch.set_rng_state(jumped(torch.get_rng_state(), numbers.pending))
            if not torch.equal(torch.cat(pieces), whole) or not torch.equal(torch.rand(4, device="cpu"), after):
                return False
    return True

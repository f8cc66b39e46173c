"""The initialization of slices: parts of parameters that a rank draws alone, or by blocks, with the numbers of one
device.

A tape has the operators that give a parameter its values (`deferred_init`).

1. Of a large tensor a rank computes its part (`parts_of`, `compute`):

    rows            the elements from a first to a last row; memory of the other rows is never touched
    columns         of these rows some columns, where the tensor is cut along another dim than the first. The part lies
                    in memory of its own size. A fill draws blocks of rows, of which the columns are kept
    trunc_normal_   where no number can lie outside of the bounds, a ``normal_``. Otherwise torch draws the whole tensor
                    anew until all elements are inside: each block is drawn as often as it needs, and the rounds of all
                    are counted

   Example: ``Linear(8192, 8192)`` in float32 on rank 1 of 8. Cut in rows, 32 of 256 MiB are drawn; cut in columns, 256
   MiB are drawn, in blocks of 16, and 32 MiB are kept.

   The tensor that is handed on has the whole shape. With columns its rows overlap in memory (`DrawnPart.whole`), and
   elements outside of the part have any values.

2. Places ahead in the numbers of torch's generator on the CPU (`jumped`, `Numbers`). The generator is the Mersenne
   twister MT19937: words of 32 bits, each bit of which obeys one linear recurrence of 19,937 terms. With p(t) its
   characteristic polynomial over the field of two elements, and ``tⁿ mod p = Σ gᵢ tⁱ``:

       word(k + n) = XOR over all i with gᵢ = 1 of word(k + i)

   A jump over n words costs ``log₂ n`` squarings of a polynomial, once for each n, and 10,000 XORs of the state: some
   30 ms, and 6 ms once n is known, whatever n is. Sources: M. Matsumoto, T. Nishimura, "Mersenne Twister", ACM TOMACS 8
   (1998), for p; H. Haramoto et al., "Efficient jump ahead for F2-linear random number generators", INFORMS Journal on
   Computing 20 (2008), for the jump.

   Example: ``x.uniform_()`` of a float32 tensor [8, 4] takes 32 words, and row 3 has words 12 to 15. `Numbers.pieces`
   jumps over 12 words, draws row 3, and jumps over the 16 words after it.

   ``normal_`` makes 16 numbers of 16 words. Where the last 16 are not full, they are drawn anew, or to the full number
   of words, by the dtype. torch promises none of this: `draws_by_place` compares a small tensor with its parts first,
   and where they differ nothing is drawn alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..torch_private import operators, pytree, storage_id

__all__ = [
    "DrawnPart",
    "Meta",
    "Numbers",
    "compute",
    "draws",
    "draws_by_place",
    "jumped",
    "metas",
    "noted",
    "parts_of",
    "row_blocks",
    "truncates_by_place",
    "words_drawn",
]

# -- numbers of the generator


#: Words of the state, the distance of the second term, and the word of the twist, as published.
_N, _M, _TWIST = 624, 397, 0x9908B0DF
_DEGREE = 19937
#: The bytes of a generator's state before the words: seed, words left, a flag, the number of the next word.
_HEAD, _REMAINING, _NEXT = 24, slice(8, 12), slice(16, 24)

#: Fewer words are drawn and dropped: as many as are drawn in the time of a jump.
JUMP = 1 << 21

#: Elements that are drawn at once where a part of them is kept.
BLOCK = 1 << 22

#: Numbers that ``normal_`` makes together.
_LOT = 16

_UNIFORM, _NORMAL = torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default
_WORDS_OF_ELEMENT = {torch.float32: 1, torch.float64: 2, torch.float16: 1, torch.bfloat16: 1}


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
    remaining, following = raw[_REMAINING].view(np.int32), raw[_NEXT].view(np.int64)
    if words < remaining[0]:
        remaining -= words
        following += words
        return out
    numbers = raw[_HEAD : _HEAD + 8 * _N].view(np.int64)
    # The new state is that in front of the next twist: all its words are used. Of its first word the highest bit
    # alone is right, and the twist reads no other.
    ahead = _continued(numbers.astype(np.uint32), _DEGREE)
    made = np.zeros(_N, np.uint32)
    for at in _terms(words - int(remaining[0]) + 1):
        made ^= ahead[at : at + _N]
    numbers[:] = made
    remaining[0], following[0] = 1, 0
    return out


# -- pieces ------------------------------------------------------------------------------------------------------------


def words_drawn(fill: Callable[..., Tensor], dtype: torch.dtype, numel: int) -> int:
    """The words that a fill of a contiguous tensor takes.

    Args:
        fill: ``aten.uniform_`` or ``aten.normal_``.
        dtype, numel: of the tensor; at least 16 elements.
    """
    if fill is _NORMAL and numel % _LOT:
        narrow = dtype in (torch.float16, torch.bfloat16)
        numel += _LOT - numel % _LOT if narrow else _LOT
    return numel * _WORDS_OF_ELEMENT[dtype]


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
        fill: Callable[..., Tensor],
        dtype: torch.dtype,
        numel: int,
        spans: Iterable[tuple[int, int]],
        *args: object,
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
        at, words, each = 0, words_drawn(fill, dtype, numel), _WORDS_OF_ELEMENT[dtype]
        for first, last in spans:
            begin, end = _span(fill, numel, first, last)
            self.pending += begin * each - at
            self.arrive()
            drawn = torch.empty(end - begin, dtype=dtype, device="cpu") if into is None else into[begin:end]
            fill(drawn, *args)
            at = begin * each + (words_drawn(fill, dtype, end - begin) if end == numel else (end - begin) * each)
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
        start, words, each = torch.get_rng_state(), words_drawn(_NORMAL, dtype, numel), _WORDS_OF_ELEMENT[dtype]
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
                some = words_drawn(_NORMAL, dtype, last - first) if last == numel else (last - first) * each
                rounds[turn] = torch.get_rng_state(), first * each + some
                values = drawn if outside is None else torch.where(outside, drawn, values)
                outside = (values < low) | (values > high)
                if not outside.any():
                    break
            yield values
        torch.set_rng_state(start)
        self.pending = len(rounds) * words


def _span(fill: Callable[..., Tensor], numel: int, first: int, last: int) -> tuple[int, int]:
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
def draws_by_place(fill: Callable[..., Tensor], dtype: torch.dtype) -> bool:
    """True where a fill of a tensor by this torch draws what this file says, in parts as in the whole.

    The generator is left as it was.
    """
    if fill not in (_UNIFORM, _NORMAL) or dtype not in _WORDS_OF_ELEMENT:
        return False
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(11)
        start = torch.get_rng_state()
        return all(_as_whole(fill, dtype, start, rows, width) for rows, width in ((12, 8), (9, 11)))


def _as_whole(fill: Callable[..., Tensor], dtype: torch.dtype, start: Tensor, rows: int, width: int) -> bool:
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


# -- parts of parameters


#: Elements of the smallest tensor of which a rank draws its part alone.
LARGE = 1 << 16

#: Standard deviations beyond which ``normal_`` makes no number: it takes the logarithm of a number of 53 bits.
FAR = 9.0

_ATEN = torch.ops.aten
#: Operators that make a tensor of a shape, their first argument, and draw nothing; those that draw, and the fill that
#: draws the same.
_MADE = (_ATEN.empty.memory_format, _ATEN.zeros.default, _ATEN.ones.default, _ATEN.full.default)
_DRAWN: dict[Callable[..., object], Callable[..., Tensor]] = {
    _ATEN.rand.default: _ATEN.uniform_.default,
    _ATEN.randn.default: _ATEN.normal_.default,
}
_FILLS: tuple[Callable[..., Tensor], ...] = (_ATEN.uniform_.default, _ATEN.normal_.default)
#: Operators beside those that torch calls pointwise which compute each element of the result from the same one.
_EACH = (_ATEN.zero_.default, _ATEN.fill_.Scalar, _ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default)
_EACH = (*_EACH, *operators("_to_copy"))

#: A call of a tape: function, arguments, keyword arguments, result.
Call = tuple[Callable[..., object], tuple[object, ...], dict[str, object], object]


@dataclass(frozen=True)
class Meta:
    """A meta tensor at the time that an operator took or returned it: ``module.double()`` gives the same object another
    memory later. The storage is held so that no other storage gets its address."""

    storage: torch.UntypedStorage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype

    @property
    def key(self) -> int:
        return storage_id(self.storage)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of contiguous memory."""
    return torch.empty(shape, device="meta").stride()


def noted(x: object) -> object:
    """A `Meta` of a meta tensor; anything else as it is."""
    if isinstance(x, Tensor) and x.is_meta:
        return Meta(x.untyped_storage(), x.shape, x.stride(), x.storage_offset(), x.dtype)
    return x


def metas(x: object) -> list[Meta]:
    """The `Meta` among the leaves of nested lists."""
    return [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Meta)]


def draws(function: Callable[..., object]) -> bool:
    """True where a call on a tape draws random numbers, or may."""
    seeded = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
    return seeded or getattr(function, "__module__", "") == nn.init.__name__


class DrawnPart(NamedTuple):
    """The part of a storage that is computed, as rows and columns of a matrix.

    Attributes:
        shape: of the matrix.
        rows: the first row, and the one after the last; none where they are equal.
        columns: likewise; None: all.
    """

    shape: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    @classmethod
    def of(cls, index: Sequence[slice], shape: Sequence[int]) -> DrawnPart:
        """The smallest part that holds a slice of a tensor and is cut along the first dim and one more.

        Args:
            index: of each dim.
            shape: of the whole.
        """
        begins, ends = zip(*(each.indices(size)[:2] for each, size in zip(index, shape, strict=True)))
        cut = next((d for d in range(1, len(shape)) if ends[d] - begins[d] < shape[d]), None)
        at = 1 if cut is None else cut
        matrix = math.prod(shape[:at]), math.prod(shape[at:])
        many = matrix[0] // max(1, shape[0])
        rows = begins[0] * many, ends[0] * many
        if cut is None:
            return cls(matrix, rows)
        row_size = math.prod(shape[cut + 1 :])
        return cls(matrix, rows, (begins[cut] * row_size, ends[cut] * row_size))

    @property
    def empty(self) -> bool:
        return self.rows[0] >= self.rows[1] or (self.columns is not None and self.columns[0] >= self.columns[1])

    @property
    def _width(self) -> int:
        """Elements from a row to the next."""
        return self.shape[1] if self.columns is None else self.columns[1] - self.columns[0]

    def memory(self, dtype: torch.dtype) -> Tensor:
        """Flat memory for the part. The operating system gives memory that is written, and no other."""
        more = 0 if self.columns is None else self.shape[1]
        return torch.empty(self.shape[0] * self._width + more, dtype=dtype, device="cpu")

    def within(self, flat: Tensor) -> Tensor:
        """The part in its memory."""
        matrix = flat.as_strided(self.shape, (self._width, 1))
        matrix = matrix[slice(*self.rows)]
        return matrix if self.columns is None else matrix[:, slice(*self.columns)]

    def whole(self, flat: Tensor, tensor: Tensor) -> Tensor:
        """A view of the memory with the shape of the whole tensor, right in the part."""
        strides = (s if s < self.shape[1] else s // self.shape[1] * self._width for s in tensor.stride())
        return flat.as_strided(tensor.shape, tuple(strides))


def parts_of(
    calls: Iterable[Call],
    waiting: Mapping[int, Sequence[tuple[str, Tensor]]],
    asked_of: Callable[[str, Tensor], Sequence[slice] | None],
) -> dict[int, DrawnPart]:
    """Storage -> its part that is computed; the other storages are computed as a whole.

    Storages that are computed from one another have the same part.

    Args:
        calls: of a tape, in order.
        waiting: storage -> the tensors on it that get values, by name.
        asked_of: (name, tensor) -> its slice that is read; None: all of it.
    """
    if type(torch.empty(0)) is not Tensor:  # a mode whose tensors have no values
        return {}
    asked: dict[int, list[DrawnPart]] = {}
    for key, entries in waiting.items():
        notes = [noted(x) for _, x in entries]
        large = all(isinstance(note, Meta) and _is_large(note) for note in notes)
        slices = [asked_of(name, x) for name, x in entries] if large else [None]
        if None not in slices:
            asked[key] = [DrawnPart.of(index, x.shape) for index, (_, x) in zip(slices, entries) if index is not None]
    whole = waiting.keys() - asked.keys()
    together: dict[int, set[int]] = {}  # storage -> those that are computed from it, or that it is computed from
    shapes: dict[int, torch.Size] = {}
    for call in calls if asked else ():
        each = metas(call)
        keys = {x.key for x in each}
        joined = keys.union(*(together.get(key, ()) for key in keys))
        together.update(dict.fromkeys(joined, joined))
        shapes.update((x.key, x.shape) for x in each)
        if not keys.isdisjoint(whole) or not _by_elements(*call):
            whole |= keys
    parts: dict[int, DrawnPart] = {}
    for key, group in together.items():
        if group.isdisjoint(whole):
            some = {each for k in group for each in asked.get(k, ()) if not each.empty}
            rows = shapes[key][0], shapes[key].numel() // shapes[key][0]
            if len(some) == 1:
                (parts[key],) = some
            elif any(each.shape != rows for each in some):  # weights that are tied, and cut in several ways
                parts[key] = DrawnPart(rows, (0, rows[0]))
            else:  # a weight that no rank asks for, such as one that was tied to another: no row
                begin, end = min((p.rows[0] for p in some), default=0), max((p.rows[1] for p in some), default=0)
                parts[key] = DrawnPart(rows, (begin, end))
    return parts


def _is_large(x: Meta) -> bool:
    """True for all of a storage, row by row, of at least `LARGE` elements."""
    numel = x.shape.numel()
    whole = x.storage.nbytes() == numel * x.dtype.itemsize and x.stride == _strides(x.shape)
    return numel >= LARGE and whole


def _by_elements(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], result: object
) -> bool:
    """True for a call of which some elements can be computed alone."""
    if not isinstance(result, Meta) or any(
        x.shape != result.shape or not _is_large(x) for x in metas((args, kwargs, result))
    ):
        return False
    if function in _MADE:
        return True
    if fill := _DRAWN.get(function, function if function in _FILLS else None):
        return not (kwargs and function in _FILLS) and draws_by_place(fill, result.dtype)
    if _truncates(function):
        return kwargs["generator"] is None and _accepted(kwargs) > 0.3 and truncates_by_place(result.dtype)
    operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    each = function in _EACH or torch.Tag.pointwise in getattr(function, "tags", ())
    return each and not draws(function) and not any(x.dim() for x in operands)


def _truncates(function: Callable[..., object]) -> bool:
    return getattr(function, "__name__", "").endswith("trunc_normal_") and draws(function)


def _accepted(normal: Mapping[str, object]) -> float:
    """The probability of a number inside of the bounds of a ``trunc_normal_``; torch draws in another way where it is
    small."""
    below = lambda x: 0.5 * (1 + math.erf((x - normal["mean"]) / normal["std"] / math.sqrt(2)))
    return below(normal["b"]) - below(normal["a"])


def compute(
    call: Call, of: Callable[[object], object], part: DrawnPart, real: Mapping[int, Tensor], numbers: Numbers
) -> Tensor:
    """The memory of the result of a call, of which a part alone is computed.

    Args:
        call: one that `parts_of` has given a part.
        of: a value of the tape -> the value now.
        part: of its tensors.
        real: storage -> its memory.
        numbers: of the generator.
    """
    function, args, kwargs, result = call
    assert isinstance(result, Meta)
    inside = lambda x: part.within(real[x.key]) if isinstance(x, Meta) else of(x)
    flat = real[result.key] if result.key in real else part.memory(result.dtype)
    if function in _DRAWN:
        _fill(numbers, _DRAWN[function], flat, part, ())
    elif function in _FILLS:
        _fill(numbers, _FILLS[_FILLS.index(function)], flat, part, args[1:])
    elif _truncates(function):
        normal: dict[str, Any] = {name: kwargs[name] for name in ("mean", "std", "a", "b")}
        _truncated(numbers, flat, part, **normal)
    elif function in _MADE:
        target = part.within(flat)
        if function is not _MADE[0]:
            target.copy_(function([*target.shape], *map(of, args[1:]), **pytree.tree_map(of, kwargs)))
    elif any(x.key == result.key for x in metas((args, kwargs))):  # in place, or the same memory
        function(*pytree.tree_map(inside, args), **pytree.tree_map(inside, kwargs))
    else:
        made = function(*pytree.tree_map(inside, args), **pytree.tree_map(inside, kwargs))
        assert isinstance(made, Tensor)
        part.within(flat).copy_(made)
    return flat


def _fill(numbers: Numbers, fill: Callable[..., Tensor], flat: Tensor, part: DrawnPart, args: Sequence[object]) -> None:
    """Draw a part of a fill of the whole."""
    (rows, width), target = part.shape, part.within(flat)
    if part.empty or part.columns is None:
        begin, end = (0, 0) if part.empty else (part.rows[0] * width, part.rows[1] * width)
        pieces, into = [(begin, end)] if begin < end else [], flat
    else:
        pieces, into = [(a * width, b * width) for a, b in row_blocks(*part.rows, width, rows * width)], None
    row = 0
    for drawn in numbers.pieces(fill, flat.dtype, rows * width, pieces, *args, into=into):
        if part.columns is not None:
            block = drawn.view(-1, width)[:, slice(*part.columns)]
            target[row : row + len(block)] = block
            row += len(block)


def _truncated(numbers: Numbers, flat: Tensor, part: DrawnPart, mean: float, std: float, a: float, b: float) -> None:
    """Draw a part of a ``trunc_normal_`` of the whole."""
    low, high = (torch.tensor(x, dtype=flat.dtype, device="cpu").item() for x in (a, b))
    if low < mean - FAR * std and high > mean + FAR * std:
        return _fill(numbers, _FILLS[1], flat, part, (mean, std))
    (rows, width), target = part.shape, part.within(flat)
    pieces = [(first * width, last * width) for first, last in row_blocks(0, rows, width, rows * width)]
    for (first, last), values in zip(
        pieces, numbers.truncated(flat.dtype, rows * width, pieces, mean, std, low, high), strict=True
    ):
        begin, end = max(first // width, part.rows[0]), min(last // width, part.rows[1])
        if begin < end and not part.empty:
            block = values.view(-1, width)[begin - first // width : end - first // width]
            target[begin - part.rows[0] : end - part.rows[0]] = (
                block if part.columns is None else block[:, slice(*part.columns)]
            )
    return None

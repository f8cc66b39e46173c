"""Counter-based random numbers: a 64-bit word for each position of a whole tensor, equal on every rank.

    key(seed, call, number)       start and odd step of an operator's stream
    word(k) = mix(start + k·step)                                    SplitMix64
    element i of the whole tensor, row-major:
        a number                  word(i)
        a mask element            half i mod 2 of word(i div 2), as an integer of 32 bits, below p·2³²

A rank computes its own elements alone, and they equal those of one device under every layout. SplitMix64 and the
choice of steps are those of G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014
(the SplittableRandom of Java; it passes DieHarder and BigCrush), the mixing function is D. Stafford's "Mix13". It takes
nine vector operations a word; Philox-4x32-10 takes over a hundred. Where the seed says "fast", numbers come from
torch's own generator instead, seeded by the operator and the start of the rank's slice: replicas agree, slices differ.

A device without integers of 64 bits computes the same words in halves of 32 bits (`words`). Where there is no float64,
normal and exponential numbers are computed in float32, and agree to its rounding.

The operators take the seed and the positions as tensors in host memory, since the program is the same on every rank:

    seed      (4,): torch.initial_seed(), the number of the call, exact (1) or fast (0) numbers, and the number k of
              the micro-batch, 0 where there is one
    starts    for each of `dims`, the start of this rank's slice in the whole tensor (1,); other dims begin at 0

In a program for one of m micro-batches `whole` is the shape of that micro-batch, and `micro` is (dim, m, pieces): the
dim consists of `pieces` pieces, each of n = whole[dim] / pieces rows. In the whole batch, the m micro-batches of a
piece are adjacent:

    row j of micro-batch k  ->  row (j div n)·m·n + k·n + j mod n of the whole batch

One piece: a batch that is cut into m. P pieces: a batch that P ranks feed in P parts, or a batch that is the minor
part of a dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...accelerators import sum_type
from .word_arithmetic import GOLDEN, MIX13, MIX_GAMMA, UNIFORM_BITS, Halves, Rounds, signed

__all__ = [
    "KINDS",
    "PLAIN",
    "Slice",
    "device_words",
    "fast_seed",
    "fill_as_able",
    "fill_in_halves",
    "has_doubles",
    "has_words",
    "host_words",
    "key",
    "placed_stream",
]

_BITS = (1 << 64) - 1

#: Words computed at a time on a CPU thread: with a temporary, they fit the second-level cache.
_CHUNK = 1 << 14

_NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.bool: np.bool_,
    torch.float32: np.float32,
    torch.float64: np.float64,
}

_ROUNDS = tuple((np.uint64(shift), None if factor is None else np.uint64(factor)) for shift, factor in MIX13)

#: Kinds of numbers of `draw`: "uniform" in [0, 1); "normal"; "exponential", above 0; "integer" in [0, 2⁶³).
KINDS = ("uniform", "normal", "exponential", "integer")


def _mixed(z: int, rounds: Rounds = MIX13) -> int:
    for shift, factor in rounds:
        z = ((z ^ z >> shift) * (factor or 1)) & _BITS
    return z


@lru_cache(maxsize=4)
def _of_call(seed: int, call: int) -> int:
    return _mixed(_mixed(seed + GOLDEN & _BITS) + (call + 1) * GOLDEN & _BITS)


def key(seed: int, call: int, number: int) -> tuple[int, int]:
    """Start and step of the stream of one operator in one call, as unsigned numbers."""
    state = _mixed(_of_call(seed, call) + (number + 1) * GOLDEN & _BITS)
    step = _mixed(state + GOLDEN & _BITS, MIX_GAMMA) | 1
    if (step ^ step >> 1).bit_count() < 24:  # too regular a pattern
        step ^= 0xAAAAAAAAAAAAAAAA
    return state, step


#: Numbers of rows: one, an array, or a tensor on any device.
Rows = TypeVar("Rows", int, np.ndarray, Tensor)


class DimRows(NamedTuple):
    """The rows of a slice along one dim.

    Attributes:
        many: the number of rows.
        stride: positions between adjacent rows of the whole tensor.
        begin, lot: the first row, and the distance to the next; both within the micro-batch.
        piece, micros: rows of a piece, and the number of micro-batches; piece 0: the batch is not in parts.
    """

    many: int
    stride: int
    begin: int = 0
    lot: int = 1
    piece: int = 0
    micros: int = 1

    def distances(self, numbers: Rows) -> Rows:
        """The positions from the first row to each row.

        Args:
            numbers: 0 to many - 1, an array or a tensor on any device.
        """
        return self.rows(numbers) * self.stride

    def rows(self, numbers: Rows) -> Rows:
        """The rows of the whole tensor from the first row to each row; arguments as of `distances`."""
        if not self.piece:
            return numbers * self.lot
        rows = numbers * self.lot + self.begin
        first = self.begin // self.piece * self.micros * self.piece + self.begin % self.piece
        return rows // self.piece * (self.micros * self.piece) + rows % self.piece - first

    @property
    def even(self) -> bool:
        """True where all distances are even."""
        return self.stride % 2 == 0 or not (self.distances(np.arange(self.many)) % 2).any()


class Slice:
    """The positions of a slice in its whole tensor, row-major: runs of adjacent elements.

    Attributes:
        first: the position of the first element.
        run: the number of adjacent elements in a run.
        rows: the rows of each of the dims before.
        aligned: True where all runs begin in the same half of a word.
    """

    def __init__(
        self,
        starts: Sequence[Tensor],
        dims: Sequence[int],
        size: Sequence[int],
        whole: Sequence[int],
        micro: Sequence[int] = (),
        k: int = 0,
    ) -> None:
        begin = {d: int(start) for d, start in zip(dims, starts)}
        self.first, self.run, stride = 0, 1, 1
        self.rows: list[DimRows] = []
        for d in range(len(size) - 1, -1, -1):
            at, count, extent, jumps = begin.get(d, 0), size[d], whole[d], None
            if micro and d == micro[0]:
                at, count, jumps = _in_whole_batch(at, count, extent // micro[2], micro[1], k)
                extent *= micro[1]
            self.first += at * stride
            if self.run == stride:
                self.run *= count
            elif count > 1:
                self.rows.insert(0, DimRows(count, stride))
            if jumps is not None:
                self.rows.insert(0, jumps._replace(stride=stride))
            stride *= extent
        self.aligned = all(rows.even for rows in self.rows)

    def offsets(self) -> np.ndarray:
        """The position of the first element of each run."""
        at = np.array([self.first])
        for rows in self.rows:
            at = (at[:, None] + rows.distances(np.arange(rows.many))).ravel()
        return at

    def offsets_on(self, device: torch.device) -> Tensor:
        """The same, computed on a device: nothing is copied from the host, so the host waits for nothing."""
        at = torch.full((1,), self.first, dtype=torch.int64, device=device)
        for rows in self.rows:
            at = (at[:, None] + rows.distances(torch.arange(rows.many, device=device))).ravel()
        return at

    def halves_on(self, device: torch.device) -> Halves:
        """The same in halves of 32 bits."""
        at = Halves.of(self.first, (1,), device)
        for rows in self.rows:
            numbers = rows.rows(torch.arange(rows.many, dtype=torch.int32, device=device))
            at = at.unsqueezed().plus(Halves.wide(numbers).times(rows.stride)).ravelled()
        return at


def _in_whole_batch(at: int, count: int, piece: int, micros: int, k: int) -> tuple[int, int, DimRows | None]:
    """The rows from `at` on of micro-batch k, as rows of the whole batch.

    Returns:
        The first row; the number of adjacent rows; the first rows of all groups of adjacent rows, None where there is
            one group.
    """
    first = at // piece * micros * piece + k * piece + at % piece
    if at % piece + count <= piece:
        return first, count, None
    lot = math.gcd(at, count, piece)
    return first, lot, DimRows(count // lot, 1, at, lot, piece, micros)


def _words(start: int, step: int, offsets: np.ndarray | int, count: int) -> np.ndarray:
    """``word(offset + j)`` for the `count` positions from an offset, or from each of several: (offsets, count)."""
    z = np.arange(count, dtype=np.uint64)
    z *= np.uint64(step)
    if isinstance(offsets, int):
        z += np.uint64(start + offsets * step & _BITS)
        return _mix(z)
    rows = offsets.astype(np.uint64)
    rows *= np.uint64(step)
    rows += np.uint64(start)
    return _mix(rows[:, None] + z)


def host_words(start: int, step: int, offsets: np.ndarray, count: int) -> Tensor:
    """The words at each offset and the `count` positions from there, as (offsets, count) signed integers."""
    z = _words(start, step, int(offsets[0]) if offsets.size == 1 else offsets, count)
    return torch.from_numpy(z.view(np.int64)).view(-1, count)


def _mix(z: np.ndarray) -> np.ndarray:
    """Apply the mixing function, in place."""
    shifted = np.empty_like(z)
    for shift, factor in _ROUNDS:
        np.right_shift(z, shift, out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        if factor is not None:
            np.multiply(z, factor, out=z)
    return z


def device_words(start: int, step: int, offsets: Tensor | int, count: int, device: torch.device) -> Tensor:
    """The same words as `host_words`, on another device, or on all threads of the CPU.

    Args:
        start, step: of the stream.
        offsets: the first positions: a number, or a tensor on that device.
        count: the number of words from each.
        device: of the words.
    """
    z = torch.arange(count, device=device).mul_(signed(step))
    if isinstance(offsets, int):
        z = z.add_(signed(start + offsets * step)).view(1, count)
    else:
        z = (offsets * signed(step)).add_(signed(start))[:, None] + z
    for shift, factor in MIX13:  # shifts of signed words copy the sign, which is masked
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << 64 - shift) - 1))
        if factor is not None:
            z.mul_(signed(factor))
    return z


@lru_cache
def has_words(kind: str) -> bool:
    """True where devices of a type compute with integers of 64 bits."""
    try:
        torch.arange(2, device=kind).mul_(signed(GOLDEN)).bitwise_xor_(1).bitwise_and_(3)
    except RuntimeError:  # NotImplementedError is one, too
        return False
    return True


@lru_cache
def has_doubles(kind: str) -> bool:
    """True where devices of a type compute with float64."""
    try:
        torch.ones(1, dtype=torch.float64, device=kind).add_(0.5)
    except (RuntimeError, TypeError):  # the latter from mps
        return False
    return sum_type(torch.device(kind)) == torch.float64


def fill_in_halves(out: Tensor, at: Slice, stream: tuple[int, int], below: int) -> Tensor:
    """A mask, by integers of 32 bits alone: where the half of a word that belongs to an element is below a number.

    Args:
        out: the mask, contiguous.
        at: its positions.
        stream: start and step.
        below: the bound, as a signed number.
    """
    start, step = stream
    first = at.halves_on(out.device).unsqueezed()
    flat, begin = out.view(-1, at.run), at.first % 2 if at.aligned else 0
    count = (begin + at.run + 1) // 2 if at.aligned else at.run
    numbers = Halves.wide(torch.arange(count, dtype=torch.int32, device=out.device))
    position = (first.shifted(1) if at.aligned else first).plus(numbers)
    word = (position if at.aligned else position.shifted(1)).times(step)
    word = word.plus(Halves.of(start, (1,), out.device)).mixed()
    if at.aligned:
        made = torch.stack((word.lower, word.upper), -1).flatten(-2)[:, begin : begin + at.run]
    else:  # rows begin in different halves of a word
        made = word.half(position.odd())
    flat.copy_(made < below)
    return out


def _filled(
    out: Tensor, at: Slice, stream: tuple[int, int], halves: bool, put: Callable[[Tensor, Tensor], object]
) -> Tensor:
    """Fill `out` by ``put(words, into)``, (rows, elements) at a time.

    Args:
        halves: two elements a word: `put` gets them as integers of 32 bits.
    """
    start, step = stream
    rows, run, device = out.numel() // at.run, at.run, out.device
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    on_host = device.type == "cpu" and (threads <= 2 or out.numel() <= 4 * _CHUNK)
    chunk = 2 * _CHUNK if on_host else threads * 4 * _CHUNK if device.type == "cpu" else out.numel()
    if not halves:
        chunk = -(-chunk // 2)
    many = max(1, chunk // run)
    one = not at.rows and not on_host
    offsets: Any = at.offsets() if on_host else None if one else at.offsets_on(device)

    def drawn(where: Any, count: int) -> Tensor:
        return host_words(start, step, where, count) if on_host else device_words(start, step, where, count, device)

    flat = out.view(rows, run)
    for r in range(0, rows, many):
        for c in range(0, run, chunk):
            into = flat if rows <= many and run <= chunk else flat[r : r + many, c : c + chunk]
            starts: Any = (at.first if one else offsets[r : r + many]) + c
            width = into.shape[1]
            if not halves:
                made = drawn(starts, width)
            elif at.aligned:
                begin = (at.first + c) % 2
                made = drawn(starts // 2, (begin + width + 1) // 2).view(torch.int32)
                if begin or made.shape[1] != width:
                    made = made[:, begin : begin + width]
            else:  # rows begin in different halves of a word
                numbers = torch.arange(width, device=device)
                position = (torch.from_numpy(starts) if on_host else starts)[:, None] + numbers
                whole = (position // 2).ravel()
                made = drawn(whole.numpy() if on_host else whole, 1).view(torch.int32)
                made = made.gather(1, (position % 2).view(-1, 1)).view(position.shape)
            put(made, into)
    return out


def placed_stream(
    seed: Tensor,
    starts: Sequence[Tensor],
    dims: Sequence[int],
    size: Sequence[int],
    whole: Sequence[int],
    number: int,
    micro: Sequence[int],
) -> tuple[Slice, tuple[int, int], int | None]:
    """The positions of the slice, the stream of the operator, and for fast numbers the seed of torch's generator."""
    initial, call, exact, k = seed.tolist()
    at, stream = Slice(starts, dims, size, whole, micro, k), key(initial & _BITS, call, number)
    return at, stream, None if exact else _of_slice(at, stream)


def _of_slice(at: Slice, stream: tuple[int, int]) -> int:
    """The seed of torch's generator for the fast numbers of a slice."""
    return _mixed(stream[0] + (at.first + 1) * stream[1] & _BITS) >> 1


def fast_seed(
    seed: Tensor,
    starts: Sequence[Tensor],
    dims: Sequence[int],
    size: Sequence[int],
    whole: Sequence[int],
    number: int,
    micro: Sequence[int] = (),
) -> int:
    """The seed of torch's generator for an operator that draws inside torch; arguments as of ``shardwright.mask``."""
    at, stream, _ = placed_stream(seed, starts, dims, size, whole, number, micro)
    return _of_slice(at, stream)


def _made_on(seed: Tensor, like: Tensor | None, device: torch.device | None) -> torch.device:
    if seed.is_meta:
        return seed.device
    return like.device if like is not None else torch.device(device or "cpu")


def _mask(
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
    """1 with probability p, else 0: most often booleans."""
    on = _made_on(seed, like, device)
    at, stream, fast = placed_stream(seed, starts, dims, size, whole, number, micro)
    below, number_type = round(p * 2**32) - (1 << 31), _NUMPY.get(dtype) if on.type == "cpu" else None
    simple = fast is None and -1 << 31 < below < 1 << 31 and at.aligned
    if simple and number_type is not None and 0 < math.prod(size) <= 2 * _CHUNK:
        begin = at.first % 2  # a single pass with little overhead: the cost of a small dropout
        made = _words(*stream, at.offsets() // 2 if at.rows else at.first // 2, (begin + at.run + 1) // 2)
        below_threshold = made.view(np.int32)[..., begin : begin + at.run] < below
        return torch.from_numpy(
            below_threshold if number_type is np.bool_ else below_threshold.astype(number_type)
        ).view(size)
    out = torch.empty(size, dtype=dtype, device=on)
    if not out.numel():
        return out
    if fast is not None:
        return out.bernoulli_(p, generator=torch.Generator(out.device).manual_seed(fast))
    if abs(below) == 1 << 31:
        return out.fill_(below > 0)
    if dtype == torch.bool and on.type != "cpu":
        from . import dropout_kernel  # noqa: PLC0415  it imports Triton, which takes half a second and serves devices alone

        if dropout_kernel.available(on):
            rows = at.offsets_on(on) if at.rows else at.first
            dropout_kernel.store_mask(out, rows, at.run, signed(stream[0]), signed(stream[1]), below)
            return out

    if on.type != "cpu" and not has_words(on.type):
        return fill_in_halves(out, at, stream, below)

    def put(made: Tensor, into: Tensor) -> None:
        if number_type is not None:
            np.less(made.numpy(), below, out=into.numpy())  # half the time of torch's operators
        else:
            torch.lt(made, below, out=into)

    return _filled(out, at, stream, True, put)


def _draw(
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
    on = _made_on(seed, like, device)
    out = torch.empty(size, dtype=dtype, device=on)
    if not out.numel():
        return out
    at, stream, fast = placed_stream(seed, starts, dims, size, whole, number, micro)
    if fast is not None:
        generator = torch.Generator(out.device).manual_seed(fast)
        if kind == "integer":
            return out.random_(generator=generator)
        fills: dict[str, Callable[..., Tensor]] = {
            "uniform": out.uniform_,
            "normal": out.normal_,
            "exponential": out.exponential_,
        }
        return fills[kind](generator=generator)
    if on.type == "cpu":
        return _filled(out, at, stream, False, _PUT[kind])
    return fill_as_able(out, at, stream, kind, has_words(on.type), has_doubles(on.type))


def fill_as_able(out: Tensor, at: Slice, stream: tuple[int, int], kind: str, words: bool, doubles: bool) -> Tensor:
    """Numbers on a device.

    Args:
        out: the numbers, contiguous.
        at: their positions.
        stream: start and step.
        kind: one of `KINDS`.
        words, doubles: True where the device computes with integers of 64 bits, and with float64.
    """
    if not words:
        out.view(-1, at.run).copy_(_words_in_halves(at, stream, out.device).numbers(kind, out.dtype))
        return out
    put = _PUT[kind]
    if not doubles and kind in ("normal", "exponential"):
        put = lambda made, into: into.copy_(Halves.of_words(made).numbers(kind, into.dtype))
    return _filled(out, at, stream, False, put)


def _words_in_halves(at: Slice, stream: tuple[int, int], device: torch.device) -> Halves:
    """The words of all positions of a slice, (runs, elements of a run), by integers of 32 bits alone."""
    start, step = stream
    numbers = Halves.wide(torch.arange(at.run, dtype=torch.int32, device=device))
    return at.halves_on(device).unsqueezed().plus(numbers).times(step).plus(Halves.of(start, (1,), device)).mixed()


def _upper(made: Tensor, bits: int) -> Tensor:
    """The upper bits of words, as non-negative numbers; in place."""
    return made.bitwise_right_shift_(64 - bits).bitwise_and_((1 << bits) - 1)


def _put_uniform(made: Tensor, into: Tensor) -> None:
    bits = UNIFORM_BITS[into.dtype]
    into.copy_(_upper(made, bits)).mul_(2.0**-bits)


def _between(made: Tensor) -> Tensor:
    """Numbers in (0, 1), in float64."""
    return _upper(made, 53).to(torch.float64).add_(0.5).mul_(2.0**-53)


_PUT = {
    "uniform": _put_uniform,
    "normal": lambda made, into: into.copy_(torch.special.ndtri(_between(made))),
    "exponential": lambda made, into: into.copy_(_between(made).log_().neg_()),
    "integer": lambda made, into: into.copy_(_upper(made, 63)),
}


def _permutation(seed: Tensor, number: int, count: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    on = _made_on(seed, None, device)
    if on.type in ("cpu", "meta") or has_words(on.type):
        drawn = _draw(seed, [], None, [], [count], [count], number, "integer", torch.int64, on)
        return drawn.argsort(stable=True).to(dtype)
    at, stream, fast = placed_stream(seed, [], [], [count], [count], number, ())
    if fast is not None:
        return torch.randperm(count, generator=torch.Generator(on).manual_seed(fast), dtype=dtype, device=on)
    word = _words_in_halves(at, stream, on)
    return Halves(word.upper.ravel(), word.lower.ravel()).order().to(dtype)


def _choose(
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
    """Draw classes by weight.

    With replacement: the class at which a uniform number falls among the cumulative weights. Without replacement: the
    `count` largest of weight/e with e exponential, which is the order of draws one by one.
    """
    wide = torch.float64 if has_doubles(weights.device.type) else torch.float32
    rows = list(weights.shape[:-1])

    def drawn(kind: str, columns: int) -> Tensor:
        size, of = [*rows, columns], [*whole, columns]
        return _draw(seed, starts, weights, dims, size, of, number, kind, wide, None, micro)

    return chosen(weights.to(wide), drawn, count, replacement)


def chosen(weights: Tensor, drawn: Callable[[str, int], Tensor], count: int, replacement: bool) -> Tensor:
    """The classes that numbers choose.

    Args:
        weights: in the dtype in which sums are computed.
        drawn: (kind, number of columns) -> numbers for each row.
        count, replacement: as of torch's multinomial.
    """
    classes = weights.shape[-1]
    if not replacement:
        return (weights / drawn("exponential", classes)).topk(count, dim=-1).indices
    sums, narrow = weights.cumsum(-1), weights.dtype != torch.float64
    at = torch.searchsorted(sums, drawn("uniform", count) * sums[..., -1:], right=True, out_int32=narrow)
    numbers = torch.arange(classes, device=weights.device, dtype=at.dtype)
    last = torch.where(weights > 0, numbers, 0).amax(-1, keepdim=True)
    return torch.minimum(at, last).long()  # the product may round up to the whole sum


#: Operator -> the function that does its work, for callers that skip torch's dispatch: a call through torch costs as
#: much as all the words of a small dropout.
PLAIN: dict[Hashable, Callable[..., Tensor]] = {}

_library = torch.library.Library("shardwright", "FRAGMENT")


def _define(name: str, arguments: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    """Define an operator without a gradient, cheaper to call than one of `torch.library.custom_op`."""
    _library.define(f"{name}({arguments}) -> Tensor")
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"shardwright::{name}", fake, lib=_library)
    op = getattr(torch.ops.shardwright, name).default

    def plain(*args: object) -> Tensor:
        return op(*args) if torch.compiler.is_compiling() else run(*args)

    plain.__name__ = plain.__qualname__ = name
    PLAIN[op] = plain


def _empty(
    seed: Tensor,
    starts: Sequence[Tensor],
    like: Tensor | None,
    dims: Sequence[int],
    size: Sequence[int],
    whole: Sequence[int],
    number: int,
    which: float | str,
    dtype: torch.dtype,
    device: torch.device | None,
    micro: Sequence[int] = (),
) -> Tensor:
    """The empty result of `_mask` or `_draw`; `which`: the probability, or the kind."""
    return torch.empty(size, dtype=dtype, device=_made_on(seed, like, device))


_WHERE = "Tensor seed, Tensor[] starts, Tensor? like, int[] dims, int[] size, int[] whole, int number"
_define("mask", f"{_WHERE}, float p, ScalarType dtype, Device? device, int[] micro=[]", _mask, _empty)
_define("draw", f"{_WHERE}, str kind, ScalarType dtype, Device? device, int[] micro=[]", _draw, _empty)
_define(
    "permutation",
    "Tensor seed, int number, int count, ScalarType dtype, Device? device",
    _permutation,
    lambda seed, number, count, dtype, device: torch.empty(count, dtype=dtype, device=_made_on(seed, None, device)),
)
_define(
    "choose",
    "Tensor seed, Tensor[] starts, Tensor weights, int[] dims, int[] whole, int number, int count, "
    "bool replacement, int[] micro=[]",
    _choose,
    lambda seed, starts, weights, dims, whole, number, count, replacement, micro=(): weights.new_empty(
        (*weights.shape[:-1], count), dtype=torch.int64
    ),
)

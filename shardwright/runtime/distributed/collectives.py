"""Collectives of the processes runtime: one rank's part of a redistribution, through torch.distributed.

    bound = bind(step, x.shape, rank, groups)      once: plain ints, and the process group; `bind_all`: several steps
    x = bound(x)                                   every time; autograd does not see it

1. Two steps as one exchange. On Gloo small messages take two steps of a redistribution as one: half the meetings for
   the same bytes.

    an all-reduce and a slice           every rank is sent the terms of its own slice alone, and sums these
    an all-to-all and an all-gather     every rank is sent at once the pieces that the ranks of the all-gather would
                                        have passed on

2. Transport. All functions take and return flat tensors, except an all-reduce, which keeps the shape.

    NCCL, HCCL, MPI     the process group's own methods; in programs that torch.compile traces, functional collectives
    one host on Gloo    shared memory (`shared_memory`)
    other on Gloo       all-to-alls: groups of several hosts, programs that torch.compile has traced, hosts without
                        such memory

With all-to-alls, a reduce-scatter is one all-to-all and a local sum. An all-gather is one that sends the same to
every rank. A small all-reduce is a gather and a local sum, a larger one a reduce-scatter and a gather, one of several
MiB Gloo's own ring. Two ranks swap their tensors. Sums are taken in ascending order of the ranks, as in the local
runtime, except in the ring: all replicas have the same bits everywhere.

The thresholds are measured with 8, 4 and 2 Gloo processes on 2 cores (measured: benchmarks/README.md). Example: for 4
KiB a rank on 8 ranks Gloo's all-reduce takes 19.1 ms, a gather and a local sum 4.1 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...cost.communication_schedule import PLAIN
from ...layout import Digits, group_of
from ...redistribution import (
    CollectiveKind,
    Geometry,
    Redistribution,
    RedistributionStep,
    composed,
    digits_value,
    strided,
)
from ...torch_private import (
    GATHER_METHOD,
    SCATTER_METHOD,
    functional_all_gather,
    functional_all_reduce,
    functional_all_to_all,
    functional_reduce_scatter,
    functional_wait,
)
from ..local.shards import reduce_terms
from ..redistribution_functions import part_of_rank
from .process_groups import Group, ProcessGroups

__all__ = [
    "Bound",
    "all_reduce",
    "arrangements",
    "begin_exchange",
    "begin_gather",
    "begin_reduce",
    "begin_scatter",
    "bind",
    "bind_all",
    "carried",
    "exchange",
    "exchanged_and_gathered",
    "gather",
    "joined_digits",
    "permuted",
    "permuted_sizes",
    "reduce_in_place",
    "reduce_scatter",
    "reduced",
    "reduced_slice",
    "rings",
]


# -- two steps as one exchange

Exchange = Callable[[Tensor], Tensor]


def reduced_slice(
    slices: Callable[[Tensor], list[Tensor]],
    mine: Exchange,
    ranks: int,
    reduce_scatter: Exchange,
    after: tuple[int, ...],
    whole: Exchange,
    limit: Callable[[], float],
) -> Exchange:
    """An all-reduce and the slice after it, as one exchange.

    Args:
        slices: x -> the slices of all ranks of the group, each flat.
        mine: x -> the slice of this rank.
        ranks: the number of ranks in the group.
        reduce_scatter: equal pieces, flat, one after the other -> this rank's piece, reduced.
        after: the shape of a slice.
        whole: the all-reduce, used where more bytes than `limit` would be received.
        limit: the greatest number of received bytes of one exchange.
    """
    numel = ranks * math.prod(after)

    def run(x: Tensor) -> Tensor:
        if numel * x.element_size() > limit():
            return mine(whole(x))
        return reduce_scatter(torch.cat(slices(x))).view(after)

    return run


def joined_digits(first: RedistributionStep, second: RedistributionStep) -> Digits | None:
    """The digits over which two steps are one exchange, most major first; None where they cannot be one."""
    if (first.pattern, second.kind) != (CollectiveKind.ALL_TO_ALL, CollectiveKind.ALL_GATHER):
        return None
    return tuple(sorted(first.moved + second.moved, key=lambda d: -d.stride))


def exchanged_and_gathered(
    first: RedistributionStep,
    second: RedistributionStep,
    shape: tuple[int, ...],
    exchange: Exchange,
    apart: Sequence[Exchange],
    limit: Callable[[], int],
) -> Exchange:
    """An all-to-all and the all-gather after it, as one exchange.

    Args:
        first, second: the two steps.
        shape: of the local tensor before the two.
        exchange: equal pieces, flat, one after the other, to all ranks of `joined_digits` -> the pieces received.
        apart: the two steps by themselves, used where more bytes than `limit` would be received.
        limit: the greatest number of received bytes of one exchange.
    """
    digits = joined_digits(first, second)
    assert digits is not None
    sizes = tuple(d.size for d in digits)
    gathered = [k for k, d in enumerate(digits) if d in second.moved]
    exchanged = [k for k in range(len(digits)) if k not in gathered]
    one, two = first.geometry(shape), second.geometry(first.local_shape_after(shape))
    copies, piece = math.prod(sizes[k] for k in gathered), math.prod(shape) // first.size
    sent = (*(1 if k in gathered else size for k, size in enumerate(sizes)), piece)
    arrange = _arranged((*sizes, piece), (*gathered, *exchanged, len(digits)), copies, one, two)

    def run(x: Tensor) -> Tensor:
        if copies * x.nbytes > limit():
            for step in apart:
                x = step(x)
            return x
        if one.pre_perm is not None:
            x = x.reshape(one.pre_view).permute(one.pre_perm)
        received = exchange(flat(x.reshape(sent).expand(*sizes, piece)))
        return arrange(received)

    return run


def _arranged(view: tuple[int, ...], perm: tuple[int, ...], copies: int, one: Geometry, two: Geometry) -> Exchange:
    """The function that arranges the received pieces, of shape `view`, into the result. `perm` brings them into the
    order in which `copies` ranks have the pieces that the all-to-all gives each; then follow the all-to-all's and the
    all-gather's own arrangements."""
    moves = [(view, perm)]
    for after in (
        ((copies, *one.post_view), (0, *(1 + k for k in one.post_perm))) if one.post_perm else None,
        (two.post_view, two.post_perm) if two.post_perm else None,
    ):
        if after is not None:
            once = composed(*moves[-1], *after)
            moves[-1:] = [moves[-1], after] if once is None else [once]
    last = _arrangement(*moves[-1], two.after)
    if len(moves) == 1:
        return last
    before = [_arrangement(*move, None) for move in moves[:-1]]

    def arrange(x: Tensor) -> Tensor:
        for arrangement in before:
            x = arrangement(x)
        return last(x)

    return arrange


def _arrangement(view: tuple[int, ...], perm: tuple[int, ...], shape: tuple[int, ...] | None) -> Exchange:
    shape = shape or tuple(view[k] for k in perm)
    return lambda x: x.reshape(view).permute(perm).reshape(shape)


# -- transport

# Bytes from which two ranks on Gloo swap their tensors, instead of exchanging two pieces each, one of them with
# itself.
SWAPPED = 32 << 10
# Received bytes up to which an all-reduce on Gloo gathers every term and sums locally (8 x 128 KiB).
GATHERED_TERMS = 1 << 20
# Received bytes up to which an all-gather on Gloo is an all-to-all; above it the n copies to send cost more (8 x 1
# MiB).
GATHERED_COPIES = 8 << 20
# Received bytes up to which an all-to-all and an all-gather on Gloo are one exchange, which takes 0.6 to 0.9 of the
# time of two.
GATHERED_PIECES = 8 << 20
# Bytes, times the square of the number of ranks, from which more than two ranks on Gloo use Gloo's own all-reduce, a
# ring, for numbers of 32 or 64 bits: its turns are many, but each has a part of the bytes.
RING = 64 << 10

#: The dtype of the parts of a complex number, which are moved and summed in its place.
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
#: The dtype in which numbers are summed that libraries do not know; the sum of integers wraps as theirs.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


def moved(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """`run`, which moves elements of the contiguous `x`, on a dtype that libraries have: complex numbers as their
    parts, others that libraries lack as bytes, several for each element."""
    if x.dtype in PLAIN:
        return run(x)
    return run(x.resolve_conj().view(_PARTS.get(x.dtype, torch.uint8))).view(x.dtype)


def carried(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor on a dtype that libraries have; flat, where it has another one itself."""
    return x if x.dtype in PLAIN else x.view(-1).view(_PARTS.get(x.dtype, torch.uint8))


def summed(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """`run`, which sums tensors, on a dtype that libraries have: complex numbers as their parts along a further dim,
    others that libraries lack in a wider dtype."""
    if x.dtype in PLAIN:
        return run(x)
    if x.is_complex():
        return torch.view_as_complex(run(torch.view_as_real(x.resolve_conj())))
    return run(x.to(_WIDER.get(x.dtype, torch.float32))).to(x.dtype)


_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _options(kind: Any) -> dict[str, object]:  # torch's stub has another type of reduceOp
    """Reduction -> the options of a process group's method."""
    out = {}
    for name, reduction in _REDUCTIONS.items():
        out[name] = kind()
        out[name].reduceOp = reduction
    return out


_REDUCES, _SCATTERS = _options(dist.AllreduceOptions), _options(dist.ReduceScatterOptions)

# A process group's own methods take a third of the host's time of the functional collectives, which torch.compile
# traces. The functional collectives here are those that torch.distributed's public ones call. The public ones take no
# group by name; names, unlike groups, are constants to torch.compile.

# torch 2.13 has renamed this function, and warns of the older name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def begin_gather(group: Group, x: Tensor) -> tuple[Tensor, dist.Work]:
    """A library's all-gather under way, flat -> the tensors of all ranks, one after the other, and its work."""
    out = x.new_empty(group.size * len(x))
    return out, getattr(group.group, GATHER_METHOD)(out, x)


def begin_scatter(group: Group, x: Tensor, reduction: str = "sum") -> tuple[Tensor, dist.Work]:
    """A library's reduce-scatter under way, flat pieces -> this rank's piece, reduced, and its work."""
    out = x.new_empty(len(x) // group.size, *x.shape[1:])
    return out, getattr(group.group, SCATTER_METHOD)(out, x, _SCATTERS[reduction])


def begin_reduce(group: Group, x: Tensor, reduction: str = "sum", dies: bool = False) -> tuple[Tensor, dist.Work]:
    """A library's all-reduce under way, and its work: the shape stays. `dies`: nothing reads `x` later."""
    out = x.data if dies and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return out, reduce_in_place(group, out, reduction)


def reduce_in_place(group: Group, x: Tensor, reduction: str = "sum") -> dist.Work:
    """The work of a library's all-reduce under way, which writes to the contiguous `x`."""
    return group.group.allreduce([x], _REDUCES[reduction])


def begin_exchange(
    group: Group, x: Tensor, sends: Sequence[int] = (), receives: Sequence[int] = ()
) -> tuple[Tensor, dist.Work]:
    """An all-to-all under way, as `exchange` takes it, and its work."""
    # The group's own method, private too: half the latency of the functional one, and seven eighths of that where no
    # numbers of elements are given.
    received = x.new_empty(sum(receives)) if receives else torch.empty_like(x)
    return received, group.group.alltoall_base(received, x, list(receives), list(sends))


def _library_gather(group: Group, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return functional_wait(functional_all_gather(x, group.size, group.name))
    out, work = begin_gather(group, x)
    work.wait()
    return out


def _library_scatter(group: Group, x: Tensor, reduction: str) -> Tensor:
    if torch.compiler.is_compiling():
        return functional_wait(functional_reduce_scatter(x, reduction, group.size, group.name))
    out, work = begin_scatter(group, x, reduction)
    work.wait()
    return out


def _library_reduce(group: Group, x: Tensor, reduction: str, dies: bool = False) -> Tensor:
    """A library's all-reduce: the shape stays."""
    if torch.compiler.is_compiling():
        return functional_wait(functional_all_reduce(x, reduction, group.name))
    out, work = begin_reduce(group, x, reduction, dies)
    work.wait()
    return out


def exchange(group: Group, x: Tensor, sends: Sequence[int] = (), receives: Sequence[int] = ()) -> Tensor:
    """An all-to-all: pieces of the contiguous `x` to the ranks of the group, and pieces from them.

    Args:
        group: the group.
        x: the pieces to send, one after the other.
        sends, receives: numbers of elements, for a flat `x`; empty: all pieces are equal.
    """
    if not receives and (host := group.through_memory(x)) is not None:
        return host.exchange(x)
    if x.dtype not in PLAIN:
        many = x.element_size() // _PARTS.get(x.dtype, torch.uint8).itemsize
        return moved(x, lambda y: exchange(group, y, [many * n for n in sends], [many * n for n in receives]))
    if not torch.compiler.is_compiling():
        received, work = begin_exchange(group, x, sends, receives)
        work.wait()
        return received
    equal = [len(x) // group.size] * group.size
    return functional_wait(functional_all_to_all(x, list(receives) or equal, list(sends) or equal, group.name))


def permuted_sizes(step: RedistributionStep, geometry: Geometry, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The elements that a permute sends to each rank of the group, and receives from each."""
    piece = math.prod(geometry.after) // geometry.pieces  # a permute keeps the size
    to, source = step.partners(rank)
    return (
        tuple(piece if r in to else 0 for r in range(step.size)),
        tuple(piece if r in source else 0 for r in range(step.size)),
    )


def permuted(group: Group, step: RedistributionStep, geometry: Geometry, rank: int) -> Callable[[Tensor], Tensor]:
    """A permute: each rank sends `Geometry.pieces` pieces, not to all ranks."""
    pieces, (sends, receives) = geometry.pieces, permuted_sizes(step, geometry, rank)
    _, source = step.partners(rank)
    ranks = group_of(rank, step.digits)
    sources = [(r, step.partners(ranks[r])[0].index(group.position)) for r in source]

    def run(x: Tensor) -> Tensor:
        host = group.through_memory(x)
        return exchange(group, x, sends, receives) if host is None else host.exchange(x, pieces, sources)

    return run


def _swap(group: Group, x: Tensor) -> Tensor:
    """The other rank's counterpart of `x`, which is flat, in a group of two."""
    counts = (0, len(x)) if group.position == 0 else (len(x), 0)
    return exchange(group, x, counts, counts)


def gather(group: Group) -> Callable[[Tensor], Tensor]:
    """An all-gather: flat -> the tensors of all ranks, one after the other."""
    n, position = group.size, group.position
    library = partial(moved, run=partial(_library_gather, group))
    if not group.exchanges:
        return library

    def run(x: Tensor) -> Tensor:
        if (host := group.through_memory(x)) is not None:
            return host.gather(x)
        size = x.nbytes
        if group.riders and n * size <= GATHERED_COPIES and group.riders[0].x.dtype == x.dtype:
            rider = group.riders.pop()
            received = exchange(group, torch.cat((x, rider.x) * n)).view(n, -1)
            rider.terms = received.narrow(1, len(x), received.shape[1] - len(x))
            return received.narrow(1, 0, len(x)).reshape(-1)
        if n == 2 and size >= SWAPPED:
            other = _swap(group, x)
            return torch.cat((other, x) if position else (x, other))
        if n * size <= GATHERED_COPIES:
            return exchange(group, torch.cat((x,) * n))  # a quarter of the time of `repeat`
        return library(x)

    return run


def reduce_scatter(group: Group, reduction: str) -> Callable[[Tensor], Tensor]:
    """A reduce-scatter: flat pieces -> this rank's piece, reduced."""
    n, position = group.size, group.position
    if not group.exchanges:
        return partial(summed, run=partial(_library_scatter, group, reduction=reduction))

    def run(x: Tensor) -> Tensor:
        if (host := group.through_memory(x)) is not None:
            return host.reduce_scatter(x, reduction)
        x = x.view(n, -1)
        if n == 2 and x.nbytes >= 2 * SWAPPED:
            return _both(_swap(group, x[1 - position]), x[position], reduction)
        return reduced(exchange(group, x), reduction)

    return run


def reduced(terms: Tensor, reduction: str) -> Tensor:
    """The sum, max or min of the ranks' stacked terms, taken in their order."""
    n, *shape = terms.shape
    if reduction != "sum" or n > 16 or terms.dtype not in (torch.float32, torch.float64):
        return reduce_terms(terms.unbind(0), reduction)
    # One call for all n: `sum` adds up to 16 rows in their order, if columns fill whole vectors.
    numel = math.prod(shape)
    if numel % 64:
        return torch.constant_pad_nd(terms.view(n, numel), (0, -numel % 64)).sum(0)[:numel].view(shape)
    return terms.sum(0)


def rings(n: int, x: Tensor) -> bool:
    """True where `n` ranks on Gloo sum their `x` in a ring."""
    return n > 2 and x.nbytes >= n * n * RING and x.dtype in (torch.float32, torch.float64)


def _both(received: Tensor, x: Tensor, reduction: str) -> Tensor:
    """The sum, max or min of two ranks' terms: the order of two does not matter."""
    return received.add_(x) if reduction == "sum" else reduce_terms((received, x), reduction)


def all_reduce(group: Group, reduction: str, dies: bool = False) -> Callable[[Tensor], Tensor]:
    """An all-reduce. `dies`: nothing reads its input later, and a library writes to it."""
    n, exchanges = group.size, group.exchanges
    if not exchanges:
        return partial(summed, run=partial(_library_reduce, group, reduction=reduction, dies=dies))
    gathered, scattered = gather(group), reduce_scatter(group, reduction)

    def run(x: Tensor) -> Tensor:
        shape, size = x.shape, x.nbytes
        x = flat(x)
        if (host := group.through_memory(x)) is not None:
            return host.all_reduce(x, reduction).view(shape)
        if n == 2 and size >= SWAPPED:
            return _both(_swap(group, x), x, reduction).view(shape)
        if n * size <= GATHERED_TERMS:
            return reduced(gathered(x).view(n, *shape), reduction)
        if rings(n, x):
            return _library_reduce(group, x, reduction).view(shape)
        short = -len(x) % n
        whole = torch.cat((x, x.new_zeros(short))) if short else x
        return gathered(scattered(whole))[: len(x)].view(shape)

    return run


#: A step on one rank and one local shape: a local tensor in, a local tensor out. A slice returns a view; the input is
#: never written to.
Bound = Callable[[Tensor], Tensor]


def bind(step: RedistributionStep, local_shape: tuple[int, ...], rank: int, groups: ProcessGroups) -> Bound:
    """A step for `rank`. Makes the step's process group: all ranks bind the same steps in one order.

    Raises:
        LayoutError: a dim that its cut does not divide.
    """
    return EXECUTORS[step.pattern](step, step.geometry(tuple(local_shape)), rank, groups)


#: A step of each kind on one rank: (step, its geometry, rank, process groups) -> `Bound`.
EXECUTORS: dict[CollectiveKind, Callable[[RedistributionStep, Geometry, int, ProcessGroups], Bound]] = {
    CollectiveKind.SLICE: lambda step, geometry, rank, groups: _slice(geometry, rank),
    CollectiveKind.ALL_REDUCE: lambda step, geometry, rank, groups: all_reduce(
        groups.seen(step.digits), step.reduction
    ),
    CollectiveKind.ALL_GATHER: lambda step, geometry, rank, groups: _shaped(
        geometry, gather(group := groups.seen(step.digits)), group, step.pattern
    ),
    CollectiveKind.REDUCE_SCATTER: lambda step, geometry, rank, groups: _shaped(
        geometry,
        reduce_scatter(group := groups.seen(step.digits), step.reduction),
        group,
        step.pattern,
        _SCATTERS[step.reduction],
    ),
    CollectiveKind.ALL_TO_ALL: lambda step, geometry, rank, groups: _shaped(
        geometry, partial(exchange, group := groups.seen(step.digits)), group, step.pattern, [], []
    ),
    CollectiveKind.PERMUTE: lambda step, geometry, rank, groups: _shaped(
        geometry, permuted(groups.seen(step.digits), step, geometry, rank)
    ),
    CollectiveKind.HALO_EXCHANGE: lambda step, geometry, rank, groups: part_of_rank(
        step, geometry, rank, partial(exchange, groups.seen(step.digits))
    ),
    CollectiveKind.HALO_REDUCE: lambda step, geometry, rank, groups: part_of_rank(
        step, geometry, rank, partial(exchange, groups.seen(step.digits))
    ),
}


def bind_all(steps: Redistribution, shape: tuple[int, ...], rank: int, groups: ProcessGroups) -> tuple[Bound, ...]:
    """The steps of a redistribution on one rank, in their order; two of them may be one exchange (`_joined`). Equal
    layers share them, and programs for several sizes of inputs.

    Args:
        shape, rank: of the local tensor; the rank is one of those that the layouts refer to.

    Raises:
        LayoutError: a dim that its cut does not divide.
    """
    return groups.once((steps, tuple(shape), rank), lambda: _bind_all(steps, shape, rank, groups))


def _bind_all(steps: Redistribution, shape: tuple[int, ...], rank: int, groups: ProcessGroups) -> tuple[Bound, ...]:
    if 0 in shape:  # an empty tensor needs no messages
        after = steps.local_shapes(tuple(shape))[-1]
        return (lambda x: x.new_empty(after),)
    out: list[Bound] = []
    # The previous step and the shape before it, where it may be joined with the next.
    last: tuple[RedistributionStep, tuple[int, ...]] | None = None
    for step, before in zip(steps.steps, steps.local_shapes(tuple(shape))):
        joined = _joined(*last, step, before, rank, groups, out[-1]) if last is not None and groups.exchanges else None
        if joined is not None:
            out[-1], last = joined, None
        else:
            out.append(bind(step, before, rank, groups))
            last = step, before
    return tuple(out)


def _joined(
    first: RedistributionStep,
    shape: tuple[int, ...],
    second: RedistributionStep,
    between: tuple[int, ...],
    rank: int,
    groups: ProcessGroups,
    bound: Bound,
) -> Bound | None:
    """Two steps as one exchange, or None where they cannot be; `bound` is the first of them."""
    geometry = second.geometry(between)
    if (first.kind, second.kind) == (CollectiveKind.ALL_REDUCE, CollectiveKind.SLICE):
        group = groups.seen(first.digits)
        return reduced_slice(
            _slices(geometry, group_of(rank, first.digits)),
            _slice(geometry, rank),
            group.size,
            reduce_scatter(group, first.reduction),
            geometry.after,
            bound,
            lambda: GATHERED_TERMS if group.host is None else math.inf,
        )
    digits = joined_digits(first, second)
    if digits is None:
        return None
    group = groups.seen(digits)
    return exchanged_and_gathered(
        first,
        second,
        shape,
        partial(exchange, group),
        (bound, bind(second, between, rank, groups)),
        lambda: GATHERED_PIECES,
    )


def _slice(geometry: Geometry, rank: int) -> Bound:
    after = _sizes(geometry.after)
    if geometry.cuts is None:
        view, index = _sizes(geometry.pre_view), [(axis, digit.value(rank)) for axis, digit in geometry.select]

        def select(x: Tensor) -> Tensor:
            x = x.reshape(*view)
            for axis, i in index:
                x = x.select(axis, i)
            return x.reshape(*after)

        return select
    ranges = [(dim, length * digits_value(digits, rank), length) for dim, length, digits in geometry.cuts]

    def narrow(x: Tensor) -> Tensor:
        for dim, start, length in ranges:
            x = x.narrow(dim, start, length)
        return x

    return narrow


def _slices(geometry: Geometry, ranks: Sequence[int]) -> Callable[[Tensor], list[Tensor]]:
    """The function that returns the slices of several ranks, each flat."""
    if geometry.cuts is not None:
        each = {r: _slice(geometry, r) for r in ranks}
        return lambda x: [each[r](x).reshape(-1) for r in ranks]
    view, chosen = geometry.pre_view, geometry.select[::-1]
    axes = [axis for axis, _ in chosen]
    sizes = [view[axis] for axis in axes]
    order = (*axes, *(axis for axis in range(len(view)) if axis not in axes))
    permuted = None if order == tuple(range(len(view))) else order
    rows = []
    for r in ranks:  # the row of each slice: the last axis varies fastest
        row = 0
        for size, (_, digit) in zip(sizes, chosen):
            row = row * size + digit.value(r)
        rows.append(row)
    count = math.prod(sizes)

    def slices(x: Tensor) -> list[Tensor]:
        if permuted is not None:
            x = x.reshape(view).permute(permuted)
        pieces = x.reshape(count, -1).unbind(0)
        return [pieces[row] for row in rows]

    return slices


def flat(x: Tensor) -> Tensor:
    """The elements of a tensor one after the other in memory, as libraries send them: a copy where they are not.

    A reshape alone is not enough. The gradient of a sum is one element, expanded, and its flat view has a stride of 0.
    """
    return x.reshape(-1).contiguous()


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape as the arguments of a view, one for each dim; a scalar's is one argument, the empty tuple."""
    return shape or cast("tuple[int, ...]", ((),))


def arrangements(geometry: Geometry) -> tuple[Bound, Bound]:
    """The ways of `_shaped` to the flat pieces to send, and from those received to the local tensor."""
    view, perm = geometry.post_view, geometry.post_perm
    after = _sizes(geometry.after)

    def pieces(x: Tensor) -> Tensor:
        if geometry.pre_perm is not None:
            x = x.reshape(*geometry.pre_view).permute(*geometry.pre_perm)
        return flat(x)

    def arranged(x: Tensor) -> Tensor:
        return (x if perm is None else x.view(*view).permute(*perm)).reshape(*after)

    return pieces, arranged


_METHODS = {
    CollectiveKind.ALL_GATHER: GATHER_METHOD,
    CollectiveKind.REDUCE_SCATTER: SCATTER_METHOD,
    CollectiveKind.ALL_TO_ALL: "alltoall_base",
}


def _shaped(
    geometry: Geometry,
    run: Bound,
    group: Group | None = None,
    kind: CollectiveKind = CollectiveKind.PERMUTE,
    *options: object,
) -> Bound:
    """`run` between the local tensor and flat pieces: it takes the pieces to send, one after the other, and returns
    those received.

    On a library the process group's own method for the `kind`, with its `options`, does the same without the layers of
    Python in `run`, each of which takes the host as long as half a `torch.add`, as a view does. Programs that
    torch.compile traces need `run`, and so do dtypes that libraries lack.
    """
    pieces, arranged = arrangements(geometry)
    after, numel = _sizes(geometry.after), math.prod(geometry.after)
    if group is None or group.exchanges:
        if geometry.pre_perm is None and geometry.post_perm is None:
            return lambda x: run(flat(x)).view(*after)  # two thirds of the time of a shape in one argument
        return lambda x: arranged(run(pieces(x)))
    library, method = group.group, _METHODS[kind]
    rows = geometry.rows(kind, group.size)
    pre, post = strided(geometry.pre_view, geometry.pre_perm), strided(geometry.post_view, geometry.post_perm)

    def shaped(x: Tensor) -> Tensor:
        if x.dtype not in PLAIN or torch.compiler.is_compiling():
            return arranged(run(pieces(x)))
        if x.shape == rows:
            out = x.new_empty(*after)
            getattr(library, method)(out, x.contiguous(), *options).wait()
            return out
        x = pieces(x) if pre is None or not x.is_contiguous() else x.as_strided(*pre).reshape(-1).contiguous()
        out = x.new_empty(numel)
        getattr(library, method)(out, x, *options).wait()
        return out.view(*after) if post is None else out.as_strided(*post).reshape(*after)

    return shaped

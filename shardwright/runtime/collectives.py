"""The processes runtime's executor: one rank's part of a step, through torch.distributed.

    bound = bind(step, x.shape, rank, groups)      once: plain ints, and the process group
    x = run_step(x, bound)                         every time; no autograd here

Where collectives are a library's (NCCL, HCCL, MPI) they are the functional ones, which torch.compile traces. On Gloo
everything is made of all-to-alls: a reduce-scatter is one and a local sum, an all-gather one that sends everybody the
same, an all-reduce of something small a gather and a local sum, of something larger a reduce-scatter and a gather. Two
ranks swap what they have.
Sums are then taken in ascending order of the ranks, as in the local runtime: all replicas have the same bits.

Why, measured with 8, 4 and 2 Gloo processes of one thread on 2 cores, ms (all_to_all through the group's own method
takes 0.19 ms on 2 ranks where the functional one takes 0.5, and 0.8 where it takes 1.1 on 4):

    KiB a rank   all_reduce          gather, sum      scatter, sum, gather   all_gather      by all_to_all
         4       19.1   4.0  0.36    4.1  1.7  0.28   6.9   2.8  0.52        10.0  2.5 0.26   3.3  1.6 0.20
       128       16.8   5.5  0.55    6.9  2.7  0.46   8.9   3.9  0.58        12.4  3.3 0.36   5.7  2.7 0.33
       512       15.9   5.3  0.70   18.7  6.7  1.0    9.6   3.7  1.0         20.1  6.6 1.4   16.3  5.4 0.80
      4096       26.2  12.7  4.4     -     -    -    34.5  13.9  5.4          412 33.6 6.1    472 45.4 5.3
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..conversion import Step
from ..conversion_steps import digits_value
from ..layout import Digits, group_of, groups, merge
from .shards import reduce_terms

__all__ = ["Bound", "ProcessGroups", "bind", "run_step"]

# Bytes from which two ranks on Gloo swap what they have, instead of exchanging two pieces each, one with itself. Eight
# processes in pairs on 2 cores, ms, as an exchange and as a swap (and Gloo's own all-reduce):
#     KiB a rank   all_reduce          all_gather    reduce_scatter
#             8     0.9   1.0  ( 1.0)   0.9   0.9      1.0  1.1
#            32     1.4   1.1  ( 1.4)   1.2   1.0      0.9  1.0
#           392     4.1   2.0  ( 2.4)   3.6   2.3      1.8  1.2
#          4096    40.9  16.1  (17.4)  90.8  32.7     13.0  8.4
SWAPPED = 32 << 10
# Received bytes up to which an all-reduce on Gloo gathers every term and sums locally (see the table: 8 x 128 KiB).
GATHERED_TERMS = 1 << 20
# Received bytes up to which an all-gather on Gloo is an all-to-all; past it the n copies to send cost more (8 x 1 MiB).
GATHERED_COPIES = 8 << 20

# torch.ops._c10d_functional is private. It is what torch.distributed's public functional collectives call, which take
# no group by name; names, unlike groups, are constants to torch.compile.
_ops = torch.ops._c10d_functional


class ProcessGroups:
    """The process groups of one rank, made when first asked for: all ranks must ask for the same ones in one order.

    Args:
        devices: the number of ranks that layouts speak of.
        rank: this rank among them.
        base: the world's rank of the first of them (a pipeline stage's, say).
        timeout: after which a collective on a group made here fails; None: the default group's.
        exchanges: whether steps are to be made of all-to-alls; None: on Gloo.
    """

    def __init__(self, devices: int, rank: int, base: int = 0, timeout: timedelta | None = None,
                 exchanges: bool | None = None) -> None:
        self.devices, self.rank, self.base, self.timeout = devices, rank, base, timeout
        self.exchanges = dist.get_backend() == "gloo" if exchanges is None else exchanges
        self._groups: dict[Digits, dist.ProcessGroup] = {}

    def of(self, digits: Digits) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one in `digits` alone."""
        key = merge(sorted(digits, key=lambda d: -d.stride))
        if key not in self._groups:
            self._groups[key] = self._make(key)
        return self._groups[key]

    def _make(self, digits: Digits) -> dist.ProcessGroup:
        mine = tuple(self.base + r for r in group_of(self.rank, digits))
        if len(mine) == dist.get_world_size():
            return dist.group.WORLD
        if dist.get_backend() != "mpi":
            # Only the members meet: other pipeline stages need not know of the group.
            return dist.new_group(mine, timeout=self.timeout, use_local_synchronization=True)
        made = {ranks: dist.new_group(tuple(self.base + r for r in ranks), timeout=self.timeout)
                for ranks in groups(self.devices, digits)}  # with MPI the whole world makes every group
        return made[group_of(self.rank, digits)]


@dataclass(frozen=True)
class Bound:
    """A step on one rank and one local shape.

    Attributes:
        kind, reduction: the step's.
        size: the number of ranks in the group.
        pre_view, pre_perm: how the local tensor becomes the pieces to send, one after the other; None: it is so.
        post_view, post_perm, after: how what was received becomes the result.
        narrows: for a slice: (dim, start, length) of the rank's range per dim, or
        index: (axis, index) into ``x.reshape(pre_view)``, last axis first.
        position: of this rank in the group.
        sends, receives: for an all-to-all the number of elements to and from each rank of the group; empty: all equal.
        exchanges: whether to make the step of all-to-alls.
        name, group: the process group; None for a slice.
    """

    kind: str
    reduction: str
    size: int
    pre_view: tuple[int, ...] | None
    pre_perm: tuple[int, ...] | None
    post_view: tuple[int, ...] | None
    post_perm: tuple[int, ...] | None
    after: tuple[int, ...]
    narrows: tuple[tuple[int, int, int], ...] | None = None
    index: tuple[tuple[int, int], ...] = ()
    position: int = 0
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    exchanges: bool = False
    name: str | None = None
    group: dist.ProcessGroup | None = None


def bind(step: Step, local_shape: tuple[int, ...], rank: int, groups: ProcessGroups) -> Bound:
    """A step as plain ints for `rank`. Makes the step's process group: all ranks bind the same steps in one order.

    Raises:
        LayoutError: a dim that does not divide.
    """
    shape = tuple(local_shape)
    geometry = step.geometry(shape)
    if step.kind == "slice":
        narrows = None
        if geometry.cuts is not None:
            narrows = tuple((dim, length * digits_value(digits, rank), length) for dim, length, digits in geometry.cuts)
        index = tuple((axis, digit.value(rank)) for axis, digit in geometry.select)
        return Bound("slice", "sum", 1, geometry.pre_view, None, None, None, geometry.after, narrows, index)
    group = groups.of(step.digits)
    sends = receives = ()
    if step.kind == "all_to_all" and geometry.pieces != step.size:
        piece = math.prod(shape) // geometry.pieces
        to, source = step.partners(rank)
        sends = tuple(piece if r in to else 0 for r in range(step.size))
        receives = tuple(piece if r in source else 0 for r in range(step.size))
    return Bound(step.kind, step.reduction, step.size, geometry.pre_view, geometry.pre_perm, geometry.post_view,
                 geometry.post_perm, geometry.after, position=step.position(rank), sends=sends, receives=receives,
                 exchanges=groups.exchanges, name=group.group_name, group=group)


def run_step(x: Tensor, bound: Bound) -> Tensor:
    """One step on this rank's local tensor. A slice is a view; `x` is never written to."""
    if bound.kind == "slice":
        return _slice(x, bound)
    if bound.kind == "all_reduce":
        return _all_reduce(x, bound)
    if bound.pre_perm is not None:
        x = x.reshape(bound.pre_view).permute(bound.pre_perm)
    x = x.reshape(-1)  # pieces one after the other; a copy where they were not
    if bound.kind == "all_to_all":
        x = _exchange(x, bound, bound.sends, bound.receives)
    elif bound.kind == "all_gather":
        x = _gather(x, bound)
    else:
        x = _reduce_scatter(x, bound)
    if bound.post_perm is not None:
        x = x.view(bound.post_view).permute(bound.post_perm)
    return x.reshape(bound.after)


def _slice(x: Tensor, bound: Bound) -> Tensor:
    if bound.narrows is not None:
        for dim, start, length in bound.narrows:
            x = x.narrow(dim, start, length)
        return x
    x = x.reshape(bound.pre_view)
    for axis, index in bound.index:
        x = x.select(axis, index)
    return x.reshape(bound.after)


def _exchange(x: Tensor, bound: Bound, sends: Sequence[int] = (), receives: Sequence[int] = ()) -> Tensor:
    """Flat pieces to the ranks of the group, flat pieces from them; all equal where no numbers are given."""
    if x.is_complex():  # Gloo's all_to_all knows no complex numbers
        pairs = _exchange(torch.view_as_real(x).reshape(-1), bound, [2 * n for n in sends], [2 * n for n in receives])
        return torch.view_as_complex(pairs.view(-1, 2))
    if bound.exchanges and not torch.compiler.is_compiling():
        # The group's own method, private too: half the latency of the functional one, see the table above; and seven
        # eighths of it where no numbers are given.
        received = x.new_empty(sum(receives)) if receives else torch.empty_like(x)
        bound.group.alltoall_base(received, x, list(receives), list(sends)).wait()
        return received
    equal = [x.numel() // bound.size] * bound.size
    return _ops.wait_tensor(_ops.all_to_all_single(x, list(receives) or equal, list(sends) or equal, bound.name))


def _swaps(x: Tensor, bound: Bound) -> bool:
    """Whether to send `x` to the other one of two ranks and no copy of anything to oneself."""
    return bound.exchanges and bound.size == 2 and x.nbytes >= SWAPPED


def _swap(x: Tensor, bound: Bound) -> Tensor:
    """What the other one of two ranks has for its `x`."""
    counts = (0, x.numel()) if bound.position == 0 else (x.numel(), 0)
    return _exchange(x, bound, counts, counts)


def _gather(x: Tensor, bound: Bound) -> Tensor:
    n = bound.size
    if _swaps(x, bound):
        other = _swap(x, bound)
        return torch.cat((other, x) if bound.position else (x, other))
    if bound.exchanges and n * x.nbytes <= GATHERED_COPIES:
        return _exchange(torch.cat((x,) * n), bound)  # a quarter of what `repeat` takes
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x, n, bound.name))


def _reduce_scatter(x: Tensor, bound: Bound) -> Tensor:
    if bound.exchanges:
        pieces = x.view(bound.size, -1)
        if _swaps(pieces[0], bound):
            return _both(_swap(pieces[1 - bound.position], bound), pieces[bound.position], bound)
        return _reduced(_exchange(x, bound).view(bound.size, -1), bound)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x, bound.reduction, bound.size, bound.name))


def _reduced(terms: Tensor, bound: Bound) -> Tensor:
    """The sum, max or min of the ranks' terms, stacked, taken in their order."""
    n, *shape = terms.shape
    if bound.reduction != "sum" or n > 16 or terms.dtype not in (torch.float32, torch.float64):
        return reduce_terms(terms.unbind(0), bound.reduction)
    # One call for n: it adds up to 16 rows in their order, if columns fill whole vectors.
    numel = math.prod(shape)
    if numel % 64:
        return torch.constant_pad_nd(terms.view(n, numel), (0, -numel % 64)).sum(0)[:numel].view(shape)
    return terms.sum(0)


def _both(received: Tensor, x: Tensor, bound: Bound) -> Tensor:
    """The sum, max or min of two ranks' terms: of two the order cannot matter."""
    return received.add_(x) if bound.reduction == "sum" else reduce_terms((received, x), bound.reduction)


def _all_reduce(x: Tensor, bound: Bound) -> Tensor:
    n, shape = bound.size, x.shape
    if not bound.exchanges:
        return _ops.wait_tensor(_ops.all_reduce(x, bound.reduction, bound.name))
    x = x.reshape(-1)
    if _swaps(x, bound):
        return _both(_swap(x, bound), x, bound).view(shape)
    if n * x.nbytes <= GATHERED_TERMS:
        return _reduced(_gather(x, bound).view(n, *shape), bound)
    short = -x.numel() % n
    whole = torch.cat((x, x.new_zeros(short))) if short else x
    return _gather(_reduce_scatter(whole, bound), bound)[:x.numel()].view(shape)

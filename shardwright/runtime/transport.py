"""How collectives travel. All take and give flat tensors, but an all-reduce, which keeps the shape.

Where collectives are a library's (NCCL, HCCL, MPI) they are the functional ones, which torch.compile traces. Where they would
be Gloo's, ranks of one host do them through memory that they share (`same_host`). What is left to Gloo, groups of several
hosts, what torch.compile has traced, hosts without such memory, is made of all-to-alls: a reduce-scatter is one and a local
sum, an all-gather one that sends everybody the same, an all-reduce of something small a gather and a local sum, of something
larger a reduce-scatter and a gather, of several MiB Gloo's own ring. Two ranks swap what they have. Of an all-reduce that a
slice follows every rank is sent the terms of its slice alone. Sums are then taken in ascending order of the ranks, as in the
local runtime, but in the ring: all replicas have the same bits everywhere.

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
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..conversion import Step
from ..layout import group_of
from ..torch_private import (
    functional_all_gather, functional_all_reduce, functional_all_to_all, functional_reduce_scatter, functional_wait,
)
from .process_groups import Group
from .shards import reduce_terms

__all__ = ["all_reduce", "exchange", "gather", "reduce_scatter", "reduced", "rings", "routed"]

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
# Received bytes up to which an all-to-all and an all-gather on Gloo are one exchange: eight processes, of 4 and of 2, take 0.7
# of the two at 16 KiB, 0.6 at 256 KiB, 0.9 at 2 and at 8 MiB.
GATHERED_PIECES = 8 << 20
# Bytes, for each of the ranks and each of them again, of numbers of 32 or 64 bits, from which more than two ranks on Gloo leave
# an all-reduce to its own, a ring: its turns are many, but each has a part of the bytes. Eight processes on 2 loaded cores,
# all together and in fours, ms, as a reduce-scatter and a gather and as a ring:
#     MiB a rank     8 ranks        4 ranks
#              1     18.4  25.6     21.6  17.1
#              2     29.6  34.2     35.0  24.6
#              4     52.8  47.7     69.1  45.5
#              6     72.2  66.4    105.3  48.7
RING = 64 << 10

# The functional collectives here are what torch.distributed's public ones call, which take no group by name; names,
# unlike groups, are constants to torch.compile.

# torch 2.13 has renamed it, and warns of the older name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def exchange(group: Group, x: Tensor, sends: Sequence[int] = (), receives: Sequence[int] = ()) -> Tensor:
    """Pieces to the ranks of the group, pieces from them; `x` is contiguous.

    Args:
        sends, receives: numbers of elements, for a flat `x`; empty: all pieces are equal.
    """
    if not receives and (host := group.through_memory(x)) is not None:
        return host.exchange(x)
    if x.is_complex():  # Gloo's all_to_all knows no complex numbers
        pairs = torch.view_as_real(x).reshape(-1)
        pairs = exchange(group, pairs, [2 * n for n in sends], [2 * n for n in receives])
        return torch.view_as_complex(pairs.view(*x.shape, 2) if not receives else pairs.view(-1, 2))
    if group.exchanges and not torch.compiler.is_compiling():
        # The group's own method, private too: half the latency of the functional one, see the table above; and seven
        # eighths of it where no numbers are given.
        received = x.new_empty(sum(receives)) if receives else torch.empty_like(x)
        group.group.alltoall_base(received, x, list(receives), list(sends)).wait()
        return received
    equal = [len(x) // group.size] * group.size
    return functional_wait(functional_all_to_all(x, list(receives) or equal, list(sends) or equal, group.name))


def routed(group: Group, step: Step, pieces: int, piece: int, rank: int) -> Callable[[Tensor], Tensor]:
    """An all-to-all in which each rank sends so many pieces, not to all."""
    to, source = step.partners(rank)
    sends = tuple(piece if r in to else 0 for r in range(step.size))
    receives = tuple(piece if r in source else 0 for r in range(step.size))
    ranks = group_of(rank, step.digits)
    sources = [(r, step.partners(ranks[r])[0].index(group.position)) for r in source]

    def run(x: Tensor) -> Tensor:
        host = group.through_memory(x)
        return exchange(group, x, sends, receives) if host is None else host.exchange(x, pieces, sources)
    return run


def _swap(group: Group, x: Tensor) -> Tensor:
    """What the other one of two ranks has for its `x`, which is flat."""
    counts = (0, len(x)) if group.position == 0 else (len(x), 0)
    return exchange(group, x, counts, counts)


def gather(group: Group) -> Callable[[Tensor], Tensor]:
    """Flat -> everybody's, one after the other."""
    n, position, exchanges = group.size, group.position, group.exchanges

    def run(x: Tensor) -> Tensor:
        if (host := group.through_memory(x)) is not None:
            return host.gather(x)
        size = x.nbytes if exchanges else 0
        if group.riders and n * size <= GATHERED_COPIES and group.riders[0].x.dtype == x.dtype:
            rider = group.riders.pop()
            received = exchange(group, torch.cat((x, rider.x) * n)).view(n, -1)
            rider.terms = received.narrow(1, len(x), received.shape[1] - len(x))
            return received.narrow(1, 0, len(x)).reshape(-1)
        if exchanges and n == 2 and size >= SWAPPED:
            other = _swap(group, x)
            return torch.cat((other, x) if position else (x, other))
        if exchanges and n * size <= GATHERED_COPIES:
            return exchange(group, torch.cat((x,) * n))  # a quarter of what `repeat` takes
        return functional_wait(functional_all_gather(x, n, group.name))
    return run


def reduce_scatter(group: Group, reduction: str) -> Callable[[Tensor], Tensor]:
    """Flat pieces -> this rank's, reduced."""
    n, position, exchanges = group.size, group.position, group.exchanges

    def run(x: Tensor) -> Tensor:
        if (host := group.through_memory(x)) is not None:
            return host.reduce_scatter(x, reduction)
        if not exchanges:
            return functional_wait(functional_reduce_scatter(x, reduction, n, group.name))
        x = x.view(n, -1)
        if n == 2 and x.nbytes >= 2 * SWAPPED:
            return _both(_swap(group, x[1 - position]), x[position], reduction)
        return reduced(exchange(group, x), reduction)
    return run


def reduced(terms: Tensor, reduction: str) -> Tensor:
    """The sum, max or min of the ranks' terms, stacked, taken in their order."""
    n, *shape = terms.shape
    if reduction != "sum" or n > 16 or terms.dtype not in (torch.float32, torch.float64):
        return reduce_terms(terms.unbind(0), reduction)
    # One call for n: it adds up to 16 rows in their order, if columns fill whole vectors.
    numel = math.prod(shape)
    if numel % 64:
        return torch.constant_pad_nd(terms.view(n, numel), (0, -numel % 64)).sum(0)[:numel].view(shape)
    return terms.sum(0)


def rings(n: int, x: Tensor) -> bool:
    """Whether `n` ranks on Gloo sum their `x` in a ring."""
    return n > 2 and x.nbytes >= n * n * RING and x.dtype in (torch.float32, torch.float64)


def _both(received: Tensor, x: Tensor, reduction: str) -> Tensor:
    """The sum, max or min of two ranks' terms: of two the order cannot matter."""
    return received.add_(x) if reduction == "sum" else reduce_terms((received, x), reduction)


def all_reduce(group: Group, reduction: str) -> Callable[[Tensor], Tensor]:
    n, exchanges = group.size, group.exchanges
    if not exchanges:
        return lambda x: functional_wait(functional_all_reduce(x, reduction, group.name))
    gathered, scattered = gather(group), reduce_scatter(group, reduction)

    def run(x: Tensor) -> Tensor:
        shape, size = x.shape, x.nbytes
        x = x.reshape(-1)
        if (host := group.through_memory(x)) is not None:
            return host.all_reduce(x, reduction).view(shape)
        if n == 2 and size >= SWAPPED:
            return _both(_swap(group, x), x, reduction).view(shape)
        if n * size <= GATHERED_TERMS:
            return reduced(gathered(x).view(n, *shape), reduction)
        if rings(n, x):
            return functional_wait(functional_all_reduce(x, reduction, group.name)).view(shape)
        short = -len(x) % n
        whole = torch.cat((x, x.new_zeros(short))) if short else x
        return gathered(scattered(whole))[:len(x)].view(shape)
    return run

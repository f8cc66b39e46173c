"""Collectives of ranks of one host, through memory that they share (`host_memory`): nothing is sent, and no thread is woken
to receive it. Sums are taken in the order of the ranks, whatever their length.

    all-gather          write mine; meet; read all
    reduce-scatter      write mine; meet; add up everybody's terms of my piece
    all-reduce          the same, write the piece; meet; read all pieces. What is long goes in chunks: the terms of the next
                        are written and met for with the pieces of the one before. What is short: read and add up all terms
    all-to-all          write mine; meet; read what is for me

Eight ranks of one thread on 2 cores, in groups of 8, of 4 and of 2, ms, by Gloo (the quickest of the ways in `collectives`)
and by this, from `benchmarks/same_host.py`:

    KiB a rank  all-reduce                    all-gather                    reduce-scatter                all-to-all
         4  3.5 0.5  2.3 0.5  1.0 0.3     2.4 0.3  1.8 0.3  1.0 0.3     2.9 0.8  1.6 0.2  0.9 0.4     2.7 0.5  1.3 0.4  0.8 0.4
        64  6.0 0.7  2.9 0.5  1.7 0.9     2.3 0.3  1.5 0.5  0.9 0.5     2.9 0.6  1.5 0.6  1.1 0.4     3.2 0.9  1.9 0.5  1.0 0.4
       512  8.4 1.6  6.0 1.5  3.9 1.7     4.0 0.6  3.1 0.9  1.7 0.6     5.3 1.1  4.1 1.5  2.0 1.1     6.2 1.8  3.0 1.4  2.9 2.4
      4096  51 21  23 10  21 13           10 3.0  16 5.4  13 7.0        17 12  25 11  9.5 4.7         20 14  17 13  15 14
     16384  115 33  99 36  72 41          67 37  66 15  42 14           65 33  63 25  44 25           134 110  134 109  73 61
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .host_memory import HostMemory
from .shards import reduce_terms

__all__ = ["SameHost"]

# Bytes of a rank's tensor that travel in one round. Eight ranks on 2 cores, all-reduce of 4 and of 16 MiB, ms: 10.0, 32.4 in
# rounds of 0.5 MiB; 9, 32 of 1; 7.9, 26.1 of 2; 8.1, 19.7 of 4. Memory is twice that for each rank and group.
CHUNK = 1 << 20
# Bytes of all ranks' terms up to which every rank adds up all of them, in one round instead of two.
SHORT = 1 << 20
# Bytes at which pieces begin, so that no two ranks write into one line of a cache.
_LINE = 64


class SameHost:
    """Collectives of one group, as one of its ranks does them; made by `of`. All take flat tensors, contiguous, of one type and
    length on all ranks, write to none of them, and record no gradient.

    Args:
        memory: what the group shares, with rows of `row_bytes`.
    """

    def __init__(self, memory: HostMemory, ranks: int, position: int) -> None:
        self._memory, self._ranks, self._position = memory, ranks, position
        self._rows: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, group: dist.ProcessGroup, ranks: int, position: int, timeout: timedelta, wanted: bool = True
           ) -> SameHost | None:
        """For a group, if all its ranks are on one host that has memory for them, and want it; else None, on all of them. All
        ranks of the group call it.

        Args:
            timeout: how long a rank waits for others in a collective.
        """
        memory = HostMemory.of(group, ranks, position, _row_bytes(ranks), timeout, wanted)
        return None if memory is None else cls(memory, ranks, position)

    def gather(self, x: Tensor) -> Tensor:
        """Everybody's, one after the other."""
        out, chunk = x.new_empty(self._ranks, len(x)), CHUNK // x.element_size()
        for start in range(0, len(x), chunk):
            part = x[start:start + chunk]
            self._mine(x.dtype)[:len(part)].copy_(part)
            out[:, start:start + chunk].copy_(self._met(x, "all-gather")[:, :len(part)])
        return out.view(-1)

    def exchange(self, x: Tensor, pieces: int = 0, sources: Sequence[tuple[int, int]] = ()) -> Tensor:
        """An all-to-all.

        Args:
            pieces: of which `x` is made, alike and one after the other; as many on every rank. 0: one for each rank.
            sources: which ranks' pieces this one receives, and which of theirs; none: its own one of each.
        """
        pieces = pieces or self._ranks
        sent = x.view(pieces, len(x) // pieces)
        out = x.new_empty(len(sources) or self._ranks, sent.shape[1])
        chunk = CHUNK // pieces // x.element_size()
        for start in range(0, sent.shape[1], chunk):
            part = sent[:, start:start + chunk]
            length = part.shape[1]
            self._mine(x.dtype)[:part.numel()].view(part.shape).copy_(part)
            rows = self._met(x, "all-to-all")
            if not sources:
                out[:, start:start + length].copy_(_piece(rows, self._position, length))
            for received, (rank, piece) in zip(out, sources):
                received[start:start + length].copy_(_piece(rows[rank], piece, length))
        return out.view(-1)

    def reduce_scatter(self, x: Tensor, reduction: str) -> Tensor:
        """This rank's piece of the sum, max or min of everybody's `x`."""
        sent = x.view(self._ranks, len(x) // self._ranks)
        out, chunk = x.new_empty(sent.shape[1]), CHUNK // self._ranks // x.element_size()
        for start in range(0, len(out), chunk):
            part = sent[:, start:start + chunk]
            length = part.shape[1]
            self._mine(x.dtype)[:part.numel()].view(part.shape).copy_(part)
            terms = _piece(self._met(x, "reduce-scatter"), self._position, length)
            _reduce(terms, reduction, out[start:start + length])
        return out

    def all_reduce(self, x: Tensor, reduction: str, out: Tensor | None = None) -> Tensor:
        """The sum, max or min of everybody's `x`.

        Args:
            out: where it is to be, which may be `x`; None: a new tensor.
        """
        out = torch.empty_like(x) if out is None else out
        if x.nbytes * self._ranks <= min(SHORT, CHUNK * self._ranks):
            self._mine(x.dtype)[:len(x)].copy_(x)
            _reduce(self._met(x, "all-reduce")[:, :len(x)], reduction, out)
            return out
        chunk = CHUNK // x.element_size()
        before: Tensor | None = None    # the chunk whose pieces have been summed
        for start in range(0, len(x) + chunk, chunk):
            terms = x[start:start + chunk]
            if len(terms):
                self._mine(x.dtype)[:len(terms)].copy_(terms)
            rows = self._met(x, "all-reduce")
            if len(terms):
                self._sum_piece(rows, len(terms), chunk, reduction)
            if before is not None:
                _copy_pieces(rows[:, chunk:], before)
            before = out[start:start + chunk]
        return out

    def _sum_piece(self, rows: Tensor, length: int, chunk: int, reduction: str) -> None:
        """This rank's piece of the sum of chunks of `length` goes to its row of the next round, behind the terms."""
        each = _even(length, self._ranks, rows.element_size())
        terms = _piece(rows[:, :length], self._position, each)
        if terms.shape[1]:
            _reduce(terms, reduction, self._mine(rows.dtype)[chunk:chunk + terms.shape[1]])

    def _mine(self, dtype: torch.dtype) -> Tensor:
        """This rank's row, to be written in this round."""
        return self._typed(dtype)[self._memory.round][self._position]

    def _met(self, x: Tensor, kind: str) -> Tensor:
        """All ranks' rows, once they are written."""
        typed = self._typed(x.dtype)
        return typed[self._memory.meet(kind, x.nbytes)]

    def _typed(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = self._rows.get(dtype)
        if rows is None:
            even, odd = self._memory.rows
            rows = self._rows[dtype] = even.view(dtype), odd.view(dtype)
        return rows


def _row_bytes(ranks: int) -> int:
    """A chunk of terms, and this rank's piece of the sum of another."""
    return -(-(CHUNK + CHUNK // ranks + _LINE) // mmap.PAGESIZE) * mmap.PAGESIZE


def _even(length: int, ranks: int, item: int) -> int:
    """How many elements of `length` each rank sums; the last ones may have fewer, or none."""
    line = max(1, _LINE // item)
    return -(-length // ranks // line) * line


def _piece(rows: Tensor, piece: int, length: int) -> Tensor:
    return rows[..., piece * length:(piece + 1) * length]


def _copy_pieces(pieces: Tensor, out: Tensor) -> None:
    ranks = len(pieces)
    each = _even(len(out), ranks, out.element_size())
    if ranks * each == len(out):
        out.view(ranks, each).copy_(pieces[:, :each])
        return
    for rank, part in enumerate(out.split(each)):
        part.copy_(pieces[rank, :len(part)])


def _reduce(terms: Tensor, reduction: str, out: Tensor) -> None:
    """The ranks' terms, stacked, into `out`, in their order."""
    if reduction != "sum":
        out.copy_(reduce_terms(terms.unbind(0), reduction))
        return
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)

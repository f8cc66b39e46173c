"""Collectives of the ranks of one host, through memory that they share: nothing is sent, and no thread is woken to
receive.

1. Collectives (`SameHost`). Sums are taken in the order of the ranks, whatever their length.

    all-gather          write mine; meet; read all
    reduce-scatter      write mine; meet; sum all ranks' terms of my piece
    all-reduce          long: as a reduce-scatter, then write the piece; meet; read all pieces. In chunks: the terms
                        of the next chunk are written and met for together with the pieces of the one before. Short:
                        write mine; meet; sum all terms
    all-to-all          write mine; meet; read the pieces for me

2. Memory (`HostMemory`), a file that all ranks of the group map.

    page 0          a nonce, the semaphores of the barrier, the collective that each rank has come for
    rows            two for each rank, written in turn: a round is to write one's row, to meet, to read the others'
                    rows

A row is written again two rounds later. By then all ranks have met once more, and a rank meets only after it has
read: no rank waits for a notice that a row was read.

3. The barrier uses POSIX semaphores that processes share. Each rank but the last takes a ticket, and sleeps on a
   semaphore of its own. The rank that finds no ticket is the last: it puts the tickets back, and wakes the others. So
   every rank but the last sleeps once, which counts where ranks outnumber cores.

4. Ended processes. The kernel releases a process's lock on the file when the process ends; waiting ranks check these
   locks once a second. An ended rank that had come to the meeting is not missed: the last rank may have woken it
   before the others, and it may have had nothing more to do.

Example: an all-reduce of 64 KiB by 8 ranks on 2 cores takes 0.7 ms, by Gloo 6.0 ms (measured: benchmarks/README.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...redistribution import CollectiveKind
from ..local.shards import reduce_terms

__all__ = ["HostMemory", "SameHost", "group_bytes", "sharing"]


_FOLDER, _PREFIX = "/dev/shm", "shardwright-"
_MESSAGE = 64  # bytes with which a rank tells the others its file
_PAGE = mmap.PAGESIZE
# Offsets in page 0. A semaphore takes 32 bytes at most (glibc and musl, 64-bit). They are apart, as ranks write them
# by turns.
_LINE = 64
_NONCE, _TICKETS, _OWN = slice(0, 16), _LINE, 2 * _LINE
_NUMBERS = {kind: number for number, kind in enumerate(CollectiveKind)}
_LOOK = 1.0  # seconds between two looks for ranks that have died
_ROUND, _ROUNDS = 1 << 50, 1 << 12  # a message holds the meeting's number, modulo _ROUNDS


def sharing() -> bool:
    """True where ranks of one host may share memory: unless the environment has SHARDWRIGHT_SHARED_MEMORY=0."""
    return os.environ.get("SHARDWRIGHT_SHARED_MEMORY") != "0"


class HostMemory:
    """One rank's view of memory that all ranks of a group share; made by `of`.

    Attributes:
        rows: bytes, (2, ranks, `row_bytes`): the rows of the even and of the odd rounds.
        round: 0 or 1, the rows to be written next.
    """

    def __init__(self, file: int, ranks: int, position: int, row_bytes: int, timeout: timedelta) -> None:
        self._ranks, self._position, self._timeout = ranks, position, timeout.total_seconds()
        self._file, head = file, _head(ranks)
        self._memory = mmap.mmap(file, head + 2 * ranks * row_bytes)
        with torch.inference_mode(False):
            self.rows = (
                torch.frombuffer(self._memory, dtype=torch.uint8, offset=head).view(ranks, 2, row_bytes).transpose(0, 1)
            )
        self.round, self._broken, self._meetings = 0, False, 0
        weakref.finalize(self, os.close, file)  # releases the lock, too
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._tickets = ctypes.c_void_p(start + _TICKETS)
        own = [ctypes.c_void_p(start + _OWN + k * _LINE) for k in range(ranks)]
        self._mine, self._other_slots = own[position], [s for k, s in enumerate(own) if k != position]
        marks = _OWN + ranks * _LINE
        self._marks = memoryview(self._memory)[marks : marks + 2 * ranks * 8].cast("q")

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup,
        ranks: int,
        position: int,
        row_bytes: int,
        timeout: timedelta,
        wanted: bool = True,
    ) -> HostMemory | None:
        """Memory for a group whose ranks are all on one host. None on all ranks where they are not, where one of them
        does not want it, or where the host has no such memory left. All ranks of the group call this.

        Args:
            group: the process group.
            ranks: the number of its ranks.
            position: of this rank among them.
            row_bytes: of a row, whole pages.
            timeout: for which a rank waits for others.
            wanted: False where this rank does not want it.
        """
        made, file = None, None
        if wanted and position == 0 and _calls is not None:
            with contextlib.suppress(OSError):
                made = _made(_head(ranks) + 2 * ranks * row_bytes, ranks)
        try:
            broadcast = _all(group, ranks, b"" if made is None else made[1] + os.path.basename(made[2]).encode())[0]
            if wanted:
                file = made[0] if made else _opened(broadcast)
            if file is not None and not _reserved(file, ranks, position, row_bytes):
                os.close(file)
                file = None
            everywhere = all(_all(group, ranks, b"" if file is None else b"here"))
        finally:
            if made:
                os.unlink(made[2])
        if everywhere:
            assert file is not None
            return cls(file, ranks, position, row_bytes, timeout)
        if file is not None:
            os.close(file)
        return None

    def meet(self, kind: CollectiveKind, nbytes: int) -> int:
        """Wait for all ranks; return the number of the round whose rows they have written.

        Args:
            kind, nbytes: of the collective that the ranks come for, the same on all.

        Raises:
            RuntimeError: a rank has ended, does not come, or comes for another collective.
        """
        if self._broken:
            raise RuntimeError("a collective of these ranks has failed before, and they can have no other")
        self._broken, k, self._meetings = True, self.round, (self._meetings + 1) % _ROUNDS
        marks, at, what = (
            self._marks,
            k * self._ranks,
            self._meetings * _ROUND + nbytes * len(_NUMBERS) + _NUMBERS[kind],
        )
        marks[at + self._position] = what
        assert _calls is not None
        if _calls.sem_trywait(self._tickets):  # no ticket is left: this rank is the last
            for _ in self._other_slots:
                _calls.sem_post(self._tickets)
            for other in self._other_slots:
                _calls.sem_post(other)
        else:
            self._sleep()
        for position in range(self._ranks):
            if marks[at + position] != what:
                raise RuntimeError(
                    f"ranks come for different collectives: of {self._ranks} number {self._position} for "
                    f"{_spelled(what)}, number {position} for {_spelled(marks[at + position])}; do they run "
                    "the same program?"
                )
        self._broken, self.round = False, 1 - k
        return k

    def _sleep(self) -> None:
        """Wait until the last rank has come."""
        begun = time.monotonic()
        while not _woken(self._mine, _LOOK):
            if time.monotonic() - begun > self._timeout:
                raise RuntimeError(
                    f"the {self._ranks} ranks of a collective have not all come for {self._timeout:.0f} s"
                )
            ended = next((k for k in range(self._ranks) if not self._lives(k) and not self._came(k)), None)
            if ended is not None:
                raise RuntimeError(
                    f"the process of number {ended} of the {self._ranks} ranks of a collective has ended"
                )

    def _came(self, position: int) -> bool:
        """True where a rank has come to this meeting."""
        return self._marks[self.round * self._ranks + position] // _ROUND == self._meetings

    def _lives(self, position: int) -> bool:
        if position == self._position:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, position)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, position)
        return False


def _all(group: dist.ProcessGroup, ranks: int, mine: bytes) -> list[bytes]:
    """The messages of all ranks, of `_MESSAGE` bytes at most."""
    with torch.device("cpu"):  # Gloo allocates on the default device
        row = torch.frombuffer(bytearray(mine.ljust(_MESSAGE, b"\0")), dtype=torch.uint8)
        rows = [torch.empty(_MESSAGE, dtype=torch.uint8) for _ in range(ranks)]
        dist.all_gather(rows, row, group=group)
    return [bytes(row.numpy()).rstrip(b"\0") for row in rows]


def _spelled(what: int) -> str:
    what %= _ROUND
    nbytes, number = divmod(what, len(_NUMBERS))
    return f"an {list(_NUMBERS)[number].replace('_', '-')} of {nbytes} bytes"


def _head(ranks: int) -> int:
    return -(-(_OWN + ranks * (_LINE + 2 * 8)) // _PAGE) * _PAGE


def _made(nbytes: int, ranks: int) -> tuple[int, bytes, str]:
    """A new file with its semaphores: (descriptor, nonce, path). Only this user may open it."""
    file, path = tempfile.mkstemp(prefix=_PREFIX, dir=_FOLDER)
    try:
        os.ftruncate(file, nbytes)
        os.posix_fallocate(file, 0, _head(ranks))  # a write to missing memory would end the process
        nonce = secrets.token_hex(8).encode()
        with mmap.mmap(file, _head(ranks)) as head:
            head[_NONCE] = nonce
            start = ctypes.c_char.from_buffer(head)
            for offset, value in ((_TICKETS, ranks - 1), *((_OWN + k * _LINE, 0) for k in range(ranks))):
                assert _calls is not None
                _calls.sem_init(ctypes.c_void_p(ctypes.addressof(start) + offset), 1, value)
            del start
    except OSError:
        os.close(file)
        os.unlink(path)
        raise
    return file, nonce, path


def _opened(message: bytes) -> int | None:
    """The file of another rank, where this host has it; else None.

    Args:
        message: the nonce, and the file's name.
    """
    nonce, name = message[:16], message[16:].decode("ascii", "replace")
    if not re.fullmatch(_PREFIX + "[a-z0-9_]+", name) or _calls is None:
        return None
    try:
        file = os.open(os.path.join(_FOLDER, name), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    if os.pread(file, 16, 0) == nonce and os.fstat(file).st_uid == os.geteuid():
        return file
    os.close(file)
    return None


def _reserved(file: int, ranks: int, position: int, row_bytes: int) -> bool:
    """True where there is memory for this rank's rows. The rank allocates them itself, so that they are near to it."""
    try:
        os.posix_fallocate(file, _head(ranks) + 2 * position * row_bytes, 2 * row_bytes)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, position)
    except OSError:
        return False
    return True


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _woken(semaphore: ctypes.c_void_p, seconds: float) -> bool:
    """True where the semaphore was posted within `seconds` of sleep. A signal ends the sleep, and is handled when this
    returns."""
    until = time.clock_gettime(_CLOCK) + seconds
    at = _Timespec(int(until), int(until % 1 * 1e9))
    return _wait(semaphore, ctypes.byref(at)) == 0


def _on_the_clock(sem_clockwait: Callable[..., int]) -> Callable[..., int]:
    return lambda semaphore, until: sem_clockwait(semaphore, time.CLOCK_MONOTONIC, until)


# PyDLL holds the interpreter's lock, for calls that return at once; CDLL releases it, for calls that sleep.
_calls = (
    ctypes.PyDLL(None)
    if sys.platform.startswith("linux") and sys.maxsize > 1 << 32 and os.path.isdir(_FOLDER)
    else None
)
if _calls is not None:
    _CLOCK = time.CLOCK_REALTIME
    _wait: Callable[..., int] = ctypes.CDLL(None).sem_timedwait
    with contextlib.suppress(AttributeError):  # a clock that is never set back, if the C library has it
        _CLOCK, _wait = time.CLOCK_MONOTONIC, _on_the_clock(ctypes.CDLL(None).sem_clockwait)


# Bytes of a rank's tensor that travel in one round. Larger rounds are up to 40 % faster, but memory is twice this for
# each rank and group (measured: benchmarks/README.md).
CHUNK = 1 << 20
# Bytes of all ranks' terms up to which every rank sums all of them, in one round instead of two.
SHORT = 1 << 20


class SameHost:
    """One rank's collectives of a group, through shared memory; made by `of`. All take flat, contiguous tensors of one
    dtype and length on all ranks, write to none of them, and record no gradient.

    Args:
        memory: of the group, with rows of `row_bytes`.
        ranks: the number of ranks.
        position: of this rank among them.
    """

    def __init__(self, memory: HostMemory, ranks: int, position: int) -> None:
        self._memory, self._ranks, self._position = memory, ranks, position
        self._rows: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, ranks: int, position: int, timeout: timedelta, wanted: bool = True
    ) -> SameHost | None:
        """The collectives of a group whose ranks are all on one host that has memory for them, and want it; else None,
        on all ranks. All ranks of the group call this.

        Args:
            group: the process group.
            ranks: the number of its ranks.
            position: of this rank among them.
            timeout: for which a rank waits for others in a collective.
            wanted: False where this rank does not want it.
        """
        memory = HostMemory.of(group, ranks, position, _row_bytes(ranks), timeout, wanted)
        return None if memory is None else cls(memory, ranks, position)

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, one after the other."""
        out, chunk = x.new_empty(self._ranks, len(x)), CHUNK // x.element_size()
        for start in range(0, len(x), chunk):
            part = x[start : start + chunk]
            self._mine(x.dtype)[: len(part)].copy_(part)
            out[:, start : start + chunk].copy_(self._met(x, CollectiveKind.ALL_GATHER)[:, : len(part)])
        return out.view(-1)

    def exchange(self, x: Tensor, pieces: int = 0, sources: Sequence[tuple[int, int]] = ()) -> Tensor:
        """An all-to-all.

        Args:
            x: the pieces.
            pieces: the number of equal pieces that `x` is made of, one after the other; the same on every rank. 0:
                one for each rank.
            sources: (rank, index of its piece) of each piece that this rank receives; empty: its own piece of every
                rank.
        """
        pieces = pieces or self._ranks
        sent = x.view(pieces, len(x) // pieces)
        out = x.new_empty(len(sources) or self._ranks, sent.shape[1])
        chunk = CHUNK // pieces // x.element_size()
        for start in range(0, sent.shape[1], chunk):
            part = sent[:, start : start + chunk]
            length = part.shape[1]
            self._mine(x.dtype)[: part.numel()].view(part.shape).copy_(part)
            rows = self._met(x, CollectiveKind.ALL_TO_ALL)
            if not sources:
                out[:, start : start + length].copy_(_piece(rows, self._position, length))
            for received, (rank, piece) in zip(out, sources):
                received[start : start + length].copy_(_piece(rows[rank], piece, length))
        return out.view(-1)

    def reduce_scatter(self, x: Tensor, reduction: str) -> Tensor:
        """This rank's piece of the sum, max or min of all ranks' `x`."""
        sent = x.view(self._ranks, len(x) // self._ranks)
        out, chunk = x.new_empty(sent.shape[1]), CHUNK // self._ranks // x.element_size()
        for start in range(0, len(out), chunk):
            part = sent[:, start : start + chunk]
            length = part.shape[1]
            self._mine(x.dtype)[: part.numel()].view(part.shape).copy_(part)
            terms = _piece(self._met(x, CollectiveKind.REDUCE_SCATTER), self._position, length)
            _reduce(terms, reduction, out[start : start + length])
        return out

    def all_reduce(self, x: Tensor, reduction: str, out: Tensor | None = None) -> Tensor:
        """The sum, max or min of all ranks' `x`.

        Args:
            x: this rank's term.
            reduction: sum, max or min.
            out: the tensor to write to, which may be `x`; None: a new tensor.
        """
        out = torch.empty_like(x) if out is None else out
        if x.nbytes * self._ranks <= min(SHORT, CHUNK * self._ranks):
            self._mine(x.dtype)[: len(x)].copy_(x)
            _reduce(self._met(x, CollectiveKind.ALL_REDUCE)[:, : len(x)], reduction, out)
            return out
        chunk = CHUNK // x.element_size()
        before: Tensor | None = None  # the chunk whose pieces have been summed
        for start in range(0, len(x) + chunk, chunk):
            terms = x[start : start + chunk]
            if len(terms):
                self._mine(x.dtype)[: len(terms)].copy_(terms)
            rows = self._met(x, CollectiveKind.ALL_REDUCE)
            if len(terms):
                self._sum_piece(rows, len(terms), chunk, reduction)
            if before is not None:
                _copy_pieces(rows[:, chunk:], before)
            before = out[start : start + chunk]
        return out

    def _sum_piece(self, rows: Tensor, length: int, chunk: int, reduction: str) -> None:
        """Write this rank's piece of the sum of chunks of `length` to its row of the next round, behind the terms."""
        each = _even(length, self._ranks, rows.element_size())
        terms = _piece(rows[:, :length], self._position, each)
        if terms.shape[1]:
            _reduce(terms, reduction, self._mine(rows.dtype)[chunk : chunk + terms.shape[1]])

    def _mine(self, dtype: torch.dtype) -> Tensor:
        """This rank's row, to be written in this round."""
        return self._typed(dtype)[self._memory.round][self._position]

    def _met(self, x: Tensor, kind: CollectiveKind) -> Tensor:
        """The rows of all ranks, once they are written."""
        typed = self._typed(x.dtype)
        return typed[self._memory.meet(kind, x.nbytes)]

    def _typed(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = self._rows.get(dtype)
        if rows is None:
            even, odd = self._memory.rows
            rows = self._rows[dtype] = even.view(dtype), odd.view(dtype)
        return rows


def group_bytes(ranks: int) -> int:
    """Bytes of shared memory of a group of `ranks` ranks."""
    return _head(ranks) + 2 * ranks * _row_bytes(ranks)


def _row_bytes(ranks: int) -> int:
    """Bytes for a chunk of terms, and for this rank's piece of the sum of another chunk."""
    return -(-(CHUNK + CHUNK // ranks + _LINE) // mmap.PAGESIZE) * mmap.PAGESIZE


def _even(length: int, ranks: int, item: int) -> int:
    """The number of elements of `length` that each rank sums; the last ranks may have fewer, or none. A multiple of a
    cache line, so that no two ranks write into one line."""
    line = max(1, _LINE // item)
    return -(-length // ranks // line) * line


def _piece(rows: Tensor, piece: int, length: int) -> Tensor:
    return rows[..., piece * length : (piece + 1) * length]


def _copy_pieces(pieces: Tensor, out: Tensor) -> None:
    ranks = len(pieces)
    each = _even(len(out), ranks, out.element_size())
    if ranks * each == len(out):
        out.view(ranks, each).copy_(pieces[:, :each])
        return
    for rank, part in enumerate(out.split(each)):
        part.copy_(pieces[rank, : len(part)])


def _reduce(terms: Tensor, reduction: str, out: Tensor) -> None:
    """Reduce the ranks' stacked terms into `out`, in their order."""
    if reduction != "sum":
        out.copy_(reduce_terms(terms.unbind(0), reduction))
        return
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)

"""Messages between ranks about a checkpoint, over a process group of their own.

The separate group keeps a save in the background from getting between the collectives of the training. Ranks of one
host exchange the messages through shared memory, which takes a tenth of the time.

A step of a save or a load either succeeds on all ranks or on none: each step ends in `agreed`, which raises the same
error on all ranks.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import CheckpointError, ShardwrightError
from ...process import current
from ...redistribution.collective_kinds import CollectiveKind
from .shared_memory import HostMemory, sharing

__all__ = ["ProcessRanks", "SingleRank", "ranks_of_now"]

#: Longer than the timeout of a step's collective: a rank waits for others that write.
_TIMEOUT = timedelta(minutes=60)

#: Bytes of a message through shared memory, and the bytes in it that hold its length; longer messages use Gloo.
_ROW, _LENGTH = 256 << 10, 8


class SingleRank:
    """One process, which agrees with itself alone."""

    rank, world = 0, 1

    def exchanged(self, mine: Any) -> list[Any]:
        """The messages of all ranks, by rank."""
        return [mine]

    def gathered(self, mine: Any) -> list[Any]:
        """The messages of all ranks, by rank, on rank 0; an empty list on other ranks."""
        return [mine]

    def from_first(self, mine: Any) -> Any:
        """The message of rank 0."""
        return mine

    def remote(self, rank: int) -> bool:
        """True where `rank` is on another host than rank 0."""
        return False

    def agreed(self, error: Exception | None, mine: Any = None) -> list[Any]:
        """The messages of all ranks, by rank, unless one of the ranks has failed.

        Args:
            error: the failure of this rank; None where it succeeded.
            mine: the message of this rank.

        Raises:
            Exception: on all ranks, that of the first rank that has failed.
        """
        if self.world == 1 and error is not None and not isinstance(error, OSError):
            raise error
        said = self.exchanged((None if error is None else portable(error), mine))
        failed = [(rank, e) for rank, (e, _) in enumerate(said) if e is not None]
        if failed:
            rank, first = failed[0]
            if len(failed) < self.world and isinstance(first, ShardwrightError):
                first = type(first)(
                    f"{first.message} (on rank {rank})",
                    operator=first.operator,
                    source=first.source,
                    strategy=first.strategy,
                    legal=first.legal,
                )
            raise first
        return [held for _, held in said]


class ProcessRanks(SingleRank):
    """The ranks of the default process group."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.of = dist.group.WORLD
        self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._memory = HostMemory.of(self.group, self.world, self.rank, _ROW, _TIMEOUT, sharing())
        self._rows: tuple[HostMemory | None] | None = None
        self._hosts = self.exchanged(_host())

    def exchanged(self, mine: Any) -> list[Any]:
        if (words := self._words(mine)) is not None:
            return [pickle.loads(word) for word in words]
        out: list[Any] = [None] * self.world
        self._talked(dist.all_gather_object, out, mine, group=self.group)
        return out

    def gathered(self, mine: Any) -> list[Any]:
        if (words := self._words(mine)) is not None:
            return [pickle.loads(word) for word in words] if self.rank == 0 else []
        out: list[Any] | None = [None] * self.world if self.rank == 0 else None
        self._talked(dist.gather_object, mine, out, group=self.group)
        return out or []

    def from_first(self, mine: Any) -> Any:
        if (words := self._words(mine if self.rank == 0 else None)) is not None:
            return mine if self.rank == 0 else pickle.loads(words[0])
        held = [mine]
        self._talked(dist.broadcast_object_list, held, src=0, group=self.group)
        return held[0]

    def _words(self, mine: Any) -> list[bytes] | None:
        """The messages of all ranks, pickled, through shared memory. None on all ranks where there is no such
        memory, or where one message does not fit."""
        if self._memory is None:
            return None
        word = pickle.dumps(mine)
        row = self._memory.rows[self._memory.round, self.rank].numpy()
        row[:_LENGTH] = np.frombuffer(len(word).to_bytes(_LENGTH, "little"), np.uint8)
        if len(word) <= _ROW - _LENGTH:
            row[_LENGTH : _LENGTH + len(word)] = np.frombuffer(word, np.uint8)
        rows = self._memory.rows[self._talked(self._memory.meet, CollectiveKind.ALL_GATHER, 0)].numpy()
        lengths = [int.from_bytes(row[:_LENGTH].tobytes(), "little") for row in rows]
        if max(lengths) > _ROW - _LENGTH:
            return None
        return [row[_LENGTH : _LENGTH + length].tobytes() for row, length in zip(rows, lengths)]

    def remote(self, rank: int) -> bool:
        return self._hosts[rank] != self._hosts[0]

    def send(self, tensor: Tensor, rank: int = 0) -> None:
        """Send bytes in host memory to `rank`."""
        self._talked(dist.send, tensor, dst=rank, group=self.group)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill host memory with the bytes that `rank` sends."""
        self._talked(dist.recv, tensor, src=rank, group=self.group)

    def rows(self) -> HostMemory | None:
        """Memory that all ranks share for long messages, with rows of `row_bytes`; None on all ranks where there is
        none. Every rank calls this at the same time."""
        if self._rows is None:
            made = HostMemory.of(self.group, self.world, self.rank, self.row_bytes, _TIMEOUT, sharing())
            self._rows = (made,)
        return self._rows[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row for long messages."""
        return max(_ROW, min(4 << 20, (16 << 20) // self.world // _ROW * _ROW))

    def meet(self, memory: HostMemory) -> int:
        """Wait for all ranks; return the number of the round whose rows they have written."""
        return self._talked(memory.meet, CollectiveKind.ALL_TO_ALL, 0)

    @staticmethod
    def _talked(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with torch.device("cpu"):  # Gloo allocates on the default device
                return collective(*args, **kwargs)
        except RuntimeError as error:
            raise CheckpointError(
                f"a rank does not answer: {error}", legal="all ranks save and load together"
            ) from error


_ranks: dict[str, ProcessRanks] = {}


def ranks_of_now(purpose: str = "saves and loads") -> SingleRank:
    """The ranks that save and load together: this process, or all of the process group. Every rank calls this at the
    same time.

    Args:
        purpose: the kind of exchange; exchanges that run at the same time in different threads need different
            purposes, and get groups of their own.
    """
    if not current().processes or dist.get_world_size() == 1:
        return SingleRank()
    if purpose not in _ranks or _ranks[purpose].of is not dist.group.WORLD:
        _ranks[purpose] = ProcessRanks()
    return _ranks[purpose]


def _host() -> str:
    """An identifier of the kernel that this process runs on."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def portable(error: Exception) -> Exception:
    """A copy of an error that can be pickled and sent to other ranks."""
    if isinstance(error, ShardwrightError):
        strategy = error.strategy if error.strategy is None or isinstance(error.strategy, str) else repr(error.strategy)
        return type(error)(
            error.message, operator=error.operator, source=error.source, strategy=strategy, legal=error.legal
        )
    if isinstance(error, OSError):
        return CheckpointError(error.strerror or str(error), source=error.filename and str(error.filename))
    return RuntimeError(f"{type(error).__name__}: {error}")

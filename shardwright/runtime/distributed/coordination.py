"""What ranks tell one another of a checkpoint, over a group of their own: a save in the background does not get between
the collectives of the training. Ranks of one host do so through memory that they share, which takes a tenth of the
time.

Whatever one rank cannot do, none has done: each step of a save or a load ends in `Ranks.agreed`, which raises the same
error on all.
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
from .shared_memory import HostMemory, sharing

__all__ = ["ProcessRanks", "SingleRank", "ranks_of_now"]

#: A rank waits for others that write: longer than for a collective of a step.
_TIMEOUT = timedelta(minutes=60)

#: Bytes that a rank says at a time through memory, and those that say how many they are: more goes another way.
_ROW, _LENGTH = 256 << 10, 8


class SingleRank:
    """One process: all there is to agree is with itself."""

    rank, world = 0, 1

    def exchanged(self, mine: Any) -> list[Any]:
        """What each rank says, by rank."""
        return [mine]

    def gathered(self, mine: Any) -> list[Any]:
        """What each rank says, by rank, on rank 0; nothing on others."""
        return [mine]

    def from_first(self, mine: Any) -> Any:
        """What rank 0 says."""
        return mine

    def remote(self, rank: int) -> bool:
        """Whether a rank is on another host than rank 0."""
        return False

    def agreed(self, error: Exception | None, mine: Any = None) -> list[Any]:
        """What each rank says, unless one of them has failed.

        Raises:
            Exception: that of the first rank that has failed, on all of them.
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
        """What each rank says, through memory; None on all of them where there is none, or what one says does not
        fit."""
        if self._memory is None:
            return None
        word = pickle.dumps(mine)
        row = self._memory.rows[self._memory.round, self.rank].numpy()
        row[:_LENGTH] = np.frombuffer(len(word).to_bytes(_LENGTH, "little"), np.uint8)
        if len(word) <= _ROW - _LENGTH:
            row[_LENGTH : _LENGTH + len(word)] = np.frombuffer(word, np.uint8)
        rows = self._memory.rows[self._talked(self._memory.meet, "all-gather", 0)].numpy()
        lengths = [int.from_bytes(row[:_LENGTH].tobytes(), "little") for row in rows]
        if max(lengths) > _ROW - _LENGTH:
            return None
        return [row[_LENGTH : _LENGTH + length].tobytes() for row, length in zip(rows, lengths)]

    def remote(self, rank: int) -> bool:
        return self._hosts[rank] != self._hosts[0]

    def send(self, tensor: Tensor) -> None:
        """Send bytes in host memory to rank 0."""
        self._talked(dist.send, tensor, dst=0, group=self.group)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill host memory with the bytes that a rank sends."""
        self._talked(dist.recv, tensor, src=rank, group=self.group)

    def rows(self) -> HostMemory | None:
        """Memory that all ranks share for what is long, with rows of `row_bytes`; None on all of them where there is
        none. Every rank asks for it at the same time."""
        if self._rows is None:
            made = HostMemory.of(self.group, self.world, self.rank, self.row_bytes, _TIMEOUT, sharing())
            self._rows = (made,)
        return self._rows[0]

    @property
    def row_bytes(self) -> int:
        """Of the rows for what is long."""
        return max(_ROW, min(4 << 20, (16 << 20) // self.world // _ROW * _ROW))

    def meet(self, memory: HostMemory) -> int:
        """Wait for all ranks; the round whose rows they have written."""
        return self._talked(memory.meet, "all-to-all", 0)

    @staticmethod
    def _talked(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with torch.device("cpu"):  # Gloo's own tensors, whatever the default device is
                return collective(*args, **kwargs)
        except RuntimeError as error:
            raise CheckpointError(
                f"a rank does not answer: {error}", legal="all ranks save and load together"
            ) from error


_ranks: dict[str, ProcessRanks] = {}


def ranks_of_now(purpose: str = "saves and loads") -> SingleRank:
    """The ranks that save and load together: this process, or all of the process group. Every rank asks at the same
    time.

    Args:
        purpose: what they speak of: what goes on at the same time, in different threads, has ranks of its own.
    """
    if not current().processes or dist.get_world_size() == 1:
        return SingleRank()
    if purpose not in _ranks or _ranks[purpose].of is not dist.group.WORLD:
        _ranks[purpose] = ProcessRanks()
    return _ranks[purpose]


def _host() -> str:
    """What tells the kernel that this process runs on from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def portable(error: Exception) -> Exception:
    """An error as it can be sent to other ranks."""
    if isinstance(error, ShardwrightError):
        strategy = error.strategy if error.strategy is None or isinstance(error.strategy, str) else repr(error.strategy)
        return type(error)(
            error.message, operator=error.operator, source=error.source, strategy=strategy, legal=error.legal
        )
    if isinstance(error, OSError):
        return CheckpointError(error.strerror or str(error), source=error.filename and str(error.filename))
    return RuntimeError(f"{type(error).__name__}: {error}")

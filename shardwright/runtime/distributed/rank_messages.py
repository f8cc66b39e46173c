"""Messages between ranks: values as JSON (`json_values`), over a process group. Nothing that arrives is run.

1. `exchanged`, `from_first`: a message of each rank for all, or of rank 0 for all, over any process group.

2. `ProcessRanks`: messages about a checkpoint, over a process group of their own. The separate group keeps a save in
   the background from getting between the collectives of the training. Ranks of one host exchange the messages through
   shared memory, which takes a tenth of the time. A step of a save or a load either succeeds on all ranks or on none:
   each step ends in `agreed`, which raises the same error on all ranks.

3. Errors travel as their class's name and text (`error_as_json`, `error_of`): an error of the package and of Python
   itself arrives as it is, any other one as a RuntimeError with its text.

Example: on 2 ranks ``exchanged({"step": rank})`` returns ``[{"step": 0}, {"step": 1}]`` on both. A `KeyError` arrives
as a KeyError; an error ``HfError("x")`` of another library arrives as ``RuntimeError("HfError: x")``.
"""

from __future__ import annotations

import builtins
import contextlib
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ... import errors
from ...errors import CheckpointError, ShardwrightError
from ...json_files.json_reader import JsonObject
from ...json_files.json_values import dumps, loads
from ...process_runtime import current
from ...redistribution.collective_kinds import CollectiveKind
from .shared_memory import HostMemory, sharing

__all__ = ["ProcessRanks", "SingleRank", "error_as_json", "error_of", "exchanged", "from_first", "ranks_of_now"]

#: Longer than the timeout of a step's collective: a rank waits for others that write.
_TIMEOUT = timedelta(minutes=60)

#: Bytes of a message through shared memory, and the bytes in it that hold its length; longer messages use Gloo.
_ROW, _LENGTH = 256 << 10, 8


P = ParamSpec("P")
T = TypeVar("T")


# -- any process group


def exchanged(mine: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The messages of all ranks of a group, by rank; None: of the default group. Every rank calls this.

    Args:
        mine: the message of this rank, of values that `json_values` takes.
    """
    return [loads(text) for text in _gathered(dumps(mine), group)]


def from_first(mine: object, group: dist.ProcessGroup | None = None) -> Any:
    """The message of rank 0 of a group, on every rank. Every rank calls this; messages of other ranks are not sent."""
    text = dumps(mine) if dist.get_rank(group) == 0 else b""
    device = _device_of(group)
    length = torch.tensor(len(text), device=device)
    dist.broadcast(length, group=group, group_src=0)
    row = _row(text, int(length), device)
    dist.broadcast(row, group=group, group_src=0)
    return loads(bytes(row.cpu().numpy()))


def _gathered(text: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """The bytes of all ranks, by rank."""
    device, world = _device_of(group), dist.get_world_size(group)
    lengths = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor(len(text), device=device), group=group)
    sizes = torch.stack(lengths).tolist()
    rows = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(rows, _row(text, max(sizes), device), group=group)
    return [bytes(row[:size].cpu().numpy()) for row, size in zip(rows, sizes)]


def _row(text: bytes, length: int, device: torch.device) -> Tensor:
    """Bytes as a tensor of `length` elements."""
    row = torch.zeros(length, dtype=torch.uint8, device="cpu")
    row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else row[:0]
    return row.to(device)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The device whose tensors a group sends."""
    return torch.device("cpu") if dist.get_backend(group) in ("gloo", "mpi") else current().device


# -- errors


def error_as_json(error: Exception) -> JsonObject:
    """An error as values that `json_values` takes. An error of a class that users do not know is one of its base."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    known = next((kind for kind in kinds if kind in errors.__all__), kinds[0])
    encoded: JsonObject = {"kind": known, "message": str(error)}
    if isinstance(error, ShardwrightError):
        strategy = error.strategy if error.strategy is None or isinstance(error.strategy, str) else repr(error.strategy)
        encoded |= {"message": error.message, "operator": error.operator, "source": error.source, "strategy": strategy}
        encoded["legal"] = error.legal
    return encoded


def error_of(encoded: JsonObject) -> Exception:
    """The error of `error_as_json`: of the same class where it is one of the package, or one of Python's that is made
    from a text; else a RuntimeError with its class's name and text."""
    name, message = encoded["kind"], encoded["message"]
    kind = getattr(errors, name, None) if name in errors.__all__ else getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, ShardwrightError):
        more = {key: encoded.get(key) for key in ("operator", "source", "strategy", "legal")}
        return kind(message, **more)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # it is not made from a text
            return kind(message)
    return RuntimeError(f"{name}: {message}")


# -- ranks that save and load


class SingleRank:
    """One process, which agrees with itself alone."""

    rank, world = 0, 1

    def exchanged(self, mine: object) -> list[Any]:
        """The messages of all ranks, by rank."""
        return [mine]

    def gathered(self, mine: object) -> list[Any]:
        """The messages of all ranks, by rank, on rank 0; an empty list on other ranks."""
        return [mine]

    def from_first(self, mine: object) -> Any:
        """The message of rank 0."""
        return mine

    def remote(self, rank: int) -> bool:
        """True where `rank` is on another host than rank 0."""
        return False

    def agreed(self, error: Exception | None, mine: object = None) -> list[Any]:
        """The messages of all ranks, by rank, unless one of the ranks has failed.

        Args:
            error: the failure of this rank; None where it succeeded.
            mine: the message of this rank.

        Raises:
            Exception: on all ranks, that of the first rank that has failed.
        """
        if self.world == 1 and error is not None and not isinstance(error, OSError):
            raise error
        answers = self.exchanged((None if error is None else error_as_json(_portable(error)), mine))
        failed = [(rank, e) for rank, (e, _) in enumerate(answers) if e is not None]
        if failed:
            rank, first = failed[0][0], error_of(failed[0][1])
            if len(failed) < self.world and isinstance(first, ShardwrightError):
                first = type(first)(
                    f"{first.message} (on rank {rank})",
                    operator=first.operator,
                    source=first.source,
                    strategy=first.strategy,
                    legal=first.legal,
                )
            raise first
        return [value for _, value in answers]


class ProcessRanks(SingleRank):
    """The ranks of the default process group."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.of = dist.group.WORLD
        self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._memory = HostMemory.of(self.group, self.world, self.rank, _ROW, _TIMEOUT, sharing())
        self._rows: tuple[HostMemory | None] | None = None
        self._hosts = self.exchanged(_host())

    def exchanged(self, mine: object) -> list[Any]:
        return [loads(text) for text in self._texts(dumps(mine))]

    def gathered(self, mine: object) -> list[Any]:
        texts = self._texts(dumps(mine))
        return [loads(text) for text in texts] if self.rank == 0 else []

    def from_first(self, mine: object) -> Any:
        return loads(self._texts(dumps(mine if self.rank == 0 else None))[0])

    def _texts(self, mine: bytes) -> list[bytes]:
        """The messages of all ranks: through shared memory, or over Gloo where there is none, or where one message does
        not fit."""
        if self._memory is not None:
            row = self._memory.rows[self._memory.round, self.rank].numpy()
            row[:_LENGTH] = np.frombuffer(len(mine).to_bytes(_LENGTH, "little"), np.uint8)
            if len(mine) <= _ROW - _LENGTH:
                row[_LENGTH : _LENGTH + len(mine)] = np.frombuffer(mine, np.uint8)
            rows = self._memory.rows[self._talked(self._memory.meet, CollectiveKind.ALL_GATHER, 0)].numpy()
            lengths = [int.from_bytes(row[:_LENGTH].tobytes(), "little") for row in rows]
            if max(lengths) <= _ROW - _LENGTH:
                return [row[_LENGTH : _LENGTH + length].tobytes() for row, length in zip(rows, lengths)]
        return self._talked(_gathered, mine, self.group)

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
    def _talked(collective: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
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


def _portable(error: Exception) -> Exception:
    """The error of a step of a save or a load as other ranks see it."""
    if isinstance(error, OSError):
        return CheckpointError(error.strerror or str(error), source=error.filename and str(error.filename))
    return error if isinstance(error, ShardwrightError) else RuntimeError(f"{type(error).__name__}: {error}")

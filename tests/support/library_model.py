"""A model of the point-to-point operations of NCCL and HCCL, on Gloo: what hangs there hangs here, and says where.

1. The first operation of two ranks in one direction on a group keeps back the host until the other rank has made its
   matching call. (The library makes the communicator, and connects the two.)
2. A send ends when its receive has begun.
3. Operations are executed in the order in which they were issued; those of one batch together. `order` says among
   which: "communicator", those of one group; "device", all of a rank, and its computations too: hardware gives no
   promise that one queue goes on while another waits. In this order an operation is done before the host goes on.
4. A wait does not keep back the host of a GPU. Here it does, because the host computes: `calls` notes it.

Collectives are not changed: all ranks of a group issue them in one order.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime import pipeline_p2p
from shardwright.torch_private import default_store

#: Plain functions of torch, which the model stands before.
SEND, RECEIVE, BATCH, BACKEND = dist.isend, dist.irecv, dist.batch_isend_irecv, dist.get_backend

#: The dtypes that NCCL moves.
KNOWN = {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
KNOWN |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}

#: The tag of the message by which a receive says that it has begun.
BEGUN = 1


class Hang(AssertionError):
    """An operation that does not end; the message says on which rank, in which call and at which line."""


class Operation(NamedTuple):
    kind: Literal["send", "recv"]
    tensor: Tensor
    peer: int
    group: dist.ProcessGroup

    def direction(self, rank: int) -> tuple[int, int]:
        return (rank, self.peer) if self.kind == "send" else (self.peer, rank)


class Batch:
    """Operations that were issued together; as `torch.distributed.Work`."""

    def __init__(self, model: LibraryModel, operations: list[Operation]) -> None:
        self.model, self.operations = model, operations
        self.done = threading.Event()

    def __str__(self) -> str:
        directions = [op.direction(self.model.rank) for op in self.operations]
        return ", ".join(f"{op.kind} {a} -> {b}" for op, (a, b) in zip(self.operations, directions))

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.model.calls.append(("wait", str(self)))
        if not self.done.wait(self.model.patience):
            raise Hang(self.model.place(f"the end of {self}"))

    def run(self) -> None:
        """Execute the operations, all at once; the tensors of sends were read when the batch was issued."""
        token, works = torch.zeros(1, dtype=torch.uint8), []
        for op in self.operations:
            if op.kind == "recv":
                works.append(SEND(token, op.peer, op.group, BEGUN))
                works.append(RECEIVE(op.tensor, op.peer, op.group))
        for op in self.operations:
            if op.kind == "send":
                RECEIVE(torch.empty_like(token), op.peer, op.group, BEGUN).wait()
                works.append(SEND(op.tensor, op.peer, op.group))
        for work in works:
            work.wait()
        self.done.set()


class LibraryModel:
    """The model on one rank.

    Attributes:
        calls: ("issue" or "wait", operations), in order; an operation issued by itself as "single".
    """

    def __init__(self, order: Literal["communicator", "device"], patience: float) -> None:
        self.order, self.patience, self.rank = order, patience, dist.get_rank()
        self.calls: list[tuple[str, str]] = []
        self.store = dist.PrefixStore("library", default_store())
        self.connected: set[tuple[str, tuple[int, int]]] = set()
        self.queues: dict[str, queue.SimpleQueue[Batch | None]] = {}

    def place(self, what: str) -> str:
        """The text of a hang: the operation, and the lines of the package that led there."""
        frames = [f for f in traceback.extract_stack() if f"{os.sep}shardwright{os.sep}" in f.filename]
        lines = [f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in frames[-4:]]
        return f"rank {self.rank}'s host waits for {what}, at {', '.join(lines) or 'a line of the test'}"

    def issue(self, operations: list[Operation]) -> Batch:
        unknown = {op.tensor.dtype for op in operations} - KNOWN
        if unknown:
            raise TypeError(f"the library does not know {unknown}")
        batch = Batch(self, [op._replace(tensor=op.tensor.clone()) if op.kind == "send" else op for op in operations])
        self._connect(batch)
        if self.order == "device":
            threading.Thread(target=batch.run, daemon=True).start()
            if not batch.done.wait(self.patience):
                raise Hang(self.place(f"the end of {batch}, which is in front of all that follows"))
        else:
            name = operations[0].group.group_name
            if name not in self.queues:
                self.queues[name] = queue.SimpleQueue()
                threading.Thread(target=self._serve, args=(self.queues[name],), daemon=True).start()
            self.queues[name].put(batch)
        return batch

    def _serve(self, batches: queue.SimpleQueue[Batch | None]) -> None:
        while (batch := batches.get()) is not None:
            batch.run()

    def _connect(self, batch: Batch) -> None:
        """Keep back the host at the first operation of two ranks."""
        until = time.monotonic() + self.patience
        keys = [(op.group.group_name, op.direction(self.rank)) for op in batch.operations]
        new = [key for key in dict.fromkeys(keys) if key not in self.connected]
        for key in new:
            self.store.add(repr(key), 1)
        for key in new:
            while self.store.add(repr(key), 0) < 2:
                if time.monotonic() > until:
                    raise Hang(self.place(f"the other call of the first {batch}"))
                time.sleep(0.002)
            self.connected.add(key)

    # -- instead of torch's functions --

    def send(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Batch:
        return self._single("send", tensor, dst, group)

    def receive(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Batch:
        return self._single("recv", tensor, src, group)

    def _single(self, kind: Any, tensor: Tensor, peer: int, group: Any) -> Batch:
        batch = self.issue([Operation(kind, tensor, peer, group or dist.group.WORLD)])
        self.calls.append(("single", str(batch)))
        return batch

    def batched(self, operations: list[dist.P2POp]) -> list[Batch]:
        kinds = {self.send: "send", self.receive: "recv"}
        batch = self.issue([Operation(kinds[p.op], p.tensor, p.peer, p.group or dist.group.WORLD) for p in operations])
        self.calls.append(("issue", str(batch)))
        return [batch]


class _P2POp(NamedTuple):
    """The fields of torch's class, which refuses functions that it does not know."""

    op: Any
    tensor: Tensor
    peer: int
    group: Any = None


@contextlib.contextmanager
def library(order: Literal["communicator", "device"], patience: float = 120.0) -> Iterator[LibraryModel]:
    """Let the package see a library of accelerators in this process.

    Args:
        order: see above.
        patience: seconds after which an operation is taken to hang.
    """
    model, plain = LibraryModel(order, patience), dist.P2POp
    pipeline_p2p._met.clear()  # this library has connected nobody yet
    dist.isend, dist.irecv, dist.batch_isend_irecv = model.send, model.receive, model.batched
    dist.get_backend, dist.P2POp = (lambda group=None: "nccl"), _P2POp
    try:
        yield model
    finally:
        dist.isend, dist.irecv, dist.batch_isend_irecv, dist.get_backend = SEND, RECEIVE, BATCH, BACKEND
        dist.P2POp = plain
        for batches in model.queues.values():
            batches.put(None)

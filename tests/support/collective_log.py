"""A log of the collectives of one rank: kind, dtype, bytes, order, when each was issued and when it was waited for.

    with rank_of_eight(rank=3):               # this process is one rank of torch's "fake" group: the code path of NCCL
        model = sw.AutoParallel(net, ...)
        loss = model(x, y)                    # makes the plan
        with collective_log() as forward:
            loss = model(x, y)
        with collective_log() as backward:
            loss.backward()
    backward.kinds()                          # [("all_reduce", torch.float32)]
    backward.sent[0].waited - backward.sent[0].issued  # operators between the start and the wait

Times are counts of the operators that this process has called since the log began, so that they do not depend on the
machine. Collectives of the fake group do nothing: shapes and dtypes are those of a real run, values are not.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright import process_runtime as process
from shardwright.parallel import call_planning
from shardwright.runtime.distributed import agreement

#: A method of a process group -> the kind of collective, and the place of the tensors that go in.
METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "allgather": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
    "recv": ("recv", 0),
}
#: A functional collective -> its kind. The tensors that go in come first.
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


@dataclass
class Sent:
    """One collective.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send" or "recv".
        dtype: of the tensors.
        bytes: that this rank hands in, of all tensors of a coalesced call.
        ranks: the size of the group.
        issued: the number of operators called before.
        waited: the number of operators called before the wait; None: nobody has waited.
    """

    kind: str
    dtype: torch.dtype
    bytes: int
    ranks: int
    issued: int
    waited: int | None = None


@dataclass
class CollectiveLog:
    """The collectives of a block, in the order in which they were issued.

    Attributes:
        sent: the collectives.
        operators: the number of operators called so far.
        events: ("issue" or "wait", the collective), in order; the first wait for each alone.
    """

    sent: list[Sent] = field(default_factory=list)
    operators: int = 0
    events: list[tuple[str, Sent]] = field(default_factory=list)

    def kinds(self) -> list[tuple[str, torch.dtype]]:
        """Kind and dtype of each, in order."""
        return [(each.kind, each.dtype) for each in self.sent]

    def counts(self) -> Counter[str]:
        """Kind -> the number of collectives."""
        return Counter(each.kind for each in self.sent)

    def bytes(self, kind: str, dtype: torch.dtype | None = None) -> int:
        """Bytes that this rank hands in to collectives of a kind (and dtype)."""
        return sum(s.bytes for s in self.sent if s.kind == kind and dtype in (None, s.dtype))

    def note(self, kind: str, given: Any, ranks: int) -> Sent:
        """Add a collective of a tensor, or of a list of them."""
        tensors = [given] if isinstance(given, Tensor) else list(given)
        self.sent.append(Sent(kind, tensors[0].dtype, sum(x.nbytes for x in tensors), ranks, self.operators))
        self.events.append(("issue", self.sent[-1]))
        return self.sent[-1]

    def finish(self, one: Sent) -> None:
        """Note the first wait for a collective."""
        if one.waited is None:
            one.waited = self.operators
            self.events.append(("wait", one))


class _Work:
    """The handle of an asynchronous collective, which notes the wait."""

    def __init__(self, work: Any, one: Sent, log: CollectiveLog) -> None:
        self._work, self._one, self._log = work, one, log

    def wait(self, *args: Any) -> Any:
        self._log.finish(self._one)
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Mode(TorchDispatchMode):
    """Counts operators, and sees functional collectives and their waits."""

    def __init__(self, log: CollectiveLog) -> None:
        super().__init__()
        self.log, self.open = log, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        space, name = func._schema.name.split("::")
        out = func(*args, **(kwargs or {}))
        if space == "_c10d_functional" and name == "wait_tensor":
            _, one = self.open.pop(args[0].untyped_storage()._cdata, (None, None))
            if one is not None:
                self.log.finish(one)
        elif space == "_c10d_functional" and name in FUNCTIONAL:
            group = dist.distributed_c10d._resolve_process_group(next(a for a in reversed(args) if isinstance(a, str)))
            one = self.log.note(FUNCTIONAL[name], args[0], group.size())
            for x in [out] if isinstance(out, Tensor) else out:
                self.open[x.untyped_storage()._cdata] = x, one  # the tensor is kept, and so its storage's address
        elif space != "c10d":
            self.log.operators += 1
        return out


def _noting(method: Callable[..., Any], kind: str, place: int, log: CollectiveLog) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs["input"]
        while not isinstance(given, Tensor) and not isinstance(given[0], Tensor):
            given = given[0]
        one = log.note(kind, given, group.size())
        return _Work(method(group, *args, **kwargs), one, log)

    return call


@contextlib.contextmanager
def collective_log() -> Iterator[CollectiveLog]:
    """The collectives that this process issues inside the block, in its forward and its backward."""
    log, owner = CollectiveLog(), dist.ProcessGroup
    before = {name: vars(owner)[name] for name in METHODS if name in vars(owner)}
    for name in before:
        setattr(owner, name, _noting(getattr(owner, name), *METHODS[name], log))
    try:
        with _Mode(log):
            yield log
    finally:
        for name, method in before.items():
            setattr(owner, name, method)


@contextlib.contextmanager
def rank_of_eight(rank: int = 3, world: int = 8) -> Iterator[None]:
    """This process is a rank of the "fake" group inside the block; the other ranks say what this one says.

    A mode that searches is searched by rank 0, which sends its plan: there, `rank` is to be 0.
    """
    held = (process._current[:], agreement._exchanged, agreement.from_first, call_planning.beginnings)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    agreement._exchanged = lambda mine: [mine] * world
    agreement.from_first = lambda mine: mine
    call_planning.beginnings = lambda module: {}
    process._current[:] = [process.Runtime(True, world, rank, torch.device("cpu"), 300.0, False)]
    try:
        yield
    finally:
        process._current[:], agreement._exchanged, agreement.from_first, call_planning.beginnings = held
        dist.destroy_process_group()

"""Process groups of one rank: the ranks that differ from this one in some digits alone.

`ProcessGroups` makes each group at its first use, and all programs of a process share it (`group_of_ranks`). `Scratch`
is memory that several sums use one after the other; a `Rider` is a short sum that travels with the next all-gather of
its group.

Example: of 8 ranks in the layout [2@4, 4@1], rank 5 has the group of 4@1, ranks 4 to 7, and the group of 2@4, ranks 1
and 5.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...layout import Digits, digits_size, group_of, groups, merge
from ...process_runtime import current, torch_timeout
from ...redistribution import digits_value
from ..redistribution_functions import Steps
from .shared_memory import SameHost, sharing

__all__ = ["Group", "ProcessGroups", "Rider", "Scratch", "earlier_worlds", "group_of_ranks", "groups_of_world"]

_worlds: list[weakref.ref[dist.ProcessGroup]] = []

_Ranks = tuple[int, ...]
#: Default process group -> the groups that members alone have made, by their ranks and timeouts.
_of_members: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[_Ranks, timedelta | None], dist.ProcessGroup]]
_of_members = weakref.WeakKeyDictionary()
#: Default process group -> the groups that all ranks have made together, by their ranks.
_of_world: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Ranks, dist.ProcessGroup]]
_of_world = weakref.WeakKeyDictionary()


def earlier_worlds() -> int:
    """The number of default process groups that this process used before the current one."""
    world = dist.group.WORLD
    assert world is not None
    if not _worlds or _worlds[-1]() is not world:
        _worlds.append(weakref.ref(world))
    return len(_worlds) - 1


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # `current` has joined it
    return world


def group_of_ranks(ranks: _Ranks, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The process group of some ranks, among them this one. Members make it at its first use; others need not call.

    All programs of a process share the group. A library keeps its buffers and connections for each group, and Gloo a
    thread that wakes up a hundred times a second.

    Args:
        ranks: of the default group, lowest first.
        timeout: of a collective; None: the default group's.
    """
    groups = _of_members.setdefault(_world(), {})
    if (ranks, timeout) not in groups:
        groups[ranks, timeout] = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return groups[ranks, timeout]


def groups_of_world(several: Iterable[_Ranks]) -> list[dist.ProcessGroup]:
    """The process groups of several tuples of ranks. All ranks of the default group call this with the same tuples.

    A rank that is no member gets torch's mark of a group that it is not in.
    """
    groups, out = _of_world.setdefault(_world(), {}), []
    for ranks in several:
        if ranks not in groups:
            made = dist.new_group(list(ranks))
            assert made is not None
            groups[ranks] = made
        out.append(groups[ranks])
    return out


#: The number of redistributions whose bound steps are remembered.
MOST_BOUND = 4096


class Scratch:
    """Memory into which ranks receive. Memory that is freed and allocated anew in each step costs its pages, and
    consecutive sums can share it; so the largest tensor requested is kept for the next sum."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A flat, uninitialised tensor of at least `numel` elements, of the dtype and device of `like`."""
        for k, free in enumerate(self._free):
            if free.dtype == like.dtype and free.device == like.device:
                del self._free[k]
                if free.numel() >= numel:
                    return free
                del free  # freed before a larger one is allocated
                break
        return like.new_empty(numel)

    def give(self, x: Tensor) -> None:
        """Return a tensor of `take`. A tensor that an error has left in use is never returned."""
        self._free.append(x)


class ProcessGroups:
    """The process groups of one rank, made at first use: all ranks must use the same ones in one order.

    Args:
        devices: the number of ranks that layouts refer to.
        rank: this rank among them.
        base: the world's rank of the first of them (a pipeline stage's, say).
        timeout: of a collective on a group made here; None: the default group's.
        exchanges: True where steps are made of all-to-alls; None: on Gloo.
        share: True where ranks of one host then use shared memory; None: unless the environment has
            SHARDWRIGHT_SHARED_MEMORY=0.

    Attributes:
        scratch: the memory that sums receive into.
    """

    def __init__(
        self,
        devices: int,
        rank: int,
        base: int = 0,
        timeout: timedelta | None = None,
        exchanges: bool | None = None,
        share: bool | None = None,
    ) -> None:
        self.devices, self.rank, self.base, self.timeout = devices, rank, base, timeout
        self.exchanges = dist.get_backend() == "gloo" if exchanges is None else exchanges
        self.share = sharing() if share is None else share
        self._groups: dict[Digits, Group] = {}
        self.scratch = Scratch()
        self._bound: dict[object, Steps] = {}

    def once(self, key: object, bind: Callable[[], Steps]) -> Steps:
        """The steps of a redistribution, bound at the first call for the key, and remembered with `MOST_BOUND` others.

        Args:
            key: the redistribution, the shape of the local tensor and the rank.
        """
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= MOST_BOUND:
                self._bound.clear()
            found = self._bound[key] = bind()
        return found

    def of(self, digits: Digits) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one in `digits` alone."""
        return self.seen(digits).group

    def seen(self, digits: Digits) -> Group:
        """The same group as a `Group`."""
        key = merge(sorted(digits, key=lambda d: -d.stride))
        if key not in self._groups:
            made, size, position = self._make(key), digits_size(key), digits_value(key, self.rank)
            host = None
            if self.exchanges and size > 1:
                wait = self.timeout or torch_timeout(current().timeout)
                host = SameHost.of(made, size, position, wait, self.share)
            self._groups[key] = Group(made, size, position, self.exchanges, host)
        return self._groups[key]

    def _make(self, digits: Digits) -> dist.ProcessGroup:
        mine = tuple(self.base + r for r in group_of(self.rank, digits))
        if len(mine) == dist.get_world_size():
            return _world()
        if dist.get_backend() != "mpi":
            return group_of_ranks(mine, self.timeout)  # other pipeline stages do not take part
        # With MPI the whole world makes every group.
        every = [tuple(self.base + r for r in ranks) for ranks in groups(self.devices, digits)]
        return groups_of_world(every)[every.index(mine)]


class Group:
    """A process group from the position of one of its ranks.

    Attributes:
        size: the number of ranks.
        position: of this rank among them.
        exchanges: True where steps are made of all-to-alls.
        host: the collectives through shared memory, where all ranks are on one host; else None.
        name: of the group, for functional collectives.
        riders: sums that wait for an exchange of the group to travel with.
    """

    def __init__(
        self, group: dist.ProcessGroup, size: int, position: int, exchanges: bool, host: SameHost | None = None
    ) -> None:
        self.group, self.size, self.position, self.exchanges, self.host = group, size, position, exchanges, host
        self.name = group.group_name
        self.riders: list[Rider] = []

    def through_memory(self, x: Tensor) -> SameHost | None:
        """The collectives through shared memory, where they can take `x`; else None."""
        return self.host if x.is_cpu and not torch.compiler.is_compiling() else None


class Rider:
    """A tensor to be summed that travels with the next all-gather of its group.

    Attributes:
        x: this rank's term.
        terms: the terms of all ranks, stacked, once they have come.
    """

    __slots__ = ("terms", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.terms: Tensor | None = None

"""The process groups of one rank: the ranks that differ from it in some digits alone."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..conversion_steps import digits_value
from ..layout import Digits, digits_size, group_of, groups, merge
from .host_memory import sharing
from .init import TORCH_WAITS, current
from .same_host import SameHost
from .scratch import Scratch

__all__ = ["Group", "ProcessGroups", "Rider"]


class ProcessGroups:
    """The process groups of one rank, made when first asked for: all ranks must ask for the same ones in one order.

    Args:
        devices: the number of ranks that layouts speak of.
        rank: this rank among them.
        base: the world's rank of the first of them (a pipeline stage's, say).
        timeout: after which a collective on a group made here fails; None: the default group's.
        exchanges: whether steps are to be made of all-to-alls; None: on Gloo.
        share: whether ranks of one host then do them through memory that they share; None: unless the environment has
            SHARDWRIGHT_SHARED_MEMORY=0.

    Attributes:
        scratch: what sums receive into.
    """

    def __init__(self, devices: int, rank: int, base: int = 0, timeout: timedelta | None = None,
                 exchanges: bool | None = None, share: bool | None = None) -> None:
        self.devices, self.rank, self.base, self.timeout = devices, rank, base, timeout
        self.exchanges = dist.get_backend() == "gloo" if exchanges is None else exchanges
        self.share = sharing() if share is None else share
        self._groups: dict[Digits, Group] = {}
        self.scratch = Scratch()

    def of(self, digits: Digits) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one in `digits` alone."""
        return self.seen(digits).group

    def seen(self, digits: Digits) -> Group:
        """The same, as this rank sees it."""
        key = merge(sorted(digits, key=lambda d: -d.stride))
        if key not in self._groups:
            made, size, position = self._make(key), digits_size(key), digits_value(key, self.rank)
            host = None
            if self.exchanges and size > 1:
                wait = self.timeout or timedelta(seconds=current().timeout * TORCH_WAITS)
                host = SameHost.of(made, size, position, wait, self.share)
            self._groups[key] = Group(made, size, position, self.exchanges, host)
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


class Group:
    """A process group as one of its ranks sees it.

    Attributes:
        size: how many ranks.
        position: of this rank among them.
        exchanges: whether steps are to be made of all-to-alls.
        host: what does them where all ranks are on one host, or None.
        name: by which functional collectives know the group.
        riders: sums that wait for an exchange of the group to travel with.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, position: int, exchanges: bool, host: SameHost | None = None) -> None:
        self.group, self.size, self.position, self.exchanges, self.host = group, size, position, exchanges, host
        self.name = group.group_name
        self.riders: list[Rider] = []

    def through_memory(self, x: Tensor) -> SameHost | None:
        """What does a collective of `x` on one host, if it can."""
        return self.host if x.is_cpu and not torch.compiler.is_compiling() else None


class Rider:
    """What is to be summed, and travels with the next all-gather of its group.

    Attributes:
        terms: everybody's, stacked, once they have come.
    """

    __slots__ = ("terms", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self.terms = x, None

"""Gradient fusion: which gradients are summed together.

A sum of many small gradients is sent as one bucket. Example: 8 layers of 1024 x 1024 in float32 have 32 MiB of
gradients, which are two buckets of 16 MiB (`AUTO`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SettingError

__all__ = ["Due", "Fusion", "fusion_of"]


# Bytes of a bucket in automatic mode: the fastest of 0.25 to 64 MiB for four and eight Gloo processes, and within 5 %
# of the fastest for two (measured: benchmarks/README.md).
AUTO = 16 << 20


# Bytes, times the number of ranks that sum: a bucket is full at this size, even below `AUTO`, and a gradient of this
# size travels by itself. The pieces that ranks send one another are then long enough, and a copy into a bucket takes
# longer than another start of a collective (`RING` in `collectives`). With half of it, steps took 12 % longer. A
# bucket is in memory three times: its gradients, the concatenation, and the receive buffer.
PIECE = 2 << 20


# The same on a library such as NCCL, whatever the number of ranks: DistributedDataParallel's default. Assumed: four
# times as much where ranks of several hosts sum, since a start takes longer through the network.
LIBRARY, HOSTS = 25 << 20, 100 << 20


LEGAL = (
    '{"mode": "auto"}, {"mode": "size", "config": 25} (MB a bucket), or {"mode": "index", "config": [10, 20]} '
    "(parameters before which a new bucket begins)"
)


@dataclass(frozen=True)
class Due:
    """A gradient that is to be summed.

    Attributes:
        name: of the parameter.
        nbytes: of the gradient on one rank.
        kind: gradients travel together only with those of equal kind (ranks, dtype).
        index: of the parameter among the trained ones, in the model's order.
        ranks: the number of ranks over which it is summed.
        hosts: True where these ranks are on several hosts.
    """

    name: str
    nbytes: int
    kind: Hashable
    index: int
    ranks: int
    hosts: bool = False


@dataclass(frozen=True)
class Fusion:
    """The division of gradients into buckets.

    Attributes:
        limit: bytes at which a bucket is full, and from which a gradient travels by itself; 0: every gradient by
            itself; None: on a library `LIBRARY`, over several hosts `HOSTS`; on Gloo `AUTO`, and at most `PIECE` for
            each rank.
        ends: in place of `limit`, indices of parameters before which a new bucket begins.
    """

    limit: int | None = None
    ends: tuple[int, ...] | None = None

    def check(self, trained: int) -> None:
        """Check that the indices refer to parameters of the model.

        Args:
            trained: the number of trained parameters.

        Raises:
            SettingError: an index is not below `trained`.
        """
        if self.ends is not None and self.ends[-1] >= trained:
            raise SettingError(
                f"comm_fusion: the index {self.ends[-1]}, but the model trains {trained} parameters",
                strategy=list(self.ends),
                legal=f"indices from 1 to {trained - 1}",
            )

    def buckets(self, gradients: Sequence[Due], library: bool = False) -> tuple[tuple[str, ...], ...]:
        """The names of the gradients of each bucket, in the order in which buckets are filled.

        Args:
            gradients: in the order in which they come.
            library: True where a library such as NCCL sums them, False on Gloo.
        """
        if self.ends is not None:
            parts: dict[tuple[int, Hashable], list[str]] = {}
            last: dict[tuple[int, Hashable], int] = {}
            for place, due in enumerate(gradients):
                key = (bisect_right(self.ends, due.index), due.kind)
                parts.setdefault(key, []).append(due.name)
                last[key] = place
            return tuple(tuple(parts[key]) for key in sorted(parts, key=last.__getitem__))
        full: list[tuple[str, ...]] = []
        open_: dict[Hashable, list[Due]] = {}
        for due in gradients:
            most, pieces = AUTO, due.ranks * PIECE
            if library:
                most = pieces = HOSTS if due.hosts else LIBRARY
            limit = min(most, pieces) if self.limit is None else self.limit
            if due.nbytes >= min(limit, pieces):  # by itself: in a bucket it would be in memory twice
                full.append((due.name,))
                continue
            bucket = open_.setdefault(due.kind, [])
            bucket.append(due)
            if sum(d.nbytes for d in bucket) >= limit:
                full.append(tuple(d.name for d in open_.pop(due.kind)))
        return (*full, *(tuple(d.name for d in bucket) for bucket in open_.values()))


def fusion_of(setting: Any) -> Fusion:
    """The `Fusion` of a user's ``comm_fusion(allreduce=…)``.

    Args:
        setting: "auto", a number of MB, a list of indices, or ``{"mode": …, "config": …}``.

    Raises:
        SettingError: `setting` is none of these.
    """
    if isinstance(setting, dict):
        if "mode" not in setting or set(setting) - {"mode", "config"}:
            raise SettingError(f"comm_fusion: {setting!r} must have a mode, and may have a config", legal=LEGAL)
        mode, config = setting["mode"], setting.get("config")
    else:
        mode = setting if isinstance(setting, str) else "index" if isinstance(setting, (list, tuple)) else "size"
        config = None if isinstance(setting, str) else setting
    if mode == "auto":
        if config is not None:
            raise SettingError(f'comm_fusion: the mode "auto" takes no config, not {config!r}', legal=LEGAL)
        return Fusion()
    if mode == "size":
        if isinstance(config, bool) or not isinstance(config, (int, float)) or not 0 < config < math.inf:
            raise SettingError(f"comm_fusion: a bucket of {config!r} MB", legal="a number above 0")
        return Fusion(limit=int(config * (1 << 20)))
    if mode == "index":
        whole = isinstance(config, (list, tuple)) and all(
            isinstance(i, int) and not isinstance(i, bool) for i in config
        )
        if not whole or not config or config[0] < 1 or any(a >= b for a, b in zip(config, config[1:])):
            raise SettingError(
                f"comm_fusion: the indices {config!r}",
                legal="a list of whole numbers of at least 1, each above the one before",
            )
        return Fusion(ends=tuple(config))
    raise SettingError(f"comm_fusion: unknown mode {mode!r}", legal=LEGAL)

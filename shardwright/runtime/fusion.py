"""What a user says of the sums of gradients: which travel together, and whether they are due in this backward."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingError

__all__ = ["Accumulation", "Due", "Fusion", "fusion_of"]

# Bytes of a bucket where the user leaves it to us. Ours, ms a step of 8 layers of 1024×1024 (32 MiB of gradients), Gloo
# processes of one thread on 2 shared cores, by MiB of a bucket (benchmarks/data_parallel.py --buckets --only mlp):
#     MiB          0.25    1    2    4    8   16   32   64   DDP
#     2 processes    64   61   65   63   68   64   71   71    63
#     4 processes   149  143  142  143  133  130  145  146   132
#     8 processes   332  340  332  346  282  262  290  294   257
# (none alone but those of a bucket's size)
AUTO = 16 << 20
# Bytes for each of the ranks that sum it, at which a bucket is full before that, and from which a gradient travels by itself:
# the pieces that ranks send each other are then long enough, and a copy into a bucket takes longer than another start (`RING`
# in `collectives` has the times). With half of it, gradients of 4 MiB among four went alone, and a step took 146 ms instead of
# 130. A bucket lies in memory three times: its gradients, together, and what has come.
PIECE = 2 << 20

LEGAL = '{"mode": "auto"}, {"mode": "size", "config": 25} (MB a bucket), or {"mode": "index", "config": [10, 20]} ' \
        "(parameters before which a new bucket begins)"


@dataclass(frozen=True)
class Due:
    """A gradient that will have to be summed.

    Attributes:
        name: of the parameter.
        nbytes: of the gradient on one rank.
        kind: gradients of another kind (other ranks, another type) cannot travel with it.
        index: of the parameter among those that are trained, in the model's order.
        ranks: over how many it is summed.
    """

    name: str
    nbytes: int
    kind: Hashable
    index: int
    ranks: int


@dataclass(frozen=True)
class Fusion:
    """How gradients travel together.

    Attributes:
        limit: bytes at which a bucket is full, and from which a gradient travels by itself; 0: all do. None: `AUTO`, and
            no more than `PIECE` for each rank.
        ends: instead of it, indices of parameters before which a new bucket begins.
    """

    limit: int | None = None
    ends: tuple[int, ...] | None = None

    def check(self, trained: int) -> None:
        """See that the model has the parameters that the indices speak of.

        Raises:
            SettingError: it has no more than `trained`.
        """
        if self.ends is not None and self.ends[-1] >= trained:
            raise SettingError(f"comm_fusion: the index {self.ends[-1]}, but the model trains {trained} parameters",
                               strategy=list(self.ends), legal=f"indices from 1 to {trained - 1}")

    def buckets(self, gradients: Sequence[Due]) -> tuple[tuple[str, ...], ...]:
        """The names of the gradients that travel together, in the order in which buckets are filled.

        Args:
            gradients: in the order in which they come.
        """
        if self.ends is not None:
            parts: dict[Hashable, list[str]] = {}
            last = {}
            for place, due in enumerate(gradients):
                key = (bisect_right(self.ends, due.index), due.kind)
                parts.setdefault(key, []).append(due.name)
                last[key] = place
            return tuple(tuple(parts[key]) for key in sorted(parts, key=last.__getitem__))
        full: list[tuple[str, ...]] = []
        open_: dict[Hashable, list[Due]] = {}
        for due in gradients:
            pieces = due.ranks * PIECE
            limit = min(AUTO, pieces) if self.limit is None else self.limit
            if due.nbytes >= min(limit, pieces):  # as it is: in a bucket it would be in memory twice
                full.append((due.name,))
                continue
            bucket = open_.setdefault(due.kind, [])
            bucket.append(due)
            if sum(d.nbytes for d in bucket) >= limit:
                full.append(tuple(d.name for d in open_.pop(due.kind)))
        return (*full, *(tuple(d.name for d in bucket) for bucket in open_.values()))


@dataclass
class Accumulation:
    """Whether the gradients of a backward are kept as each rank has them (`AutoParallel.no_sync`), and whose are so.

    Attributes:
        open: whether they are kept, now.
        kept: id of a parameter -> the parameter, for those that hold such a gradient, or did.
    """

    open: bool = False
    kept: dict[int, Any] = field(default_factory=dict)


def fusion_of(given: Any) -> Fusion:
    """What ``comm_fusion(allreduce=…)`` says.

    Args:
        given: "auto", a number of MB, a list of indices, or ``{"mode": …, "config": …}``.

    Raises:
        SettingError: none of these.
    """
    if isinstance(given, dict):
        if "mode" not in given or set(given) - {"mode", "config"}:
            raise SettingError(f"comm_fusion: {given!r} must have a mode, and may have a config", legal=LEGAL)
        mode, config = given["mode"], given.get("config")
    else:
        mode = given if isinstance(given, str) else "index" if isinstance(given, (list, tuple)) else "size"
        config = None if isinstance(given, str) else given
    if mode == "auto":
        if config is not None:
            raise SettingError(f"comm_fusion: the mode \"auto\" takes no config, not {config!r}", legal=LEGAL)
        return Fusion()
    if mode == "size":
        if isinstance(config, bool) or not isinstance(config, (int, float)) or not 0 < config < math.inf:
            raise SettingError(f"comm_fusion: a bucket of {config!r} MB", legal="a number above 0")
        return Fusion(limit=int(config * (1 << 20)))
    if mode == "index":
        whole = isinstance(config, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in config)
        if not whole or not config or config[0] < 1 or any(a >= b for a, b in zip(config, config[1:])):
            raise SettingError(f"comm_fusion: the indices {config!r}",
                               legal="a list of whole numbers of at least 1, each above the one before")
        return Fusion(ends=tuple(config))
    raise SettingError(f"comm_fusion: unknown mode {mode!r}", legal=LEGAL)

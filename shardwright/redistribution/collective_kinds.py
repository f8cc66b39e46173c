"""The kinds of collectives: everything about a kind that needs neither a tensor nor a cluster, each said once.

With L the local size before, on n ranks:

    kind             from           to             a rank sends           and receives      the shard
    slice            replica        shard          0                      0                 L / n
    all_reduce       partial sum    replica        2 (n-1)/n L            the same          L
    all_gather       shard          replica        (n-1) L                the same          n L
    reduce_scatter   partial sum    shard          (n-1)/n L              the same          L / n
    all_to_all       shard          other shard    (n-1)/n L              the same          L
    permute          shard          other shard    L: to other ranks      the same          L
    halo_exchange    shard          shard, halos   H                      the same          with halos
    halo_reduce      shard, halos   shard          H                      the same          without halos
    send             -              -              L                      0                 L
    recv             -              -              0                      L                 L

A permute is an all_to_all in which some ranks keep nothing: a step of a redistribution is named all_to_all and is
priced and run as a permute (`RedistributionStep.pattern`). H is the number of elements that other parts of a dim read
(`halos`). The amounts of these two kinds are functions of H, which the step knows (`RedistributionStep.sent`), as it
knows the size after it. A send and a recv are the two ends of one transfer between pipeline stages; no redistribution
contains them.

The higher layers have one table each, by kind: `cost.primitive_costs` the seconds, `runtime.local.shards` the executor
of all ranks in one process, `runtime.distributed.collectives` the executor of one rank. Example: 1024 elements a rank,
4 ranks:

    CollectiveKind("all_gather").sent(4, 1024) == 3072        CollectiveKind.ALL_GATHER.size_after(4, 1024) == 4096
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from ..errors import SettingError

__all__ = ["CollectiveKind", "Placement"]

#: (number of ranks, elements or bytes of a rank's own input) -> elements or bytes, rounded up.
Amount = Callable[[int, int], int]


class Placement(Enum):
    """The state of a digit of the rank in a layout: it carries a part of a dim, or nothing, or a term of a sum."""

    SHARD = auto()
    REPLICA = auto()
    PARTIAL = auto()


def _nothing(n: int, size: int) -> int:
    return 0


def _whole(n: int, size: int) -> int:
    return size


def _to_each(n: int, size: int) -> int:
    return (n - 1) * size


def _parts(n: int, size: int) -> int:
    return -(-(n - 1) * size // n)


def _parts_twice(n: int, size: int) -> int:
    return -(-2 * (n - 1) * size // n)


class CollectiveKind(str, Enum):
    """A kind of collective; as a text, the word in dumps and files: ``CollectiveKind("slice") == "slice"``.

    Attributes:
        source, target: the placement, before and after, of the digits among which the collective runs; None: the
            collective changes no layout.
        sent, received: the amount that a rank must send and receive (the maximum over ranks).

    Raises:
        SettingError: a word that names no kind.
    """

    source: Placement | None
    target: Placement | None
    sent: Amount
    received: Amount
    _grows: int

    SLICE = "slice", Placement.REPLICA, Placement.SHARD, _nothing
    ALL_REDUCE = "all_reduce", Placement.PARTIAL, Placement.REPLICA, _parts_twice
    ALL_GATHER = "all_gather", Placement.SHARD, Placement.REPLICA, _to_each
    REDUCE_SCATTER = "reduce_scatter", Placement.PARTIAL, Placement.SHARD, _parts
    ALL_TO_ALL = "all_to_all", Placement.SHARD, Placement.SHARD, _parts
    PERMUTE = "permute", Placement.SHARD, Placement.SHARD, _whole
    HALO_EXCHANGE = "halo_exchange", Placement.SHARD, Placement.SHARD, _whole
    HALO_REDUCE = "halo_reduce", Placement.SHARD, Placement.SHARD, _whole
    SEND = "send", None, None, _whole, _nothing
    RECV = "recv", None, None, _nothing, _whole

    def __new__(
        cls, word: str, source: Placement | None, target: Placement | None, sent: Amount, received: Amount | None = None
    ) -> CollectiveKind:
        kind = str.__new__(cls, word)
        kind._value_, kind.source, kind.target = word, source, target
        kind.sent, kind.received = sent, received or sent
        kind._grows = (source is Placement.SHARD) - (target is Placement.SHARD)
        return kind

    @classmethod
    def named(cls, word: str) -> CollectiveKind:
        """The kind of a word.

        Raises:
            SettingError: no kind has this name.
        """
        return cls(word)  # type: ignore[call-arg]  # a look-up by value, not a construction

    @classmethod
    def _missing_(cls, value: object) -> CollectiveKind:
        raise SettingError(f"unknown kind of collective {value!r}", legal=", ".join(cls))

    # Like its word in every text and file, where an Enum would show its class.
    __str__, __repr__, __format__ = str.__str__, str.__repr__, str.__format__  # type: ignore[assignment]  # of a mix-in

    @property
    def communicates(self) -> bool:
        """True where ranks depend on one another."""
        return self is not CollectiveKind.SLICE

    @property
    def travels_alone(self) -> bool:
        """True where a runtime may issue the collective and wait for it later. A halo exchange is several messages
        between neighbours, with work between them, and runs in one piece."""
        return self.communicates and self not in (CollectiveKind.HALO_EXCHANGE, CollectiveKind.HALO_REDUCE)

    @property
    def reduces(self) -> bool:
        """True where terms are reduced."""
        return self.source is Placement.PARTIAL

    def size_after(self, n: int, size: int) -> int:
        """The elements of a rank's result, from those of its input, where `n` divides them; halos are not counted."""
        return size if not self._grows else size * n if self._grows > 0 else size // n

    @property
    def transpose(self) -> CollectiveKind:
        """The collective of the gradient, which reaches the ranks of a replica as terms of a sum.

        An involution but for the slice. Its gradient is an all_gather: the gradient of a replica that is sliced needs
        no sum. Where the gradient of a replica reaches every rank complete, an all_gather's is a slice, and an
        all_reduce has none. `redistribution.transpose` knows from the layouts which of the two it is.
        """
        return _TRANSPOSES.get(self, self)


_TRANSPOSES = {
    CollectiveKind.SLICE: CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_GATHER: CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.REDUCE_SCATTER: CollectiveKind.ALL_GATHER,
    CollectiveKind.HALO_EXCHANGE: CollectiveKind.HALO_REDUCE,
    CollectiveKind.HALO_REDUCE: CollectiveKind.HALO_EXCHANGE,
    CollectiveKind.SEND: CollectiveKind.RECV,
    CollectiveKind.RECV: CollectiveKind.SEND,
}

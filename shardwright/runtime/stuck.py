"""Which rank does not come, and to what: read off where all ranks are.

    r waits for q       r is at a place to which q belongs, and q is not there
    a culprit           somebody that others wait for, and that waits for nobody itself: it is elsewhere, or silent
    a circle            ranks that wait for one another at unlike places: they run different programs

Follow the waits of any rank: they end at culprits, or go round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Seen", "not_moving", "spelled"]


@dataclass(frozen=True)
class Seen:
    """Where one rank is, as it says itself.

    Attributes:
        call: how many calls of planned models it has begun.
        program: what the latest runs, in words.
        place: the place that it is at, in words; "": none.
        ranks: those that belong there.
        key: of a meeting: what is the same for all that come to it; "": the place is none.
        seconds: for how long it has not moved.
        line: the user's line that it is in: ``train.py:57 in main``.
    """

    call: int
    program: str
    place: str
    ranks: tuple[int, ...]
    key: str
    seconds: float
    line: str

    def words(self) -> dict[str, Any]:
        """As a document."""
        return asdict(self)

    @classmethod
    def of(cls, words: dict[str, Any]) -> Seen:
        """From the document."""
        return cls(**{**words, "ranks": tuple(words["ranks"])})


def not_moving(seen: Mapping[int, Seen], world: int, start: int) -> str:
    """Why rank `start` waits, in words.

    Args:
        seen: where ranks are; those that are missing have not answered.
        start: a rank that is at a place.
    """
    missing = {rank: _missing(rank, seen, world) for rank, at in seen.items() if at.place}
    culprits: dict[int, list[int]] = {}     # by rank, those that wait for it
    known, due = {start}, [start]
    while due:
        rank = due.pop(0)
        for other in missing[rank]:
            if other not in missing:
                culprits.setdefault(other, []).append(rank)
            elif other not in known:
                known.add(other)
                due.append(other)
    if culprits:
        return _culprits(culprits, seen)
    if len(known) > 1:
        return _circle(known, seen)
    at = seen[start]
    return (f"{spelled(at.ranks or range(world))} have all come to {at.place} in call {at.call} and have not ended it "
            f"since {at.seconds:.0f} s: a message between them is lost, or one of them has died")


def _missing(rank: int, seen: Mapping[int, Seen], world: int) -> list[int]:
    """Whom a rank waits for."""
    at = seen[rank]
    return [r for r in at.ranks or range(world) if r != rank and not (r in seen and _together(seen[r], at))]


def _together(a: Seen, b: Seen) -> bool:
    return (a.place, a.call, a.key) == (b.place, b.call, b.key)


def _culprits(culprits: Mapping[int, list[int]], seen: Mapping[int, Seen]) -> str:
    """The ranks that have not come, those that the same ranks wait for together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for culprit, waiters in sorted(culprits.items()):
        first = seen[waiters[0]]
        alike = tuple(sorted(r for r in seen if _together(seen[r], first)))
        groups.setdefault(alike, []).append(culprit)
    lines = []
    for waiters, missing in groups.items():
        at = seen[waiters[0]]
        one = len(missing) == 1
        lines.append(f"{spelled(missing)} {'has' if one else 'have'} not come to {at.place} in call {at.call}; "
                     f"{spelled(waiters)} {'waits' if len(waiters) == 1 else 'wait'} there since "
                     f"{max(seen[r].seconds for r in waiters):.0f} s")
        for rank in missing[:8]:
            lines.append(f"  {_whereabouts(rank, seen.get(rank))}")
        if len(missing) > 8:
            lines.append(f"  and {len(missing) - 8} more")
    return "\n".join(lines)


def _whereabouts(rank: int, at: Seen | None) -> str:
    if at is None:
        return (f"rank {rank} does not answer: its process has ended or is stopped, its interpreter is held, it has not "
                "called a model yet, or its host cannot be reached")
    where = at.line or "outside of any line of the user's"
    began = f"since call {at.call} began" if at.call else "before its first call"
    return f"rank {rank} is at {where}, {began}; it has come to no collective since {at.seconds:.0f} s"


def _circle(ranks: Collection[int], seen: Mapping[int, Seen]) -> str:
    groups: dict[tuple[str, int], list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault((seen[rank].place, seen[rank].call), []).append(rank)
    each = "; ".join(f"{spelled(rs)} {'is' if len(rs) == 1 else 'are'} at {place} in call {call}"
                     for (place, call), rs in groups.items())
    return f"ranks wait for one another at different places, as where one makes a backward that others do not: {each}"


def spelled(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    ranks = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return f"rank{'' if len(ranks) == 1 else 's'} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)

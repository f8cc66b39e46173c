"""How long a collective takes: the least of ring, tree and hierarchical, by latency and bandwidth of the levels.

Let n ranks take part, each with m bytes of its own; g_1 · g_2 ⋯ = n of them in the levels crossed, from the inside out;
α_l the latency of level l and β_l its seconds a byte, both of one device. On one level, with L = ⌈log2 g⌉:

                     ring, or pairs                  tree
    reduce_scatter   (g-1) α + (g-1)/g m β           L α + (g-1)/g m β        halving
    all_gather       (g-1) α + (g-1) m β             L α + (g-1) m β          doubling
    all_reduce       both of them: 2 (g-1) α + …     L α + L m β              doubling of the whole
    all_to_all       (g-1) α + (g-1)/g m β           L α + L/2 m β            Bruck
    permute          pieces α + m β                  -

A flat ring over several levels goes at the pace of its slowest link: α = max α_l, β = max β_l. A hierarchical
reduce_scatter goes from the inside out, m shrinking to m / g_l on the way; an all_gather back in; an all_reduce is both
around an all_reduce of the outer levels, or one of all m a level. An all_to_all brings all of m to its place level by
level, or goes in pairs: Σ_l (g_l - 1) g_1 ⋯ g_(l-1) (α_l + m/n β_l). What two levels cost adds up.

On a level of bandwidth B that D devices share, all groups are at work at once: β = D / B. Of a flat ring only one link
in p = g_1 ⋯ g_(l-1) is of level l: β = max(D / p, 1) / B. That is where a ring may be the quickest: its links of all
levels are at work at once, those of a hierarchical collective in turn.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J.
of High Performance Computing Applications 19(1), 2005: ring, recursive doubling and halving, pairwise exchange, Bruck's
algorithm. For numbers of ranks that are no powers of two, in L rounds too: A. Bar-Noy, S. Kipnis, B. Schieber, "An
Optimal Algorithm for Computing Census Functions in Message-Passing Systems", Parallel Processing Letters 3(1), 1993
(all_reduce); J. L. Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv:2410.14234, 2024.

For each algorithm the time is a straight line a + b m; the least of them is what is paid. Adding up what arrives, and
the copies that bring pieces together, are in none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cluster import Cluster
from ..layout import Digits

__all__ = ["KINDS", "Line", "Link", "collective_lines", "links_of"]

#: (seconds, seconds a byte of a rank's own input).
Line = tuple[float, float]


@dataclass(frozen=True)
class Link:
    """A level that a group crosses, as each of its devices sees it while all groups are at work.

    Attributes:
        size: how many units of the level below.
        latency: seconds.
        each: seconds a byte, where every device sends over it.
        alone: seconds a byte, where one device does.
    """

    size: int
    latency: float
    each: float
    alone: float


def links_of(cluster: Cluster, devices: int, digits: Digits) -> tuple[Link, ...]:
    """The levels that a group of ranks which differ in `digits` crosses, from the inside out.

    Args:
        devices: how many of the cluster's devices are used.
    """
    out = []
    for i, (level, units) in enumerate(zip(cluster.levels, cluster.units(digits))):
        if units > 1:
            users = min(cluster.below(i), devices) if level.shared else 1
            out.append(Link(units, level.latency, users / level.bandwidth, 1 / level.bandwidth))
    return tuple(out)


def _rounds(size: int) -> int:
    """⌈log2 size⌉."""
    return (size - 1).bit_length()


def _ring(links: Sequence[Link]) -> Line:
    """A flat ring in which each rank sends n-1 times an n-th of m."""
    n, slowest = 1, 0.0
    for link in links:
        slowest = max(slowest, link.alone, link.each / n)  # one in n devices sends to another unit
        n *= link.size
    return (n - 1) * max(k.latency for k in links), (n - 1) / n * slowest


def _size(links: Sequence[Link]) -> int:
    out = 1
    for link in links:
        out *= link.size
    return out


def _reduce_scatter(links: Sequence[Link]) -> list[Line]:
    if not links:
        return [(0.0, 0.0)]
    link, outer = links[0], _reduce_scatter(links[1:])
    inside = (_rounds(link.size) * link.latency, (link.size - 1) / link.size * link.each)
    return _least([_ring(links), *((inside[0] + a, inside[1] + b / link.size) for a, b in outer)])


def _all_gather(links: Sequence[Link]) -> list[Line]:
    n = _size(links)
    return [(a, b * n) for a, b in _reduce_scatter(links)]  # the same way back, with m · n at its end


def _all_reduce(links: Sequence[Link]) -> list[Line]:
    if not links:
        return [(0.0, 0.0)]
    link, outer = links[0], _all_reduce(links[1:])
    ring, rounds = _ring(links), _rounds(link.size)
    whole = (rounds * link.latency, rounds * link.each)
    halves = (2 * rounds * link.latency, 2 * (link.size - 1) / link.size * link.each)
    return _least([(2 * ring[0], 2 * ring[1]), *((whole[0] + a, whole[1] + b) for a, b in outer),
                   *((halves[0] + a, halves[1] + b / link.size) for a, b in outer)])


def _all_to_all(links: Sequence[Link]) -> list[Line]:
    n, inside, pairs, by_level = _size(links), 1, (0.0, 0.0), [(0.0, 0.0)]
    for link in links:
        partners = (link.size - 1) * inside
        pairs = (pairs[0] + partners * link.latency, pairs[1] + partners / n * link.each)
        inside *= link.size
        rounds = _rounds(link.size)
        own = [((link.size - 1) * link.latency, (link.size - 1) / link.size * link.each),
               (rounds * link.latency, rounds / 2 * link.each)]
        by_level = [(a + c, b + d) for a, b in by_level for c, d in own]
    return _least([pairs, *by_level])


def _permute(links: Sequence[Link]) -> list[Line]:
    return [(max(k.latency for k in links), max(k.each for k in links))]


_LINES: dict[str, Callable[[Sequence[Link]], list[Line]]] = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all,
    "permute": _permute, "send": _permute, "recv": _permute,
}

#: What there is a time for. "permute": each rank's input goes to another rank, as in an all_to_all that permutes;
#: "send" and "recv" are the two ends of one, and each has the time of both.
KINDS = ("slice", *_LINES)


def collective_lines(kind: str, links: Sequence[Link], pieces: int = 1) -> tuple[Line, ...]:
    """The times of a collective by each algorithm that is the quickest for some size, as lines over the bytes of a
    rank's own input.

    Args:
        links: as of `links_of`.
        pieces: to how many ranks a "permute" sends.
    """
    if kind == "slice" or not links:
        return ((0.0, 0.0),)
    lines = _LINES[kind](links)
    return tuple((a * pieces, b) for a, b in lines) if kind == "permute" else tuple(lines)


def _least(lines: Sequence[Line]) -> list[Line]:
    """The lines that are below all others somewhere, where bytes >= 0; that of the least latency first."""
    out: list[Line] = []
    for a, b in sorted(set(lines)):
        if out and b >= out[-1][1] * (1 - 1e-12):  # less by rounding alone is not less
            continue
        while len(out) > 1 and _meet(out[-2], (a, b)) <= _meet(out[-2], out[-1]):
            out.pop()  # by the time that it is better than the one before it, the new one is better still
        out.append((a, b))
    return out


def _meet(first: Line, second: Line) -> float:
    """The bytes from which on the second line, the flatter one, is below the first."""
    return (second[0] - first[0]) / (first[1] - second[1])

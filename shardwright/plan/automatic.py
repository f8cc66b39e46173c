"""stages="auto": where a model is cut, how many devices each stage has, what is computed again, and how many
micro-batches there are.

    price        for numbers of devices d and of micro-batches m: the units of the model, by one plan (`unit_prices`)
    cut          for each (d, m) the best stages of d devices, and for the best m of unequal numbers (`balance`)
    choose       the cheapest that fits in memory; where the prices of its (d, m) were taken over from another m, they
                 are found for it itself, until the cheapest is priced so

Numbers of micro-batches are powers of two that divide the batch. Of each d the most are tried first, then half as many,
until a step takes longer or does not fit; S stages begin with 16·S, when the bubble is less than one sixteenth. What is
computed again in the backward is priced only where something does not fit. Nothing here looks at a clock, so that all
processes would choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..cluster import Cluster
from ..errors import PlanError, SettingError, ShardwrightError
from ..graph import Graph
from .balance import Balanced, Way, balance, least_memory
from .bytes import words_of
from .chosen import Alternative, Chosen, StageChoice
from .decision import Decided, Feeding, feeding
from .handed import Handed
from .plan import Plan
from .rows import with_rows
from .unit_prices import UnitPrices, all_recomputed, unit_prices
from .units import units_of

__all__ = ["Choosing", "first_count"]

#: Of S stages, up to how many times S micro-batches.
MOST_ROUNDS = 16

#: How near to the best, relative to it, stages of unequal numbers of devices are searched; and how near to it those of
#: equal ones have to be for that m.
NEAR, PROMISING = 2e-3, 1.1

#: Devices of a stage, and micro-batches.
Pair = tuple[int, int]

#: Makes the plan that units are priced by: (graph, devices, fed) -> Plan.
Planner = Callable[[Graph, int, Feeding], Plan]


def counts_of(rows: int) -> tuple[int, ...]:
    """The numbers of micro-batches for a batch of so many rows: powers of two that divide it."""
    return tuple(1 << k for k in range((rows & -rows).bit_length())) if rows else (1,)


def first_count(rows: int) -> int:
    """For how many micro-batches a model is captured first, where that is to be chosen: such that a micro-batch has
    two rows at least, as one of a single row may be another program."""
    counts = [c for c in counts_of(rows) if rows // c >= 2] or [1]
    return counts[len(counts) // 2]


def stands(cluster: Cluster, first: int, devices: int) -> bool:
    """Whether so many devices from the first on lie together as the innermost ones do: in one unit of a level where
    they are no more than that has, else from a unit's beginning on."""
    below = 1
    for level in cluster.levels:
        below *= level.size
        if first // below != (first + devices - 1) // below if devices < below else first % below:
            return False
    return True


class _Priced(NamedTuple):
    """Prices of all units, kept and, where that was asked for, computed again; `own`: by a plan that was searched for
    this number of rows."""

    plan: Plan
    own: bool
    prices: list[UnitPrices]


class Choosing:
    """The choice for one model.

    Args:
        graph, wide: captured for `count` micro-batches, and for twice the rows.
        rows: of a micro-batch of the graph.
        micro_batches: how many, or "auto".
    """

    def __init__(self, graph: Graph, wide: Graph | None, rows: int, count: int, devices: int, dataset: Any,
                 cluster: Cluster, planner: Planner, *, micro_batches: int | str = "auto") -> None:
        self.rows, self.batch, self.devices = rows, rows * count, devices
        self.dataset, self.cluster, self.memory, self.planner = dataset, cluster, math.inf, planner
        self.units, self.wide = units_of(graph), wide
        self.counts = counts_of(self.batch) if micro_batches == "auto" else (int(micro_batches),)
        self.graphs = {rows: self.units.reduced}
        self.priced: dict[Pair, _Priced] = {}
        self.refused: dict[Pair, ShardwrightError] = {}
        self.equal: dict[Pair, Balanced | None] = {}
        self.unequal: dict[int, tuple[list[Way], Balanced]] = {}

    def run(self, memory: float, unequal: bool = True) -> Chosen:
        """Choose.

        Args:
            memory: bytes a device.
            unequal: whether stages may have unequal numbers of devices.

        Raises:
            PlanError: nothing fits; with the least memory that was found, and what needs it.
            ShardwrightError: nothing can be planned, as the planner says.
        """
        self.memory = memory
        self.equal.clear()
        self.unequal.clear()
        for size in self.sizes():
            before = math.inf
            for count in self.counts_for(size):
                self.price((size, count))
                found = self.equal.get((size, count))
                if found is None and before < math.inf or found is not None and found.seconds > before:
                    break
                before = found.seconds if found is not None else before
        self.settle()
        if unequal and self.dataset == "full_batch":  # else a rank's part of the batch would be another in each stage
            near = PROMISING * self.least()
            there = ((m, found) for (_, m), found in self.equal.items() if found is not None)
            for count in sorted({m for m, found in there if found.seconds <= near}):
                self.cut_unequally(count)
        return self.result()

    # -- what there is -------------------------------------------------------------------------------------------------

    def sizes(self) -> list[int]:
        """Devices of a stage, where all have as many."""
        most = min(len(self.units), max(self.counts))
        return [d for d in range(1, self.devices + 1) if self.devices % d == 0 and self.devices // d <= most
                and all(stands(self.cluster, first, d) for first in range(0, self.devices, d))]

    def counts_for(self, devices: int) -> list[int]:
        """Numbers of micro-batches for stages of so many devices, the most first."""
        stages = self.devices // devices
        fits = [m for m in self.counts if m >= stages]
        return [m for m in reversed(fits) if m <= max(MOST_ROUNDS * stages, fits[0])]

    def on_rows(self, rows: int) -> Graph:
        """The representatives of the units, for a micro-batch of so many rows."""
        if rows not in self.graphs:
            wide = self.wide or self.units.graph
            if len(wide.ops) != len(self.units.graph.ops):
                with_rows(self.units.graph, wide, self.rows, rows)  # which says so
            self.graphs[rows] = with_rows(self.graphs[self.rows], self.units.on(wide).reduced, self.rows, rows)
        return self.graphs[rows]

    # -- prices --------------------------------------------------------------------------------------------------------

    def price(self, pair: Pair, own: bool = False) -> None:
        """Price the units, and cut.

        Args:
            own: by a plan that is searched for this number of rows; otherwise by one that another number of them has,
                if there is one that holds here too.
        """
        devices, count = pair
        try:
            if own or pair not in self.priced:
                graph = self.on_rows(self.batch // count)
                fed = feeding(graph, devices, self.dataset)
                plan = None if own else self.taken_over(graph, devices, fed)
                searched = self.planner(graph, devices, fed) if plan is None else plan
                self.priced[pair] = _Priced(searched, plan is None, [unit_prices(searched, self.units, self.cluster)])
            self.equal[pair] = self.cut_equally(pair, math.inf)
            if (self.equal[pair] is None or self.equal[pair].peak > self.memory) and len(self.priced[pair].prices) == 1:
                again = all_recomputed(self.priced[pair].plan, self.units)
                self.priced[pair].prices.append(unit_prices(again, self.units, self.cluster, recompute=True))
            if self.equal[pair] is None or self.equal[pair].peak > self.memory:
                self.equal[pair] = self.cut_equally(pair, self.memory)
        except ShardwrightError as error:
            self.refused[pair] = error
            for table in (self.priced, self.equal):
                table.pop(pair, None)

    def cut_equally(self, pair: Pair, memory: float) -> Balanced | None:
        """The best stages, all of one size."""
        return balance(self.ways(pair), len(self.units), self.devices, pair[1], memory, stages=self.devices // pair[0])

    def taken_over(self, graph: Graph, devices: int, fed: Feeding) -> Plan | None:
        """A plan of the graph with the decisions of one for another number of rows."""
        for pair in sorted(self.priced):
            known = self.priced[pair]
            if pair[0] == devices and known.own:
                handed = Handed.of(Decided(known.plan.decisions, known.plan.carries))
                decisions = handed.onto(graph, devices, on_missing_rule="replicate").decisions
                if all(len(d.assignment.digits) == len(d.bound.factors) and d.bound.divides(d.assignment)
                       and d.bound.is_consistent(d.assignment) for d in decisions.values()):
                    try:
                        made = replace(known.plan, graph=graph, fed=fed, decisions=decisions)
                        made.routed
                        return made
                    except ShardwrightError:
                        continue  # a conversion that these rows do not divide for
        return None

    def ways(self, *pairs: Pair) -> list[Way]:
        """The ways to run a stage."""
        return [each.way for pair in pairs for each in self.priced[pair].prices]

    def least(self) -> float:
        """Seconds of the best that is known."""
        return min((found.seconds for found in self.equal.values() if found is not None), default=math.inf)

    def settle(self) -> None:
        """Price the best by a plan of its own, until it is."""
        while True:
            found = [(balanced.seconds, pair) for pair, balanced in self.equal.items() if balanced is not None]
            if not found or self.priced[best := min(found)[1]].own:
                return
            self.price(best, own=True)

    def cut_unequally(self, count: int) -> None:
        """Stages of unequal numbers of devices, if they are better than all that is known."""
        most = self.least() * (1 - NEAR)
        for chain in _chains(sorted({d for d, m in self.priced if m == count})):
            ways = self.ways(*((d, count) for d in chain))
            found = balance(ways, len(self.units), self.devices, count, self.memory, most=most, near=NEAR,
                            stands=lambda first, d: stands(self.cluster, first, d))
            if found is not None:
                self.unequal[count], most = (ways, found), found.seconds

    # -- what comes of it ----------------------------------------------------------------------------------------------

    def result(self) -> Chosen:
        alternatives, best = [], None
        for pair, found in self.equal.items():
            alternatives.append(self.alternative(self.ways(pair), found, pair[1]) if found is not None
                                else self.too_large(pair))
            if found is not None and (best is None or found.seconds < best[1].seconds):
                best = self.ways(pair), found, pair[1]
        for count, (ways, found) in self.unequal.items():
            alternatives.append(self.alternative(ways, found, count))
            if best is None or found.seconds < best[1].seconds:
                best = ways, found, count
        alternatives += [Alternative((d,) * (self.devices // d), m, why=f"{type(error).__name__}: {error}")
                         for (d, m), error in self.refused.items() if (d, m) not in self.equal]
        alternatives.sort(key=lambda a: (a.seconds is None, a.seconds or 0.0, a.peak or math.inf, a.devices,
                                         a.micro_batches))
        if best is None:
            raise self.nothing(alternatives)
        ways, found, count = best
        stages = tuple(StageChoice(c.first, c.last, ways[c.way].devices, ways[c.way].recompute) for c in found.stages)
        return Chosen(self.units.paths, stages, count, found.seconds, found.peak, tuple(alternatives))

    def alternative(self, ways: Sequence[Way], found: Balanced, count: int) -> Alternative:
        used = [ways[c.way] for c in found.stages]
        return Alternative(tuple(way.devices for way in used), count, sum(way.recompute for way in used), found.seconds,
                           found.peak)

    def too_large(self, pair: Pair) -> Alternative:
        """What says of a pair that does not fit how much it needs."""
        devices, count = pair
        ways, stages = self.ways(pair), self.devices // devices
        found = least_memory(ways, len(self.units), self.devices, count, stages=stages)
        if found is None:
            return Alternative((devices,) * stages, count, why="there are no such stages")
        return replace(self.alternative(ways, found, count), seconds=None,
                       why=f"needs {words_of(found.peak)} a device, of {words_of(self.memory)}")

    def nothing(self, alternatives: Sequence[Alternative]) -> Exception:
        """The error that nothing can be."""
        needs = [a for a in alternatives if a.peak is not None]
        if not needs:
            errors = list(self.refused.values())
            return errors[0] if errors else SettingError(
                f'stages="auto": no number of stages for {self.devices} devices, {len(self.units)} units and '
                f"micro_batches={self.counts[0]}", legal="more micro-batches, or another number of devices")
        least = min(needs, key=lambda a: a.peak or 0.0)
        return PlanError(
            f'stages="auto": no pipeline fits in {words_of(self.memory)} a device: the least that was found is '
            f"{words_of(least.peak or 0.0)}, with {least.stages} stage{'s' * (least.stages > 1)} of {least.devices[0]} "
            f"devices, {least.micro_batches} micro-batch{'es' * (least.micro_batches > 1)} and {least.recomputed} of "
            "the stages computed again in the backward",
            legal="more devices, smaller batches, optimizer parallel (hsdp), or more memory")


def _chains(sizes: list[int]) -> list[tuple[int, ...]]:
    """The longest rows of sizes of which each divides the next: stages of such numbers can send to one another."""
    out: list[tuple[int, ...]] = []

    def grow(chain: tuple[int, ...], rest: list[int]) -> None:
        nexts = [d for d in rest if not chain or d % chain[-1] == 0]
        for d in nexts:
            if not any(d % other == 0 and d != other for other in nexts):
                grow((*chain, d), [r for r in nexts if r > d])
        if not nexts:
            out.append(chain)
    grow((), sizes)
    return out

"""Stage costs: prices of a model's units, and the cut of the units into stages with the least time under 1F1B.

1. Cut (`balance`):

    minimise  Σ_s t_s + max_s p_s,  p_s = (m - 1) · t_s + once_s
    where     t_s         seconds of a stage's units on its devices for one of m micro-batches, with its transfers
              once_s      seconds of its work once a step
              Σ_s d_s     = the devices;  each stage begins at a device from which its devices are contiguous
              fixed + working + saved · min(m, S - s) <= memory             of stage s of S

For a bound P on all p_s the least Σ is found from the end, by stages left, first unit and devices left. Candidates
for P are the values of p of single stages; those that cannot improve on the best known cut are never tried: with F(P)
that least Σ, no P in [a, b] gives less than F(b) + a.

Example: m = 8, two stages of 1 s and 3 s per micro-batch, nothing once a step: 1 + 3 + 7 · 3 = 25 s. Two stages of 2
s each: 2 + 2 + 7 · 2 = 18 s.

2. Prices (`unit_prices`): seconds and bytes of each unit on a number of devices, read off one plan of the units'
   representatives.

    seconds(u)   cost of one more micro-batch for the operators of u, including the redistributions that they ask for
    once(u)      the rest of their price: sums of gradients, gathers of stored parameters
    fixed(u)     parameters, gradients (also whole ones that micro-batches accumulate, under optimizer level 1) and
                 the optimizer's state of u; and its gathered parameters saved for the
                 backward
    saved(u)     tensors that u produces and the backward needs
    working(u)   the most bytes held besides, while u runs
    send(u)      transfers from u and the units before it to a later stage, and their gradients back

A stage of units [i, j) takes the sums over its units (for `working`, the maximum). Its own plan is made later. The
representatives' plan stands for it, since their inner neighbours are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cluster import Cluster
from ..cost.cost_model import CostModel
from ..graph import Graph, Recompute
from ..partition.local_program import made_by
from ..partition.partitioner import between
from ..redistribution import CollectiveKind
from ..sharded_plan import Plan
from .stages import Units

__all__ = [
    "StageCut",
    "StageOption",
    "StageSpan",
    "UnitPrices",
    "all_recomputed",
    "balance",
    "least_memory",
    "recomputed",
    "unit_prices",
]


@dataclass(frozen=True)
class StageOption:
    """A way to run any stage: a number of devices, recomputed or not.

    All arrays are by (first unit, one past the last).

    Attributes:
        seconds: of one micro-batch, forward and backward, with transfers to the next stage; infinite where impossible.
        once: seconds once a step.
        fixed: bytes always held, and those held besides while a unit runs.
        saved: bytes per micro-batch between its forward and its backward.
    """

    devices: int
    recompute: bool
    seconds: np.ndarray
    once: np.ndarray
    fixed: np.ndarray
    saved: np.ndarray


@dataclass(frozen=True)
class StageSpan:
    """A stage: units [first, last), run by option number `way`."""

    first: int
    last: int
    way: int


@dataclass(frozen=True)
class StageCut:
    """The stages, in order.

    Attributes:
        seconds: of a step.
        peak: bytes of the stage that holds the most.
    """

    stages: tuple[StageSpan, ...]
    seconds: float
    peak: float


def balance(
    ways: Sequence[StageOption],
    units: int,
    devices: int,
    micro_batches: int,
    memory: float,
    *,
    stages: int | None = None,
    most: float = math.inf,
    near: float = 0.0,
    stands: Callable[[int, int], bool] | None = None,
) -> StageCut | None:
    """The cut into stages with the least time.

    Args:
        ways: the options for a stage; of any two numbers of devices, one divides the other.
        memory: bytes per device.
        stages: the number of stages; None: the best, but at most the number of micro-batches.
        most: only cuts below this many seconds are wanted.
        near: allowed distance of the answer from the best, relative to it.
        stands: (first device, number of devices) -> True where they are contiguous; None: always.

    Returns:
        None where there is no cut, or none below `most`.
    """
    if not ways or units < 1:
        return None
    return _Search(ways, units, devices, micro_batches, memory, stages, stands).run(most, near)


def least_memory(
    ways: Sequence[StageOption],
    units: int,
    devices: int,
    micro_batches: int,
    *,
    stages: int | None = None,
    stands: Callable[[int, int], bool] | None = None,
) -> StageCut | None:
    """The best cut among those that need the least memory per device; None where there are none.

    Arguments as for `balance`.
    """
    if not ways or units < 1:
        return None
    least = _Search(ways, units, devices, micro_batches, math.inf, stages, stands).least_memory()
    if least is None:
        return None
    least *= 1 + 1e-12  # sums that differ by rounding alone count as equal
    return balance(ways, units, devices, micro_batches, least, stages=stages, stands=stands)


class _Search:
    def __init__(
        self,
        ways: Sequence[StageOption],
        units: int,
        devices: int,
        micro_batches: int,
        memory: float,
        stages: int | None,
        stands: Callable[[int, int], bool] | None,
    ) -> None:
        self.units, self.micro_batches, self.memory, self.count = units, micro_batches, memory, stages
        self.unit = math.gcd(devices, *(way.devices for way in ways))
        self.devices = devices // self.unit
        self.most = stages or min(units, micro_batches, devices // min(way.devices for way in ways))
        self.ways = ways
        self.sizes = [way.devices // self.unit for way in ways]
        self.allowed = np.array(
            [
                [
                    stands is None or stands((self.devices - remaining) * self.unit, way.devices)
                    for remaining in range(self.devices + 1)
                ]
                for way in ways
            ]
        )
        self.can = [np.triu(np.isfinite(way.seconds), 1) for way in ways]
        self.paces = [
            np.where(can, (micro_batches - 1) * np.where(can, way.seconds, 0.0) + way.once, np.inf)
            for way, can in zip(ways, self.can)
        ]
        self.spent = self.least_spent()

    def least_spent(self) -> np.ndarray:
        """By unit, the least Σ of p times devices over stages of the units before it, in multiples of `unit`;
        non-decreasing."""
        out = np.zeros(self.units + 1)
        for last in range(1, self.units + 1):
            out[last] = min(
                float((out[:last] + np.where(can[:last, last], size * pace[:last, last], np.inf)).min())
                for pace, size, can in zip(self.paces, self.sizes, self.can)
            )
        return np.minimum.accumulate(out[::-1])[::-1]

    def run(self, most: float, near: float) -> StageCut | None:
        if self.most < 1 or self.most > min(self.units, self.micro_batches):
            return None
        times = np.unique(np.concatenate([pace[can] for pace, can in zip(self.paces, self.can)]))
        times = times[times * self.devices >= self.spent[-1] * (1 - 1e-12)]
        if not len(times) or (loosest := self.least(times[-1])) is None:
            return None
        if most < math.inf:  # P is at most `most` less the least Σ
            times = times[: max(1, int(np.searchsorted(times, most - loosest[0], side="right")))]
        found: list[tuple[float, StageCut]] = []

        def best() -> float:
            return min((cost for cost, _ in found), default=most)

        def tried(bound: float) -> float | None:
            """F(bound); records the cut that it finds."""
            least = self.least(bound)
            if least is None:
                return None
            total, stages = least
            cost = total + max(float(self.paces[c.way][c.first, c.last]) for c in stages)
            if cost < best():
                found[:] = [(cost, StageCut(stages, cost, self.peak(stages)))]
            return total

        # The least P with any cut.
        if tried(times[-1]) is None:
            return None
        low, high = 0, len(times) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if tried(times[middle]) is not None else (middle + 1, high)
        waiting = [(low, len(times) - 1, loosest[0])]
        tried(times[low])
        while waiting:
            low, high, total = waiting.pop()  # P in [low, high], F(high) is total
            if low > high or total + times[low] >= best() * (1 - near):
                continue
            middle = (low + high) // 2
            at = tried(times[middle])
            assert at is not None
            waiting += [(middle + 1, high, total), (low, middle - 1, at)]
        return found[0][1] if found else None

    def peak(self, stages: tuple[StageSpan, ...]) -> float:
        """The most bytes that a stage holds."""
        return max(
            float(way.fixed[at] + min(self.micro_batches, len(stages) - s) * way.saved[at])
            for s, c in enumerate(stages)
            for way, at in ((self.ways[c.way], (c.first, c.last)),)
        )

    def least(self, bound: float) -> tuple[float, tuple[StageSpan, ...]] | None:
        """The least Σ with no p above the bound, and its stages."""
        n, width = self.units, self.devices + 1
        tables = [np.full((n + 1, width), np.inf)]
        tables[0][n, 0] = 0.0
        fits = [can & (pace <= bound) for can, pace in zip(self.can, self.paces)]
        smallest, largest = min(self.sizes), max(self.sizes)
        begins = np.searchsorted(self.spent, bound * np.arange(self.devices, -1, -1) * (1 + 1e-12), side="right")
        for k in range(1, self.most + 1):
            best, before = np.full((n + 1, width), np.inf), tables[-1]
            for w, (way, size) in enumerate(zip(self.ways, self.sizes)):
                holds = fits[w] & (way.fixed + min(self.micro_batches, k) * way.saved <= self.memory)
                costs = np.where(holds, way.seconds, np.inf)
                low, high = max(k * smallest, size), min(k * largest, self.devices)
                for remaining in range(low, high + 1):
                    if not self.allowed[w][remaining]:
                        continue
                    column = before[:, remaining - size]
                    finite = np.flatnonzero(column < np.inf)
                    if len(finite):
                        rows = slice(0, min(begins[remaining], int(finite[-1])))
                        first, last = int(finite[0]), int(finite[-1]) + 1
                        found = (costs[rows, first:last] + column[first:last]).min(axis=1, initial=np.inf)
                        np.minimum(best[rows, remaining], found, out=best[rows, remaining])
            tables.append(best)
        ends = [tables[k][0, self.devices] for k in range(self.most + 1)]
        if self.count is not None:
            ends = [end if k == self.count else math.inf for k, end in enumerate(ends)]
        count = int(np.argmin(ends))
        if not np.isfinite(ends[count]):
            return None
        return float(ends[count]), self.traced(tables, fits, count)

    def least_memory(self) -> float | None:
        """The least possible maximum of the stages' memory, found by stages left, first unit and devices left."""
        n, width, found = self.units, self.devices + 1, []
        before = np.full((n + 1, width), np.inf)
        before[n, 0] = 0.0
        for k in range(1, self.most + 1):
            best = np.full((n + 1, width), np.inf)
            for w, (way, size) in enumerate(zip(self.ways, self.sizes)):
                needs = np.where(self.can[w], way.fixed + min(self.micro_batches, k) * way.saved, np.inf)
                for remaining in range(size, width):
                    if self.allowed[w][remaining] and np.isfinite(column := before[:, remaining - size]).any():
                        best[:, remaining] = np.minimum(
                            best[:, remaining], np.maximum(needs, column[None, :]).min(axis=1)
                        )
            before = best
            if self.count in (None, k):
                found.append(float(before[0, self.devices]))
        least = min(found, default=math.inf)
        return least if math.isfinite(least) else None

    def traced(self, tables: list[np.ndarray], fits: list[np.ndarray], count: int) -> tuple[StageSpan, ...]:
        """The stages of the least Σ."""
        out, at, remaining = [], 0, self.devices
        for k in range(count, 0, -1):
            for w, (way, size) in enumerate(zip(self.ways, self.sizes)):
                if size > remaining or not self.allowed[w][remaining]:
                    continue
                holds = fits[w][at] & (way.fixed[at] + min(self.micro_batches, k) * way.saved[at] <= self.memory)
                totals = np.where(holds, way.seconds[at] + tables[k - 1][:, remaining - size], np.inf)
                last = int(np.argmin(totals))
                if totals[last] == tables[k][at, remaining]:
                    out.append(StageSpan(at, last, w))
                    at, remaining = last, remaining - size
                    break
            else:
                raise AssertionError("a least sum has stages")
        return tuple(out)


# -- prices of units

#: Kinds of a plan's memory that are held during the whole step.
STANDING = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class UnitPrices:
    """Prices by unit, in order; see the module's header.

    Attributes:
        sends: by border between two units.
        shared: (home, unit, bytes, seconds) of each parameter that a later unit reads too.
    """

    devices: int
    recompute: bool
    seconds: np.ndarray
    once: np.ndarray
    fixed: np.ndarray
    saved: np.ndarray
    working: np.ndarray
    sends: np.ndarray
    shared: tuple[tuple[int, int, float, float], ...]

    @property
    def way(self) -> StageOption:
        """The prices of all stages, by (first unit, one past the last)."""
        n = len(self.seconds)
        total = lambda each: np.subtract.outer(np.r_[0.0, np.cumsum(each)], np.r_[0.0, np.cumsum(each)]).T
        seconds = total(self.seconds) + np.r_[0.0, self.sends, 0.0][None, :]
        seconds[np.tril_indices(n + 1)] = np.inf
        once, fixed = total(self.once), total(self.fixed)
        working = np.zeros((n + 1, n + 1))
        for first in range(n):
            working[first, first + 1 :] = np.maximum.accumulate(self.working[first:])
        for home, unit, nbytes, takes in self.shared:
            fixed[home + 1 : unit + 1, unit + 1 :] += nbytes  # a stage with the unit and without its home
            once[: home + 1, home + 1 : unit + 1] += takes  # the home's stage receives its gradient
            once[home + 1 : unit + 1, unit + 1 :] += takes
        return StageOption(self.devices, self.recompute, seconds, once, fixed + working, total(self.saved))


def recomputed(graph: Graph, units: Units, which: Sequence[int]) -> Graph:
    """The graph with these units recomputed in the backward, each by itself.

    Units that produce the results are left out: their backward comes next.
    """
    which = [u for u in which if u not in units.last]
    first = 1 + max((op.recompute.call for op in graph.ops if op.recompute is not None), default=-1)
    calls = {u: Recompute(first + k, units.paths[u][0]) for k, u in enumerate(which)}
    return graph.with_ops(
        tuple(
            op
            if op.recompute is not None or units.of.get(op.name) not in calls
            else replace(op, recompute=calls[units.of[op.name]])
            for op in graph.ops
        )
    )


def all_recomputed(plan: Plan, units: Units) -> Plan:
    """The plan with all units recomputed."""
    graph = recomputed(plan.graph, units, range(len(units)))
    ops = {op.name: op for op in graph.ops}
    return replace(plan, graph=graph, decisions={name: replace(d, op=ops[name]) for name, d in plan.decisions.items()})


def unit_prices(plan: Plan, units: Units, cluster: Cluster, recompute: bool = False) -> UnitPrices:
    """The prices of all units.

    Args:
        plan: of `units.reduced`.
        cluster: of all devices: transfers between stages use its links.
        recompute: True where `plan` is from `all_recomputed`.
    """
    count, last = len(units), len(units) - 1
    unit_of = lambda operator: units.of.get(operator, last)
    seconds, once, fixed, saved, working = np.zeros((5, count))
    costs = CostModel(Cluster.of(plan.cluster, plan.devices), plan.devices)
    one, two = (costs.plan(plan, times).by_operator for times in (1, 2))
    for operator, price in one.items():
        more = two[operator] - price
        seconds[unit_of(operator)] += more
        once[unit_of(operator)] += max(0.0, price - more)
    line, producers = (
        plan.unscheduled,
        {o.name: unit_of(i.operator) for i in plan.program.instructions for o in made_by(i)},
    )
    producers.update(units.homes)
    for table in (plan.graph.inputs, plan.graph.buffers.values()):
        producers.update((v.name, units.consumers[v.name][0]) for v in table if v.name in units.consumers)
    moving = []
    for allocation in line.allocations:
        unit = producers.get(allocation.name, unit_of(allocation.name))
        crosses = allocation.start < line.forward < allocation.stop
        if allocation.what in STANDING or (allocation.what == "gathered" and allocation.name in plan.gathered_once):
            fixed[unit] += allocation.bytes
        elif crosses:
            saved[unit] += allocation.bytes
        else:
            moving.append(allocation)
    for name, nbytes in plan.accumulated.items():
        fixed[producers[name]] += nbytes
    for operator, total in zip(line.moments, replace(line, allocations=tuple(moving)).totals()):
        working[unit_of(operator)] = max(working[unit_of(operator)], total)
    of = np.array(units.representative)
    return UnitPrices(
        plan.devices,
        recompute,
        seconds[of],
        once[of],
        fixed[of],
        saved[of],
        working[of],
        _sends(plan, units, cluster),
        _shared(plan, units, cluster),
    )


def _sends(plan: Plan, units: Units, cluster: Cluster) -> np.ndarray:
    """Seconds of the transfers across each border between units."""
    produced = {}
    for op in plan.graph.ops:
        decision = plan.decisions[op.name]
        for i, v in enumerate(v for v in op.outputs if v is not None):
            produced[v.name] = v, decision.out[i] if decision.out else decision.output_layout(i).without_partial()
    costs, known, out = CostModel(cluster), dict[str, float](), np.zeros(max(len(units) - 1, 0))
    for border, names in enumerate(units.crossing):
        for name in names:
            name = units.same[name].name if name in units.same else name
            if name not in known:
                value, layout = produced[name]
                nbytes = math.prod(layout.local_shape(layout.padded(value.shape))) * value.dtype.itemsize
                known[name] = _sent(costs, plan.devices, nbytes) * (1 + value.requires_grad)
            out[border] += known[name]
    return out


def _shared(plan: Plan, units: Units, cluster: Cluster) -> tuple[tuple[int, int, float, float], ...]:
    """(home, unit, bytes, seconds) of the parameters that units read besides their home."""
    out, costs = [], CostModel(cluster)
    for parameter in plan.program.parameters.values():
        name = parameter.value.name
        for unit in units.consumers.get(name, ())[1:]:
            nbytes = parameter.local_bytes
            out.append(
                (
                    units.homes[name],
                    unit,
                    float(nbytes * (1 + parameter.value.requires_grad)),
                    _sent(costs, plan.devices, nbytes) * parameter.value.requires_grad,
                )
            )
    return tuple(out)


def _sent(costs: CostModel, devices: int, nbytes: float) -> float:
    """Seconds of a transfer between neighbouring stages; the maximum over the borders."""
    borders = {between(costs.cluster, first, first + devices) for first in range(0, costs.devices - devices, devices)}
    return max((costs.collective(CollectiveKind.SEND, digits, nbytes) for digits in borders), default=0.0)

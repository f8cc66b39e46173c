"""What the units of a model take on a number of devices: seconds and bytes, read off one plan of their representatives.

    seconds(u)   what one more micro-batch costs the operators of u, conversions that they ask for among it
    once(u)      the rest of their price: sums of gradients, the gathering of stored parameters
    fixed(u)     parameters, gradients and the optimizer's state of u; of what is gathered of them and kept
    kept(u)      what u makes and the backward wants
    working(u)   the most that is there besides, while u is at work
    send(u)      what goes on from u and those before it to a further stage, and its gradient back

A stage of units [i, j) then takes the sums over them. Its plan is made later for its own; that of the representatives
stands for it, because in between they have the neighbours that they have there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cluster import Cluster
from ..graph import Graph, Recompute
from .balance import Way
from .costs import Costs
from .crossing import between
from .instructions import made_by
from .plan import Plan
from .units import Units

__all__ = ["UnitPrices", "all_recomputed", "recomputed", "unit_prices"]

#: What of a plan's memory is there all the time.
STANDING = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class UnitPrices:
    """Of every unit, in order; as above. `sends` is of the borders between them, `shared` (home, unit, bytes, seconds)
    of parameters that a later unit reads too."""

    devices: int
    recompute: bool
    seconds: np.ndarray
    once: np.ndarray
    fixed: np.ndarray
    kept: np.ndarray
    working: np.ndarray
    sends: np.ndarray
    shared: tuple[tuple[int, int, float, float], ...]

    @property
    def way(self) -> Way:
        """By stage: units from one to another."""
        n = len(self.seconds)
        total = lambda each: np.subtract.outer(np.r_[0.0, np.cumsum(each)], np.r_[0.0, np.cumsum(each)]).T  # noqa: E731
        seconds = total(self.seconds) + np.r_[0.0, self.sends, 0.0][None, :]
        seconds[np.tril_indices(n + 1)] = np.inf
        once, fixed = total(self.once), total(self.fixed)
        working = np.zeros((n + 1, n + 1))
        for first in range(n):
            working[first, first + 1:] = np.maximum.accumulate(self.working[first:])
        for home, unit, nbytes, takes in self.shared:
            fixed[home + 1:unit + 1, unit + 1:] += nbytes   # a stage with the unit and without its home
            once[:home + 1, home + 1:unit + 1] += takes     # the home's stage has its gradient back
            once[home + 1:unit + 1, unit + 1:] += takes
        return Way(self.devices, self.recompute, seconds, once, fixed + working, total(self.kept))


def recomputed(graph: Graph, units: Units, which: Sequence[int]) -> Graph:
    """The graph with these units computed again in the backward, each by itself, but for what makes the results: its
    backward comes next."""
    which = [u for u in which if u not in units.last]
    first = 1 + max((op.recompute.call for op in graph.ops if op.recompute is not None), default=-1)
    calls = {u: Recompute(first + k, units.paths[u][0]) for k, u in enumerate(which)}
    return graph.with_ops(tuple(
        op if op.recompute is not None or units.of.get(op.name) not in calls
        else replace(op, recompute=calls[units.of[op.name]]) for op in graph.ops))


def all_recomputed(plan: Plan, units: Units) -> Plan:
    """The plan with all units computed again."""
    graph = recomputed(plan.graph, units, range(len(units)))
    ops = {op.name: op for op in graph.ops}
    return replace(plan, graph=graph, decisions={name: replace(d, op=ops[name]) for name, d in plan.decisions.items()})


def unit_prices(plan: Plan, units: Units, cluster: Cluster, recompute: bool = False) -> UnitPrices:
    """The prices of all units.

    Args:
        plan: of `units.reduced`.
        cluster: of all devices: what crosses between stages goes over its links.
        recompute: whether it is one `all_recomputed`.
    """
    count, last = len(units), len(units) - 1
    unit_of = lambda operator: units.of.get(operator, last)  # noqa: E731
    seconds, once, fixed, kept, working = np.zeros((5, count))
    costs = Costs(Cluster.of(plan.cluster, plan.devices), plan.devices)
    one, two = (costs.plan(plan, times).by_operator for times in (1, 2))
    for operator, price in one.items():
        more = two[operator] - price
        seconds[unit_of(operator)] += more
        once[unit_of(operator)] += max(0.0, price - more)
    line, makers = plan.timeline, {o.name: unit_of(i.operator) for i in plan.routed.instructions for o in made_by(i)}
    makers.update(units.homes)
    for table in (plan.graph.inputs, plan.graph.buffers.values()):
        makers.update((v.name, units.readers[v.name][0]) for v in table if v.name in units.readers)
    moving = []
    for held in line.held:
        unit = makers.get(held.name, unit_of(held.name))
        crosses = held.start < line.forward < held.stop
        if held.what in STANDING or held.what == "gathered" and crosses:
            fixed[unit] += held.bytes
        elif crosses:
            kept[unit] += held.bytes
        else:
            moving.append(held)
    for operator, total in zip(line.moments, replace(line, held=tuple(moving)).totals()):
        working[unit_of(operator)] = max(working[unit_of(operator)], total)
    of = np.array(units.representative)
    return UnitPrices(plan.devices, recompute, *(each[of] for each in (seconds, once, fixed, kept, working)),
                      _sends(plan, units, cluster), _shared(plan, units, cluster))


def _sends(plan: Plan, units: Units, cluster: Cluster) -> np.ndarray:
    """Of the borders between units."""
    left = {}
    for op in plan.graph.ops:
        decision = plan.decisions[op.name]
        for i, v in enumerate(v for v in op.outputs if v is not None):
            left[v.name] = v, decision.out[i] if decision.out else decision.left(i).without_partial()
    costs, known, out = Costs(cluster), dict[str, float](), np.zeros(max(len(units) - 1, 0))
    for border, names in enumerate(units.crossing):
        for name in names:
            name = units.same[name].name if name in units.same else name
            if name not in known:
                value, layout = left[name]
                nbytes = math.prod(layout.local_shape(layout.padded(value.shape))) * value.dtype.itemsize
                known[name] = _sent(costs, plan.devices, nbytes) * (1 + value.requires_grad)
            out[border] += known[name]
    return out


def _shared(plan: Plan, units: Units, cluster: Cluster) -> tuple[tuple[int, int, float, float], ...]:
    """Of parameters that units read besides their home."""
    out, costs = [], Costs(cluster)
    for instance in plan.routed.parameters.values():
        name = instance.value.name
        for unit in units.readers.get(name, ())[1:]:
            nbytes = instance.local_bytes
            out.append((units.homes[name], unit, float(nbytes * (1 + instance.value.requires_grad)),
                        _sent(costs, plan.devices, nbytes) * instance.value.requires_grad))
    return tuple(out)


def _sent(costs: Costs, devices: int, nbytes: float) -> float:
    """Seconds from a stage to the next one, where that is farthest."""
    borders = {between(costs.cluster, first, first + devices) for first in range(0, costs.devices - devices, devices)}
    return max((costs.collective("send", digits, nbytes) for digits in borders), default=0.0)

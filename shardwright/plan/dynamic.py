"""dynamic_programming: the exact search.

    minimise the energy of `energy.py` over all strategies of `candidates.py` and those that the quicker planners chose

With a limit of memory, what is best without one is taken where it fits; otherwise what is recomputed and how parameters are
stored is searched too (`fitting.py`).

The plan comes with the least price that any other of them has in this energy (`Found.bound`); where its own is that, it
is the best of them, as the energy prices plans.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..graph import Graph
from ..layout import Layout
from .decision import Feeding
from .exact import solve
from .fitting import CUT, fit, fits
from .propagation import sharding_propagation
from .recursive import recursive_programming
from .search import Decided, Search
from .semi_auto import semi_auto
from .storage import OptimizerParallel

__all__ = ["dynamic_programming"]


def dynamic_programming(graph: Graph, devices: int, fed: Feeding, *, costs: Any, on_missing_rule: str = "error",
                        stored: dict[str, Layout] | None = None, uneven: bool = False, memory: float | None = None,
                        hsdp: OptimizerParallel | None = None, optimizer: Any = "adam",
                        cut: OptimizerParallel = CUT) -> Decided:
    """Decide every operator that no mark decides.

    Args:
        costs: a `Costs`: what a step takes.
        memory: bytes that a device may hold at any moment; None: not looked at. With it, what operators leave may be
            computed again in the backward, and where `hsdp` is None parameters may be stored cut over their replicas.
        optimizer: with memory, what keeps state for each parameter: see `memory.optimizer_bytes`.
        cut: with memory, how parameters may be stored.

    Raises:
        StrategyError, LayoutError, MissingRuleError: as `semi_auto`.
        PlanError: marks that no plan can keep, or no plan within the memory.
    """
    search = Search.of(graph, devices, fed, costs, on_missing_rule=on_missing_rule, stored=stored, uneven=uneven,
                       hsdp=hsdp).check()
    given = dict(on_missing_rule=on_missing_rule, stored=stored, uneven=uneven)
    known = [semi_auto(graph, devices, fed, **given)[0],
             recursive_programming(graph, devices, fed, costs=costs, hsdp=hsdp, **given).decisions]
    if any(op.mark is not None for op in graph.ops):
        known.append(sharding_propagation(graph, devices, fed, costs=costs, hsdp=hsdp, **given).decisions)
    options = search.options(known)
    free = search.energy(options, known)
    decided = search.decided(free, solve(free.problem), "search")
    if memory is None or fits(search, decided, memory, optimizer):
        return decided._replace(found=replace(decided.found, limit=memory))
    return fit(search, search.energy(options, known, cut=cut), memory, optimizer)

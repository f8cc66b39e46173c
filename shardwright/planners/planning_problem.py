"""The problem that a planner solves, and the table of planners.

A planner decides a strategy for each operator of a graph: a function of a `PlanningProblem` that returns `Decisions`.
The decorator `planner` enters it under the name of its mode:

    @planner("mine", searches=True)
    def mine(problem: PlanningProblem) -> Decisions: ...

    sw.plan(net, inputs, parallel_mode="mine")

The modes "stand_alone" and "hybrid_parallel" have no planner: the former is for one device, the latter runs operators
as they stand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..capture.source_lines import stack_level
from ..cluster import Cluster
from ..cost.cost_model import CostModel
from ..graph import Graph
from ..layout import Layout
from ..partition.local_program import Decisions, InputPlacement
from ..partition.parameter_sharding import OptimizerParallel
from .search_space import EdgeCosts

__all__ = [
    "CUT",
    "PLANNERS",
    "Planner",
    "PlanningProblem",
    "PriceBook",
    "modes",
    "planner",
    "planners",
    "warn_of_ignored_marks",
]

#: The most operators that a warning names.
MOST = 8


#: Storage that a search may choose for a parameter: cut over all replicas, and gathered again in the backward or kept
#: until then.
CUT = OptimizerParallel(-1, 0, "level3")


class PriceBook:
    """Prices that several plans share, such as those of a pipeline's stages."""

    def __init__(self) -> None:
        self._known: dict[Hashable, EdgeCosts] = {}

    def of(self, cluster: Cluster, devices: int, *rules: Hashable) -> EdgeCosts:
        """The prices on the innermost devices of a cluster, under settings that say which strategies are legal."""
        key = cluster, devices, rules
        if key not in self._known:
            self._known[key] = EdgeCosts(CostModel(cluster, devices))
        return self._known[key]


@dataclass(frozen=True)
class PlanningProblem:
    """Everything that decides a plan.

    Attributes:
        graph: the captured program, with marks on its operators.
        devices: the number of devices.
        input_placement: the layouts of the inputs, and the handling of the results.
        on_missing_rule: "error", or "replicate" to run an operator without a rule whole.
        stored: layouts of parameters and buffers that are settled already.
        uneven: pad dims that their cuts do not divide, where the operator allows it.
        cost_model: prices of a step; None: those of the default cluster of `devices` devices.
        hsdp: ZeRO/FSDP sharding (optimizer parallel) of the other parameters.
        memory: the limit in bytes a device, at any moment; None: no limit. With a limit, outputs of operators may be
            recomputed in the backward, and where `hsdp` is None parameters may be stored cut over their replicas.
        optimizer: used with `memory`: the optimizer that keeps state for each parameter, see
            `memory_timeline.optimizer_bytes`.
        cut: used with `memory`: the storage that a parameter may have.
        deliveries: prices by the same cost model that other searches share; None: the search has its own.
    """

    graph: Graph
    devices: int
    input_placement: InputPlacement
    on_missing_rule: str = "error"
    stored: Mapping[str, Layout] | None = None
    uneven: bool = False
    cost_model: CostModel | None = None
    hsdp: OptimizerParallel | None = None
    memory: float | None = None
    optimizer: str | float | None = None
    cut: OptimizerParallel = CUT
    deliveries: EdgeCosts | None = None

    @cached_property
    def costs(self) -> CostModel:
        """Prices of a step, and the links between the devices."""
        return self.cost_model or CostModel(Cluster.of(None, self.devices), self.devices)


@dataclass(frozen=True)
class Planner:
    """A mode that decides strategies.

    Attributes:
        name: the mode.
        decide: the function. It raises StrategyError, LayoutError or MissingRuleError for an operator that cannot
            follow its mark or has no rule, and PlanError where no plan is allowed.
        searches: True where it compares the seconds of plans; one process then searches for all.
        fits_memory: True where it keeps a limit of memory.
    """

    name: str
    decide: Callable[[PlanningProblem], Decisions]
    searches: bool = False
    fits_memory: bool = False

    def __call__(self, problem: PlanningProblem) -> Decisions:
        return self.decide(problem)


#: Mode -> its planner.
PLANNERS: dict[str, Planner] = {}


def planner(
    name: str, *, searches: bool = False, fits_memory: bool = False
) -> Callable[[Callable[[PlanningProblem], Decisions]], Callable[[PlanningProblem], Decisions]]:
    """Enter a planner under the name of its mode. The function itself stays as it is.

    Args:
        name: the mode.
        searches: True where it compares the seconds of plans.
        fits_memory: True where it keeps `PlanningProblem.memory`.
    """

    def entered(decide: Callable[[PlanningProblem], Decisions]) -> Callable[[PlanningProblem], Decisions]:
        PLANNERS[name] = Planner(name, decide, searches, fits_memory)
        return decide

    return entered


def planners(*, searches: bool = False, fits_memory: bool = False) -> tuple[str, ...]:
    """The modes that have a planner.

    Args:
        searches: True: only those that search.
        fits_memory: True: only those that keep a limit of memory.
    """
    return tuple(name for name, p in PLANNERS.items() if p.searches >= searches and p.fits_memory >= fits_memory)


#: The modes that ignore the strategies of `shardwright.shard`.
IGNORING = ("stand_alone", "hybrid_parallel", "data_parallel")


def warn_of_ignored_marks(graph: Graph, mode: str) -> None:
    """Warn of the marked operators of a graph where the mode ignores their strategies."""
    marked = [f"{op.name} ({op.mark.source})" for op in graph.ops if op.mark is not None]
    if mode not in IGNORING or not marked:
        return
    named = ", ".join(marked[:MOST]) + (f" and {len(marked) - MOST} more" if len(marked) > MOST else "")
    warnings.warn(
        f'parallel_mode="{mode}" ignores the strategies of {named}; modes that follow them: '
        + ", ".join(name for name in PLANNERS if name not in IGNORING),
        stacklevel=stack_level(),
    )


def modes() -> tuple[str, ...]:
    """All parallel modes."""
    return ("stand_alone", "hybrid_parallel", *PLANNERS)

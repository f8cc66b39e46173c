"""What the searching planners share: the operators, what marks decide of them, and how a solution becomes a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import PlanError
from ..graph import Graph, Op
from ..layout import Digits, Layout
from .candidates import Described, Strategy, atoms_of, options_of, strategy_of
from .decision import Decided, Decision, Feeding, Found, batch_dims
from .delivery import Deliveries
from .energy import Energy, energy
from .problem import Solution
from .route import wanted_in_two
from .semi_auto import marked_decision, marked_output
from .storage import OptimizerParallel

__all__ = ["Search"]


@dataclass(frozen=True)
class Search:
    """The givens of a search.

    Args:
        described: the operators.
        fed: how inputs come in and results go out.
        costs: a `Costs`.
        stored: how parameters and buffers are stored, where that is settled already.
        hsdp: how the other parameters are stored.
    """

    described: Described
    fed: Feeding
    costs: Any
    stored: Mapping[str, Layout] | None = None
    hsdp: OptimizerParallel | None = None

    @classmethod
    def of(cls, graph: Graph, devices: int, fed: Feeding, costs: Any, *, on_missing_rule: str = "error",
           stored: Mapping[str, Layout] | None = None, uneven: bool = False,
           hsdp: OptimizerParallel | None = None) -> Search:
        """Look the operators up.

        Raises:
            MissingRuleError: an operator without a rule.
        """
        return cls(Described.of(graph, devices, on_missing_rule, uneven), fed, costs, stored, hsdp)

    def check(self) -> Search:
        """Itself, if there is anything to search.

        Raises:
            PlanError: nothing of the model can be cut for so many devices, or two marks ask for a parameter in different
                layouts.
        """
        own = {v.name for n, v in self.described.graph.parameters.items() if n not in (self.stored or {})}
        wants: dict[str, tuple[Layout, Op]] = {}
        for op in self.described.graph.ops:
            for i, value in enumerate(op.inputs if op.name in self.fixed else ()):
                mine = self.fixed[op.name].wanted(i), op
                if value.name in own and wants.setdefault(value.name, mine)[0] != mine[0]:
                    raise wanted_in_two(value, wants[value.name], mine)
        devices = self.described.devices
        factors = [f for _, bound, _ in self.described.rules.values() for f in bound.factors if f.splittable]
        sizes = {f.size for f in factors}
        if devices > 1 and not self.fixed and not any(f.pads for f in factors) and \
                all(math.gcd(size, devices) == 1 for size in sizes):
            counts = [n for n in range(devices - 1, 1, -1) if any(math.gcd(size, n) > 1 for size in sizes)]
            raise PlanError(f"no dim that may be cut divides by {devices} or a factor of it: all {devices} devices would "
                            "repeat the same work", strategy=f"devices={devices}",
                            legal=f"{', '.join(map(str, counts[:3]))} devices" if counts else "one device, or uneven=True")
        return self

    @cached_property
    def carries(self) -> dict[str, int]:
        """Value name -> the dim that carries the batch."""
        return batch_dims(self.described.graph, {n: bound for n, (_, bound, _) in self.described.rules.items()})

    @cached_property
    def fixed(self) -> dict[str, Decision]:
        """The operators that marks decide.

        Raises:
            StrategyError, LayoutError: a mark that the operator cannot follow.
        """
        out = {}
        for op in self.described.graph.ops:
            if op.mark is not None and op.mark.in_strategy is not None:
                rule, bound, note = self.described.rules[op.name]
                decision = marked_decision(op, rule, bound, self.described.devices)
                out[op.name] = replace(decision, note=note, open=(), out=self.outs.get(op.name))
        return out

    @cached_property
    def outs(self) -> dict[str, tuple[Layout, ...]]:
        """The layouts to which marks bring outputs."""
        return {op.name: marked_output(op, self.described.rules[op.name][1], self.described.devices)
                for op in self.described.graph.ops if op.mark is not None and op.mark.out_strategy is not None}

    @cached_property
    def atoms(self) -> Digits:
        """The digits that are assigned."""
        return atoms_of(self.described.devices, [level.size for level in self.costs.cluster.levels])

    @cached_property
    def deliveries(self) -> Deliveries:
        """Prices that all energies of the search share."""
        return Deliveries(self.costs)

    def options(self, known: Iterable[Mapping[str, Decision]] = (), atoms: Digits | None = None
                ) -> dict[str, tuple[Strategy, ...]]:
        """The strategies of every operator, those of known plans among them."""
        return options_of(self.described, self.atoms if atoms is None else atoms, self.fixed, self.outs, known)

    def energy(self, options: Mapping[str, tuple[Strategy, ...]], known: Iterable[Mapping[str, Decision]] = (),
               cut: OptimizerParallel | None = None) -> Energy:
        """The problem of choosing among them; no dearer than the known plans, whose strategies are among them.

        Args:
            cut: how else each parameter may be stored, where nothing says how.
        """
        plans = [{name: strategy_of(decision) for name, decision in plan.items()} for plan in known]
        return energy(self.described, options, self.fed, self.carries, self.costs, stored=self.stored, hsdp=self.hsdp,
                      cut=cut, known=plans, deliveries=self.deliveries)

    def decided(self, made: Energy, solution: Solution, cause: str, proved: bool = True) -> Decided:
        """A solution as a planner's result."""
        decisions = made.decisions(solution.states, self.fixed, cause)
        count = sum(map(len, made.options.values()))
        found = Found(solution.cost, solution.bound if proved else None, len(decisions), count, solution.notes)
        return Decided(decisions, self.carries, found)

"""Two plans, compared: which operators are split in another way, and what a step takes under each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..cluster import Cluster
from ..plan.decision import Decision
from ..plan.document_writing import dataset_strategy, digest
from ..plan.explain import opened
from ..plan.graph_document import types_of
from ..plan.plan import ParameterPlan, Plan
from ..plan.spelling import spell_assignment, spell_digits, spell_layout
from .units import size_text, time_text

__all__ = ["Difference", "difference", "strategy_text"]


@dataclass(frozen=True)
class Difference:
    """How a plan differs from another.

    Attributes:
        settings: a line for each setting that differs.
        operators: a line for each operator that is split in another way, that one has and the other has not, or whose
            shapes are others.
        parameters: a line for each parameter that is stored in another way.
    """

    before: Plan
    after: Plan
    settings: tuple[str, ...]
    operators: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the plans say the same."""
        return not (self.settings or self.operators or self.parameters)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """All of it, and what a step takes."""
        totals = f"a step: {time_text(self.before.cost)} -> {time_text(self.after.cost)}"
        if self.before.cost:
            totals += f" ({self.after.cost / self.before.cost - 1:+.2%})"
        counts = f"{len(self.operators)} operators and {len(self.parameters)} parameters differ" \
            if not self.equal else "equal"
        return (*self.settings, *self.operators, *self.parameters,
                f"{counts}; {totals}; "
                f"at most on a device: {size_text(self.before.peak)} -> {size_text(self.after.peak)}")


def difference(before: Plan, after: Plan) -> Difference:
    """Compare two plans, operators and parameters by their names."""
    return Difference(before, after, tuple(_settings(before, after)), tuple(_operators(before, after)),
                      tuple(_parameters(before, after)))


def _settings(before: Plan, after: Plan) -> Iterator[str]:
    def name(plan: Plan) -> str | None:
        return None if plan.cluster is None else plan.cluster.name
    for what, one, other in (
            ("devices", before.devices, after.devices), ("mode", before.mode, after.mode),
            ("dataset_strategy", *map(dataset_strategy, (before, after))), ("hsdp", before.hsdp, after.hsdp),
            ("optimizer", before.optimizer, after.optimizer)):
        if one != other:
            yield f"{what}: {one} -> {other}"
    if _cluster(before) != _cluster(after):
        yield f"cluster: {name(before)} -> {name(after)}" if name(before) != name(after) else \
            f"cluster: {name(before)}, of other figures"


def _cluster(plan: Plan) -> Cluster:
    return Cluster.of(plan.cluster, plan.devices)


def _operators(before: Plan, after: Plan) -> Iterator[str]:
    prices, through = (before.price.by_operator, after.price.by_operator), (opened(before), opened(after))
    for name, old in before.decisions.items():
        new = after.decisions.get(name)
        if new is None:
            yield f"- {name}: {strategy_text(old)} {time_text(prices[0].get(name, 0.0))}"
            continue
        types, cost = [types_of(d.op) for d in (old, new)], [time_text(p.get(name, 0.0)) for p in prices]
        if types[0] != types[1] or old.op.kind != new.op.kind:
            yield f"~ {name}: {old.op.kind} {types[0]} {cost[0]} -> {new.op.kind} {types[1]} {cost[1]}"
            continue
        one, other = (replace(d, open=o.get(name, ())) for d, o in zip((old, new), through))
        if digest(one.op, one) != digest(other.op, other):
            yield f"~ {name}: {strategy_text(one)} {cost[0]} -> {strategy_text(other)} {cost[1]}"
    for name, new in after.decisions.items():
        if name not in before.decisions:
            yield f"+ {name}: {strategy_text(new)} {time_text(prices[1].get(name, 0.0))}"


def _parameters(before: Plan, after: Plan) -> Iterator[str]:
    old, new = before.parameters, after.parameters
    for name in old:
        if name not in new:
            yield f"- parameter {name}: {_stored(old[name])}"
        elif (old[name].storage, old[name].shape) != (new[name].storage, new[name].shape):
            yield f"~ parameter {name}: {_stored(old[name])} -> {_stored(new[name])}"
    yield from (f"+ parameter {name}: {_stored(new[name])}" for name in new if name not in old)


def _stored(parameter: ParameterPlan) -> str:
    return f"{list(parameter.shape)} {_layout(spell_layout(parameter.storage))}"


def _layout(words: Any) -> str:
    return str(tuple(words)) if isinstance(words, list) else \
        f"Layout({tuple(words['device_matrix'])}, {tuple(words['alias_name'])}){_entries(words['layout'])}"


def _entries(entry: list) -> str:
    return repr(tuple(tuple(e) if isinstance(e, list) else e for e in entry))


def strategy_text(decision: Decision) -> str:
    """A strategy as one writes it, on a line: its in_strategy, and what else it says."""
    words = spell_assignment(decision.bound, decision.assignment)
    if "device_matrix" in words:
        text = f"Layout({tuple(words['device_matrix'])}, {tuple(words['alias_name'])}): " + \
            ", ".join(map(_entries, words["in_strategy"]))
        if "leaves" in words:
            text += " -> " + ", ".join(map(_entries, words["leaves"]))
    else:
        text = str(tuple(map(tuple, words["in_strategy"])))
    if decision.out is not None:
        text += " out_strategy " + ", ".join(_layout(spell_layout(layout)) for layout in decision.out)
    if decision.open:
        text += f" open {spell_digits(decision.assignment.devices, decision.open)['axes']}"
    return text + " recomputed" * (decision.op.recompute is not None)


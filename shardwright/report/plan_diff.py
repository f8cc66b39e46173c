"""Two plans compared: settings, operators and parameters that differ, and the time of a step under each.

A line begins with ``-`` (only in the first plan), ``+`` (only in the second) or ``~`` (in both, and different). It has
the path of an operator; operators and parameters of equal layers that differ alike are one line. Operators are matched
by their paths, parameters by their names. Costs of a pipeline's operators are those of one micro-batch.

    ~ layers.{0-3}.up: ((8, 1), (1, 1), (1,)) 1.2 ms -> ((2, 1), (4, 1), (4,)) 1 ms, each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ..cluster import Cluster
from ..graph import types_of
from ..operator_explanation import partial_sums
from ..partition.local_program import Decision
from ..partition.parameter_sharding import OptimizerParallel
from ..pipeline.pipeline_plan import PipelinePlan, StageParameter
from ..planfile.document_writer import dataset_strategy, digest, encode_pipeline, pipeline_dataset_strategy
from ..planfile.encoding import spell_assignment, spell_digits, spell_layout
from ..sharded_plan import ParameterPlan, Plan
from .console_tables import wrapped
from .format import size_text, time_text
from .operator_names import OperatorNames
from .table_elements import folded_parameters

__all__ = ["Difference", "PlanChange", "difference", "strategy_text"]


@dataclass(frozen=True)
class PlanChange:
    """A difference of operators or parameters of equal layers.

    Attributes:
        sign: "-", "+" or "~".
        path: the path of all of them.
        names: their names, in the first plan where it has them.
        before, after: the text for each of them in the first plan and in the second; "": not in it.
    """

    sign: str
    path: str
    names: tuple[str, ...]
    before: str
    after: str

    def __str__(self) -> str:
        texts = " -> ".join(filter(None, (self.before, self.after)))
        return f"{self.sign} {self.path}: {texts}" + ", each" * (len(self.names) > 1)

    def lines(self, width: int) -> Iterator[str]:
        """The change as lines of at most `width` characters: one, or its path and what is before and after."""
        if len(str(self)) <= width:
            yield str(self)
            return
        each = " (each)" * (len(self.names) > 1)
        yield from wrapped(f"{self.sign} {self.path}{each}:", width)
        for sign, text in (("     ", self.before), ("  -> " if self.before else "     ", self.after)):
            before = sign
            for line in wrapped(text, width - len(sign)) if text else ():
                yield before + line
                before = "     "


@dataclass(frozen=True)
class Difference:
    """The difference of two plans.

    Attributes:
        before, after: the plans.
        settings: a line for each setting that differs.
        operators: those that only one plan has, or whose strategy, stage or shapes differ.
        parameters: those that only one plan has, or whose storage differs.
    """

    before: Plan | PipelinePlan
    after: Plan | PipelinePlan
    settings: tuple[str, ...]
    operators: tuple[PlanChange, ...]
    parameters: tuple[PlanChange, ...]

    @property
    def equal(self) -> bool:
        """True where no line differs."""
        return not (self.settings or self.operators or self.parameters)

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines, and last the number of differences, the time of a step and the peak memory of both plans."""
        return (*self.settings, *map(str, (*self.operators, *self.parameters)), self.total)

    def fitted(self, width: int) -> Iterator[str]:
        """The same, as lines of at most `width` characters."""
        for text in self.settings:
            yield from wrapped(text, width)
        for change in (*self.operators, *self.parameters):
            yield from change.lines(width)
        yield from wrapped(self.total, width)

    @cached_property
    def total(self) -> str:
        """The number of differences, the time of a step and the peak memory of both plans."""
        totals = f"a step: {time_text(self.before.cost)} -> {time_text(self.after.cost)}"
        if self.before.cost:
            totals += f" ({self.after.cost / self.before.cost - 1:+.2%})"
        operators, parameters = (
            _count(sum(len(change.names) for change in changes), what)
            for changes, what in ((self.operators, "operator"), (self.parameters, "parameter"))
        )
        counts = "equal" if self.equal else f"{operators} and {parameters} differ"
        return f"{counts}; {totals}; at most on a device: {size_text(self.before.peak)} -> {size_text(self.after.peak)}"


def difference(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> Difference:
    """Compare two plans, operators by their paths and parameters by their names.

    Args:
        before, after: the plans. Costs of a pipeline's operators are those of one micro-batch.
    """
    return Difference(
        before,
        after,
        tuple(_settings(before, after)),
        tuple(_operators(before, after)),
        tuple(_parameters(before, after)),
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _settings(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> Iterator[str]:
    def name(plan: Plan | PipelinePlan) -> str | None:
        return None if plan.cluster is None else plan.cluster.name

    for what, one, other in (
        ("devices", before.devices, after.devices),
        ("mode", before.mode, after.mode),
        ("dataset_strategy", *map(_strategy_of_inputs, (before, after))),
        ("hsdp", *map(_hsdp, (before, after))),
        ("optimizer", before.optimizer, after.optimizer),
        ("memory", *map(_memory, (before, after))),
        *_pipeline(before, after),
    ):
        if one != other:
            yield f"{what}: {one} -> {other}"
    if _cluster(before) != _cluster(after):
        yield (
            f"cluster: {name(before)} -> {name(after)}"
            if name(before) != name(after)
            else f"cluster: {name(before)}, of other figures"
        )


def _parts(plan: Plan | PipelinePlan) -> dict[int | None, Plan]:
    """The plans of the stages by number; for a plan without a pipeline, the plan itself under None."""
    return {stage.number: stage.plan for stage in plan.stages} if isinstance(plan, PipelinePlan) else {None: plan}


def _strategy_of_inputs(plan: Plan | PipelinePlan) -> object:
    return pipeline_dataset_strategy(plan) if isinstance(plan, PipelinePlan) else dataset_strategy(plan)


def _hsdp(plan: Plan | PipelinePlan) -> str:
    """The optimizer-parallel setting; where the stages have several, all of them."""
    texts = [_setting(part.hsdp) for part in _parts(plan).values()]
    return "; ".join(dict.fromkeys(texts))


def _setting(hsdp: OptimizerParallel | None) -> str:
    """``level3 over 4 replicas, from 64 KB on``."""
    if hsdp is None:
        return "none"
    over = "all replicas" if hsdp.shard_size == -1 else f"{hsdp.shard_size} replicas"
    exceptions = [f"{_count(len(hsdp.whole), 'parameter')} whole"] if hsdp.whole else []
    exceptions += [f"weights of {_count(len(hsdp.kept), 'parameter')} kept for the backward"] if hsdp.kept else []
    return ", ".join((f"{hsdp.optimizer_level} over {over}", f"from {hsdp.threshold:.15g} KB on", *exceptions))


def _memory(plan: Plan | PipelinePlan) -> str:
    """The memory limit of the search; where the stages have several, all of them."""
    limits = [None if part.found is None else part.found.limit for part in _parts(plan).values()]
    texts = ["no limit" if limit is None else f"{limit:.15g} bytes a device" for limit in dict.fromkeys(limits)]
    return ", ".join(texts)


def _pipeline(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> Iterator[tuple[str, object, object]]:
    """The settings of two plans that concern pipelines alone: (name, first, second)."""
    one, other = ({} if isinstance(plan, Plan) else encode_pipeline(plan) for plan in (before, after))
    encoded = {
        "stages": "groups of devices",
        "scheduler": "schedule",
        "micro_batches": "micro-batches",
        "placement": "groups of the stages",
        "split": "inputs that are split",
    }
    for key, what in encoded.items():
        yield what, one.get(key, "no pipeline"), other.get(key, "no pipeline")
    if one.get("actions") != other.get("actions") and one.get("scheduler") == other.get("scheduler"):
        yield f"actions of {one['scheduler']}", "as they were", "others"
    if one and other:
        first, second = ([part.devices for part in _parts(plan).values()] for plan in (before, after))
        yield "devices of the stages", first, second


def _cluster(plan: Plan | PipelinePlan) -> Cluster:
    return Cluster.of(plan.cluster, plan.devices)


class _Placed(NamedTuple):
    """An operator in a plan.

    Attributes:
        stage: the number of its stage; None without a pipeline.
        decision: its strategy, with the partial sums that it lets through.
        seconds: its cost in a step, or with one micro-batch.
    """

    stage: int | None
    decision: Decision
    seconds: float

    def __str__(self) -> str:
        return f"{strategy_text(self.decision)} {time_text(self.seconds)}"

    @property
    def shapes(self) -> str:
        """The kind of the operator and its shapes."""
        return f"{self.decision.op.kind} {types_of(self.decision.op)}"


def _placed(plan: Plan | PipelinePlan, names: OperatorNames) -> dict[str, tuple[str, _Placed]]:
    """Path of an operator -> its name, and its place in the plan."""
    out = {}
    for number, part in _parts(plan).items():
        prices, through = part.price.by_operator, partial_sums(part)
        for name, decision in part.decisions.items():
            placed = _Placed(number, replace(decision, partial=through.get(name, ())), prices.get(name, 0.0))
            out[names.paths.get(name, name)] = name, placed
    return out


def _operators(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> Iterator[PlanChange]:
    first, second = OperatorNames(before), OperatorNames(after)
    olds, news = _placed(before, first), _placed(after, second)
    changes: dict[str, tuple[str, str, str]] = {}
    for path, (name, old) in olds.items():
        if path not in news:
            changes[name] = "-", str(old), ""
            continue
        _, new = news[path]
        stages = {old.stage, new.stage}
        moved = len(stages) > 1 and None not in stages
        if old.shapes != new.shapes:
            texts = [f"{one.shapes} {time_text(one.seconds)}" for one in (old, new)]
        elif moved or digest(old.decision.op, old.decision) != digest(new.decision.op, new.decision):
            texts = [str(old), str(new)]
        else:
            continue
        one, other = [f"stage {p.stage}, {t}" for p, t in zip((old, new), texts)] if moved else texts
        changes[name] = "~", one, other
    yield from _folded(changes, first)
    yield from _folded({name: ("+", "", str(new)) for path, (name, new) in news.items() if path not in olds}, second)


def _folded(changes: Mapping[str, tuple[str, str, str]], names: OperatorNames) -> Iterator[PlanChange]:
    """The changes of operators of one plan, those of equal layers that are equal as one."""
    for path, group in names.folded(changes, changes.__getitem__):
        sign, old, new = changes[group[0]]
        yield PlanChange(sign, path, group, old, new)


def _parameters(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> Iterator[PlanChange]:
    old, new = before.parameters, after.parameters
    changes: dict[str, tuple[str, str, str]] = {}
    for name in old:
        if name not in new:
            changes[name] = "-", _stored(old[name]), ""
        elif _place(old[name]) != _place(new[name]):
            changes[name] = "~", _stored(old[name]), _stored(new[name])
    changes |= {name: ("+", "", _stored(new[name])) for name in new if name not in old}
    for path, group in folded_parameters(changes):
        sign, one, other = changes[group[0]]
        yield PlanChange(sign, f"parameter {path}", group, one, other)


def _stored(parameter: ParameterPlan) -> str:
    on = (
        f" in stage {parameter.stage}, on ranks {parameter.ranks[0]}-{parameter.ranks[-1]}"
        if isinstance(parameter, StageParameter)
        else ""
    )
    return f"{list(parameter.shape)} {_layout(spell_layout(parameter.storage))}{on}"


def _place(parameter: ParameterPlan) -> tuple[object, ...]:
    """The layout, shape and stage of a parameter's storage."""
    staged = (parameter.stage, parameter.ranks) if isinstance(parameter, StageParameter) else ()
    return parameter.storage, parameter.shape, *staged


def _layout(encoded: Any) -> str:
    return (
        str(tuple(encoded))
        if isinstance(encoded, list)
        else f"Layout({tuple(encoded['device_matrix'])}, {tuple(encoded['alias_name'])}){_entries(encoded['layout'])}"
    )


def _entries(entry: list[object]) -> str:
    return repr(tuple(tuple(e) if isinstance(e, list) else e for e in entry))


def strategy_text(decision: Decision) -> str:
    """A strategy on one line: its in_strategy as a user writes it, then its other settings."""
    encoded = spell_assignment(decision.bound, decision.assignment)
    if "device_matrix" in encoded:
        text = f"Layout({tuple(encoded['device_matrix'])}, {tuple(encoded['alias_name'])}): " + ", ".join(
            map(_entries, encoded["in_strategy"])
        )
        if "leaves" in encoded:
            text += " -> " + ", ".join(map(_entries, encoded["leaves"]))
    else:
        text = str(tuple(map(tuple, encoded["in_strategy"])))
    if decision.out is not None:
        text += " out_strategy " + ", ".join(_layout(spell_layout(layout)) for layout in decision.out)
    if decision.partial:
        text += f" open {spell_digits(decision.assignment.devices, decision.partial)['axes']}"
    return text + " recomputed" * (decision.op.recompute is not None)

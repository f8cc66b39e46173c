"""What a planner decides: for each operator, which digits cut which factor; for each input, what a rank is fed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import MissingRuleError, SettingError, ShardwrightError
from ..graph import Graph, Op
from ..layout import Digits, Layout, digits_size
from ..rules import Assignment, Bound, Rule, bound_rule, find_rule, whole_rule
from .storage import OptimizerParallel

__all__ = ["MODES", "Decided", "Decision", "Feeding", "Found", "batch_dims", "feeding"]

#: All parallel modes.
MODES = ("stand_alone", "hybrid_parallel", "data_parallel", "semi_auto", "sharding_propagation", "recursive_programming",
         "dynamic_programming")


@dataclass(frozen=True)
class Decision:
    """The strategy of one operator.

    Args:
        op, rule, bound: the operator and its description, bound to its shapes.
        assignment: which digits cut which factor.
        out: the layouts that its outputs are brought to, where an out_strategy says so.
        cause: who decided: "mark", "batch" (cut along the batch), "follow" (a view that follows), "whole",
            "propagated" (from a mark).
        note: what could not be done as one might expect.
        open: the digits of the sum that it lets through, as a planner that prices them decides; None: whatever comes
            open and can pass does.
        origin: where a mark on another operator decided: that operator's name.
        via: the operator that handed it on; "" where it is not one that lies on the way still.
    """

    op: Op
    rule: Rule
    bound: Bound
    assignment: Assignment
    out: tuple[Layout, ...] | None = None
    cause: str = "mark"
    note: str | None = None
    open: Digits | None = None
    origin: str = ""
    via: str = ""

    def wanted(self, index: int) -> Layout:
        """The layout that the operator asks for input `index`, sums completed."""
        layout = self.bound.input_layout(index, self.assignment)
        assert layout is not None, f"{self.op.name}: input {index} has no layout"
        return layout

    def left(self, index: int) -> Layout:
        """The layout in which the operator leaves output `index`, open sums included, before any out_strategy."""
        layout = self.bound.output_layout(index, self.assignment)
        assert layout is not None, f"{self.op.name}: output {index} has no layout"
        return layout


def description(op: Op, on_missing_rule: str, devices: int, uneven: bool = False) -> tuple[Rule, Bound, str | None]:
    """An operator's rule and binding; without a rule the whole rule, with a note, where that is asked for. Uneven: its
    dims may be padded.

    Raises:
        MissingRuleError: no rule, and `on_missing_rule` is "error" or the operator cannot be repeated on every device.
    """
    found, note = find_rule(op), None
    if found is None and on_missing_rule == "replicate":
        if devices > 1 and (reason := unrepeatable(op)):
            raise MissingRuleError(f"there is no rule for {op.target}, and run whole on {devices} devices it would "
                                   f"{reason}", **op.where, legal='a model without it, or parallel_mode="stand_alone"')
        found, note = whole_rule(op), f"{op.kind} has no rule: it runs whole on every device"
    return (*_bound(op, found, uneven), note)


def unrepeatable(op: Op) -> str | None:
    """What goes wrong when every device makes this call; None where nothing does, as with a dropout in evaluation."""
    trains = op.argument("train", op.argument("training", True))
    if torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ()):
        share = next((op.argument(name) for name in ("p", "dropout_p", "dropout") if name in op.argument_names), 1)
        return "draw other random numbers on each" if trains and share else None
    return None


def _bound(op: Op, found: Rule | None, uneven: bool) -> tuple[Rule, Bound]:
    bound = bound_rule(op, found, uneven)
    assert found is not None
    return found, bound


@dataclass(frozen=True)
class Feeding:
    """How a batch comes in and how results go out.

    Args:
        inputs: the layout in which each (flattened) tensor input is fed.
        own_part: each rank feeds its own part of the batch, and gets its own part of outputs that carry the batch.
        batch: the digits that cut the batch of such outputs; empty: those of dim 0 of the first input that is cut.
        kept: name of an output that goes on to another stage -> 1, or how many neighbouring ranks are to hold the same
            of it. It is handed on as the operator that makes it has it, but for that.
    """

    inputs: tuple[Layout, ...]
    own_part: bool
    batch: Digits = ()
    kept: Mapping[str, int] = field(default_factory=dict)


def feeding(graph: Graph, devices: int, dataset_strategy: Any) -> Feeding:
    """The layouts of a graph's inputs under a dataset strategy.

    Args:
        dataset_strategy: "data_parallel" (dim 0 cut over all devices), "full_batch", or a tuple with one entry per
            tensor input: a tuple of cuts (the rest repeated on the right) or a Layout.

    Raises:
        SettingError, LayoutError: an unknown word, another number of entries or dims, cuts that do not divide.
    """
    shapes = [v.shape for v in graph.inputs]
    if dataset_strategy == "full_batch":
        return Feeding(tuple(Layout.replicated(devices, len(s)) for s in shapes), False)
    if dataset_strategy == "data_parallel":
        for value in graph.inputs:
            if value.shape and value.shape[0] % devices:
                raise SettingError(f"the batch of input {value.name!r} has size {value.shape[0]}, which "
                                   f"{devices} devices do not divide", strategy='dataset_strategy("data_parallel")',
                                   legal='a batch that divides, or dataset_strategy("full_batch")')
        return Feeding(tuple(Layout.from_cuts(devices, (devices,) + (1,) * (len(s) - 1)) if s
                             else Layout.replicated(devices, 0) for s in shapes), True)
    if not isinstance(dataset_strategy, (tuple, list)):
        raise SettingError(f"unknown dataset_strategy {dataset_strategy!r}",
                           legal='"data_parallel", "full_batch", or a tuple with one entry per tensor input')
    simple = tuple((math.gcd(s[0], devices), *[1] * (len(s) - 1)) if s else () for s in shapes)
    words = '"data_parallel", ' if all(not s or s[0] % devices == 0 for s in shapes) else ""
    legal = f'{words}"full_batch", or {simple}'
    if len(dataset_strategy) != len(shapes):
        raise SettingError(f"the dataset_strategy has {len(dataset_strategy)} entries, the model is fed "
                           f"{len(shapes)} tensors of shapes {shapes}", strategy=dataset_strategy, legal=legal)
    layouts = []
    for value, entry in zip(graph.inputs, dataset_strategy):
        try:
            if not isinstance(entry, (tuple, list, Layout)):
                raise SettingError(f"the entry {entry!r} is neither a tuple of cuts nor a Layout")
            layout = entry if isinstance(entry, Layout) else Layout.from_cuts(devices, entry)
            if layout.devices != devices or layout.dims is None:
                raise SettingError(f"its Layout must lay out the {len(value.shape)} dims of {value.shape} on {devices} "
                                   f"devices, it has {layout.devices}")
            layout.local_shape(value.shape)
        except ShardwrightError as error:
            raise type(error)(error.message, operator=f"dataset_strategy of input {value.name!r}",
                              strategy=dataset_strategy, legal=legal) from None
        layouts.append(layout)
    return Feeding(tuple(layouts), any(not layout.is_replicated for layout in layouts))


def batch_dims(graph: Graph, bounds: dict[str, Bound]) -> dict[str, int]:
    """Value name -> the dim that carries the batch: that of the inputs, and whatever shares its factor from there on.

    Where the batch is merged with other dims, the merged dim carries it as long as the batch is its major part.
    """
    carries = {v.name: 0 for v in graph.inputs if v.shape} if graph.batch is None else dict(graph.batch)
    for op in graph.ops:
        factor = batch_factor(op, bounds[op.name], carries)
        if factor is None:
            continue
        outputs = [v for v in op.outputs if v is not None]
        for value, dims in zip(outputs, bounds[op.name].outputs):
            for d, dim in enumerate(dims):
                if dim and dim[0] == factor:
                    carries[value.name] = d
                    break
    return carries


def batch_factor(op: Op, bound: Bound, carries: dict[str, int]) -> int | None:
    """The factor of an operator that is the batch, or None where no input carries one."""
    for value, dims in zip(op.inputs, bound.inputs):
        d = carries.get(value.name)
        if d is not None and dims[d]:
            return dims[d][0]
    return None


def output_layouts(values: Sequence[Any], devices: int, fed: Feeding, carries: dict[str, int]) -> list[Layout | None]:
    """The layouts in which results are handed out: whole, or each rank's own part of what carries the batch. None: as it
    is, for it goes on to another stage."""
    layouts: list[Layout | None] = []
    for value in values:
        if value.name in fed.kept:
            layouts.append(None)
            continue
        rank_of_tensor = len(value.shape)
        whole = Layout.replicated(devices, rank_of_tensor)
        if fed.own_part and carries.get(value.name) == 0:
            first = fed.batch or next((layout.dims[0] for layout in fed.inputs if layout.dims and layout.dims[0]), ())
            if first and value.shape[0] % digits_size(first) == 0:
                whole = Layout.of(devices, (first,) + ((),) * (rank_of_tensor - 1))
        layouts.append(whole)
    return layouts


@dataclass(frozen=True)
class Found:
    """A search's report on its plan.

    Attributes:
        cost: seconds of a step, as the search prices it.
        bound: no plan out of the strategies that were searched is priced below it by the search; None: nothing was proved.
            The search credits one use of a shared value as served once, of few that are tried: a program that serves
            more of them together takes less than its price.
        operators, strategies: how many were looked at.
        notes: what else is to be known.
        limit: bytes that a device was allowed; None: memory was not looked at.
    """

    cost: float
    bound: float | None
    operators: int
    strategies: int
    notes: tuple[str, ...] = ()
    limit: float | None = None


class Decided(NamedTuple):
    """A planner's result: decisions by operator, value name -> the dim that carries the batch; of a search, its report, and
    the storage of parameters where the search decides that too."""

    decisions: dict[str, Decision]
    carries: dict[str, int]
    found: Found | None = None
    hsdp: OptimizerParallel | None = None

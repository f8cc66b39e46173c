"""The local program of a plan: the instructions that all ranks run, and the decisions it is partitioned from.

1. Program (`LocalProgram`): instructions in order, the same for all ranks, and the tensors they read and produce. An
   instruction is an operator on slices (`LocalOp`), a redistribution of one value (`Redistribute`), or a maximum or
   minimum completed over ranks (`GlobalExtreme`).

2. Decisions (`Decision`): a planner's result. For each operator, the digits that cut each factor; for each input
   (`InputPlacement`), the layout that a rank is fed.

3. Portable decisions (`PortableDecisions`): decisions without the graph they were made on. One rank hands them to
   other ranks that hold the same graph, and derive from it what follows, such as rules and shapes: decisions with the
   search's report are `PortableDecisions` with the graph.

A plan document (`planfile/plan_document.py`) also holds the graph and figures, for readers without the model.

Example: x @ w with x [32, 16] and w [16, 8], whose 32 rows are cut 8 ways: a `LocalOp` on [4, 16] and [16, 8].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..errors import MissingRuleError, SettingError, ShardwrightError
from ..graph import Graph, Op, Recompute, Value, changed, form_of, leaves_of_type, types_of
from ..identity_tables import IdentityCache
from ..json_files.json_reader import JsonObject
from ..layout import Digit, Digits, Layout, digits_size
from ..mixed_precision import narrowed_to
from ..redistribution import Redistribution
from ..rules import Assignment, Bound, Rule, bound_rule, find_rule, whole_rule
from .parameter_sharding import OptimizerParallel, ParameterSharding

__all__ = [
    "TAKEN",
    "Decision",
    "Decisions",
    "GlobalExtreme",
    "InputPlacement",
    "Instruction",
    "LocalOp",
    "LocalProgram",
    "PlacedValue",
    "PortableDecisions",
    "Redistribute",
    "Ref",
    "SearchResult",
    "find_batch_dims",
    "graph_digest",
    "made_by",
    "place_inputs",
    "read_by",
    "reads",
    "refs_of",
    "ways_of_parameters",
]


@dataclass(frozen=True)
class Ref:
    """An argument of a local call: the tensor of that name."""

    name: str


@dataclass(frozen=True)
class PlacedValue:
    """A value in one layout, under a name of its own in the local program."""

    name: str
    value: Value
    layout: Layout

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.value.shape)

    @property
    def local_bytes(self) -> int:
        """Bytes of a rank's slice."""
        return math.prod(self.local_shape) * self.value.dtype.itemsize


@dataclass(frozen=True)
class LocalOp:
    """An operator on a rank's slices: ``outputs = target(*args, **kwargs)``, with a `Ref` for each tensor argument."""

    op: Op
    target: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    outputs: tuple[PlacedValue | None, ...]
    operator: str  # the operator of the user's program that this one is part of
    as_written: bool = False  # True where the call is that of `op`

    def output(self, i: int) -> PlacedValue:
        """Output i of an operator whose output i is a tensor."""
        placed = self.outputs[i]
        assert placed is not None
        return placed


@dataclass(frozen=True)
class Redistribute:
    """A redistribution of one value; `backward` is None where no gradient flows.

    Args:
        cause: "operator" (it completes an operator's partial sum), "conversion", or "parameter".
        operator: the consumer, which needs the target layout.
        producer: the operator that produced the value, possibly as a partial sum; "" for an input, parameter or
            buffer.
        again: the source is a stored weight; the gathered result is not saved for the backward but gathered again
            there.
    """

    source: PlacedValue
    target: PlacedValue
    forward: Redistribution
    backward: Redistribution | None
    cause: str
    operator: str
    producer: str = ""
    reshard_after_forward: bool = False

    @property
    def casts(self) -> bool:
        """True where the source's dtype differs from the target's.

        The forward casts before it moves anything. The backward moves the gradient in the dtype `sums` and then casts
        it to the source's dtype.
        """
        return self.source.value.dtype != self.target.value.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the forward moves the value."""
        return self.target.value.dtype

    @property
    def sums(self) -> torch.dtype:
        """The dtype in which the backward moves the gradient."""
        return self.target.value.sums

    @property
    def back(self) -> Value:
        """The target with the dtype in which its gradient is moved."""
        value = self.target.value
        return value if self.sums == value.dtype else replace(value, dtype=self.sums)

    @property
    def copies(self) -> bool:
        """True where the target has memory of its own."""
        return self.casts or bool(self.forward.steps)


@dataclass(frozen=True)
class GlobalExtreme:
    """A maximum or minimum over ranks.

    The gradient goes to the ranks that hold the extreme; ties share it as on one device.

    Args:
        operand: the tensor that the operator reduced.
        dims: the local dims of `operand` that were reduced.
    """

    source: PlacedValue
    target: PlacedValue
    forward: Redistribution
    operand: PlacedValue
    dims: tuple[int, ...]
    backward: Digits | None
    operator: str


Instruction = LocalOp | Redistribute | GlobalExtreme


@dataclass(frozen=True, repr=False)
class LocalProgram:
    """A program that all ranks run: instructions in order, with the placement of every input, parameter and output.

    Attributes:
        stored: storage layout of each parameter.
        used: the layout in which the operators consume each parameter.
    """

    devices: int
    inputs: tuple[PlacedValue, ...]
    parameters: dict[str, PlacedValue]
    buffers: dict[str, PlacedValue]
    constants: dict[str, PlacedValue]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Any, ...]  # a PlacedValue, or any constant
    updates: dict[str, PlacedValue]
    notes: tuple[str, ...]
    stored: dict[str, ParameterSharding]
    used: dict[str, Layout]
    seed: PlacedValue | None = None  # the seed of the random operators; None without any

    def __repr__(self) -> str:
        return f"<LocalProgram: {len(self.instructions)} instructions on {self.devices} devices>"


def made_by(instruction: Instruction) -> tuple[PlacedValue, ...]:
    """The values that an instruction produces."""
    return (
        tuple(o for o in instruction.outputs if o is not None)
        if isinstance(instruction, LocalOp)
        else (instruction.target,)
    )


def read_by(instruction: Instruction) -> tuple[str, ...]:
    """Names of the tensors that receive a gradient from an instruction, in call order, each once."""
    if not isinstance(instruction, LocalOp):
        return (instruction.source.name,)
    return tuple(dict.fromkeys([ref.name for ref in refs_of(instruction)]))


def refs_of(instruction: LocalOp) -> list[Ref]:
    """The tensor arguments of a local call, in call order."""
    return leaves_of_type((instruction.args, instruction.kwargs), Ref)


def reads(instruction: Instruction) -> tuple[str, ...]:
    """Names of all tensors that an instruction consumes, each once."""
    operand = (instruction.operand.name,) if isinstance(instruction, GlobalExtreme) else ()
    return (*read_by(instruction), *operand)


# -- decisions


@dataclass(frozen=True)
class Decision:
    """The strategy of one operator.

    Args:
        op, rule, bound: the operator, its rule, and the rule bound to the operator's shapes.
        assignment: the digits that cut each factor.
        out: the layouts to which the outputs are redistributed, where an out_strategy gives them.
        cause: the origin of the strategy: "mark" (the user's), "batch" (cut along the batch), "follow" (a view takes
            its input's layout), "whole", or "propagated" (from a user's strategy).
        note: a limitation that a user would not expect.
        partial: the digits along which the output's sum stays partial, as decided by a planner that prices partial
            sums; None: every partial sum that can pass through the operator does.
        origin: for a propagated strategy, the name of the operator that carries the user's strategy.
        via: the operator that passed the strategy on; "" where that operator no longer lies on the way.
    """

    op: Op
    rule: Rule
    bound: Bound
    assignment: Assignment
    out: tuple[Layout, ...] | None = None
    cause: str = "mark"
    note: str | None = None
    partial: Digits | None = None
    origin: str = ""
    via: str = ""

    def input_layout(self, index: int) -> Layout:
        """The layout in which the operator consumes input `index`, sums completed."""
        layout = self.bound.input_layout(index, self.assignment)
        assert layout is not None, f"{self.op.name}: input {index} has no layout"
        return layout

    def output_layout(self, index: int) -> Layout:
        """The layout in which the operator produces output `index`, with its partial sums, before any out_strategy."""
        layout = self.bound.output_layout(index, self.assignment)
        assert layout is not None, f"{self.op.name}: output {index} has no layout"
        return layout


def description(op: Op, on_missing_rule: str, devices: int, uneven: bool = False) -> tuple[Rule, Bound, str | None]:
    """An operator's rule, the rule bound to its shapes, and a note.

    Args:
        on_missing_rule: "error", or "replicate": an operator without a rule then runs whole on every device, with a
            note.
        uneven: dims may be padded.

    Raises:
        MissingRuleError: no rule, and `on_missing_rule` is "error" or the operator cannot be repeated on every device.
    """
    found, note = find_rule(op), None
    if found is None and on_missing_rule == "replicate":
        if devices > 1 and (reason := unrepeatable(op)):
            raise MissingRuleError(
                f"there is no rule for {op.target}, and run whole on {devices} devices it would {reason}",
                **op.where,
                legal='a model without it, or parallel_mode="stand_alone"',
            )
        found, note = whole_rule(op), f"{op.kind} has no rule: it runs whole on every device"
    bound = bound_rule(op, found, uneven)
    assert found is not None
    return found, bound, note


def descriptions(
    ops: Sequence[Op], on_missing_rule: str, devices: int, uneven: bool = False
) -> list[tuple[Rule, Bound, str | None]]:
    """The `description` of each operator, found once for all of one form."""
    forms, known = [(form_of(op), op.micro, op.fast) for op in ops], {}
    for op, form in zip(ops, forms):
        if form not in known:
            known[form] = description(op, on_missing_rule, devices, uneven)
    return [known[form] for form in forms]


def unrepeatable(op: Op) -> str | None:
    """The harm of running this call whole on every device; None without one, as for a dropout in evaluation."""
    trains = op.argument("train", op.argument("training", True))
    if torch.Tag.nondeterministic_seeded not in getattr(op.target, "tags", ()):
        return None
    share = next((op.argument(name) for name in ("p", "dropout_p", "dropout") if name in op.argument_names), 1)
    return "draw other random numbers on each" if trains and share else None


@dataclass(frozen=True)
class InputPlacement:
    """The layouts in which a batch is fed and results are returned.

    Args:
        inputs: the layout in which each (flattened) tensor input is fed.
        per_rank_batch: each rank feeds its own part of the batch, and gets its own part of the outputs that carry the
            batch.
        batch: the digits that cut the batch of such outputs; empty: those of dim 0 of the first input that is cut.
        sends_to_next_stage: name of an output that goes on to another stage -> the number of neighbouring ranks that
            must hold the same slice (1: no constraint). Apart from that, the output keeps the layout of its producer.
    """

    inputs: tuple[Layout, ...]
    per_rank_batch: bool
    batch: Digits = ()
    sends_to_next_stage: Mapping[str, int] = field(default_factory=dict)


def place_inputs(graph: Graph, devices: int, dataset_strategy: object) -> InputPlacement:
    """The layouts of a graph's inputs under a dataset strategy.

    Args:
        dataset_strategy: "data_parallel" (dim 0 cut over all devices), "full_batch", or a tuple with one entry per
            tensor input: a tuple of cuts (the rest repeated on the right) or a Layout.

    Raises:
        SettingError, LayoutError: an unknown word, another number of entries or dims, cuts that do not divide.
    """
    shapes = [v.shape for v in graph.inputs]
    if dataset_strategy == "full_batch":
        return InputPlacement(tuple(Layout.replicated(devices, len(s)) for s in shapes), False)
    if dataset_strategy == "data_parallel":
        for value in graph.inputs:
            if value.shape and value.shape[0] % devices:
                raise SettingError(
                    f"the batch of input {value.name!r} has size {value.shape[0]}, which "
                    f"{devices} devices do not divide",
                    strategy='dataset_strategy("data_parallel")',
                    legal='a batch that divides, or dataset_strategy("full_batch")',
                )
        return InputPlacement(
            tuple(
                Layout.from_cuts(devices, (devices,) + (1,) * (len(s) - 1)) if s else Layout.replicated(devices, 0)
                for s in shapes
            ),
            True,
        )
    if not isinstance(dataset_strategy, (tuple, list)):
        raise SettingError(
            f"unknown dataset_strategy {dataset_strategy!r}",
            legal='"data_parallel", "full_batch", or a tuple with one entry per tensor input',
        )
    simple = tuple((math.gcd(s[0], devices), *[1] * (len(s) - 1)) if s else () for s in shapes)
    encoded = '"data_parallel", ' if all(not s or s[0] % devices == 0 for s in shapes) else ""
    legal = f'{encoded}"full_batch", or {simple}'
    if len(dataset_strategy) != len(shapes):
        raise SettingError(
            f"the dataset_strategy has {len(dataset_strategy)} entries, the model is fed "
            f"{len(shapes)} tensors of shapes {shapes}",
            strategy=dataset_strategy,
            legal=legal,
        )
    layouts = []
    for value, entry in zip(graph.inputs, dataset_strategy):
        try:
            if not isinstance(entry, (tuple, list, Layout)):
                raise SettingError(f"the entry {entry!r} is neither a tuple of cuts nor a Layout")
            layout = entry if isinstance(entry, Layout) else Layout.from_cuts(devices, entry)
            if layout.devices != devices or layout.dims is None:
                raise SettingError(
                    f"its Layout must lay out the {len(value.shape)} dims of {value.shape} on {devices} "
                    f"devices, it has {layout.devices}"
                )
            layout.local_shape(value.shape)
        except ShardwrightError as error:
            raise type(error)(
                error.message,
                operator=f"dataset_strategy of input {value.name!r}",
                strategy=dataset_strategy,
                legal=legal,
            ) from None
        layouts.append(layout)
    return InputPlacement(tuple(layouts), any(not layout.is_replicated for layout in layouts))


#: Operators whose results are pieces of a dim, and those that also remove the dim.
_PIECES = ("chunk", "narrow", "slice", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
_REMOVED = ("select", "unbind")

#: Operators that read entries of a dim by an index.
_READS = ("embedding", "index", "index_select")


def find_batch_dims(graph: Graph, bounds: dict[str, Bound], pieces: bool = False) -> dict[str, int]:
    """Value name -> the dim that carries the batch: for the inputs, and for each value that shares their batch factor.

    A dim merged of the batch and other dims carries the batch as long as the batch is its major part.

    Args:
        pieces: True: also a piece of the batch (chunk, narrow) carries it, and what one entry of the batch leaves
            (select, unbind) or an index reads of it, in its first dim. A row that select leaves does not: a layer
            would contract it with its weight, and cut a weight that other layers of the batch hold whole.
    """
    batch_dims = {v.name: 0 for v in graph.inputs if v.shape} if graph.batch is None else dict(graph.batch)
    for op in graph.ops:
        factor = batch_factor(op, bounds[op.name], batch_dims, pieces)
        if factor is None:
            continue
        outputs = [v for v in op.outputs if v is not None]
        if pieces and op.kind in (*_PIECES, *_REMOVED):
            x = op.inputs[0]
            if op.argument("dim", 0) % len(x.shape) == batch_dims.get(x.name):
                at, least = (batch_dims[x.name], 1) if op.kind in _PIECES else (0, 2)
                batch_dims.update((v.name, at) for v in outputs if len(v.shape) >= least)
                continue
        for value, dims in zip(outputs, bounds[op.name].outputs):
            for d, dim in enumerate(dims):
                if dim and dim[0] == factor:
                    batch_dims[value.name] = d
                    break
    return batch_dims


def ways_of_parameters(graph: Graph, rules: Mapping[str, Rule]) -> set[str]:
    """Names of the operators between parameters and their consumers: casts to a narrower dtype of a parameter or of a
    view of one, and the transposes that an `autograd.Function` reads, as torchao's linear layer does.

    The backward of such an operator is exact for each term of a sum, so that a gradient is summed behind it, as the
    parameter is stored. (Searches price the sum of any other view's gradient at the view.)

    Args:
        rules: operator name -> its rule.
    """
    from_parameters = {v.name for v in graph.parameters.values()}
    functions = {v.name for op in graph.ops if hasattr(op.target, "described_as") for v in op.inputs}
    functions -= {v.name for op in graph.ops if not hasattr(op.target, "described_as") for v in op.inputs}
    out: set[str] = set()
    for op in graph.ops:
        if len(op.inputs) == 1 and op.inputs[0].name in from_parameters:
            narrowed = narrowed_to(op) is not None
            if narrowed or rules[op.name].view:
                from_parameters.update(v.name for v in op.outputs if v is not None)
            turned = op.kind in ("t", "transpose", "permute") and op.mark is None and op.output(0).name in functions
            if narrowed or turned:
                out.add(op.name)
    return out


def batch_factor(op: Op, bound: Bound, batch_dims: dict[str, int], pieces: bool = False) -> int | None:
    """The factor of an operator that is the batch; None where no input carries the batch.

    Args:
        pieces: True: where an index reads entries of the batch, the first dim of the result. The batch itself is
            contracted there: a cut would sum a term of each rank for each entry, most of them zeros.
    """
    for value, dims in zip(op.inputs, bound.inputs):
        d = batch_dims.get(value.name)
        if d is not None and dims[d]:
            first = bound.outputs[0]
            read = pieces and op.kind in _READS and all(dims[d][0] not in dim for dim in first)
            return (first[0][0] if first and first[0] else None) if read else dims[d][0]
    return None


def output_layouts(
    values: Sequence[Value], devices: int, input_placement: InputPlacement, batch_dims: dict[str, int]
) -> list[Layout | None]:
    """The layouts in which results are returned: whole, or each rank's own part of an output that carries the batch.

    None for an output that goes on to another stage: it keeps the layout of its producer.
    """
    layouts: list[Layout | None] = []
    for value in values:
        if value.name in input_placement.sends_to_next_stage:
            layouts.append(None)
            continue
        rank_of_tensor = len(value.shape)
        whole = Layout.replicated(devices, rank_of_tensor)
        if input_placement.per_rank_batch and batch_dims.get(value.name) == 0:
            first = input_placement.batch or next(
                (layout.dims[0] for layout in input_placement.inputs if layout.dims and layout.dims[0]), ()
            )
            if first and value.shape[0] % digits_size(first) == 0:
                whole = Layout.of(devices, (first,) + ((),) * (rank_of_tensor - 1))
        layouts.append(whole)
    return layouts


#: The beginning of the remark that names another mode, whose plan was cheaper than what a search found.
TAKEN = "this is the plan of "


@dataclass(frozen=True)
class SearchResult:
    """A search's report on its plan.

    Attributes:
        cost: seconds of a step, by the search's prices.
        bound: no plan out of the searched strategies has a lower price by the search; None: nothing was proved. The
            search serves one use of a shared value once (`shared_values`); a program that serves several uses once
            takes less time than its price.
        operators, strategies: the numbers searched.
        notes: further remarks.
        limit: bytes allowed per device; None: memory was not limited.
    """

    cost: float
    bound: float | None
    operators: int
    strategies: int
    notes: tuple[str, ...] = ()
    limit: float | None = None


class Decisions(NamedTuple):
    """A planner's result.

    Decisions by operator, and value name -> the dim that carries the batch. A search adds its report, and the storage
    of parameters where the search decides that too.
    """

    decisions: dict[str, Decision]
    batch_dims: dict[str, int]
    found: SearchResult | None = None
    hsdp: OptimizerParallel | None = None


# -- portable decisions


@dataclass(frozen=True)
class _Operator:
    """The fields of a `Decision` that do not follow from its operator."""

    digits: tuple[Digits, ...]
    out: tuple[Layout, ...] | None
    cause: str
    note: str | None
    partial: Digits | None
    origin: str
    via: str
    recompute: Recompute | None


@dataclass(frozen=True)
class PortableDecisions:
    """A `Decisions` without its graph: `operators` by name, in program order. One rank sends them `encoded` to the
    others, which `read` them."""

    operators: dict[str, _Operator]
    batch_dims: dict[str, int]
    found: SearchResult | None
    hsdp: OptimizerParallel | None

    @classmethod
    def of(cls, decided: Decisions) -> PortableDecisions:
        """The portable form of `decided`."""
        return cls(
            {
                name: _Operator(d.assignment.digits, d.out, d.cause, d.note, d.partial, d.origin, d.via, d.op.recompute)
                for name, d in decided.decisions.items()
            },
            decided.batch_dims,
            decided.found,
            decided.hsdp,
        )

    def encode(self) -> dict[str, object]:
        """The same as values that `json_values` takes."""

        def encode(operator: _Operator) -> dict[str, object]:
            out = None if operator.out is None else [_encode_layout(layout) for layout in operator.out]
            recompute = None if operator.recompute is None else vars(operator.recompute)
            digits = [_encode_digits(digits) for digits in operator.digits]
            partial = None if operator.partial is None else _encode_digits(operator.partial)
            return {**vars(operator), "digits": digits, "out": out, "partial": partial, "recompute": recompute}

        return {
            "operators": {name: encode(operator) for name, operator in self.operators.items()},
            "carries": self.batch_dims,
            "found": None if self.found is None else vars(self.found),
            "hsdp": None if self.hsdp is None else vars(self.hsdp),
        }

    @classmethod
    def read(cls, encoded: JsonObject) -> PortableDecisions:
        """The portable decisions of `encoded`."""

        def operator(entry: JsonObject) -> _Operator:
            out = None if entry["out"] is None else tuple(_layout(layout) for layout in entry["out"])
            recompute = None if entry["recompute"] is None else Recompute(**entry["recompute"])
            digits = tuple(_digits(digits) for digits in entry["digits"])
            partial = None if entry["partial"] is None else _digits(entry["partial"])
            return _Operator(**{**entry, "digits": digits, "out": out, "partial": partial, "recompute": recompute})

        if (hsdp := encoded["hsdp"]) is not None:
            hsdp = {**hsdp, **{name: frozenset(hsdp[name]) for name in ("whole", "kept")}}
        return cls(
            {name: operator(entry) for name, entry in encoded["operators"].items()},
            encoded["carries"],
            None if encoded["found"] is None else SearchResult(**encoded["found"]),
            None if hsdp is None else OptimizerParallel(**hsdp),
        )

    def onto(self, graph: Graph, devices: int, *, on_missing_rule: str = "error", uneven: bool = False) -> Decisions:
        """The same decisions on another, equal copy of the graph.

        Args:
            graph: a graph with the same `graph_digest`.
            on_missing_rule, uneven: as they were given to the planner.
        """
        decisions: dict[str, Decision] = {}
        assignments = IdentityCache()  # equal layers share their bound rules
        for op, (rule, bound, _) in zip(graph.ops, descriptions(graph.ops, on_missing_rule, devices, uneven)):
            portable = self.operators[op.name]
            assignment = assignments.once(
                portable.digits, (bound,), lambda: replace(bound.whole(devices), digits=portable.digits)
            )
            decisions[op.name] = Decision(
                changed(op, recompute=portable.recompute),
                rule,
                bound,
                assignment,
                portable.out,
                portable.cause,
                portable.note,
                portable.partial,
                portable.origin,
                portable.via,
            )
        return Decisions(decisions, self.batch_dims, self.found, self.hsdp)


def _encode_digits(digits: Digits) -> list[list[int]]:
    return [[digit.size, digit.stride] for digit in digits]


def _digits(encoded: list[list[int]]) -> Digits:
    return tuple(Digit(size, stride) for size, stride in encoded)


def _encode_layout(layout: Layout) -> dict[str, object]:
    return {
        "devices": layout.devices,
        "dims": [_encode_digits(digits) for digits in layout.dims or ()],
        "partial": _encode_digits(layout.partial),
        "reduction": layout.reduction,
    }


def _layout(encoded: JsonObject) -> Layout:
    dims, partial = map(_digits, encoded["dims"]), _digits(encoded["partial"])
    return Layout.of(encoded["devices"], dims, partial, encoded["reduction"])


def graph_digest(graph: Graph) -> str:
    """A short hash of everything two ranks' graphs must share for decisions on one to hold on the other.

    Covers operators, user strategies, shapes and dtypes. Any further difference shows in the plans' fingerprints.
    """
    text = hashlib.sha256()
    for line in _lines(graph):
        text.update(line.encode() + b"\n")
    return text.hexdigest()[:16]


def _lines(graph: Graph) -> Iterator[str]:
    for table in ({v.name: v for v in graph.inputs}, graph.parameters, graph.buffers):
        for name, value in table.items():
            yield f"{name} {value.name} {value.shape} {value.dtype} {value.requires_grad} {value.master}"
    for op in graph.ops:
        mark = None if op.mark is None else (op.mark.in_strategy, op.mark.out_strategy, op.mark.priority)
        yield f"{op.name} {op.kind} {op.inputs} {types_of(op)} {mark} {op.recompute}"

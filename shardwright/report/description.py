"""A plan in the field's words: data, tensor, sequence, context, expert, vocabulary, spatial parallel, ZeRO, recompute.

1. Blocks: operators by layer. A layer is a numbered module (``layers.3``); layers that are described alike share a
   block. Modules outside of layers, such as an embedding, are blocks of their own.
2. Axes of a block: the digits of the rank, refined until each operator cuts whole ones. Digits that the main
   operators of the block cut alike are one axis (`report.operator_cuts` has the words):

    data                          data
    column, row, heads, feature   tensor
    vocabulary, expert, spatial   as they are
    sequence                      context where attention is cut so too, otherwise sequence

   A block whose operators use one digit in several ways has a line for each part of it.
3. Beside the axes: operators between that a tensor axis cuts along the sequence, the storage of parameters
   (ZeRO, by the level of `hsdp`), and recomputed operators.

Example: ``layers 0-79: data 8 x tensor 4 (column, row, heads; sequence parallel between); ZeRO-3 over data 8``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..cluster import Cluster
from ..graph import Op
from ..layout import Digit, Digits, digits_size, merge
from ..pipeline.pipeline_plan import PipelinePlan
from ..planfile.document_writer import dataset_strategy, pipeline_dataset_strategy
from ..sharded_plan import ParameterPlan, Plan
from .format import size_text
from .html_elements import html_table
from .operator_cuts import OperatorCuts, operator_cuts, vocabularies

__all__ = [
    "Axis",
    "Block",
    "Description",
    "PlanPart",
    "cluster_line",
    "describe",
    "inputs_line",
    "layer_of",
    "nothing_split",
    "nothing_split_warning",
    "numbered",
    "numbers_text",
]

#: The word of a cut -> the axis that it makes; others make an axis of their own name.
FAMILIES = dict.fromkeys(("column", "row", "heads", "feature"), "tensor")

#: The axes in the order of a text, and the cuts of tensor parallelism.
ORDER = ("data", "expert", "context", "sequence", "spatial", "vocabulary", "tensor")
TENSOR = ("column", "row", "heads", "feature")

#: The number of names that are listed, and of the lines of a screen.
NAMES, SCREEN = 3, 24


@dataclass(frozen=True)
class Axis:
    """Digits of the rank that the main operators of a part cut in one way.

    Attributes:
        family: "data", "tensor", "context", "sequence", "expert", "vocabulary" or "spatial".
        digits: of the rank, minor last.
        words: the words of the cuts, such as "column".
        between: of a tensor axis, the way in which it cuts the operators between: "sequence", "data" or "" for none.
        whole: names of main operators that it does not cut.
    """

    family: str
    digits: Digits
    words: tuple[str, ...]
    between: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of devices along it."""
        return digits_size(self.digits)

    def __str__(self) -> str:
        notes = [", ".join(self.words)] if self.family == "tensor" else []
        if "sequence" in self.between:
            notes.append("sequence parallel between" if len(self.between) == 1 else "sequence parallel in part between")
        elif self.between == ("data",):
            notes.append("batch cut between")
        if self.whole:
            notes.append(f"not {_listed(self.whole)}")
        return f"{self.family} {self.size}" + (f" ({'; '.join(notes)})" if notes else "")


@dataclass(frozen=True)
class PlanPart:
    """A part of a block whose operators share its axes.

    Attributes:
        names: modules or operators, from the block on; empty: the whole block.
        axes: in the order of a text.
        replicas: the number of devices that do the same work.
    """

    names: tuple[str, ...]
    axes: tuple[Axis, ...]
    replicas: int

    def __str__(self) -> str:
        each = [str(axis) for axis in self.axes]
        if not each:
            return "replicated: every device does all of it" if self.replicas > 1 else "one device"
        return " x ".join([*each, *([f"{self.replicas} replicas"] if self.replicas > 1 else [])])


@dataclass(frozen=True)
class Block:
    """Equal layers, or modules outside of layers.

    Attributes:
        container: the path of the layers' container; "" for modules outside of layers.
        numbers: the layers' numbers; empty for modules outside of layers.
        names: modules outside of layers.
        parts: by axes.
        storage: the storage of parameters beside their use, as a sentence; "": as used.
        recompute: the recomputed parts, as words; "": none.
        operators: by layer, the names of its operators in the plan.
        stages: the stages of a pipeline that hold it.
    """

    container: str
    numbers: tuple[int, ...]
    names: tuple[str, ...]
    parts: tuple[PlanPart, ...]
    storage: str
    recompute: str
    operators: tuple[tuple[str, ...], ...]
    stages: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """``layers 0-11 (model.layers)``, or the names of modules."""
        if not self.numbers:
            return _listed(self.names) or "the model"
        word, numbers = self.container.rpartition(".")[2].removesuffix("s"), numbers_text(self.numbers)
        if word not in ("layer", "block"):
            several = "s" * (len(self.numbers) > 1)
            return f"{self.container}.{numbers}" if self.container else f"module{several} {numbers}"
        inside = f" ({self.container})" if "." in self.container else ""
        return f"{word}{'s' * (len(self.numbers) > 1)} {numbers}{inside}"

    @property
    def beside(self) -> str:
        """Storage and recomputation, as words."""
        return "; ".join(filter(None, (self.storage, self.recompute and f"recompute: {self.recompute}")))

    def lines(self) -> Iterator[str]:
        """The block as text; a line for each part where they differ."""
        beside = f"; {self.beside}" if self.beside else ""
        if len(self.parts) == 1:
            yield f"{self.title}: {self.parts[0]}{beside}"
            return
        yield f"{self.title}: in parts{beside}"
        for part in self.parts:
            yield f"    {_listed(part.names)}: {part}"


@dataclass(frozen=True)
class Description:
    """A plan in the field's words; `str` is the text.

    Attributes:
        headline: mode, devices and cluster, and what each device is fed.
        pipeline: of a pipeline: stages, schedule, micro-batches, and the place of each block.
        blocks: equal layers together.
        notes: further sentences.
    """

    headline: str
    pipeline: tuple[str, ...]
    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """The lines of the text."""
        yield self.headline
        yield from self.body()

    def body(self) -> Iterator[str]:
        """The lines below the headline."""
        yield from self.pipeline
        for block in self.blocks:
            yield from block.lines()
        yield from self.notes

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, below: Sequence[str] = ()) -> str:
        """The description as a small table, with further lines below."""
        rows = [
            (block.title + (f": {_listed(part.names)}" if len(block.parts) > 1 else ""), str(part), block.beside)
            for block in self.blocks
            for part in block.parts
        ]
        return html_table(self.headline, ("part", "parallel", "beside"), rows, (*self.pipeline, *self.notes, *below))


def describe(plan: Plan | PipelinePlan) -> Description:
    """A plan in the field's words.

    Args:
        plan: the plan.

    Example:
        >>> print(describe(plan))  # doctest: +SKIP
        semi_auto on 32 devices of h100x8x4, each fed the whole batch
        layers 0-79: data 8 x tensor 4 (column, row, heads; sequence parallel between); ZeRO-3 over data 8
    """
    cluster = Cluster.of(plan.cluster, plan.devices)
    headline = f"{plan.mode} on {plan.devices} device{'s' * (plan.devices > 1)} of {cluster.name}{_batches(plan)}"
    if isinstance(plan, PipelinePlan):
        shared = {s.number: frozenset(t.name for t in plan.transfers if t.kind == "parameter") for s in plan.stages}
        rows = vocabularies(plan.graph)
        staged = [
            (stage.number, block)
            for stage in plan.stages
            for block in _blocks(stage.plan, operator_cuts(stage.plan, shared[stage.number], rows))
        ]
        blocks = _folded(staged)
        return Description(headline, tuple(_pipeline(plan, staged)), blocks)
    if plan.own is not None:
        return Description(headline, (), (), ("every rank runs its own program, as the model is written",))
    blocks = _folded([(None, block) for block in _blocks(plan, operator_cuts(plan))])
    return Description(headline, (), blocks, tuple(filter(None, (nothing_split(plan),))))


def short(plan: Plan | PipelinePlan) -> str:
    """The repr of a plan: one line, made of what is known without further work."""
    cluster = "" if plan.cluster is None else f" of {plan.cluster.name}"
    if isinstance(plan, PipelinePlan):
        made, count = plan.schedule, sum(len(stage.plan.decisions) for stage in plan.stages)
        return (
            f"<PipelinePlan: {plan.mode} on {plan.devices} devices{cluster}{_batches(plan)}, {made.stages} stages, "
            f"{made.name}, {made.micro_batches} micro-batches, {count} operators>"
        )
    return (
        f"<Plan: {plan.mode} on {plan.devices} device{'s' * (plan.devices > 1)}{cluster}{_batches(plan)}, "
        f"{len(plan.decisions)} operators, {len(plan.graph.parameters)} parameters>"
    )


def on_a_screen(plan: Plan | PipelinePlan) -> str:
    """The text of `describe`, cut to the lines of a screen."""
    lines = list(describe(plan).lines())
    if len(lines) <= SCREEN:
        return "\n".join(lines)
    return "\n".join([*lines[: SCREEN - 1], f"... {len(lines) - SCREEN + 1} more lines: plan.describe()"])


def nothing_split(plan: Plan) -> str:
    """The sentence for a plan that splits no operator; "" where it splits some, and on one device."""
    if plan.devices == 1 or plan.own is not None or any(d.assignment.used for d in plan.decisions.values()):
        return ""
    does = f"each of the {plan.devices} devices does all the work"
    if plan.found is None:
        return f"nothing is split: {does}"
    cluster = Cluster.of(plan.cluster, plan.devices).name
    return f"the search splits nothing, since on {cluster} messages would cost more than they save: {does}"


def nothing_split_warning(plan: Plan | PipelinePlan, named: bool) -> str:
    """The warning of a training run whose search splits no operator; "": there is nothing to warn of.

    Args:
        plan: the plan.
        named: True where the user has named the cluster.
    """
    if isinstance(plan, PipelinePlan) or plan.found is None or not (text := nothing_split(plan)):
        return ""
    cluster = Cluster.of(plan.cluster, plan.devices).name
    assumed = (
        f". No cluster was named, so {cluster} is assumed: cluster= takes yours, the name of a preset or a file that "
        "shardwright calibrate measures"
    )
    return f'parallel_mode="{plan.mode}": {text}{assumed * (not named)}'


def cluster_line(plan: Plan | PipelinePlan, named: bool = False) -> str:
    """The cluster that a plan is priced for, as a sentence; the default cluster says so.

    Args:
        plan: the plan.
        named: True where the user has named the cluster.
    """
    cluster = Cluster.of(plan.cluster, plan.devices)
    levels = ", ".join(f"{level.size} by {level.name} ({level.bandwidth / 1e9:.3g} GB/s)" for level in cluster.levels)
    default = "; it is the default, and cluster= or --cluster names another"
    assumed = not named and cluster == Cluster.of(None, plan.devices)
    return f"cluster: {cluster.name}, {levels}, {size_text(cluster.memory)} a device{default * assumed}"


def _feeding(plan: Plan | PipelinePlan) -> object:
    """The dataset_strategy of a plan."""
    return pipeline_dataset_strategy(plan) if isinstance(plan, PipelinePlan) else dataset_strategy(plan)


def _batches(plan: Plan | PipelinePlan) -> str:
    """The end of a headline: what each of several devices is fed."""
    if plan.devices == 1:
        return ""
    strategy, inputs = _feeding(plan), {"full_batch": "the whole batch", "data_parallel": "its part of the batch"}
    return f", each fed {inputs[strategy] if isinstance(strategy, str) else 'slices of the inputs'}"


def inputs_line(plan: Plan | PipelinePlan) -> str:
    """The feeding of inputs, as a sentence."""
    strategy = _feeding(plan)
    if strategy == "data_parallel":
        return (
            'inputs: each rank is fed its own part of the batch (dataset_strategy="data_parallel", the default of a '
            "training step)"
        )
    if strategy == "full_batch":
        return (
            'inputs: every rank is fed the whole batch (dataset_strategy="full_batch", the default of a plan for '
            "all devices)"
        )
    return f"inputs: each rank is fed the slices of dataset_strategy={strategy}"


# -- blocks


def layer_of(paths: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Module path -> (path of the container, number) of the outermost layer that it lies in.

    A numbered module is a layer where some module of its container holds two operators or more that are called in
    modules of their own, as in ``blocks.0.up`` and ``blocks.0.down``.

    Args:
        paths: of the modules of operators.
    """
    inside: dict[tuple[str, int], set[str]] = {}
    for path in (known := set(paths)):
        for container, number, rest in numbered(path):
            inside.setdefault((container, number), set()).update({rest} if rest else ())
    layers = {container for (container, _), rests in inside.items() if len(rests) > 1}
    return {
        path: found
        for path in known
        if (found := next(((c, n) for c, n, _ in numbered(path) if c in layers), None)) is not None
    }


def numbered(path: str) -> Iterator[tuple[str, int, str]]:
    """Yield (container, number, path inside) for each numbered module on a path, the outermost first."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            yield ".".join(parts[:i]), int(part), ".".join(parts[i + 1 :])


def _blocks(plan: Plan, cuts: Sequence[OperatorCuts]) -> Iterator[Block]:
    """The blocks of a plan in program order, equal ones not yet joined."""
    layers = layer_of(place_of(c) for c in cuts)
    groups: dict[tuple[str, int | str], list[OperatorCuts]] = {}
    for c in cuts:
        layer = layers.get(place_of(c))
        if layer is not None:
            groups.setdefault(layer, []).append(c)
        elif c.main:
            top = place_of(c) if layers else ""
            groups.setdefault(("", top), []).append(c)
        elif not layers:
            groups.setdefault(("", ""), []).append(c)
    recomputed = {c.op.name for c in cuts if c.op.recompute is not None and not c.op.recompute.keep}
    for key, operators in groups.items():
        container, which = key
        path = f"{container}.{which}".lstrip(".") if isinstance(which, int) else which
        parts = tuple(_parts(path, operators, plan.devices))
        yield Block(
            container if isinstance(which, int) else "",
            (which,) if isinstance(which, int) else (),
            () if isinstance(which, int) or not which else (which,),
            parts,
            _storage(plan, _parameters(plan, path, groups), parts),
            _recomputed(path, operators, recomputed),
            (tuple(c.op.name for c in operators),),
        )


def place_of(c: OperatorCuts) -> str:
    """The module path of an operator; of a marked one its own path where that is longer."""
    return c.op.name if "." in c.op.name and c.op.name.startswith(c.op.module) else c.op.module


def _folded(blocks: Iterable[tuple[int | None, Block]]) -> tuple[Block, ...]:
    """Blocks that are described alike, joined: of layers of one container, and of modules outside of layers."""
    out: dict[tuple[object, ...], Block] = {}
    for stage, block in blocks:
        key = (block.container, not block.numbers, tuple(map(_spelled, block.parts)), block.beside)
        stages = () if stage is None else (stage,)
        if key not in out:
            out[key] = Block(**{**vars(block), "stages": stages})
            continue
        known = out[key]
        out[key] = Block(
            known.container,
            (*known.numbers, *block.numbers),
            (*known.names, *block.names),
            known.parts,
            known.storage,
            known.recompute,
            (*known.operators, *block.operators),
            tuple(dict.fromkeys((*known.stages, *stages))),
        )
    return tuple(out.values())


def _spelled(part: PlanPart) -> tuple[object, ...]:
    return part.names, str(part), tuple(axis.digits for axis in part.axes)


# -- axes


def _parts(path: str, operators: Sequence[OperatorCuts], devices: int) -> Iterator[PlanPart]:
    """The parts of a block: the whole where one set of axes describes it, otherwise its modules, equal ones joined."""
    whole = _part(path, operators, devices)
    if whole is not None:
        yield whole
        return
    found: dict[tuple[object, ...], PlanPart] = {}
    for name, calls in _split(path, operators).items():
        below = f"{path}.{name}".lstrip(".")
        if len(calls) == len(operators):
            pieces: Iterable[PlanPart] = (
                PlanPart((_short(c, path),), part.axes, part.replicas)
                for c in calls
                if c.main and (part := _part(path, [c], devices)) is not None
            )
        else:
            pieces = (
                PlanPart(tuple(f"{name}.{n}" if n != name else name for n in part.names) or (name,), *vars_of(part))
                for part in _parts(below, calls, devices)
            )
        for part in pieces:
            key = _spelled(PlanPart((), *vars_of(part)))
            known = found.get(key)
            names = part.names if known is None else tuple(dict.fromkeys((*known.names, *part.names)))
            found[key] = PlanPart(names, part.axes, part.replicas)
    yield from found.values()


def vars_of(part: PlanPart) -> tuple[tuple[Axis, ...], int]:
    """The axes and the replicas of a part."""
    return part.axes, part.replicas


def _split(path: str, operators: Sequence[OperatorCuts]) -> dict[str, list[OperatorCuts]]:
    """The operators by the module of `path` in which they run; only modules with main operators."""
    out: dict[str, list[OperatorCuts]] = {}
    for c in operators:
        rest = place_of(c).removeprefix(path).lstrip(".")
        out.setdefault(rest.partition(".")[0] if rest else _short(c, path), []).append(c)
    return {name: calls for name, calls in out.items() if any(c.main for c in calls)}


def _short(c: OperatorCuts, path: str) -> str:
    """The name of an operator from a module on."""
    return place_of(c).removeprefix(path).lstrip(".") or c.op.name.removeprefix(path).lstrip(".")


def _part(path: str, operators: Sequence[OperatorCuts], devices: int) -> PlanPart | None:
    """The axes of some operators; None where they use one digit in several ways."""
    main = [c for c in operators if c.main] or [c for c in operators if c.weighted] or list(operators)
    atoms = _atoms({d for c in main for cut in c.cuts for d in cut.digits}, devices)
    if atoms is None:
        return None
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Digit]] = {}
    for atom in atoms:
        uses = tuple(_word_at(c, atom) for c in main)
        families = {FAMILIES.get(word, word) for word in uses if word}
        if len(families) > 1:
            return None
        if families:
            found.setdefault((uses, _between(operators, main, atom)), []).append(atom)
    axes = []
    for (uses, between), digits in found.items():
        words = tuple(sorted({w for w in uses if w}, key=lambda w: TENSOR.index(w) if w in TENSOR else 0))
        family = FAMILIES.get(words[0], words[0])
        if family == "sequence" and any(w == "sequence" and not c.weighted for c, w in zip(main, uses)):
            family = "context"
        # Attention between products has no weight, so its replicas are worth a word; one digit cuts all else.
        whole = tuple(dict.fromkeys(_short(c, path) for c, word in zip(main, uses) if not word))
        axes.append(Axis(family, merge(digits), words, between if family == "tensor" else (), whole))
    axes.sort(key=lambda axis: (ORDER.index(axis.family), -axis.digits[0].stride))
    return PlanPart((), tuple(axes), devices // math.prod(axis.size for axis in axes))


def _atoms(digits: Iterable[Digit], devices: int) -> tuple[Digit, ...] | None:
    """The coarsest digits of which all given ones are made, major first; None where there are none."""
    edges = sorted({edge for d in digits for edge in (d.stride, d.span)})
    if any(upper % lower for lower, upper in pairwise(edges)):
        return None
    used = [Digit(upper // lower, lower) for lower, upper in pairwise(edges)]
    return tuple(reversed(used))


def _word_at(c: OperatorCuts, atom: Digit) -> str:
    """The word of the cut of an operator that has a digit; "": the digit does not cut it."""
    return next((cut.word for cut in c.cuts for d in cut.digits if d.stride <= atom.stride and atom.span <= d.span), "")


#: Operators between whose cuts a reader asks: those that read and make a whole row of activations.
BETWEEN = frozenset({"layer_norm", "rms_norm", "batch_norm", "group_norm", "add", "add_", "dropout", "mean", "rsqrt"})


def _between(operators: Sequence[OperatorCuts], main: Sequence[OperatorCuts], atom: Digit) -> tuple[str, ...]:
    """The words of the cuts of the operators between along a digit: "sequence", "data", "" for none."""
    names = {
        _word_at(c, atom)
        for c in operators
        if c not in main and c.op.kind in BETWEEN and c.op.outputs[0] is not None and c.op.outputs[0].shape
    }
    return tuple(sorted(names - {"feature"}))


# -- storage and recomputation


def _parameters(plan: Plan, path: str, groups: dict[tuple[str, int | str], list[OperatorCuts]]) -> list[ParameterPlan]:
    """The trained parameters of a block, each once."""
    known = [p for name, p in plan.parameters.items() if name == p.name and p.trainable]
    if path:
        return [p for p in known if p.name.startswith(f"{path}.")]
    return known if len(groups) == 1 else []


def _storage(plan: Plan, parameters: Sequence[ParameterPlan], parts: Sequence[PlanPart]) -> str:
    """The storage of parameters that is finer than their use, as words."""
    cut = {p.name: d for p in parameters if (d := _further(p))}
    if not cut:
        return ""
    level = "stored in shards" if plan.hsdp is None else f"ZeRO-{plan.hsdp.optimizer_level.removeprefix('level')}"
    elements = lambda names: sum(math.prod(p.shape) for p in parameters if p.name in names)
    together = {digits: [name for name, d in cut.items() if d == digits] for digits in cut.values()}
    most = max(together, key=lambda digits: elements(together[digits]))
    axes = [axis for part in parts for axis in part.axes if any(_meet(d, most) for d in axis.digits)]
    where = " and ".join(dict.fromkeys(axis.family for axis in axes)) or "replicas"
    notes = [
        f"{_percent(elements(names) / elements({p.name for p in parameters}))} over {digits_size(digits)}"
        for digits, names in together.items()
        if digits != most
    ]
    part = elements(cut) / elements({p.name for p in parameters})
    notes += [f"{_percent(1 - part)} of the parameters whole"] if part < 1 else []
    gathered = set() if plan.hsdp is None or not plan.hsdp.reshard_after_forward else plan.hsdp.kept & set(cut)
    notes += [f"{_percent(elements(gathered) / elements(cut))} kept gathered for the backward"] if gathered else []
    return f"{level} over {where} {digits_size(most)}" + (f" ({', '.join(notes)})" if notes else "")


def _further(p: ParameterPlan) -> Digits:
    """The digits that cut the storage of a parameter beyond its use."""
    used = {(d.size, d.stride) for d in p.layout.carried}
    if p.storage == p.layout:
        return ()
    edges = _atoms({*p.layout.carried, *p.storage.carried}, p.layout.devices) or ()
    inside = lambda atom, digits: any(d.stride <= atom.stride and atom.span <= d.span for d in digits)
    further = [a for a in edges if inside(a, p.storage.carried) and not inside(a, p.layout.carried)]
    return merge(further) if used or further else ()


def _meet(one: Digit, digits: Digits) -> bool:
    return any(one.stride < other.span and other.stride < one.span for other in digits)


def _recomputed(path: str, operators: Sequence[OperatorCuts], recomputed: set[str]) -> str:
    """The recomputed operators of a block, as words."""
    mine = [c for c in operators if c.op.name in recomputed]
    if not mine:
        return ""
    if len(mine) == len(operators):
        return "all"
    names = []
    for name, calls in _split_all(path, operators).items():
        count = sum(c.op.name in recomputed for c in calls)
        if count == len(calls):
            names.append(name)
        elif count:
            names.append(f"{count} of {len(calls)} operators of {name}")
    return f"{_listed(names)} only"


def _split_all(path: str, operators: Sequence[OperatorCuts]) -> dict[str, list[OperatorCuts]]:
    out: dict[str, list[OperatorCuts]] = {}
    for c in operators:
        rest = place_of(c).removeprefix(path).lstrip(".")
        out.setdefault(rest.partition(".")[0] or _short(c, path), []).append(c)
    return out


# -- pipelines


def _pipeline(plan: PipelinePlan, staged: Sequence[tuple[int, Block]]) -> Iterator[str]:
    """The stages of a pipeline, its schedule, and the place of each block."""
    made = plan.schedule
    sizes = dict.fromkeys(stage.devices for stage in plan.stages)
    devices = f"{made.groups} x {next(iter(sizes))}" if len(sizes) == 1 else ", ".join(map(str, sizes))
    groups = f" on {made.groups} groups" if made.groups != made.stages else ""
    yield (
        f"pipeline: {made.stages} stages{groups} ({devices} devices), schedule {made.name}, "
        f"{made.micro_batches} micro-batches"
    )
    for stage in plan.stages:
        blocks = [block for number, block in staged if number == stage.number]
        titles = [block.title for block in _folded([(None, Block(**{**vars(b), "parts": ()})) for b in blocks])]
        ranks = f"ranks {stage.ranks[0]}-{stage.ranks[-1]}" if stage.devices > 1 else f"rank {stage.first}"
        if titles == ["the model"]:  # without layers, its modules
            titles = list(
                dict.fromkeys(c.module or c.name for c in stage.plan.graph.ops if _has_weights(stage.plan, c))
            )
        yield f"stage {stage.number} on {ranks}: {_listed(titles) or 'no weights'}"


def _has_weights(plan: Plan, op: Op) -> bool:
    """True for an operator that reads a parameter."""
    return any(v.name in plan.graph.parameters for v in op.inputs)


# -- words


def numbers_text(numbers: Iterable[int]) -> str:
    """Numbers with runs joined: ``0-3, 5``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _percent(part: float) -> str:
    """A part above 0 as a percentage; a small one is not none."""
    return f"{part:.1%}" if part >= 0.001 else "less than 0.1%"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more

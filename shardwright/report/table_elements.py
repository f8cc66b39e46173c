"""Parts that the tables of plans and of pipelines (`tables`) share.

1. A table of operators: `rows`, laid out by `wide` (a line each) or `narrow` (a few lines each).
2. A table of `parameters`, and the lines `memory_line` and `total`.
3. The search of stages="auto": its priced alternatives, the best first (`alternatives_of`), and its cuts of the model
   (`cuts_of`).

Example: a linear layer of 16 to 32 features, with 32 rows on 8 devices, has the strategy ((8, 1), (1, 1), (1,)) and the
local shapes 4x16 32x16 32 -> 4x32. Four stages of 8 devices each are written ``4 x 8``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..cost.memory_timeline import OptimizerSetting, optimizer_text
from ..layout import digits_size
from ..pipeline.stages import PipelineSearchResult, PricedPipeline
from ..sharded_plan import Collective, OperatorPlan, ParameterPlan, Plan
from .console_tables import UNLIMITED, table
from .description import layer_of, numbered, numbers_text
from .format import layout_text, size_text, time_text
from .operator_names import OperatorNames

__all__ = [
    "DEAREST",
    "NOTES",
    "alternatives_of",
    "beside_lines",
    "cuts_of",
    "folded_parameters",
    "legend",
    "memory_line",
    "notes_of",
    "operators_table",
    "operators_text",
    "parameters",
    "regions",
    "rows",
    "total",
]


#: The notation of equal layers; of strategies and layouts.
LAYERS = "layers.{0-3}.up: the operator of layers 0 to 3, which are equal. "
LEGEND = (
    "Strategy: the cuts of each input by dim, then "
    "its cause: batch (along the batch), follow (as its input), whole (on every device), propagated, search; none: a "
    "mark. Layout [4@2, -]: dim 0 in 4 parts, of which rank r has number r // 2 % 4; dim 1 whole. Before, after: "
    "collectives / ranks that take part. Sent: bytes of a rank."
)


@dataclass(frozen=True)
class _Row:
    operator: str
    where: str
    strategy: str
    layouts: str
    local: str
    before: str
    after: str
    forward: str
    backward: str


def legend(names: OperatorNames) -> str:
    """The notation of a table of operators."""
    return (LAYERS if names.layers else "") + LEGEND


def memory_line(kinds: Mapping[str, int], optimizer: OptimizerSetting) -> str:
    """The memory of a device, by kind; beside the optimizer's state, the optimizer."""
    remarks = {"optimizer": f" ({optimizer_text(optimizer)})"}
    return ", ".join(f"{kind} {size_text(count)}{remarks.get(kind, '')}" for kind, count in kinds.items())


def rows(
    plan: Plan,
    sent: Iterable[Collective],
    names: OperatorNames,
    without: Collection[object] = (),
    only: Collection[str] | None = None,
) -> list[_Row]:
    """A row for each operator; operators of equal layers share a row where all their cells are equal. A further row has
    the collectives that bring a result into the layout of the outputs.

    Args:
        plan: the plan.
        sent: the collectives of a rank.
        names: the operators' paths.
        without: the targets of operators that get no row.
        only: the names of the operators that get a row, each one of its own; None: all.
    """
    of: dict[str, list[Collective]] = {}
    for collective in sent:
        of.setdefault(collective.operator, []).append(collective)
    out: dict[str, _Row] = {}
    recomputed = {
        name
        for region in plan.regions
        for name in region.operators
        if (recompute := plan.decisions[name].op.recompute) is not None and not recompute.keep
    }
    for operator, op in zip(plan.operators, plan.graph.ops, strict=True):
        mine = of.pop(operator.name, [])
        if op.target in without or (only is not None and operator.name not in only):
            continue
        where = " ".join(filter(None, (operator.source, "recomputed" * (operator.name in recomputed))))
        out[operator.name] = _Row(
            names.text(operator.name), where, _strategy(operator), _layouts(operator), _local(operator), *_traffic(mine)
        )
    if only is not None:
        return list(out.values())
    for name, mine in of.items():  # redistributions of the results, which belong to no operator
        out[name] = _Row(name, "", "", "", "", *_traffic(mine))
    folded = names.folded(out, lambda name: replace(out[name], operator=""))
    return [replace(out[group[0]], operator=text) for text, group in folded]


def wide(lines: Iterable[_Row]) -> Table:
    """The table of operators with one line each."""
    made = table(
        "operator",
        "where",
        "strategy",
        "layouts",
        "local shapes",
        "before",
        "after",
        "sent forward",
        "sent backward",
        right=("sent forward", "sent backward"),
    )
    for row in lines:
        made.add_row(
            *map(
                Text,
                (
                    row.operator,
                    row.where,
                    row.strategy,
                    row.layouts,
                    row.local,
                    row.before,
                    row.after,
                    row.forward,
                    row.backward,
                ),
            )
        )
    return made


def narrow(lines: Iterable[_Row]) -> Table:
    """The table of operators for a narrow terminal, with a few lines each."""
    made = table("operator, where", "strategy, layouts, local shapes", "before, after, sent", lines=True)
    for row in lines:
        traffic = [
            f"before: {row.before}" if row.before else "",
            f"after: {row.after}" if row.after else "",
            f"forward {row.forward}" if row.forward != "-" else "",
            f"backward {row.backward}" if row.backward != "-" else "",
        ]
        cells = (row.operator, row.where), (row.strategy, row.layouts, row.local), traffic
        made.add_row(*(Text("\n".join(filter(None, cell))) for cell in cells))
    return made


def operators_table(lines: Sequence[_Row], console: Console) -> Table:
    """The table of operators: a line each where that fits the console, otherwise a few lines each."""
    shown = wide(lines)
    needed = console.measure(shown, options=console.options.update(max_width=UNLIMITED)).maximum
    return shown if needed <= console.width else narrow(lines)


def operators_text(names: OperatorNames, operators: Iterable[str]) -> str:
    """Operators by their paths, those of several layers joined: at most two."""
    folded = names.folded(dict.fromkeys(operators), lambda name: "")
    plain = lambda text: text if names.is_numbered(text.partition(" (")[0]) else text.partition(" (")[0]
    texts = [plain(text) if group[0] in names.paths else f"result {text}" for text, group in folded]
    return ", ".join(texts[:2]) + (f" and {len(texts) - 2} more" if len(texts) > 2 else "")


def notes_of(notes: Iterable[str], names: OperatorNames) -> list[str]:
    """Notes that several operators share, once, with the paths of these operators.

    Args:
        notes: each as ``operator: text`` or ``text``, perhaps behind ``stage 1: ``.
        names: the operators' paths.
    """
    folded: dict[tuple[str, str], list[str]] = {}
    for note in notes:
        where = "" if (found := re.match(r"stage \d+: ", note)) is None else found[0]
        rest = note.removeprefix(where)
        operator, colon, text = rest.partition(": ")
        known = bool(colon) and operator in names.decisions
        folded.setdefault((where, text if known else rest), []).extend([operator] if known else ())
    return [
        f"{where}{operators_text(names, operators)}: {text}" if operators else f"{where}{text}"
        for (where, text), operators in folded.items()
    ]


def regions(plan: Plan, names: OperatorNames) -> Iterator[str]:
    """The recomputed parts, a line for equal layers."""
    folded: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    layers = layer_of([region.path for region in plan.regions] + list(names.paths.values()))
    for region in plan.regions:
        path, layer = region.path, layers.get(names.paths.get(region.path, region.path))
        paths = [names.path(name) for name in region.operators]
        before = path if layer is None else f"{layer[0].rpartition('.')[2]}.{layer[1]}".lstrip(".")
        key = path if layer is None else layer[0], tuple(each.removeprefix(f"{before}.") for each in paths)
        folded.setdefault(key, []).append(path)
    for (_, inside), paths in folded.items():
        more = f" and {len(inside) - SHOWN} more" if len(inside) > SHOWN else ""
        title = paths[0]
        if len(paths) > 1 and (found := layers.get(names.paths.get(title, title))) is not None:
            before = f"{found[0].rpartition('.')[2]}.{found[1]}".lstrip(".")
            numbers = numbers_text(layers[names.paths.get(path, path)][1] for path in paths)
            title = f"{found[0].rpartition('.')[2]}.{{{numbers}}}".lstrip(".") + names.path(title).removeprefix(before)
        yield f"recomputed in the backward: {title} ({', '.join(inside[:SHOWN])}{more})"


def _strategy(operator: OperatorPlan) -> str:
    text = str(operator.in_strategy)
    return text if operator.cause == "mark" else f"{text} {operator.cause}"


def _layouts(operator: OperatorPlan) -> str:
    ins, outs = (" ".join(map(layout_text, side)) for side in (operator.in_layouts, operator.out_layouts))
    return f"{ins} -> {outs}"


def _local(operator: OperatorPlan) -> str:
    ins, outs = operator.local_shapes(0)
    return f"{' '.join(map(_shape, ins))} -> {' '.join(map(_shape, outs))}"


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _traffic(collectives: list[Collective]) -> tuple[str, str, str, str]:
    """(redistributions before an operator, reductions after it, bytes forward, bytes backward)."""
    forward = [c for c in collectives if c.phase in ("forward", "storage") and not c.again]
    backward = [c for c in collectives if c.phase not in ("forward", "storage") or c.again]
    before = [c for c in forward if c.cause != "operator"]
    after = [c for c in forward if c.cause == "operator"]
    sent = lambda side: size_text(sum(c.sent for c in side)) if side else "-"
    return _names(before), _names(after), sent(forward), sent(backward)


def _names(collectives: list[Collective]) -> str:
    """Collectives with the sizes of their groups: ``all_gather/4``."""
    counts: dict[str, int] = {}
    for c in collectives:
        name = f"{c.op}/{len(c.ranks)}"
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if n == 1 else f"{n}x {name}" for name, n in counts.items())


def total(plan: Plan, sent: Iterable[Collective], when: str = "in a step") -> str:
    """The bytes that a rank sends, by phase, as a line.

    Args:
        plan: the plan.
        sent: the collectives of a rank.
        when: the words for the period.
    """
    phases = {"forward": 0, "backward": 0, "gradient": 0}
    for c in sent:
        phases[c.phase] = phases.get(c.phase, 0) + c.sent
    parts = ", ".join(f"{phase} {size_text(count)}" for phase, count in phases.items())
    return f"a rank sends {when}: {parts}, together {size_text(plan.sent)}"


def beside_lines(plan: Plan) -> Iterator[str]:
    """The step whose messages travel beside computation: its time, and the messages that are waited for longest."""
    price, step = plan.price, plan.in_time
    if not price.communication:
        return
    yield (
        f"with messages beside computation, as on a library such as NCCL, a step takes {time_text(price.elapsed)}: "
        f"computing {time_text(step.compute)}, waiting for messages {time_text(price.exposed)} of their "
        f"{time_text(price.communication)}"
    )
    names, longest = OperatorNames(plan), []
    for number, seconds in step.waits[:WAITS]:
        message = plan.schedule.messages[number]
        moved = names.value(message.whose) if message.role == "redistribution" else message.whose
        longest.append(f"{message.kind}, {moved} ({time_text(seconds)})")
    if longest:
        yield f"waited for longest: {'; '.join(longest)}"


def parameters(plan: Plan) -> Table:
    """The table of parameters: shapes, cuts, layouts and bytes on a device; equal ones of several layers once."""
    cut = plan.hsdp is not None or any(p.storage != p.layout for p in plan.parameters.values())
    made = table(
        "parameter",
        "shape",
        *(("used as",) if cut else ()),
        "local shape",
        "cuts",
        "layout",
        "stored on a device",
        *(("optimizer parallel",) if cut else ()),
        right=("stored on a device",),
        wraps=("parameter", "layout", "stored on a device", "optimizer parallel"),
    )
    dtypes = {v.name: v.stored.dtype for v in plan.graph.sources()}
    together, rows = 0, {}
    for name, parameter in plan.parameters.items():
        owner = plan.graph.aliases.get(name)
        local, nbytes = parameter.local_shape(0), dtypes[parameter.name].itemsize
        for size in local:
            nbytes *= size
        together += nbytes if owner is None else 0
        used = (_shape(parameter.layout.local_shape(parameter.layout.padded(parameter.shape))),) if cut else ()
        rows[name] = (
            _shape(parameter.shape),
            *used,
            _shape(local),
            str(parameter.storage.cuts),
            layout_text(parameter.storage),
            size_text(nbytes) if owner is None else f"is {owner}",
            *((_cut(parameter),) if cut else ()),
        )
    for text, names in folded_parameters(rows):
        made.add_row(*map(Text, (text, *rows[names[0]])))
    made.add_row(*map(Text, ("together", "", *(("",) if cut else ()), "", "", "", size_text(together))), style="bold")
    return made


def folded_parameters(same: Mapping[str, Hashable]) -> list[tuple[str, tuple[str, ...]]]:
    """Parameters of equal layers joined: (``layers.{0-3}.up.weight``, their names).

    Args:
        same: name of a parameter -> everything that must be equal of two parameters.
    """
    folded: dict[tuple[str, bool, str, Hashable], list[str]] = {}
    for name, equal in same.items():
        container, number, rest = next(iter(numbered(name)), ("", None, name))
        folded.setdefault((container, number is not None, rest, equal), []).append(name)
    out = []
    for (container, _, rest, _), names in folded.items():
        numbers = numbers_text(next(iter(numbered(name)))[1] for name in names) if len(names) > 1 else ""
        name = f"{container}.{{{numbers}}}.{rest}".lstrip(".") if numbers else names[0]
        out.append((name, tuple(names)))
    return out


def _cut(parameter: ParameterPlan) -> str:
    """The number of replicas over which a parameter is sharded, or the reason why it is not."""
    further = digits_size(parameter.storage.carried) // digits_size(parameter.layout.carried)
    return f"cut over {further}" if further > 1 else parameter.note or ""


#: The number of operators of a recomputed part that are shown.
SHOWN = 6

#: The numbers of communications and of notes that are shown, and of messages that are waited for.
DEAREST, NOTES, WAITS = 10, 20, 3


#: The number of alternatives that are shown.
MOST = 24


def alternatives_of(chosen: PipelineSearchResult) -> Table:
    """The table of the priced alternatives, a row each; the first is the chosen one."""
    made = table(
        "priced",
        "devices a stage",
        "micro-batches",
        "recomputed",
        "a step",
        "more",
        "on a device",
        "",
        right=("priced", "micro-batches", "recomputed", "a step", "more", "on a device"),
    )
    for a in chosen.alternatives[:MOST]:
        seconds = "" if a.seconds is None else time_text(a.seconds)
        more = "" if a.seconds is None or not chosen.seconds else f"{a.seconds / chosen.seconds - 1:+.1%}"
        made.add_row(
            *map(
                Text,
                (
                    f"{a.stages} stage{'s' * (a.stages > 1)}",
                    _devices(a),
                    str(a.micro_batches),
                    str(a.recomputed) if a.recomputed else "",
                    seconds,
                    more,
                    "" if a.peak is None else size_text(a.peak),
                    a.why,
                ),
            )
        )
    if len(chosen.alternatives) > MOST:
        made.add_row(f"and {len(chosen.alternatives) - MOST} more")
    return made


def cuts_of(chosen: PipelineSearchResult) -> Iterator[str]:
    """A line for each stage: its devices, its modules, and whether they are recomputed."""
    for s, stage in enumerate(chosen.stages):
        modules = [path for paths in chosen.paths[stage.first : stage.last] for path in paths if path]
        text = ", ".join(modules) if len(modules) <= 3 else f"{modules[0]} to {modules[-1]} ({len(modules)} modules)"
        yield f"stage {s} on {stage.devices} device{'s' * (stage.devices > 1)}: {text or 'the whole model'}" + (
            ", computed again in the backward" if stage.recompute else ""
        )


def _devices(alternative: PricedPipeline) -> str:
    """Devices by stage, runs of equal numbers joined: ``4 x 8``."""
    runs = [(len(list(group)), devices) for devices, group in groupby(alternative.devices)]
    return ", ".join(f"{count} x {devices}" if count > 1 else str(devices) for count, devices in runs)

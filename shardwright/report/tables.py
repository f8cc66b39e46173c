"""What a terminal shows of a plan: operators with their strategies and traffic, parameters with their places."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..cluster import Cluster
from ..cost.cost_model import PricedCollective
from ..layout import digits_size
from ..pipeline.pipeline_plan import PipelinePlan, PipelineSearchResult, PricedPipeline, Stage, Transfer
from ..pipeline.simulate import Once, Simulation
from ..rules.dims import send
from ..sharded_plan import Collective, OperatorPlan, ParameterPlan, Plan
from .format import layout_text, size_text, time_text
from .timeline import COLUMNS, LINES, headline

__all__ = [
    "LEGEND",
    "UNLIMITED",
    "alternatives_of",
    "cuts_of",
    "explain",
    "explain_pipeline",
    "grid",
    "memory_line",
    "narrow",
    "parameters",
    "ranks_text",
    "rows",
    "summary",
    "summary_of_pipeline",
    "table",
    "total",
    "wide",
]

#: Wide enough for everything: what a table is measured in, and as wide as it needs where no terminal limits it.
UNLIMITED = 10_000
#: What the digits of a layout mean.
LEGEND = "layouts by dim: 4@2 cuts into 4 parts, of which rank r has number r // 2 % 4; - keeps the dim whole"


def explain(plan: Plan | PipelinePlan, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print a plan: every operator, where it is called, its strategy, layouts, local shapes and what is sent. Of a
    pipeline stage by stage, with what crosses.

    All numbers are those of the plan's own collectives, for one rank; every rank sends as much.

    Args:
        file: where to print; None: to standard output.
        width: of the text, in characters; None: the terminal's, or as needed where there is none. Operators that do not
            fit on a line each take several; nothing is cut off.
    """
    if isinstance(plan, PipelinePlan):
        explain_pipeline(plan, file, width)
        return
    sent = plan.collectives(0)
    lines = rows(plan, sent)
    shown = wide(lines)
    console = Console(file=file, width=width, highlight=False)
    needed = console.measure(shown, options=console.options.update(max_width=UNLIMITED)).maximum
    if width is None and not console.is_terminal:
        console = Console(file=file, width=max(needed, 100), highlight=False)
    head = f"{plan.mode} on {plan.devices} device{'s' * (plan.devices > 1)}"
    console.print(Text(f"{head}: {len(plan.operators)} operators, plan {plan.fingerprint}"))
    console.print(shown if needed <= console.width else narrow(lines))
    console.print(Text(LEGEND))
    console.print(Text(total(plan, sent)))
    if plan.parameters:
        console.print(parameters(plan))
        console.print(Text(f"on a device: {memory_line(plan.memory(0))}"))
    for region in plan.regions:
        console.print(Text(f"recomputed in the backward: {region.path} ({', '.join(region.operators)})"))
    for note in plan.notes:
        console.print(Text(f"note: {note}"))


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


def memory_line(kinds: Mapping[str, int]) -> str:
    """What a device holds, by kind."""
    return ", ".join(f"{kind} {size_text(count)}" for kind, count in kinds.items())


def rows(plan: Plan, sent: Iterable[Collective], without: Collection[Any] = ()) -> list[_Row]:
    """A line for each operator.

    Args:
        sent: the collectives of a rank.
        without: the targets of operators that have none of their own.
    """
    of: dict[str, list[Collective]] = {}
    for collective in sent:
        of.setdefault(collective.operator, []).append(collective)
    out = []
    again = {name for region in plan.regions for name in region.operators if not plan.decisions[name].op.recompute.keep}
    for operator, op in zip(plan.operators, plan.graph.ops, strict=True):
        if op.target in without:
            continue
        name = operator.name if operator.op in operator.name else f"{operator.name} ({operator.op})"
        where = " ".join(filter(None, (operator.module, operator.source, "recomputed" * (operator.name in again))))
        out.append(
            _Row(
                name,
                where,
                _strategy(operator),
                _layouts(operator),
                _local(operator),
                *_traffic(of.pop(operator.name, [])),
            )
        )
    for name, mine in of.items():  # what brings results into the layout in which they are handed out
        out.append(_Row(name, "", "", "", "", *_traffic(mine)))
    return out


def table(*columns: str, right: tuple[str, ...] = (), lines: bool = False) -> Table:
    """An empty table."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_lines=lines)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def wide(lines: Iterable[_Row]) -> Table:
    """A line for each operator."""
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
    """The same for a narrow terminal: a few lines for each operator."""
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
    """(conversions before an operator, reductions after it, bytes forward, bytes backward)."""
    forward = [c for c in collectives if c.phase in ("forward", "storage") and not c.again]
    backward = [c for c in collectives if c.phase not in ("forward", "storage") or c.again]
    before = [c for c in forward if c.cause != "operator"]
    after = [c for c in forward if c.cause == "operator"]
    return (
        _names(before),
        _names(after),
        *(size_text(sum(c.sent for c in side)) if side else "-" for side in (forward, backward)),
    )


def _names(collectives: list[Collective]) -> str:
    """``all_gather/4``: the collectives with the sizes of their groups."""
    counts: dict[str, int] = {}
    for c in collectives:
        name = f"{c.op}/{len(c.ranks)}"
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if n == 1 else f"{n}x {name}" for name, n in counts.items())


def total(plan: Plan, sent: Iterable[Collective], when: str = "in a step") -> str:
    """What a rank sends, by phase."""
    phases = {"forward": 0, "backward": 0, "gradient": 0}
    for c in sent:
        phases[c.phase] = phases.get(c.phase, 0) + c.sent
    parts = ", ".join(f"{phase} {size_text(count)}" for phase, count in phases.items())
    return f"a rank sends {when}: {parts}, together {size_text(plan.sent)}"


def parameters(plan: Plan) -> Table:
    """Where parameters lie."""
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
    )
    dtypes = {v.name: v.stored.dtype for v in plan.graph.sources()}
    together = 0
    for name, parameter in plan.parameters.items():
        held = plan.graph.aliases.get(name)
        local, nbytes = parameter.local_shape(0), dtypes[parameter.name].itemsize
        for size in local:
            nbytes *= size
        together += nbytes if held is None else 0
        used = (_shape(parameter.layout.local_shape(parameter.layout.padded(parameter.shape))),) if cut else ()
        made.add_row(
            *map(
                Text,
                (
                    name,
                    _shape(parameter.shape),
                    *used,
                    _shape(local),
                    str(parameter.storage.cuts),
                    layout_text(parameter.storage),
                    size_text(nbytes) if held is None else f"is {held}",
                    *((_cut(parameter),) if cut else ()),
                ),
            )
        )
    made.add_row(*map(Text, ("together", "", *(("",) if cut else ()), "", "", "", size_text(together))), style="bold")
    return made


def _cut(parameter: ParameterPlan) -> str:
    """Over how many replicas it is stored in parts, or why not."""
    further = digits_size(parameter.storage.carried) // digits_size(parameter.layout.carried)
    return f"cut over {further}" if further > 1 else parameter.note or ""


# ----------------------------------------------------------------------------------------------------
# A plan at a glance, in a terminal: what a step takes, what a device holds, which communication is dearest.
# ----------------------------------------------------------------------------------------------------

#: How many communications, and how many notes, are shown.
DEAREST, NOTES = 10, 20


def summary(plan: Plan | PipelinePlan, file: IO[str] | None = None) -> None:
    """Print what a plan costs, for one rank; every rank has as much, but those of other stages of a pipeline."""
    if isinstance(plan, PipelinePlan):
        summary_of_pipeline(plan, file)
        return
    console = Console(file=file, highlight=False, soft_wrap=True)
    console = console if console.is_terminal else Console(file=file, highlight=False, width=200)
    price, cluster = plan.price, Cluster.of(plan.cluster, plan.devices)
    say = lambda text: console.print(Text(text))  # noqa: E731
    say(
        f"{plan.mode} on {plan.devices} device{'s' * (plan.devices > 1)} of {cluster.name}: {len(plan.decisions)} "
        f"operators, plan {plan.fingerprint}"
    )
    forward, backward, computing, sending = map(
        time_text, (price.forward, price.backward, price.compute, price.communication)
    )
    say(
        f"a step takes {time_text(price.total)}: forward {forward}, backward {backward}; computing {computing}, "
        f"communication {sending}"
    )
    if plan.bound is None:
        say(
            "no lower bound was proved"
            if plan.found is not None
            else "nothing was searched, so there is no lower bound"
        )
    else:
        say(f"cost {plan.cost:.6g} s, lower bound {plan.bound:.6g} s, gap {plan.gap:.3%}")
    console.print(_memory(plan.timeline.kinds, plan.peak, cluster))
    if plan.peak > cluster.memory:
        say('that is more than a device has: memory="cluster" (--memory cluster) searches for a plan that fits')
    if price.collectives:
        console.print(_dearest(price.collectives, price.communication, cluster))
    notes = (*plan.notes, *(plan.found.notes if plan.found is not None else ()))
    for note in notes[:NOTES]:
        say(f"note: {note}")
    if len(notes) > NOTES:
        say(f"note: and {len(notes) - NOTES} more, which the lines of the plan have")


def _table(*columns: str, right: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _memory(kinds: dict[str, float], peak: float, cluster: Cluster) -> Table:
    """What there is at the fullest moment of a step."""
    table = _table("on a device, when it holds most", "bytes", right=("bytes",))
    for kind, count in kinds.items():
        table.add_row(kind, size_text(count))
    table.add_row("all together", size_text(peak), style="bold")
    table.add_row(f"a device of {cluster.name} has", size_text(cluster.memory))
    return table


def _dearest(collectives: Iterable[PricedCollective], together: float, cluster: Cluster) -> Table:
    """The dearest communications, those alike as one."""
    alike: dict[tuple, list[PricedCollective]] = {}
    for c in collectives:
        alike.setdefault((c.kind, c.digits, c.bytes, c.phase), []).append(c)
    rows = sorted(alike.values(), key=lambda group: -sum(c.seconds for c in group))
    table = _table(
        "communication",
        "ranks",
        "over",
        "bytes",
        "times",
        "seconds",
        "part",
        "phase",
        "for",
        right=("ranks", "bytes", "times", "seconds", "part"),
    )
    for group in rows[:DEAREST]:
        first, seconds = group[0], sum(c.seconds for c in group)
        names = list(dict.fromkeys(c.operator for c in group))
        over = ", ".join(f"{units} by {level.name}" for level, units in cluster.crossed(first.digits))
        table.add_row(
            *map(
                Text,
                (
                    first.kind,
                    str(digits_size(first.digits)),
                    over,
                    size_text(first.bytes),
                    str(len(group)),
                    time_text(seconds),
                    f"{seconds / together:.0%}" if together else "",
                    first.phase,
                    ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
                ),
            )
        )
    if len(rows) > DEAREST:
        seconds = sum(c.seconds for group in rows[DEAREST:] for c in group)
        table.add_row(
            *map(
                Text,
                (
                    "others",
                    "",
                    "",
                    "",
                    str(sum(map(len, rows[DEAREST:]))),
                    time_text(seconds),
                    f"{seconds / together:.0%}" if together else "",
                    "",
                    "",
                ),
            )
        )
    return table


# ----------------------------------------------------------------------------------------------------
# What stages="auto" priced, the best first, and where it cut the model.
# ----------------------------------------------------------------------------------------------------

#: How many alternatives are shown.
MOST = 24


def alternatives_of(chosen: PipelineSearchResult) -> Table:
    """A line for each that was priced; the first is the one that was taken."""
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
    """A line for each stage: its modules, and whether they are computed again."""
    for s, stage in enumerate(chosen.stages):
        modules = [path for paths in chosen.paths[stage.first : stage.last] for path in paths if path]
        words = ", ".join(modules) if len(modules) <= 3 else f"{modules[0]} to {modules[-1]} ({len(modules)} modules)"
        yield f"stage {s} on {stage.devices} device{'s' * (stage.devices > 1)}: {words or 'the whole model'}" + (
            ", computed again in the backward" if stage.recompute else ""
        )


def _devices(alternative: PricedPipeline) -> str:
    """``4 x 8``: neighbours that have as many together."""
    runs = [(len(list(group)), devices) for devices, group in groupby(alternative.devices)]
    return ", ".join(f"{count} x {devices}" if count > 1 else str(devices) for count, devices in runs)


# ----------------------------------------------------------------------------------------------------
# What a terminal shows of a pipeline: its stages, what crosses between them, each stage's operators and parameters.
# ----------------------------------------------------------------------------------------------------


def ranks_text(ranks: range) -> str:
    """``0-3``: ranks of the world."""
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def grid(plan: PipelinePlan) -> str | None:
    """The schedule as a grid of actions; None where that would be too long or too wide to read."""
    text = plan.schedule.grid()
    lines = text.splitlines()
    return text if len(lines) <= LINES and max(map(len, lines), default=0) <= COLUMNS else None


# -- every operator ----------------------------------------------------------------------------------------------------


def explain_pipeline(plan: PipelinePlan, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print a pipeline: for each stage what `tables.explain` prints of a plan, of one micro-batch; what crosses."""
    sent = {stage.number: stage.plan.collectives(0) for stage in plan.stages}
    lines = {stage.number: list(rows(stage.plan, sent[stage.number], (send,))) for stage in plan.stages}
    tables = {number: wide(of) for number, of in lines.items()}
    console = Console(file=file, width=width, highlight=False)
    options = console.options.update(max_width=UNLIMITED)
    needed = {number: console.measure(each, options=options).maximum for number, each in tables.items()}
    if width is None and not console.is_terminal:
        console = Console(file=file, width=max(*needed.values(), 100), highlight=False)
    say = lambda text: console.print(Text(text))  # noqa: E731
    say(
        f"{plan.mode} on {plan.devices} devices: {_scheduled(plan)}, {len(plan.operators)} operators, plan "
        f"{plan.fingerprint}"
    )
    say_chosen(plan, console)
    say(LEGEND)
    for stage in plan.stages:
        say(f"stage {stage.number} on rank{'s' * (stage.devices > 1)} {ranks_text(stage.ranks)}, one micro-batch")
        number = stage.number
        console.print(tables[number] if needed[number] <= console.width else narrow(lines[number]))
        say(total(stage.plan, sent[number], "with one micro-batch"))
        if stage.plan.parameters:
            console.print(parameters(stage.plan))
        for region in stage.plan.regions:
            say(f"recomputed in the backward: {region.path} ({', '.join(region.operators)})")
    if plan.transfers:
        console.print(_crossing(plan))
    for stage in _firsts(plan):
        sends = sum(c.sent for c in plan.collectives(stage.first))
        say(f"{_on(plan, stage)}: {memory_line(plan.memory(stage.first))}; sends {size_text(sends)} in a step")
    if (text := grid(plan)) is not None:
        say(text.rstrip("\n"))
    for note in plan.notes:
        say(f"note: {note}")


def say_chosen(plan: PipelinePlan, console: Console) -> None:
    """Print what stages="auto" priced and chose, if it did."""
    if plan.chosen is not None:
        console.print(alternatives_of(plan.chosen))
        for line in cuts_of(plan.chosen):
            console.print(Text(line))


def _scheduled(plan: PipelinePlan) -> str:
    made = plan.schedule
    groups = f" on {made.groups} groups of devices" if made.groups != made.stages else ""
    return f"{made.stages} stages{groups}, {made.name}, {made.micro_batches} micro-batches"


def _firsts(plan: PipelinePlan) -> Iterator[Stage]:
    """The first stage of each group of devices."""
    placement = plan.schedule.placement
    for group in range(plan.schedule.groups):
        yield plan.stages[placement.index(group)]


def _on(plan: PipelinePlan, first: Stage) -> str:
    numbers = [str(stage.number) for stage in plan.stages if stage.first == first.first]
    which = f"each of the ranks {ranks_text(first.ranks)}" if first.devices > 1 else f"rank {first.first}"
    return f"on {which} (stage{'s' * (len(numbers) > 1)} {', '.join(numbers)})"


def _crossing(plan: PipelinePlan) -> Table:
    """What stages send one another."""
    made = table("crosses", "from", "to", "shape", "cuts", "a rank sends", "when", "gradient", right=("a rank sends",))
    for t in plan.transfers:
        when = "each micro-batch" if t.kind == "value" else "once a step"
        shape = "x".join(map(str, t.value.shape)) or "scalar"
        made.add_row(
            *map(
                Text,
                (
                    t.name,
                    f"stage {t.source}",
                    f"stage {t.target}",
                    shape,
                    str(t.layout.cuts),
                    _sent(plan, t),
                    when,
                    "comes back" if t.gradient else "",
                ),
            )
        )
    return made


def _sent(plan: PipelinePlan, t: Transfer) -> str:
    if plan.stages[t.source].first == plan.stages[t.target].first:
        return "nothing"  # it stays where it is
    return size_text(t.nbytes)


# -- at a glance -------------------------------------------------------------------------------------------------------


def summary_of_pipeline(plan: PipelinePlan, file: IO[str] | None = None) -> None:
    """Print what a pipeline costs: a step in time, and each stage's part of it."""
    console = Console(file=file, highlight=False, soft_wrap=True)
    console = console if console.is_terminal else Console(file=file, highlight=False, width=200)
    say = lambda text: console.print(Text(text))  # noqa: E731
    cluster, simulation = Cluster.of(plan.cluster, plan.devices), plan.simulation
    say(
        f"{plan.mode} on {plan.devices} devices of {cluster.name}: {len(plan.operators)} operators, plan "
        f"{plan.fingerprint}"
    )
    say(headline(simulation))
    say("no lower bound was proved: stages are planned one by one")
    say_chosen(plan, console)
    console.print(_stages(plan, simulation))
    if plan.peak > cluster.memory:
        say(f"that is more than a device has, which is {size_text(cluster.memory)}")
    if plan.transfers:
        console.print(_crossing(plan))
    spent = [(c, stage) for stage in plan.stages for c in stage.plan.price.collectives]
    if spent:
        console.print(_dearest_stage(spent, cluster))
    for note in plan.notes[:NOTES]:
        say(f"note: {note}")
    if len(plan.notes) > NOTES:
        say(f"note: and {len(plan.notes) - NOTES} more, which the lines of the plan have")


def _stages(plan: PipelinePlan, simulation: Simulation) -> Table:
    """A line for each stage: seconds of one micro-batch, bytes on a device."""
    kinds = list(dict.fromkeys(kind for stage in plan.stages for kind in stage.plan.memory(0)))
    numbers = ("operators", "forward", "backward", "once a step", "kept", *kinds, "waits", "peak")
    made = table("stage", "ranks", *numbers, right=numbers)
    for stage in plan.stages:
        group = plan.schedule.placement[stage.number]
        kept, held = plan.schedule.most_kept(stage.number), plan.memory_of(stage)
        operators = sum(op.target is not send for op in stage.plan.graph.ops)
        waits = 1 - simulation.busy(group) / simulation.total if simulation.total else 0.0
        made.add_row(
            str(stage.number),
            ranks_text(stage.ranks),
            str(operators),
            *map(time_text, _seconds(simulation, stage)),
            f"{kept}x",
            *(size_text(held[kind]) if kind in held else "" for kind in kinds),
            f"{waits:.1%}",
            size_text(simulation.peak(group)),
        )
    return made


def _seconds(simulation: Simulation, stage: Stage) -> tuple[float, float, float]:
    """Seconds of a stage: the forward and the backward of its first micro-batch, and what it does once a step."""
    spent = {"forward": 0.0, "backward": 0.0, "once": 0.0}
    for span in simulation.spans:
        if span.action.stage == stage.number:
            if isinstance(span.action, Once):
                spent["once"] += span.stop - span.start
            elif span.action.micro == 0:
                spent["forward" if span.action.kind == "F" else "backward"] += span.stop - span.start
    return spent["forward"], spent["backward"], spent["once"]


def _dearest_stage(spent: Iterable[tuple[PricedCollective, Stage]], cluster: Cluster) -> Table:
    """The dearest communications inside of stages, with one micro-batch: those alike as one, of stages alike likewise,
    counted in one of them."""
    alike: dict[tuple, dict[int, list[PricedCollective]]] = {}
    for c, stage in spent:
        key = c.kind, c.digits, c.bytes, c.phase, stage.devices
        alike.setdefault(key, {}).setdefault(stage.number, []).append(c)
    seconds = lambda of: sum(c.seconds for c in of)  # noqa: E731
    made = table(
        "communication",
        "stages",
        "ranks",
        "over",
        "bytes",
        "times",
        "seconds",
        "phase",
        "for",
        right=("ranks", "bytes", "times", "seconds"),
    )
    order = [(key, stages, max(stages.values(), key=seconds)) for key, stages in alike.items()]
    for (kind, digits, size, phase, devices), stages, most in sorted(order, key=lambda one: -seconds(one[2]))[:DEAREST]:
        names = list(dict.fromkeys(c.operator for c in most))
        over = ", ".join(f"{units} by {level.name}" for level, units in Cluster.of(cluster, devices).crossed(digits))
        made.add_row(
            *map(
                Text,
                (
                    kind,
                    _numbers(sorted(stages)),
                    str(digits_size(digits)),
                    over,
                    size_text(size),
                    str(len(most)),
                    time_text(seconds(most)),
                    phase,
                    ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3)),
                ),
            )
        )
    return made


def _numbers(numbers: Sequence[int]) -> str:
    """``0-3, 5``"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

"""What a terminal shows of a plan: operators with their strategies and traffic, parameters with their places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..layout import digits_size
from ..plan.plan import Collective, OperatorPlan, ParameterPlan, Plan
from .units import size_text

__all__ = ["explain"]

#: Wide enough for everything: what a table is measured in, and as wide as it needs where no terminal limits it.
UNLIMITED = 10_000


def explain(plan: Plan, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print a plan: every operator, where it is called, its strategy, local shapes and what is sent for it.

    All numbers are those of the plan's own collectives, for one rank; every rank sends as much.

    Args:
        file: where to print; None: to standard output.
        width: of the text, in characters; None: the terminal's, or as needed where there is none. Operators that do not
            fit on a line each take several; nothing is cut off.
    """
    sent = plan.collectives(0)
    rows = _rows(plan, sent)
    table = _wide(rows)
    console = Console(file=file, width=width, highlight=False)
    needed = console.measure(table, options=console.options.update(max_width=UNLIMITED)).maximum
    if width is None and not console.is_terminal:
        console = Console(file=file, width=max(needed, 100), highlight=False)
    head = f"{plan.mode} on {plan.devices} device{'s' * (plan.devices > 1)}"
    console.print(Text(f"{head}: {len(plan.operators)} operators, plan {plan.fingerprint}"))
    console.print(table if needed <= console.width else _narrow(rows))
    console.print(Text(_total(plan, sent)))
    if plan.parameters:
        console.print(_parameters(plan))
        memory = plan.memory(0)
        console.print(Text("on a device: " + ", ".join(f"{kind} {size_text(count)}" for kind, count in memory.items())))
    for region in plan.regions:
        console.print(Text(f"recomputed in the backward: {region.path} ({', '.join(region.operators)})"))
    for note in plan.notes:
        console.print(Text(f"note: {note}"))


@dataclass(frozen=True)
class _Row:
    operator: str
    where: str
    strategy: str
    local: str
    before: str
    after: str
    forward: str
    backward: str


def _rows(plan: Plan, sent: Iterable[Collective]) -> list[_Row]:
    of: dict[str, list[Collective]] = {}
    for collective in sent:
        of.setdefault(collective.operator, []).append(collective)
    rows = []
    again = {name for region in plan.regions for name in region.operators if not plan.decisions[name].op.recompute.keep}
    for operator in plan.operators:
        name = operator.name if operator.op in operator.name else f"{operator.name} ({operator.op})"
        where = " ".join(filter(None, (operator.module, operator.source, "recomputed" * (operator.name in again))))
        rows.append(_Row(name, where, _strategy(operator), _local(operator), *_traffic(of.pop(operator.name, []))))
    for name, mine in of.items():  # what brings results into the layout in which they are handed out
        rows.append(_Row(name, "", "", "", *_traffic(mine)))
    return rows


def _table(*columns: str, right: tuple[str, ...] = (), lines: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_lines=lines)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _wide(rows: Iterable[_Row]) -> Table:
    """A line for each operator."""
    table = _table("operator", "where", "strategy", "local shapes", "before", "after", "sent forward", "sent backward",
                   right=("sent forward", "sent backward"))
    for row in rows:
        table.add_row(*map(Text, (row.operator, row.where, row.strategy, row.local, row.before, row.after, row.forward,
                                  row.backward)))
    return table


def _narrow(rows: Iterable[_Row]) -> Table:
    """The same for a narrow terminal: a few lines for each operator."""
    table = _table("operator, where", "strategy, local shapes", "before, after, sent", lines=True)
    for row in rows:
        traffic = [f"before: {row.before}" if row.before else "", f"after: {row.after}" if row.after else "",
                   f"forward {row.forward}" if row.forward != "-" else "",
                   f"backward {row.backward}" if row.backward != "-" else ""]
        cells = (row.operator, row.where), (row.strategy, row.local), traffic
        table.add_row(*(Text("\n".join(filter(None, cell))) for cell in cells))
    return table


def _strategy(operator: OperatorPlan) -> str:
    text = str(operator.in_strategy)
    return text if operator.cause == "mark" else f"{text} {operator.cause}"


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
    return (_names(before), _names(after), *(size_text(sum(c.sent for c in side)) if side else "-"
                                                for side in (forward, backward)))


def _names(collectives: list[Collective]) -> str:
    """``all_gather/4``: the collectives with the sizes of their groups."""
    counts: dict[str, int] = {}
    for c in collectives:
        name = f"{c.op}/{len(c.ranks)}"
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if n == 1 else f"{n}x {name}" for name, n in counts.items())


def _total(plan: Plan, sent: Iterable[Collective]) -> str:
    phases = {"forward": 0, "backward": 0, "gradient": 0}
    for c in sent:
        phases[c.phase] = phases.get(c.phase, 0) + c.sent
    parts = ", ".join(f"{phase} {size_text(count)}" for phase, count in phases.items())
    return f"a rank sends in a step: {parts}, together {size_text(plan.sent)}"


def _parameters(plan: Plan) -> Table:
    cut = plan.hsdp is not None or any(p.storage != p.layout for p in plan.parameters.values())
    table = _table("parameter", "shape", *(("used as",) if cut else ()), "local shape", "cuts", "stored on a device",
                   *(("optimizer parallel",) if cut else ()), right=("stored on a device",))
    dtypes = {v.name: v.dtype for v in plan.graph.sources()}
    total = 0
    for name, parameter in plan.parameters.items():
        held = plan.graph.aliases.get(name)
        local, nbytes = parameter.local_shape(0), dtypes[parameter.name].itemsize
        for size in local:
            nbytes *= size
        total += nbytes if held is None else 0
        used = (_shape(parameter.layout.local_shape(parameter.layout.padded(parameter.shape))),) if cut else ()
        table.add_row(*map(Text, (name, _shape(parameter.shape), *used, _shape(local), str(parameter.storage.cuts),
                                  size_text(nbytes) if held is None else f"is {held}",
                                  *((_cut(parameter),) if cut else ()))))
    table.add_row(*map(Text, ("together", "", *(("",) if cut else ()), "", "", size_text(total))), style="bold")
    return table


def _cut(parameter: ParameterPlan) -> str:
    """Over how many replicas it is stored in parts, or why not."""
    further = digits_size(parameter.storage.carried) // digits_size(parameter.layout.carried)
    return f"cut over {further}" if further > 1 else parameter.note or ""

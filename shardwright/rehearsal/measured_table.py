"""Measured seconds beside those that a plan promises: the values and the tables that a rehearsal and a trace share.

ratio = measured / promised
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from ..report.format import time_text
from ..report.operator_names import OperatorNames
from ..report.table_parts import console_of, show, table

__all__ = ["OperatorSeconds", "figure_line", "folded", "measured_table", "ratio_of", "table_text"]

#: Rows of a table of measured seconds; the others are in the JSON.
SHOWN = 40


@dataclass(frozen=True)
class OperatorSeconds:
    """Seconds of one operator in a step of one rank, all its micro-batches and recomputations included.

    Attributes:
        operator: its name in the plan.
        forward, backward: measured.
        promised_forward, promised_backward: by the plan's cost model, without communication.
    """

    operator: str
    forward: float
    backward: float
    promised_forward: float
    promised_backward: float

    @property
    def seconds(self) -> float:
        """Measured, forward and backward."""
        return self.forward + self.backward

    @property
    def promised(self) -> float:
        """By the plan, forward and backward."""
        return self.promised_forward + self.promised_backward

    @property
    def ratio(self) -> float | None:
        """Measured by promised; None where the plan promises nothing, as for a view."""
        return ratio_of(self.seconds, self.promised)


def ratio_of(measured: float, promised: float) -> float | None:
    """Measured by promised; None where nothing is promised."""
    return measured / promised if promised else None


def together(name: str, each: Sequence[OperatorSeconds]) -> OperatorSeconds:
    """The sum of several, under a name."""
    forward, backward, *promised = (
        math.fsum(getattr(o, part) for o in each)
        for part in ("forward", "backward", "promised_forward", "promised_backward")
    )
    return OperatorSeconds(name, forward, backward, *promised)


def folded(operators: Iterable[OperatorSeconds], names: OperatorNames) -> tuple[OperatorSeconds, ...]:
    """Operators by their paths; those of equal layers to which the plan promises the same are one, with the sum of
    their seconds."""
    of = {o.operator: o for o in operators}
    # To six digits: sums of the same numbers may differ in the last.
    same = lambda name: (f"{of[name].promised_forward:.6g}", f"{of[name].promised_backward:.6g}")
    return tuple(together(text, [of[name] for name in group]) for text, group in names.folded(of, same))


def figure_line(name: str, measured: str, promised: str, ratio: float | None) -> str:
    """A line of the figures of a whole step."""
    return f"{name:<20} {measured:>10} {promised:>10} {ratio_text(ratio):>7}".rstrip()


def ratio_text(ratio: float | None) -> str:
    """``0.982``, ``26.9``, ``3820``; nothing where there is no ratio."""
    return "" if ratio is None else f"{ratio:.3g}" if ratio < 1000 else f"{ratio:.0f}"


def measured_table(title: str, operators: Sequence[OperatorSeconds]) -> Table:
    """A table of measured and promised seconds, the longest first.

    Args:
        title: of the first column.
        operators: or other things that take time.
    """
    columns = ("forward", "backward", "promised\nforward", "promised\nbackward", "ratio")
    made = table(title, *columns, right=columns, wraps=(title,))
    ordered = sorted(operators, key=lambda o: -o.seconds)
    for o in ordered[:SHOWN]:
        seconds = (o.forward, o.backward, o.promised_forward, o.promised_backward)
        cells = (o.operator, *(time_text(s) if s else "" for s in seconds), ratio_text(o.ratio))
        made.add_row(*map(Text, cells))
    if left := ordered[SHOWN:]:
        rest = together("", left)
        seconds_text = (time_text(rest.forward), time_text(rest.backward))
        made.add_row(*map(Text, (f"{len(left)} more", *seconds_text, "", "", "")))
    return made


def table_text(made: Table, width: int | None = None) -> str:
    """A table as text, as wide as the terminal, or `width`."""
    written = io.StringIO()
    show(console_of(written, console_of(None, width).width), made)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines() if line.strip())

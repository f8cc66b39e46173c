"""A plan in HTML: a page of its own, which opens without a network, and small tables in a notebook.

1. `page`, `write`: the page of one plan, or of two side by side. It is laid out by Jinja2 from `report_page.html.j2`;
   all texts are escaped there. Pictures are inline SVG and a few lines of script.

2. `layout_html`, `operator_html`, `operators_html`, `mark_html`, `plan_html`: what ``_repr_html_`` returns. Each is
   one element with a picture where there are slices, without scripts, and without styles from elsewhere; all texts
   are escaped.

Example: `layout_html` of the layout [8@1, -] has the caption "8: [8@1, -]", a picture of 8 slices, and
the label "dim 0 in 8 parts".
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ..capture.annotations import Operator
from ..cluster import Cluster
from ..errors import PlanError, SettingError
from ..json_files.json_values import write_text
from ..layout import Layout, digits_size
from ..pipeline.pipeline_plan import PipelinePlan, moments
from ..sharded_plan import OperatorPlan, Plan
from .format import size_text, time_text
from .html_elements import KIND_COLOURS, Drawn, SlicePictures, html_table, memory, slice_svg
from .plan_diff import difference
from .report_content import LAYOUTS, PlanContent
from .timeline import picture

__all__ = ["layout_html", "mark_html", "operator_html", "operators_html", "page", "plan_html", "write"]

# -- the page


#: The most lines of the difference of two plans.
MOST_LINES = 200


def page(plans: Sequence[Plan | PipelinePlan], titles: Sequence[str] = (), explain: int | None = None) -> str:
    """The page of one plan, or of two side by side.

    Args:
        plans: one or two plans.
        titles: their names, such as their files.
        explain: the number of operators whose alternatives are priced, the most expensive first; None: three, in a
            large plan or one that was searched within a limit of memory while nothing else changes, without a search.

    Raises:
        SettingError: neither one nor two plans, or Jinja2 is missing.
    """
    if len(plans) not in (1, 2):
        raise SettingError(f"a report of {len(plans)} plans", legal="one plan, or two side by side")
    try:
        from jinja2 import Environment  # noqa: PLC0415  an extra
    except ImportError as error:
        raise SettingError("a report needs Jinja2", legal="pip install shardwright[report]") from error
    pictures = SlicePictures()
    named = [*titles, *(["plan"] if len(plans) == 1 else ["plan 1", "plan 2"])[len(titles) :]]
    shown = [
        PlanContent(plan, title, pictures, explain, title if title in titles else "")
        for plan, title in zip(plans, named)
    ]
    template = (files(__package__) / "report_page.html.j2").read_text(encoding="utf-8")
    differing = difference(*plans) if len(plans) == 2 else None
    lines = differing.lines[:-1] if differing is not None else ()  # the last one is the total
    more = [f"and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    sections = [
        {
            "content": one,
            "stats": one.stats(),
            "summary": one.summary(),
            "tree": one.tree(),
            "places": one.places(),
            "parts": [
                ("certificate", "Certificate", one.certificate()),
                ("memory", "Memory over the step", one.memory()),
                ("communication", "Collectives", one.communication()),
                ("timeline", "The step in time", one.timeline()),
            ],
        }
        for one in shown
    ]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        plans=sections,
        total=None if differing is None else differing.total,
        difference=[*lines[:MOST_LINES], *more],
        symbols=pictures.symbols(),
        colours=KIND_COLOURS,
        layouts=LAYOUTS,
    )


def write(
    plans: Sequence[Plan | PipelinePlan], path: str | Path, titles: Sequence[str] = (), explain: int | None = None
) -> None:
    """Write the page of one plan, or of two side by side; arguments as `page` takes them.

    Raises:
        PlanError: the file cannot be written.
        SettingError: as `page`.
    """
    write_text(path, page(plans, titles, explain), PlanError, "the report")


# -- tables in a notebook


#: The notation of layouts.
LAYOUT = "layout 8: [2@4, -]: on 8 devices, dim 0 in 2 parts, of which rank r has number r // 4 % 2, and dim 1 whole"

#: The most devices of a picture beside a tensor of an operator.
SMALL = 64


#: The most actions of a pipeline's step that are drawn, and the most rows of a table of operators.
MOST_SPANS, MOST_ROWS = 600, 40

#: The box of a picture with black lines on white.
_BOX = '<div style="background:#fff;color:#000;margin:8px 0;padding:4px;overflow-x:auto">'


def layout_html(layout: Layout) -> str:
    """A layout: each dim with its cut, and the slices on the devices in colour; without dims, its axes."""
    if layout.dims is None:
        sizes = zip(layout.alias_name or (), layout.device_matrix or ())
        axes = [(name, str(size), str(layout.groups(name)[0])) for name, size in sizes]
        return html_table(repr(layout), ("axis", "devices", "ranks along it, the first group"), axes)
    rows = []
    for dim, digits in enumerate(layout.dims):
        parts = f"{digits_size(digits)} parts" if digits else "whole"
        rows.append((str(dim), parts, layout.named(dim) if digits else "", "·".join(map(repr, digits))))
    caption = repr(layout) if layout.alias_name is not None else str(layout)
    copies = digits_size(layout.replicas)
    below = [f"each slice is on {copies} devices"] if copies > 1 else []
    below += [f"partial {layout.reduction} over {digits_size(layout.partial)} devices"] if layout.partial else []
    below.append("left: the tensor in its slices; right: the devices, each in the colour of its slice")
    drawn = slice_svg(layout, Cluster.of(None, layout.devices))
    return html_table(caption, ("dim", "cut", "axes", "digits"), rows, below, drawn)


def operator_html(operator: OperatorPlan) -> str:
    """An operator of a plan (`OperatorPlan`): each tensor with its cuts, what a device has, and a picture."""
    sides = (
        ("in", operator.in_names, operator.in_shapes, operator.in_layouts),
        ("out", (), operator.out_shapes, operator.out_layouts),
    )
    rows = []
    for (side, names, shapes, layouts), parts in zip(sides, operator.local_shapes(0)):
        for i, (shape, layout, part) in enumerate(zip(shapes, layouts, parts)):
            small = layout.devices <= SMALL
            drawn = Drawn(slice_svg(layout, Cluster.of(None, layout.devices), 0.5)) if small else ""
            name = f"{side} {i}" + (f" {names[i]}" if i < len(names) and names[i] else "")
            rows.append((name, str(shape), str(layout.cuts), str(part), str(layout), drawn))
    below = [*([operator.note] if operator.note else []), LAYOUT]
    at = ", ".join(filter(None, (operator.op, operator.source)))
    title = f"{operator.module or operator.name} ({at}), by {operator.cause}"
    head = ("tensor", "shape", "cuts", "on a device", "layout", "slices, and devices")
    return html_table(title, head, rows, below)


def operators_html(operators: Sequence[OperatorPlan]) -> str:
    """The operators of a plan (`OperatorPlans`), a row each, at most `MOST_ROWS`."""
    rows = [
        (one.module or one.name, one.op, one.source, str(one.in_strategy), str(one.out_strategy), one.cause)
        for one in operators[:MOST_ROWS]
    ]
    more = len(operators) - MOST_ROWS
    below = [f"and {more} more: plan.explain() folds equal layers"] if more > 0 else []
    head = ("module", "operator", "source", "in_strategy", "out_strategy", "cause")
    return html_table(f"{len(operators)} operators", head, rows, below)


def mark_html(mark: Operator, name: str) -> str:
    """A mark (`Operator`): the strategy of each input and output."""
    strategies = (("in", mark.in_strategy), ("out", mark.out_strategy))
    rows = [(f"{side} {i}", repr(entry)) for side, entries in strategies for i, entry in enumerate(entries or ())]
    below = [] if rows else ["not marked: the planner decides"]
    if mark.priority:
        below.append(f"priority {mark.priority}")
    return html_table(f"{name}, marked at {mark.source}" if rows else name, ("tensor", "cuts"), rows, below)


def plan_html(plan: Plan | PipelinePlan) -> str:
    """A plan: its words by groups of equal layers, its key figures, the memory of a device over a step; of a pipeline
    its step in time."""
    figures = f"a step {time_text(plan.cost)} by the cost model"
    if plan.bound is not None:
        figures += f", at most {plan.gap:.2%} above the best"
    figures += f"; a device holds {size_text(plan.peak)} at most; a rank sends {size_text(plan.sent)}"
    more = 'plan.explain() has every operator; plan.report("plan.html") writes a page'
    if isinstance(plan, PipelinePlan):
        small = len(plan.simulation.spans) <= MOST_SPANS
        drawn = [("", picture(plan.simulation))] if small else []
    else:
        line = plan.timeline
        bands = {kind: band for kind in KIND_COLOURS if any(band := line.totals((kind,)))}
        seconds = [m.seconds for m in moments(plan)]
        limit = Cluster.of(plan.cluster, plan.devices).memory
        legend = ", ".join(f'<span style="color:{KIND_COLOURS[kind]}">&#9632;</span> {kind}' for kind in bands)
        drawn = [(f"memory of a device over the step: {legend}", memory(seconds, bands, line.forward, limit))]
    html: str = plan.describe().html((figures, more))
    pictures = "".join(
        f'{_BOX}{caption}<div style="max-width:900px">{svg}</div></div>' for caption, svg in drawn if svg
    )
    return html.removesuffix("</div>") + pictures + "</div>"

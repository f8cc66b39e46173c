"""A report of a plan as one HTML file that opens without a network.

The page is laid out by Jinja2 from `report_page.html.j2`; all texts are escaped there. Pictures are inline SVG and a
few lines of script: Plotly, written into a page, has 4 MB alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ..errors import PlanError, SettingError
from ..json_files.json_values import write_text
from ..pipeline.pipeline_plan import PipelinePlan
from ..sharded_plan import Plan
from .plan_diff import difference
from .report_content import LAYOUTS, PlanContent
from .report_pictures import KIND_COLOURS, SlicePictures

__all__ = ["page", "write"]

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
    lines: tuple[str, ...] = difference(*plans).lines if len(plans) == 2 else ()
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

"""Plans as JSON files.

    encoding             graphs, strategies and layouts as JSON, and back
    plan_document        reading the plan of one program
    pipeline_document    reading the plan of a pipeline
    document_writer      writing both
    parameter_file       the storage of parameters, as a file of its own

The document of a plan is JSON to read, compare, edit and load; `plan_document` describes its format. Saving and
loading, of either kind:

    save_plan(plan, path)    one device program, or a pipeline: `document_writer`
    load_plan(path)          a `PipelinePlan` where the file has "pipeline", otherwise a `Plan`
    read_document(path)      the file's lines before they become a plan, for a model that takes their strategies

`Plan.save` and `Plan.load` call these functions.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import PlanError, shown
from ..json_files.json_reader import read_object
from ..json_files.json_values import write_text
from ..pipeline.pipeline_plan import PipelinePlan
from ..sharded_plan import Plan, SavedPlan
from .document_writer import PIPELINE_SCHEMA, SCHEMA, pipeline_written, written
from .pipeline_document import PipelineDocument
from .plan_document import PlanDocument

__all__ = ["as_document", "load_plan", "read_document", "save_plan"]


def save_plan(plan: Plan | PipelinePlan, path: str | Path) -> None:
    """Write a plan as a file. See `Plan.save`.

    Raises:
        PlanError: it cannot be written.
    """
    text = pipeline_written(plan) if isinstance(plan, PipelinePlan) else written(plan)
    write_text(path, text, PlanError, "the plan")


def load_plan(path: str | Path) -> Plan | PipelinePlan:
    """The plan of a file. See `Plan.load`."""
    return read_document(path).plan()


def read_document(path: str | os.PathLike[str]) -> PlanDocument | PipelineDocument:
    """The document of a file.

    Raises:
        PlanError: no such file, not a plan, cut short, beyond the limits of `json_reader`, of another schema, or with
            two lines for one operator.
    """
    path = Path(path)
    text, encoded = read_object(path, PlanError, "the plan", "a file that Plan.save wrote", edited=True)
    if "schema" not in encoded:
        raise PlanError("not a plan: it has no schema", source=str(path), legal="a file that Plan.save wrote")
    schema = PIPELINE_SCHEMA if "pipeline" in encoded else SCHEMA
    if type(encoded["schema"]) is not int or encoded["schema"] != schema:
        raise PlanError(
            f"a plan of schema {shown(encoded['schema'])}",
            source=str(path),
            legal=f"schema {schema}, or the version of Shardwright that wrote it",
        )
    if "pipeline" in encoded:
        return PipelineDocument.of(path, text, encoded)
    return PlanDocument.of(path, text, encoded)


def as_document(
    plan: PlanDocument | PipelineDocument | str | os.PathLike[str] | None,
) -> PlanDocument | PipelineDocument | None:
    """The given document, or that of a path; None for None.

    Raises:
        PlanError: the file holds no document.
    """
    return plan if plan is None or isinstance(plan, (PlanDocument, PipelineDocument)) else read_document(plan)


SavedPlan.register_files(save_plan, load_plan)

"""The JSON Schemas of the reference, and the faults that they find in documents."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
from paths import DOCS

__all__ = ["FORMATS", "faults", "validator"]

#: The names of the schemas.
FORMATS = ("cluster", "plan", "pipeline", "parameters", "manifest")


@cache
def validator(name: str) -> Any:
    """The validator of a schema, which is itself checked."""
    schema = json.loads((DOCS / "reference" / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def faults(name: str, words: Any) -> list[str]:
    """The faults that a schema finds in a document."""
    return [f"{fault.json_path}: {fault.message}" for fault in validator(name).iter_errors(words)]

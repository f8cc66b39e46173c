"""The lines of a plan's document: what each says of one operator or parameter, and where it stands."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import PlanError, ShardwrightError
from ..graph import Op, types_of
from ..layout import Layout
from ..rules import Bound, bound_rule, whole_rule
from ..rules.strategy import output_layouts_of
from .decision import Decision, description
from .graph_document import recompute_of
from .spelling import read_assignment, read_digits, read_layout

__all__ = ["Line", "called", "field_line", "read_lines", "section_places"]


@dataclass(frozen=True)
class Line:
    """What a document says of one operator or parameter.

    Attributes:
        where: ``plan.json:17``.
    """

    name: str
    words: dict[str, Any]
    where: str

    def decision(self, op: Op, devices: int, on_missing_rule: str, uneven: bool, own: bool = False) -> Decision:
        """The line as a decision of the operator that it names, and whatever cause it gives.

        Args:
            own: in hybrid_parallel, where every operator runs as it stands.

        Raises:
            ShardwrightError: what the operator cannot follow, with the line.
        """
        if own:
            rule, note = whole_rule(op), None
            bound = bound_rule(op, rule)
        else:
            rule, bound, note = description(op, on_missing_rule, devices, uneven)
        try:
            opened = None if self.words.get("open") is None else read_digits(self.words["open"], devices)
            return Decision(op, rule, bound, read_assignment(bound, self.words, devices), self.out(bound, devices),
                            str(self.words.get("cause", "mark")), note, opened)
        except ShardwrightError as error:
            keys = ("in_strategy", "out_strategy", "leaves", "open")
            said = {key: self.words[key] for key in keys if key in self.words}
            raise type(error)(error.message, operator=called(op), source=self.where,
                              strategy=said.get("in_strategy") if len(said) == 1 else said, legal=error.legal) from None

    def out(self, bound: Bound, devices: int) -> tuple[Layout, ...] | None:
        """The layouts that the outputs are brought to."""
        given = self.words.get("out_strategy")
        if given is None:
            return None
        if isinstance(given, list) and len(given) == len(bound.out_shapes):
            given = tuple(read_layout(e, devices, s, bound.uneven) for e, s in zip(given, bound.out_shapes))
        return output_layouts_of(bound, given, devices)

    def check(self, op: Op) -> None:
        """That the line is of this operator.

        Raises:
            PlanError: it is of another, or of other shapes.
        """
        kind, shapes = self.words.get("op"), self.words.get("shapes")
        if kind != op.kind or shapes != types_of(op):
            raise PlanError(f"the line is of {kind} {shapes}, the model's operator is {op.kind} {types_of(op)}",
                            operator=self.name, source=self.where, legal="a plan made for this model and batch")

    def recomputed(self, op: Op) -> Op:
        """The operator, recomputed as the line says.

        Raises:
            PlanError: it says something else.
        """
        try:
            return replace(op, recompute=recompute_of(self.words.get("recompute")))
        except TypeError:
            raise PlanError(f"recompute: {self.words['recompute']!r}", operator=called(op), source=self.where,
                            legal='{"call": 0}: operators of one number are computed again together') from None


def called(op: Op) -> str | None:
    """An operator as errors name it."""
    return op.where["operator"]


def section_places(text: str, section: str) -> list[int]:
    """Where lists and objects of that name begin, as indices of the text."""
    return [found.start() for found in re.finditer(rf'(?<!\\)"{section}"\s*:\s*[\[{{]', text)]


def field_line(text: str, name: str, value: Any) -> int:
    """In which line of a text a field of this value stands; the first, where several are alike."""
    decoder = json.JSONDecoder()
    for found in re.finditer(rf'(?<!\\)"{name}"\s*:\s*', text):
        try:
            if repr(decoder.raw_decode(text, found.end())[0]) == repr(value):
                return text.count("\n", 0, found.start()) + 1
        except ValueError:
            continue  # within a string
    return 1


def read_lines(path: Path, text: str, given: Any, section: str, number: int = -1) -> dict[str, Line]:
    """The lines of a section by name, with where they stand.

    Args:
        number: which of the sections of that name, where the text has several.
    """
    if not isinstance(given, list):
        raise PlanError(f"the plan has no {section}", source=str(path), legal="a file that Plan.save wrote")
    starts = section_places(text, section)
    start = starts[number] if -len(starts) <= number < len(starts) else 0
    begin = text.count("\n", 0, start)
    places: dict[str, list[int]] = {}
    for number, line in enumerate(text.split("\n")[begin:], begin + 1):
        for found in re.findall(r'"name":\s*("(?:[^"\\]|\\.)*")', line):
            places.setdefault(json.loads(found), []).append(number)
    out: dict[str, Line] = {}
    for number, words in enumerate(given):
        name = words.get("name") if isinstance(words, dict) else None
        if not isinstance(name, str):
            raise PlanError(f"{section}[{number}] names none", source=str(path), legal='{"name": "matmul1", ...}')
        found = places.get(name, [begin + 1])
        where = f"{path}:{found[min(name in out, len(found) - 1)]}"
        if name in out:
            raise PlanError(f"a second line for {name!r}", source=where, legal="one")
        out[name] = Line(name, words, where)
    return out

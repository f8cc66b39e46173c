"""Further captures of one call: counters, and values that change by themselves.

A captured program has the numbers of the run in which it was captured. Right after the first capture of a call the
forward runs a second time, from the same state. What comes from the model is equal. What moves by itself is not: a
clock, an iterator, a generator of random numbers that the forward makes, a file.

    first run     mul(linear, 0.7312)
    second run    mul(linear, 0.0118)      an error, with the line of mul and both numbers
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..autocast import UnderAutocast
from ..errors import CaptureError, ShardwrightError
from ..graph import Graph, Op, Value
from .annotations import Operator
from .conditions import Conditions
from .observed.places import is_simple, same, spelled
from .observed_state import Observation
from .outlines import Differs
from .recapture import Program
from .regions import Applied
from .side_effects import Blamed, ForwardOutcome, LineFinder, counter, depends, numbered
from .source_lines import calling_line

__all__ = ["Captured", "check_again", "difference", "with_counters"]

_LOG = logging.getLogger("shardwright.capture")


class Captured(NamedTuple):
    """The result of one run of the forward, and the program by which it was read."""

    graph: Graph
    seen: Observation
    outcome: ForwardOutcome
    program: Program
    marks: list[Operator]
    asked: Conditions


def with_counters(exported: Callable[..., Captured]) -> Captured:
    """Export a model; where the forward changes numbers, export it again with counters in their place.

    Raises:
        CaptureError: a change that cannot be repeated at each call, with the line.
    """
    try:
        first = exported({})
        if first.outcome.numbers:
            counters = {place: counter(old, place.path) for place, old, _ in first.outcome.numbers}
            numbers = numbered(first.outcome, exported(counters).outcome, counters)
            if numbers.counters:  # a program that depends on a counter differs at a later count
                counted = [(place, old) for place, old, _ in first.outcome.numbers if place in numbers.counters]
                further = exported({place: old + 3 for place, old in counted})
                if difference(first.graph, further.graph) is not None:
                    raise depends(numbers.counters[0])
            if numbers.read:  # does the number settle, or change at each call?
                after = exported(dict(numbers.read)).outcome.numbers
                settled = {place.identity: new for place, new in numbers.read}
                moving = next((p for p, _, new in after if settled.get(p.identity, new) != new), None)
                if moving is not None:
                    raise depends(moving)
        if first.outcome.texts:  # the same of the environment
            texts = {place.identity: text for place, text in first.outcome.texts}
            for place, text in exported(dict(first.outcome.texts)).outcome.texts:
                if texts.get(place.identity) != text:
                    raise depends(place)
        return first
    except Blamed as blamed:
        finder = LineFinder(blamed.watch)
        with contextlib.suppress(Blamed, ShardwrightError):
            exported({}, finder=finder)
        raise CaptureError(blamed.message, source=finder.line or calling_line(), legal=blamed.legal) from None


def check_again(first: Captured, captured: Callable[..., tuple[list[Captured], Differs | None]]) -> None:
    """Capture a call a second time: what moves by itself differs.

    Args:
        first: the first capture.
        captured: ``captured(programs=..., latest=..., finder=...)`` captures the call again.

    Raises:
        CaptureError: the two captures differ, with the line and what both have.
    """
    made, reason = captured(programs=[first.program], latest=first.seen)
    if reason is not None:
        _LOG.info("the second run is an export: %s", str(reason).partition("\n")[0])
        made = captured()[0]
    second = made[0]
    first.seen.follow(second.seen)
    found = difference(first.graph, second.graph)
    what, source = (None, "") if found is None else found
    if what is None:
        made_once = first.outcome.effects.assigned  # a second run finds the assignments made
        effect = (
            None
            if made_once
            else _text_difference(first.outcome.effects.described(), second.outcome.effects.described())
        )
        if effect is None:
            return
        index, what = effect
        source, watch = first.outcome.effects.line_of(index)
        if watch is not None:
            finder = LineFinder(watch)
            with contextlib.suppress(ShardwrightError):
                captured(finder=finder)
            source = finder.line or ""
    raise CaptureError(
        f"{what}: a value changes by itself, which the captured program would repeat (a clock, a random number, an "
        "iterator, a file)",
        source=source or calling_line(),
        legal="the value as an input of the model; torch.rand in the forward; a registered buffer for state",
    )


class ProgramDifference(NamedTuple):
    """The first difference between two captures.

    Args:
        what: the subject of the message: ``mul is called with 0.5 in one run of the forward``.
        source: the user's line; "": not known.
    """

    what: str
    source: str


def difference(first: Graph, second: Graph) -> ProgramDifference | None:
    """The first difference between the programs of two captures; None where both mean the same."""
    for a, b in zip(first.ops, second.ops):
        if a is b:
            continue
        (mine, bound), (theirs, other_bound) = _called(a), _called(b)
        if (mine, a.module, len(a.inputs), a.source) != (theirs, b.module, len(b.inputs), b.source):
            one, other = (f"{op.kind} ({op.source})" for op in (a, b))
            return ProgramDifference(_both(f"the forward calls {one}", other), a.source or b.source)
        found = _first_unlike((a.args, a.kwargs, bound), (b.args, b.kwargs, other_bound))
        if found is not None:
            return ProgramDifference(_both(f"{a.kind} is called with {_text(found[0])}", _text(found[1])), a.source)
        outputs = [(x, y) for x, y in zip(a.outputs, b.outputs) if _form(x) != _form(y)]
        if outputs:
            return ProgramDifference(_both(f"{a.kind} gives {outputs[0][0]}", str(outputs[0][1])), a.source)
        for x, y in zip(a.inputs, b.inputs):
            constant, other_constant = first.constants.get(x.name), second.constants.get(y.name)
            if constant is not None and other_constant is not None and not _equal(constant, other_constant):
                return ProgramDifference(
                    _both(f"{a.kind} is called on the constant {_text(constant)}", _text(other_constant)), a.source
                )
    if len(first.ops) != len(second.ops):
        longer = max(first.ops, second.ops, key=len)
        op: Op = longer[min(len(first.ops), len(second.ops))]
        return ProgramDifference(
            f"the forward calls {op.kind} in one of two runs, one right after the other", op.source
        )
    found = _first_unlike((first.outputs, first.updates), (second.outputs, second.updates))
    if found is not None:
        return ProgramDifference(_both(f"the forward returns {_text(found[0])}", _text(found[1])), "")
    return None


def _called(op: Op) -> tuple[object, object]:
    """The callee of an operator, and the plain arguments that a ``torch.autograd.Function`` is bound to."""
    operator = op.target.operator if isinstance(op.target, UnderAutocast) else op.target
    if isinstance(operator, Applied):  # its class may be made by the forward
        return (operator.__qualname__, getattr(op.target, "state", None)), operator.leaves
    return op.target, None


def _text_difference(first: list[tuple[object, ...]], second: list[tuple[object, ...]]) -> tuple[int, str] | None:
    """The index of the first side effect that differs between two captures, and both in words; None: there is none."""
    for index in range(max(len(first), len(second))):
        a, b = (effects[index] if index < len(effects) else ("nothing", "") for effects in (first, second))
        if a != b:
            return index, _both(f"the forward {_effect(a)}", _effect(b))
    return None


def _effect(described: tuple[object, ...]) -> str:
    kind, where, *rest = described
    texts: dict[object, Callable[[], str]] = {
        "printed": lambda: f"prints {rest[0]!r}",
        "logged": lambda: f"logs {rest[1]!r}",
        "_Assigned": lambda: f"assigns {rest[0]} to {where}",
        "_Advanced": lambda: f"adds {rest[1]} to {where}",
    }
    return texts.get(kind, lambda: "does nothing")()


def _both(first: str, second: str) -> str:
    return f"{first} in one run, and {second} in a second run right after it"


def _first_unlike(a: object, b: object) -> tuple[object, object] | None:
    """The first parts of two arguments that do not mean the same."""
    if a is b:
        return None
    if isinstance(a, Value) and isinstance(b, Value):
        return None if a.name == b.name else (a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return a, b
        pairs = list(zip(a, b))
    elif isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return a, b
        pairs = [(value, b[key]) for key, value in a.items()]
    elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return None if _equal(a, b) else (a, b)
    else:
        # Other objects, such as the masks of an attention, are made anew by each run.
        return None if type(a) is type(b) and (not is_simple(a) or callable(a) or same(a, b)) else (a, b)
    return next((found for x, y in pairs if (found := _first_unlike(x, y)) is not None), None)


def _form(value: Value | None) -> object:
    return None if value is None else (value.shape, value.dtype)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b or type(a) is not type(b) or type(a) not in (torch.Tensor, torch.nn.Parameter):
        return type(a) is type(b)
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    if a.device.type == "meta" or a.layout != torch.strided:
        return True
    alike = a == b
    return bool((alike | ((a != a) & (b != b))).all())


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.tolist()}" if value.numel() == 1 else f"a tensor of {value.flatten()[:3].tolist()[0]!r}, …"
    return str(value) if isinstance(value, (Value, list, tuple, dict)) else spelled(value)

"""What an operator costs in a step of a plan, by parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .again import Again
from .costs import Costs
from .instructions import Compute, Extreme, Move, made_by
from .plan import Plan
from .recompute import Recomputed

__all__ = ["Share", "shares_of"]


@dataclass(frozen=True)
class Share:
    """A part of what an operator costs in a step. What is sent between two operators is a share of both.

    Attributes:
        what: "computing"; "inside": what is sent while it works; "asked": what brings an input to it; "handed on": what
            brings an output to who asks for it, or completes its sum; "weights": what brings a parameter from where it
            is stored, and sums its gradient.
        value: which value; "" for computing.
        other: the operator at the other end, "" where there is none.
        sends: the collectives, forward, then backward, such as "all_reduce(8@1)".
        forward, backward: seconds.
    """

    what: str
    value: str
    other: str
    sends: tuple[str, ...]
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def shares_of(plan: Plan, name: str, costs: Costs) -> tuple[Share, ...]:
    """What an operator costs, by parts, the dearest first. What several ask for and is sent once is a share of the
    first of them."""
    routed = plan.routed
    known = {i.name: i for table in (routed.parameters, routed.buffers, routed.constants) for i in table.values()}
    known |= {i.name: i for i in (*routed.inputs, *((routed.seed,) if routed.seed is not None else ()))}
    for instruction in routed.instructions:
        known |= {o.name: o for o in made_by(instruction)}
    sums: dict[tuple[str, str, str], list[Any]] = {}
    for half, instructions in enumerate((routed.instructions, plan.backward)):
        for instruction in instructions:
            ran, again = instruction, isinstance(instruction, (Again, Recomputed))
            if again:
                ran = instruction.move if isinstance(instruction, Again) else instruction.instruction
            key = _part(ran, name)
            if key is None:
                continue
            entry = sums.setdefault(key, [[], 0.0, 0.0])
            entry[1 + half] += costs.backward(instruction, known) if half else costs.forward(instruction, known)
            if isinstance(ran, Compute):
                continue
            conversion = ran.forward if not half or again or isinstance(ran, Extreme) else ran.backward
            if conversion is not None:
                entry[0] += [f"{s.kind}({'·'.join(map(repr, s.digits))})" for s in costs.sends(conversion)]
    shares = (Share(*key, tuple(sends), forward, backward) for key, (sends, forward, backward) in sums.items())
    return tuple(sorted((s for s in shares if s.seconds or s.what == "computing"), key=lambda s: -s.seconds))


def _part(instruction: Any, name: str) -> tuple[str, str, str] | None:
    """Of which share of the operator an instruction is: what, value, other."""
    if isinstance(instruction, Compute):
        return ("computing", "", "") if instruction.operator == name else None
    value = instruction.source.value.name
    if isinstance(instruction, Extreme):
        return ("inside", value, "") if instruction.operator == name else None
    assert isinstance(instruction, Move)
    if instruction.cause == "parameter":
        return ("weights", value, "") if instruction.operator == name else None
    if instruction.producer == name:
        other = "" if instruction.operator == name else instruction.operator
        return "handed on", value, other
    return ("asked", value, instruction.producer) if instruction.operator == name else None

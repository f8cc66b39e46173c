"""Weights that are gathered again in the backward: which, and for whom first.

A gathered weight that is not kept for the backward is gathered again where the first operator wants it: the last, in
the order of the program, that saves it or a view of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .instructions import Compute, Move, Routed
from .saved import saved_by

__all__ = ["Again", "wanted_again"]


@dataclass(frozen=True)
class Again:
    """In the backward: the conversion of a stored weight, once more.

    Args:
        operator: the operator whose backward wants it first.
    """

    move: Move
    operator: str


def wanted_again(routed: Routed) -> dict[int, tuple[Move, ...]]:
    """For each operator, by its place among the instructions, the weights that it saves and that are not kept."""
    if not any(isinstance(i, Move) and i.again for i in routed.instructions):
        return {}
    held: dict[str, Move] = {}     # the name of a gathered weight, or of a view of one -> what gathers it
    out: dict[int, tuple[Move, ...]] = {}
    for place, (instruction, saved) in enumerate(zip(routed.instructions, saved_by(routed))):
        if isinstance(instruction, Move):
            if instruction.again:
                held[instruction.target.name] = instruction
            elif instruction.source.name in held and instruction.forward.is_identity:
                held[instruction.target.name] = held[instruction.source.name]
        elif isinstance(instruction, Compute):
            held.update((view, held[name]) for view, name in saved.views if name in held)
            moves = {id(held[name]): held[name] for name in sorted(saved.values) if name in held}
            if moves:
                out[place] = tuple(moves.values())
    return out

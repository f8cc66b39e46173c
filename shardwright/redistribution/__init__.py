"""Redistributions: from one layout to another by slices and collectives.

collective_kinds         the kinds of collectives: what a rank sends, the placements, the transpose
redistribution_search    the cheapest path: where each digit of the rank goes
redistributions          a redistribution as steps, its transpose, and what a step does to a local tensor
"""

from __future__ import annotations

from .collective_kinds import CollectiveKind, Placement
from .redistributions import (
    Atom,
    Geometry,
    Redistribution,
    RedistributionStep,
    digits_value,
    make_step,
    redistribution,
    through,
    transpose,
)

__all__ = [
    "Atom",
    "CollectiveKind",
    "Geometry",
    "Placement",
    "Redistribution",
    "RedistributionStep",
    "digits_value",
    "make_step",
    "redistribution",
    "through",
    "transpose",
]

"""Redistributions: from one layout to another by slices and collectives.

collective_kinds         the kinds of collectives: what a rank sends, the placements, the transpose
halos                    the elements beside a slice that the windows of a convolution read
redistribution_search    the cheapest path: where each digit of the rank goes
redistributions          a redistribution as steps, its transpose, and what a step does to a local tensor
"""

from __future__ import annotations

from .collective_kinds import CollectiveKind, Placement
from .halos import Halo, Window
from .redistributions import (
    Atom,
    Geometry,
    Redistribution,
    RedistributionStep,
    composed,
    digits_value,
    halo_exchange,
    halo_reduce,
    make_step,
    redistribution,
    strided,
    through,
    transpose,
)

__all__ = [
    "Atom",
    "CollectiveKind",
    "Geometry",
    "Halo",
    "Placement",
    "Redistribution",
    "RedistributionStep",
    "Window",
    "composed",
    "digits_value",
    "halo_exchange",
    "halo_reduce",
    "make_step",
    "redistribution",
    "strided",
    "through",
    "transpose",
]

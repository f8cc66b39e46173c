"""What the backward of one operator under one strategy needs of what its forward had.

Asked of autograd (`saved`), of the operator's part of a program alone (`footprint`): its inputs as they are given to
it, its outputs as they are left, and what else is made on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace

from ..graph import SEED
from ..layout import Layout
from .footprint import Footprint
from .instructions import Compute, Instance, made_by, reads
from .lives import Lives
from .saved import Saved, saved_by

__all__ = ["Keeps", "keeps", "saved_inputs", "saved_inside"]


@dataclass(frozen=True)
class Keeps:
    """What is kept from the forward to the backward.

    Attributes:
        inputs, outputs: the numbers of those that are.
        own: bytes of what is neither.
        views: by number of an output that lies in the memory of an input, that input's number.
    """

    inputs: frozenset[int]
    outputs: frozenset[int]
    own: int
    views: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class _Program:
    """A footprint's program, known by what it does to which local shapes."""

    footprint: Footprint

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Program) and self.key == other.key

    @property
    def key(self) -> tuple:
        said = []
        for i in self.footprint.program:
            made = i.outputs if isinstance(i, Compute) else (i.target,)
            what = (i.target, repr(i.args), repr(i.kwargs)) if isinstance(i, Compute) else (i.source.name,)
            said.append((*what, tuple(o and (o.name, o.local_shape) for o in made)))
        given = tuple((i.name, i.local_shape, i.value.dtype, i.value.requires_grad) for i in self.footprint.fed)
        return given, tuple(said), tuple(i.name for i in self.footprint.left)


def keeps(footprint: Footprint) -> Keeps:
    """What an operator's backward needs under one strategy."""
    return _keeps(_Program(footprint))


def saved_inputs(footprints: Sequence[Footprint]) -> frozenset[int]:
    """The numbers of the inputs that an operator's backward needs, as its first strategy has it."""
    return keeps(footprints[0]).inputs


def saved_inside(footprint: Footprint) -> tuple[Saved, ...]:
    """What each of its instructions saves."""
    return _saved(_Program(footprint))


@lru_cache(maxsize=1 << 16)
def _saved(program: _Program) -> tuple[Saved, ...]:
    footprint = program.footprint
    fed = {i.name: i for i in footprint.fed}
    made = {o.name for i in footprint.program for o in made_by(i)}
    routed = SimpleNamespace(inputs=tuple(fed.values()), parameters={}, buffers={}, constants={},
                             seed=_seed(footprint, {*fed, *made}), instructions=footprint.program)
    return tuple(saved_by(routed))  # type: ignore[arg-type]


@lru_cache(maxsize=1 << 16)
def _keeps(program: _Program) -> Keeps:
    footprint = program.footprint
    saved = _saved(program)
    lives = Lives(footprint.fed, footprint.program, saved)
    out = {lives.root[name] for one in saved for name in one.values if name in lives.root}
    left = [lives.root[i.name] for i in footprint.left]
    places = [i.name for i in footprint.fed]
    own = sum(one.own_bytes for one in saved)
    own += sum(lives.instances[name].local_bytes for name in out - lives.given if name not in left)
    return Keeps(frozenset(places.index(n) for n in out if n in places),
                 frozenset(left.index(n) for n in out if n in left and n not in places), own,
                 tuple((k, places.index(n)) for k, n in enumerate(left) if n in places))


def _seed(footprint: Footprint, known: set[str]) -> Instance | None:
    """The instance of the seed, where the program reads one."""
    names = {name for i in footprint.program for name in reads(i)}
    if SEED.name not in names - known:
        return None
    return Instance(SEED.name, SEED, Layout.replicated(footprint.left[0].layout.devices, 1))

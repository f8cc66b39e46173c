"""Gradients of parameters that are stored in parts, while a backward under `no_sync` leaves them as each rank has them.

    term      a rank's own gradient of what it works with: whole, where the parameter is stored as a part of that
    scatter   the conversion from terms to parts: a reduce-scatter, most of the time

Outside of `no_sync` a term is scattered as it comes, and with it what was kept before. (From optimizer level 2 on
nothing is kept: terms are always scattered.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..conversion import Conversion, conversion
from ..conversion_search import refine
from ..conversion_steps import digits_value
from ..layout import Digit, Digits
from ..torch_private import local_tensor, spec_of
from .collectives import bind_all
from .gradients import Unsummed, take_unsummed, unsummed_over
from .process_groups import ProcessGroups

if TYPE_CHECKING:
    from .buckets import GradientSums

__all__ = ["Scatter"]


class Scatter:
    """What becomes of the gradient of one parameter, on this rank: called with a term, it gives the part.

    Args:
        name: of the parameter.
        scatter: the conversion.
        shape: of a term.
        held: the type of the parameter, in which terms are kept.
        sums: the type in which they are summed.
    """

    def __init__(self, name: str, scatter: Conversion, shape: tuple[int, ...], groups: ProcessGroups, held: torch.dtype,
                 sums: torch.dtype) -> None:
        self.name, self.scatter, self._rank = name, scatter, groups.rank
        self._held, self._sums_in = held, sums
        whole, part = scatter.source.without_partial(), scatter.target
        self._steps = bind_all(scatter, shape, groups.rank, groups)
        self._place = bind_all(conversion(whole, part), shape, groups.rank, groups)
        self._others = common(scatter.source.partial, part.replicas)
        self._parameter: nn.Parameter | None = None
        self._sums: GradientSums | None = None

    @staticmethod
    def fits(scatter: Conversion) -> bool:
        """Whether a part has a place in terms: not where digits of mixed radices overlap, as 2@3 and 2@1·3@2 do."""
        return refine(scatter.source, scatter.target) is not None

    def attach(self, parameter: nn.Parameter, sums: GradientSums) -> None:
        """To the parameter, and to what becomes of all gradients of the program."""
        self._parameter, self._sums = parameter, sums

    def __call__(self, term: Tensor) -> Tensor | None:
        """The part; None where the term is kept."""
        parameter, sums = self._parameter, self._sums
        sums.note_backward()
        if sums.accumulates:
            self._keep(term.to(self._held))
            return None
        if unsummed_over(parameter) == self:
            term = take_unsummed(parameter) + term
        return self.part(term)

    def part(self, term: Tensor) -> Tensor:
        """The rank's part of the sum of all terms."""
        term = term.to(self._sums_in)
        for step in self._steps:
            term = step(term)
        return term.to(self._held)

    def include(self, term: Tensor, part: Tensor) -> None:
        """Add to a term what has been summed already: in its place, and where several ranks have it on the first."""
        if not digits_value(self._others, self._rank):
            for step in self._place:
                term = step(term)
            term.add_(part)

    def _keep(self, term: Tensor) -> None:
        parameter = self._parameter
        if unsummed_over(parameter) == self:
            local_tensor(parameter.grad).add_(term)
            return
        self._sums.sum_kept(parameter)  # of another program, over other ranks
        term = term.clone(memory_format=torch.contiguous_format)
        if parameter.grad is not None:
            self.include(term, local_tensor(parameter.grad))
        parameter.grad = Unsummed(term, spec_of(parameter), requires_grad=False)
        parameter.grad.digits = self
        self._sums.keep(parameter)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scatter) and (self.name, self.scatter) == (other.name, other.scatter)

    def __hash__(self) -> int:
        return hash((self.name, self.scatter))


def common(some: Digits, others: Digits) -> Digits:
    """What two sets of digits speak of both."""
    out = []
    for a in some:
        for b in others:
            low, high = max(a.stride, b.stride), min(a.span, b.span)
            if low < high:
                assert high % low == 0, (some, others)
                out.append(Digit(high // low, low))
    return tuple(out)

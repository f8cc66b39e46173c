"""What it costs to bring a value from where it was made to the operators that read it, and its gradient back.

The conversions are those of the router, asked for by the same calls; nothing of them depends on the value's shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..conversion import Conversion, transpose
from ..errors import LayoutError
from ..graph import Graph, Master, Value
from ..layout import Digit, Digits, Layout
from .decision import Feeding
from .route import Router, Use, brought

__all__ = ["Deliveries", "conversions_of"]


@lru_cache(maxsize=1 << 16)
def casts_of(source: Layout, uses: frozenset[Use]) -> int:
    """How often a parameter is cast that is stored in another type, to serve all its uses by one operator."""
    if len(uses) < 2:
        return len(uses)
    router = _router(source, uses, True, Master(torch.float64, torch.float32))
    return sum(move.casts for move in router.out)


@lru_cache(maxsize=1 << 20)
def conversions_of(source: Layout, uses: frozenset[Use], gradient: bool) -> tuple[tuple[Conversion, bool], ...] | None:
    """The conversions that serve all uses of a value which lies in `source`, each with whether it is the gradient's; None where
    one of them cannot be served: it would leave open a sum that is not."""
    if len(uses) == 1 and (use := next(iter(uses))).operator != "output":
        return _alone(*_sorted(source, use), gradient)
    try:
        router = _router(source, uses, gradient)
    except LayoutError:
        return None
    out: list[tuple[Conversion, bool]] = []
    for move in router.out:
        out += [(c, back) for c, back in ((move.forward, False), (move.backward, True)) if c is not None and not c.is_identity]
    return tuple(out)


def _router(source: Layout, uses: frozenset[Use], gradient: bool, master: Master | None = None) -> Router:
    """A router that has served all uses of one value.

    Raises:
        LayoutError: one of them cannot be served.
    """
    dims = len(source.dims or ())
    value = Value("value", (0,) * dims, torch.float32, gradient, master)
    router = Router(Graph((value,), {}, {}, {}, (), ()), {}, Feeding((), False), source.devices, {}, {}, None)
    router.enter(value, source)
    router.producer[value.name] = "producer"
    wanted = sorted(uses, key=lambda use: (str(use.want), use.partial))
    router.uses[value.name] = list(wanted)
    for use in wanted:
        router.obtain(value, use)
    return router


def _sorted(source: Layout, use: Use) -> tuple[Layout, Use]:
    """The same delivery of a tensor whose dims stand in one order, without those that are whole on both sides.

    What a conversion sends, by which collectives and over which digits, does not depend on which dim is which: many
    pairs of layouts have one price. (Where radices mix, several ways may be equally short; those are left as they are.)
    """
    want, devices = use.want, source.devices
    if devices & (devices - 1):
        return source, use
    pairs = sorted((pair for pair in zip(source.dims, want.dims) if pair[0] or pair[1]), key=_number)
    return (Layout.of(devices, (a for a, _ in pairs), source.partial, source.reduction),
            Use(Layout.of(devices, (b for _, b in pairs), want.partial, want.reduction), use.partial, use.operator))


@lru_cache(maxsize=1 << 16)
def _number(pair: tuple[Digits, Digits]) -> tuple[tuple[int, int], ...]:
    """What dims are sorted by."""
    return tuple((d.size, d.stride) for digits in pair for d in (*digits, Digit(0, 1)))


@lru_cache(maxsize=1 << 18)
def _alone(source: Layout, use: Use, gradient: bool) -> tuple[tuple[Conversion, bool], ...] | None:
    """The same for one use, without a router."""
    try:
        forward = brought(source, use.want)
    except LayoutError:
        return None
    both = ((forward, False), (transpose(forward, use.partial), True)) if gradient else ((forward, False),)
    return tuple((c, back) for c, back in both if not c.is_identity)


class Deliveries:
    """Prices of deliveries, in seconds, and footprints of operators; each is worked out once.

    Args:
        costs: a `Costs`.
    """

    def __init__(self, costs: Any) -> None:
        self.costs = costs
        self.known: dict[tuple, np.ndarray] = {}
        self.footprints: dict[tuple, Any] = {}  # of operators, by kind and strategy
        self.terms: dict[tuple, tuple[list[tuple[Conversion, bool]], np.ndarray, np.ndarray, np.ndarray]] = {}

    def price(self, source: Layout, uses: Iterable[Use], value: Value, parameter: bool = False) -> float:
        """Of a value that lies in `source` and is used so; infinite where it cannot be."""
        return float(self.table((source,), (frozenset(uses),), value, parameter)[0, 0])

    def table(self, sources: tuple[Layout, ...], uses: tuple[frozenset[Use], ...], value: Value, parameter: bool = False
              ) -> np.ndarray:
        """The prices of a value in each of the layouts for each of the sets of uses, shape (layouts, sets).

        Args:
            parameter: it is one, whose gradient is summed together with others; a set of its uses takes a cast, where it is
                stored in another type.
        """
        key = (sources, uses, value.nbytes, value.requires_grad, parameter, value.master)
        if key not in self.known:
            found, conversions, cells, forbidden = self._terms(sources, uses, value.requires_grad)
            price = self.costs.stored if parameter else self.costs.conversion
            prices = np.array([price(c, value.numel * (value.sums if back else value.dtype).itemsize) for c, back in found])
            out = np.bincount(cells, weights=prices[conversions], minlength=len(sources) * len(uses)) \
                if len(cells) else np.zeros(len(sources) * len(uses))
            if parameter and value.master is not None:
                out += [self.costs.cast(value, source) * (1 + value.requires_grad) * casts_of(source, some)
                        for source in sources for some in uses]
            out[forbidden] = np.inf
            self.known[key] = out.reshape(len(sources), len(uses))
        return self.known[key]

    def _terms(self, sources: tuple[Layout, ...], uses: tuple[frozenset[Use], ...], gradient: bool
               ) -> tuple[list[tuple[Conversion, bool]], np.ndarray, np.ndarray, np.ndarray]:
        """The different conversions, and which of them stand in which cell of the table: nothing of it depends on the
        value's size."""
        key = (sources, uses, gradient)
        if key not in self.terms:
            place: dict[tuple[Conversion, bool], int] = {}
            conversions, cells, forbidden = [], [], []
            for i, source in enumerate(sources):
                for j, some in enumerate(uses):
                    cell = i * len(uses) + j
                    found = conversions_of(source, some, gradient) if some else ()
                    if found is None:
                        forbidden.append(cell)
                        continue
                    for conversion in found:
                        conversions.append(place.setdefault(conversion, len(place)))
                        cells.append(cell)
            self.terms[key] = list(place), np.array(conversions, int), np.array(cells, int), np.array(forbidden, int)
        return self.terms[key]

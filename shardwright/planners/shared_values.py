"""The states of a value with several consumers: every way in which the partitioner serves them, with its costs.

The partitioner completes a partial sum once for all consumers, and serves equal uses together. For a value that is
produced in layout L, M its layout with the sum completed, the states are:

    (L, None)      the sum is completed; each consumer is served from M by itself
    (M, use)       the same, and `use` is served once: a consumer with that use takes nothing more
    (use)          every consumer has that use, which is served once. The layout of the producer need not be known to
                   them: one state stands for all layouts with as many bytes (`together`)
    (use, open)    the same, served straight from the partial sum

With two consumers, a use that is served once is the use of both: (M, use) is needed only where a third consumer, or a
result of the program, may have another. With m layouts and u uses, two consumers have about m + u states, and three
m · u: eight devices have 64 layouts and 126 uses of a tensor of three dims.

Two consumers have all of their states. So have three and more in a network of few layers. In a larger one
(`graph_problem.MOST_ENTRIES`), (M, use) is tried for the uses that are cheapest from M (`CHEAPEST`), and near known
plans: all uses from the layout that a plan has, and the uses that a plan makes from all layouts. A search then goes on
from the plan that it found (`dynamic_programming`).

The program is cheaper than the best state where

1. several uses are served once: with uses a, a, b, b the state serves a once and b twice;
2. a consumer that has several uses shares one of them.

Uses of one layout whose gradients are partial sums over different digits share their forward: (M, use) with a use
whose gradient is complete serves them too, each for the price of its gradient's sum.

Example: a value with 3 consumers, whose uses are a, a and b. In the state (M, a) one redistribution serves the two uses
of a, and another one the use b: 2 redistributions in place of 3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..graph import Value
from ..layout import Layout
from ..partition.partitioner import Use
from .search_space import EdgeCosts

__all__ = ["SharedState", "SharedValue", "Uses"]

Uses = frozenset[Use]

#: The number of uses that are tried, of many, in each layout of the producer as the use of some consumers: the
#: cheapest.
CHEAPEST = 8


class SharedState(NamedTuple):
    """A state of a shared value.

    Attributes:
        output_layout: the layout at the producer; with a use, its sum may be completed in it.
        completed: True where the sum is completed before any consumer.
        use: the use that is served once; None: each consumer is served by itself.
        together: True where every consumer has the use. The layout then stands for all with as many bytes; where the
            sum is not completed, for all.
    """

    output_layout: Layout
    completed: bool
    use: Use | None
    together: bool = False


class SharedValue:
    """The states of a value with several consumers.

    Args:
        value: the value; its gradient is that of all consumers together.
        output_layouts: the layouts in which its producer may leave it.
        asked: by consumer, the distinct sets of uses that its strategies make.
        ends: the uses at the end of the program.
        deliveries: the prices.
    """

    def __init__(
        self,
        value: Value,
        output_layouts: tuple[Layout, ...],
        asked: Sequence[tuple[Uses, ...]],
        ends: Uses,
        deliveries: EdgeCosts,
    ) -> None:
        self.value, self.output_layouts, self.ends, self.deliveries = value, output_layouts, ends, deliveries
        self.closed = tuple(layout.without_partial() for layout in output_layouts)
        keeps = any(use.input_layout.partial for each in asked for some in each for use in some)
        #: By layout of the producer, the layout of which consumers that are served by themselves need to know.
        self.known = output_layouts if keeps else self.closed
        self.place = {layout: i for i, layout in reversed(list(enumerate(self.known)))}
        self.sizes = [math.prod(layout.local_shape(layout.padded(value.shape))) for layout in self.closed]
        singles = [{use for some in each if len(some) == 1 for use in some} for each in asked]
        self.uses, everywhere = self._shared_uses(singles)
        self.number = {use: k for k, use in enumerate(self.uses)}
        alone = tuple(frozenset((use,)) for use in self.uses)
        self.from_closed = deliveries.table(self.closed, alone, value)
        self.from_open = deliveries.table(output_layouts, alone, value)
        self.everywhere = everywhere
        #: True where some consumers may share a use that the others do not have.
        self.apart = len(asked) + bool(ends) > 2
        self.limited = False
        self._plan_layouts: set[Layout] = set()
        self._plan_uses: set[Use] = set()

    def _shared_uses(self, singles: Sequence[set[Use]]) -> tuple[tuple[Use, ...], list[Use]]:
        """The uses that may be served once, and those of them that may serve every consumer."""
        at_end = {Use(use.input_layout, (), "") for use in self.ends}
        readers = [*singles, at_end] if self.ends else singles
        times = Counter(use for uses in readers for use in uses)
        layouts = Counter(layout for uses in readers for layout in {use.input_layout for use in uses})
        gradients = Counter(use.input_layout for use in times)
        several = {use for use, count in times.items() if count > 1}
        several |= {
            Use(layout, (), "")
            for layout, count in layouts.items()
            if count > 1 and gradients[layout] > 1 and not layout.partial
        }
        ordered = tuple(sorted(several, key=lambda use: (str(use.input_layout), use.partial)))
        forwards = [{use.input_layout for use in uses} for uses in singles]
        return ordered, [
            use
            for use in ordered
            if all(
                use in uses or (not use.partial and use.input_layout in some) for uses, some in zip(singles, forwards)
            )
        ]

    @property
    def pairs(self) -> int:
        """The number of pairs of a layout and a use that some consumers may share."""
        return len(self.place) * len(self.uses) if self.apart else 0

    def limit(self) -> None:
        """Try few of the uses that some consumers may share, before any states are made."""
        self.limited = self.apart

    def near(self, layout: Layout, uses: Iterable[Use]) -> None:
        """Try states near a plan, where few are tried.

        Args:
            layout: the layout at the producer.
            uses: the uses of the consumers.
        """
        self._plan_layouts.add(layout if layout in self.place else layout.without_partial())
        self._plan_uses.update(uses)

    @cached_property
    def states(self) -> tuple[SharedState, ...]:
        """The states."""
        return tuple(self._states())

    def _tried(self, layout: Layout, row: int) -> Iterable[int]:
        """The numbers of the uses that some consumers may share from a layout."""
        if not self.limited or layout in self._plan_layouts:
            return range(len(self.uses))
        prices = self.from_closed[row]
        cheapest = [k for k in np.argsort(prices, kind="stable") if prices[k] > 0][:CHEAPEST]
        return sorted({*map(int, cheapest), *(self.number[use] for use in self._plan_uses if use in self.number)})

    def _states(self) -> Iterator[SharedState]:
        apart = self.apart
        pays = (self.from_closed > 0) & np.isfinite(self.from_closed)
        rows: dict[Layout | int, list[int]] = {}
        for i, (layout, known, size) in enumerate(zip(self.output_layouts, self.known, self.sizes)):
            yield SharedState(layout, True, None)
            rows.setdefault(known if apart else size, []).append(i)
        together = [self.number[use] for use in self.everywhere]
        for same in rows.values():
            for k in self._tried(self.known[same[0]], same[0]) if apart else together:
                if pays[same, k].any():
                    yield SharedState(self.known[same[0]], True, self.uses[k], not apart)
        partial = [i for i, layout in enumerate(self.output_layouts) if layout.partial]
        if partial and not self.ends:
            for k in together:
                if np.isfinite(self.from_open[partial, k]).any():
                    yield SharedState(self.output_layouts[partial[0]], False, self.uses[k], True)

    def producer_costs(self) -> np.ndarray:
        """Costs of completing the sum, of the uses at the end and of the shared use, by layout of the producer and by
        state."""
        table, value = self.deliveries.table, self.value
        out = np.full((len(self.output_layouts), len(self.states)), np.inf)
        completing = np.array(
            [
                self.deliveries.price(layout, (Use(closed, (), ""),), value) if layout.partial else 0.0
                for layout, closed in zip(self.output_layouts, self.closed)
            ]
        )
        partial = np.array([bool(layout.partial) for layout in self.output_layouts])
        known, sizes = np.array([self.place[layout] for layout in self.known]), np.array(self.sizes)
        whole = {layout: i for i, layout in enumerate(self.output_layouts)}
        alone = completing + table(self.closed, (self.ends,), value)[:, 0]
        for j, state in enumerate(self.states):
            if state.use is None:
                i = whole[state.output_layout]
                out[i, j] = alone[i]
                continue
            k = self.number[state.use]
            if not state.completed:
                out[partial, j] = self.from_open[partial, k]
                continue
            i = self.place[state.output_layout]
            rows = sizes == sizes[i] if state.together else known == i
            rest = frozenset(
                use for use in self.ends if state.use.partial or use.input_layout != state.use.input_layout
            )
            base = alone if rest == self.ends else completing + table(self.closed, (rest,), value)[:, 0]
            out[rows, j] = (base + self.from_closed[:, k])[rows]
        return out

    def consumer_costs(self, read: Value, uses: tuple[Uses, ...]) -> np.ndarray:
        """Costs of serving one consumer beyond the use that is served once, by state and set of uses. A use with a
        partial sum is served from the partial sum.

        Args:
            read: the value as the consumer reads it: without a gradient where none comes back from the consumer.
            uses: the distinct sets of uses that the consumer's strategies make.
        """
        keeps = np.array([any(use.input_layout.partial for use in some) for some in uses])
        closed = self.deliveries.table(self.closed, uses, read)
        alone = np.where(keeps, self.deliveries.table(self.output_layouts, uses, read), closed)
        served = {None: np.full(len(uses), np.inf)} | {use: self._served(use, read, uses) for use in self.uses}
        whole = {layout: i for i, layout in enumerate(self.output_layouts)}
        out = np.empty((len(self.states), len(uses)))
        for row, state in zip(out, self.states):
            if state.together:
                row[:] = served[state.use]
            else:
                i = (whole if state.use is None else self.place)[state.output_layout]
                np.minimum(alone[i], served[state.use], out=row)
        return out

    def _served(self, shared: Use, read: Value, uses: tuple[Uses, ...]) -> np.ndarray:
        """Costs of each set of uses where `shared` is there already; infinite where `shared` is no part of it."""
        out = np.full(len(uses), np.inf)
        for j, some in enumerate(uses):
            if some == {shared}:
                out[j] = 0.0
            elif len(some) == 1 and not shared.partial and next(iter(some)).input_layout == shared.input_layout:
                out[j] = self.deliveries.price(shared.input_layout, some, read)
        return out

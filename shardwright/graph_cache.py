"""The graphs of one model at the sizes that it is called with.

    first sizes      a plain capture
    second sizes     a capture that scales (`scaling`), with symbols for the dims that differ from the first
    further sizes    the same graph, its formulas evaluated: milliseconds

Sizes that the scalable capture does not cover (a guard that fails, another dim that differs, a size of 1) are captured
anew. A scalable capture is used only if it gives the first graph at the first sizes, operator by operator.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field

from .graph import Graph
from .scaling import ScalableGraph

__all__ = ["GraphCache"]

Shapes = tuple[tuple[int, ...], ...]

#: How many states of the model (training, evaluation, types of inputs) have their graphs kept.
STATES = 16


@dataclass
class _Known:
    """Graphs of one state of the model.

    Attributes:
        shapes, graph: the first sizes and their graph.
        varying: per input the dims that have differed.
        scalable: the capture that scales; None: not yet tried for these dims, or there is none.
        tried: whether it was tried for these dims.
    """

    shapes: Shapes
    graph: Graph
    varying: list[set[int]] = field(default_factory=list)
    scalable: ScalableGraph | None = None
    tried: bool = False


class GraphCache:
    """See the module's header."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()

    def __deepcopy__(self, memo: dict) -> GraphCache:
        return GraphCache()  # a copied model is captured by itself

    def graph(self, state: Hashable, shapes: Shapes, capture: Callable[[], Graph],
              capture_scalable: Callable[[Sequence[Collection[int]]], ScalableGraph | None]) -> Graph:
        """The graph at some sizes.

        Args:
            state: what else decides the graph: the model's state, types and numbers of dims of the inputs.
            shapes: of the inputs that are tensors, in order.
            capture: captures the model at these sizes.
            capture_scalable: captures it with the given dims of each input as symbols.
        """
        known = self._known.get(state)
        if known is None:
            graph = capture()
            self._known[state] = _Known(shapes, graph, [set() for _ in shapes])
            while len(self._known) > STATES:
                self._known.popitem(last=False)
            return graph
        self._known.move_to_end(state)
        if shapes == known.shapes:
            return known.graph
        for dims, before, now in zip(known.varying, known.shapes, shapes, strict=True):
            further = {d for d, (a, b) in enumerate(zip(before, now)) if a != b} - dims
            if further:
                dims |= further
                known.scalable, known.tried = None, False
        if not known.tried:
            known.tried, made = True, capture_scalable(known.varying)
            if made is not None and made.at(known.shapes) in (None, known.graph):
                known.scalable = made
        graph = None if known.scalable is None else known.scalable.at(shapes)
        return capture() if graph is None else graph

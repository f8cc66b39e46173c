"""The graphs of one model at the sizes that it is called with.

    first sizes      a plain capture
    second sizes     a capture that scales (`scaling`), with symbols for the dims that differ from the first
    further sizes    the same graph, its formulas evaluated: milliseconds

Sizes that no scalable capture covers (a guard that fails, another dim that differs, a size of 1) are captured anew. A
scalable capture is used only once it has given the graph of a plain one, operator by operator, at sizes that are not its
own.
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

#: How often a scalable capture is tried for one state: models with more branches are captured at each size.
TRIES = 4


@dataclass(eq=False)
class _Scalable:
    """A capture that scales, and whether it has given the graph of a plain one at other sizes than its own."""

    graph: ScalableGraph
    proven: bool = False


@dataclass
class _Known:
    """Graphs of one state of the model.

    Attributes:
        shapes, graph: the first sizes and their graph.
        varying: per input the dims that have differed.
        scalable: captures that scale, one for each branch of the model's code.
        tries: how often one was captured for these dims.
    """

    shapes: Shapes
    graph: Graph
    varying: list[set[int]] = field(default_factory=list)
    scalable: list[_Scalable] = field(default_factory=list)
    tries: int = 0


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
                known.scalable, known.tries = [], 0
        for scalable in known.scalable:
            graph = scalable.graph.at(shapes)
            if graph is not None:
                return graph if scalable.proven else self._proved(known, scalable, capture(), shapes)
        if known.tries < TRIES:
            known.tries += 1
            made = capture_scalable(known.varying)
            proved = made and made.like(known.graph, known.shapes)
            if proved:
                known.scalable.append(_Scalable(proved, True))
                return proved.at(shapes)
            if made is not None and made.at(known.shapes) is None:  # another branch of the model's code
                known.scalable.append(_Scalable(made))
        return capture()

    def _proved(self, known: _Known, scalable: _Scalable, graph: Graph, shapes: Shapes) -> Graph:
        """A plain capture at sizes at which a scalable one is used for the first time."""
        proved = scalable.graph.like(graph, shapes)
        if proved is None:
            known.scalable.remove(scalable)
        else:
            scalable.graph, scalable.proven = proved, True
        return graph

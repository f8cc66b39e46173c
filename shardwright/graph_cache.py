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
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from .capture import Recording
from .graph import Graph
from .scaling import ScalableGraph

__all__ = ["GraphCache"]

Shapes = tuple[tuple[int, ...], ...]

#: How many kinds of calls (types of inputs, say), and of each how many states of the model (training, evaluation), have their
#: graphs kept.
CALLS, STATES = 16, 4

#: How often a scalable capture is tried for one state: models with more branches are captured at each size.
TRIES = 4


@dataclass(eq=False)
class _Scalable:
    """A capture that scales, and whether it has given the graph of a plain one at other sizes than its own."""

    graph: ScalableGraph
    proven: bool = False


@dataclass(eq=False)
class _Known:
    """Graphs of one state of the model.

    Attributes:
        shapes, graph: the first sizes and their graph.
        recording: of their capture; its guards tell whether the model is in that state.
        varying: per input the dims that have differed.
        scalable: captures that scale, one for each branch of the model's code.
        tries: how often one was captured for these dims.
    """

    shapes: Shapes
    graph: Graph
    recording: Recording
    varying: list[set[int]]
    scalable: list[_Scalable] = field(default_factory=list)
    tries: int = 0

    def vary(self, shapes: Shapes) -> None:
        """Note the dims that differ; a capture that scales is for those that are known to."""
        for dims, before, now in zip(self.varying, self.shapes, shapes, strict=True):
            further = {d for d, (a, b) in enumerate(zip(before, now)) if a != b} - dims
            if further:
                dims |= further
                self.scalable, self.tries = [], 0


class GraphCache:
    """See the module's header."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, list[_Known]] = OrderedDict()

    def __deepcopy__(self, memo: dict) -> GraphCache:
        return GraphCache()  # a copied model is captured by itself

    def graph(self, call: Hashable, shapes: Shapes, recording: Recording, capture: Callable[..., Graph],
              capture_scalable: Callable[..., ScalableGraph | None]) -> Graph:
        """The graph at some sizes.

        Args:
            call: how the inputs nest, their types and numbers of dims, and the state of autocast.
            shapes: of the inputs that are tensors, in order.
            recording: takes what the capture has seen of the model besides operators.
            capture: ``capture(recording=...)`` captures the model at these sizes.
            capture_scalable: ``capture_scalable(vary=..., recording=...)`` captures it with the given dims of each input as
                symbols.
        """
        states = self._known.setdefault(call, [])
        self._known.move_to_end(call)
        while len(self._known) > CALLS:
            self._known.popitem(last=False)
        known = next((k for k in states if k.recording.guards is not None and k.recording.guards.hold()), None)
        if known is None:
            graph = capture(recording=recording)
            states.insert(0, _Known(shapes, graph, recording, [set() for _ in shapes]))
            del states[STATES:]
            return graph
        graph = self._scaled(known, shapes, capture, capture_scalable)
        if graph is None:
            return capture(recording=recording)
        recording.take(known.recording)
        return graph

    def _scaled(self, known: _Known, shapes: Shapes, capture: Callable[..., Graph],
                capture_scalable: Callable[..., ScalableGraph | None]) -> Graph | None:
        """The graph at sizes that a known capture covers; None: none does."""
        if shapes == known.shapes:
            return known.graph
        known.vary(shapes)
        for scalable in known.scalable:
            graph = scalable.graph.at(shapes)
            if graph is None:
                continue
            if not scalable.proven:
                graph = capture()
                proved = scalable.graph.like(graph, shapes)
                if proved is None:
                    known.scalable.remove(scalable)
                else:
                    scalable.graph, scalable.proven = proved, True
            return graph
        if known.tries < TRIES:
            known.tries += 1
            made = capture_scalable(vary=known.varying, recording=known.recording)
            proved = None if made is None else made.like(known.graph, known.shapes)
            if proved is not None:
                known.scalable.append(_Scalable(proved, True))
                return proved.at(shapes)
            if made is not None and made.at(known.shapes) is None:  # another branch of the model's code
                known.scalable.append(_Scalable(made))
        return None

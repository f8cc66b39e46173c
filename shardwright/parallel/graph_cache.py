"""The graphs of one model at the sizes that it is called with.

    first sizes      a plain capture
    second sizes     a capture that scales (`scaling`), with symbols for the dims that differ from the first
    further sizes    the same graph, its formulas evaluated: milliseconds

A pipeline needs two graphs a call, of one micro-batch and of more rows (`plan.micro`): two plain captures at the first
call, both from the one that scales at later ones. Where the dims that will differ are said beforehand (`ahead`), the
first call makes both captures.

Sizes that no scalable capture covers (a guard that fails, another dim that differs, a size of 1) are captured anew. A
scalable capture is used only once it has given the graphs of plain ones, operator by operator, at sizes that are not
its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..capture.export import Recording
from ..capture.scaling import ScalableGraph
from ..graph import Graph
from ..torch_private import pytree

__all__ = ["GraphCache"]

Shapes = tuple[tuple[int, ...], ...]

#: How many kinds of calls (types of inputs, say), and of each how many states of the model (training, evaluation), have
#: their graphs kept.
CALLS, STATES = 16, 4

#: How often a scalable capture is tried for one state: models with more branches are captured at each size.
TRIES = 4


class _Inputs:
    """The inputs of one capture.

    Attributes:
        shapes: of those that are tensors, in order.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.shapes: Shapes = tuple(tuple(x.shape) for x in self.leaves if isinstance(x, torch.Tensor))

    @property
    def key(self) -> Hashable:
        """The properties of the inputs that decide the graph, besides the sizes of tensors."""
        return self.spec, tuple(
            (x.dtype, x.dim(), x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x) for x in self.leaves
        )

    def resized(self, dims: Collection[int]) -> _Inputs:
        """Inputs of other sizes in some dims: half of each, twice of one below 4. What is equal stays so."""

        def other(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            shape = [s if d not in dims or s < 2 else s * 2 if s < 4 else s // 2 for d, s in enumerate(x.shape)]
            return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

        return _Inputs(*pytree.tree_map(other, (self.args, self.kwargs)))


@dataclass(eq=False)
class _Scalable:
    """A capture that scales, and whether it has given the graphs of plain ones at other sizes than its own."""

    graph: ScalableGraph
    proven: bool = False


@dataclass(eq=False)
class _Known:
    """Graphs of one state of the model.

    Attributes:
        graphs: those of the first call, by the sizes of their inputs.
        recording: of their captures; its guards tell whether the model is in that state.
        varying: per input the dims that have differed.
        scalable: captures that scale, one for each branch of the model's code.
        tries: how often one was captured for these dims.
    """

    graphs: dict[Shapes, Graph]
    recording: Recording
    varying: list[set[int]]
    scalable: list[_Scalable] = field(default_factory=list)
    tries: int = 0

    def vary(self, shapes: Shapes) -> None:
        """Note the dims that differ; a capture that scales is for those that are known to."""
        for dims, before, now in zip(self.varying, next(iter(self.graphs)), shapes, strict=True):
            further = {d for d, (a, b) in enumerate(zip(before, now)) if a != b} - dims
            if further:
                dims |= further
                self.scalable, self.tries = [], 0

    def proved(self, made: ScalableGraph) -> _Scalable | None:
        """A new capture that scales, compared with the plain ones of the first call; None: it is another program."""
        named, proven = made, False
        for shapes, graph in self.graphs.items():
            if made.at(shapes) is None:  # a size of 1, or another branch of the model's code
                continue
            like = named.like(graph, shapes)
            if like is None:
                return None
            named, proven = like if not proven else named, True
        return _Scalable(named, proven)


class GraphCache:
    """See the module's header."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, list[_Known]] = OrderedDict()

    def __deepcopy__(self, memo: dict) -> GraphCache:
        return GraphCache()  # a copied model is captured by itself

    def graphs(
        self,
        casting: Hashable,
        calls: Sequence[tuple[tuple, dict[str, Any]]],
        recording: Recording,
        capture: Callable[..., Graph],
        capture_scalable: Callable[..., ScalableGraph | None],
        ahead: Collection[int] = (),
    ) -> tuple[Graph, ...]:
        """The graphs of inputs that differ in their sizes alone, those with most rows last.

        Args:
            casting: the state of autocast.
            calls: (args, kwargs) of each.
            recording: takes what the captures have seen of the model besides operators.
            capture: ``capture(args, kwargs, recording=...)`` captures the model.
            capture_scalable: ``capture_scalable(args, kwargs, vary=..., recording=...)`` captures it with the given
                dims of each input as symbols.
            ahead: the dims of the inputs whose sizes will differ, where that is known at the first call.
        """
        wanted = [_Inputs(*call) for call in calls]
        key = casting, wanted[0].key
        states = self._known.setdefault(key, [])
        self._known.move_to_end(key)
        while len(self._known) > CALLS:
            self._known.popitem(last=False)
        known = next(
            (
                k
                for k in states
                if k.recording is recording or (k.recording.guards is not None and k.recording.guards.hold())
            ),
            None,
        )
        if known is None:
            made = {x.shapes: capture(x.args, x.kwargs, recording=recording) for x in wanted}
            known = _Known(made, recording, [set() for _ in wanted[0].shapes])
            states.insert(0, known)
            del states[STATES:]
            for x in wanted:
                known.vary(x.shapes)
            if ahead:
                other = wanted[-1].resized(ahead)
                known.vary(other.shapes)
                self._scalable(known, other, capture_scalable)
            return tuple(made[x.shapes] for x in wanted)
        for x in wanted:
            known.vary(x.shapes)
        found = {x.shapes: self._scaled(known, x, capture, capture_scalable) for x in reversed(wanted)}
        if any(graph is not None for graph in found.values()):
            recording.take(known.recording)
        return tuple(found[x.shapes] or capture(x.args, x.kwargs, recording=recording) for x in wanted)

    def _scaled(
        self,
        known: _Known,
        inputs: _Inputs,
        capture: Callable[..., Graph],
        capture_scalable: Callable[..., ScalableGraph | None],
    ) -> Graph | None:
        """The graph at sizes that a known capture covers; None: none does."""
        shapes = inputs.shapes
        if shapes in known.graphs:
            return known.graphs[shapes]
        for scalable in known.scalable:
            graph = scalable.graph.at(shapes)
            if graph is None:
                continue
            if not scalable.proven:
                graph = capture(inputs.args, inputs.kwargs)
                proved = scalable.graph.like(graph, shapes)
                if proved is None:
                    known.scalable.remove(scalable)
                else:
                    scalable.graph, scalable.proven = proved, True
            return graph
        made = self._scalable(known, inputs, capture_scalable)
        return made.graph.at(shapes) if made is not None and made.proven else None

    def _scalable(
        self, known: _Known, inputs: _Inputs, capture_scalable: Callable[..., ScalableGraph | None]
    ) -> _Scalable | None:
        """A further capture that scales, at some sizes; None: there is none."""
        if known.tries == TRIES or any(shape[d] < 2 for shape, dims in zip(inputs.shapes, known.varying) for d in dims):
            return None
        known.tries += 1
        graph = capture_scalable(inputs.args, inputs.kwargs, vary=known.varying, recording=known.recording)
        made = None if graph is None else known.proved(graph)
        if made is not None:
            known.scalable.append(made)
        return made

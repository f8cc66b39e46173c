"""Captured graphs of one model, one for each set of input sizes.

    first sizes      a plain capture
    second sizes     a capture with symbols for the dims that differ from the first (`capture.scaling`)
    further sizes    the same symbolic graph, its formulas evaluated: milliseconds

Example: a model is called with [8, 512], then with [8, 640], then with [8, 700]. The first call captures it plainly,
the second captures it with a symbol for dim 1, the third evaluates that capture at 700.

A pipeline needs two graphs a call: one of a micro-batch, one of more rows (`pipeline.microbatch`). The first call
makes two plain captures; later calls take both graphs from the symbolic one. Where the dims that differ are known
beforehand (argument `ahead`), the first call makes the plain and the symbolic captures.

Sizes that no symbolic capture covers (a guard that fails, another dim that differs, a size of 1) are captured anew. A
symbolic capture is used only after it has reproduced plain captures, operator by operator, at sizes that are not its
own.
"""

from __future__ import annotations

import logging
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

logger = logging.getLogger("shardwright.capture")

Shapes = tuple[tuple[int, ...], ...]

#: The most kinds of calls (by structure and dtypes of inputs) whose graphs are kept, and for each kind the most states
#: of the model (training, evaluation).
CALLS, STATES = 16, 4

#: The most symbolic captures that are tried for one state. Models with more branches are captured at each size.
TRIES = 4


class _Inputs:
    """The inputs of one capture.

    Attributes:
        leaves, spec: the flattened (args, kwargs) and their structure.
        shapes: the shapes of the leaves that are tensors, in order.
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
        """Inputs on the meta device with other sizes in some dims: a size below 2 is kept, 2 and 3 are doubled,
        larger sizes are halved. Equal sizes stay equal."""

        def other(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            shape = [s if d not in dims or s < 2 else s * 2 if s < 4 else s // 2 for d, s in enumerate(x.shape)]
            return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

        return _Inputs(*pytree.tree_map(other, (self.args, self.kwargs)))


@dataclass(eq=False)
class _Scalable:
    """A symbolic capture.

    Attributes:
        proven: True once it has reproduced plain captures at sizes other than its own.
    """

    graph: ScalableGraph
    proven: bool = False


@dataclass(eq=False)
class _Known:
    """Graphs of one state of the model.

    Attributes:
        graphs: those of the first call, by the shapes of their inputs.
        recording: observations of these captures; its guards tell whether the model is in that state.
        varying: per input the dims that have differed.
        scalable: symbolic captures, one for each branch of the model's code.
        tries: the number of symbolic captures that were tried for these dims.
    """

    graphs: dict[Shapes, Graph]
    recording: Recording
    varying: list[set[int]]
    scalable: list[_Scalable] = field(default_factory=list)
    tries: int = 0

    def vary(self, shapes: Shapes) -> None:
        """Note the dims that differ. A new dim drops the symbolic captures, which have no symbol for it."""
        for dims, before, now in zip(self.varying, next(iter(self.graphs)), shapes, strict=True):
            further = {d for d, (a, b) in enumerate(zip(before, now)) if a != b} - dims
            if further:
                dims |= further
                self.scalable, self.tries = [], 0

    def proved(self, made: ScalableGraph) -> _Scalable | None:
        """A new symbolic capture, compared with the plain ones of the first call; None where it is another program."""
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
    """The captured graphs of one model. See the module's header."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, list[_Known]] = OrderedDict()

    def __deepcopy__(self, memo: dict) -> GraphCache:
        return GraphCache()  # a copy of a model is captured anew

    def graphs(
        self,
        casting: Hashable,
        calls: Sequence[tuple[tuple, dict[str, Any]]],
        recording: Recording,
        capture: Callable[..., Graph],
        capture_scalable: Callable[..., ScalableGraph | None],
        ahead: Collection[int] = (),
    ) -> tuple[Graph, ...]:
        """The graphs of inputs that differ in their sizes alone, in the order of `calls`, the one with most rows last.

        Args:
            casting: the state of autocast.
            calls: (args, kwargs) of each.
            recording: receives what the captures observe of the model besides operators.
            capture: ``capture(args, kwargs, recording=...)`` captures the model.
            capture_scalable: ``capture_scalable(args, kwargs, vary=..., recording=...)`` captures it with the given
                dims of each input as symbols.
            ahead: the dims of the inputs whose sizes will differ, where they are known at the first call.
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
        """The graph at sizes that a known or a new symbolic capture covers; None: none does."""
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
        """A further symbolic capture, at some sizes; None: it was not tried, or it failed."""
        if known.tries == TRIES:
            _log_plain(inputs.shapes, f"none of {TRIES} captures with symbols covers them")
            return None
        if any(shape[d] < 2 for shape, dims in zip(inputs.shapes, known.varying) for d in dims):
            _log_plain(inputs.shapes, "a size of 0 or 1 broadcasts, so it is never a symbol")
            return None
        known.tries += 1
        graph = capture_scalable(inputs.args, inputs.kwargs, vary=known.varying, recording=known.recording)
        made = None if graph is None else known.proved(graph)
        if made is not None:
            known.scalable.append(made)
        elif graph is not None:
            _log_plain(inputs.shapes, "the capture with symbols has other operators than the plain captures")
        return made


def _log_plain(shapes: Shapes, reason: str) -> None:
    logger.info("the inputs %s are captured for these sizes alone: %s", ", ".join(map(str, shapes)), reason)

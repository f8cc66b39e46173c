"""Captured graphs of one model at many inputs: the first call exports the model, later calls follow that program.

    first call               torch.export, about a millisecond an operator
    further sizes, states    a light run of the forward that follows the exported program (`capture.recapture`)

A pipeline needs two graphs a call, one of a micro-batch and one of more rows (`pipeline.microbatch`): the second
follows the first, or is derived from that of an earlier size (`pipeline.derived_capture`). A forward that calls other
operators at some sizes is exported there, and later calls follow either program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..capture.export import Recording
from ..graph import Graph
from ..pipeline.derived_capture import DerivedCaptures
from ..torch_private import pytree

__all__ = ["GraphCache"]

#: The most kinds of calls (by structure and dtypes of inputs) whose exported programs are kept.
KINDS = 16


class GraphCache:
    """The exported programs of one model, by kind of call. See the module's header."""

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, tuple[list[Any], DerivedCaptures]] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, object]) -> GraphCache:
        return GraphCache()  # a copy of a model is captured anew

    def graphs(
        self,
        casting: Hashable,
        calls: Sequence[tuple[tuple[object, ...], dict[str, Any]]],
        recording: Recording,
        captures: Callable[..., list[Graph]],
    ) -> list[Graph]:
        """The graphs of inputs that differ in their sizes alone, in the order of `calls`.

        Args:
            casting: the state of autocast.
            calls: (args, kwargs) of each.
            recording: receives what the captures observe of the model besides operators.
            captures: ``captures(calls, recording=..., programs=...)`` captures the model.
        """
        key = casting, _kind(*calls[0])
        programs, derived = self._programs.setdefault(key, ([], DerivedCaptures()))
        self._programs.move_to_end(key)
        while len(self._programs) > KINDS:
            self._programs.popitem(last=False)
        if len(calls) != 2 or not derived.may(calls[1]):
            graphs = captures(calls, recording=recording, programs=programs)
        else:
            graphs = captures(calls[:1], recording=recording, programs=programs)
            wide = derived.of(graphs[0], calls[1])
            if wide is not None:
                return [graphs[0], wide]
            graphs += captures(calls[1:], recording=recording, programs=programs)
        if len(calls) == 2:
            derived.note(graphs[0], graphs[1], calls[1], recording)
        return graphs


def _kind(args: tuple[object, ...], kwargs: dict[str, Any]) -> Hashable:
    """The properties of a call that decide a program, besides the sizes of tensors and the state of autocast."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return (torch.is_grad_enabled(), spec), tuple(
        (x.dtype, x.dim(), x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves
    )

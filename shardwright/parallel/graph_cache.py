"""Captured graphs of one model at many inputs: the first call exports the model, later calls follow that program.

    first call               torch.export, about a millisecond an operator, or a light run that follows the program of
                             an earlier model of the same structure
    further sizes, states    a light run of the forward that follows the exported program (`capture.recapture`)

A forward that calls other operators at some sizes is exported there, and later calls follow either program.

A pipeline needs two graphs a call, one of a micro-batch and one of twice the rows, the wide capture, with which
`pipeline.microbatch.split` compares it. The second follows the first, or is derived from that of an earlier size
(`DerivedCaptures`). Then the forward has run for the micro-batch alone, and an earlier size says what grows with the
rows:

    earlier    view(x, [8, 4, 16]) at 8 rows, [16, 4, 16] at 16 rows     the first number grows with the rows
    now        view(x, [12, 6, 16]) at 12 rows                           [24, 6, 16] at 24 rows

A wide capture is derived inside of what has run, never outside: the forward has run with the same operators for the
micro-batch, and for a call that is at least as large in every dim. So no branch that compares a size with a bound lies
between the two. A branch that is taken between the two sizes alone, and at neither, is not seen. The guards of that
call still hold: nothing that the forward read of the model has changed since. Numbers besides sizes of results must be
those of the earlier size, or follow a dim that is not the rows. Where one of these does not hold, nothing is derived,
and the forward runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch

from ..capture.export import Recording
from ..capture.recapture import Call, ModelPrograms
from ..graph import Form, Graph, Op, Value, changed, form_of, leaves, map_leaves, share_form
from ..torch_private import pytree

__all__ = ["DerivedCaptures", "GraphCache"]

# -- derived captures


#: Row numbers of a wide capture in those of the micro-batch, as `build.micro_calls` has it.
RATIO = 2
#: The most large calls that are remembered.
MOST_CALLS = 16

Shape = tuple[int, ...]


class _Unknown(Exception):
    """The wide capture does not follow from an earlier one."""


class DerivedCaptures:
    """The captures of one model from which wide captures are derived."""

    def __init__(self) -> None:
        self._pair: tuple[Graph, Graph] | None = None
        self._recording: Recording | None = None
        self._ran: list[list[Shape]] = []

    def note(self, graph: Graph, wide: Graph, call: Call, recording: Recording) -> None:
        """Note a capture and its wide capture, for which the forward has run.

        Args:
            call: the call of the wide capture.
            recording: of both captures; its guards are set with the program of the call.
        """
        if self._pair is None or not self._holds() or not _one_program(self._pair[0], graph):
            self._ran.clear()
        self._pair, self._recording = None, recording
        if _one_program(graph, wide):
            self._pair, mine = (graph, wide), _shapes(call)
            self._ran = [mine, *(ran for ran in self._ran if not _inside(ran, mine))][:MOST_CALLS]

    def may(self, call: Call) -> bool:
        """True where the forward of the model as it is has run for a call that is at least as large in every dim."""
        wanted = _shapes(call)
        return self._pair is not None and any(_inside(wanted, ran) for ran in self._ran) and self._holds()

    def _holds(self) -> bool:
        """True where the model is as it was when the forward ran."""
        guards = None if self._recording is None else self._recording.guards
        return guards is not None and guards.hold()

    def of(self, graph: Graph, call: Call) -> Graph | None:
        """The wide capture of a graph; None where it does not follow from an earlier one.

        Args:
            call: the call of the wide capture.
        """
        assert self._pair is not None
        if not _one_program(self._pair[0], graph):
            return None
        try:
            return _derived(*self._pair, graph, _shapes(call))
        except _Unknown:
            return None


def _shapes(call: Call) -> list[Shape]:
    return [tuple(x.shape) for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor)]


def _inside(small: Sequence[Shape], large: Sequence[Shape]) -> bool:
    """True where no dim of one call is larger than that of the other."""
    return all(a <= b for mine, theirs in zip(small, large, strict=True) for a, b in zip(mine, theirs, strict=True))


def _one_program(one: Graph, other: Graph) -> bool:
    """True where two captures have the same operators on the same values."""
    return len(one.ops) == len(other.ops) and all(
        a.name == b.name
        and a.target is b.target
        and a.module == b.module
        and len(a.outputs) == len(b.outputs)
        and [v.name for v in a.inputs] == [v.name for v in b.inputs]
        for a, b in zip(one.ops, other.ops)
    )


def _derived(earlier: Graph, wide: Graph, graph: Graph, shapes: Sequence[Shape]) -> Graph:
    if earlier.constants.keys() != graph.constants.keys():
        raise _Unknown
    for name, tensor in graph.constants.items():
        if not tensor.shape == earlier.constants[name].shape == wide.constants[name].shape:
            raise _Unknown
    grown: dict[str, Value] = {}

    def widened(a: Value | None, b: Value | None, now: Value | None) -> Value | None:
        """The value `now` as `b` is to `a`."""
        if a is None or b is None or now is None:
            if a is not None or b is not None or now is not None:
                raise _Unknown
            return None
        if not len(a.shape) == len(b.shape) == len(now.shape):
            raise _Unknown
        shape = tuple([_number(*sizes) for sizes in zip(a.shape, b.shape, now.shape)])
        made = grown[now.name] = now if shape == now.shape else changed(now, shape=shape)
        return made

    inputs = tuple([v for v in map(widened, earlier.inputs, wide.inputs, graph.inputs) if v is not None])
    if [v.shape for v in inputs] != list(shapes):
        raise _Unknown
    explained = _Numbers(earlier, wide, graph)
    ops = []
    known: dict[tuple[Form, Form, Form], tuple[list[object], Form]] = {}  # equal layers are of one form here too
    for a, b, op in zip(earlier.ops, wide.ops, graph.ops):
        outputs = tuple(map(widened, a.outputs, b.outputs, op.outputs))
        alike = form_of(a), form_of(b), form_of(op)
        numbers, form = known.get(alike) or (explained.leaves(a, b, op), None)
        args, kwargs = _with_values(op, numbers, grown)
        inputs_of = tuple([grown.get(v.name, v) for v in op.inputs])
        made = changed(op, args=args, kwargs=kwargs, inputs=inputs_of, outputs=outputs)
        if form is None:
            known[alike] = numbers, form_of(made)
        else:
            share_form(made, form)
        ops.append(made)
    return replace(
        graph,
        inputs=inputs,
        ops=tuple(ops),
        outputs=tuple([grown.get(v.name, v) if isinstance(v, Value) else v for v in graph.outputs]),
        updates={name: grown.get(v.name, v) for name, v in graph.updates.items()},
    )


def _with_values(
    op: Op, numbers: list[object], grown: dict[str, Value]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of an operator with other numbers, and its values as they have grown.

    Args:
        numbers: the leaves of the arguments; those that are values count for nothing.
    """
    further = iter(numbers)

    def leaf(x: object) -> object:
        number = next(further)
        return grown.get(x.name, x) if type(x) is Value else number

    args, kwargs = map_leaves(leaf, (op.args, op.kwargs))
    return args, kwargs


def _number(a: int, b: int, now: int) -> int:
    """The number that is to `now` as `b` is to `a`: the same, or that of `RATIO` times the rows."""
    if a == b:
        return now
    if b == RATIO * a:
        return RATIO * now
    raise _Unknown


class _Numbers:
    """The numbers among the arguments of the operators of a wide capture."""

    def __init__(self, earlier: Graph, wide: Graph, graph: Graph) -> None:
        sizes = [
            (x, y, z)
            for a, b, c in zip(earlier.inputs, wide.inputs, graph.inputs)
            for x, y, z in zip(a.shape, b.shape, c.shape)
        ]
        self._same_rows = all(x == z for x, y, z in sizes if x != y)
        self._fixed_sizes = {(x, z) for x, y, z in sizes if x == y and x != z}

    def leaves(self, a: Op, b: Op, op: Op) -> list[object]:
        """The leaves of the arguments of `op`, with the numbers of a wide capture."""
        mine, theirs = list(leaves((a.args, a.kwargs))), list(leaves((b.args, b.kwargs)))
        now = list(leaves((op.args, op.kwargs)))
        if not len(mine) == len(theirs) == len(now):
            raise _Unknown
        return now if mine == theirs == now else [self._leaf(*three) for three in zip(mine, theirs, now)]

    def _leaf(self, a: object, b: object, now: object) -> object:
        if type(now) is Value:
            return now
        if not type(a) is type(b) is type(now):
            raise _Unknown
        if type(now) is int and isinstance(a, int) and isinstance(b, int):
            if a == b and a != now and not self._follows(a, now):
                raise _Unknown
            return _number(a, b, now)
        if repr(a) != repr(b) or (repr(a) != repr(now) and not self._same_rows):
            raise _Unknown
        return now

    def _follows(self, a: int, now: int) -> bool:
        """True where a changed number that does not grow with the rows follows another dim than the rows.

        It follows the dim as a multiple of it, or at a distance from it.
        """
        return self._same_rows or any(a * z == now * x or now - a == z - x for x, z in self._fixed_sizes)


# -- the cache


#: The most kinds of calls (by structure and dtypes of inputs) whose exported programs are kept.
KINDS = 16


class GraphCache:
    """The exported programs of one model, by kind of call. See the module's header."""

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, tuple[ModelPrograms, DerivedCaptures]] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, object]) -> GraphCache:
        return GraphCache()  # a copy of a model is captured anew

    def graphs(
        self,
        casting: Hashable,
        calls: Sequence[tuple[tuple[object, ...], dict[str, object]]],
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
        programs, derived = self._programs.setdefault(key, (ModelPrograms(), DerivedCaptures()))
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


def _kind(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable:
    """The properties of a call that decide a program, besides the sizes of tensors and the state of autocast."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return (torch.is_grad_enabled(), spec), tuple(
        (x.dtype, x.dim(), x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves
    )

"""A graph that was read before, as the template of the same program's graph at other sizes.

`graph_reader` finds for each node of a program what becomes of it: an operator, a mark, nothing. At other sizes only
shapes and numbers differ:

    read before      view(linear, [32, 64]) -> view: f32[32, 64], in the module net.0, of the line model.py:7
    now              [96, 64], a result of [96, 64]
    graph now        view(linear, [96, 64]) -> view: f32[96, 64], in the module net.0, of the line model.py:7

The light run was followed node by node before (`recapture.AsRun`): the same operators on the same tensors. Here every
argument besides numbers, and every dtype and gradient of a result, has to be as before. Otherwise, and where a
node was more than a plain operator (a write in place, a cast, a region), the program is read anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx import Node
from torch.fx.immutable_collections import immutable_list

from ..autocast import Autocast
from ..graph import Form, Graph, Op, Value, changed, form_of, share_form
from ..identity_tables import IdentityCache, IdentitySet
from ..torch_private import FakeTensor, OpOverload
from .mutation import tensors_of
from .outlines import says_nothing
from .recapture import AsExported

__all__ = ["GraphTemplate", "Step"]

#: Kinds of outputs of a program that are outputs of the graph.
_RETURNED = OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT

_SEQUENCES = frozenset({tuple, list, immutable_list, torch.Size})


class Step(NamedTuple):
    """A node of a program as it was read.

    Args:
        node: the node.
        op: its operator in the graph; None: no operator in the graph reads it.
        source: the node whose value a mark, or a choice among several results, passes on; None: the node is an
            operator.
        number: the number of the result that is chosen; None: a mark.
        arguments: the plain arguments of a mark.
    """

    node: Node
    op: Op | None = None
    source: Node | None = None
    number: int | None = None
    arguments: tuple[object, ...] = ()


class _Other(Exception):
    """The program is not as it was read before, but for its sizes."""


class GraphTemplate:
    """A graph with the nodes from which it was read.

    Args:
        graph: the graph.
        sources: its placeholders: the node, its entry in the program's signature, the value or plain input that the
            node stands for.
        steps: its further nodes.
        outputs: the outputs of the program: nodes and plain values.
        are_outputs: for each of these, True where it is an output of the graph.
        settings: what decided the reading besides the program, for a comparison.
    """

    def __init__(
        self,
        graph: Graph,
        sources: Sequence[tuple[Node, InputSpec, object]],
        steps: Sequence[Step],
        outputs: Sequence[object],
        are_outputs: Sequence[bool],
        settings: object,
    ) -> None:
        self._graph, self._sources, self._steps = graph, sources, steps
        self._outputs, self._are_outputs, self._settings = outputs, are_outputs, settings
        forms: dict[Form, Form] = {}
        self._forms = [
            None if step.op is None else forms.setdefault(form_of(step.op), form_of(step.op)) for step in steps
        ]

    @classmethod
    def of(
        cls,
        program: ExportedProgram,
        graph: Graph,
        sources: Sequence[tuple[Node, InputSpec, object]],
        read: Sequence[tuple[Step, int | None]],
        ops: Sequence[Op],
        settings: object,
    ) -> GraphTemplate | None:
        """A graph that was read of a program as a template; None where a node is more than `Step` can say.

        Args:
            program: the program.
            graph, sources, settings: as above.
            read: the nodes that were plain operators, marks and choices among results, and the number of each operator.
            ops: the operators by their numbers, those too that are not in the graph.
        """
        needed = [
            n
            for n in program.graph.nodes
            if n.op not in ("placeholder", "output")
            and not (isinstance(n.target, OpOverload) and says_nothing(n.target))
        ]
        if [step.node for step, _ in read] != needed or any(
            isinstance(c, FakeTensor) for c in program.constants.values()
        ):
            return None
        in_graph = IdentitySet(graph.ops)
        steps = [step if i is None or ops[i] not in in_graph else step._replace(op=ops[i]) for step, i in read]
        (end,) = (n for n in program.graph.nodes if n.op == "output")
        are_outputs = [spec.kind in _RETURNED for spec in program.graph_signature.output_specs]
        return cls(graph, sources, steps, list(end.args[0]), are_outputs, settings)

    def graph(self, nodes: AsExported, settings: object) -> Graph | None:
        """The graph of the program at other sizes; None where the program has to be read anew.

        Args:
            nodes: the arguments and results of the program's nodes.
            settings: what decides the reading now.

        Raises:
            Differs: the light run does not follow the program.
        """
        if settings != self._settings:
            return None
        try:
            return self._filled(nodes)
        except _Other:
            return None

    def _filled(self, nodes: AsExported) -> Graph:
        values: dict[Node, object] = {}
        by_name: dict[str, Value] = {}
        inputs: list[Value] = []
        ops: list[Op] = []
        forms = IdentityCache()  # equal layers are of one form here too
        grad, casting = torch.is_grad_enabled(), Autocast()
        for node, spec, before in self._sources:
            value = values[node] = _source(nodes.source(node, spec), before, spec.kind)
            if isinstance(value, Value):
                by_name[value.name] = value
            if spec.kind is InputKind.USER_INPUT and isinstance(value, Value):
                inputs.append(value)
        for (node, op, source, number, arguments), form in zip(self._steps, self._forms):
            if source is not None:
                values[node] = values[source]
                if number is None:
                    if nodes.arguments(node, grad, casting)[0][1:] != arguments:
                        raise _Other
                else:
                    results, made = values[source], nodes.made(source)
                    assert isinstance(results, tuple | None) and isinstance(made, (list, tuple))
                    values[node] = None if results is None else results[number]
                    nodes.passed(node, made[number])
                continue
            args, kwargs = nodes.arguments(node, grad, casting)
            if op is None:
                values[node] = None
                continue
            made = nodes.made(node)
            outputs = _outputs(op, made)
            values[node] = outputs[0] if isinstance(made, torch.Tensor) else outputs
            if len(args) != len(op.args) or kwargs.keys() != op.kwargs.keys():
                raise _Other
            args = tuple([values[x] if type(x) is Node else _argument(b, x, values) for b, x in zip(op.args, args)])
            if kwargs:
                kwargs = {name: _argument(op.kwargs[name], x, values) for name, x in kwargs.items()}
            read = tuple([by_name[v.name] for v in op.inputs])  # those in the arguments
            by_name.update([(v.name, v) for v in outputs if v is not None])
            op = changed(op, args=args, kwargs=kwargs, inputs=read, outputs=outputs, source=nodes.line(node))
            ops.append(op)
            if nodes.results is not None:
                share_form(op, forms.once("form", (form, nodes.results), partial(form_of, op)))
        returned = [
            values[x] if type(x) is Node else x
            for x, is_output in zip(nodes.outputs(self._outputs), self._are_outputs)
            if is_output
        ]
        return replace(self._graph, inputs=tuple(inputs), ops=tuple(ops), outputs=tuple(returned))


def _source(meta: object, before: object, kind: InputKind) -> object:
    """The value, or the plain input, of a placeholder."""
    if type(before) is not Value:
        if isinstance(meta, torch.Tensor):
            raise _Other
        return before
    if not isinstance(meta, torch.Tensor) or meta.dtype != before.dtype:
        raise _Other
    shape = tuple(meta.shape)
    if kind in (InputKind.USER_INPUT, InputKind.PARAMETER) and meta.requires_grad != before.requires_grad:
        raise _Other
    if shape == before.shape:
        return before
    if kind is not InputKind.USER_INPUT:
        raise _Other
    return changed(before, shape=shape)


def _outputs(op: Op, made: object) -> tuple[Value | None, ...]:
    """The outputs of an operator at other sizes.

    Args:
        op: the operator as it was read.
        made: its results now.
    """
    if isinstance(made, torch.Tensor) and len(op.outputs) == 1 and op.outputs[0] is not None:
        return (_output(op.outputs[0], made),)
    metas = tensors_of(made)
    if len(metas) != len(op.outputs):
        raise _Other
    outputs: list[Value | None] = []
    for before, meta in zip(op.outputs, metas):
        if before is None or not isinstance(meta, torch.Tensor):
            if before is not None or isinstance(meta, torch.Tensor):
                raise _Other
            outputs.append(None)
            continue
        outputs.append(_output(before, meta))
    return tuple(outputs)


def _output(before: Value, meta: torch.Tensor) -> Value:
    if meta.dtype != before.dtype:
        raise _Other
    shape = tuple(meta.shape)
    return before if shape == before.shape else changed(before, shape=shape)


def _argument(before: object, now: object, values: dict[Node, object]) -> object:
    """An argument with values in place of nodes.

    Args:
        before: the argument as it was read, with values.
        now: the argument with nodes, which are those of `before`.
        values: the value, or the plain input, of each node.
    """
    if type(now) is Node:
        return values[now]
    if type(now) is int:
        if type(before) is int:
            return now
    elif type(now) is float:  # forms of operators tell 0.0 from -0.0, which are equal
        if type(before) is float and ((now and before) or now.hex() == before.hex()):
            return now
    elif _is_sequence(now):
        if _is_sequence(before) and len(before) == len(now):
            return type(now)([_argument(*each, values) for each in zip(before, now)])
    elif type(before) is type(now) and before == now:
        return now
    raise _Other


def _is_sequence(argument: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    return type(argument) in _SEQUENCES

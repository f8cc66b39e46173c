"""A captured program for another number of rows, told from two captures of it.

    number(rows) = number(b) + (number(2b) - number(b)) · (rows - b) / b

for every size and every number among the arguments of operators. It is what a program that takes as many steps for more
rows does, and so serves to reckon what others would cost; what is to run is captured for its own rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any


from ..errors import SettingError
from ..graph import Graph, Op, Value
from ..torch_private import pytree

__all__ = ["with_rows"]


def with_rows(graph: Graph, wide: Graph, rows: int, wanted: int) -> Graph:
    """The graph for `wanted` rows.

    Args:
        graph, wide: captured for `rows`, and for twice as many.

    Raises:
        SettingError: they are not the same program, or a number would be no whole one.
    """
    return graph if rows == wanted else _Resizing(graph, wide, rows, wanted).run()


class _Resizing:
    def __init__(self, graph: Graph, wide: Graph, rows: int, wanted: int) -> None:
        self.graph, self.wide, self.rows, self.wanted = graph, wide, rows, wanted
        self.values: dict[str, Value] = {}

    def run(self) -> Graph:
        graph, wide = self.graph, self.wide
        if len(graph.ops) != len(wide.ops) or len(graph.inputs) != len(wide.inputs):
            raise self.other(None)
        for name, tensor in graph.constants.items():
            if name not in wide.constants or wide.constants[name].shape != tensor.shape:
                raise self.other(None)
        inputs = tuple(self.value(v, w, None) for v, w in zip(graph.inputs, wide.inputs))
        ops = tuple(map(self.operator, graph.ops, wide.ops))
        changed = lambda v: self.values.get(v.name, v) if isinstance(v, Value) else v  # noqa: E731
        return replace(graph, inputs=inputs, ops=ops, outputs=tuple(map(changed, graph.outputs)),
                       updates={n: changed(v) for n, v in graph.updates.items()})

    def operator(self, op: Op, other: Op) -> Op:
        leaves, spec = pytree.tree_flatten((op.args, op.kwargs))
        others, its = pytree.tree_flatten((other.args, other.kwargs))
        if op.target is not other.target or spec != its or len(op.outputs) != len(other.outputs):
            raise self.other(op)
        args, kwargs = pytree.tree_unflatten([self.leaf(a, b, op) for a, b in zip(leaves, others)], spec)
        return replace(op, args=args, kwargs=kwargs, inputs=tuple(self.values.get(v.name, v) for v in op.inputs),
                       outputs=tuple(None if v is None or w is None else self.value(v, w, op)
                                     for v, w in zip(op.outputs, other.outputs)))

    def leaf(self, one: Any, two: Any, op: Op) -> Any:
        if isinstance(one, Value):
            return self.values.get(one.name, one)
        if isinstance(one, int) and not isinstance(one, bool) and isinstance(two, int):
            return self.number(one, two, op)
        if not isinstance(one, (int, float)) and one != two:
            raise self.other(op)
        return one

    def value(self, one: Value, two: Value, op: Op | None) -> Value:
        if len(one.shape) != len(two.shape):
            raise self.other(op)
        shape = tuple(self.number(a, b, op) for a, b in zip(one.shape, two.shape))
        made = self.values[one.name] = replace(one, shape=shape)
        return made

    def number(self, one: int, two: int, op: Op | None) -> int:
        more, rest = divmod((two - one) * (self.wanted - self.rows), self.rows)
        if rest or one + more < 0 <= one:
            raise self.other(op)
        return one + more

    def other(self, op: Op | None) -> SettingError:
        return SettingError("the program is another one for more rows: what it costs for other numbers of micro-"
                            "batches cannot be told", **(op.where if op is not None else {}),
                            legal="a number for micro_batches")

"""Graphs that scale: one symbolic capture serves a model at every batch size and sequence length.

A capture with `vary` traces chosen dims of the inputs as symbols instead of numbers. Every number of the graph that
depends on a symbol is then a `Size`: an int with a formula. A `ScalableGraph` evaluates the formulas for other sizes,
which takes milliseconds where a capture takes a second:

    captured:  x [8, 32]       view(%x, [s0*s1, 64])     guards: s1 <= 1024
    at:        x [16, 48]  ->  view(%x, [768, 64])       None where a guard does not hold: 48 > 40, say

torch records a guard for each decision of the model's Python code that depends on a symbol (``if x.shape[1] > 40:``),
so a graph is never used for sizes at which the model would compute something else. Sizes 0 and 1 broadcast, and are
never symbols.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import PACKAGE_FOLDER
from ..graph import Graph, Op, Value, changed
from ..torch_private import environment_of, formula_of, holds_at, number_at

__all__ = ["Fraction", "NotScalable", "ScalableGraph", "Size", "Sizes", "is_about_sizes"]

#: Errors by which a mistake in a program shows.
_MISTAKES = (AttributeError, LookupError, NameError, TypeError, AssertionError)


class NotScalable(Exception):
    """A model that cannot be captured with symbols in place of sizes; the message is the reason."""


def is_about_sizes(error: BaseException) -> bool:
    """True where symbols in place of sizes may be the cause of an error; False for a mistake of this package.

    The model and torch raise anything on symbols. A mistake is an error of a kind in `_MISTAKES` whose innermost line
    is a line of this package. Special methods do not count, since they pass the model's own calls on (marks,
    stand-ins, attributes).
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = frames and frames[-1].filename.startswith(PACKAGE_FOLDER) and not frames[-1].name.startswith("__")
    return not (ours and isinstance(error, _MISTAKES))


class Size(int):
    """A number at the captured sizes, with the formula that gives it at other sizes."""

    formula: Any

    @classmethod
    def of(cls, number: int, formula: Any) -> Size:
        made = cls(number)
        made.formula = formula
        return made


class Fraction(float):
    """A fractional number, such as ``1 / x.shape[1]``, with the formula that gives it at other sizes."""

    formula: Any

    @classmethod
    def of(cls, number: float, formula: Any) -> Fraction:
        made = cls(number)
        made.formula = formula
        return made


class Sizes:
    """The symbols of one capture.

    Args:
        inputs: the exported program's metadata of the user's tensors, in order.
        captured: the sizes of these tensors in the capture.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], captured: Sequence[tuple[int, ...]]) -> None:
        self.shapes = [tuple(formula_of(s) for s in x.shape) for x in inputs]
        self.captured = {
            f: size
            for formulas, shape in zip(self.shapes, captured, strict=True)
            for f, size in zip(formulas, shape)
            if not isinstance(f, int)
        }
        self.symbols = {f for shape in self.shapes for f in shape if not isinstance(f, int)}
        self.environment = next(
            (environment_of(x) for x in inputs if any(not isinstance(s, int) for s in x.shape)), None
        )

    def known(self, number: Any) -> bool:
        """True where a symbolic number follows from the inputs' sizes; False where it depends on tensor values."""
        return formula_of(number).free_symbols <= self.symbols

    def of(self, number: Any) -> Any:
        """A symbolic number as a plain number with its formula; any other number unchanged.

        Raises:
            NotScalable: a condition, or a number that depends on the values of tensors.
        """
        if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return number
        if isinstance(number, torch.SymBool) or not self.known(number):
            raise NotScalable(f"{number} depends on sizes or values without a formula")
        formula = formula_of(number)
        if isinstance(number, torch.SymInt):
            return Size.of(int(number_at(formula, self.captured)), formula) if formula.free_symbols else int(formula)
        return Fraction.of(number_at(formula, self.captured), formula) if formula.free_symbols else float(formula)

    def shape(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """The shape of a tensor; sizes that depend on the values of tensors stay symbols."""
        return tuple(s if isinstance(s, torch.SymInt) and not self.known(s) else self.of(s) for s in tensor.shape)


@dataclass(frozen=True)
class ScalableGraph:
    """A graph at every size of its inputs for which its guards hold.

    Args:
        graph: the captured graph; numbers that depend on the inputs' sizes are `Size` or `Fraction`.
        sizes: the symbols of the graph.
    """

    graph: Graph
    sizes: Sizes

    def at(self, shapes: Sequence[tuple[int, ...]]) -> Graph | None:
        """The graph for other sizes, with plain numbers; None where a guard does not hold.

        Args:
            shapes: the shapes of the inputs, in order.
        """
        chosen = self._chosen(shapes)
        if chosen is None:
            return None
        numbers: dict[Any, int | float] = {}

        def number(x: Size | Fraction) -> int | float:
            if x.formula not in numbers:
                numbers[x.formula] = number_at(x.formula, chosen)
            return numbers[x.formula]

        return _Rewritten(self.graph, number, {}, {}).made()

    def like(self, graph: Graph, shapes: Sequence[tuple[int, ...]]) -> ScalableGraph | None:
        """The same graph with the names of a plain capture; None where the two programs differ.

        torch counts computations with sizes among the operators, so that a second ``mul`` may be called ``mul_2``.

        Args:
            graph: the plain capture.
            shapes: the sizes of its inputs.
        """
        mine = self.at(shapes)
        if mine is None or len(mine.ops) != len(graph.ops):
            return None
        operators = {a.name: b.name for a, b in zip(mine.ops, graph.ops)}
        values = {
            v.name: w.name
            for a, b in zip(mine.ops, graph.ops)
            for v, w in zip(a.outputs, b.outputs)
            if v is not None and w is not None
        }
        named = replace(self, graph=_Rewritten(self.graph, lambda x: x, operators, values).made())
        return named if named.at(shapes) == graph else None

    def _chosen(self, shapes: Sequence[tuple[int, ...]]) -> dict[Any, int] | None:
        """The value of each symbol; None where the shapes do not fit or a guard does not hold."""
        chosen: dict[Any, int] = {}
        if [len(s) for s in shapes] != [len(s) for s in self.sizes.shapes]:
            return None
        for shape, formulas in zip(shapes, self.sizes.shapes):
            for size, formula in zip(shape, formulas):
                if isinstance(formula, int):
                    if size != formula:
                        return None
                elif formula.is_Symbol and chosen.setdefault(formula, size) != size:
                    return None
        for shape, formulas in zip(shapes, self.sizes.shapes):
            for size, formula in zip(shape, formulas):
                if not isinstance(formula, int) and (
                    not formula.free_symbols <= chosen.keys() or number_at(formula, chosen) != size
                ):
                    return None
        return chosen if holds_at(self.sizes.environment, chosen) else None


class _Rewritten:
    """A copy of a graph with other numbers and names.

    Args:
        graph: a graph whose numbers have formulas.
        number: maps each such number to its replacement.
        operators, values: name -> the name instead.
    """

    def __init__(
        self, graph: Graph, number: Callable[[Any], Any], operators: Mapping[str, str], values: Mapping[str, str]
    ) -> None:
        self.graph, self.number, self.operators, self.names = graph, number, operators, values
        self.values: dict[str, Value] = {}

    def made(self) -> Graph:
        graph = self.graph
        return replace(
            graph,
            inputs=tuple(map(self.value, graph.inputs)),
            ops=tuple(map(self.op, graph.ops)),
            outputs=tuple(map(self.leaf, graph.outputs)),
            updates={n: self.value(v) for n, v in graph.updates.items()},
        )

    def value(self, value: Value) -> Value:
        known = self.values.get(value.name)
        if known is None:
            sized, name = any(type(s) is Size for s in value.shape), self.names.get(value.name, value.name)
            known = (
                value if not sized and name == value.name else changed(value, name=name, shape=self.leaf(value.shape))
            )
            self.values[value.name] = known
        return known

    def leaf(self, x: Any) -> Any:
        kind = type(x)
        if kind is Value:
            return self.value(x)
        if kind is Size or kind is Fraction:
            return self.number(x)
        if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
            return (tuple if isinstance(x, tuple) else kind)([self.leaf(y) for y in x])  # torch.fx has lists of its own
        if isinstance(x, dict):
            return {k: self.leaf(y) for k, y in x.items()}
        if kind is slice:
            return slice(self.leaf(x.start), self.leaf(x.stop), self.leaf(x.step))
        return x

    def op(self, op: Op) -> Op:
        return changed(
            op,
            name=self.operators.get(op.name, op.name),
            args=self.leaf(op.args),
            kwargs=self.leaf(op.kwargs),
            inputs=tuple(map(self.value, op.inputs)),
            outputs=tuple(None if v is None else self.value(v) for v in op.outputs),
        )

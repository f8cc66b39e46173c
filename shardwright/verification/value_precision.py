"""The precision of a captured graph's values and gradients: the coarsest floating dtype on the way to each of them.

    p(output)            = coarsest of its own dtype and of p(input), over the floating inputs of its operator
    p(gradient of v)     = coarsest of v's dtype and, over the consumers of v, of p(gradient of their outputs)
                           and of p(their inputs and outputs), from which the derivative is computed
    p(parameter, step t) = coarsest of its own dtype and of p(its gradient) in step t - 1

A float64 value that was computed through a float32 operator is a float32 number: two runs that add in another order
differ by float32's rounding. Integers and booleans carry no rounding.

Example: y = (x.float() @ w).double() with x in float64 and w in float32: y has the precision of float32, and so has
everything computed from y.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ..graph import Graph, Op, Value

__all__ = ["Allowed", "Precision", "Precisions", "coarsest", "precisions"]


@dataclass(frozen=True)
class Precision:
    """A floating dtype, and the operator that brought it in.

    Attributes:
        dtype: the dtype.
        operator: the first operator on the way that has it, as in ``plan.operator(name)``; "": the value's own dtype,
            or that of an input or a parameter.
        source: ``file.py:41``, the line that calls the operator.
    """

    dtype: torch.dtype
    operator: str = ""
    source: str = ""

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        where = f", {self.source}" if self.source else ""
        return f"{name} ({self.operator}{where})" if self.operator else name


def coarsest(precisions: Iterable[Precision | None]) -> Precision | None:
    """The precision with the largest rounding error, the first of several equal ones; None where nothing is rounded."""
    found = [p for p in precisions if p is not None]
    return max(found, key=lambda p: torch.finfo(p.dtype).eps, default=None)


@dataclass(frozen=True)
class Precisions:
    """The precision of every value, gradient and state that a run of a graph produces.

    Attributes:
        values: by value name, in the last step.
        gradients: by value name, in the first step.
        state: by the name of a parameter or buffer, after the last step.
    """

    values: Mapping[str, Precision | None]
    gradients: Mapping[str, Precision | None]
    state: Mapping[str, Precision | None]


def precisions(graph: Graph, steps: int = 1) -> Precisions:
    """The precision of a graph's values, gradients and state in training.

    Args:
        graph: a captured graph.
        steps: the number of optimizer steps. Each step passes the precision of gradients on to parameters.
    """
    state = {name: _of(v.stored.dtype) for name, v in (*graph.parameters.items(), *graph.buffers.items())}
    values: dict[str, Precision | None] = {}
    first: dict[str, Precision | None] | None = None
    for _ in range(steps):
        values = _forward(graph, state)
        gradients = _backward(graph, values)
        first = gradients if first is None else first
        after = {
            name: coarsest((p, gradients.get(graph.parameters[name].name)))
            if name in graph.parameters
            else coarsest((p, values[graph.updates[name].name]))
            if name in graph.updates
            else p
            for name, p in state.items()
        }
        if after == state:
            break
        state = after
    return Precisions(values, first or {}, state)


class Allowed:
    """The largest relative difference allowed of each tensor, and the dtype that decides it.

    Args:
        graph: the captured graph.
        dtype: the dtype of the run. No tensor gets a smaller tolerance than this dtype's.
        tolerances: by dtype; for other dtypes: the root of their precision.
        steps: the number of optimizer steps.
    """

    def __init__(
        self, graph: Graph, dtype: torch.dtype, tolerances: Mapping[torch.dtype, float], steps: int = 1
    ) -> None:
        self.graph, self.dtype, self.tolerances = graph, dtype, tolerances
        self.run = precisions(graph, steps)
        self.step = self.run if steps == 1 else precisions(graph)

    def tolerance(self, precision: Precision | None) -> float:
        """The largest difference allowed of a value of this precision, at least that of the run's own dtype."""
        rounding = self._of(self.dtype)
        return rounding if precision is None else max(rounding, self._of(precision.dtype))

    def _of(self, dtype: torch.dtype) -> float:
        return self.tolerances.get(dtype, torch.finfo(dtype).eps ** 0.5)

    def value(self, name: str) -> Precision | None:
        """The precision of a value in the first step."""
        return self.step.values.get(name)

    def gradient(self, name: str) -> Precision | None:
        """The precision of the gradient of a value in the first step."""
        return self.step.gradients.get(name) or self.value(name)

    def result(self, index: int) -> Precision | None:
        """The precision of the model's tensor output at `index`, in the last step."""
        outputs = [o for o in self.graph.outputs if isinstance(o, Value)]
        found = outputs[index : index + 1] or outputs
        return coarsest(self.run.values.get(o.name) for o in found)

    def of_parameter(self, name: str) -> Precision | None:
        """The precision of the gradient of a parameter in the first step."""
        value = self.graph.parameters.get(self.graph.aliases.get(name, name))
        return None if value is None else self.gradient(value.name)

    def state(self, name: str) -> Precision | None:
        """The precision of a parameter or buffer after the last step."""
        return self.run.state.get(self.graph.aliases.get(name, name))

    def alone(self, op: Op) -> Precision | None:
        """The precision of one operator's results from given inputs: the coarsest dtype that it reads or writes."""
        return coarsest(_of(v.dtype, op) for v in (*op.inputs, *op.outputs) if v is not None)


def _of(dtype: torch.dtype, op: Op | None = None) -> Precision | None:
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    real = torch.empty((), dtype=dtype, device="meta").real.dtype if dtype.is_complex else dtype
    return Precision(real) if op is None else Precision(real, op.name, op.source)


def _narrowed(graph: Graph) -> Iterator[tuple[Value, Precision | None]]:
    """Parameters that are stored in another dtype than they are read in, with the precision of their first reader."""
    for value in graph.parameters.values():
        if value.master is not None:
            reader = next((op for op in graph.ops if value in op.inputs), None)
            yield value, _of(value.dtype, reader)


def _forward(graph: Graph, state: Mapping[str, Precision | None]) -> dict[str, Precision | None]:
    values = {v.name: _of(v.dtype) for v in graph.inputs} | {name: _of(t.dtype) for name, t in graph.constants.items()}
    values |= {v.name: state[name] for name, v in (*graph.parameters.items(), *graph.buffers.items())}
    values |= {v.name: coarsest((values[v.name], rounding)) for v, rounding in _narrowed(graph)}
    for op in graph.ops:
        arrived = coarsest(values.get(v.name) for v in op.inputs)
        for value in op.outputs:
            if value is not None:
                rounding = _of(value.dtype, op)
                values[value.name] = None if rounding is None else coarsest((arrived, rounding))
    return values


def _backward(graph: Graph, values: Mapping[str, Precision | None]) -> dict[str, Precision | None]:
    """Precisions of gradients by the value's name; values that no gradient reaches are missing."""
    gradients = {o.name: values[o.name] for o in graph.outputs if isinstance(o, Value) and o.requires_grad}
    for op in reversed(graph.ops):
        made = [v for v in op.outputs if v is not None and v.name in gradients]
        if not made:
            continue
        arrived = coarsest(
            (
                *(gradients[v.name] for v in made),
                *(values.get(v.name) for v in made),
                *(values.get(v.name) for v in op.inputs),
            )
        )
        for value in dict.fromkeys(v for v in op.inputs if v.requires_grad):
            gradients[value.name] = coarsest((gradients.get(value.name), arrived, _of(value.dtype)))
    return gradients

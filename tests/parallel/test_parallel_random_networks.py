"""Random small networks under random legal strategies, tuples and Layouts: forward and backward are those of one
device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, note, settings
from one_device import close, parallel, squares
from small_networks import draw
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.layout import allocate, merge
from shardwright.rules import Bound, bound_rule

SIZES = [2, 4, 6, 8, 12]
MATRICES = {
    4: [(2, 2), (4,)],
    6: [(2, 3), (3, 2), (6,)],
    8: [(2, 2, 2), (4, 2), (8,)],
    12: [(2, 3, 2), (3, 4), (2, 2, 3)],
}

UNARY = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "neg": torch.neg,
    "half": lambda x: torch.mul(x, 0.5),
    "relu_": lambda x: F.relu(x, inplace=False),
    "detach": torch.detach,
    "gelu": F.gelu,
}
BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum}
REDUCTIONS = {"sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "logsumexp": torch.logsumexp, "var": torch.var}
ALONG = {"softmax": torch.softmax, "log_softmax": torch.log_softmax, "cumsum": torch.cumsum}


@dataclass
class Step:
    """``function(*values, *weights)``; the weights are made for it."""

    name: str
    function: Callable[..., Tensor]
    values: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}{self.values} {self.weights or ''}"


class Network(nn.Module):
    """Runs steps on a growing list of values, of which the first is the input; returns some of them."""

    def __init__(self, steps: list[Step], returned: list[int]) -> None:
        super().__init__()
        self.steps, self.returned = steps, returned
        self.operators = [sw.Operator(step.function) for step in steps]
        self.weights = nn.ParameterList()
        self.first = []
        for i, step in enumerate(steps):
            self.first.append(len(self.weights))
            self.weights.extend(nn.Parameter(draw(*shape, seed=i) / math.sqrt(shape[-1])) for shape in step.weights)

    def forward(self, x: Tensor) -> list[Tensor]:
        values = [x]
        for step, operator, first in zip(self.steps, self.operators, self.first):
            weights = [self.weights[first + i] for i in range(len(step.weights))]
            values.append(operator(*(values[i] for i in step.values), *weights))
        return [values[i] for i in self.returned]


@st.composite
def networks(
    draw_: Any, rows: Sequence[int] = (4, 8, 12, 24), sizes: Sequence[int] = SIZES
) -> tuple[Network, tuple[int, ...]]:
    shapes = [(draw_(st.sampled_from(rows)), draw_(st.sampled_from(sizes)))]
    steps: list[Step] = []

    def pick(*options: Any) -> Any:
        return draw_(st.sampled_from(options))

    for _ in range(draw_(st.integers(2, 7))):
        v = pick(len(shapes) - 1, len(shapes) - 1, *range(len(shapes)))
        shape = shapes[v]
        alike = [i for i, other in enumerate(shapes) if other == shape]
        fits = [
            i
            for i, other in enumerate(shapes)
            if len(other) <= len(shape) and all(b in (1, a) for a, b in zip(shape[::-1], other[::-1]))
        ]
        kind = pick(
            "unary",
            "unary",
            "binary",
            "broadcast",
            *["matmul", "linear", "gram"] * (len(shape) > 1),
            *["reduce", "along", "split"] * bool(shape),
            *["merge", "transpose"] * (len(shape) > 1),
        )
        if kind == "unary":
            name = pick(*UNARY)
            steps.append(Step(name, UNARY[name], (v,)))
        elif kind in ("binary", "broadcast"):
            name, other = pick(*BINARY), pick(*(alike if kind == "binary" else fits))
            steps.append(Step(name, BINARY[name], pick((v, other), (other, v))))
        elif kind == "matmul":
            weight = (shape[-1], pick(*sizes))
            steps.append(Step("matmul", torch.matmul, (v,), (weight,)))
            shape = (*shape[:-1], weight[1])
        elif kind == "linear":
            out = pick(*sizes)
            steps.append(Step("linear", F.linear, (v,), pick(((out, shape[-1]), (out,)), ((out, shape[-1]),))))
            shape = (*shape[:-1], out)
        elif kind == "gram":
            other = pick(*alike)
            steps.append(Step("transpose of the last two", lambda x: torch.transpose(x, -1, -2), (other,)))
            shapes.append((*shape[:-2], shape[-1], shape[-2]))
            steps.append(Step("gram", torch.matmul, (v, len(shapes) - 1)))
            shape = (*shape[:-1], shape[-2])
        elif kind in ("reduce", "along"):
            table = REDUCTIONS if kind == "reduce" else ALONG
            dim = draw_(st.integers(0, len(shape) - 1))
            name = pick(*(n for n in table if n != "var" or shape[dim] > 1))  # of one element it is not a number
            if kind == "along":
                steps.append(Step(f"{name} {dim}", lambda x, f=table[name], d=dim: f(x, d), (v,)))
            else:
                keep = pick(True, False)
                steps.append(
                    Step(f"{name} {dim} {keep}", lambda x, f=table[name], d=dim, k=keep: f(x, d, keepdim=k), (v,))
                )
                shape = (*shape[:dim], *[1] * keep, *shape[dim + 1 :])
        elif kind == "transpose":
            a, b = pick(*[(i, j) for i in range(len(shape)) for j in range(i)])
            steps.append(Step(f"transpose {a} {b}", lambda x, a=a, b=b: torch.transpose(x, a, b), (v,)))
            swapped = list(shape)
            swapped[a], swapped[b] = shape[b], shape[a]
            shape = tuple(swapped)
        else:
            dim = draw_(st.integers(0, len(shape) - (2 if kind == "merge" else 1)))
            if kind == "merge":
                shape = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
            else:
                major = pick(*[d for d in range(1, shape[dim] + 1) if shape[dim] % d == 0])
                shape = (*shape[:dim], major, shape[dim] // major, *shape[dim + 1 :])
            steps.append(Step(f"reshape {shape}", lambda x, s=shape: torch.reshape(x, s), (v,)))
        shapes.append(shape)
    used = {i for step in steps for i in step.values}
    returned = [i for i in range(len(shapes)) if i not in used] + draw_(
        st.lists(st.integers(0, len(shapes) - 1), max_size=1)
    )
    return Network(steps, returned), shapes[0]


def marked(draw_: Any, bound: Bound, devices: int) -> tuple[Any, Any]:
    """A legal in_strategy of an operator, by tuples or by Layouts, and perhaps an out_strategy."""
    factors = range(len(bound.factors))

    def fits(i: int, cut: int) -> bool:
        return bound.factors[i].pads or bound.factors[i].size % cut == 0

    if draw_(st.booleans()):
        order, left, cuts = draw_(st.permutations(factors)), devices, dict.fromkeys(factors, 1)
        for i in order:
            if bound.factors[i].splittable:
                cuts[i] = draw_(st.sampled_from([c for c in range(1, left + 1) if left % c == 0 and fits(i, c)]))
                left //= cuts[i]
        assignment = bound.cut_by(devices, dict(zip(factors, allocate(devices, [cuts[i] for i in factors]))))
        strategy = bound.in_strategy(assignment) if bound.is_consistent(assignment) else None
    else:
        matrix = draw_(st.sampled_from(MATRICES[devices]))
        layout = sw.Layout(matrix, [f"a{i}" for i in range(len(matrix))])
        taken: dict[int, list[str]] = {i: [] for i in factors}
        for name in draw_(st.permutations(layout.alias_name)):
            room = [
                i
                for i in factors
                if bound.factors[i].splittable and fits(i, math.prod(layout.axis(n).size for n in [*taken[i], name]))
            ]
            where = draw_(st.sampled_from([None, *room]))
            if where is not None:
                taken[where].append(name)
        assignment = bound.cut_by(devices, {i: merge(layout.axis(n) for n in names) for i, names in taken.items()})
        strategy = (
            tuple(layout(*(tuple(n for i in dim for n in taken[i]) for dim in dims)) for dims in bound.inputs)
            if bound.is_consistent(assignment)
            else None
        )
    out = None
    if draw_(st.integers(0, 3)) == 0:
        cut = [
            draw_(
                st.sampled_from(
                    [None, *(d for d, size in enumerate(s) if size % 2 == 0 or (bound.uneven and size > 1))]
                )
            )
            for s in bound.out_shapes
        ]
        out = tuple(tuple(2 if d == c else 1 for d in range(len(s))) for c, s in zip(cut, bound.out_shapes))
    return strategy, out


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(networks(), st.sampled_from(sorted(MATRICES)), st.data())
def test_random_networks(made, devices, data) -> None:
    net, shape = made
    x, y = (draw(*shape).requires_grad_() for _ in range(2))
    for operator in net.operators:
        operator.shard(())  # so that every operator of the graph has its mark's name
    graph = capture(net, (x,))
    found = {op.name: bound_rule(op) for op in graph.ops if op.mark is not None}
    for i, operator in enumerate(net.operators):
        strategy = out = None
        if data.draw(st.integers(0, 2)):
            strategy, out = marked(data.draw, found[f"operators.{i}"], devices)
        operator.shard(strategy, out)
        note(f"{net.steps[i]}: {strategy} -> {out}")
    words = ["full_batch"] + ["data_parallel"] * (shape[0] % devices == 0)
    model = parallel(net, devices=devices, dataset=data.draw(st.sampled_from(words)))
    got, expected = model(x), net(y)
    close(got, expected, "outputs")
    if not squares(expected).requires_grad:  # all behind a detach
        return
    gradients = torch.autograd.grad(squares(expected), [y, *net.parameters()], allow_unused=True)
    close(torch.autograd.grad(squares(got), [x, *net.parameters()], allow_unused=True), gradients, "gradients")


def test_parts_of_a_rank_that_do_not_go_together() -> None:
    # Found above: a sum over the halves of 6 = 2 x 3, and an operator that cuts by the halves of 6 = 3 x 2.
    halves, thirds = sw.Layout((2, 3), ("a", "b")), sw.Layout((3, 2), ("a", "b"))
    steps = [
        Step("linear", F.linear, (0,), ((2, 2),)),
        Step("half", UNARY["half"], (1,)),
        Step("reshape", lambda x: torch.reshape(x, (24,)), (2,)),
        Step("sum", torch.sum, (3,)),
    ]
    net = Network(steps, [2, 4])
    net.operators[0].shard((halves("None", "a"), halves("None", "a")))
    net.operators[1].shard((thirds("None", "b"),))
    x, y = draw(12, 2).requires_grad_(), draw(12, 2).requires_grad_()
    got, expected = parallel(net, devices=6)(x), net(y)
    close(got, expected)
    squares(got).backward()
    mine = [net.weights[0].grad, net.zero_grad()][0]
    squares(expected).backward()
    close([x.grad, mine], [y.grad, net.weights[0].grad])

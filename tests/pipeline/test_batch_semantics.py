"""Results that a rule promises of a batch in parts, against those of the operator: every call of every rule."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from rule_reference import Whole, close, outputs_of
from test_rules_every_rule import CASES

from shardwright.graph import Op, Value, map_values
from shardwright.layout import Digit
from shardwright.pipeline.batch_semantics import BatchDim, after_cut, batch_place, image
from shardwright.rules import Assignment, Bound, Rule, bound_rule, find_rule
from shardwright.rules.registry import local_call

pytestmark = pytest.mark.filterwarnings("ignore")

aten = torch.ops.aten
PARTS = 2


def cuts(whole: Whole, rule: Rule, bound: Bound) -> list[tuple[int, Assignment, list[str]]]:
    """Each factor that comes in parts, and what is said of the outputs."""
    found = []
    for f, factor in enumerate(bound.factors):
        assignment = bound.cut_by(PARTS, {f: (Digit(PARTS, 1),)})
        if (
            factor.splittable
            and factor.size % PARTS == 0
            and bound.is_consistent(assignment)
            and any(f in dim for dims in bound.inputs for dim in dims)
        ):
            found.append((f, assignment, after_cut(whole.op, rule, bound, f, PARTS)))
    return found


def of_part(whole: Whole, rule: Rule, bound: Bound, assignment: Assignment, k: int) -> list[torch.Tensor]:
    """The operator on one part of its inputs, as a model that is fed this part calls it."""
    given: dict[str, Any] = {}
    for i, value in enumerate(whole.op.inputs):
        layout = bound.input_layout(i, assignment)
        assert layout is not None
        given[value.name] = whole.tensors[value.name].detach()[layout.slice(value.shape, k)].contiguous()
    call = local_call(whole.op, rule, bound, assignment)
    args, kwargs = map_values((call.args, call.kwargs), lambda v: given[v.name])
    return outputs_of(call.target(*args, **kwargs))


def test_what_is_said_of_every_call_holds() -> None:
    seen: Counter[str] = Counter()
    for case in CASES:
        whole = Whole(case)
        twice = len({v.name for v in whole.op.inputs}) < len(whole.op.inputs)  # it cannot come in two layouts
        pools = "pool" in case.target.__name__  # over all of a dim: a part has another kernel
        if torch.Tag.nondeterministic_seeded in case.target.tags or not case.values_matter or twice:
            continue
        rule = find_rule(whole.op)
        assert rule is not None
        bound = bound_rule(whole.op, rule)
        for f, assignment, text in cuts(whole, rule, bound):
            seen.update(text)
            if {"mixed", "ratio"} & set(text) or (pools and "mean" in text):
                continue
            parts = [of_part(whole, rule, bound, assignment, k) for k in range(PARTS)]
            for i, (kind, expected) in enumerate(zip(text, whole.outputs)):
                mine = [p[i].detach() for p in parts]
                where = f"{case.id} in {bound.factors[f].name}: output {i} is said to be {kind!r}"
                if kind == "cut":
                    layout = bound.output_layout(i, assignment)
                    assert layout is not None
                    assert all(close(x, expected[layout.slice(expected.shape, k)]) for k, x in enumerate(mine)), where
                else:
                    total = sum(mine[1:], mine[0])
                    assert close(total if kind == "sum" else total / PARTS, expected), where
    assert set(seen) == {"cut", "sum", "mean", "ratio", "mixed"}, seen
    assert seen["cut"] > 500 and min(seen.values()) > 5, seen


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_the_batch_is_found_again_after_views(shape: list[int], at: int, data: st.DataObject) -> None:
    """Wherever the rows of a batch of 4 come to lie when dims are merged, taken apart and exchanged, they are there."""
    at = min(at, len(shape))
    sizes = [*shape[:at], 4, *shape[at:]]
    x = torch.arange(4.0).view(4, *[1] * (len(sizes) - at - 1)).expand(sizes)  # each element is the number of its row
    carried = BatchDim(at)
    for _ in range(data.draw(st.integers(1, 4))):
        rank = x.dim()
        if rank > 1 and data.draw(st.booleans()):
            order = data.draw(st.permutations(range(rank)))
            made, target, args = x.permute(order), aten.permute.default, (order,)
        else:
            numel, dims = x.numel(), []
            while numel > 1:
                dims.append(data.draw(st.sampled_from([d for d in range(2, numel + 1) if numel % d == 0])))
                numel //= dims[-1]
            made, target, args = x.reshape(dims), aten.reshape.default, (dims,)
        value, out = (Value(n, tuple(t.shape), t.dtype) for n, t in (("x", x), ("y", made)))
        op = Op("op", target, (value, *args), {}, (value,), (out,))
        bound = bound_rule(op)
        place = batch_place(bound, bound.inputs[0], carried)
        if place is None or bound.factors[place[0]].size % (place[1] * PARTS) or not bound.factors[place[0]].splittable:
            return  # rows are taken apart
        found = image(bound, bound.outputs[0], place)
        assert found is not None
        x, carried = made, found
        inner = x.shape[carried.dim] // carried.outer
        half = x.movedim(carried.dim, 0).reshape(carried.outer, 2, inner // 2, -1)
        assert (half[:, 0] < 2).all() and (half[:, 1] >= 2).all(), (op.args, carried)

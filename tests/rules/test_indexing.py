"""Reading, writing, scanning and choosing along cut dims: planned, lowered and run, against one device."""

from __future__ import annotations

import pytest
import torch
from one_device import assert_as_one_device, parallel
from rule_reference import Case, Sliced, Whole
from small_networks import draw, labels
from torch import nn

import shardwright as sw
from shardwright.rules import bound_rule, find_rule

ROWS, COLUMNS = 8, 16
INDEX = labels(ROWS * 4, COLUMNS).view(ROWS, 4)
LINE = labels(ROWS, COLUMNS, seed=3)


class Marked(nn.Module):
    """One marked operator on a product of a parameter and the input."""

    def __init__(self, function, strategy: tuple) -> None:
        super().__init__()
        self.w = nn.Parameter(draw(ROWS, COLUMNS, seed=1))
        self.operator = sw.shard(function, strategy)

    def forward(self, x: torch.Tensor):
        return self.operator(self.w * x)


@pytest.mark.parametrize(
    ("function", "strategy"),
    [
        (lambda x: x.cumsum(1), ((2, 4),)),
        (lambda x: x.cumsum(0), ((8, 1),)),
        (lambda x: x.max(1), ((2, 4),)),
        (lambda x: x.min(0, keepdim=True), ((4, 2),)),
        (lambda x: x.argmax(1), ((1, 8),)),
        (lambda x: x.argmin(), ((8, 1),)),
        (lambda x: x.tril(1), ((4, 2),)),
        (lambda x: x.triu(-3), ((2, 4),)),
        (lambda x: x.sort(1), ((8, 1),)),
        (lambda x: x.topk(2, dim=0), ((1, 8),)),
        (lambda x: x.logcumsumexp(1), ((4, 1),)),
    ],
    ids=lambda v: str(v) if isinstance(v, tuple) else "",
)
def test_along_a_cut_dim(function, strategy: tuple) -> None:
    assert_as_one_device(Marked(function, strategy), (draw(ROWS, COLUMNS),))


class Indexed(nn.Module):
    """A marked operator on a parameter, an index that is fed, and a second parameter where there is one."""

    def __init__(self, function, strategy: tuple, second: torch.Tensor | None) -> None:
        super().__init__()
        self.w = nn.Parameter(draw(ROWS, COLUMNS, seed=1))
        self.second = nn.Parameter(second) if second is not None else None
        self.operator = sw.shard(function, strategy)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        more = () if self.second is None else (self.second,)
        return self.operator(torch.tanh(self.w), index, *more)


@pytest.mark.parametrize(
    ("function", "strategy", "index", "second"),
    [
        (lambda x, i: x.gather(1, i), ((2, 4), (2, 1)), INDEX, None),
        (lambda x, i: torch.take_along_dim(x, i, 1), ((1, 4), (1, 2)), INDEX, None),
        (lambda x, i: x[:, i], ((2, 4), (1,)), LINE, None),
        (lambda x, i: x[:, i], ((1, 4), (2,)), LINE - COLUMNS, None),
        (lambda x, i: x.index_select(1, i), ((2, 2), (2,)), LINE, None),
        (
            lambda x, i, s: x.scatter(1, i, s),
            ((2, 4), (2, 1), (2, 1)),
            torch.arange(32).view(ROWS, 4) % COLUMNS,
            draw(ROWS, 4),
        ),
        (lambda x, i, s: x.scatter_add(1, i, s), ((2, 2), (2, 2), (2, 2)), INDEX, draw(ROWS, 4)),
        (lambda x, i, s: x.index_add(1, i, s), ((1, 2), (4,), (1, 4)), LINE, draw(ROWS, ROWS)),
        (
            lambda x, i, s: x.index_put((i,), s, accumulate=True),
            ((4, 1), (2,), (2, 1)),
            LINE % ROWS,
            draw(ROWS, COLUMNS),
        ),
        (
            lambda x, i, s: x.index_copy(1, i, s),
            ((2, 4), (1,), (2, 1)),
            torch.randperm(COLUMNS)[:ROWS],
            draw(ROWS, ROWS),
        ),
    ],
    ids=lambda v: str(v) if isinstance(v, tuple) else "",
)
def test_by_index(function, strategy: tuple, index, second) -> None:
    model = assert_as_one_device(Indexed(function, strategy, second), (index,))
    assert model.plan.operator("operator").in_strategy == strategy


def test_written_by_index_is_cut_without_a_sum() -> None:
    """Written values stay where they are: no rank sends anything but its gradients' sums."""
    net = Indexed(lambda x, i, s: x.index_copy(1, i, s), ((1, 8), (1,), (1, 1)), draw(ROWS, ROWS))
    plan = sw.plan(net, (LINE,), devices=8)
    assert not [c for c in plan.collectives(2) if c.operator == "operator" and c.phase == "forward"]


def test_an_index_out_of_range_is_an_error() -> None:
    net = Indexed(lambda x, i: x.gather(1, i), ((1, 8), (1, 1)), None)
    with pytest.raises(RuntimeError, match="out of range: the dim has size 16"):
        parallel(net)(INDEX + COLUMNS)


def test_classes_of_one_hot_cut() -> None:
    """No input carries the classes: what takes them says how they are cut, and each rank makes its own."""
    whole = Whole(Case(2, torch.ops.aten.one_hot.default, (LINE, COLUMNS), {}))
    rule = find_rule(whole.op)
    bound = bound_rule(whole.op, rule)
    assignment = bound.follow({0: sw.Layout.from_cuts(8, (2, 4))}, of_outputs=True)
    sliced = Sliced(whole, rule, bound, assignment, keep_open=False)
    (made,) = (sliced.held[v.name] for v in sliced.results)
    assert [tuple(s.shape) for s in made.slices] == [(ROWS // 2, COLUMNS // 4)] * 8
    assert torch.equal(sliced.outputs()[0], torch.nn.functional.one_hot(LINE, COLUMNS))

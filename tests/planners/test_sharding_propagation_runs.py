"""sharding_propagation: what is inferred runs as one device does, and is not dearer than without marks that spread."""

from __future__ import annotations

from typing import Any

import gpt
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from language import Loss
from one_device import assert_as_one_device, close, parallel, squares
from propagation_networks import FIRST, MODE, Chain, planned
from small_networks import D, Marked, draw, labels
from test_parallel_random_networks import MATRICES, marked, networks
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.cluster import Cluster
from shardwright.cost.cost_model import CostModel
from shardwright.layout import Digit
from shardwright.planners.layout_demands import demands_of
from shardwright.rules import assignment_of, bound_rule


def seconds(plan: sw.Plan) -> float:
    return CostModel(Cluster.of(None, plan.devices), plan.devices).plan(plan).total


def marked_gpt(*names: str) -> gpt.GPT:
    """A GPT with tied embeddings, of which these operators are marked by columns in every block."""
    torch.manual_seed(3)
    net = gpt.GPT(vocabulary=32, length=16, layers=2, width=16, heads=4).to(D)
    for block in net.blocks:
        for name in names:
            sw.shard(block.get_submodule(name), ((2, 1, 1), (4, 1), (4,)))
    return net


class Convolutions(nn.Module):
    """A stem, of which the convolution is marked, a residual block, a head."""

    def __init__(self, stem: tuple) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False, dtype=D), nn.BatchNorm2d(8, dtype=D)
        self.inner, self.head = nn.Conv2d(8, 8, 3, padding=1, dtype=D), nn.Linear(8, 8, dtype=D)
        sw.shard(self.stem, stem)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.stem(x))), 2)
        return self.head(torch.relu(x + self.inner(x)).mean((2, 3)))


class Views(nn.Module):
    """Dims split, moved, merged and sliced between two products."""

    def __init__(self, first: Any = None, middle: Any = None, second: Any = None) -> None:
        super().__init__()
        self.w, self.w2 = nn.Parameter(draw(16, 32, seed=1)), nn.Parameter(draw(32, 8, seed=2))
        self.first, self.middle, self.second = (sw.Operator(f) for f in (torch.matmul, torch.softmax, torch.matmul))
        for operator, strategy in ((self.first, first), (self.middle, middle), (self.second, second)):
            if strategy is not None:
                operator.shard(strategy)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x, self.w).reshape(2, 8, 4, 8).transpose(1, 2)  # [2, 4, 8, 8]
        y = self.middle(y @ y.transpose(-1, -2), -1) @ y
        return self.second(y.transpose(1, 2).flatten(2).flatten(0, 1), self.w2)[:8]


class Ends(nn.Module):
    """Marked at its end alone: everything flows backwards, through a residual and two tied products."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(draw(16, 16, seed=1)), sw.shard(torch.matmul, ((2, 4), (4, 1)))
        self.w2 = nn.Parameter(draw(16, 8, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(x @ self.w)
        return self.head(x @ self.w.t(), self.w2)


TOKENS, NEXT = labels(8 * 16, 32, seed=1).reshape(8, 16), labels(8 * 16, 32, seed=2).reshape(8, 16)
MEGATRON = ("attention.query", "attention.key", "attention.value", "up")
RUNS = {
    "one of two products": (lambda: Chain(FIRST), (draw(16, 32),), None),
    "the last of two products": (lambda: Chain(second=FIRST), (draw(16, 32),), None),
    "in the middle": (lambda: Chain(relu=((2, 4),)), (draw(16, 32),), None),
    "a result": (lambda: Chain(out=((2, 4),)), (draw(16, 32),), None),
    "two at odds": (lambda: Chain(FIRST, None, ((1, 8), (8, 1))), (draw(16, 32),), None),
    "a biased layer left": (Marked, (draw(16, 8),), None),
    "products of a GPT": (lambda: marked_gpt(*MEGATRON), (TOKENS, NEXT), Loss()),
    "one product of a GPT": (lambda: marked_gpt("up"), (TOKENS, NEXT), Loss()),
    "a stem along the batch": (lambda: Convolutions(((8, 1, 1, 1), (1, 1, 1, 1))), (draw(8, 3, 8, 8),), None),
    "a stem by channels": (lambda: Convolutions(((2, 1, 1, 1), (4, 1, 1, 1))), (draw(8, 3, 8, 8),), None),
    "views after": (lambda: Views(first=((2, 1), (1, 4))), (draw(16, 16),), None),
    "views around": (lambda: Views(middle=((2, 4, 1, 1),)), (draw(16, 16),), None),
    "views before": (lambda: Views(second=((2, 4), (4, 1))), (draw(16, 16),), None),
    "at the end": (Ends, (draw(16, 16),), None),
}


@pytest.mark.parametrize("dataset", ["full_batch", "data_parallel"])
@pytest.mark.parametrize("name", RUNS)
def test_as_one_device(name: str, dataset: str) -> None:
    make, batch, loss = RUNS[name]
    model = assert_as_one_device(make(), batch, batch, loss_fn=loss, mode=MODE, dataset=dataset)
    assert any(d.cause == "propagated" for d in model.plan.decisions.values())


def test_dims_that_cuts_do_not_divide() -> None:
    plan = assert_as_one_device(Chain(((8, 1), (1, 1))), (draw(12, 32),), mode=MODE, uneven=True).plan
    relu = plan.operators[1].name
    assert plan.operators[0].in_strategy == ((8, 1), (1, 1))
    assert [d.assignment.digits for d in demands_of(plan.graph, plan.decisions, 8)[relu]] == [((Digit(8, 1),), ())]


def test_another_batch_finds_parameters_as_they_lie() -> None:
    model = assert_as_one_device(Chain(FIRST), (draw(16, 32),), (draw(8, 32, seed=3),), mode=MODE)
    assert model.plan.operator("matmul").in_strategy == FIRST


def test_optimizer_parallel() -> None:
    plan = planned(Chain(((8, 1), (1, 1))), torch.empty(16, 32, dtype=D), hsdp={"threshold": 0})
    assert plan.parameters["w"].layout.is_replicated and plan.parameters["w"].storage.cuts == (8, 1)


def test_one_device() -> None:
    plan = planned(Chain(((1, 1), (1, 1))), torch.empty(16, 32, dtype=D), devices=1)
    assert plan.sent == 0


def test_what_a_mark_keeps_whole_stays_whole_where_that_is_cheaper() -> None:
    """A sum over all devices leaves the same on each: cutting tiny work again takes longer than repeating it."""
    plan = planned(Chain(((1, 8), (8, 1))), torch.empty(16, 32, dtype=D), cluster="a100x8")
    relu = plan.decisions[plan.operators[1].name]
    assert plan.operators[1].in_strategy == ((1, 1),) and (relu.cause, relu.origin) == ("propagated", "matmul")


@pytest.mark.parametrize("dataset", ["full_batch", "data_parallel"])
@pytest.mark.parametrize("name", RUNS)
def test_not_dearer_than_semi_auto(name: str, dataset: str) -> None:
    make, batch, loss = RUNS[name]
    inputs, targets = (batch, None) if loss is None else (batch[:1], batch[1])
    ours, theirs = (
        seconds(sw.plan(make(), inputs, loss, targets, parallel_mode=mode, dataset_strategy=dataset))
        for mode in (MODE, "semi_auto")
    )
    assert ours <= theirs * (1 + 1e-12)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(networks(), st.sampled_from(sorted(MATRICES)), st.data())
def test_random_networks_with_two_marks_at_most(made, devices, data) -> None:
    net, shape = made
    x, y = (draw(*shape).requires_grad_() for _ in range(2))
    for operator in net.operators:
        operator.shard(())
    bounds = {op.name: bound_rule(op) for op in capture(net, (x,)).ops if op.mark is not None}
    chosen = data.draw(st.lists(st.sampled_from(range(len(net.operators))), min_size=1, max_size=2, unique=True))
    given_ = {}
    for i, operator in enumerate(net.operators):
        strategy, out = marked(data.draw, bounds[f"operators.{i}"], devices) if i in chosen else (None, None)
        operator.shard(strategy, out)
        if strategy is not None or out is not None:
            given_[f"operators.{i}"] = strategy
    model = parallel(net, devices=devices, mode=MODE)
    got, expected = model(x), net(y)
    close(got, expected, "outputs")
    if squares(expected).requires_grad:
        gradients = torch.autograd.grad(squares(expected), [y, *net.parameters()], allow_unused=True)
        close(torch.autograd.grad(squares(got), [x, *net.parameters()], allow_unused=True), gradients, "gradients")
    for name, strategy in given_.items():
        if strategy is not None:
            assert model.plan.decisions[name].assignment == assignment_of(bounds[name], strategy, devices)

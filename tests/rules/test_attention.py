"""Attention with dropout under ``random="fast"``: one operator of torch, its gradient, its seeds, its memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.rules.attention import attention_with_dropout, written_out_attention
from shardwright.rules.random_numbers.counter_rng import PLAIN
from shardwright.runtime.device_seed import trace_random_numbers
from shardwright.runtime.lowering import lower

D = torch.float64
BATCH, HEADS, QUERIES, KEYS, P = 8, 4, 16, 16, 0.25
ROWS = torch.randn(BATCH, HEADS, QUERIES, 8, dtype=D, generator=torch.Generator().manual_seed(0))

MARKS = {
    "whole": ((1, 1, 1, 1),) * 3,
    "batch and heads": ((2, 2, 1, 1),) * 3,
    "queries": ((2, 1, 2, 1), (2, 1, 1, 1), (2, 1, 1, 1)),
}
EXPANDED = {
    "keys": ((2, 1, 1, 1), (2, 1, 2, 1), (2, 1, 2, 1)),
    "width of the value": ((2, 1, 1, 1), (2, 1, 1, 1), (2, 1, 1, 2)),
    "width of the scores": ((2, 1, 1, 2), (2, 1, 1, 2), (2, 1, 1, 1)),
}


class Attention(nn.Module):
    """Attention with equal weights over an identity as the value: the result shows which weights were dropped."""

    def __init__(self, mark: Any, causal: bool = False, masked: bool = False) -> None:
        super().__init__()
        if masked:
            (rows, _, queries, _), *_ = mark
            mark = (*mark, (rows, 1, queries, 1))
        self.attend = F.scaled_dot_product_attention if mark is None else sw.shard(F.scaled_dot_product_attention, mark)
        self.value = nn.Parameter(torch.eye(KEYS, dtype=D).repeat(BATCH, HEADS, 1, 1))
        self.how: dict[str, Any] = {"is_causal": causal}
        if masked:
            seen = torch.rand(BATCH, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.7
            seen[..., 0] = True
            self.register_buffer("seen", seen)

    def forward(self, x: Tensor) -> Tensor:
        mask = {"attn_mask": self.seen} if hasattr(self, "seen") else {}
        return self.attend(x * 0, x * 0, self.value, dropout_p=P, **mask, **self.how)


def model_of(mark: Any, devices: int = 4, **given: Any) -> sw.AutoParallel:
    sw.init(devices=devices)
    settings = {"random": "fast"} | {
        name: given.pop(name) for name in ("random", "recompute", "compile") if name in given
    }
    net = Attention(mark, **given)
    return sw.AutoParallel(net, parallel_mode="semi_auto", **settings).dataset_strategy("full_batch")


def kinds(model: sw.AutoParallel) -> set[str]:
    """The operators that run on a rank."""
    return {i.op.kind for i in model.plan.program.instructions if hasattr(i, "op")}


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("how", ["plain", "causal", "masked"])
def test_one_operator_and_its_gradient(mark: str, how: str) -> None:
    """Each weight is dropped or raised by 1/(1-p), and the backward drops the same ones."""
    model = model_of(MARKS[mark], causal=how == "causal", masked=how == "masked")
    torch.manual_seed(4)
    out = model(ROWS)
    assert "attention_with_dropout" in kinds(model) and not {"matmul", "drop"} & kinds(model)
    net = model.net
    allowed = (
        torch.ones(QUERIES, KEYS).tril().bool()
        if how == "causal"
        else net.seen
        if how == "masked"
        else torch.tensor(True)
    )
    weights = allowed.expand(BATCH, HEADS, QUERIES, KEYS).to(D)
    raised = weights / weights.sum(-1, keepdim=True) / (1 - P)
    kept = out.detach() != 0
    torch.testing.assert_close(out.detach(), raised * kept)
    of_all = weights.bool()
    share, count = kept[of_all].double().mean().item(), int(of_all.sum())
    assert abs(share - (1 - P)) < 5 * (P * (1 - P) / count) ** 0.5
    upstream = torch.randn(out.shape, dtype=D, generator=torch.Generator().manual_seed(2))
    out.backward(upstream)
    torch.testing.assert_close(net.value.grad, (raised * kept).mT @ upstream)
    torch.manual_seed(4)
    assert torch.equal(model(ROWS), out) and not torch.equal(model(ROWS), out)


def test_slices_differ_and_replicas_agree() -> None:
    """Rows in 2 parts, heads in 2, on 8 devices: two replicas of each of four slices."""
    model = model_of(MARKS["batch and heads"], devices=8)
    model(ROWS)
    seen: list[list[Tensor]] = []
    body = list(model._programs.values())[-1].body
    body.record = lambda node, made: seen.append(made) if "attention" in str(node.target) else None
    model(ROWS)
    parts = [part != 0 for part in seen[-1]]
    same = {(i, j) for i, j in itertools.combinations(range(8), 2) if torch.equal(parts[i], parts[j])}
    assert same == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_a_random_network_has_the_gradient_of_its_own_masks() -> None:
    """Finite differences of a loss whose seed is set before each call."""
    sw.init(devices=4)
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 24, dtype=D)
            self.attend = sw.shard(F.scaled_dot_product_attention, MARKS["batch and heads"])

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).chunk(3, -1)
            return self.attend(q, k, v, dropout_p=P, is_causal=True).square().sum()

    net = Net()
    model = sw.AutoParallel(net, parallel_mode="semi_auto", random="fast").dataset_strategy("full_batch")

    def loss() -> Tensor:
        torch.manual_seed(7)
        return model(ROWS)

    loss().backward()
    weight, direction = net.project.weight, torch.randn(24, 8, dtype=D, generator=torch.Generator().manual_seed(3))
    slope, step = (weight.grad * direction).sum(), 1e-6
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            weight.add_(direction, alpha=sign * step)
            ends.append(loss())
            weight.sub_(direction, alpha=sign * step)
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-6)


def test_recomputed_attention_drops_the_same_weights() -> None:
    model = model_of(MARKS["batch and heads"], recompute=lambda op: True)
    out = model(ROWS)
    out.backward(torch.ones_like(out))
    assert any(op.recompute for op in model.plan.graph.ops)
    torch.testing.assert_close(model.net.value.grad, out.detach().mT @ torch.ones_like(out))


@pytest.mark.parametrize("mark", EXPANDED)
def test_cut_keys_and_widths_are_expanded(mark: str) -> None:
    model = model_of(EXPANDED[mark])
    out = model(ROWS)
    assert "attention_with_dropout" not in kinds(model) and 0 < (out == 0).double().mean() < 2 * P


def test_exact_numbers_are_expanded() -> None:
    model = model_of(MARKS["batch and heads"], random="exact")
    model(ROWS)
    assert "drop" in kinds(model) and not any(op.fast for op in model.plan.graph.ops)


class Grouped(nn.Module):
    """Attention with 8 query heads for 4 key heads, or as many as are marked."""

    def __init__(self, mark: Any) -> None:
        super().__init__()
        self.attend = sw.shard(F.scaled_dot_product_attention, mark)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v, dropout_p=P, enable_gqa=True)


@pytest.mark.parametrize(
    "mark, devices, replicas",
    [
        (((1, 1, 1, 1),) * 3, 2, 2),
        (((2, 1, 1, 1),) * 3, 4, 2),
        (((1, 4, 1, 1),) * 3, 4, 1),
        (((2, 2, 1, 1),) * 3, 4, 1),
        (((1, 8, 1, 1), (1, 4, 1, 1), (1, 4, 1, 1)), 8, 1),  # two ranks have one key head, and half of its queries each
        (((2, 2, 2, 1), (2, 2, 1, 1), (2, 2, 1, 1)), 8, 1),
    ],
)
def test_shared_key_heads_stay_inside(mark: Any, devices: int, replicas: int) -> None:
    """Grouped queries: each weight is dropped or raised, slices differ, and the gradient is of the same weights."""
    sw.init(devices=devices)
    model = sw.AutoParallel(Grouped(mark), parallel_mode="semi_auto", random="fast").dataset_strategy("full_batch")
    q = torch.zeros(2, 8, 16, 8, dtype=D)
    v = torch.eye(16, dtype=D).repeat(2, 4, 1, 1).requires_grad_()
    out = model(q, q[:, :4], v)
    assert "attention_with_dropout" in kinds(model) and not {"matmul", "drop"} & kinds(model)
    kept = out.detach() != 0
    torch.testing.assert_close(out.detach(), kept.to(D) / 16 / (1 - P))
    upstream = torch.randn(out.shape, dtype=D)
    out.backward(upstream)
    by_head = (out.detach().mT @ upstream).unflatten(1, (4, 2)).sum(2)
    torch.testing.assert_close(v.grad, by_head)
    body, seen = list(model._programs.values())[-1].body, []
    body.record = lambda node, made: seen.append(made) if "attention" in str(node.target) else None
    model(q, q[:, :4], v)
    parts = [tuple((part != 0).flatten().tolist()) for part in seen[-1]]
    assert len(set(parts)) * replicas == devices


def test_scores_are_not_in_memory() -> None:
    """The plan of an exact attention saves the scores of a rank; that of a fast one does not."""
    exact, fast = (model_of(MARKS["batch and heads"], random=random) for random in ("exact", "fast"))
    long = torch.zeros(BATCH, HEADS, QUERIES, 8, dtype=D, requires_grad=True)  # else no backward needs the scores
    held = []
    for model in (exact, fast):
        model(long)
        held.append(model.plan.memory(0)["activations"])
    scores = BATCH * HEADS * QUERIES * KEYS * 8 // 4
    assert held[0] - held[1] > scores


def test_the_generator_is_left_as_it_was() -> None:
    seed = torch.tensor([3, 0, 0, 0])
    torch.manual_seed(9)
    before = torch.get_rng_state()
    q = torch.ones(2, 2, 4, 4)
    made = [
        PLAIN[attention_with_dropout](seed, [], [], [2, 2, 4], 0, q, q, q, None, 0.5, False, None) for _ in range(2)
    ]
    assert torch.equal(*made) and torch.equal(torch.get_rng_state(), before) and torch.initial_seed() == 9


def test_micro_batches_draw_numbers_of_their_own() -> None:
    q = torch.zeros(2, 2, 8, 8)
    value = torch.eye(8).expand(2, 2, 8, 8)
    made = [
        PLAIN[attention_with_dropout](
            torch.tensor([3, 0, 0, k]), [], [], [2, 2, 8], 0, q, q, value, None, 0.5, False, None, [0, 2, 1]
        )
        for k in (0, 1)
    ]
    assert not torch.equal(*made)


def test_a_saved_plan_has_the_operator(tmp_path: Path) -> None:
    model = model_of(MARKS["queries"])
    model(ROWS)
    model.plan.save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert "attention_with_dropout" in {i.op.kind for i in loaded.program.instructions if hasattr(i, "op")}


# -- compiled ----------------------------------------------------------------------------------------------------------


class Seen:
    """A backend of torch.compile that runs what it is given, and keeps it."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs.append(graph)
        return graph.forward

    @property
    def operators(self) -> list[str]:
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]


def test_a_compiled_program_keeps_the_kernel() -> None:
    """One graph with torch's own attention; numbers follow from the seed, and the gradient is of the same weights."""
    backend = Seen()
    sw.init(devices=1)
    net = Attention(((1, 1, 1, 1),) * 3)
    model = sw.AutoParallel(net, parallel_mode="semi_auto", random="fast", compile=backend)
    torch.manual_seed(4)
    out = model(ROWS)
    state = torch.get_rng_state()
    assert len(backend.graphs) == 1 and sum("scaled_dot_product" in name for name in backend.operators) == 1
    assert not any("xor" in name or "matmul" in name for name in backend.operators)
    kept = out.detach() != 0
    torch.testing.assert_close(out.detach(), kept / KEYS / (1 - P), check_dtype=False)
    upstream = torch.randn(out.shape, dtype=D, generator=torch.Generator().manual_seed(2))
    out.backward(upstream)
    torch.testing.assert_close(net.value.grad, out.detach().mT @ upstream)
    torch.manual_seed(4)
    assert torch.equal(model(ROWS), out) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(model(ROWS), out) and len(backend.graphs) == 1


def test_the_generators_of_replicas_agree() -> None:
    """Rows in 2 parts, heads in 2, on 8 devices, a process each: two replicas of each of four slices."""
    model = model_of(MARKS["batch and heads"], devices=8)
    model(ROWS)
    cpu, seeds = torch.device("cpu"), []
    for rank in range(8):
        found = trace_random_numbers(lower(model.plan), cpu, rank)
        assert found.generator is not None and found.device is None
        of = [found.generator.of(torch.tensor([5, call, 0, 0])) for call in range(2)]
        assert len(set(of)) == 2
        seeds.append(of[0])
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 4


class Twice(nn.Module):
    """Two attentions that are cut in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            sw.shard(F.scaled_dot_product_attention, MARKS[mark]) for mark in ("batch and heads", "queries")
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x, x, x, dropout_p=P), x, x, dropout_p=P)


def test_attentions_that_are_cut_in_two_ways_are_written_out() -> None:
    sw.init(devices=4)
    model = sw.AutoParallel(Twice(), parallel_mode="semi_auto", random="fast").dataset_strategy("full_batch")
    model(ROWS)
    lowered = lower(model.plan)
    found = trace_random_numbers(lowered, torch.device("cpu"), 0)
    assert found.generator is None and [n.target for n in lowered.nodes].count(written_out_attention) == 2


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_written_out_attention(causal: bool, masked: bool) -> None:
    q, k = (torch.randn(2, heads, 16, 8, dtype=D) for heads in (4, 2))
    seen = torch.rand(16, 16) < 0.7 if masked else None
    if masked:
        seen[3] = False  # a row whose every key is masked
        causal = False
    value = torch.eye(16, dtype=D).repeat(2, 2, 1, 1)
    attend = F.scaled_dot_product_attention
    weights = attend(q, k, value, seen, 0.0, causal, enable_gqa=True)
    args = torch.tensor([5, 1, 1, 0]), [], [], [2, 4, 16], 3, q, k, value, seen
    made = [written_out_attention(*args, p, causal, None, (), True) for p in (0.0, P)]
    torch.testing.assert_close(made[0], weights.nan_to_num())
    torch.testing.assert_close(made[1], made[0] / (1 - P) * (made[1] != 0))
    share = (made[1] == 0)[made[0] != 0].double().mean()
    assert abs(share - P) < 0.1

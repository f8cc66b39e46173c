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
from shardwright.rules.attention import attention_with_dropout
from shardwright.rules.counter_rng import PLAIN

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
    assert "attention_with_dropout" in kinds(model) and not {"matmul", "mask"} & kinds(model)
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


def test_exact_numbers_and_compiled_programs_are_expanded() -> None:
    """A compiler fuses its own masks, which are exact under either setting."""
    exact, compiled = (
        model_of(MARKS["batch and heads"], random="exact"),
        model_of(MARKS["batch and heads"], compile=True),
    )
    exact(ROWS)
    with pytest.warns(UserWarning, match="operator by operator"):
        compiled(ROWS)
    for model in (exact, compiled):
        assert "mask" in kinds(model) and not any(op.fast for op in model.plan.graph.ops)


def test_shared_key_heads_are_expanded() -> None:
    sw.init(devices=2)

    class Grouped(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, dropout_p=P, enable_gqa=True)

    model = sw.AutoParallel(Grouped(), parallel_mode="semi_auto", random="fast")
    out = model(ROWS, ROWS[:, :2])
    assert out.shape == ROWS.shape and "attention_with_dropout" not in kinds(model)


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

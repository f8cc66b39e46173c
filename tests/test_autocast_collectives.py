"""Collectives under autocast: the same kinds and counts as without it, gradients of parameters summed in float32,
weights gathered after their cast."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import CollectiveLog, collective_log, rank_of_eight
from paths import ROOT
from pipeline_networks import Chain, setting
from ranks import run_ranks
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.runtime import pipeline_p2p

sys.path.append(str(ROOT / "examples"))
from gpt import GPT, mark

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = pytest.mark.filterwarnings("ignore")


class TokenLoss(nn.Module):
    """Cross entropy of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(logits.flatten(0, 1), target.flatten())


class Views(nn.Module):
    """Weights that are cast behind a view."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.packed = nn.Parameter(torch.randn(32, 64)), nn.Parameter(torch.randn(96, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed.chunk(3)
        hidden = x @ self.turned.t()
        return F.linear(hidden, q) + F.linear(hidden, k) * F.linear(hidden, v)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


def gpt(**given: Any) -> nn.Module:  # its embedding and its last product have one weight
    return GPT(**{"vocabulary": 64, "length": 16, "layers": 1, "width": 64, "heads": 8} | given)


TOKENS = (torch.randint(0, 64, (16, 16)), torch.randint(0, 64, (16, 16)))
ROWS = (torch.randn(16, 64), torch.randn(16, 32))
LEVELS = ("level1", "level2", "level3")

#: Name -> network, data, loss, marks, hsdp's level, the mode.
CASES: dict[str, tuple[Callable, tuple, Callable, bool, str | None, str]] = {
    **{
        f"{name} {level or 'data_parallel'}": (make, data, loss, False, level, "data_parallel")
        for name, make, data, loss in (("mlp", mlp, ROWS, nn.MSELoss), ("gpt", gpt, TOKENS, TokenLoss))
        for level in (None, *LEVELS)
    },
    "views": (Views, ROWS, nn.MSELoss, False, None, "data_parallel"),
    "views level1": (Views, ROWS, nn.MSELoss, False, "level1", "data_parallel"),
    "gpt dp2 x tp4": (gpt, TOKENS, TokenLoss, True, None, "semi_auto"),
    "gpt dp2 x tp4 level1": (gpt, TOKENS, TokenLoss, True, "level1", "semi_auto"),
    "gpt propagated": (gpt, TOKENS, TokenLoss, True, None, "sharding_propagation"),
}


def step(name: str, dtype: torch.dtype | None) -> tuple[CollectiveLog, CollectiveLog, Any]:
    """The collectives of a forward and of its backward, and the plan."""
    make, data, loss_fn, marks, level, mode = CASES[name]
    torch.manual_seed(0)
    net, criterion = make(), loss_fn()
    if marks:
        mark(net, criterion, 2, 4)
    model = sw.AutoParallel(net, criterion, parallel_mode=mode).dataset_strategy("full_batch")
    if level is not None:
        model.hsdp(threshold=0, optimizer_level=level)
    around = lambda: contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    with around():
        model(*data)
    with around(), collective_log() as forward:
        loss = model(*data)
    with collective_log() as backward:
        loss.backward()
    return forward, backward, model.plan


@pytest.mark.parametrize("name", CASES)
def test_as_without_autocast(name: str) -> None:
    with rank_of_eight(rank=0):
        (forward, backward, plan), plain = step(name, BF16), step(name, None)
        if "level" not in name:
            assert [s.bytes for s in step(name, FP16)[1].sent] == [s.bytes for s in backward.sent]
    assert forward.counts() == plain[0].counts()
    assert backward.counts()["all_reduce"] == plain[1].counts()["all_reduce"]
    assert backward.counts()["reduce_scatter"] == plain[1].counts()["reduce_scatter"]
    assert backward.counts()["all_gather"] <= plain[1].counts()["all_gather"]  # a weight used in both dtypes
    sums, plain_sums = ([s for s in log.sent if s.kind == "all_reduce"] for log in (backward, plain[1]))
    if name == "gpt propagated":  # the gradient of an activation is moved in the activation's dtype
        assert all(s.bytes * (1 if s.dtype == FP32 else 2) == p.bytes for s, p in zip(sums, plain_sums))
        assert [s.bytes for s in sums if s.dtype != FP32] == [16 * 16 * 64] * 3  # a rank's half of the batch
    else:
        assert {s.dtype for s in sums} <= {FP32}
    if "data_parallel" in name or ("level" in name and "tp4" not in name) or name == "views":
        sums = [s for s in backward.sent if s.kind in ("all_reduce", "reduce_scatter")]
        assert [(s.kind, s.dtype, s.bytes) for s in sums] == [
            (s.kind, s.dtype, s.bytes) for s in plain[1].sent if s.kind in ("all_reduce", "reduce_scatter")
        ]
    if name.startswith("mlp level"):
        assert {s.dtype for s in (*forward.sent, *backward.sent) if s.kind == "all_gather"} <= {BF16}
        assert 2 * forward.bytes("all_gather") == plain[0].bytes("all_gather")
        assert 2 * backward.bytes("all_gather") == plain[1].bytes("all_gather")
    if name in ("mlp data_parallel", "gpt level1", "gpt level3", "gpt dp2 x tp4", "views"):
        assert_the_plan_has_the_bytes(forward, backward, plan)


def assert_the_plan_has_the_bytes(forward: CollectiveLog, backward: CollectiveLog, plan: Any) -> None:
    """The plan's collectives have the bytes that were sent."""
    text = plan.collectives(0)
    before = [c for c in text if c.phase in ("forward", "storage") and not c.again]
    after = [c for c in text if c.phase in ("backward", "gradient") or c.again]
    for log, collectives in ((forward, before), (backward, after)):
        for kind in {s.kind for s in log.sent}:
            assert sum(c.bytes for c in collectives if c.op == kind) == log.bytes(kind), (kind, log.sent)


class Product(torch.autograd.Function):
    """A product with a transposed weight, as torchao's linear layer has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


sw.rule(Product, "m k, k n -> m n")


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(128, 64)), nn.Parameter(torch.randn(32, 128))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(torch.relu(Product.apply(x, self.first.t())), self.last.permute(1, 0))


@pytest.mark.parametrize("level", [None, "level1"])
def test_gradients_are_summed_behind_a_transpose(level: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "turned", (Turned, ROWS, nn.MSELoss, False, level, "data_parallel"))
    with rank_of_eight(rank=0):
        _, backward, _ = step("turned", None)
    assert backward.kinds() == ([("all_reduce", FP32)] if level is None else [("reduce_scatter", FP32)])


def test_sums_are_in_buckets_and_overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is issued before the backward is at its end, and waited for later."""
    wide = partial(gpt, layers=4, width=128)
    monkeypatch.setitem(CASES, "wide", (wide, TOKENS, TokenLoss, False, None, "data_parallel"))
    with rank_of_eight(rank=0):
        _, backward, _ = step("wide", BF16)
        _, plain, _ = step("wide", None)
    assert backward.kinds() == plain.kinds() and 1 < len(backward.sent) < 8
    assert backward.sent[0].issued < 0.8 * backward.operators
    assert all(s.waited is not None for s in backward.sent), [(s.bytes, s.issued, s.waited) for s in backward.sent]


def on_two_ranks(rank: int, world: int) -> None:
    """A gradient is the float32 sum of what one device computes from each half of the batch, to the bit."""
    x, y = ROWS
    for level in (None, *LEVELS):
        torch.manual_seed(0)
        net, parts = mlp(), len(x) // world
        ones = [copy.deepcopy(net) for _ in range(world)]
        mine = slice(rank * parts, (rank + 1) * parts)
        model = sw.AutoParallel(net, F.mse_loss, "data_parallel").dataset_strategy("data_parallel")
        if level is not None:
            model.hsdp(threshold=0, optimizer_level=level)
        with torch.autocast("cpu", BF16):
            model(x[mine], y[mine]).backward()
            for r, one in enumerate(ones):
                part = slice(r * parts, (r + 1) * parts)
                (F.mse_loss(one(x[part]), y[part]) / world).backward()
        for p, *terms in zip(net.parameters(), *(one.parameters() for one in ones)):
            assert p.grad.dtype == FP32
            assert torch.equal(p.grad.full_tensor(), sum(t.grad for t in terms))


def test_gradients_are_the_float32_sum_of_each_rank_s() -> None:
    run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bfloat16", "float16"])
def test_pipelines(schedule: str, dtype: torch.dtype) -> None:
    net, x, y = Chain(tied=True).float(), torch.randn(16, 16), torch.randn(16, 16)
    one = copy.deepcopy(net)
    sw.init(devices=4)
    model = sw.AutoParallel(net, nn.MSELoss()).dataset_strategy("full_batch").pipeline(**setting(schedule, 2))
    with torch.autocast("cpu", dtype):
        got, expected = model(x, y), F.mse_loss(one(x), y)
    got.backward(), expected.backward()
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    for p, q in zip(net.parameters(), one.parameters()):
        assert p.grad.dtype == FP32
        assert (p.grad - q.grad).norm() < 2e-2 * q.grad.norm()


def staged_step(schedule: str, level: str | None, cut: bool, dtype: torch.dtype | None) -> CollectiveLog:
    """The collectives of the second step of two stages of four ranks; `cut`: the layers are cut over two of them."""
    net, x, y = Chain(width=32).float(), torch.randn(32, 32), torch.randn(32, 32)
    for i, layer in enumerate(net.layers) if cut else ():
        sw.shard(layer, ((2, 1), (2, 1)) if i % 2 == 0 else ((2, 2), (1, 2)))
    mode = "semi_auto" if cut else "data_parallel"
    model = sw.AutoParallel(net, nn.MSELoss(), parallel_mode=mode).dataset_strategy("full_batch")
    model.pipeline(**setting(schedule, 2))
    if level is not None:
        model.hsdp(threshold=0, optimizer_level=level)
    for _ in range(2):
        with collective_log() as log:
            with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                loss = model(x, y)
            loss.backward()
    return log


#: Every two of a schedule, a level and a cut are together in one of these.
STAGED = [
    (("1f1b", "zero_bubble")[(i + cut) % 2], level, bool(cut))
    for i, level in enumerate((None, *LEVELS))
    for cut in (0, 1)
]


@pytest.mark.parametrize(("schedule", "level", "cut"), STAGED)
def test_stages_as_without_autocast(
    schedule: str, level: str | None, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_p2p, "_make_even", lambda runtime: None)
    with rank_of_eight(rank=3):
        log, plain = (staged_step(schedule, level, cut, dtype) for dtype in (BF16, None))
    kinds = ("all_reduce", "reduce_scatter")
    sums, plain_sums = ([(s.kind, s.dtype, s.bytes) for s in one.sent if s.kind in kinds] for one in (log, plain))
    activation = "reduce_scatter", FP32, 8 * 32 * 4  # rows of a rank in a micro-batch, columns, bytes
    assert plain_sums.count(activation) == 2 * cut  # micro-batches; it is summed in its own dtype
    narrow = "reduce_scatter", BF16, 8 * 32 * 2
    assert sums == [narrow if s == activation else s for s in plain_sums]
    assert {dtype for kind, dtype, nbytes in sums if (kind, dtype, nbytes) != narrow} == {FP32}
    assert log.counts()["all_gather"] == plain.counts()["all_gather"]


def test_a_cast_that_another_reader_shares_or_that_widens_stays() -> None:
    """A parameter is captured in the narrow dtype only where every reader reads it so."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.narrow, self.wide = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
            self.low = nn.Parameter(torch.randn(8, 8, dtype=BF16))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.both.to(BF16)).float() @ self.both + F.linear(x, self.narrow.to(BF16)).float()
            return y @ self.wide.double().float() + F.linear(x.float(), self.low.float())

    graph = capture(Net(), (torch.randn(4, 8, dtype=BF16),))
    assert {name for name, value in graph.parameters.items() if value.master is not None} == {"narrow"}
    narrow = graph.parameters["narrow"]
    assert (narrow.dtype, narrow.stored.dtype, narrow.sums) == (BF16, FP32, FP32)

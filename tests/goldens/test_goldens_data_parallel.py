"""The goldens of data_parallel and hybrid_parallel: which ranks a gradient sum spans, and how much is sent."""

from __future__ import annotations

import json

import pytest
import torch
from golden_reading import SHARED, sent_by_golden
from torch import Tensor, nn

import shardwright as sw

FOLDER = SHARED / "goldens" / "models"


def golden(name: str, rank: int) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())["ranks"][str(rank)]


def summed(collectives: list[dict], kind: str) -> list[tuple[int, ...]]:
    return sorted(tuple(c["in"][0]) for c in collectives if c["kind"] == kind)


class TwoProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.w1) @ self.w2


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
def test_data_parallel(rank: int, inside: bool, figures) -> None:
    expected = golden("data_parallel", rank)
    devices, ((x, _), (y, _)) = expected["config"]["device_num"], expected["inputs"]
    plan = sw.plan(
        TwoProducts(),
        (torch.randn(devices * x[0], *x[1:]),),
        nn.MSELoss() if inside else None,
        torch.randn(devices * y[0], *y[1:]) if inside else None,
        parallel_mode="data_parallel",
        devices=devices,
        dataset_strategy="data_parallel",
    )
    sums = [c for c in plan.collectives(rank) if c.phase == "gradient"]
    assert {(c.op, c.ranks) for c in sums} == {("all_reduce", tuple(range(devices)))}
    assert sorted(c.shape for c in sums) == summed(expected["collectives"], "allreduce")
    others = [c for c in plan.collectives(rank) if c.phase != "gradient"]
    assert [(c.op, c.shape, c.phase) for c in others] == ([("all_reduce", (), "forward")] if inside else [])  # the loss
    ours, theirs = sum(c.sent for c in sums), sum(sent_by_golden(c, devices) for c in expected["collectives"])
    assert ours <= theirs
    if not inside:
        figures("data_parallel", ours, theirs)
    assert plan.parameters["w1"].layout.is_replicated and plan.parameters["w2"].layout.is_replicated


class Hybrid(nn.Module):
    """The product of the tutorial beside one of an ordinary parameter, which the rank's own part of the batch meets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = sw.layerwise_parallel(nn.Parameter(torch.randn(512, 64)))
        self.other = nn.Parameter(torch.randn(512, 16))

    def forward(self, x: Tensor) -> Tensor:
        return sw.ops.all_reduce((x @ self.weight).sum(-1)) + (x @ self.other).sum(-1)


@pytest.mark.parametrize("dataset", ["full_batch", "data_parallel"])
def test_hybrid_layerwise(dataset: str, figures) -> None:
    expected = golden("hybrid_layerwise", 0)
    devices, (shape, _) = expected["config"]["device_num"], expected["inputs"][0]
    whole = torch.randn(shape if dataset == "full_batch" else (devices * shape[0], *shape[1:]))
    plan = sw.plan(Hybrid(), (whole,), parallel_mode="hybrid_parallel", devices=devices, dataset_strategy=dataset)
    seen = [(c.op, c.ranks, c.shape, c.phase) for c in plan.collectives(1)]
    assert sorted(seen) == [
        ("all_reduce", (0, 1), (32,), "backward"),
        ("all_reduce", (0, 1), (32,), "forward"),
        ("all_reduce", (0, 1), (512, 16), "gradient"),
    ]
    assert summed(expected["collectives"], "allreduce") == [(512, 16)], "that of the ordinary parameter alone"
    assert summed(expected["collectives"], "gradallreduce") == [(32,), (32,)]
    ours, theirs = plan.sent, sum(sent_by_golden(c, devices) for c in expected["collectives"])
    assert ours <= theirs
    figures("hybrid_parallel", ours, theirs)

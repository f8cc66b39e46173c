"""The four tutorial scripts: the same losses on one device, on eight in one process, and in eight processes."""

from __future__ import annotations

import contextlib
import io
from functools import lru_cache

import layout_functional
import layout_objects
import operator_functional
import operator_objects
import pytest
import torch
from data import digits
from ranks import run_ranks
from torch import nn

SCRIPTS = {m.__name__: m for m in (operator_objects, operator_functional, layout_objects, layout_functional)}
STEPS, TOLERANCE = 50, 1e-6


@lru_cache
def one_device(name: str) -> list[float]:
    """Plain PyTorch: a marked operator that nothing captures is just its function."""
    torch.manual_seed(0)
    net = SCRIPTS[name].Network(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    losses = []
    for image, label in digits(32, dtype=torch.float64, limit=STEPS):
        loss = nn.CrossEntropyLoss()(net(image), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def as_the_user_runs_it(name: str) -> tuple[list[float], str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        losses = SCRIPTS[name].main(["--steps", str(STEPS), "--dtype", "float64"])
    return losses, printed.getvalue()


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) == STEPS
    return max(abs(a - b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("name", SCRIPTS)
def test_eight_devices_in_one_process(name: str) -> None:
    losses, printed = as_the_user_runs_it(name)
    assert largest_difference(losses, one_device(name)) < TOLERANCE
    assert losses[-1] < losses[0]
    lines = printed.splitlines()
    assert [line.rsplit(" ", 1)[0] for line in lines] == [f"epoch: 0, step: {s}, loss is" for s in range(0, STEPS, 10)]
    assert lines[0].startswith("epoch: 0, step: 0, loss is 2.30")


def all_four(rank: int, world: int) -> dict[str, list[float]]:
    return {name: as_the_user_runs_it(name)[0] for name in SCRIPTS}


@pytest.mark.long
def test_eight_processes() -> None:
    ranks = run_ranks(all_four, 8)
    for name in SCRIPTS:
        assert all(rank[name] == ranks[0][name] for rank in ranks), "the loss is the same on every rank, to the bit"
        assert largest_difference(ranks[0][name], one_device(name)) < TOLERANCE

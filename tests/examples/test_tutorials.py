"""The tutorial scripts: the same losses on one device, on eight in one process, and in eight processes."""

from __future__ import annotations

import contextlib
import io
from functools import lru_cache
from typing import Any

import layout_functional
import layout_objects
import operator_functional
import operator_objects
import pytest
import torch
import train_step
from data import digits
from ranks import run_ranks
from torch import nn

SCRIPTS = {
    m.__name__: m for m in (operator_objects, operator_functional, layout_objects, layout_functional, train_step)
}
STEPS, TOLERANCE = 50, 1e-6
#: Of eight processes. What a rank sends in a step, it sends in each: 20 steps show a wrong one as 50 do.
STEPS_OF_PROCESSES = 20


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


def as_the_user_runs_it(name: str, steps: int = STEPS, **given: Any) -> tuple[list[float], str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        losses = SCRIPTS[name].main(["--steps", str(steps), "--dtype", "float64"], **given)
    return losses, printed.getvalue()


def largest_difference(ours: list[float], theirs: list[float], steps: int = STEPS) -> float:
    assert len(ours) == steps
    return max(abs(a - b) for a, b in zip(ours, theirs[:steps], strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_eight_devices_in_one_process(name: str) -> None:
    losses, printed = as_the_user_runs_it(name)
    assert largest_difference(losses, one_device(name)) < TOLERANCE
    assert losses[-1] < losses[0]
    lines = printed.splitlines()
    assert [line.rsplit(" ", 1)[0] for line in lines] == [f"epoch: 0, step: {s}, loss is" for s in range(0, STEPS, 10)]
    assert lines[0].startswith("epoch: 0, step: 0, loss is 2.30")


def test_a_step_in_pytorchs_own_words() -> None:
    losses, _ = as_the_user_runs_it("train_step", form=train_step.plain_step)
    assert largest_difference(losses, one_device("train_step")) < TOLERANCE


def all_of_them(rank: int, world: int) -> dict[str, list[float]]:
    losses = {name: as_the_user_runs_it(name, STEPS_OF_PROCESSES)[0] for name in SCRIPTS}
    return losses | {"plain": as_the_user_runs_it("train_step", STEPS_OF_PROCESSES, form=train_step.plain_step)[0]}


@pytest.mark.long
def test_eight_processes() -> None:
    ranks = run_ranks(all_of_them, 8)
    for name in SCRIPTS:
        assert all(rank[name] == ranks[0][name] for rank in ranks), "the loss is the same on every rank, to the bit"
        assert largest_difference(ranks[0][name], one_device(name), STEPS_OF_PROCESSES) < TOLERANCE
    means = [sum(losses) / 8 for losses in zip(*(rank["plain"] for rank in ranks))]
    assert largest_difference(means, one_device("train_step"), STEPS_OF_PROCESSES) < TOLERANCE

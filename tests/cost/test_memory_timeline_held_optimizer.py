"""`explain` and `plan.memory` count the optimizer that holds the parameters, or say that they count as for Adam."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_networks import draw, labels
from torch import nn

import shardwright as sw
from shardwright.cost.memory_timeline import OptimizerState, optimizer_bytes, optimizer_state

X, T = draw(16, 8), labels(16)
LOSS = nn.CrossEntropyLoss()

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD with momentum": ("SGD", {"momentum": 0.9}),
    "Adam": ("Adam", {}),
    "Adam with amsgrad": ("Adam", {"amsgrad": True}),
    "RMSprop": ("RMSprop", {}),
    "RMSprop, centered, with momentum": ("RMSprop", {"centered": True, "momentum": 0.5}),
    **{name: (name, {}) for name in ("AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "Rprop", "ASGD")},
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()


def wrapped(made: nn.Module, **given: Any) -> sw.AutoParallel:
    sw.init(devices=4)
    return sw.AutoParallel(made, LOSS, **given).dataset_strategy("full_batch").hsdp(threshold=0)


def text(model: sw.AutoParallel, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    model.explain()
    out = capsys.readouterr().out
    return out[out.index("on a device: ") :].partition("\n")[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_before_the_first_step_is_that_after_it(name: str) -> None:
    kind, settings = OPTIMIZERS[name]
    made = net()
    optimizer = getattr(torch.optim, kind)(made.parameters(), **settings)
    before = optimizer_state([optimizer], made.parameters())
    LOSS(made(X), T).backward()
    optimizer.step()
    assert before == optimizer_state([optimizer], made.parameters())
    kept = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor) and x.dim()]
    elements = sum(p.numel() for p in made.parameters())
    assert before == OptimizerState(kind, sum(x.numel() * x.element_size() for x in kept) / elements)


def test_parameters_of_several_optimizers_and_of_none() -> None:
    one, other = nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 12, bias=False).double()
    sgd, adam = torch.optim.SGD(one.parameters()), torch.optim.AdamW(other.parameters())
    both = [*one.parameters(), *other.parameters()]
    assert optimizer_state([sgd, adam], both) == OptimizerState("SGD and AdamW", 16 * 48 / 64)
    assert optimizer_state([adam], both) == OptimizerState("AdamW", 16 * 48 / 64)
    assert optimizer_state([sgd], other.parameters()) is None
    assert optimizer_bytes(None) == optimizer_bytes("adam") == 8.0


class Own(torch.optim.Optimizer):
    """One of a user, which keeps three numbers of half precision an element from its first step on."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["kept"] = torch.zeros(3, *p.shape, dtype=torch.float16)


def test_an_optimizer_of_the_user_is_known_from_its_first_step_on() -> None:
    made = net()
    optimizer = Own(made.parameters(), {})
    assert optimizer_state([optimizer], made.parameters()) == OptimizerState("Own", 8.0)
    optimizer.step()
    assert optimizer_state([optimizer], made.parameters()) == OptimizerState("Own", 6.0)


def test_the_optimizer_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    made = net()
    model = wrapped(made)
    model(X, T)
    held = model.plan.memory(0)
    assert held["optimizer"] == held["parameters"] and "optimizer 560 B (as for Adam)" in text(model, capsys)
    assert held["parameters"] == 560
    sgd = torch.optim.SGD(made.parameters(), lr=0.1)
    assert model.plan.memory(0)["optimizer"] == 0 and "optimizer 0 B (SGD)" in text(model, capsys)
    del sgd
    gc.collect()
    adam = torch.optim.AdamW(made.parameters())
    for _ in range(2):  # before its first step, and after it
        assert model.plan.memory(0)["optimizer"] == 2 * 560
        assert "optimizer 1.1 KiB (AdamW)" in text(model, capsys)
        model(X, T).backward()
        adam.step()


def test_a_given_optimizer_is_the_one_that_counts(capsys: pytest.CaptureFixture[str]) -> None:
    made = net()
    optimizer = torch.optim.SGD(made.parameters())
    model = wrapped(made, optimizer="momentum")
    model(X, T)
    assert model.plan.memory(0)["optimizer"] == 560 // 2 and "(momentum)" in text(model, capsys)
    model = wrapped(net(), optimizer=3)
    model(X, T)
    assert "(3 B an element)" in text(model, capsys) and optimizer.param_groups


def test_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    made = net()
    model = wrapped(made).pipeline(stages=2, micro_batches=4, stage_config={"0": 0, "2": 1})
    model(X, T)
    model.explain()
    assert capsys.readouterr().out.count("(as for Adam)") == 2
    optimizer = torch.optim.SGD(made.parameters(), momentum=0.5)
    model.explain()
    assert capsys.readouterr().out.count("(SGD)") == 2
    assert all(model.plan.memory(r)["optimizer"] == model.plan.memory(r)["parameters"] for r in range(4))
    assert optimizer.param_groups


def test_a_plan_without_a_model_and_its_file(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwright.report.tables import explain, summary

    plan = sw.plan(net(), X, LOSS, T, devices=4)
    for one in (plan, (plan.save(tmp_path / "plan.json"), sw.Plan.load(tmp_path / "plan.json"))[1]):
        explain(one), summary(one)
        assert capsys.readouterr().out.count("(as for Adam)") == 2 and one.optimizer is None
    given = sw.plan(net(), X, LOSS, T, devices=4, optimizer="sgd")
    given.save(tmp_path / "plan.json")
    explain(sw.Plan.load(tmp_path / "plan.json"))
    assert "(sgd)" in capsys.readouterr().out


def on_ranks(rank: int, world: int) -> None:
    sw.init()
    torch.manual_seed(0)
    made = net()
    model = sw.AutoParallel(made, LOSS).dataset_strategy("full_batch").hsdp(threshold=0)
    optimizer = torch.optim.AdamW(made.parameters())
    for _ in range(2):
        model(X, T).backward()
        assert model.plan.counted_optimizer == OptimizerState("AdamW", 16.0)
        optimizer.step()
        kept = [x.to_local() for s in optimizer.state.values() for x in s.values() if x.dim()]
        assert model.plan.memory(rank)["optimizer"] == sum(x.numel() * x.element_size() for x in kept)


def test_on_processes() -> None:
    run_ranks(on_ranks, 2)

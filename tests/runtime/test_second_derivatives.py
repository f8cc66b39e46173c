"""Gradients that are differentiated again (``create_graph=True``), beside one device; and where that is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_device import CLOSE, close, parallel
from pipeline_networks import Chain, batches, staged
from ranks import all_passed, run_ranks, run_scenarios
from small_networks import D, draw
from test_scheduled_collectives import BRANCHES, Towers, as_a_library, branches, towers
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw

X = draw(8, 8)


class Net(nn.Module):
    """Two layers around ``f(self, h)``."""

    def __init__(self, f: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16, dtype=D), nn.Linear(16, 8, dtype=D)
        self.layer_norm, self.group_norm = nn.LayerNorm(16, dtype=D), nn.GroupNorm(2, 16, dtype=D)
        self.batch_norm, self.conv = nn.BatchNorm1d(16, dtype=D), nn.Conv2d(2, 4, 3, padding=1, dtype=D)
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, self.first(x))


FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "two layers": lambda m, h: m.second(torch.tanh(h)),
    "softmax": lambda m, h: m.second(F.softmax(h, -1)),
    "logsumexp": lambda m, h: torch.logsumexp(h, 1),
    "cross entropy": lambda m, h: F.cross_entropy(h, torch.arange(8), reduction="none"),
    "maximum": lambda m, h: h.amax(1, keepdim=True) * h,
    "norm": lambda m, h: h.norm(dim=1),
    "layer norm": lambda m, h: m.second(torch.tanh(m.layer_norm(h))),
    "group norm": lambda m, h: m.second(torch.tanh(m.group_norm(h))),
    "batch norm": lambda m, h: m.second(torch.tanh(m.batch_norm(h))),
    "convolution": lambda m, h: torch.tanh(m.conv(h.view(1, 2, 8, 8))),
    "product of a value with itself": lambda m, h: h @ h.mT,
    "mean over rows": lambda m, h: h.tanh().mean(0),
    "loss": lambda m, h: m.second(torch.tanh(h)).square().mean(),
}


def of_inputs(call: Callable[[Tensor], Tensor], net: nn.Module) -> list[Tensor]:
    """A penalty on the gradient of the inputs, with further terms of the output."""
    x = X.clone().requires_grad_()
    out = call(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (out.square().mean() + slope.square().sum()).backward()
    return [x.grad]


def of_inputs_alone(call: Callable[[Tensor], Tensor], net: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(x).tanh().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return [x.grad]


def third(call: Callable[[Tensor], Tensor], net: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad((slope**3).sum(), x, create_graph=True)
    curve.square().mean().backward()
    return [x.grad]


def of_parameters(call: Callable[[Tensor], Tensor], net: nn.Module) -> list[Tensor]:
    """A penalty on the gradients of the parameters."""
    loss = call(X).square().mean()
    gradients = torch.autograd.grad(loss, [*net.parameters()], create_graph=True, allow_unused=True)
    (loss + sum(g.square().sum() for g in gradients if g is not None)).backward()
    return []


def in_the_backward(call: Callable[[Tensor], Tensor], net: nn.Module) -> list[Tensor]:
    loss = call(X).square().mean()
    loss.backward(create_graph=True)
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    (loss + sum(g.square().sum() for g in gradients)).backward()
    return []


PENALTIES = {f.__name__: f for f in (of_inputs, of_inputs_alone, of_parameters, in_the_backward, third)}
MARKS: dict[str, Any] = {
    "batch": ((4, 1), (1, 1), (1,)),
    "columns": ((1, 1), (4, 1), (4,)),
    "rows": ((1, 4), (1, 4), (1,)),
    "all": ((2, 2), (1, 2), (1,)),
}


def compared(net: nn.Module, model: sw.AutoParallel, *penalties: str) -> None:
    """Each penalty in turn, on one model and on its copy on one device."""
    one = copy.deepcopy(net)
    for penalty in penalties:
        net.zero_grad(), one.zero_grad()
        ours, theirs = PENALTIES[penalty](model, net), PENALTIES[penalty](one, one)
        for p, q in zip(net.parameters(), one.parameters()):
            mine = None if p.grad is None else p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            ours.append(torch.zeros_like(q) if mine is None else mine)
            theirs.append(torch.zeros_like(q) if q.grad is None else q.grad)
        scale = max(float(x.abs().max()) for x in theirs)
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(
                a, b, rtol=CLOSE["rtol"], atol=CLOSE["rtol"] * scale, msg=lambda text, p=penalty: f"{p}: {text}"
            )


#: Functions with all penalties; the others have two. (torch's own third derivative of a batch norm is not that of its
#: formula.)
FURTHER = ("two layers", "layer norm", "product of a value with itself")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_one_process(name: str) -> None:
    for mark in MARKS.values():
        net = Net(FUNCTIONS[name])
        sw.shard(net.first, mark)
        compared(net, parallel(net, devices=4), *(PENALTIES if name in FURTHER else ("of_inputs", "of_parameters")))


@pytest.mark.parametrize("how", ["searched", "data_parallel", "hsdp", "recomputed"])
def test_in_other_ways(how: str) -> None:
    net = Net(FUNCTIONS["layer norm"])
    options: dict[str, Any] = {}
    if how == "searched":
        options = {"mode": "dynamic_programming", "cluster": sw.Cluster.of("h100x8", 4).with_free_links()}
    elif how == "data_parallel":
        options = {"mode": how}
    elif how == "recomputed":
        sw.recompute(net.layer_norm), sw.recompute(net.first)
    model = parallel(net, devices=4, **options)
    if how == "hsdp":
        model.hsdp(threshold=0, optimizer_level="level3")
    compared(net, model, *PENALTIES)


def on_ranks(name: str, mark: Any, *penalties: str) -> Callable[[int, int], None]:
    def run(rank: int, world: int) -> None:
        sw.init()
        net = Net(FUNCTIONS[name])
        if mark is not None:
            sw.shard(net.first, mark)
        compared(net, sw.AutoParallel(net).dataset_strategy("full_batch"), *penalties)

    return run


def refused(level: str | None) -> Callable[[int, int], None]:
    """Gradients of parameters are differentiated once; the next step is as ever."""

    def run(rank: int, world: int) -> None:
        sw.init()
        net = Net(FUNCTIONS["two layers"])
        sw.shard(net.first, ((1, 1), (2, 1), (2,)))
        model = sw.AutoParallel(net).dataset_strategy("full_batch")
        if level is not None:
            model.hsdp(threshold=0, optimizer_level=level)
        for penalty in (of_parameters, in_the_backward):
            with pytest.raises(sw.SettingError, match="create_graph=True of a backward in several processes") as raised:
                penalty(model, net)
            assert "gradients of inputs" in raised.value.legal
            net.zero_grad()
            model(X).square().mean().backward()
            assert all(p.grad is None or not p.grad.requires_grad for p in net.parameters())
            net.zero_grad()

    return run


def refused_if_compiled(rank: int, world: int) -> None:
    sw.init()
    net = Net(FUNCTIONS["two layers"])
    sw.shard(net.first, ((1, 1), (2, 1), (2,)))
    model = sw.AutoParallel(net, compile="aot_eager").dataset_strategy("full_batch")
    for penalty in (of_inputs, in_the_backward):
        with pytest.raises(sw.SettingError, match="create_graph=True of a backward of a compiled program") as raised:
            penalty(model, net)
        assert raised.value.legal == "compile=False"
    net.zero_grad()
    model(X).square().mean().backward()
    assert net.first.weight.grad is not None and not net.first.weight.grad.requires_grad


def refused_on_a_library(level: str) -> Callable[[int, int], None]:
    """Weights that one message gathers: the gradient of each is differentiated once; those of inputs as ever."""

    def run(rank: int, world: int) -> None:
        as_a_library()
        net = Net(FUNCTIONS["two layers"])
        model = sw.AutoParallel(net).dataset_strategy("full_batch").hsdp(threshold=0, optimizer_level=level)
        compared(net, model, "of_inputs", "of_inputs_alone", "third")
        schedule = model.plan.schedule
        assert any(len(message.members) > 1 for _, message in schedule.of("gather"))
        with pytest.raises(sw.SettingError) as raised:
            in_the_backward(model, net)
        failure = raised.value
        assert failure.message.startswith("create_graph=True of a backward in several processes: the gradient of the ")
        assert any(f"parameter {name!r} is a sum over ranks" in failure.message for name, _ in net.named_parameters())
        assert "gradients of inputs" in failure.legal
        net.zero_grad()
        model(X).square().mean().backward()
        assert all(p.grad is None or not p.grad.requires_grad for p in net.parameters())

    return run


def beside_operators(kind: str) -> Callable[[int, int], None]:
    """A redistribution in two parts: with create_graph=True its gradient is sent in one piece."""

    def run(rank: int, world: int) -> None:
        as_a_library()
        one, net = Towers(), Towers()
        model, found = towers(kind, world, net), []
        for call in (lambda x, y, target: F.mse_loss(one(x, y), target), model):
            for again in (False, True):  # an ordinary backward, and one that is differentiated twice more
                x, y, target = branches()
                loss = call(x, y, target)
                slopes = torch.autograd.grad(loss, (x, y), create_graph=True)
                penalty = sum((g**3).sum() for g in slopes)
                if again:
                    (curve,) = torch.autograd.grad(penalty, x, create_graph=True)
                    penalty = penalty + curve.square().sum()
                (loss + penalty).backward()
                found += [x.grad, y.grad]
            call(*branches()).backward()
        assert model.plan.schedule.splits
        for a, b in zip(found[:4], found[4:], strict=True):
            close(b, a)
        for p, q in zip(one.parameters(), net.parameters()):
            close(q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad, p.grad)

    return run


@pytest.mark.long
def test_in_processes() -> None:
    marks = {
        "none": None,
        "batch": ((2, 1), (1, 1), (1,)),
        "columns": ((1, 1), (2, 1), (2,)),
        "rows": ((1, 2), (1, 2), (1,)),
    }
    scenarios = {
        f"{name}, {mark}": on_ranks(
            name, marks[mark], "of_inputs", "of_inputs_alone", *(("third",) if name != "batch norm" else ())
        )
        for name in ("two layers", "softmax", "layer norm", "maximum", "loss", "batch norm")
        for mark in marks
    }
    scenarios |= {f"refused, {level}": refused(level) for level in (None, "level1", "level3")}
    scenarios["refused, compiled"] = refused_if_compiled
    # The imports of a compiler, and of its partitioner: once here, and not in every rank.
    torch.compile(torch.relu, backend="aot_eager")(torch.ones(1, requires_grad=True))
    all_passed(run_ranks(run_scenarios, 2, scenarios))


@pytest.mark.long
def test_on_a_library() -> None:
    scenarios = {level: refused_on_a_library(level) for level in ("level1", "level2", "level3")}
    scenarios |= {kind: beside_operators(kind) for kind in BRANCHES}
    all_passed(run_ranks(run_scenarios, 2, scenarios))


def test_of_a_pipeline() -> None:
    ((x, t),) = batches(1)
    model = parallel(Chain(), nn.MSELoss(), devices=4).pipeline(stages=2, micro_batches=4, stage_config=staged(2))
    x.requires_grad_()
    loss = model(x, t)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(sw.SettingError, match="second derivative .*the loss of a pipeline") as raised:
        slope.square().sum().backward()
    assert "without a pipeline" in raised.value.legal


def test_an_ordinary_backward_has_no_graph() -> None:
    net = Net(FUNCTIONS["two layers"])
    model = parallel(net, devices=4)
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    assert not x.grad.requires_grad and not any(p.grad is not None and p.grad.requires_grad for p in net.parameters())
    close(x.grad, torch.autograd.grad(net(x).sum(), x)[0])

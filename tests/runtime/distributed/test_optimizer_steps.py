"""Each optimizer of torch, with each of its ways to step, on parameters of unlike meshes: as on one device."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import forked_python
import pytest
import torch
from fake_accelerator_lines import needs_accelerators_in_python
from one_device import close
from paths import SUPPORT
from pipeline_networks import Chain, batches
from ranks import PATIENCE, run_ranks, run_scenarios
from small_networks import D, draw
from test_pipeline_p2p import TWO, check as pipeline_check
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import shardwright as sw
from shardwright.runtime.distributed.dtensors import gathered
from shardwright.runtime.distributed.sliced_tensors import SlicedTensor
from shardwright.torch_private import TorchDispatchMode, local_tensor

X, Y = draw(8, 6), draw(8, 5, seed=1)
LOSS = nn.MSELoss()


class Mixed(nn.Module):
    """Matrices, vectors and a number, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.norm = nn.Linear(6, 8, dtype=D), nn.LayerNorm(8, dtype=D)
        self.b, self.c = nn.Linear(8, 12, dtype=D), nn.Linear(12, 5, dtype=D)
        self.scale = nn.Parameter(torch.full((), 1.5, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(self.norm(torch.tanh(self.a(x)))))) * self.scale


def wrapped(net: Mixed, kind: str) -> sw.AutoParallel:
    """Wrap a model on four ranks: by marks with three meshes, by marks and hsdp, or whole on each rank."""
    sw.init(watch=False)
    mode = "data_parallel" if kind == "whole" else "semi_auto"
    if kind == "marks":
        sw.shard(net.a, ((2, 1), (2, 1))), sw.shard(net.b, ((1, 1), (4, 1))), sw.shard(net.c, ((1, 4), (1, 4)))
    if kind == "hsdp":
        sw.shard(net.b, ((2, 1), (2, 1))), sw.shard(net.c, ((2, 2), (1, 2)))
    model = sw.AutoParallel(net, LOSS, parallel_mode=mode).dataset_strategy("full_batch")
    return model.hsdp(threshold=0, optimizer_level="level2") if kind == "hsdp" else model


Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def ways() -> Iterator[tuple[str, Make]]:
    """Each optimizer of torch that steps on dense gradients of cut parameters."""
    kinds = (
        (optim.SGD, {"lr": 0.1}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (optim.Adam, {"amsgrad": True}),
        (optim.AdamW, {}),
        (optim.Adagrad, {"initial_accumulator_value": 0.3}),
        (optim.Adadelta, {}),
        (optim.Adamax, {}),
        (optim.ASGD, {}),
        (optim.NAdam, {}),
        (optim.RAdam, {}),
        (optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (optim.Rprop, {}),
        (optim.Adafactor, {"weight_decay": 0.1}),
    )
    for kind, given in kinds:
        for how in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True}):
            if how.keys() <= inspect.signature(kind).parameters.keys():
                name = " ".join((kind.__name__, *map(str, {**given, **how}.items())))
                yield name, lambda p, kind=kind, given=given, how=how: kind(p, **given, **how)
    if hasattr(optim, "Muon"):
        yield "Muon", lambda p: optim.Muon([x for x in p if x.dim() == 2], lr=0.05)


class Dispatched(TorchDispatchMode):
    """Notes the operators that are called with DTensors, or that communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(t, DTensor) for t in types) or "c10d" in str(function):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def train(net: nn.Module, call: Callable[..., Tensor], optimizer: optim.Optimizer) -> None:
    """A step after a backward, and one that is given a closure."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = call(X, Y)
        loss.backward()
        return loss

    for step in range(2):
        if step or isinstance(optimizer, optim.LBFGS):
            optimizer.step(closure)
        else:
            closure(), optimizer.step()


class Counted(Mixed):
    """With statistics of the batch, and their number, as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, dtype=D)


def both(kind: str, make: type[Mixed] = Mixed) -> tuple[Mixed, sw.AutoParallel, Mixed, Callable[..., Tensor]]:
    net, one = make(), make()
    return net, wrapped(net, kind), one, lambda x, y: LOSS(one(x), y)


def whole(x: Any) -> Any:
    return gathered(x) if isinstance(x, DTensor) else x


def refused(action: Callable[[], Any], *parts: str) -> None:
    try:
        action()
    except sw.SettingError as error:
        assert all(part in str(error) for part in parts), error
    else:
        raise AssertionError("nothing was refused")


SCENARIOS: dict[str, Callable[[int, int], None]] = {}


def scenario(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    SCENARIOS[function.__name__] = function
    return function


@cache
def built(kind: str, make: type[Mixed]) -> tuple[Mixed, sw.AutoParallel, Mixed, Callable[..., Tensor], list[Tensor]]:
    """`both`, its layouts decided, and what its parameters and buffers begin with: for many optimizers in turn."""
    net, model, one, call = both(kind, make)
    model(X, Y), call(X, Y)
    return net, model, one, call, [x.detach().clone() for x in values(net, one)]


def values(*nets: nn.Module) -> list[Tensor]:
    return [x for net in nets for x in (*net.parameters(), *net.buffers())]


def again(kind: str, make: type[Mixed] = Mixed) -> tuple[Mixed, sw.AutoParallel, Mixed, Callable[..., Tensor]]:
    """`both`, captured once for all scenarios of a rank: its tensors are as at first, without gradients."""
    net, model, one, call, begun = built(kind, make)
    with torch.no_grad():
        for x, first in zip(values(net, one), begun, strict=True):
            x.copy_(first)
            x.grad = None
    return net, model, one, call


def as_one_device(kind: str, make: Make) -> Callable[[int, int], None]:
    def run(rank: int, world: int) -> None:
        net, model, one, call = again(kind)
        ours, theirs = make(list(net.parameters())), make(list(one.parameters()))
        train(net, model, ours), train(one, call, theirs)
        assert len(ours.state) == len(theirs.state)
        for (path, p), q in zip(net.named_parameters(), one.parameters()):
            here = model.plan.parameters[path].slice(rank)  # each rank compares its part: nothing is sent
            close(local_tensor(p), q[here], path)
            assert ours.state.get(p, {}).keys() == theirs.state.get(q, {}).keys()
            for name, x in ours.state.get(p, {}).items():
                assert not isinstance(x, Tensor) or type(x) in (Tensor, DTensor, SlicedTensor)
                if isinstance(x, Tensor) and x.shape == p.shape and p.dim():
                    assert x.placements == p.placements
                    close(local_tensor(x), theirs.state[q][name][here], name)

    return run


for _name, _make in ways():
    for _kind in ("marks", "hsdp"):
        SCENARIOS[f"{_kind}: {_name}"] = as_one_device(_kind, _make)
for _search in (None, "strong_wolfe"):
    SCENARIOS[f"whole: LBFGS {_search}"] = as_one_device(
        "whole", lambda p, search=_search: optim.LBFGS(p, max_iter=4, line_search_fn=search)
    )


@scenario
def the_first_call_is_in_the_closure_of_a_step(rank: int, world: int) -> None:
    """The parameters are replaced while the step's closure runs: the step is that of the slices all the same."""
    steps: tuple[tuple[str, Make], ...] = (
        ("whole", lambda p: optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe")),
        ("marks", lambda p: optim.Adam(p, 0.01, fused=True)),
        ("hsdp", lambda p: optim.Adafactor(p, 0.01)),
    )
    for kind, make in steps:
        net, model, one, call = both(kind)
        calls = []
        for inner, f in ((net, model), (one, call)):
            optimizer, count = make(list(inner.parameters())), [0]

            def closure(f: Any = f, optimizer: optim.Optimizer = optimizer, count: list[int] = count) -> Tensor:
                count[0] += 1
                optimizer.zero_grad()
                loss = f(X, Y)
                loss.backward()
                return loss

            losses = [optimizer.step(closure) for _ in range(2)]
            calls.append((count, torch.stack(losses).detach()))
        close(calls[0], calls[1], str(make(list(one.parameters()))))
        close({n: whole(p) for n, p in net.named_parameters()}, dict(one.named_parameters()))
    net, model, _, _ = both("marks")
    refused(
        lambda: optim.LBFGS(net.parameters()).step(lambda: model(X, Y)), "LBFGS.step()", "'a.weight' whole", "AdamW"
    )


@scenario
def no_step_dispatches_on_dtensors(rank: int, world: int) -> None:
    net, model, _, _ = again("marks")
    for how in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        optimizer = optim.AdamW(net.parameters(), **how)
        for _ in range(2):
            optimizer.zero_grad(), model(X, Y).backward()
            with Dispatched() as seen:
                optimizer.step()
        assert not seen.names


@scenario
def optimizers_of_another_kind(rank: int, world: int) -> None:
    net, model, one, call = again("marks")
    model(X, Y).backward(), call(X, Y).backward()
    refused(
        lambda: optim.LBFGS(net.parameters()).step(lambda: model(X, Y)), "LBFGS.step()", "'a.weight' whole", "AdamW"
    )
    refused(optim.SparseAdam(list(net.parameters())).step, "SparseAdam.step()", "dense", "AdamW")

    class Halved(optim.SGD):  # a step of its own: on the DTensors, as ever
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                seen.append(isinstance(p, DTensor))
                with torch.no_grad():
                    p.add_(p.grad, alpha=-0.5)

    class Renamed(optim.SGD):
        pass

    seen: list[bool] = []
    for kind in (Halved, Renamed):
        kind(net.parameters(), 0.1).step(), kind(one.parameters(), 0.1).step()
    assert all(seen[: len(seen) // 2]) and not any(seen[len(seen) // 2 :])
    close({n: whole(p) for n, p in net.named_parameters()}, dict(one.named_parameters()))


@scenario
def a_state_of_another_parallel_model(rank: int, world: int) -> None:
    """An optimizer is given the state of another one before the first call of its model, which has other layouts."""
    net, model, one, call = again("marks")
    ours, theirs = optim.Adam(net.parameters(), 0.1), optim.Adam(one.parameters(), 0.1)
    model(X, Y).backward(), call(X, Y).backward()
    ours.step(), theirs.step()
    next_one = Mixed()
    next_one.load_state_dict({n: whole(p).detach() for n, p in net.named_parameters()})
    later, optimizer = wrapped(next_one, "hsdp"), optim.Adam(next_one.parameters(), 0.3)
    optimizer.load_state_dict(copy.deepcopy(ours.state_dict()))
    theirs.zero_grad()
    later(X, Y).backward(), call(X, Y).backward()
    optimizer.step(), theirs.step()
    close({n: whole(p) for n, p in next_one.named_parameters()}, dict(one.named_parameters()))


@scenario
def hooks_of_an_optimizer(rank: int, world: int) -> None:
    """Hooks see the user's optimizer; gradients that hooks replace are the ones of the step."""
    net, model, one, call = both("hsdp")
    states = []
    for n, f in ((net, model), (one, call)):
        optimizer = optim.Adam(n.parameters(), 0.01)

        def clip(seen: optim.Optimizer, args: Any, kwargs: Any, optimizer: optim.Optimizer = optimizer) -> None:
            assert seen is optimizer
            for p in seen.param_groups[0]["params"]:
                p.grad = p.grad * 0.5

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(lambda seen, *_: states.append(len(seen.state)))
        for _ in range(2):
            optimizer.zero_grad(), f(X, Y).backward(), optimizer.step()
    assert states == [len(list(one.parameters()))] * 4
    close({n: whole(p) for n, p in net.named_parameters()}, dict(one.named_parameters()))


@scenario
def a_step_that_fails_leaves_everything_as_it_was(rank: int, world: int) -> None:
    net, model, _, _ = again("marks")
    optimizer = optim.AdamW(net.parameters())
    model(X, Y).backward(), optimizer.step()
    before = copy.deepcopy({n: whole(p).detach() for n, p in net.named_parameters()})
    state = {p: dict(s) for p, s in optimizer.state.items()}
    refused(lambda: optimizer.step(_raises))
    close({n: whole(p) for n, p in net.named_parameters()}, before)
    assert state == {p: dict(s) for p, s in optimizer.state.items()}
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])


def _raises() -> Tensor:
    raise sw.SettingError("the closure's own", legal="")


@scenario
def averages_with_buffers(rank: int, world: int) -> None:
    for kind in ("marks", "hsdp"):
        for buffers, given in (
            (False, {"multi_avg_fn": get_ema_multi_avg_fn(0.7)}),
            (False, {"multi_avg_fn": get_swa_multi_avg_fn()}),
            (True, {"avg_fn": get_ema_avg_fn(0.7)}),
            (True, {"multi_avg_fn": get_ema_multi_avg_fn(0.7)}),
        ):
            net, model, one, call = again(kind, Counted if buffers else Mixed)
            optimizers = [optim.SGD(n.parameters(), 0.1) for n in (net, one)]
            ours, theirs = (AveragedModel(n, use_buffers=buffers, **given) for n in (model, one))
            for _ in range(2):
                for f, optimizer in zip((model, call), optimizers):
                    optimizer.zero_grad(), f(X, Y).backward(), optimizer.step()
                ours.update_parameters(model), theirs.update_parameters(one)
            for p, q in zip(ours.module.net.parameters(), theirs.module.parameters()):
                close(whole(p), q)
            close(dict(ours.module.net.named_buffers()), dict(theirs.module.named_buffers()))


class TrustRatio(optim.Optimizer):
    """A user's own optimizer, which reads the norms of parameters and gradients."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    long, steep = p.norm(), p.grad.norm()
                    ratio = 1.0 if long == 0 or steep == 0 else (long / steep).item()
                    p.add_(p.grad, alpha=-group["lr"] * ratio)
        return loss


@scenario
def stages_of_a_pipeline(rank: int, world: int) -> None:
    """Most parameters are empty on a rank; norms inside of a step are those of one stage's ranks."""
    net = Chain(tied=True)
    pipeline_check(
        net,
        TWO,
        rank,
        optimizers=(
            partial(optim.Adafactor, lr=0.01),
            TrustRatio,
            partial(optim.Rprop, foreach=True),
            partial(optim.ASGD, foreach=True),
            partial(optim.NAdam, foreach=True),
            partial(optim.Adadelta, foreach=True),
        ),
    )
    refused(lambda: optim.LBFGS(net.parameters()).step(lambda: 0), "LBFGS.step()", "not all ranks have")


@scenario
def a_closure_of_a_pipeline_clips(rank: int, world: int) -> None:
    """The closure of a step is run by all ranks: its norm is that of all parameters, as Lightning clips."""
    net = Chain(tied=True)
    one = copy.deepcopy(net)
    model = sw.AutoParallel(net, nn.MSELoss()).pipeline(**TWO).dataset_strategy("full_batch")

    def stepped(net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], optimizer: optim.Optimizer) -> list[Tensor]:
        norms = []

        def closure(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            made = loss(x, y)
            made.backward()
            norms.append(torch.as_tensor(nn.utils.clip_grad_norm_(net.parameters(), 0.1)))
            return made.detach()

        return [optimizer.step(partial(closure, x, y)) for x, y in batches(3)] + norms

    ours = stepped(net, model, TrustRatio(net.parameters()))
    theirs = stepped(one, lambda x, y: nn.MSELoss()(one(x), y), TrustRatio(one.parameters()))
    close(ours, theirs)


@pytest.fixture(scope="module")
def results() -> list[dict[str, str | None]]:
    net = Mixed()
    sw.init(devices=2)
    model = sw.AutoParallel(net, LOSS).dataset_strategy("full_batch")
    model(X, Y).backward()  # what a first capture loads, before the fork
    return run_ranks(run_scenarios, 4, SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_four_ranks(name: str, results: list[dict[str, str | None]]) -> None:
    for rank, result in enumerate(results):
        if result[name] is not None:
            pytest.fail(f"rank {rank}:\n{result[name]}", pytrace=False)


def test_on_an_accelerator_nothing_is_mixed() -> None:
    """Fake tensors on a device of their own: each mix of devices raises."""
    needs_accelerators_in_python()
    done = forked_python.run([sys.executable, str(SUPPORT / "fake_accelerator_optimizers.py")], timeout=PATIENCE)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 22, done.stderr[-2000:]
    for one in found:
        assert one.get("parameters") == ["npu:0"] == [one["loss"]], one

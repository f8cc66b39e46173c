"""Norms of gradients and GradScaler's check: as one device, alike on all ranks, in one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_device import close
from pipeline_networks import Chain, batches, setting
from ranks import run_ranks, run_scenarios
from test_optimizer_steps import LOSS, Dispatched, Mixed, X, Y, again, whole, wrapped
from torch import Tensor, nn, optim

import shardwright as sw
from shardwright.torch_private import TorchDispatchMode, local_tensor

SCENARIOS: dict[str, Callable[[int, int], None]] = {}


def scenario(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    SCENARIOS[function.__name__] = function
    return function


def same_everywhere(value: Any) -> None:
    """One number, or several, on all ranks, to the bit."""
    text: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(text, value.tolist() if isinstance(value, Tensor) else value)
    assert len({str(s) for s in text}) == 1, text


class BetweenHostAndDevice(TorchDispatchMode):
    """Notes what makes a tensor of numbers of the host, or reads numbers on the host: on a device, copies and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(name in str(function) for name in ("lift_fresh", "_local_scalar_dense", "is_nonzero", "nonzero")):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


# -- norms -------------------------------------------------------------------------------------------------------------


@scenario
def norms_of_every_order(rank: int, world: int) -> None:
    for kind in ("marks", "hsdp", "whole"):
        net, model, one, call = again(kind)
        model(X, Y).backward(), call(X, Y).backward()
        found = []
        for order in (1, 2, 3, 2.5, 0.5, 0, -1, math.inf, -math.inf):
            some = slice(None), slice(1), slice(2, 5)
            for foreach, few in (*((None, few) for few in some), (True, some[0]), (False, some[0])):
                ours, theirs = (nn.utils.get_total_norm(gradients(n)[few], order, foreach=foreach) for n in (net, one))
                assert type(ours) is Tensor
                close(ours, theirs, f"{kind} {order} {foreach} {few}")
                found.append(ours)
            for p, q in zip(net.parameters(), one.parameters()):
                close(torch.linalg.vector_norm(p.grad, order), torch.linalg.vector_norm(q.grad, order))
                close(p.grad.norm(order), q.grad.norm(order), "a method")
        same_everywhere(torch.stack(found))
        for p, q in zip(net.parameters(), one.parameters()):
            close(p.grad.norm(), q.grad.norm()), close(torch.norm(p.grad), torch.norm(q.grad))
            close(torch.norm(p.grad, p=3, dtype=torch.float64), torch.norm(q.grad, p=3, dtype=torch.float64))
        a, b = net.b.weight.grad, one.b.weight.grad
        close(torch.linalg.norm(a, 2), torch.linalg.norm(b, 2), "of a matrix")
        close(whole(torch.linalg.vector_norm(a, 2, dim=1)), torch.linalg.vector_norm(b, 2, dim=1), "of rows")
        close(a.norm(2, 0), b.norm(2, 0), "of columns")


@scenario
def clipping_is_one_all_reduce(rank: int, world: int) -> None:
    for kind, expected in (("marks", 1), ("hsdp", 1), ("whole", 0)):
        for order in (2.0, math.inf, 3.0):
            net, model, one, call = again(kind)
            model(X, Y).backward(), call(X, Y).backward()
            with Dispatched() as seen, BetweenHostAndDevice() as copied:
                ours = nn.utils.clip_grad_norm_(net.parameters(), 0.01, order)
            assert not copied.names, (kind, order, copied.names)
            assert sum("c10d" in name for name in seen.names) == len(seen.names) == expected, seen.names
            close(ours, nn.utils.clip_grad_norm_(one.parameters(), 0.01, order))
            close([whole(p.grad) for p in net.parameters()], [p.grad for p in one.parameters()])


@scenario
def clipping_by_hand_and_by_value(rank: int, world: int) -> None:
    net, model, one, call = again("marks")
    for n, f in ((net, model), (one, call)):
        f(X, Y).backward()
        norm = nn.utils.get_total_norm([p.grad for p in n.parameters()])
        nn.utils.clip_grads_with_norm_(n.parameters(), 0.05, norm)
        nn.utils.clip_grad_value_(n.parameters(), 0.01)
        torch._foreach_mul_(gradients(n), [1.0 + i for i in range(len(gradients(n)))])
        nn.utils.clip_grad_value_(next(n.parameters()), 0.002, foreach=True)
    close([whole(p.grad) for p in net.parameters()], [p.grad for p in one.parameters()])


@scenario
def infinite_and_missing_numbers(rank: int, world: int) -> None:
    for bad in (math.inf, math.nan):
        for order in (2.0, 1.0, 3.0, math.inf):
            net, model, one, call = again("marks")
            model(X, Y).backward(), call(X, Y).backward()
            if rank == 2:
                local_tensor(net.b.weight.grad)[0, 0] = bad
            one.b.weight.grad[6, 0] = bad  # rank 2 has rows 6, 7, 8
            ours = nn.utils.get_total_norm(gradients(net), order)
            close(ours, nn.utils.get_total_norm(gradients(one), order), f"{bad} {order}")
            same_everywhere(ours)
            for n in (net, one):
                with pytest.raises(RuntimeError, match="non-finite"):
                    nn.utils.clip_grad_norm_(n.parameters(), 1.0, order, error_if_nonfinite=True)


@scenario
def mixed_and_narrow_dtypes(rank: int, world: int) -> None:
    net, model, one, call = again("hsdp")
    model(X, Y).backward(), call(X, Y).backward()
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    ours, theirs = ([g.to(kinds[i % 4]) * 300 for i, g in enumerate(gradients(n))] for n in (net, one))
    for order in (2.0, 3.0, math.inf):  # 300 ** 3 has no float16
        norms = nn.utils.get_total_norm(ours, order), nn.utils.get_total_norm(theirs, order)
        assert norms[0].dtype == norms[1].dtype
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=0)
        for a, b in zip(ours, theirs) if order != 3 else ():  # one device overflows in float16
            torch.testing.assert_close(a.norm(order), b.norm(order))


# -- GradScaler --------------------------------------------------------------------------------------------------------


def scaled(make: Callable[[Any], list[optim.Optimizer]], kind: str, clip: bool, bad: Any) -> Callable[[int, int], None]:
    """Train with a GradScaler on ranks and on one device; in step 1 the number `bad` stands in one rank's slice."""

    def run(rank: int, world: int) -> None:
        net, model, one, call = again(kind)
        model(X, Y), call(X, Y)
        sides = []
        for n, f in ((net, model), (one, call)):
            optimizers, scaler = make(n), torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
            for step in range(4):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                scaler.scale(f(X, Y)).backward()
                if step == 1 and n is one:
                    n.c.weight.grad[0, 8] = bad
                elif step == 1 and rank == world - 1:  # the last columns are here
                    local_tensor(n.c.weight.grad)[0, -1] = bad
                for optimizer in optimizers:
                    if clip:
                        scaler.unscale_(optimizer)
                        norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
                        same_everywhere(norm)
                    scaler.step(optimizer)
                scaler.update()
            sides.append((scaler.get_scale(), [{str(s.get("step")) for s in o.state.values()} for o in optimizers]))
        assert sides[0] == sides[1], sides
        same_everywhere(sides[0])
        close({n: whole(p) for n, p in net.named_parameters()}, dict(one.named_parameters()))

    return run


def two(net: Mixed) -> list[optim.Optimizer]:
    return [
        optim.AdamW([*net.a.parameters(), *net.norm.parameters()], 1e-2, fused=True),
        optim.SGD([*net.b.parameters(), *net.c.parameters(), net.scale], 0.1, momentum=0.9),
    ]


for _name, _make in (
    ("AdamW", lambda n: [optim.AdamW(n.parameters(), 1e-2)]),
    ("AdamW fused", lambda n: [optim.AdamW(n.parameters(), 1e-2, fused=True)]),
    ("SGD foreach", lambda n: [optim.SGD(n.parameters(), 0.1, momentum=0.9, foreach=True)]),
    ("two optimizers", two),
):
    for _kind in ("marks", "hsdp"):
        for _clip in (False, True):
            SCENARIOS[f"scaler: {_name}, {_kind}, clip={_clip}"] = scaled(_make, _kind, _clip, math.inf)
SCENARIOS["scaler: not a number"] = scaled(lambda n: [optim.Adam(n.parameters())], "hsdp", False, math.nan)


@scenario
def a_scaler_is_refused_gradients_that_are_not_summed(rank: int, world: int) -> None:
    net = Mixed()
    model = wrapped(net, "whole")
    model(X, Y)
    scaler = torch.amp.GradScaler("cpu")
    with model.no_sync():
        scaler.scale(model(X, Y)).backward()
    with pytest.raises(sw.SettingError, match="no_sync"):
        scaler.unscale_(optim.SGD(net.parameters(), 0.1))


@scenario
def an_overflow_of_one_rank_of_one_stage(rank: int, world: int) -> None:
    for stages, fused in ((2, True), (4, False)):
        sw.init(watch=False)
        net, one = Chain(), Chain()
        if stages == 2:
            sw.shard(net.layers[2], ((1, 2), (1, 2), (1,)))
        model = sw.AutoParallel(net, LOSS).pipeline(**setting("1f1b", stages)).dataset_strategy("full_batch")
        pairs = []
        for n, f in ((net, model), (one, lambda x, y, one=one: LOSS(one(x), y))):
            f(*batches(1)[0])
            optimizer = optim.AdamW(n.parameters(), 1e-2, fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
            for step, (x, y) in enumerate(batches(3)):
                optimizer.zero_grad(), scaler.scale(f(x, y)).backward()
                if step == 1 and n is one:
                    n.layers[2].weight.grad[0, 0] = math.inf
                elif step == 1 and rank == 2:  # the third layer lies on ranks 2 and 3, or on rank 2
                    local_tensor(n.layers[2].weight.grad)[0, 0] = math.inf
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(n.parameters(), 0.5)
                scaler.step(optimizer), scaler.update()
            steps = [int(optimizer.state[p]["step"]) for p in n.parameters() if p in optimizer.state]
            pairs.append((scaler.get_scale(), set(steps)))
        assert pairs[0] == pairs[1] == (2.0**7, {2}), pairs
        with Dispatched() as seen, BetweenHostAndDevice() as copied:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        assert not copied.names
        assert sum("c10d" in name for name in seen.names) == len(seen.names) == 1, seen.names
        for (name, p), q in zip(net.named_parameters(), one.parameters()):
            here = local_tensor(p)
            if here.numel():
                close(here, q[model.plan.parameters[name].slice(rank)], name)


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

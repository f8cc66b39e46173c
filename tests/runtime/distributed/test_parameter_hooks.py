"""Hooks that users put on parameters mean what they mean on one device: in one process, in processes, and in
pipelines."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_device import close
from ranks import all_passed, run_ranks, run_scenarios
from small_networks import D, draw
from torch import Tensor, nn

import shardwright as sw

STEPS = 3


class Net(nn.Module):
    """Four layers; a weight of 6 rows, which 4 ranks do not divide; a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=D) for _ in range(4))
        self.head = nn.Linear(8, 6, dtype=D)
        for i, p in enumerate(self.parameters()):
            p.data = draw(*p.shape, seed=i) / 3

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(torch.tanh(self.layers[3](x)))


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(draw(8, 8, seed=40 + s), draw(8, 6, seed=60 + s)) for s in range(STEPS)]


# -- habits: each puts hooks on the parameters of a model, and returns what steps and what it has noted
# ------------------


def scaled(net: nn.Module) -> None:
    for i, p in enumerate(net.parameters()):
        p.register_hook(lambda gradient, i=i: gradient * (i + 1) / 3)


def masked(net: nn.Module) -> None:
    """A mask of the whole weight, as pruning has it; rows of an old vocabulary that stay."""
    for i, p in enumerate(net.parameters()):
        mask = draw(*p.shape, seed=100 + i) > 0
        p.register_hook(functools.partial(torch.mul, mask))

    def kept(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[:3] = 0
        return gradient

    net.head.weight.register_hook(kept)


def of_norm(net: nn.Module) -> None:
    """No operator by element; one hook after another."""
    for p in net.parameters():
        p.register_hook(lambda gradient: gradient / (0.1 + gradient.norm()))
        p.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


def in_place(net: nn.Module) -> None:
    def doubled(gradient: Tensor) -> None:
        gradient.mul_(2)

    for p in net.parameters():
        p.register_hook(doubled)


def of_itself(net: nn.Module) -> None:
    """A hook that holds its parameter's optimizer, in a dict by parameter: the step is in the backward."""
    optimizers = {p: torch.optim.AdamW([p], 0.05, foreach=False) for p in net.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)


def with_norms_after(net: nn.Module) -> None:
    """Each parameter clipped by itself when its gradient is there."""
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda parameter: nn.utils.clip_grad_norm_([parameter], 0.05) and None)


def removed(net: nn.Module) -> Callable[[int], None]:
    handle = net.layers[0].weight.register_hook(lambda gradient: gradient * 0)
    scaled(net)
    return lambda step: handle.remove() if step == 2 else None


def late(net: nn.Module) -> Callable[[int], None]:
    """Put there after the first call."""
    return lambda step: scaled(net) or masked(net) or of_norm(net) if step == 1 else None


def late_steps(net: nn.Module) -> Callable[[int], None]:
    return lambda step: of_itself(net) if step == 1 else None


HABITS = [scaled, masked, of_norm, in_place, of_itself, with_norms_after, removed, late, late_steps]
FEW = [masked, of_norm, of_itself]


def trained(habit: Callable, model: Any, net: nn.Module, loss: Callable, accumulated: bool = False) -> dict[str, Any]:
    """Losses of some steps, and gradients before each."""
    after = habit(net)
    steps_itself = habit in (of_itself,)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses, gradients = [], []
    for step, batch in enumerate(batches()):
        if after is not None:
            after(step)
        if accumulated:
            with model.no_sync() if isinstance(model, sw.AutoParallel) else contextlib.nullcontext():
                loss(model, *batch).backward()
        value = loss(model, *batch)
        value.backward()
        losses.append(value.detach())
        gradients.append([None if p.grad is None else whole(p) for p in net.parameters()])
        if not steps_itself:
            optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients}


def whole(parameter: nn.Parameter) -> Tensor | None:
    gradient = parameter.grad
    return gradient.full_tensor().clone() if hasattr(gradient, "full_tensor") else gradient.clone()


def wrapped(net: nn.Module, settings: dict[str, Any]) -> sw.AutoParallel:
    given = dict(settings)
    pipeline, level, marked, feed = (
        given.pop("pipeline", None),
        given.pop("level", None),
        given.pop("marked", None),
        given.pop("feed", "full_batch"),
    )
    if marked:
        sw.shard(net.layers[1], ((1, 1), (2, 1)))
        sw.shard(net.head, ((1, 2), (1, 2)))
    model = sw.AutoParallel(net, nn.MSELoss(), **given).dataset_strategy(feed)
    if level:
        model.hsdp(optimizer_level=level)
    if pipeline:
        model.pipeline(
            stages=pipeline,
            micro_batches=4,
            stage_config={**{f"layers.{i}": i * pipeline // 4 for i in range(4)}, "head": pipeline - 1},
        )
    return model


def check(rank: int, world: int, habit: Callable, settings: dict[str, Any], accumulated: bool = False) -> None:
    net = Net()
    if settings.get("pipeline"):
        Net.forward, kept = once, Net.forward
    try:
        one = copy.deepcopy(net)
        model = wrapped(net, settings)
        feed = settings.get("feed")

        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            if isinstance(model, sw.AutoParallel):
                if feed == "data_parallel":
                    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
                return model(x, y)
            return nn.functional.mse_loss(model(x), y)

        theirs = trained(habit, one, one, loss, accumulated)
        mine = trained(habit, model, net, loss, accumulated)
        close(mine["losses"], theirs["losses"], "losses")
        if not settings.get("pipeline"):
            close(mine["gradients"], theirs["gradients"], "gradients")
        with model.whole() as plain:
            close(
                {n: p.detach().clone() for n, p in plain.named_parameters()},
                {n: p.detach() for n, p in one.named_parameters()},
                "parameters",
            )
    finally:
        if settings.get("pipeline"):
            Net.forward = kept


def once(self: Net, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = torch.tanh(layer(x))
    return self.head(x)


SETTINGS = {
    "data_parallel": {"parallel_mode": "data_parallel", "feed": "data_parallel"},
    "marked": {"marked": True},
    "level3": {"parallel_mode": "data_parallel", "level": "level3"},
    "level1": {"parallel_mode": "data_parallel", "level": "level1", "uneven": True},
    "pipeline": {"pipeline": 2},
}


def scenarios(world: int) -> dict[str, Callable]:
    """All habits on two ranks; on four a few, and stages of one rank."""
    settings = (
        SETTINGS
        if world == 2
        else {"marked": {"marked": True}, "level1": SETTINGS["level1"], "pipeline": {"pipeline": 4}}
    )
    out = {
        f"{name}, {habit.__name__}": functools.partial(check, habit=habit, settings=given)
        for name, given in settings.items()
        for habit in (HABITS if world == 2 and name in ("data_parallel", "pipeline") else FEW)
    }
    for name in ("data_parallel", "level1"):
        out[f"{name}, accumulated"] = functools.partial(check, habit=of_norm, settings=SETTINGS[name], accumulated=True)
    for function in (own_slices, whole_gradients, *((refused, without_values) if world == 2 else ())):
        out[function.__name__] = function
    return out


def own_slices(rank: int, world: int) -> None:
    """hybrid_parallel: a rank's own slice has its own gradient; what is averaged has the hook's meaning too."""
    seen = []

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(draw(8, seed=rank))
            self.fc = nn.Linear(8, 6, dtype=D)
            self.fc.weight.data, self.fc.bias.data = draw(6, 8), draw(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x * self.own)

    net = Own()
    plain = copy.deepcopy(net)
    sw.layerwise_parallel(net.own)
    net.own.register_hook(lambda gradient: gradient * 5)
    net.own.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    net.fc.weight.register_hook(lambda gradient: gradient * 3)
    model = sw.AutoParallel(net, nn.MSELoss(), parallel_mode="hybrid_parallel")
    x, y = draw(4, 8, seed=rank + 7), draw(4, 6, seed=rank + 9)
    model(x, y).backward()
    (nn.functional.mse_loss(plain(x), y) / world).backward()
    dist.all_reduce(plain.fc.weight.grad)
    close(seen, [plain.own.grad * 5], "own")
    close(whole(net.own), plain.own.grad * 5, "own")
    close(whole(net.fc.weight), plain.fc.weight.grad * 3, "of all")


def whole_gradients(rank: int, world: int) -> None:
    """A hook sees a plain tensor of the whole shape, on each rank."""
    net = Net()
    one, seen = copy.deepcopy(net), []
    model = wrapped(net, {"marked": True})
    net.head.weight.register_hook(seen.append)
    x, y = batches()[0]
    model(x, y).backward()
    nn.functional.mse_loss(one(x), y).backward()
    assert type(seen[0]) is Tensor and net.head.weight.to_local().shape == (6, 4)
    close(seen, [one.head.weight.grad], "what the hook sees")
    close(whole(net.head.weight), one.head.weight.grad, "what is left")


def refused(rank: int, world: int) -> None:
    for hook, text in (
        (lambda gradient: gradient + torch.randn_like(gradient), "draws random numbers"),
        (lambda gradient: gradient[:1], r"returns a tensor of shape [1, 8]"),
        (lambda gradient: 3, "returns a int"),
    ):
        net = Net()
        model = wrapped(net, {"parallel_mode": "data_parallel"})
        net.head.weight.register_hook(hook)
        loss = model(*batches()[0])
        with pytest.raises(sw.ShardwrightError) as raised:
            loss.backward()
        assert (
            text in str(raised.value)
            and "'head.weight'" in str(raised.value)
            and "test_parameter_hooks.py:" in str(raised.value)
        )
    net = Net()
    model = wrapped(net, {"parallel_mode": "data_parallel"})
    with model.no_sync():
        model(*batches()[0]).backward()
    net.head.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(sw.ShardwrightError, match="after a backward under no_sync"):
        model(*batches()[0]).backward()


def without_values(rank: int, world: int) -> None:
    """Hooks on parameters that have no values yet."""
    torch.manual_seed(5)
    with sw.no_init_parameters():
        net = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.Linear(8, 6, dtype=D))
    torch.manual_seed(5)
    one = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.Linear(8, 6, dtype=D))
    model = sw.AutoParallel(net, nn.MSELoss()).dataset_strategy("full_batch")
    for each in (net, one):
        masked_rows(each)
    x, y = batches()[0]
    model(x, y).backward()
    nn.functional.mse_loss(one(x), y).backward()
    close([whole(p) for p in net.parameters()], [p.grad for p in one.parameters()], "gradients")


def masked_rows(net: nn.Module) -> None:
    for i, p in enumerate(net.parameters()):
        p.register_hook(functools.partial(torch.mul, draw(*p.shape, seed=i)))


@pytest.mark.parametrize("world", [2, 4])
def test_on_processes(world: int) -> None:
    all_passed(run_ranks(run_scenarios, world, scenarios(world)))


@pytest.mark.parametrize(
    "settings",
    [{"marked": True}, {"parallel_mode": "data_parallel", "level": "level3"}, {"pipeline": 2}],
    ids=["marked", "level3", "pipeline"],
)
@pytest.mark.parametrize("habit", HABITS, ids=lambda f: f.__name__)
def test_in_one_process(habit: Callable, settings: dict[str, Any]) -> None:
    sw.init(devices=4)
    check(0, 1, habit, settings)


def test_in_one_process_without_values() -> None:
    sw.init(devices=4)
    without_values(0, 1)

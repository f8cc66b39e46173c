"""Models in several processes whose parameters change after training began, beside the same loop on one device.

The parameters that stay keep their objects, their slices and their optimizer's state; new ones are cut as at a first
call, also in optimizers that were given them before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_device import close
from ranks import run_ranks, run_scenarios
from small_networks import D, draw
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.runtime.distributed import process_groups

Optimizer = torch.optim.Optimizer
SCENARIOS: dict[str, Callable[[int, int], None]] = {}


def linear(rows: int, columns: int, seed: int) -> nn.Linear:
    made = nn.Linear(columns, rows, dtype=D)
    made.weight.data, made.bias.data = draw(rows, columns, seed=seed) / 3, draw(rows, seed=seed + 1)
    return made


class Net(nn.Module):
    """Three layers, the first of which is cut by rows and the second by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = linear(8, 8, 0), linear(8, 8, 2), linear(8, 8, 4)
        self.more = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        for layer in self.more:
            x = torch.tanh(layer(x))
        return self.head(x)


class Adapted(nn.Module):
    """A layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(draw(4, 8, seed=30) / 3), nn.Parameter(draw(8, 4, seed=31) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


# -- changes: (net, its optimizer) -> None


def given(optimizer: Optimizer, *new: nn.Parameter) -> None:
    optimizer.add_param_group({"params": list(new)})


def dropped(optimizer: Optimizer, *old: nn.Parameter) -> None:
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if all(p is not o for o in old)]
    for o in old:
        optimizer.state.pop(o, None)


def adapters_are_added(net: Any, optimizer: Optimizer) -> None:
    old = list(net.first.parameters()) + list(net.head.parameters())
    net.first, net.head = Adapted(net.first), Adapted(net.head)
    dropped(optimizer, *old)
    given(optimizer, net.first.down, net.first.up, net.head.down, net.head.up)


def a_head_is_new(net: Any, optimizer: Optimizer) -> None:
    dropped(optimizer, *net.head.parameters())
    net.head = linear(8, 8, 20)
    given(optimizer, *net.head.parameters())


def a_layer_is_appended(net: Any, optimizer: Optimizer) -> None:
    net.more.append(linear(8, 8, 22))
    given(optimizer, *net.more.parameters())


def a_weight_is_tied(net: Any, optimizer: Optimizer) -> None:
    dropped(optimizer, net.head.weight)
    net.head.weight = net.second.weight


def a_parameter_is_replaced(net: Any, optimizer: Optimizer) -> None:
    dropped(optimizer, net.second.weight)
    net.second.weight = nn.Parameter(draw(8, 8, seed=24))
    given(optimizer, net.second.weight)


def layers_change_places(net: Any, optimizer: Optimizer) -> None:
    net.first, net.second = net.second, net.first


CHANGES = (
    adapters_are_added,
    a_head_is_new,
    a_layer_is_appended,
    a_weight_is_tied,
    a_parameter_is_replaced,
    layers_change_places,
)


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def train_both(
    change: Callable[[Any, Optimizer], None], make: Callable[..., Optimizer], wrap: Callable[[Net], sw.AutoParallel]
) -> None:
    """Five steps before the change and five after it, on all ranks and on one device."""
    net = Net()
    one = copy.deepcopy(net)
    model = wrap(net)
    mine, theirs = make(net.parameters()), make(one.parameters())
    for i in range(10):
        if i == 5:
            stay = {p: p for p in net.parameters()}
            slices = [p.to_local().clone() for p in stay]
            change(net, mine), change(one, theirs)
        x, t = draw(8, 8, seed=40 + i), draw(8, 8, seed=60 + i)
        loss, expected = model(x, t), F.mse_loss(one(x), t)
        close(loss, expected, f"loss {i}")
        if i == 5:
            assert all(torch.equal(p.to_local(), s) for p, s in zip(stay, slices))
        loss.backward(), expected.backward()
        mine.step(), theirs.step()
        mine.zero_grad(), theirs.zero_grad()
        if i in (4, 5, 9):
            pairs = dict(one.named_parameters())
            with model.whole() as plain:
                for name, p in plain.named_parameters():
                    close(p, pairs[name], f"{name} after step {i}")
    now = list(net.parameters())
    assert all(hasattr(p, "full_tensor") for p in now)
    held = [p for group in mine.param_groups for p in group["params"]]
    assert all(any(p is q for q in now) for p in held)  # none stands for another object
    assert len(model._programs) == 2  # one plan before the change and one after it


def semi_auto(net: Net, **settings: Any) -> sw.AutoParallel:
    sw.init()
    n = dist.get_world_size()
    sw.shard(net.first, ((1, 1), (n, 1)))
    sw.shard(net.second, ((1, n), (1, n)))
    return sw.AutoParallel(net, F.mse_loss, **settings).dataset_strategy("full_batch")


def pipelined(net: Net) -> sw.AutoParallel:
    sw.init()
    stages = {"first": 0, "second": 0, "more": 1, "head": 1}
    setting = dict(stages=2, micro_batches=4, stage_config=stages)
    return sw.AutoParallel(net, F.mse_loss).dataset_strategy("full_batch").pipeline(**setting)


def raised(call: Callable[[], Any]) -> sw.ShardwrightError:
    """The error of a call, which is the same on all ranks."""
    error = None
    try:
        call()
    except sw.ShardwrightError as e:
        error = e
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, f"{type(error).__name__}: {error}")
    assert error is not None and len(set(texts)) == 1, texts
    return error


def add(name: str, function: Callable[[int, int], None]) -> None:
    SCENARIOS[name] = function


for change in CHANGES:
    add(f"{change.__name__}-adam", lambda rank, world, c=change: train_both(c, adam, semi_auto))
    add(
        f"{change.__name__}-hsdp",
        lambda rank, world, c=change: train_both(
            c,
            adam,
            lambda net: semi_auto(net, parallel_mode="data_parallel").hsdp(threshold=0, optimizer_level="level3"),
        ),
    )
    add(
        f"{change.__name__}-searched",
        lambda rank, world, c=change: train_both(
            c, momentum, lambda net: semi_auto(net, parallel_mode="recursive_programming")
        ),
    )
    if change not in (a_weight_is_tied, layers_change_places):
        add(f"{change.__name__}-pipeline", lambda rank, world, c=change: train_both(c, adam, pipelined))


def scenario(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    SCENARIOS[function.__name__] = function
    return function


X, T = draw(8, 8), draw(8, 8, seed=1)


@scenario
def a_parameter_moves_to_another_stage(rank: int, world: int) -> None:
    net = Net()
    model = pipelined(net)
    model(X, T).backward()
    net.head, net.first = net.first, linear(8, 8, 20)
    for _ in range(2):
        error = raised(lambda: model(X, T))
        assert isinstance(error, sw.SettingError)
        assert "'head.weight' was planned on the ranks from 0 on" in str(error), error
        assert "set_stage or stage_config" in error.legal
    net.first = net.head
    net.head = linear(8, 8, 22)
    one = Net()
    one.head = copy.deepcopy(net.head)
    close(model(X, T), F.mse_loss(one(X), T))


@scenario
def ranks_have_unlike_new_parameters(rank: int, world: int) -> None:
    net = Net()
    model = semi_auto(net)
    model(X, T).backward()
    net.head = linear(8, 8, 20 + rank)
    error = raised(lambda: model(X, T))
    assert isinstance(error, sw.RuntimeMismatchError) and "head.weight" in str(error), error
    net.head = linear(8, 8, 20)
    assert model(X, T).isfinite()


@scenario
def rank_0_gives_the_values(rank: int, world: int) -> None:
    net = Net()
    model = semi_auto(net, parameter_broadcast=True)
    model(X, T).backward()
    net.head = linear(8, 8, 20 + 2 * rank)
    one = Net()
    one.head = linear(8, 8, 20)
    close(model(X, T), F.mse_loss(one(X), T))


@scenario
def a_layer_comes_back(rank: int, world: int) -> None:
    net, other = Net(), linear(8, 8, 20)
    model = semi_auto(net)
    model(X, T).backward()
    first = net.first
    for _ in range(2):
        for layer in (other, first):
            net.first = layer
            one = Net()
            one.first.load_state_dict({n: whole(p).detach() for n, p in layer.named_parameters()})
            for p in net.parameters():
                p.grad = None
            loss, expected = model(X, T), F.mse_loss(one(X), T)
            close(loss, expected)
            loss.backward(), expected.backward()
            close(whole(layer.weight.grad), one.first.weight.grad)
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(0.9)
                net.second.weight.mul_(1 / 0.9), net.head.weight.mul_(1 / 0.9)
                net.second.bias.mul_(1 / 0.9), net.head.bias.mul_(1 / 0.9)
    assert len(model._programs) == 2


@scenario
def another_batch_size_after_it(rank: int, world: int) -> None:
    net = Net()
    model = semi_auto(net)
    model(X, T).backward()
    net.first = Adapted(net.first)
    one = Net()
    one.first = Adapted(one.first)
    for x, t in ((X, T), (torch.cat([X, X]), torch.cat([T, T])), (X, T)):
        close(model(x, t), F.mse_loss(one(x), t))


@scenario
def new_parameters_under_mixed_precision(rank: int, world: int) -> None:
    """The target has the dtype of the computation: torch 2.9 computes no gradient of a loss of two."""
    net = Net()
    model = semi_auto(net, mixed_precision=torch.float32)
    model(X, T.float()).backward()
    net.first = Adapted(net.first)
    one = Net()
    one.first = Adapted(one.first)
    model(X, T.float()).backward()
    F.mse_loss(one(X), T).backward()
    assert net.first.down.dtype == D
    torch.testing.assert_close(whole(net.first.down.grad), one.first.down.grad, rtol=1e-4, atol=1e-5)


@scenario
def a_checkpoint_after_it(rank: int, world: int) -> None:
    net = Net()
    model = semi_auto(net)
    model(X, T).backward()
    net.first = Adapted(net.first)
    model(X, T).backward()
    with model.whole() as plain:
        state = {n: p.clone() for n, p in plain.state_dict().items()}
    one = Net()
    one.first = Adapted(one.first)
    close(state, dict(one.state_dict()))


@scenario
def one_line_says_it(rank: int, world: int) -> None:
    net = Net()
    model = semi_auto(net)
    model(X, T)
    net.head = linear(8, 8, 20)
    with pytest.warns(sw.RecaptureWarning, match=r"net\.head is another one: the model is captured and planned anew"):
        model(X, T)


@scenario
def libraries_take_a_layer_for_whole(rank: int, world: int) -> None:
    """PEFT takes the sizes of a layer's adapter from the slice of its weight, unless the axes of its mesh have the name
    "fsdp", or none: then the layer computes the whole."""
    net = Net()
    model = semi_auto(net)
    sw.shard(net.head, ((1, 2), (2, 2)))
    model(X, T)
    assert net.head.weight.device_mesh.ndim == 2 and net.head.weight.to_local().shape == (4, 4)
    for parameter in net.parameters():
        assert set(parameter.device_mesh.mesh_dim_names or ()) <= {"fsdp"}


@scenario
def a_second_default_group_has_meshes_of_its_own(rank: int, world: int) -> None:
    """Torch's cached results of operators lie on the mesh that came first of equal ones. An earlier group is noted
    here as a first call would note it."""
    meshes = []
    for _ in range(2):
        net = Net()
        model = semi_auto(net)
        sw.shard(net.head, ((1, 2), (2, 2)))
        model(X, T)
        meshes.append(net.head.weight.device_mesh)
        process_groups._worlds.insert(0, process_groups._worlds[0])
    assert meshes[0] != meshes[1] and meshes[1].mesh_dim_names is None


#: Scenarios on four ranks; the others are on two, which take a third of the time.
ON_FOUR = {name for name in SCENARIOS if name.endswith("-hsdp")} | {
    "adapters_are_added-adam",
    "adapters_are_added-pipeline",
    "a_parameter_moves_to_another_stage",
    "a_second_default_group_has_meshes_of_its_own",
    "libraries_take_a_layer_for_whole",
    "ranks_have_unlike_new_parameters",
    "rank_0_gives_the_values",
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[str | None]]:
    """The results of each scenario, by rank."""
    found: dict[str, list[str | None]] = {}
    for world in (2, 4):
        mine = {name: scenario for name, scenario in SCENARIOS.items() if (name in ON_FOUR) == (world == 4)}
        by_rank = run_ranks(run_scenarios, world, mine)
        found |= {name: [texts[name] for texts in by_rank] for name in mine}
    return found


@pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")
@pytest.mark.parametrize("name", SCENARIOS)
def test_as_on_one_device(results: dict[str, list[str | None]], name: str) -> None:
    for rank, text in enumerate(results[name]):
        assert text is None, f"rank {rank}: {text}"

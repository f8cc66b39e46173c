"""Parameters of which each rank has a slice, in a script's own code after the first call: as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from one_device import close
from ranks import run_ranks, run_scenarios
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.runtime.distributed.dtensors import SUBCLASSES_HAVE_VIEWS, gathered

D = torch.float64
X = [torch.randn(8, 8, dtype=D, generator=torch.Generator().manual_seed(i)) for i in range(4)]
SCENARIOS: dict[str, Callable[[int, int], None]] = {}


def scenario(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    SCENARIOS[function.__name__] = function
    return function


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()


def begun() -> tuple[nn.Sequential, sw.AutoParallel, nn.Sequential]:
    """A model with gradients whose weights are cut, and the same on one device."""
    net = network()
    one = copy.deepcopy(net)
    sw.init()
    sw.shard(net[0], ((1, 1), (2, 1)))
    sw.shard(net[2], ((1, 2), (1, 2)))
    model = sw.AutoParallel(net).dataset_strategy("full_batch")
    for call in (model, one):
        call(X[0]).square().mean().backward()
    assert net[0].weight.to_local().shape == (8, 8) and net[2].weight.to_local().shape == (4, 8)
    return net, model, one


def values(net: nn.Module) -> dict[str, Tensor]:
    return {n: gathered(p.detach()) if isinstance(p, DTensor) else p.detach() for n, p in net.named_parameters()}


def still_trains(net: nn.Module, model: sw.AutoParallel, one: nn.Module) -> None:
    """The values are those of one device, and the next steps compute with them."""
    close(values(net), values(one))
    for x in X[1:]:
        for call, inner in ((model, net), (one, one)):
            call(x).square().mean().backward()
            torch.optim.SGD(inner.parameters(), 0.1).step()
            inner.zero_grad()
    close(values(net), values(one))


@scenario
def numbers_are_those_of_the_whole(rank: int, world: int) -> None:
    net, _, one = begun()
    for mine, whole in zip(net.parameters(), one.parameters()):
        for number in (
            lambda p: p.norm().item(),
            lambda p: float(p.sum()),
            lambda p: p.mean().item(),
            lambda p: p.std().item() if p.numel() > 1 else 0.0,
            lambda p: p.abs().max().item(),
            lambda p: int((p > 0.01).sum()),
            lambda p: bool(p.amax() > 0.3),
            lambda p: p.flatten()[-1].item(),
        ):
            with torch.no_grad():
                close(torch.tensor(number(mine)), torch.tensor(number(whole)))
    total, expected = (torch.stack([p.detach().norm() for p in n.parameters()]).norm().item() for n in (net, one))
    assert abs(total - expected) < 1e-12


@scenario
def data_is_assigned(rank: int, world: int) -> None:
    net, model, one = begun()
    for each in (net, one):
        for parameter in each.parameters():
            parameter.data = parameter.data * 2
            parameter.data -= 0.1 * parameter.grad.data
            parameter.data.mul_(0.9)
        each[0].weight.data = torch.arange(128, dtype=D).view(16, 8) / 128
        each.zero_grad()
    still_trains(net, model, one)


@scenario
def whole_values_are_copied(rank: int, world: int) -> None:
    net, model, one = begun()
    for each in (net, one):
        with torch.no_grad():
            each[0].weight.copy_(torch.arange(128, dtype=D).view(16, 8) / 128)
            each[2].weight.copy_(torch.full((16,), 0.1))  # of another dtype, and for every row
            each[2].bias.copy_(torch.ones(4, dtype=D))
        each.zero_grad()
    still_trains(net, model, one)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        net[0].weight.copy_(torch.zeros(16, 8, dtype=D))


@scenario
def parameters_become_a_vector_and_back(rank: int, world: int) -> None:
    net, model, one = begun()
    for each in (net, one):
        vector = nn.utils.parameters_to_vector(each.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, each.parameters())
        each.zero_grad()
    still_trains(net, model, one)


@scenario
def data_of_another_shape_or_dtype_is_refused(rank: int, world: int) -> None:
    net, _, _ = begun()
    weight = net[0].weight
    before = values(net)
    for data in (torch.ones(8, 8, dtype=D), torch.ones(16, 8)):
        with pytest.raises(sw.SettingError, match=r"is assigned to the parameter '0\.weight' of shape \(16, 8\)"):
            weight.data = data
    close(values(net), before)


@scenario
def a_copy_is_a_parameter_of_its_own(rank: int, world: int) -> None:
    net, _, _ = begun()
    weight = net[0].weight
    copied = copy.deepcopy(weight)
    assert isinstance(copied, nn.Parameter) and type(copied) is type(weight) and copied.requires_grad
    close(gathered(copied.grad), gathered(weight.grad))
    before = gathered(weight.detach())
    copied.data = torch.zeros(16, 8, dtype=D)
    close(gathered(weight.detach()), before)
    assert copied.abs().sum().item() == 0
    assert all(type(value) is DTensor for value in net.state_dict().values())  # which plain torch reads


@pytest.fixture(scope="module")
def results() -> list[dict[str, str | None]]:
    sw.init(devices=2)
    sw.AutoParallel(network()).dataset_strategy("full_batch")(X[0]).sum().backward()  # loaded once, before the fork
    return run_ranks(run_scenarios, 2, SCENARIOS)


@pytest.mark.skipif(not SUBCLASSES_HAVE_VIEWS, reason="parameters are plain DTensors with this torch")
@pytest.mark.parametrize("name", SCENARIOS)
def test_on_two_ranks(results: list[dict[str, str | None]], name: str) -> None:
    for rank, message in enumerate(results):
        assert message[name] is None, f"rank {rank}: {message[name]}"

"""Parameters of which each rank has a slice, in a script's own code after the first call: as on one device."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from one_device import close
from ranks import run_ranks, run_scenarios
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils import _pytree as pytree

import shardwright as sw
from shardwright.runtime.distributed import dtensors
from shardwright.runtime.distributed.dtensors import SUBCLASSES_HAVE_VIEWS, gathered
from shardwright.runtime.distributed.rank_positions import position

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
def a_dtensor_of_the_users_is_in_no_layout_of_a_model(rank: int, world: int) -> None:
    """Also where torch remembers an operator's result from a tensor of the other kind of the same shape."""
    net, _, _ = begun()
    mesh = init_device_mesh("cpu", (world,))
    theirs, mine = distribute_tensor(torch.ones(16, 8, dtype=D), mesh, [Shard(0)]), net[0].weight.detach()
    for x in (theirs, theirs + 1):
        assert dtensors.layout_of(x) is None
    for y in (mine, mine + 1):
        assert dtensors.layout_of(y) is not None and y.device_mesh != mesh and y.shape == theirs.shape
    holder = nn.Module()
    holder.weight = nn.Parameter(theirs)
    with pytest.raises(sw.CheckpointError, match="a DTensor that another library made"):
        sw.save_checkpoint(holder, path=tempfile.gettempdir() + "/never", step=0)


@scenario
def copies_of_the_model_compute_alike(rank: int, world: int) -> None:
    _, model, one = begun()
    for mine, whole in zip(copy.deepcopy(model).net.parameters(), one.parameters()):
        whole = whole.detach()
        close(mine.detach() + torch.ones_like(whole), whole + 1)
        assert abs(mine.norm().item() - whole.norm().item()) < 1e-12


@scenario
def slices_that_another_rank_has_saved_are_refused(rank: int, world: int) -> None:
    net, model, _ = begun()
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.step()
    dtensors._has_warned, file = False, io.BytesIO()
    with pytest.warns(UserWarning, match=r"a tensor of shape \[16, 8\]: rank . saves its slice of shape \[8, 8\]"):
        torch.save((model.state_dict(), optimizer.state_dict()), file)
    for content in (file.getvalue(), *exchanged(file.getvalue(), world)):
        weights, state = torch.load(io.BytesIO(content), weights_only=False)
        if content == file.getvalue():
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            optimizer.step()
            continue
        with pytest.raises(RuntimeError, match=f"slice of rank {1 - rank} is loaded on rank {rank}, into '0.weight"):
            model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        with pytest.raises(sw.SettingError, match=f"the slice of rank {1 - rank} is loaded on rank {rank}"):
            optimizer.step()


def exchanged(content: bytes, world: int) -> list[bytes]:
    contents = [b""] * world
    dist.all_gather_object(contents, content)
    return contents


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
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    assert all(type(value) is DTensor for value in torch.load(file).values())  # which plain torch reads


def plain(value: Any) -> Any:
    """A result with whole values, outside of autograd."""
    if isinstance(value, DTensor):
        return value.detach().full_tensor()
    if isinstance(value, float):
        return torch.tensor(value, dtype=D)
    return value.detach() if isinstance(value, Tensor) else value


def alike(net: nn.Module, one: nn.Module, functions: Sequence[Callable[[nn.Module], Any]]) -> None:
    """Each function gives with the parallel model what it gives with the other, with the same random numbers."""
    for number, function in enumerate(functions):
        made = []
        for each in (net, one):
            torch.manual_seed(number)
            made.append(pytree.tree_map(plain, function(each)))
        close(*made, f"function {number}: ")


def without_gradients(*functions: Callable[[Any], Any]) -> list[Callable[[nn.Module], Any]]:
    return [torch.no_grad()(function) for function in functions]


WHOLE = torch.arange(128, dtype=D).view(16, 8) / 128
ROWS = torch.tensor([0, 9, 3])


@scenario
def values_are_read(rank: int, world: int) -> None:
    net, _, one = begun()
    alike(
        net,
        one,
        [
            lambda n: [f"{p.norm():.3f} {p.grad.abs().mean():.2e} {p.std():.4f}" for p in n.parameters()],
            lambda n: format(n[0].weight.norm(), ".3f"),
            lambda n: [torch.from_numpy(p.detach().cpu().numpy()) for p in n.parameters()],
            lambda n: [torch.from_numpy(numpy.asarray(p.grad)) for p in n.parameters()],
            lambda n: [p.tolist() for p in n.parameters()],
            lambda n: numpy.histogram(n[2].weight.detach().numpy())[0].tolist(),
            lambda n: [float(n[0].weight.max()), float(n[2].weight.min()), n[0].weight[12, 3].item()],
            lambda n: sorted(float(p.norm()) for p in n.parameters())[0] > 1,
            lambda n: [float(row.sum()) for row in n[0].weight],
            lambda n: bool(torch.isnan(n[2].weight).any()),
            lambda n: [torch.equal(n[0].weight, n[0].weight * 1), torch.equal(n[0].weight, WHOLE)],
            lambda n: torch.allclose(n[0].weight, n[0].weight.detach().clone()),
        ],
    )
    with pytest.raises(RuntimeError, match="requires grad"):
        net[0].weight.numpy()
    assert f"[{8 * rank}:{8 * rank + 8}, :] of (16, 8), on rank {rank}: tensor(" in repr(net[0].weight)
    assert repr(net[0].weight.norm().detach()) == repr(one[0].weight.norm().detach())


@scenario
def functions_compute_with_whole_values(rank: int, world: int) -> None:
    net, _, one = begun()
    functions = without_gradients(
        lambda n: [n[0].weight + WHOLE, WHOLE - n[0].weight, n[0].weight == WHOLE, WHOLE @ n[0].weight.T],
        lambda n: F.linear(X[0], n[0].weight, n[0].bias),
        lambda n: torch.where(WHOLE > 0.3, n[0].weight, WHOLE),
        lambda n: [n[0].weight[0], n[2].weight[:, 3:9], n[0].weight[ROWS], n[0].weight[[0, 9]]],
        lambda n: n[0].weight[n[0].weight > 0],
        lambda n: [*n[0].weight.unbind(0), *n[2].weight.chunk(3, 1)],
        lambda n: torch.cat([n[0].weight, WHOLE]),
        lambda n: [n[0].weight.sign().unique(), n[0].weight.nonzero(), torch.cdist(n[0].weight, WHOLE)],
        lambda n: [torch.linalg.svdvals(n[0].weight), torch.linalg.matrix_norm(n[2].weight, 2)],
        lambda n: torch.stack([p.norm() for p in n.parameters()]).sum(),  # partial norms are no terms of a sum
        lambda n: [n[0].weight.new_zeros(3), n[0].weight.new_tensor([1.0, 2.0]), n[0].weight.new_ones(16, 8)],
        lambda n: [torch.rand_like(n[2].weight), torch.randn_like(n[0].weight), torch.randint_like(n[0].weight, 9)],
        lambda n: [torch.bernoulli(n[0].weight.abs()), F.dropout(n[2].weight)],
    )
    alike(net, one, functions)
    with pytest.raises(RuntimeError, match="must match the size"):
        net[0].weight + torch.ones(3, 5, dtype=D)


@scenario
def plain_tensors_take_whole_values(rank: int, world: int) -> None:
    net, _, one = begun()

    def averaged(n: nn.Module) -> list[Tensor]:
        other = network()
        for average, p in zip(other.parameters(), n.parameters()):
            average.data.mul_(0.9).add_(p.data, alpha=0.1)
        return [p.detach() for p in other.parameters()]

    def loaded(n: nn.Module) -> Tensor:
        other = network()
        other.load_state_dict(n.state_dict())
        return other(X[1])

    alike(net, one, [averaged, loaded])


@scenario
def parameters_are_changed(rank: int, world: int) -> None:
    changes: list[Callable[[Any], object]] = [
        lambda n: n[0].weight.add_(WHOLE, alpha=0.5),
        lambda n: n[0].weight.mul_(WHOLE > 0.2),
        lambda n: n[0].weight.masked_fill_(n[0].weight < 0, 0.1),
        lambda n: n[0].weight.__setitem__(0, 0.0),
        lambda n: n[0].weight.__setitem__(slice(3, 12), WHOLE[3:12]),
        lambda n: n[0].weight.__setitem__(n[0].weight < 0, 0.3),
        lambda n: n[2].weight.data.__setitem__(0, 0.0),
        lambda n: n[0].weight.index_fill_(0, ROWS, 0.1),
        lambda n: n[0].weight.renorm_(2, 0, 0.3),
        lambda n: n[0].weight.fill_diagonal_(1.0),
        lambda n: n[0].weight.data.clamp_(-0.1, 0.1),
        lambda n: n[0].weight.data.copy_(WHOLE),
        lambda n: n[0].weight.data.normal_(0, 0.02),
        lambda n: n[0].weight.add_(torch.randn_like(n[0].weight), alpha=0.1),
        lambda n: torch._foreach_mul_(list(n.parameters()), 0.9),
        lambda n: torch._foreach_add_(list(n.parameters()), [p.grad for p in n.parameters()], alpha=-0.1),
        lambda n: prune.l1_unstructured(copy.deepcopy(n[0]), "weight", amount=0.3),
    ]
    changes += [lambda n, f=f: f(n[0].weight) for f in (nn.init.eye_, nn.init.orthogonal_, nn.init.xavier_uniform_)]
    changes += [lambda n, f=f: f(n[2].weight) for f in (nn.init.orthogonal_, nn.init.normal_, nn.init.trunc_normal_)]
    changes += [lambda n: nn.init.sparse_(n[0].weight, 0.3), lambda n: nn.init.kaiming_uniform_(n[0].weight)]
    net, model, one = begun()
    for number, change in enumerate(changes):
        for each in (net, one):
            torch.manual_seed(number)
            with torch.no_grad():
                change(each)
        close(values(net), values(one), f"change {number}: ")
    for each in (net, one):
        each.zero_grad()
    still_trains(net, model, one)


@scenario
def random_numbers_are_those_of_rank_0(rank: int, world: int) -> None:
    net, _, one = begun()
    torch.manual_seed(7)
    nn.init.normal_(one[0].weight)
    nn.init.uniform_(one[2].bias)
    torch.manual_seed(7 + rank)
    own = torch.random.get_rng_state()
    nn.init.normal_(net[0].weight)
    nn.init.uniform_(net[2].bias)
    close(values(net), values(one))
    assert torch.equal(torch.random.get_rng_state(), own) == (rank > 0)


@scenario
def a_change_of_a_copy_is_refused(rank: int, world: int) -> None:
    net, _, one = begun()
    for change in (
        lambda: net[0].weight[9].zero_(),
        lambda: net[0].weight.data[3:12].fill_(1.0),
        lambda: next(iter(net[0].weight)).mul_(2),
    ):
        with torch.no_grad(), pytest.raises(sw.SettingError, match="the part is a copy") as caught:
            change()
        assert caught.value.source.startswith("test_sliced_tensors.py:") and "p[:2] = 0" in caught.value.legal
    with torch.no_grad():
        net[2].weight[1].zero_(), one[2].weight[1].zero_()  # of columns this rank has a part of each row
    close(values(net), values(one))
    with pytest.raises(RuntimeError, match="leaf Variable"):
        net[0].weight.add_(WHOLE)


def penalty_of_squares(n: nn.Module, loss: Tensor) -> Tensor:
    return loss + 0.01 * sum(p.square().sum() for p in n.parameters())


def penalty_of_norms(n: nn.Module, loss: Tensor) -> Tensor:
    loss = loss * (1 + n[0].weight.norm())
    for p in n.parameters():
        loss += 0.01 * torch.norm(p, 1)
    return loss + torch.stack([p.norm() for p in n.parameters()]).sum()


def penalty_of_whole_values(n: nn.Module, loss: Tensor) -> Tensor:
    w = n[0].weight
    loss = loss + ((w.T @ w - torch.eye(8, dtype=D)) ** 2).sum() + F.mse_loss(w, WHOLE)
    return loss + torch.cat([p.view(-1) for p in n.parameters()]).abs().mean()


PENALTIES = (penalty_of_squares, penalty_of_norms, penalty_of_whole_values)


@scenario
def penalties_are_added_outside_of_the_model(rank: int, world: int) -> None:
    for penalty in PENALTIES:
        net, model, one = begun()
        for x in X[1:]:
            losses = []
            for call, inner in ((model, net), (one, one)):
                loss = penalty(inner, call(x).square().mean())
                losses.append((loss.item(), f"{loss:.6f}"))
                loss.backward()
                nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
                torch.optim.SGD(inner.parameters(), 0.1).step()
                inner.zero_grad()
            assert abs(losses[0][0] - losses[1][0]) < 1e-9 and losses[0][1] == losses[1][1]
        close(values(net), values(one))


@scenario
def a_penalty_beside_each_ranks_own_loss_counts_once(rank: int, world: int) -> None:
    for penalty in PENALTIES:
        net = network()
        one = copy.deepcopy(net)
        model = sw.AutoParallel(net, parallel_mode="data_parallel").hsdp(threshold=0)
        model(X[0].chunk(world)[rank]).sum().backward()
        net.zero_grad()
        penalty(net, model(X[1].chunk(world)[rank]).square().mean()).backward()
        # of a product with the penalty the gradient is the mean of that of each rank, as the mean of their losses is
        (sum(penalty(one, one(x).square().mean()) for x in X[1].chunk(world)) / world).backward()
        for mine, whole in zip(net.parameters(), one.parameters()):
            close(plain(mine.grad), whole.grad)


@scenario
def gradients_are_asked_for_by_name(rank: int, world: int) -> None:
    net, model, one = begun()
    found = []
    for call, inner in ((model, net), (one, one)):
        inner.zero_grad()
        loss = penalty_of_squares(inner, call(X[1]).square().mean())
        loss.backward(inputs=[inner[0].weight, inner[2].bias], retain_graph=True)
        assert inner[2].weight.grad is None
        asked = torch.autograd.grad(loss, list(inner.parameters()))
        alone = torch.autograd.grad(inner[0].weight.square().sum(), inner[0].weight)
        inner[0].weight.abs().sum().backward(inputs=[inner[0].weight])
        found.append([plain(g) for g in (inner[0].weight.grad, inner[2].bias.grad, *asked, *alone)])
    close(*found)


@scenario
def an_average_is_swapped_in_and_back(rank: int, world: int) -> None:
    net, model, one = begun()
    results: list[list[Tensor]] = [[], []]
    for (call, inner), made in zip(((model, net), (one, one)), results):
        shadow = {name: p.data.clone() for name, p in inner.named_parameters()}
        for x in X:
            call(x).square().mean().backward()
            torch.optim.SGD(inner.parameters(), 0.1).step()
            inner.zero_grad()
            backup = {}
            for name, p in inner.named_parameters():
                shadow[name] = (0.9 * shadow[name] + 0.1 * p.data).clone()
                backup[name], p.data = p.data, shadow[name]
            made.append(call(X[0]).detach())
            for name, p in inner.named_parameters():
                p.data = backup[name]
    close(*results)
    close(values(net), values(one))


@scenario
def a_model_is_moved_to_where_it_is(rank: int, world: int) -> None:
    net, model, one = begun()
    weights = list(net.parameters())
    model.to("cpu"), net.to(D), model.double()
    assert all(p is q for p, q in zip(weights, net.parameters()))
    for each in (net, one):
        each.zero_grad()
    still_trains(net, model, one)
    with pytest.raises(sw.SettingError, match="float16 is assigned to the parameter '0.weight'"):
        model.half()
    with pytest.raises(sw.SettingError, match="'0.weight'.* memory|memory of the parameter '0.weight'") as caught:
        net[0].weight.storage()
    assert "save_checkpoint" in caught.value.legal


@scenario
def values_of_one_stage_are_read_from_the_whole_model(rank: int, world: int) -> None:
    net = network()
    one = copy.deepcopy(net)
    sw.init()
    sw.set_stage(net[0], 0), sw.set_stage(net[2], 1)
    model = sw.AutoParallel(net, nn.MSELoss()).dataset_strategy("full_batch").pipeline(stages=2, micro_batches=2)
    model(X[0], torch.zeros(8, 4, dtype=D)).backward()
    for read in (lambda: net[0].weight.norm().item(), lambda: net[2].weight.detach().numpy()):
        with pytest.raises(sw.SettingError, match="which one stage of a pipeline has alone, is read") as caught:
            read()
        assert "whole()" in caught.value.legal and "test_sliced_tensors.py:" in str(caught.value)
    with pytest.raises(sw.SettingError, match="is on the ranks of another stage"):
        sum(p.square().sum() for p in net.parameters())
    torch.manual_seed(3)
    for p in net.parameters():
        nn.init.normal_(p)
    torch.manual_seed(3)
    for p in one.parameters():
        nn.init.normal_(p)
    with model.whole() as whole:
        close(values(whole), values(one))


@scenario
def ranks_that_read_different_values_are_told(rank: int, world: int) -> None:
    net, _, _ = begun()
    with pytest.raises(sw.SettingError, match=r"rank 0 reads numpy\(\).* and rank 1 reads tolist\(\) of 0\.weight"):
        _ = net[0].weight.tolist() if rank else net[0].weight.detach().numpy()
    if rank == 0:
        assert net[2].bias.norm().item() > 0  # which each rank has whole


def dims_that_ranks_do_not_divide(rank: int, world: int) -> None:
    """On four ranks: rows of 2, 2, 1 and 0."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 6)).double()
    one = copy.deepcopy(net)
    sw.init()
    layout = sw.Layout((2, 2), ("a", "b"))
    sw.shard(net[0], (layout("None", "None"), layout(("a", "b"), "None")))
    model = sw.AutoParallel(net, uneven=True).dataset_strategy("full_batch")
    for call, inner in ((model, net), (one, one)):
        call(X[0])
        loss = call(X[0]).square().mean()
        (loss + inner[0].weight.square().sum() + F.mse_loss(inner[0].weight, WHOLE[:5])).backward()
    assert net[0].weight.to_local().shape[0] == (2, 2, 1, 0)[rank]
    close([plain(p.grad) for p in net.parameters()], [p.grad for p in one.parameters()])
    alike(
        net,
        one,
        [
            lambda n: [p.norm().item() for p in n.parameters()],
            lambda n: [p.detach().numpy().tolist() for p in n.parameters()],
            lambda n: [p.detach() + torch.ones(p.shape) for p in n.parameters()],
            lambda n: [n[0].weight.detach().flatten().sort().values, n[0].weight[2:5].sum().item()],
        ],
    )
    for each in (net, one):
        with torch.no_grad():
            each[0].weight.renorm_(2, 0, 0.3)
            each[0].weight[1:4] = 0.5
    close(gathered(net[0].weight.detach()), one[0].weight.detach())


@scenario
def a_broken_connection_is_no_reason_to_compute_the_whole(rank: int, world: int) -> None:
    """The watch of the ranks is asked for the reason of it, and of no other error: that takes seconds."""
    net, _, _ = begun()
    asked: list[Exception] = []
    with mock.patch.object(position, "explain", asked.append):
        for error in (
            dist.DistBackendError("closed"),
            dist.DistNetworkError("closed"),
            RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"),
        ):
            calls = []

            def fails(*args: Tensor, error: Exception = error) -> None:
                calls.append(args)
                raise error

            def fails_(*args: Tensor, error: Exception = error) -> None:
                calls.append(args)
                raise error

            for function in (fails, fails_):
                calls.clear(), asked.clear()
                with torch.no_grad(), pytest.raises(type(error), match="closed"):
                    torch.overrides.handle_torch_function(function, (net[0].weight,), net[0].weight)
                assert len(calls) == 1 and asked == [error], function
        asked.clear()
        with torch.no_grad():
            assert len(net[0].weight.unique()) == len(gathered(net[0].weight).unique())
            net[2].weight.sub_(net[2].weight.detach().norm(dim=0))
            net[0].weight.cumsum_(0)
        assert not asked


#: Rows, a column, a matrix and indices of a seed; functions that write to a parameter of (8, 8).
ROW, COLUMN, MATRIX = X[3][0], X[3][:, :1], X[2]
AT = torch.tensor([1, 6])
IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "addmm_": lambda p: p.addmm_(p.detach().clone(), p.detach().clone()),
    "add_ of the transposed": lambda p: p.add_(p.detach().t().clone()),
    "mul_ by a row": lambda p: p.mul_(ROW),
    "mul_ by a column": lambda p: p.mul_(COLUMN),
    "cumsum_ along rows": lambda p: p.cumsum_(0),
    "cumsum_ along columns": lambda p: p.cumsum_(1),
    "tril_": lambda p: p.tril_(),
    "sub_ of norms": lambda p: p.sub_(p.detach().norm(dim=0)),
    "div_ by norms": lambda p: p.div_(p.detach().norm(dim=1, keepdim=True)),
    "index_add_": lambda p: p.index_add_(0, AT, MATRIX[:2]),
    "index_fill_": lambda p: p.index_fill_(0, AT, 3.0),
    "masked_fill_": lambda p: p.masked_fill_(MATRIX > 0, 0.5),
    "clamp_": lambda p: p.clamp_(min=p.detach().mean()),
    "add_ of the sum": lambda p: p.add_(p.detach().sum()),
    "add_ of sums": lambda p: p.add_(p.detach().sum(0)),
    "addcmul_": lambda p: p.addcmul_(MATRIX, p.detach().mean(0)),
    "lerp_": lambda p: p.lerp_(MATRIX, 0.3),
    "fill_diagonal_": lambda p: p.fill_diagonal_(7.0),
    "copy_ of the sorted": lambda p: p.copy_(p.detach().sort(0).values),
    "renorm_": lambda p: p.renorm_(2, 0, 0.5),
    "addr_": lambda p: p.addr_(ROW, ROW),
    "scatter_": lambda p: p.scatter_(0, torch.zeros(1, 8, dtype=torch.long), 1.0),
    "copy_ of a row": lambda p: p.copy_(ROW),
    "copy_ of sums": lambda p: p.copy_(p.detach().sum(0)),
    "copy_ of the flipped": lambda p: p.copy_(p.detach().flip(0)),
    "add_ of the rolled": lambda p: p.add_(p.detach().roll(1, 0)),
}


@scenario
def functions_that_write(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.ReLU(), nn.Linear(8, 8, dtype=D))
    one = copy.deepcopy(net)
    sw.init()
    sw.shard(net[0], ((1, 1), (2, 1)))
    sw.shard(net[2], ((1, 2), (1, 2)))
    sw.AutoParallel(net).dataset_strategy("full_batch")(X[0])
    assert net[0].weight.to_local().shape == (4, 8) and net[2].weight.to_local().shape == (8, 4)
    for k in (0, 2):  # cut by rows, by columns
        for name, write in IN_PLACE.items():
            for n in (net, one):
                with torch.no_grad():
                    n[k].weight.copy_(X[1])
                    write(n[k].weight)
            close(gathered(net[k].weight.detach()), one[k].weight.detach(), name)


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


@pytest.mark.skipif(not SUBCLASSES_HAVE_VIEWS, reason="parameters are plain DTensors with this torch")
def test_dims_that_ranks_do_not_divide() -> None:
    run_ranks(dims_that_ranks_do_not_divide, 4)

"""The model in processes is still the user's model: whole parameters for a while, copies, averages, and errors that say
so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from one_device import close, parallel
from ranks import run_ranks, run_scenarios
from small_networks import D, draw
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import shardwright as sw

WORLD = 4
X, Y = draw(8, 8), draw(8, 8, seed=1)


class Net(nn.Module):
    """Tied weights, a batch norm, a parameter of its own; writes itself to a file and generates."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.norm = nn.Linear(8, width, dtype=D), nn.BatchNorm1d(width, dtype=D)
        self.scale = nn.Parameter(torch.ones(width, dtype=D) * 1.5)
        self.middle, self.down = nn.Linear(width, width, dtype=D), nn.Linear(width, 8, dtype=D)
        self.again = nn.Linear(width, width, bias=False, dtype=D)
        self.again.weight = self.middle.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.up(x))) * self.scale
        return self.down(self.again(torch.tanh(self.middle(x))))

    def features(self, x: Tensor) -> Tensor:
        return self.up(x)

    def generate(self, x: Tensor, steps: int = 2) -> Tensor:
        """The forward, again and again, without gradients."""
        with torch.no_grad():
            for _ in range(steps):
                x = self(x)
        return x

    def save_pretrained(self, path: str | Path) -> None:
        torch.save(self.state_dict(), Path(path) / "weights.pt")


def marked() -> Net:
    net = Net()
    sw.shard(net.up, ((2, 1), (2, 1)))
    sw.shard(net.down, ((1, 4), (1, 4)))
    return net


def plain(model: sw.AutoParallel) -> sw.AutoParallel:
    return model


#: Name -> (the model, settings of the wrapper, further ones).
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[[sw.AutoParallel], Any]]] = {
    "marks": (marked, {}, plain),
    "hsdp": (marked, {}, lambda model: model.hsdp(threshold=0, optimizer_level="level3")),
    "uneven": (lambda: uneven(), {"uneven": True}, plain),
    "data_parallel": (Net, {"parallel_mode": "data_parallel", "sync_batch_norm": True}, plain),
    "pipeline": (
        Net,
        {},
        lambda model: model.pipeline(
            2, micro_batches=2, scheduler="gpipe", stage_config={"up": 0, "norm": 0, "middle": 1, "again": 1, "down": 1}
        ).hsdp(threshold=0),
    ),
}


def uneven() -> Net:
    net = Net(width=10)
    sw.shard(net.up, ((1, 1), (4, 1)))
    sw.shard(net.down, ((1, 4), (1, 4)))
    return net


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def wrapped(kind: str, net: nn.Module | None = None) -> tuple[nn.Module, sw.AutoParallel]:
    make, options, settle = KINDS[kind]
    net = make() if net is None else net
    model = sw.AutoParallel(net, nn.MSELoss(), **options).dataset_strategy("full_batch")
    settle(model)
    return net, model


def steps(
    call: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer, count: int = 2, shift: float = 0.0
) -> Tensor:
    losses = []
    for i in range(count):
        loss = call(X + shift + i, Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def on_one(net: nn.Module, kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The same on one device; batch norms of a pipeline train by the statistics of each micro-batch."""
    if kind != "pipeline":
        return lambda x, y: nn.functional.mse_loss(net(x), y)
    return lambda x, y: torch.stack([nn.functional.mse_loss(net(a), b) for a, b in zip(x.chunk(2), y.chunk(2))]).mean()


def state(model: sw.AutoParallel) -> dict[str, Tensor]:
    with model.whole() as net:
        return {name: value.clone() for name, value in net.state_dict().items()}


def refused(body: Callable[[], Any], *words: str) -> str:
    """The text of a body's error, which has these words."""
    with pytest.raises(sw.ShardwrightError) as raised:
        body()
    for word in words:
        assert word in str(raised.value), str(raised.value)
    return str(raised.value)


# -- the whole model ---------------------------------------------------------------------------------------------------


def as_on_one_device(kind: str) -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        net, model = wrapped(kind)
        one = copy.deepcopy(net)
        optimizer, other = sgd(net), sgd(one)
        close(steps(model, optimizer), steps(on_one(one, kind), other), "losses before")
        held = dict(net.named_parameters())
        assert (
            any(isinstance(p, DTensor) and p.to_local().numel() < one.get_parameter(n).numel() for n, p in held.items())
            or kind == "data_parallel"
        )
        with model.whole() as whole:
            assert whole is net and whole.again.weight is whole.middle.weight
            assert all(type(p) is nn.Parameter for p in net.parameters())
            close(dict(net.state_dict()), dict(one.state_dict()), "whole parameters and buffers")
            close(net.eval()(X), one.eval()(X), "outputs")
            close(copy.deepcopy(net)(X), one(X), "outputs of a copy")
            net.train(), one.train()
        assert {n: id(p) for n, p in net.named_parameters()} == {n: id(p) for n, p in held.items()}
        assert model.up.weight is held["up.weight"] and net.again.weight is net.middle.weight
        close(model.generate(X, steps=1), one.generate(X, steps=1), "generated")
        close(steps(model, optimizer, shift=0.5), steps(on_one(one, kind), other, shift=0.5), "losses after")
        with model.whole(rank=1) as whole:
            assert (whole is net) == (rank == 1) and (whole is None) == (rank != 1)
            if rank == 1:
                close(dict(net.named_parameters()), dict(one.named_parameters()), "at the end, on rank 1")
            else:
                assert isinstance(net.up.weight, DTensor)

    return scenario


def changes_are_written_back(kind: str) -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        net, model = wrapped(kind)
        one = copy.deepcopy(net)
        optimizer, other = sgd(net), sgd(one)
        steps(model, optimizer), steps(on_one(one, kind), other)
        other_weights = copy.deepcopy(one.state_dict())
        other_weights["down.bias"] = draw(8, seed=9)

        def change(whole: nn.Module) -> None:
            whole.up.weight.data.mul_(1.25)  # unseen by version counters
            with torch.no_grad():
                whole.middle.weight[0].add_(1.0)
            whole.down.weight = nn.Parameter(whole.down.weight.detach() * 2)
            whole.norm.running_mean.add_(0.25)
            whole.norm.running_var = whole.norm.running_var * 2

        change(one)
        with model.whole() as whole:
            change(whole)
        close(state(model), dict(one.state_dict()), "after changes")
        one.load_state_dict(other_weights)
        with model.whole(rank=world - 1) as whole:
            if whole is not None:
                whole.load_state_dict(other_weights)
        close(state(model), dict(one.state_dict()), "after what one rank has loaded")
        assert net.again.weight is net.middle.weight
        other = sgd(one)
        optimizer = sgd(net)
        close(steps(model, optimizer), steps(on_one(one, kind), other), "losses after")

    return scenario


def other_changes_are_errors(rank: int, world: int) -> None:
    net, model = wrapped("marks")
    steps(model, sgd(net))
    before, names, order = state(model), dict(net.named_modules()), [*map(id, net.parameters())]

    def inside(change: Callable[[nn.Module], Any], rank: int | None = None) -> Callable[[], None]:
        def body() -> None:
            with model.whole(rank) as whole:
                if whole is not None:
                    change(whole)

        return body

    def one_rank_alone(whole: nn.Module) -> None:
        if rank == 2:
            whole.up.weight.data[0, 0] = 7.0

    def each_its_own(whole: nn.Module) -> None:
        whole.up.weight.data[0, 0] = float(rank)
        whole.norm.running_mean[0] = 1.0

    refused(inside(one_rank_alone), "'up.weight'", "rank 2 alone", "nothing was written back")
    refused(inside(each_its_own), "'up.weight'", "different values")
    refused(inside(lambda whole: whole(X).sum().backward()), "has a gradient", "no_grad")
    refused(inside(lambda whole: setattr(whole, "down", nn.Linear(16, 8, dtype=D))), "new parameter")
    refused(inside(lambda whole: setattr(whole, "up", nn.Linear(8, 17, dtype=D)), 0), "new parameter", "on rank 0")
    refused(
        inside(lambda whole: setattr(whole.up, "bias", nn.Parameter(torch.zeros(3, dtype=D)))),
        "'up.bias' of shape (16,)",
    )
    refused(inside(lambda whole: delattr(whole, "scale")), "'scale' was removed")
    refused(inside(lambda whole: whole.register_buffer("count", torch.zeros(2))), "'count' of shape (2,) is new")
    refused(inside(lambda whole: whole.up.requires_grad_(False)), "requires_grad of 'up.weight' was changed")
    refused(inside(lambda whole: setattr(whole, "act", nn.ReLU())), "modules were added")
    refused(inside(lambda whole: setattr(whole.again, "weight", nn.Parameter(whole.again.weight.detach() + 1))), "tied")
    close(state(model), before, "after errors")
    assert dict(net.named_modules()) == names and [*map(id, net.parameters())] == order


def an_error_on_one_rank_is_one_on_all(rank: int, world: int) -> None:
    net, model = wrapped("marks")
    optimizer = sgd(net)
    steps(model, optimizer)
    before = state(model)
    with pytest.raises(ValueError if rank == 3 else Exception, match="no room"), model.whole():
        net.up.weight.data.mul_(2)
        if rank == 3:
            raise ValueError("no room")
    with pytest.raises(Exception, match="No such file|nowhere|does not exist"):
        model.save_pretrained("/nowhere/at/all")
    refused(lambda: model.whole(rank=9).__enter__(), "whole(rank=9) of 4 ranks")
    refused(lambda: model.whole(rank=rank).__enter__(), "on ranks 0 to 3")
    close(state(model), before, "after errors")
    steps(model, optimizer)


def inside_and_outside(rank: int, world: int) -> None:
    net, model = wrapped("marks")
    optimizer = sgd(net)
    with model.whole() as whole:  # nothing is cut yet
        assert whole is net and type(net.up.weight) is nn.Parameter
    model(X, Y).backward()
    with model.whole():
        refused(lambda: model(X, Y), "inside of whole()", "net(")
        refused(optimizer.step, "SGD.step() inside of whole()")
        close(model.generate(X), net.generate(X), "generated inside")
        with model.whole(rank=2) as inner:
            assert (inner is net) == (rank == 2)
    with model.whole(rank=0) as whole:
        refused(lambda: model.whole().__enter__(), "inside of whole(rank=0)")
        if rank:
            refused(lambda: model.generate(X), "on rank")
    optimizer.step()
    for part in (
        lambda: net(X),
        lambda: net.down(draw(4, 16)),
        lambda: model.norm(draw(4, 16)),
        lambda: model.features(X),
        lambda: net.generate(X),
    ):
        refused(part, "is called by itself", "with model.whole()", "test_whole_model.py:")
    torch.nn.functional.mse_loss(model.generate(X), Y)


def some_have_no_whole(rank: int, world: int) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = sw.layerwise_parallel(lambda r: draw(8, 8, seed=r))

        def forward(self, x: Tensor) -> Tensor:
            return sw.ops.all_reduce(x @ self.w)

    model = sw.AutoParallel(Own(), nn.MSELoss(), parallel_mode="hybrid_parallel").dataset_strategy("full_batch")
    for _ in range(2):
        refused(lambda: model.whole().__enter__(), "'w' is layerwise_parallel", "save_checkpoint")
        model(X, Y).backward()
    with sw.no_init_parameters():
        net = Net()
    model = sw.AutoParallel(net, nn.MSELoss())
    refused(lambda: model.whole().__enter__(), "no values yet", "after the first call")


# -- copies and averages -----------------------------------------------------------------------------------------------


def copies_train_by_themselves(kind: str, *made_before: bool) -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        for before in made_before:
            net, model = wrapped(kind)
            one = copy.deepcopy(net)
            optimizer, other = sgd(net), sgd(one)
            if not before:
                steps(model, optimizer, 1), steps(on_one(one, kind), other, 1)
                model(X, Y).backward(), on_one(one, kind)(X, Y).backward()  # gradients are not copied
            made, one_made = copy.deepcopy(model), copy.deepcopy(one)
            assert all(p.grad is None for p in made.parameters())
            copied, other_copied = sgd(made), sgd(one_made)
            close(steps(model, optimizer), steps(on_one(one, kind), other), "the model's losses")
            close(
                steps(made, copied, shift=0.5),
                steps(on_one(one_made, kind), other_copied, shift=0.5),
                "the copy's losses",
            )
            close(steps(model, optimizer, 1), steps(on_one(one, kind), other, 1), "the model's losses, again")
            close(state(model), dict(one.state_dict()), "the model")
            close(state(made), dict(one_made.state_dict()), "the copy")
            assert made.net.again.weight is made.net.middle.weight and made.net is not net
            refused(lambda: made.hsdp(), "too late")

    return scenario


def averages(kind: str, made_before: bool, ema: bool) -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        net, model = wrapped(kind)
        one = copy.deepcopy(net)
        optimizer, other = sgd(net), sgd(one)
        average = get_ema_multi_avg_fn(0.8) if ema else None
        if not made_before:
            steps(model, optimizer, 1), steps(on_one(one, kind), other, 1)
        ours = AveragedModel(model, multi_avg_fn=average, use_buffers=False)
        theirs = AveragedModel(one, multi_avg_fn=average, use_buffers=False)
        for _ in range(3):
            steps(model, optimizer, 1), steps(on_one(one, kind), other, 1)
            ours.update_parameters(model), theirs.update_parameters(one)
        close(state(ours.module), dict(theirs.module.state_dict()), "averages")
        assert all(isinstance(p, DTensor) for p in ours.parameters())
        with ours.module.whole() as whole, torch.no_grad():
            close(whole.eval()(X), theirs.module.eval()(X), "outputs of the averages")
            update_bn([X, X + 1], whole), update_bn([X, X + 1], theirs.module)
        close(state(ours.module), dict(theirs.module.state_dict()), "statistics for the averages")
        ours.train(), theirs.train()
        close(ours(X, Y).detach(), on_one(theirs.module, kind)(X, Y).detach(), "the loss of the averages")
        close(steps(model, optimizer), steps(on_one(one, kind), other), "losses after")

    return scenario


def a_loaded_average_is_cut_with_its_own_values(rank: int, world: int) -> None:
    net, model = wrapped("uneven")
    ours = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1.0)
    ours.n_averaged += 1
    one, before = (
        {n: p.detach().clone() for n, p in net.named_parameters()},
        copy.deepcopy(dict(ours.module.named_parameters())),
    )
    model(X, Y)
    ours.update_parameters(model)
    with ours.module.whole() as whole:
        close(dict(whole.named_parameters()), {n: (before[n] + one[n]) / 2 for n in one}, "averages")


def copies_of_unborn_parameters(rank: int, world: int) -> None:
    torch.manual_seed(5)
    with sw.no_init_parameters():
        net = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.ReLU(), nn.Linear(8, 8, dtype=D))
    sw.shard(net[0], ((1, 1), (4, 1)))
    model = sw.AutoParallel(net, nn.MSELoss()).dataset_strategy("full_batch")
    ours = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = sgd(net)
    model(X, Y).backward()
    began = state(model)
    ours.update_parameters(model)
    optimizer.step()
    ours.update_parameters(model)
    now = state(model)
    close(state(ours.module), {n: (began[n] + now[n]) / 2 for n in now}, "averages")


SCENARIOS: dict[str, Callable[[int, int], None]] = {
    **{f"as_on_one_device[{kind}]": as_on_one_device(kind) for kind in KINDS},
    **{f"changes_are_written_back[{kind}]": changes_are_written_back(kind) for kind in ("uneven", "pipeline")},
    "other_changes_are_errors": other_changes_are_errors,
    "an_error_on_one_rank_is_one_on_all": an_error_on_one_rank_is_one_on_all,
    "inside_and_outside": inside_and_outside,
    "some_have_no_whole": some_have_no_whole,
    "copies_train_by_themselves[uneven]": copies_train_by_themselves("uneven", True, False),
    "averages[hsdp, after, swa]": averages("hsdp", False, False),
    "a_loaded_average_is_cut_with_its_own_values": a_loaded_average_is_cut_with_its_own_values,
    "copies_of_unborn_parameters": copies_of_unborn_parameters,
}
#: Those of stages of one rank.
ON_TWO: dict[str, Callable[[int, int], None]] = {
    "copies_train_by_themselves[pipeline]": copies_train_by_themselves("pipeline", False),
    "averages[pipeline, before, ema]": averages("pipeline", True, True),
}


def on_ranks(rank: int, world: int) -> dict[str, str | None]:
    sw.init()
    return run_scenarios(rank, world, SCENARIOS if world == WORLD else ON_TWO)


@pytest.fixture(scope="module")
def results() -> dict[str, list[str | None]]:
    """The results of each scenario, by rank."""
    return {
        name: [texts[name] for texts in by_rank]
        for by_rank in (run_ranks(on_ranks, world) for world in (WORLD, 2))
        for name in by_rank[0]
    }


@pytest.mark.long
@pytest.mark.parametrize("name", [*SCENARIOS, *ON_TWO])
def test_on_processes(results: dict[str, list[str | None]], name: str) -> None:
    for rank, text in enumerate(results[name]):
        assert text is None, f"rank {rank}:\n{text}"


# -- in one process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def local() -> Iterator[None]:
    sw.init(devices=4)
    yield


def test_in_one_process(local: None, tmp_path: Path) -> None:
    net, model = wrapped("marks")
    one = copy.deepcopy(net)
    optimizer, other = sgd(net), sgd(one)
    for _ in range(2):
        with model.whole(rank=2) as whole:
            assert whole is net
            refused(lambda: model(X, Y), "inside of whole()")
            whole.up.weight.data.mul_(1.5), one.up.weight.data.mul_(1.5)
        close(steps(model, optimizer), steps(on_one(one, "marks"), other), "losses")
        close(model.generate(X), one.generate(X), "generated")
        close(model.features(X), one.features(X), "a method of the model")
    model.save_pretrained(tmp_path)
    close(dict(torch.load(tmp_path / "weights.pt")), dict(one.state_dict()), "saved")
    refused(lambda: model.whole(rank=4).__enter__(), "whole(rank=4) of 4 ranks")
    with pytest.raises(AttributeError, match="sample"):
        model.sample


@pytest.mark.parametrize("before", [True, False])
def test_copies_and_averages_in_one_process(local: None, before: bool) -> None:
    net, model = wrapped("hsdp")
    one = copy.deepcopy(net)
    optimizer, other = sgd(net), sgd(one)
    if not before:
        steps(model, optimizer, 1), steps(on_one(one, "hsdp"), other, 1)
    made, one_made = copy.deepcopy(model), copy.deepcopy(one)
    ours, theirs = (AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.8)) for m in (model, one))
    for _ in range(2):
        close(steps(model, optimizer), steps(on_one(one, "hsdp"), other), "losses")
        ours.update_parameters(model), theirs.update_parameters(one)
    close(steps(made, sgd(made)), steps(on_one(one_made, "hsdp"), sgd(one_made)), "the copy's losses")
    close(dict(ours.module.state_dict()), dict(theirs.module.state_dict()), "averages")
    close(ours(X, Y).detach(), on_one(theirs.module, "hsdp")(X, Y).detach(), "the loss of the averages")


def test_an_average_of_unborn_parameters_in_one_process(local: None) -> None:
    with sw.no_init_parameters():
        net = nn.Linear(8, 8, dtype=D)
    model = sw.AutoParallel(net, nn.MSELoss())
    ours = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = sgd(net)
    model(X, Y).backward()
    ours.update_parameters(model)
    began = net.weight.detach().clone()
    optimizer.step()
    ours.update_parameters(model)
    close(ours.module.weight.detach(), (began + net.weight.detach()) / 2)


def test_copies_keep_settings_and_own_state(local: None) -> None:
    _net, model = wrapped("hsdp")
    model.note = ["of the user's"]
    made = copy.deepcopy(model)
    assert made.settings == model.settings and made.note == model.note and made.note is not model.note
    made.hsdp(shard_size=2, threshold=0)  # its own, as it has not been called
    assert made.settings != model.settings
    model(X, Y)
    close(made(X, Y).detach(), model(X, Y).detach())
    assert made.plan.hsdp.shard_size == 2 and model.plan.hsdp.shard_size == -1


# -- other wrappers ----------------------------------------------------------------------------------------------------


def around(wrap: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    return lambda: wrap(parallel(nn.Linear(8, 8), devices=2))


def inside(wrap: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    def build() -> Any:
        layer = nn.Linear(8, 8)
        made = wrap(layer)
        return parallel(nn.Sequential(layer if made is None else made), devices=2)

    return build


def later(wrap: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    def build() -> Any:
        net = nn.Sequential(nn.Linear(8, 8))
        model = parallel(net, devices=2)
        made = wrap(net[0])
        net[0] = net[0] if made is None else made
        return model(torch.randn(4, 8))

    return build


@pytest.mark.parametrize("place", [around, inside, later])
@pytest.mark.parametrize(
    "wrap",
    [torch.compile, lambda net: net.compile(), nn.DataParallel],
    ids=["torch.compile", "compile", "DataParallel"],
)
def test_other_wrappers_say_what_to_do_instead(place: Callable, wrap: Callable) -> None:
    text = refused(place(wrap), "compile=True" if wrap is not nn.DataParallel else 'parallel_mode="data_parallel"')
    assert "around a parallel model" in text or "compile() of a parallel model" in text or "wrapped by" in text


def distributed_wrappers(rank: int, world: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    sw.init()
    for wrap, words in (
        (DistributedDataParallel, ("DistributedDataParallel", 'parallel_mode="data_parallel"')),
        (fully_shard, ("hsdp",)),
    ):
        refused(lambda: wrap(sw.AutoParallel(nn.Linear(8, 8))), *words)
        refused(lambda: sw.AutoParallel(nn.Sequential(wrap(nn.Linear(8, 8)))), *words, "'0'")
        refused(lambda: sw.AutoParallel(wrap(nn.Linear(8, 8))), *words)
        net = nn.Sequential(nn.Linear(8, 8))
        model = sw.AutoParallel(net)
        net[0] = wrap(net[0])
        refused(lambda: model(torch.randn(4, 8)), *words)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8))
    model = sw.AutoParallel(net, nn.MSELoss()).dataset_strategy("full_batch")
    loss = model(torch.ones(4, 8), torch.ones(4, 8))
    refused(lambda: DistributedDataParallel(model), "DistributedDataParallel around")
    refused(lambda: DistributedDataParallel(net), "DistributedDataParallel around")
    refused(lambda: torch.compile(net), "torch.compile around")
    refused(lambda: fully_shard(model), "fully_shard around")
    assert model(torch.ones(4, 8), torch.ones(4, 8)) == loss


def test_distributed_wrappers_say_what_to_do_instead() -> None:
    run_ranks(distributed_wrappers, 2)


def test_what_a_model_takes_is_told_by_its_signature(local: None) -> None:
    import inspect

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, dtype=D)

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.layer(tokens if mask is None else tokens * mask)

    model = sw.AutoParallel(Named())
    assert list(inspect.signature(model.forward).parameters) == ["tokens", "mask"]
    assert list(inspect.signature(sw.AutoParallel(Named(), nn.MSELoss()).forward).parameters) == ["args", "kwargs"]
    close(model(X, mask=X), model.net(X, X))

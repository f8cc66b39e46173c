"""Pipelines on four ranks: each holds its stage alone, and trains, evaluates and fails as one device does."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from held_bytes import Alive
from one_device import close
from pipeline_networks import Chain, TiedEnds, batches, setting, staged
from ranks import RankFailed, run_ranks, run_scenarios
from small_networks import D, draw, labels
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam

import shardwright as sw
from shardwright.errors import SettingError

WORLD = 4
SCHEDULERS = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
TWO = dict(stages=2, micro_batches=4, stage_config=staged(2))


def part_of(x: Tensor, rank: int, feed: str, stages: int) -> Tensor:
    """The part that a rank feeds: ranks at one position in their stages feed the same."""
    count = WORLD // stages
    return x if feed == "full_batch" else x.chunk(count)[rank % count]


def same_everywhere(x: Tensor) -> None:
    """A number of all ranks, to the bit."""
    message = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(message, x.detach().contiguous())
    assert all(torch.equal(s, x) for s in message)


def same_part(tensor: Tensor, expected: Tensor, plan: sw.PipelinePlan, name: str, text: str) -> None:
    """The part that this rank has of a parameter, or of its gradient, is that part on one device; ranks of other stages
    have nothing, and the parts of a stage are the whole. Nothing is sent."""
    parameter, rank = plan.parameters[name], dist.get_rank()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if rank in parameter.ranks:
        close(local, expected[parameter.slice(rank)], text)
    else:
        assert not local.numel(), text
    covered = torch.zeros(parameter.shape, dtype=torch.bool)
    for other in parameter.ranks:
        covered[parameter.slice(other)] = True
    assert covered.all(), text


def check(
    net: nn.Module,
    pipeline: dict,
    rank: int,
    *,
    loss_fn: Any = None,
    feed: str = "full_batch",
    given: Any = None,
    optimizers: Sequence[Callable] = (partial(Adam, lr=0.01),),
    settle: Callable = lambda model: None,
    reference: Callable | None = None,
    clip: float | None = 0.1,
    mode: str = "semi_auto",
) -> sw.AutoParallel:
    """Train here and on one device, with each optimizer in turn, of which the first is older than the first call:
    losses, norms of gradients, gradients, and parameters agree."""
    loss_fn = loss_fn or nn.MSELoss()
    one = copy.deepcopy(net)
    model = sw.AutoParallel(net, loss_fn, parallel_mode=mode).pipeline(**pipeline).dataset_strategy(feed)
    settle(model)
    for make in optimizers:
        ours, theirs = make(net.parameters()), make(one.parameters())
        for batch in given or batches(2):
            loss = model(*(part_of(x, rank, feed, pipeline["stages"]) for x in batch))
            expected = (reference or (lambda one, *b: loss_fn(one(*b[:-1]), b[-1])))(one, *batch)
            close(loss.detach(), expected.detach(), "loss")
            same_everywhere(loss)
            loss.backward(), expected.backward()
            if clip is not None:
                close(*(torch.as_tensor(nn.utils.clip_grad_norm_(n.parameters(), clip)) for n in (net, one)), "norm")
            for (name, p), q in zip(net.named_parameters(), one.parameters()):
                same_part(p.grad, q.grad, model.plan, name, f"gradient of {name}")
            ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
        for (name, p), q in zip(net.named_parameters(), one.parameters()):
            same_part(p.detach(), q.detach(), model.plan, name, f"{name}, {type(ours).__name__}")
    return model


def chain(rank: int, scheduler: str, feed: str, marked: bool = True, **kind: bool) -> sw.AutoParallel:
    given = setting(scheduler, 4)
    net = Chain(**kind)
    if marked and given["stages"] == 2:
        sw.shard(net.layers[2], ((1, 2), (1, 2), (1,)))
    return check(net, given, rank, feed=feed)


# -- scenarios: each on all ranks, in turn -----------------------------------------------------------------------------

SCENARIOS: dict[str, Callable[[int, int], None]] = {}


def scenario(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    SCENARIOS[function.__name__] = function
    return function


for _scheduler, _kinds, _feed in (
    ("gpipe", ("tied", "skip"), "data_parallel"),
    ("1f1b", ("tied", "skip"), "full_batch"),
    ("zero_bubble", ("tied", "skip"), "full_batch"),
    ("interleaved", ("tied",), "full_batch"),
    ("interleaved", ("skip",), "data_parallel"),
    ("zbv", ("tied",), "data_parallel"),
    ("zbv", ("skip",), "full_batch"),
):
    SCENARIOS[", ".join((_scheduler, *_kinds, _feed))] = lambda rank, world, s=_scheduler, f=_feed, kinds=_kinds: (
        chain(rank, s, f, "tied" not in kinds, **dict.fromkeys(kinds, True)) and None
    )


@scenario
def stages_hold_nothing_of_others(rank: int, world: int) -> None:
    model = chain(rank, "1f1b", "full_batch")
    for i, layer in enumerate(model.net.layers):
        mine = i == rank  # four stages of one rank
        assert layer.weight.to_local().shape == ((16, 16) if mine else (0,))


@scenario
def an_optimizer_keeps_nothing_for_others(rank: int, world: int) -> None:
    net = Chain()
    model = sw.AutoParallel(net, nn.MSELoss()).pipeline(**setting("1f1b", 4)).dataset_strategy("full_batch")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    model(*batches(1)[0]).backward()
    optimizer.step()
    kept = [p in optimizer.state for p in net.parameters()]
    assert kept == [p.to_local().numel() > 0 for p in net.parameters()] and any(kept) and not all(kept)
    assert all(p.grad is not None for p in net.parameters())  # those of others are back: every rank has as many
    same_everywhere(nn.utils.get_total_norm([p.grad for p in net.parameters()]))


@scenario
def optimizer_parallel_at_every_level(rank: int, world: int) -> None:
    for level in ("level1", "level2", "level3"):
        model = check(
            Chain(tied=True, skip=True), TWO, rank, settle=lambda m: m.hsdp(threshold=0, optimizer_level=level)
        )
        shapes = [layer.bias.to_local().shape for layer in model.net.layers]
        assert shapes == ([(8,), (8,), (0,), (0,)] if rank < 2 else [(0,), (0,), (8,), (8,)])


@scenario
def a_stage_whose_only_trained_parameter_belongs_to_another_one(rank: int, world: int) -> None:
    """Its ranks train nothing of their own, and call backward and step all the same."""
    given = dict(stages=2, micro_batches=4, stage_config={"first": 0, "inner": 0, "last": 1})
    for scheduler, level in (("1f1b", None), ("zero_bubble", "level2")):
        settle = (lambda m: m) if level is None else (lambda m: m.hsdp(threshold=0, optimizer_level="level2"))
        model = check(TiedEnds(), given | {"scheduler": scheduler}, rank, feed="data_parallel", settle=settle)
        held = [p.to_local().numel() for p in model.net.parameters()]
        assert all(held) if rank < 2 else not any(held)


@scenario
def level_2_holds_parts_of_gradients(rank: int, world: int) -> None:
    """The most that a process holds in a step: level 1 has the whole gradients of both layers of its stage, level 2
    that of one layer at a time."""
    whole = 2 * 128 * 128 * 8
    for scheduler in ("1f1b", "zero_bubble"):
        peaks = {}
        for level in ("level1", "level2"):
            net = Chain(width=128)
            model = sw.AutoParallel(net, nn.MSELoss()).dataset_strategy("full_batch")
            model.pipeline(**dict(TWO, scheduler=scheduler)).hsdp(threshold=16, optimizer_level=level)
            with Alive() as alive:
                for _ in range(2):
                    net.zero_grad()
                    alive.peak = alive.now()
                    model(*batches(1, width=128)[0]).backward()
            peaks[level] = alive.peak
        assert peaks["level1"] - peaks["level2"] > whole / 4, (scheduler, peaks)


@scenario
def recomputed(rank: int, world: int) -> None:
    for scheduler in ("1f1b", "zbv"):
        net = Chain(tied=True)
        sw.recompute(net.layers[1]), sw.recompute(net.layers[2])
        check(
            net,
            setting(scheduler, 4),
            rank,
            feed="data_parallel",
            settle=lambda m: m.hsdp(threshold=0, optimizer_level="level3"),
        )


@scenario
def every_kind_of_optimizer(rank: int, world: int) -> None:
    """Most of whose parameters are empty on a rank."""
    check(
        Chain(tied=True),
        TWO,
        rank,
        optimizers=(
            partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.3),  # notes something when it is built
            partial(SGD, lr=0.1, momentum=0.9, foreach=True),
            partial(Adam, lr=0.01, fused=True),
            partial(torch.optim.RMSprop, lr=0.01),
            partial(torch.optim.AdamW, lr=0.01, foreach=True),
        ),
    )


@scenario
def compiled(rank: int, world: int) -> None:
    net = Chain()
    one = copy.deepcopy(net)
    model = sw.AutoParallel(net, nn.MSELoss(), compile="aot_eager").pipeline(**TWO).dataset_strategy("full_batch")
    for x, y in batches(2):
        loss, expected = model(x, y), nn.MSELoss()(one(x), y)
        close(loss.detach(), expected.detach())
        loss.backward(), expected.backward()
    for (name, p), q in zip(net.named_parameters(), one.named_parameters()):
        same_part(p.grad, q[1].grad, model.plan, name, name)


@scenario
def searched(rank: int, world: int) -> None:
    for mode in ("recursive_programming", "dynamic_programming", "sharding_propagation", "data_parallel"):
        net = Chain(skip=True)
        if mode == "sharding_propagation":
            sw.shard(net.layers[3], ((1, 2), (1, 2), (1,)))
        check(net, TWO, rank, given=batches(1), mode=mode, feed="data_parallel")


@scenario
def evaluation_on_every_rank(rank: int, world: int) -> None:
    for scheduler, feed in (("1f1b", "full_batch"), ("zbv", "full_batch"), ("1f1b", "data_parallel")):
        net = Chain(skip=True)
        one = copy.deepcopy(net)
        given = setting(scheduler, 4) | (TWO if feed == "data_parallel" else {})
        model = sw.AutoParallel(net).pipeline(**given).dataset_strategy(feed).eval()
        x = batches(1)[0][0]
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                out = model(part_of(x, rank, feed, given["stages"]))
                close(out, part_of(one(x), rank, feed, given["stages"]), scheduler)
        try:
            model(part_of(x, rank, feed, given["stages"]))
        except SettingError as error:
            assert "it returns no loss" in str(error)
        else:
            raise AssertionError("a loss outside")


@scenario
def training_and_evaluation_in_turns(rank: int, world: int) -> None:
    net, loss_fn = Normed(), nn.MSELoss()
    one = copy.deepcopy(net)
    model = sw.AutoParallel(net, loss_fn).pipeline(2, "1f1b", 4, NORMED).dataset_strategy("full_batch")
    for x, y in batches(2, width=8):
        model.train(), one.train()
        model(x, y).backward()
        in_parts(loss_fn, 4)(one, x, y).backward()
        model.eval(), one.eval()
        with torch.no_grad():
            for buffer, theirs in zip(one.buffers(), statistics(model)):
                buffer.copy_(theirs)  # each rank has those of its stage
            close(model(x, y), loss_fn(one(x), y), "evaluation")


@scenario
def a_second_batch_size(rank: int, world: int) -> None:
    net = Chain()
    check(net, TWO, rank, given=[*batches(1, 16), *batches(1, 32), *batches(1, 16)], feed="data_parallel")


@scenario
def gradients_of_several_calls(rank: int, world: int) -> None:
    for level in ("level1", "level2"):
        net = Chain(tied=True)
        one = copy.deepcopy(net)
        model = sw.AutoParallel(net, nn.MSELoss()).pipeline(**TWO).dataset_strategy("full_batch")
        model.hsdp(threshold=0, optimizer_level=level)
        (x, y), (x2, y2) = batches(2)
        for synchronised in (True, False):
            with contextlib.nullcontext() if synchronised else model.no_sync():
                (model(x, y) / 4).backward()
            (model(x2, y2) / 4).backward()
            (nn.MSELoss()(one(x), y) / 4).backward(), (nn.MSELoss()(one(x2), y2) / 4).backward()
            for (name, p), q in zip(net.named_parameters(), one.parameters()):
                same_part(p.grad, q.grad, model.plan, name, f"{name}, {level}, {synchronised}")
            net.zero_grad(), one.zero_grad()


@scenario
def targets_that_micro_batches_count_unlike(rank: int, world: int) -> None:
    target = labels(16, 16)
    target[:6] = -100
    for weight, feed in ((None, "full_batch"), (draw(16, seed=3).abs(), "data_parallel")):
        check(
            Chain(),
            TWO,
            rank,
            loss_fn=nn.CrossEntropyLoss(weight=weight),
            feed=feed,
            given=[(batches(1)[0][0], target)],
        )


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n1 = nn.Linear(8, 8, dtype=D), nn.BatchNorm1d(8, dtype=D)
        self.b, self.n2 = nn.Linear(8, 8, dtype=D), nn.BatchNorm1d(8, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.n2(self.b(torch.relu(self.n1(self.a(x)))))


NORMED = {"a": 0, "n1": 0, "b": 1, "n2": 1}


def in_parts(loss_fn: Callable, count: int) -> Callable:
    """One device that runs micro-batches one after the other."""

    def run(one: nn.Module, *batch: Tensor) -> Tensor:
        return sum(loss_fn(one(*part[:-1]), part[-1]) for part in zip(*(x.chunk(count) for x in batch))) / count

    return run


def statistics(model: sw.AutoParallel) -> list[Tensor]:
    """Every buffer as its own stage has it."""
    out = []
    for name, buffer in model.net.named_buffers():
        message = buffer.clone()
        dist.broadcast(message, model.plan.parameters[name].ranks.start)
        out.append(message)
    return out


@scenario
def batch_norms(rank: int, world: int) -> None:
    net = Normed()
    one = copy.deepcopy(net)
    model = check(
        net,
        dict(stages=2, micro_batches=4, stage_config=NORMED),
        rank,
        given=batches(3, width=8),
        reference=in_parts(nn.MSELoss(), 4),
    )
    optimizer = Adam(one.parameters(), lr=0.01)
    for x, y in batches(3, width=8):
        in_parts(nn.MSELoss(), 4)(one, x, y).backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        optimizer.step(), optimizer.zero_grad()
    close(statistics(model), list(one.buffers()), "running statistics")


class Dropped(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = F.dropout(torch.relu(layer(x)), 0.3, self.training)
        return self.layers[3](x)


@cache
def dropped_on_one_device() -> list[Tensor]:
    """The reference in one process; a stand-alone model draws the numbers of one device."""
    sw.init(devices=1)
    return losses_of_dropped(sw.AutoParallel(Dropped(), nn.MSELoss(), parallel_mode="stand_alone"), 0, "full_batch")


def losses_of_dropped(model: sw.AutoParallel, rank: int, feed: str) -> list[Tensor]:
    optimizer, out = SGD(model.parameters(), 0.1), []
    torch.manual_seed(5)
    for x, y in batches(2):
        loss = model(part_of(x, rank, feed, 2), part_of(y, rank, feed, 2))
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        out.append(loss.detach())
    return out


@scenario
def dropout_is_that_of_the_whole_batch(rank: int, world: int) -> None:
    for scheduler, feed in (("1f1b", "full_batch"), ("zero_bubble", "data_parallel")):
        model = sw.AutoParallel(Dropped(), nn.MSELoss()).pipeline(**TWO, scheduler=scheduler).dataset_strategy(feed)
        close(losses_of_dropped(model, rank, feed), ONE[0], f"{scheduler}, {feed}")


class Turned(Chain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = super().forward(x)
        return out, out.T


@scenario
def inputs_that_are_fed_in_unlike_parts(rank: int, world: int) -> None:
    """Rows of one input meet those of the other, and rows that come back whole are in the order of the whole batch."""
    net, position = Chain(), rank % 2
    one = copy.deepcopy(net)
    model = sw.AutoParallel(net, nn.MSELoss()).pipeline(**TWO).dataset_strategy(((1, 2), (2, 1)))
    for x, y in batches(2):
        loss = model(x.chunk(2, 1)[position], y.chunk(2)[position])
        close(loss.detach(), nn.MSELoss()(one(x), y).detach())
    turned = sw.AutoParallel(Turned()).pipeline(**TWO).dataset_strategy("data_parallel")
    with torch.no_grad():
        x = batches(1)[0][0]
        close(turned(x.chunk(2)[position]), (one(x).chunk(2)[position], one(x).T))


#: The losses of one device, made before the ranks are.
ONE: list[list[Tensor]] = []


@scenario
def stages_with_unlike_numbers_of_groups(rank: int, world: int) -> None:
    """One stage sums over its ranks in more ways than the other, and groups across stages are made after that."""
    net = nn.Sequential(*(nn.Linear(8, 8, dtype=D) for _ in range(2)))
    sw.shard(net[0], ((2, 1), (1, 1), (1,)))
    sw.shard(net[1], ((1, 1), (1, 1), (1,)))
    for x, y in batches(2, width=8):
        model = sw.AutoParallel(copy.deepcopy(net), nn.MSELoss()).pipeline(2, stage_config={"0": 0, "1": 1})
        close(model.dataset_strategy("full_batch")(x, y).detach(), nn.MSELoss()(net(x), y).detach())
        wide = sw.AutoParallel(copy.deepcopy(net), nn.MSELoss(), parallel_mode="data_parallel").dataset_strategy(
            "full_batch"
        )
        wide(x, y).backward()


@scenario
def ranks_choose_one_storage(rank: int, world: int) -> None:
    """hsdp(optimizer_level="auto"), and a further size, which keeps it."""
    settle = lambda model: model.hsdp(threshold=0, optimizer_level="auto")
    given = [*batches(1), tuple(torch.cat((x, x)) for x in batches(1)[0])]
    pipeline = {"stages": 2, "micro_batches": 4, "stage_config": staged(2)}
    model = check(Chain(), pipeline, rank, given=given, settle=settle, mode="data_parallel")
    assert len({stage.plan.hsdp for stage in model.plan.stages}) == 1
    assert any("parameters are stored" in note for note in model.plan.notes)
    same_everywhere(torch.tensor(int(model.plan.fingerprint[:12], 16)))


@scenario
def what_the_plan_says_is_what_is_sent(rank: int, world: int) -> None:
    """Bytes by peer and direction, as `PipelinePlan.collectives` lists them."""
    sent: list[tuple[int, int]] = []
    plain = dist.isend

    def noting(tensor: Tensor, dst: int, *args: Any, **kwargs: Any) -> Any:
        if tensor.dim():  # beside the loss, which every rank is told
            sent.append((dst, tensor.numel() * tensor.element_size()))
        return plain(tensor, dst, *args, **kwargs)

    dist.isend = noting
    try:
        model = chain(rank, "zbv", "full_batch", tied=True, skip=True)
    finally:
        dist.isend = plain
    listed = [(c.ranks[1], c.sent) for c in model.plan.collectives(rank) if c.op == "send"]
    steps = 2
    assert sent == listed * steps


def on_four_ranks(rank: int, world: int) -> dict[str, str | None]:
    sw.init()
    return run_scenarios(rank, world, SCENARIOS)


@pytest.fixture(scope="module")
def results() -> list[dict[str, str | None]]:
    ONE[:] = [dropped_on_one_device()]
    # The imports of a compiler, and of its partitioner: once here, and not in every rank.
    torch.compile(torch.relu, backend="aot_eager")(torch.ones(1, requires_grad=True))
    return run_ranks(on_four_ranks, WORLD)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_four_ranks(name: str, results: list[dict[str, str | None]]) -> None:
    failed = {rank: found[name] for rank, found in enumerate(results) if found[name] is not None}
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())


# -- a rank that dies --------------------------------------------------------------------------------------------------


def dies(rank: int, world: int) -> None:
    sw.init()
    net = Chain()
    model = sw.AutoParallel(net, nn.MSELoss()).pipeline(**TWO).dataset_strategy("full_batch")
    ((x, y),) = batches(1)
    model(x, y).backward()
    if rank == 3:
        import os

        os._exit(7)
    for _ in range(100):
        model(x, y).backward()
    raise AssertionError("the others went on")


def test_when_a_rank_dies_the_run_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(dies, WORLD)
    message = f"{failed.value}\n{capfd.readouterr().err}"  # of the rank that the parent hears of first
    assert any(text in message for text in ("rank 3 died with exit code 7", "rank 3 has ended", "Connection")), message

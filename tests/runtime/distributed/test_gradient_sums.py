"""Sums of gradients: in buckets, while the backward goes on, once for several backwards; and what is refused.

What two and four ranks do runs on real ones, started once for all scenarios.
"""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collective_log import rank_of_eight
from one_device import close, parallel
from ranks import run_ranks, run_scenarios
from small_networks import Apply, D, draw
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardwright as sw
from shardwright.cost.communication_schedule import AUTO, PIECE, Due, Fusion, fusion_of
from shardwright.layout import Digit, Layout
from shardwright.runtime.distributed.dtensors import to_dtensor
from shardwright.runtime.distributed.process_groups import ProcessGroups

BATCHES = [(draw(8, 8, seed=s), draw(8, 8, seed=s + 10)) for s in range(3)]


def stack(layers: int = 4) -> nn.Sequential:
    """Linear layers of 8, in float64."""
    torch.manual_seed(3)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(8, 8, dtype=D), nn.Tanh())))


# -- what travels together ---------------------------------------------------------------------------------------------

DUE = [
    Due(name, size, kind, index, 8)
    for index, (name, size, kind) in reversed(
        list(enumerate([("a", 4, "f"), ("b", 4, "f"), ("c", 8, "d"), ("d", 4, "f"), ("e", 2, "f"), ("f", 9, "f")]))
    )
]


@pytest.mark.parametrize(
    "fusion, expected",
    [
        (Fusion(limit=0), ["f", "e", "d", "c", "b", "a"]),
        (Fusion(limit=6), ["f", "ed", "c", "ba"]),
        (Fusion(limit=11), ["fe", "dba", "c"]),
        (Fusion(limit=4), ["f", "d", "c", "b", "a", "e"]),  # what fills a bucket is not copied into one
        (Fusion(limit=1000), ["fedba", "c"]),
        (Fusion(ends=(3,)), ["fed", "c", "ba"]),
        (Fusion(ends=(1, 5)), ["f", "c", "edb", "a"]),
    ],
    ids=str,
)
def test_buckets(fusion: Fusion, expected: list[str]) -> None:
    assert ["".join(bucket) for bucket in fusion.buckets(DUE)] == expected


@pytest.mark.parametrize("ranks, expected", [(2, ["c", "b", "a"]), (3, ["b", "ca"]), (8, ["cba"])])
def test_what_few_ranks_sum_travels_alone(ranks: int, expected: list[str]) -> None:
    due = [Due(name, size * PIECE, "f", index, ranks) for index, (name, size) in enumerate(zip("cba", (2, 3, 2)))]
    assert ["".join(bucket) for bucket in Fusion(AUTO).buckets(due)] == expected


@pytest.mark.parametrize("ranks, expected", [(2, ["ef", "cd", "ab"]), (4, ["cdef", "ab"]), (8, ["abcdef"])])
def test_a_bucket_of_few_ranks_is_full_sooner(ranks: int, expected: list[str]) -> None:
    due = [Due(name, PIECE, "f", index, ranks) for index, name in reversed(list(enumerate("abcdef")))]
    assert ["".join(sorted(bucket)) for bucket in Fusion().buckets(due)] == expected


def test_comm_fusion_is_read() -> None:
    for given, made in [
        ("auto", Fusion()),
        ({"mode": "auto"}, Fusion()),
        ({"mode": "auto", "config": None}, Fusion()),
        ({"mode": "size", "config": 2}, Fusion(2 << 20)),
        (0.5, Fusion(1 << 19)),
        ({"mode": "index", "config": [2, 5]}, Fusion(ends=(2, 5))),
        ([3], Fusion(ends=(3,))),
    ]:
        assert fusion_of(given) == made
        assert sw.AutoParallel(stack()).comm_fusion(allreduce=given).program_settings.fusion == made
        assert sw.AutoParallel(stack()).comm_fusion({"allreduce": given}).program_settings.fusion == made
    for given in ({"config": {"openstate": False, "allreduce": "auto"}}, {"openstate": False}):
        assert sw.AutoParallel(stack()).comm_fusion(**given).program_settings.fusion.limit == 0


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "best"},
        {"config": 3},
        {"mode": "size"},
        {"mode": "size", "config": 0},
        {"mode": "size", "config": -1},
        {"mode": "size", "config": "64"},
        {"mode": "size", "config": True},
        {"mode": "size", "config": float("inf")},
        {"mode": "index"},
        {"mode": "index", "config": []},
        {"mode": "index", "config": [0, 2]},
        {"mode": "index", "config": [4, 4]},
        {"mode": "index", "config": [4, 2]},
        {"mode": "index", "config": [1.5]},
        {"mode": "index", "config": 3},
        {"mode": "auto", "config": 3},
        {"mode": "auto", "more": 1},
        "best",
        -3,
    ],
    ids=str,
)
def test_comm_fusion_refuses(given: Any) -> None:
    with pytest.raises(sw.SettingError, match="comm_fusion") as caught:
        sw.AutoParallel(stack()).comm_fusion(allreduce=given)
    assert caught.value.legal


def test_comm_fusion_refuses_what_is_no_setting() -> None:
    for config in ({"allgather": {"mode": "auto"}}, "auto", {"openstate": 3}):
        with pytest.raises(sw.SettingError, match="comm_fusion"):
            sw.AutoParallel(stack()).comm_fusion(config)
    model = parallel(stack(), devices=2, mode="data_parallel").comm_fusion(allreduce=[3, 8])
    with pytest.raises(sw.SettingError, match="index 8.*trains 8 parameters") as caught:
        model(BATCHES[0][0])
    assert "1 to 7" in caught.value.legal
    model = parallel(stack(), devices=2)
    model(BATCHES[0][0])
    for late in (lambda: model.comm_fusion(allreduce=3), lambda: model.parameter_broadcast()):
        with pytest.raises(sw.SettingError, match="too late"):
            late()


# -- in one process ----------------------------------------------------------------------------------------------------


def test_no_sync_changes_nothing_in_one_process() -> None:
    net, one = stack(), stack()
    model = parallel(net, nn.MSELoss(), devices=4, mode="data_parallel")
    with model.no_sync():
        for x, y in BATCHES[:2]:
            (model(x, y) / 3).backward()
    (model(*BATCHES[2]) / 3).backward()
    F.mse_loss(one(torch.cat([x for x, _ in BATCHES])), torch.cat([y for _, y in BATCHES])).backward()
    close([p.grad for p in net.parameters()], [p.grad for p in one.parameters()])


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto"])
def test_gradients_that_are_not_a_number_are_passed_on(mode: str) -> None:
    net = stack()
    x = BATCHES[0][0].clone()
    x[5] = float("nan")  # on one rank of four
    parallel(net, devices=4, mode=mode)(x).sum().backward()
    for parameter in net.parameters():
        assert parameter.grad.isnan().all()
    net = Apply(lambda m, x: (x @ m.w).sum(0))  # a part alone: the columns of w that one entry reaches
    x, scale = BATCHES[0][0], torch.ones(8, dtype=D)
    scale[2] = float("nan")
    (parallel(net, devices=4, mode=mode)(x) * scale).sum().backward()
    assert net.w.grad.isnan().any(0).tolist() == [i == 2 for i in range(8)] and net.w.grad[:, 2].isnan().all()


def test_an_optimizer_of_a_copy_is_an_error() -> None:
    net = stack()
    for make in (copy.deepcopy, lambda n: stack()):
        optimizer = torch.optim.SGD(make(net).parameters(), 0.1)
        model = parallel(net, nn.MSELoss(), devices=2, mode="data_parallel")
        model(*BATCHES[0]).backward()
        with pytest.raises(sw.SettingError, match="SGD holds the parameters of a copy of the model"):
            optimizer.step()
    torch.optim.SGD(net.parameters(), 0.1).step()
    other = nn.Linear(3, 3)
    torch.optim.SGD(other.parameters(), 0.1).step()  # none of ours, nothing to do: as ever


def _halves() -> DTensor:
    cut = Layout.of(2, ((Digit(2, 1),), ()))
    return to_dtensor(torch.ones(4, 4), cut, (8, 4), ProcessGroups(2, dist.get_rank()))


def _whole(rank: int, world: int) -> None:
    assert torch.equal((_halves() * 2).full_tensor(), torch.full((8, 4), 2.0))


def test_a_second_process_group_in_one_process() -> None:
    """torch keeps what operators on DTensors return, the meshes among it: no mesh of the first group comes back."""
    with rank_of_eight(rank=0, world=4):  # of which ranks 0 and 1 are a stage
        assert (_halves() * 2).shape == (8, 4)
    run_ranks(_whole, 2)  # forks this process


def test_a_model_that_is_collected_in_the_midst_of_anothers_step_does_not_end_it() -> None:
    """Whenever memory is tidied up, thus also between two hooks that torch goes through before a step."""
    dropped, net = stack(), stack()
    parallel(dropped, nn.MSELoss(), devices=2, mode="data_parallel")(*BATCHES[0]).backward()
    alive = weakref.ref(dropped)
    dropped.itself = [dropped]  # no one but the collector ends it
    tidied = register_optimizer_step_pre_hook(lambda *given: gc.collect() and None)
    try:
        model = parallel(net, nn.MSELoss(), devices=2, mode="data_parallel")
        model(*BATCHES[0]).backward()
        del dropped
        assert alive() is not None
        torch.optim.SGD(net.parameters(), 0.1).step()
    finally:
        tidied.remove()
    assert alive() is None


# -- on ranks ----------------------------------------------------------------------------------------------------------

#: By the number of ranks.
SCENARIOS: dict[int, dict[str, Callable[[int, int], Any]]] = {2: {}, 4: {}}


def scenario(*worlds: int) -> Callable[[Callable[[int, int], Any]], Callable[[int, int], Any]]:
    """A scenario for so many ranks: for two and for four where sums go other ways among more of them."""

    def add(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        for world in worlds:
            SCENARIOS[world][function.__name__] = function
        return function

    return add


def wrapped(net: nn.Module, loss_fn: Any = None, mode: str = "data_parallel", **options: Any) -> sw.AutoParallel:
    sw.init()
    return sw.AutoParallel(net, loss_fn, mode, **options)


def mine(x: Tensor, rank: int, world: int) -> Tensor:
    return x.chunk(world)[rank].clone()


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.full_tensor() for p in net.parameters()]


def plain(net: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in net.parameters()]


def refused(attempt: Callable[[], Any], text: str) -> None:
    with pytest.raises(sw.SettingError, match=text):
        attempt()


def events(step: Callable[[], Any]) -> list[tuple[str, int]]:
    """Events of a model's first step: ("came", 1) for each gradient to be summed, ("start", n) for each started sum of
    n gradients."""
    from shardwright.runtime.distributed import gradient_sums

    out: list[tuple[str, int]] = []
    kept = gradient_sums._Sum.__init__, gradient_sums.GradientSums._came

    def start(self: Any, parameters: list, *args: Any) -> None:
        out.append(("start", len(parameters)))
        kept[0](self, parameters, *args)

    def came(self: Any, *args: Any) -> None:
        out.append(("came", 1))
        kept[1](self, *args)

    gradient_sums._Sum.__init__, gradient_sums.GradientSums._came = start, came
    try:
        step()
    finally:
        gradient_sums._Sum.__init__, gradient_sums.GradientSums._came = kept
    return out


FUSIONS = {
    "auto": ("auto", [8]),
    "size": (570 / (1 << 20), [2, 2, 2, 2]),
    "index": ([2, 6], [2, 4, 2]),
    "none": (None, [1] * 8),
}


@scenario(2, 4)
def gradients_travel_together_and_early(rank: int, world: int) -> None:
    one = stack()
    x, y = BATCHES[0]
    F.mse_loss(one(x), y).backward()
    for name, (allreduce, sizes) in FUSIONS.items():
        for loss_fn in (None, nn.MSELoss()) if name == "size" else (nn.MSELoss(),):
            net = stack()
            model = wrapped(net, loss_fn).comm_fusion(allreduce=allreduce, openstate=allreduce is not None)
            feed = mine(x, rank, world), mine(y, rank, world)

            def step() -> None:
                (model(*feed) if loss_fn is not None else F.mse_loss(model(feed[0]), feed[1])).backward()

            seen = events(step)
            assert [n for what, n in seen if what == "start"] == sizes, (name, seen)
            # Each starts as soon as its last gradient is there.
            assert [i for i, (what, _) in enumerate(seen) if what == "start"] == [
                sum(sizes[: k + 1]) + k for k in range(len(sizes))
            ], (name, seen)
            for ours, theirs in zip(gradients(net), plain(one)):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, [p.grad.to_local() for p in net.parameters()])
            assert all(torch.equal(a, b) for other in everyone for a, b in zip(other, everyone[0])), "to the bit"


@scenario(2, 4)
def long_gradients_and_odd_ones(rank: int, world: int) -> None:
    from shardwright.runtime.distributed import collectives

    shapes = [(), (1,), (3, 5), (7,), (300, 501), (2, 2)]
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        net = nn.Module()
        net.ps = nn.ParameterList([nn.Parameter(torch.ones(s, dtype=dtype)) for s in shapes])
        net.forward = lambda x: sum(((p * (i + 1)).sum() * x).sum() for i, p in enumerate(net.ps))
        x = torch.arange(1, 1 + world, dtype=torch.float32)[rank : rank + 1].to(dtype)
        kept = collectives.GATHERED_TERMS, collectives.GATHERED_COPIES
        # Through memory; by Gloo; by Gloo as large ones go: a scatter, a sum, a gather.
        for share, limits in (("1", kept), ("0", kept), ("0", (1 << 10, 1 << 8))):
            os.environ["SHARDWRIGHT_SHARED_MEMORY"] = share
            collectives.GATHERED_TERMS, collectives.GATHERED_COPIES = limits
            model = (
                wrapped(net, on_missing_rule="replicate").dataset_strategy("data_parallel").enable_gradients_mean(False)
            )
            out = model(x)
            (out.real if dtype.is_complex else out).backward()
            collectives.GATHERED_TERMS, collectives.GATHERED_COPIES = kept
            for i, p in enumerate(net.ps):
                whole = sum(range(1, world + 1)) * (i + 1)
                assert p.grad.dtype == dtype and p.grad.shape == p.shape
                assert torch.equal(p.grad.to_local(), torch.full(shapes[i], whole, dtype=dtype)), (dtype, i)
            net.zero_grad()
    del os.environ["SHARDWRIGHT_SHARED_MEMORY"]


@scenario(2)
def backwards_of_every_kind(rank: int, world: int) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.c = (nn.Linear(8, 8, dtype=D) for _ in range(3))

        def forward(self, x):
            return self.a(x), self.b(self.c(x))

    for allreduce in ("auto", 300 / (1 << 20), [1, 2, 3, 4, 5]):
        net, one = Branches(), Branches()
        model = wrapped(net).comm_fusion(allreduce=allreduce)
        x = BATCHES[0][0]
        for used in ((0,), (1,), (0, 1)):  # parameters without a gradient
            for _n, call in ((net, model), (one, one)):
                out = call(mine(x, rank, world) if call is model else x)
                sum(out[i].square().mean() for i in used).backward()
            assert [g is None for g in gradients(net)] == [g is None for g in plain(one)]
            close([g for g in gradients(net) if g is not None], [g for g in plain(one) if g is not None])
            if used == (0,):
                net.zero_grad(), one.zero_grad()
        ours, theirs = model(mine(x, rank, world)), one(x)  # twice the same graph, then its two ends
        for a in (ours, theirs):
            a[0].square().mean().backward(retain_graph=True)
            (a[0].square().mean() + a[1].mean()).backward(retain_graph=True)
            a[1].mean().backward()
        close(gradients(net), plain(one))
        outs = [(model(mine(b, rank, world)), one(b)) for b in (x, torch.cat([x, x]))]  # two programs alive
        for ours, theirs in reversed(outs):
            (ours[0].mean() + ours[1].mean()).backward(), (theirs[0].mean() + theirs[1].mean()).backward()
        close(gradients(net), plain(one))
        # A backward that an error ends in its middle leaves nothing behind.
        net.zero_grad(), one.zero_grad()
        out = model(mine(x, rank, world))
        feeding = mine(x, rank, world).requires_grad_()

        def fail(_: Tensor) -> None:
            raise RuntimeError("on purpose")

        broken = model(feeding)
        feeding.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            (broken[0].mean() + broken[1].mean()).backward()
        net.zero_grad()
        (out[0].mean() + out[1].mean()).backward()
        theirs = one(x)
        (theirs[0].mean() + theirs[1].mean()).backward()
        close(gradients(net), plain(one))


@scenario(2)
def accumulation_without_sums(rank: int, world: int) -> None:
    one = stack()
    F.mse_loss(one(torch.cat([x for x, _ in BATCHES])), torch.cat([y for _, y in BATCHES])).backward()
    for mode in ("data_parallel", "semi_auto"):
        for first in (False, True):  # with something summed before
            net = stack()
            model = wrapped(net, nn.MSELoss(), mode).comm_fusion(allreduce=400 / (1 << 20))
            feed = [tuple(mine(t, rank, world) for t in batch) for batch in BATCHES]
            if first:
                (model(*feed[0]) / 3).backward()

            def unsynced() -> None:
                with model.no_sync():
                    for x, y in feed[first:2]:
                        (model(x, y) / 3).backward()

            if mode == "data_parallel":
                assert not [n for what, n in events(unsynced) if what == "start"]
                refused(lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0), "no_sync")
                refused(lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True), "no_sync")
                refused(torch.optim.AdamW(net.parameters(), 0.01).step, r"AdamW.step\(\) while gradients")
                assert net[0].weight.grad.to_local().shape == (8, 8)
            else:
                unsynced()
            (model(*feed[2]) / 3).backward()
            close(gradients(net), plain(one), f"{mode} {first}")
            torch.optim.SGD(net.parameters(), 0.1).step()


@scenario(2)
def accumulation_is_dropped_and_crosses_programs(rank: int, world: int) -> None:
    net, one = stack(), stack()
    model = wrapped(net, nn.MSELoss())
    x, y = BATCHES[0]
    F.mse_loss(one(x), y).backward()
    expected = plain(one)
    for drop in (
        net.zero_grad,
        lambda: net.zero_grad(set_to_none=False),
        lambda: torch.optim.SGD(net.parameters(), 0.1).zero_grad(),
        lambda: torch.optim.SGD(net.parameters(), 0.1).zero_grad(set_to_none=False),
    ):
        for summed in (False, True):
            if summed:
                model(mine(x, rank, world), mine(y, rank, world)).backward()
            with model.no_sync():
                model(mine(x, rank, world), mine(y, rank, world)).backward()
            drop()
            model(mine(x, rank, world), mine(y, rank, world)).backward()
            close(gradients(net), expected)
            net.zero_grad()
    # Other shapes: a program of its own; half of the gradients from it.
    long = [torch.cat([t, t]) for t in (x, y)]
    with model.no_sync():
        model(*(mine(t, rank, world) for t in long)).backward()
    model(mine(x, rank, world), mine(y, rank, world)).backward()
    close(gradients(net), [2 * g for g in expected])
    # A parameter that the last backward does not reach is summed there too.
    net = Apply(lambda m, x: (x @ m.w, x @ m.v), v=nn.Parameter(draw(8, 8)))
    model = wrapped(net)
    with model.no_sync():
        model(mine(x, rank, world))[1].mean().backward()
    model(mine(x, rank, world))[0].mean().backward()
    want = x.mean(0, keepdim=True).T.expand(8, 8) / 8
    close(gradients(net), [want, want])


@scenario(2, 4)
def accumulation_over_other_ranks_for_other_batches(rank: int, world: int) -> None:
    # In semi_auto a batch that cuts fewer ways is summed over fewer ranks.
    net, one = stack(), stack()
    model = wrapped(net, nn.MSELoss(), "semi_auto").dataset_strategy("full_batch")
    x, y = BATCHES[0]
    few = world // 2 if world > 2 else 1
    with model.no_sync():
        for count in (8, few, few, 8):
            model(x[:count], y[:count]).backward()
            F.mse_loss(one(x[:count]), y[:count]).backward()
    for count in (8, few):
        model(x[:count], y[:count]).backward()
        F.mse_loss(one(x[:count]), y[:count]).backward()
        close(gradients(net), plain(one), str(count))
        with model.no_sync():
            model(x[:few], y[:few]).backward()
        F.mse_loss(one(x[:few]), y[:few]).backward()


@scenario(4)
def parameters_begin_with_those_of_rank_0(rank: int, world: int) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = nn.Sequential(sw.shard(nn.Linear(8, 8, dtype=D), ((1, 1), (2, 1), (2,))), nn.BatchNorm1d(8, dtype=D))
        nn.init.normal_(net[1].running_mean)
        return net

    x = BATCHES[0][0]
    for mode in ("data_parallel", "semi_auto"):
        for deferred in (False, True):
            if deferred:
                torch.manual_seed(rank)
                with sw.no_init_parameters():
                    net = make(rank)
            else:
                net = make(rank)
            model = wrapped(net, mode=mode, on_missing_rule="replicate", parameter_broadcast=True)
            one = make(0)
            model.eval()
            one.eval()
            close(model(mine(x, rank, world)), mine(one(x), rank, world), f"{mode} {deferred}")
            for name, value in one.state_dict().items():
                held = net.state_dict()[name]
                close(
                    held.full_tensor() if isinstance(held, nn.Parameter) or hasattr(held, "full_tensor") else held,
                    value,
                )
    with pytest.raises(sw.RuntimeMismatchError, match="other values"):
        wrapped(make(rank)).parameter_broadcast(False)(mine(x, rank, world))
    with pytest.raises(sw.RuntimeMismatchError, match="other settings"):
        wrapped(make(0)).comm_fusion(allreduce=rank + 1)(mine(x, rank, world))
    wrapped(make(rank)).parameter_broadcast()(mine(x, rank, world))


@scenario(2)
def gradients_that_are_not_a_number_reach_all(rank: int, world: int) -> None:
    for allreduce in ("auto", [1]):
        net = stack(2)
        model = wrapped(net).comm_fusion(allreduce=allreduce)
        x = mine(BATCHES[0][0], rank, world)
        if rank == world - 1:
            x[0] = float("nan")
        model(x).sum().backward()
        assert all(p.grad.to_local().isnan().all() for p in net.parameters())
        assert nn.utils.clip_grad_norm_(net.parameters(), 1.0).isnan()
        # One entry of one rank's output: one column of the last weight, one entry of its bias, no more.
        net.zero_grad()
        out = model(mine(BATCHES[0][0], rank, world))
        scale = torch.ones_like(out)
        if rank == 0:
            scale[0, 3] = float("inf")
        ((out - out.detach()) * scale).sum().backward()
        where = net[2].bias.grad.to_local().isfinite().logical_not()
        assert where.tolist() == [i == 3 for i in range(8)]


@scenario(2)
def optimizers_of_what_is_no_longer_there(rank: int, world: int) -> None:
    net = stack(1)
    before = list(net.parameters())
    model = wrapped(net, nn.MSELoss())
    model(*(mine(t, rank, world) for t in BATCHES[0])).backward()
    refused(torch.optim.SGD(before, 0.1).step, "SGD holds the parameter '0.weight' as it was before the first call")
    torch.optim.SGD(net.parameters(), 0.1).step()
    refused(torch.optim.AdamW(stack(1).parameters(), 0.1).step, "AdamW holds the parameters of a copy")


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, str | None]]]:
    net = stack()
    sw.init(devices=2)
    sw.AutoParallel(net, nn.MSELoss())(*BATCHES[0]).backward()  # what a first capture loads, before the fork
    return {world: run_ranks(run_scenarios, world, scenarios) for world, scenarios in SCENARIOS.items()}


@pytest.mark.parametrize(("name", "world"), [(name, world) for world, names in SCENARIOS.items() for name in names])
def test_on_ranks(name: str, world: int, results) -> None:
    for rank, result in enumerate(results[world]):
        if result[name] is not None:
            pytest.fail(f"rank {rank}:\n{result[name]}", pytrace=False)

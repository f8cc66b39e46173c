"""Real ranks, one Gloo process each: the same functions and gradients as one device, each rank holding its slices.

Ranks are started once for all scenarios of a world size; a scenario runs on every rank and asserts there.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import forked_python
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from one_device import close, squares
from paths import SCRIPTS
from ranks import PATIENCE, join_group, meeting_socket, run_ranks, run_scenarios
from small_networks import Apply, D, Marked, draw, labels
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import shardwright as sw
from shardwright.capture.annotations import _marked_operators

X, T = draw(16, 8), labels(16)
BATCHES = [(draw(16, 8, seed=s), labels(16, seed=s)) for s in range(2)]
CROSS_ENTROPY = nn.CrossEntropyLoss()

SCENARIOS: dict[str, Callable[[int, int], Any]] = {}


def scenario(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    SCENARIOS[function.__name__] = function
    return function


def four(*marks: Any) -> Marked:
    """A model for four devices."""
    return Marked(*(marks or (((2, 2), (2, 1)), ((4, 1),), ((1, 4), (4, 1)))))


def wrapped(
    net: nn.Module, loss_fn: Any = None, mode: str = "semi_auto", dataset: Any = "full_batch", **options: Any
) -> sw.AutoParallel:
    sw.init()
    return sw.AutoParallel(net, loss_fn, mode, **options).dataset_strategy(dataset)


def whole(tree: Any) -> Any:
    """DTensors gathered."""
    return pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(p.grad) for name, p in net.named_parameters()}


def part(x: Tensor, rank: int, parts: int, repeated: int = 1) -> Tensor:
    """The rows that a rank feeds: the batch in `parts`, neighbouring ranks repeating one."""
    return x.chunk(parts)[rank // repeated].clone()


# -- batches, losses, gradients ----------------------------------------------------------------------------------------

FEEDINGS = {
    "full_batch": ("full_batch", lambda x, rank: x),
    "data_parallel": ("data_parallel", lambda x, rank: part(x, rank, 4)),
    "tuples": (((4, 1), (4,)), lambda x, rank: part(x, rank, 4)),
    "repeated": (((2, 1), (2,)), lambda x, rank: part(x, rank, 2, 2)),
    "Layouts": (
        (sw.Layout((2, 2), ("a", "b"))("b", "None"), sw.Layout((4,), ("a",))("None")),
        lambda x, rank: x if x.dim() == 1 else x.chunk(2)[rank % 2],
    ),
}


@scenario
def loss_inside_is_that_of_the_whole_batch(rank: int, world: int) -> None:
    one = four()
    expected = CROSS_ENTROPY(one(X), T)
    expected.backward()
    for mode, name, mean in (
        *(("semi_auto", name, name == "tuples") for name in FEEDINGS),
        ("data_parallel", "data_parallel", True),
        ("data_parallel", "full_batch", False),
    ):
        net, (dataset, mine) = four(), FEEDINGS[name]
        model = wrapped(net, CROSS_ENTROPY, mode, dataset).enable_gradients_mean(mean)
        loss = model(mine(X, rank), mine(T, rank))
        close(loss, expected)
        loss.backward()
        close(gradients(net), gradients(one), f"{mode} {name}")


@scenario
def loss_outside_is_each_ranks_own(rank: int, world: int) -> None:
    one = four()
    expected = one(X)
    F.mse_loss(expected, expected.detach() * 0.5).backward()
    for mode, name, mean in (
        *(("semi_auto", name, None) for name in FEEDINGS),
        *(("semi_auto", name, True) for name in ("data_parallel", "repeated", "Layouts")),
        ("data_parallel", "data_parallel", None),
        ("data_parallel", "data_parallel", False),
        ("data_parallel", "repeated", None),
        ("data_parallel", "full_batch", None),
    ):
        net, (dataset, mine) = four(), FEEDINGS[name]
        model = wrapped(net, None, mode, dataset[:1] if isinstance(dataset, tuple) else dataset)
        if mean is not None:
            model.enable_gradients_mean(mean)
        output = model(mine(X, rank))
        close(output, one(mine(X, rank)), f"{mode} {name}: a rank gets the rows that it fed")
        F.mse_loss(output, output.detach() * 0.5).backward()
        # Parts of one size, so that the mean of the parts' losses is the loss of the batch, their sum as many times
        # that as there are parts. Repeated parts count once.
        parts = {"full_batch": 1, "data_parallel": 4, "tuples": 4, "repeated": 2, "Layouts": 2}[name]
        factor = 1 if (mode == "data_parallel" if mean is None else mean) else parts
        close(gradients(net), {n: g * factor for n, g in gradients(one).items()}, f"{mode} {name} {mean}")


@scenario
def outputs_of_every_kind(rank: int, world: int) -> None:
    def f(m, x, t, scale=1):
        y = x @ m.w * scale
        return {"y": y, "none": None, "sum": y.sum(0), "deep": [t, (y.mean(), 3, "text")], "w": m.w, "rows": y[:, 0]}

    net = Apply(f)
    expected = Apply(f)(X, T, scale=2)
    own = {name: part(expected[name], rank, 4) for name in ("y", "rows")}
    got = wrapped(net, dataset="data_parallel")(part(X, rank, 4), part(T, rank, 4), scale=2)
    close(got, {**expected, **own, "deep": [part(T, rank, 4), expected["deep"][1]]})
    close(wrapped(Apply(f))(X, T, scale=2), expected)


@scenario
def modes_train_as_one_device(rank: int, world: int) -> None:
    optimizers = (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.01),
        lambda p: torch.optim.AdamW(p, 0.01, fused=True),
        lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    )
    for mode, make in (
        *(("semi_auto", make) for make in optimizers),
        ("data_parallel", optimizers[1]),
        ("stand_alone", optimizers[0]),
    ):
        net, one = four(), four()
        model = wrapped(net, CROSS_ENTROPY, mode)
        ours, theirs = make(net.parameters()), make(one.parameters())  # before the first call
        for x, t in BATCHES:
            loss, expected = model(x, t), CROSS_ENTROPY(one(x), t)
            close(loss, expected)
            loss.backward(), expected.backward()
            ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
        close(whole(net.state_dict()), one.state_dict(), mode)
        everyone = [torch.zeros((), dtype=D) for _ in range(world)]
        dist.all_gather(everyone, loss.detach())
        assert all(torch.equal(other, loss) for other in everyone), "to the bit"


@scenario
def accumulation_clipping_and_schedules(rank: int, world: int) -> None:
    net, one = four(), four()
    model = wrapped(net, CROSS_ENTROPY)
    optimizers = [torch.optim.SGD(n.parameters(), 0.5) for n in (net, one)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
    for norm_type in (2.0, 1.0, float("inf")):
        for x, t in BATCHES[:2]:
            (model(x, t) / 2).backward(), (CROSS_ENTROPY(one(x), t) / 2).backward()
        for foreach in (None, True):
            norms = [nn.utils.clip_grad_norm_(n.parameters(), 0.1, norm_type, foreach=foreach) for n in (net, one)]
            close(whole(norms[0]), norms[1])
        close(gradients(net), gradients(one))
        for o, s in zip(optimizers, schedules):
            o.step(), s.step(), o.zero_grad()
    close(whole(net.state_dict()), one.state_dict())


@scenario
def maxima_with_ties(rank: int, world: int) -> None:
    def f(m, x):
        return m.amax(torch.relu(x @ m.w), 1) * m.q, torch.relu(x - 1).max() * m.p, (x @ m.w).amin(0) * m.p

    nets = [
        Apply(f, p=nn.Parameter(draw(8)), q=nn.Parameter(draw(8)), amax=sw.shard(torch.amax, ((1, 4),)))
        for _ in range(2)
    ]
    x = draw(8, 8).round()  # ties among ranks and within
    for _net, call in ((nets[0], wrapped(nets[0])), (nets[1], nets[1])):
        squares(call(x)).backward()
    close(gradients(nets[0]), gradients(nets[1]))


# -- parameters, buffers, modes ----------------------------------------------------------------------------------------


@scenario
def every_rank_holds_its_slices(rank: int, world: int) -> None:
    net, one = four(), four()
    names = list(net.state_dict())
    model = wrapped(net, CROSS_ENTROPY)
    model(X, T).backward()
    assert list(net.state_dict()) == list(model.state_dict()) == names
    for name, parameter in net.named_parameters():
        planned, value = model.plan.parameters[name], one.get_parameter(name)
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)
        local = parameter.to_local()
        assert torch.equal(local, value[planned.slice(rank)]) and local.shape == planned.local_shape(rank)
        assert local.untyped_storage().nbytes() == local.numel() * 8, "no more than the slice is kept"
        assert parameter.shape == value.shape and torch.equal(parameter.full_tensor(), value)
        assert isinstance(parameter.grad, DTensor) and parameter.grad.to_local().shape == local.shape
    assert net.w1.to_local().shape == (4, 16) and net.w2.to_local().shape == (4, 16)


@scenario
def deferred_parameters_come_into_being_as_slices(rank: int, world: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = sw.shard(nn.Linear(8, 16, dtype=D), ((2, 1), (2, 1), (2,)))
            self.second = sw.shard(nn.Linear(16, 8, dtype=D), ((1, 4), (1, 4)))
            self.third = nn.Linear(16, 8, dtype=D)
            self.third.weight = self.second.weight
            nn.init.orthogonal_(self.second.weight)
            sw.shard(self.third, ((1, 4), (1, 4)))
            self.register_buffer("noise", torch.rand(8, dtype=D))

        def forward(self, x):
            y = torch.relu(self.first(x))
            return self.second(y) + self.third(y) + self.noise

    torch.manual_seed(5)
    with sw.no_init_parameters():
        net = Tied()
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    torch.manual_seed(5)
    one = Tied()
    other = torch.optim.AdamW(one.parameters(), 0.01)
    assert all(p.is_meta for p in net.parameters())
    model = wrapped(net, CROSS_ENTROPY)
    for step, (x, t) in enumerate(BATCHES):
        loss, expected = model(x, t), CROSS_ENTROPY(one(x), t)
        if step == 0:
            for name, tensor in one.state_dict().items():
                assert torch.equal(whole(net.state_dict()[name]), tensor), name
                local = net.state_dict()[name]
                local = local.to_local() if isinstance(local, DTensor) else local
                assert torch.equal(local, tensor[model.plan.parameters[name].slice(rank)])
                assert local.untyped_storage().nbytes() == local.numel() * 8
        close(loss, expected)
        loss.backward(), expected.backward()
        optimizer.step(), other.step(), optimizer.zero_grad(), other.zero_grad()
    assert net.third.weight is net.second.weight
    close(whole(net.state_dict()), one.state_dict())


@scenario
def what_an_optimizer_has_noted_is_cut_too(rank: int, world: int) -> None:
    """By Adagrad when it is built, by others in steps before the first call."""
    for make, early in (
        (lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.2), 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, 0.01), 2),
    ):
        net, one = four(), four()
        ours, theirs = make(net.parameters()), make(one.parameters())
        for n, optimizer in ((net, ours), (one, theirs)):
            for x, t in BATCHES[:early]:
                CROSS_ENTROPY(n(x), t).backward()
                optimizer.step(), optimizer.zero_grad()
        model = wrapped(net, CROSS_ENTROPY)
        for x, t in BATCHES:
            model(x, t).backward(), CROSS_ENTROPY(one(x), t).backward()
            ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
        close(whole(net.state_dict()), one.state_dict(), type(ours).__name__)
        for p, q in zip(net.parameters(), one.parameters()):
            assert ours.state[p].keys() == theirs.state[q].keys()
            for name, x in ours.state[p].items():
                close(whole(x), theirs.state[q][name], name)
                assert not x.dim() or x.to_local().shape == p.to_local().shape
        assert len(ours.state) == len(theirs.state)
    net = four()
    rows = torch.optim.Adafactor(net.parameters())
    CROSS_ENTROPY(net(X), T).backward(), rows.step()
    error = raised(lambda: wrapped(net, CROSS_ENTROPY)(X, T))
    assert isinstance(error, sw.SettingError) and "Adafactor has noted 'row_var' of shape" in str(error)


@scenario
def what_an_optimizer_notes_of_parameters_that_are_yet_to_come(rank: int, world: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(8, 16, dtype=D), sw.shard(nn.Linear(16, 8, dtype=D), ((1, 4), (1, 4))))

    def built(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(net.parameters(), 0.1, initial_accumulator_value=0.2)

    for inside in (True, False):
        one = make()
        theirs = built(one)
        with sw.no_init_parameters():
            net = make()
            ours = built(net) if inside else None
        ours = ours or built(net)
        model = wrapped(net, CROSS_ENTROPY)
        for x, t in BATCHES:
            loss, expected = model(x, t), CROSS_ENTROPY(one(x), t)
            close(loss, expected)
            loss.backward(), expected.backward()
            ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
        close(whole(net.state_dict()), one.state_dict())


@scenario
def buffers_change_alike(rank: int, world: int) -> None:
    def f(m, x):
        m.count += 1
        with torch.no_grad():
            m.mean.mul_(0.9).add_((x @ m.w).mean(0), alpha=0.1)
        return x @ m.w - m.mean * m.count

    def make() -> Apply:
        return Apply(f, count=torch.zeros((), dtype=torch.int64), mean=torch.zeros(8, dtype=D))

    net, one = make(), make()
    model = wrapped(net, dataset="data_parallel")
    for x, _ in BATCHES:
        close(model(part(x, rank, 4)), part(one(x), rank, 4))
    close(dict(net.named_buffers()), dict(one.named_buffers()))


@scenario
def evaluation_without_gradients_and_other_batches(rank: int, world: int) -> None:
    net, one = four(), four()
    model = wrapped(net, CROSS_ENTROPY)
    with torch.no_grad():
        assert not model(X, T).requires_grad  # the first call of all
    for size in (16, 32, 16):
        x, t = draw(size, 8), labels(size)
        loss, expected = model(x, t), CROSS_ENTROPY(one(x), t)
        close(loss, expected)
        loss.backward(), expected.backward()
        model.eval()
        close(model(x, t), CROSS_ENTROPY(one(x), t))
        model.train()
    close(gradients(net), gradients(one))


@scenario
def two_wrappers_of_one_model(rank: int, world: int) -> None:
    net, one = four(), four()
    train, evaluate = wrapped(net, CROSS_ENTROPY), wrapped(net)
    ours, theirs = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(one.parameters(), 0.1)
    for x, t in BATCHES:
        train(x, t).backward(), CROSS_ENTROPY(one(x), t).backward()
        ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
        with torch.no_grad():
            close(evaluate(x), one(x))
    evaluate(X).square().mean().backward(), one(X).square().mean().backward()
    close(gradients(net), gradients(one))
    assert evaluate.plan.parameters["w1"].layout == train.plan.parameters["w1"].layout


@scenario
def frozen_parameters_that_thaw(rank: int, world: int) -> None:
    net, one = four(), four()
    for n in (net, one):
        n.w1.requires_grad_(False), n.head.bias.requires_grad_(False)
    model = wrapped(net, CROSS_ENTROPY)
    for _ in range(2):
        model(X, T).backward(), CROSS_ENTROPY(one(X), T).backward()
        close(gradients(net), gradients(one))
        for n in (net, one):
            n.w1.requires_grad_(True), n.w2.requires_grad_(False), n.zero_grad()


@scenario
def inputs_that_require_gradients(rank: int, world: int) -> None:
    for dataset, mine in (FEEDINGS["full_batch"], FEEDINGS["data_parallel"]):
        x, y = mine(X, rank).clone().requires_grad_(), X.clone().requires_grad_()
        wrapped(four(), nn.MSELoss(), dataset=dataset)(x, mine(X, rank)).backward()
        F.mse_loss(four()(y), X).backward()
        close(x.grad, mine(y.grad, rank))


@scenario
def statistics_run_whole(rank: int, world: int) -> None:
    net = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.BatchNorm1d(8, dtype=D))
    one = copy.deepcopy(net)
    model = wrapped(net, on_missing_rule="replicate")
    for _ in range(2):
        close(model(X), one(X))
    close(dict(net.named_buffers()), dict(one.named_buffers()))


@scenario
def stand_alone_ranks_need_nobody(rank: int, world: int) -> None:
    if rank:
        return  # one rank by itself
    net, one = four(), four()
    model = wrapped(net, CROSS_ENTROPY, "stand_alone")
    model(X, T).backward(), CROSS_ENTROPY(one(X), T).backward()
    close(gradients(net), gradients(one))


# -- the same program in both runtimes ---------------------------------------------------------------------------------


@scenario
def both_runtimes_give_the_same(rank: int, world: int) -> None:
    from test_annotations import Modules, Nested

    for make, args in (
        (Modules, (X, T)),
        (Nested, (X,)),
        (lambda: Apply(lambda m, x: (x.mT @ m.w[:, :4].repeat(2, 2)).softmax(0).cumsum(1).var(0)), (X,)),
    ):
        net = make()
        one = copy.deepcopy(net)
        for _, operator in _marked_operators(net):
            halve(operator)
        got, expected = wrapped(net)(*args), one(*args)
        close(got, expected, "outputs")
        squares(got).backward(), squares(expected).backward()
        close(gradients(net), gradients(one), "gradients")


def halve(operator: sw.Operator) -> None:
    """A strategy for eight devices that fits four: what is cut most, by half."""
    strategies = [operator.in_strategy, operator.out_strategy]
    operator.shard(
        *(
            None if s is None else tuple(None if isinstance(e, sw.Layout) else tuple(min(c, 2) for c in e) for e in s)
            for s in strategies
        )
    )
    if operator.in_strategy is not None and (
        None in operator.in_strategy or sum(c > 1 for e in operator.in_strategy for c in e) > 2
    ):
        operator.shard()


# -- ranks that differ -------------------------------------------------------------------------------------------------


def raised(attempt: Callable[[], Any]) -> Exception:
    try:
        attempt()
    except sw.ShardwrightError as error:
        return error
    raise AssertionError("nothing was raised")


def alike_on_all(error: Exception, world: int) -> None:
    texts: list[Any] = [None] * world
    dist.all_gather_object(texts, f"{type(error).__name__}: {error}")
    assert len(set(texts)) == 1, texts


class Wrong(nn.Module):
    """A model that cannot be planned, as `forward` has it."""

    def __init__(self, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor], **marks: Any) -> None:
        super().__init__()
        self.w, self.does = nn.Parameter(draw(8, 8)), forward
        for name, mark in marks.items():
            setattr(self, name, sw.shard(torch.matmul, mark))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.does(self, x)


WRONG = [
    (
        sw.PlanError,
        "wanted in two layouts",
        Wrong(lambda m, x: m.b(m.a(x, m.w), m.w), a=((2, 2), (2, 1)), b=((1, 4), (4, 1))),
    ),
    (
        sw.LayoutError,
        "8 devices",
        Wrong(
            lambda m, x: m.a(x, m.w), a=(sw.Layout((8,), ("a",))("a", "None"), sw.Layout((8,), ("a",))("None", "None"))
        ),
    ),
    (sw.MissingRuleError, "linalg_tensorinv", Wrong(lambda m, x: x @ torch.linalg.tensorinv(m.w, 1))),
    (sw.CaptureError, "data-dependent", Wrong(lambda m, x: x @ m.w if x.sum() > 0 else x)),
    (sw.CaptureError, "values of tensors", Wrong(lambda m, x: x * x.sum().item())),
]


@scenario
def what_cannot_be_planned_is_the_same_error_on_every_rank(rank: int, world: int) -> None:
    for kind, says, net in WRONG:
        error = raised(lambda: wrapped(net)(X))
        assert (
            isinstance(error, kind) and says in str(error) and error.legal and "test_rank_executor.py" in str(error)
        ), error
        alike_on_all(error, world)


@scenario
def mistakes_are_the_same_on_every_rank(rank: int, world: int) -> None:
    for marks in ((((2, 2), (4, 1)),), (((4, 4), (4, 1)),), (((3, 1), (1, 1)),), (None, ((5, 1),))):
        net = four(*marks)
        before = copy.deepcopy(net.state_dict())
        model = wrapped(net, CROSS_ENTROPY)
        for _ in range(2):
            error = raised(lambda: model(X, T))
            assert isinstance(error, sw.StrategyError) and error.source.startswith("small_networks.py") and error.legal
            alike_on_all(error, world)
        assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items()), "nothing has been cut yet"


@scenario
def other_values_on_some_ranks(rank: int, world: int) -> None:
    for deferred in (False, True):
        torch.manual_seed(rank // 2)
        if deferred:
            with sw.no_init_parameters():
                net = nn.Linear(8, 8, dtype=D)
        else:
            net = nn.Linear(8, 8, dtype=D)
        error = raised(lambda: wrapped(net)(X))
        assert isinstance(error, sw.RuntimeMismatchError) and "weight" in str(error) and "[2, 3]" in str(error)
        assert "seed" in error.legal
        alike_on_all(error, world)


@scenario
def other_inputs_on_some_ranks(rank: int, world: int) -> None:
    odd = rank == 3
    for dataset, x, t in (
        ("full_batch", draw(12 if odd else 16, 8), labels(12 if odd else 16)),
        ("data_parallel", draw(3 if odd else 4, 8), labels(3 if odd else 4)),
        ("data_parallel", draw(5 if odd else 4, 8), labels(5 if odd else 4)),
        ("full_batch", X.float() if odd else X, T),
    ):
        error = raised(lambda: wrapped(four(), CROSS_ENTROPY, dataset=dataset)(x, t))
        assert isinstance(error, sw.RuntimeMismatchError) and "[3]" in str(error), error
        alike_on_all(error, world)
    error = raised(lambda: wrapped(four())(draw(16, 9) if odd else X))  # one that cannot be captured
    assert isinstance(error, sw.RuntimeMismatchError)
    alike_on_all(error, world)


@scenario
def other_programs_on_some_ranks(rank: int, world: int) -> None:
    odd = rank == 1
    for net, mode in (
        (four(((4, 1), (1, 1))) if odd else four(), "semi_auto"),
        (four(((3, 1), (1, 1))) if odd else four(), "semi_auto"),
        (four(), "data_parallel" if odd else "semi_auto"),
    ):
        error = raised(lambda: wrapped(net, CROSS_ENTROPY, mode)(X, T))
        assert isinstance(error, sw.RuntimeMismatchError) and "[1]" in str(error), error
        alike_on_all(error, world)
    assert wrapped(four(), CROSS_ENTROPY)(X, T).isfinite()  # and the ranks can go on


# -- running them ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm() -> None:
    """Load once, before the ranks are forked, all that a first capture and a first backward load in each of them."""
    net = four()
    sw.init(devices=4)
    sw.AutoParallel(net, CROSS_ENTROPY).dataset_strategy("full_batch")(X, T).backward()


@pytest.fixture(scope="module")
def results(warm) -> list[dict[str, str | None]]:
    return run_ranks(run_scenarios, 4, SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_four_ranks(name: str, results) -> None:
    for rank, result in enumerate(results):
        if result[name] is not None:
            pytest.fail(f"rank {rank}:\n{result[name]}", pytrace=False)


def six(rank: int, world: int) -> None:
    """Three ways and two ways, on six ranks: layouts that have no mesh in common."""

    def make() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(
            sw.shard(nn.Linear(12, 12, dtype=D), ((2, 3), (1, 3))),
            nn.Tanh(),
            sw.shard(nn.Linear(12, 6, dtype=D), ((3, 2), (1, 2)), ((2, 3),)),
        )

    net, one = make(), make()
    model = wrapped(net, nn.MSELoss())
    ours, theirs = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(one.parameters(), 0.1)
    for seed in range(2):
        x, y = draw(12, 12, seed=seed), draw(12, 6, seed=seed)
        model(x, y).backward(), F.mse_loss(one(x), y).backward()
        close(whole(nn.utils.clip_grad_norm_(net.parameters(), 0.01)), nn.utils.clip_grad_norm_(one.parameters(), 0.01))
        ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
    close(whole(net.state_dict()), one.state_dict())


def test_on_six_ranks(warm) -> None:
    run_ranks(six, 6)


# -- a rank that dies --------------------------------------------------------------------------------------------------


def train_until_one_dies(rank: int, world: int, meeting: socket.socket) -> None:
    torch.set_num_threads(1)
    join_group(rank, world, meeting, 3600)
    net = Marked(((world, 1), (1, 1)), None, ((1, world), (world, 1)))
    model = wrapped(net, CROSS_ENTROPY)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(1000):
        if rank == 1 and step == 2:
            os._exit(3)
        model(draw(12, 8), labels(12)).backward()
        optimizer.step(), optimizer.zero_grad()


def test_when_a_rank_dies_the_others_end(warm) -> None:
    context = multiprocessing.get_context("fork")
    meeting = meeting_socket()
    ranks = [context.Process(target=train_until_one_dies, args=(r, 2, meeting), daemon=True) for r in range(2)]
    for process in ranks:
        process.start()
    meeting.close()
    try:
        ranks[1].join(PATIENCE)
        assert ranks[1].exitcode == 3
        ranks[0].join(PATIENCE)
        assert ranks[0].exitcode == 1, "an error, not a wait for the timeout"
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


@pytest.mark.long
def test_a_launcher_ends_the_others_and_says_who_died(tmp_path) -> None:
    script = SCRIPTS / "train_and_die.py"
    done = forked_python.run(
        [sys.executable, "-m", "shardwright", "run", "--worker_num=3", f"--log_dir={tmp_path}", str(script)],
        forks=True,
        timeout=PATIENCE,
        cwd=tmp_path,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "worker 1 failed" in done.stderr and "step 1" in (tmp_path / "worker_1.log").read_text()
    logs = [(tmp_path / f"worker_{rank}.log").read_text() for rank in range(3)]
    assert all("step 1\n" in log and "step 3\n" not in log for log in logs)

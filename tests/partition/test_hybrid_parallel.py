"""hybrid_parallel: each rank's own program, joined by collectives that the user places.

The reference is the same program on a list of the ranks' tensors, with the mean of their losses.
"""

from __future__ import annotations

import copy
import operator
import runpy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as torch_distributed
import torch.distributed.nn.functional as functional
import torch.nn.functional as F
from one_device import close
from paths import EXAMPLES
from ranks import run_ranks
from small_networks import Apply, D, draw
from torch import Tensor, nn
from torch.distributed import broadcast as torch_broadcast_itself

import shardwright as sw

RANKS = 4
MESH = sw.Layout((2, 2), ("a", "b"))


# -- the reference: a list of the ranks' tensors -----------------------------------------------------------------------


class Each:
    """One tensor a rank; operators and methods of tensors work on each."""

    def __init__(self, xs: Any) -> None:
        self.xs = list(xs)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: Each(getattr(x, name)(*args, **named) for x in self.xs)


for _name in ("add", "sub", "mul", "matmul", "truediv"):
    setattr(
        Each,
        f"__{_name}__",
        lambda a, b, op=getattr(operator, _name): Each(
            op(x, y) for x, y in zip(a.xs, b.xs if isinstance(b, Each) else [b] * len(a.xs))
        ),
    )


def grouped(change: Callable[[list[Tensor]], list[Tensor]], x: Each, group: Any) -> Each:
    out: list[Any] = [None] * len(x.xs)
    if group is None or group == MESH(("a", "b")):
        members = [list(range(len(x.xs)))]
    elif isinstance(group, sw.Layout):
        members = [[0, 1], [2, 3]] if group == MESH("b") else [[0, 2], [1, 3]]
    else:
        alone: dict[str, Any] = {"[0, 1]": [[0, 1], [2, 3]], "(3, 1)": [[0, 2], [1, 3]], "[2]": [[0], [1], [2], [3]]}
        members = alone.get(str(group), group)
    for ranks in members:
        for rank, y in zip(ranks, change([x.xs[r] for r in ranks])):
            out[rank] = y
    return Each(out)


class ByHand:
    """`sw.ops` on lists."""

    @staticmethod
    def all_reduce(x: Each, op: str = "sum", group: Any = None) -> Each:
        reductions = {"max": torch.amax, "min": torch.amin, "prod": torch.prod, "mean": torch.mean, "sum": torch.sum}
        return grouped(lambda xs: [reductions[op](torch.stack(xs), 0)] * len(xs), x, group)

    @staticmethod
    def all_gather(x: Each, dim: int = 0, group: Any = None) -> Each:
        return grouped(lambda xs: [torch.cat(xs, dim)] * len(xs), x, group)

    @staticmethod
    def reduce_scatter(x: Each, dim: int = 0, group: Any = None) -> Each:
        return grouped(lambda xs: list(sum(xs).chunk(len(xs), dim)), x, group)

    @staticmethod
    def all_to_all(x: Each, split_dim: int = 0, concat_dim: int = 0, group: Any = None) -> Each:
        return grouped(
            lambda xs: [torch.cat([y.chunk(len(xs), split_dim)[r] for y in xs], concat_dim) for r in range(len(xs))],
            x,
            group,
        )

    @staticmethod
    def broadcast(x: Each, root: int = 0, group: Any = None) -> Each:
        return grouped(lambda xs: [xs[root]] * len(xs), x, group)


# -- programs: x [4, 8] a rank, w [8, 8] each rank's own, p [8, 8] of all ---------------------------------------------

PROGRAMS: dict[str, Callable[..., Any]] = {
    "own parts alone": lambda o, x, w, p: (x @ w) @ p,
    "all_reduce": lambda o, x, w, p: o.all_reduce((x @ w).sum(-1)),
    "all_reduce, then each its own": lambda o, x, w, p: o.all_reduce(x @ w).tanh() @ w,
    "all_reduce of a mean": lambda o, x, w, p: o.all_reduce(x @ p, "mean") * x,
    "all_reduce in pairs": lambda o, x, w, p: o.all_reduce(x @ w, group=MESH("b")) @ w,
    "all_reduce in far pairs": lambda o, x, w, p: o.all_reduce(x @ w, group=MESH("a")) @ p,
    "all_reduce of both": lambda o, x, w, p: o.all_reduce(x @ w, group=MESH(("a", "b"))) @ w,
    "all_reduce of a maximum": lambda o, x, w, p: o.all_reduce((x @ w).tanh(), "max") * x @ p,
    "all_reduce of a minimum in pairs": lambda o, x, w, p: o.all_reduce(x @ w, "min", group=MESH("a")) @ w,
    "all_reduce of a maximum that ranks share": lambda o, x, w, p: (
        o.all_reduce(p.tanh(), "max", group=[0, 1]) @ w + x.sum()
    ),
    "all_reduce of a maximum twice": lambda o, x, w, p: o.all_reduce(
        o.all_reduce(x @ w, "max", group=MESH("b")) * x, "max"
    ),
    "all_reduce of a product": lambda o, x, w, p: o.all_reduce((x @ w).tanh(), "prod") @ p,
    "all_reduce of a product with zeros": lambda o, x, w, p: o.all_reduce((x @ w).relu() + x, "prod", group=MESH("b")),
    "a softmax over the ranks": lambda o, x, w, p: (
        (x - o.all_reduce(x, "max")).exp() / o.all_reduce((x - o.all_reduce(x, "max")).exp()) @ w
    ),
    "all_reduce over a list": lambda o, x, w, p: o.all_reduce(x @ w, group=[0, 1]).tanh() @ w,
    "all_reduce over a list from elsewhere": lambda o, x, w, p: o.all_reduce(x @ w, group=(3, 1)) @ p,
    "all_reduce over lists": lambda o, x, w, p: o.all_reduce(x @ w, "mean", group=[[0, 2], [1, 3]]) @ p,
    "all_reduce over one rank": lambda o, x, w, p: o.all_reduce(x @ w, "max", group=[2]) @ p,
    "all_gather over a list": lambda o, x, w, p: o.all_gather(w, 1, group=[0, 1]).tanh().sum(1) * x,
    "all_to_all over lists": lambda o, x, w, p: o.all_to_all(x @ w, 0, 1, group=[[0, 2], [1, 3]]).sum(0).tanh(),
    "broadcast over a list": lambda o, x, w, p: o.broadcast(w, 1, group=[0, 1]).tanh().sum(0) * x,
    "all_gather": lambda o, x, w, p: o.all_gather((x @ w).tanh()) @ w,
    "all_gather of columns": lambda o, x, w, p: o.all_gather(x @ p, -1).tanh() @ o.all_gather(w, 0),
    "all_gather in pairs": lambda o, x, w, p: o.all_gather(w, 1, group=MESH("a")).tanh().sum(1) * x,
    "reduce_scatter": lambda o, x, w, p: o.reduce_scatter(x @ w) * p.sum(0),
    "reduce_scatter of columns": lambda o, x, w, p: o.reduce_scatter(x @ w, 1).tanh().sum(1),
    "reduce_scatter in pairs": lambda o, x, w, p: o.reduce_scatter(x @ w, -1, group=MESH("b")).tanh(),
    "all_to_all": lambda o, x, w, p: o.all_to_all(x @ w, 1, 0).tanh() * 2,
    "all_to_all of a dim": lambda o, x, w, p: o.all_to_all(o.all_to_all(x).tanh() @ w) @ p,
    "all_to_all in pairs": lambda o, x, w, p: o.all_to_all(x @ w, 0, 1, group=MESH("a")).sum(0).tanh(),
    "broadcast": lambda o, x, w, p: o.broadcast(x @ w, 2).tanh() @ w,
    "broadcast in pairs": lambda o, x, w, p: o.broadcast(w, 1, group=MESH("b")).tanh().sum(0) * x,
    "mixture of experts": lambda o, x, w, p: o.all_to_all((o.all_to_all(x @ p) @ w).tanh()) * x + x,
}


class Net(nn.Module):
    def __init__(self, program: str) -> None:
        super().__init__()
        self.program = program
        self.w = sw.layerwise_parallel(lambda rank: draw(8, 8, seed=rank))
        self.p = nn.Parameter(draw(8, 8, seed=77))

    def forward(self, x: Tensor) -> Tensor:
        return PROGRAMS[self.program](sw.ops, x, self.w, self.p)


def reference(program: str, xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    ws = [draw(8, 8, seed=rank).requires_grad_() for rank in range(RANKS)]
    p = draw(8, 8, seed=77).requires_grad_()
    return PROGRAMS[program](ByHand, Each(xs), Each(ws), Each([p] * RANKS)).xs, ws, p


def hybrid(net: nn.Module, loss_fn: Any = None, dataset: str = "data_parallel", **options: Any) -> sw.AutoParallel:
    return sw.AutoParallel(net, loss_fn, "hybrid_parallel", **options).dataset_strategy(dataset)


def loss_of(y: Tensor) -> Tensor:
    return (y + 0.1).square().mean()


def none_is_zero(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


X = draw(4 * RANKS, 8)


@pytest.mark.parametrize("program", PROGRAMS)
def test_in_one_process(program: str) -> None:
    sw.init(devices=RANKS)
    expected, ws, p = reference(program, list(X.chunk(RANKS)))
    loss_of(torch.cat(expected)).backward()
    net = Net(program)
    out = hybrid(net)(X)
    close(out, torch.cat(expected))
    loss_of(out).backward()
    close(none_is_zero(net.w.grad, net.w), torch.stack([none_is_zero(w.grad, w) for w in ws]))
    close(none_is_zero(net.p.grad, net.p), none_is_zero(p.grad, p))


@pytest.mark.parametrize("program", ["all_reduce", "all_reduce, then each its own", "mixture of experts"])
def test_a_loss_inside_is_the_mean_of_the_ranks(program: str) -> None:
    sw.init(devices=RANKS)
    expected, ws, p = reference(program, list(X.chunk(RANKS)))
    targets = [torch.ones_like(y) * r for r, y in enumerate(expected)]
    sum(F.mse_loss(y, t) for y, t in zip(expected, targets)).div(RANKS).backward()
    net = Net(program)
    loss = hybrid(net, nn.MSELoss())(X, torch.cat(targets))
    close(loss, sum(F.mse_loss(y, t) for y, t in zip(expected, targets)) / RANKS)
    loss.backward()
    close(none_is_zero(net.w.grad, net.w), torch.stack([none_is_zero(w.grad, w) for w in ws]))
    close(none_is_zero(net.p.grad, net.p), none_is_zero(p.grad, p))


# -- the tutorial ------------------------------------------------------------------------------------------------------

WEIGHT = draw(512, 128, seed=5)


class Tutorial(nn.Module):
    """A weight of 512×128, of which each device holds 512×64."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = sw.layerwise_parallel(lambda rank: WEIGHT.chunk(sw.world_size(), 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return sw.ops.all_reduce((x @ self.weight).sum(-1))


def one_device() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(x, loss, the weight's gradient) of three steps of the tutorial on one device."""
    weight = nn.Parameter(WEIGHT.clone())
    optimizer = torch.optim.SGD([weight], 1e-5)
    for seed in range(3):
        x = draw(32, 512, seed=seed)
        optimizer.zero_grad()
        loss = loss_of((x @ weight).sum(-1))
        loss.backward()
        yield x, loss.detach(), weight.grad.clone()
        optimizer.step()


def test_the_tutorial() -> None:
    sw.init(devices=2)
    net = Tutorial()
    optimizer, model = torch.optim.SGD(net.parameters(), 1e-5), hybrid(net, dataset="full_batch")
    for x, expected, gradient in one_device():
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        close(loss.detach(), expected)
        close(torch.cat(list(net.weight.grad), 1), gradient)
        optimizer.step()


def test_one_device_is_enough() -> None:
    sw.init(devices=1)
    net = Tutorial()
    x, expected, gradient = next(one_device())
    loss = loss_of(hybrid(net)(x))
    loss.backward()
    close((loss.detach(), net.weight.grad.reshape(512, 128)), (expected, gradient))
    for program in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all of a dim", "broadcast in pairs"):
        if "pairs" not in program:
            close(hybrid(Net(program))(X), hybrid(Net(program))(X))


# -- state, inputs, plans ----------------------------------------------------------------------------------------------


def test_buffers_and_random_numbers() -> None:
    def f(m: nn.Module, x: Tensor) -> Tensor:
        m.count += 1
        with torch.no_grad():
            m.mean.mul_(0.5).add_((x @ m.w).mean(0), alpha=0.5)
        return F.dropout(torch.ones_like(x), 0.5) * (x @ m.w) + m.mean

    sw.init(devices=RANKS)
    net = Apply(f, count=torch.zeros((), dtype=torch.int64), mean=torch.zeros(8, dtype=D))
    out = hybrid(net)(X)
    expected = (X @ net.w).reshape(RANKS, -1, 8)
    close(net.mean, expected.mean((0, 1)).detach() / 2)
    assert net.count == 1
    dropped = (out.reshape(RANKS, -1, 8) - expected.mean(1, keepdim=True) / 2) / expected
    assert set(dropped.round(decimals=9).unique().tolist()) <= {0.0, 2.0} and 0 < dropped.sum() < dropped.numel() * 2


def test_inputs_that_require_gradients() -> None:
    sw.init(devices=RANKS)
    for dataset in ("full_batch", "data_parallel"):
        x = X.clone().requires_grad_()
        y = X.clone().requires_grad_()
        xs = [y] * RANKS if dataset == "full_batch" else list(y.chunk(RANKS))
        expected = reference("all_reduce, then each its own" if dataset == "data_parallel" else "all_reduce", xs)[0]
        loss_of(torch.cat(expected)).backward()
        net = Net("all_reduce, then each its own" if dataset == "data_parallel" else "all_reduce")
        loss_of(hybrid(net, dataset=dataset)(x)).backward()
        close(x.grad, y.grad)


def test_results_of_every_kind() -> None:
    sw.init(devices=RANKS)
    net = Apply(
        lambda m, x: {"rows": x @ m.w, "number": (x @ m.w).mean(), "none": None, "plain": 3, "size": x.shape[0]}
    )
    y = X @ net.w
    close(hybrid(net)(X), {"rows": y, "number": y.mean(), "none": None, "plain": 3, "size": 4})
    with torch.no_grad():
        close(hybrid(net).eval()(X)["rows"], y)


def test_a_plan_shows_the_users_collectives(tmp_path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = sw.layerwise_parallel(nn.Parameter(torch.randn(2, 2)))
            self.p = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return sw.ops.all_gather(sw.ops.reduce_scatter(x @ self.p, 1) @ self.w, 1, group=MESH("b"))

    plan = sw.plan(
        Two(), (torch.randn(16, 8),), parallel_mode="hybrid_parallel", devices=4, dataset_strategy="data_parallel"
    )
    seen = [(c.op, c.ranks, c.shape, c.phase) for c in plan.collectives(2)]
    assert seen == [
        ("reduce_scatter", (0, 1, 2, 3), (4, 8), "forward"),
        ("all_gather", (2, 3), (4, 2), "forward"),
        ("reduce_scatter", (2, 3), (4, 4), "backward"),
        ("all_gather", (0, 1, 2, 3), (4, 2), "backward"),
        ("all_reduce", (0, 1, 2, 3), (8, 8), "gradient"),
    ]
    assert plan.operator("matmul").in_strategy == ((1, 1), (1, 1)) and plan.parameters["p"].local_shape(0) == (8, 8)
    assert plan.parameters["w"].slice(2)[0] == slice(2, 3)
    sw.init(devices=4)
    net = Net("all_gather in pairs")
    hybrid(net, save_graphs=tmp_path)(X)
    assert "all_gather" in (tmp_path / "rank_3" / "execute.ir").read_text()


def test_parameters_that_come_into_being_later() -> None:
    sw.init(devices=2)
    torch.manual_seed(4)
    with sw.no_init_parameters():
        net = nn.Sequential(nn.Linear(8, 8, dtype=D))
        net[0].weight = sw.layerwise_parallel(lambda rank: torch.randn(8, 8, dtype=D) + rank)
    torch.manual_seed(4)
    real = nn.Sequential(nn.Linear(8, 8, dtype=D))
    real[0].weight = sw.layerwise_parallel(lambda rank: torch.randn(8, 8, dtype=D) + rank)
    close(hybrid(net)(X), hybrid(real)(X))
    assert net[0].weight.layerwise_parallel and torch.equal(net[0].weight, real[0].weight)
    close(hybrid(net)(X[:4]), hybrid(real)(X[:4]))


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(text: str, attempt: Callable[[], Any]) -> str:
    with pytest.raises(sw.ShardwrightError, match=text) as caught:
        attempt()
    assert caught.value.legal
    return str(caught.value)


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto"])
def test_own_parameters_and_collectives_need_the_mode(mode: str) -> None:
    sw.init(devices=2)
    marked = nn.Sequential(nn.Linear(8, 8, dtype=D))
    marked[0].weight.layerwise_parallel = True
    refused("'0.weight' is layerwise_parallel", lambda: sw.AutoParallel(marked, parallel_mode=mode)(X))
    refused("'0.weight' is layerwise_parallel", lambda: sw.plan(marked, (X,), parallel_mode=mode))
    if mode != "stand_alone":
        net = Apply(lambda m, x: sw.ops.all_reduce(x @ m.w))
        message = refused("sw.ops.all_reduce joins", lambda: sw.AutoParallel(net, parallel_mode=mode)(X))
        assert "test_hybrid_parallel.py:" in message and "hybrid_parallel" in message


def test_bad_input() -> None:
    sw.init(devices=RANKS)
    call = lambda f: lambda: hybrid(Apply(lambda m, x: f(x @ m.w)))(X)
    refused("all_reduce of 'maximum'", call(lambda x: sw.ops.all_reduce(x, "maximum")))
    refused("dim 2 of a tensor", call(lambda x: sw.ops.all_gather(x, 2)))
    refused("dim 0 of .3, 8. has size 3, which 4 ranks", call(lambda x: sw.ops.reduce_scatter(x[:3])))
    refused("size 6, which 4 ranks", call(lambda x: sw.ops.all_to_all(x[:, :6], 1, 0)))
    refused("from rank 4 of a group of 4", call(lambda x: sw.ops.broadcast(x, 4)))
    for group, message in (
        ("mp", "'mp' is no group of ranks"),
        (4, "4 is no group"),
        ([], "is no group"),
        (MESH, "is no group of ranks\n  legal: one of its axes, such as layout.'b'."),
        (MESH("a", "b"), "is no group"),
        ([[0, 1], 2], "is no group"),
        ([0, 4], "not of ranks from 0 to 3"),
        ([0, 0], "not of ranks from 0 to 3, each once"),
        ([0, True], "not of ranks from 0 to 3"),
        ([0, 1, 2], "leaves no equal groups for the others"),
        ([1, 2], "leaves no equal groups for the others"),
        ([0, 3], "leaves no equal groups for the others"),
        ([[0, 1], [2]], "leaves no equal groups"),
        ([[0, 1]] * 2, "each once"),
        ([[0, 3], [1, 2]], "leaves no equal groups"),
    ):
        refused(message, call(lambda x, group=group: sw.ops.all_reduce(x, group=group)))
    refused("does not fit 4 devices", call(lambda x: sw.ops.all_reduce(x, group=sw.Layout((4, 3), ("a", "b"))("a"))))
    refused("outside of a wrapped model", lambda: sw.ops.all_reduce(X))
    refused("layerwise_parallel.Tensor", lambda: sw.layerwise_parallel(X))
    plain = nn.Sequential(nn.Linear(8, 8, dtype=D))
    plain[0].weight.layerwise_parallel = True
    refused("'0.weight' is layerwise_parallel and holds the slices of 1", lambda: hybrid(plain)(X))
    refused("return different things", lambda: hybrid(Net("own parts alone"), dataset="full_batch")(X))
    refused("which 4 devices do not divide", lambda: hybrid(Net("all_reduce"))(X[:6]))


def torch_all_reduce(x: Tensor) -> Tensor:
    torch_distributed.all_reduce(x)
    return x


def torch_broadcast(x: Tensor) -> Tensor:
    torch_broadcast_itself(x, 0)
    return x


def torch_all_gather(x: Tensor) -> Tensor:
    out = [torch.empty_like(x) for _ in range(RANKS)]
    torch_distributed.all_gather(out, x)
    return torch.cat(out)


def torch_reduce_scatter(x: Tensor) -> Tensor:
    out = x.new_empty(len(x) // RANKS, x.shape[1])
    torch_distributed.reduce_scatter_tensor(out, x)
    return out


def torch_barrier(x: Tensor) -> Tensor:
    torch_distributed.barrier()
    return x


def torch_send(x: Tensor) -> Tensor:
    torch_distributed.send(x, 1)
    return x


#: Collectives of torch in a forward -> the way to write them here.
OF_TORCH: dict[Callable[[Tensor], Tensor], str] = {
    torch_all_reduce: "sw.ops.all_reduce(x)",
    torch_broadcast: "sw.ops.broadcast(x, root)",
    torch_all_gather: "sw.ops.all_gather(x, dim)",
    torch_reduce_scatter: "sw.ops.reduce_scatter(x, dim)",
    torch_barrier: "no barrier",
    torch_send: "sw.ops.all_to_all",
    (lambda x: functional.all_reduce(x)): "sw.ops.all_reduce(x)",
}


def check_collective_of_torch(call: Callable[[Tensor], Tensor], mode: str) -> None:
    with pytest.raises(sw.CaptureError, match=r"of torch.distributed; .* sw.ops alone") as caught:
        sw.AutoParallel(Apply(lambda m, x: call(x @ m.w)), parallel_mode=mode)(X)
    assert OF_TORCH[call] in caught.value.legal and "hybrid_parallel" in caught.value.legal
    assert caught.value.source.startswith("test_hybrid_parallel.py:")


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("mode", ["hybrid_parallel", "semi_auto"])
@pytest.mark.parametrize("call", OF_TORCH, ids=lambda call: getattr(call, "__name__", None))
def test_collectives_of_torch_are_named_with_ours(call: Callable[[Tensor], Tensor], mode: str) -> None:
    sw.init(devices=RANKS)
    check_collective_of_torch(call, mode)


def collectives_of_torch_on_ranks(rank: int, world: int) -> None:
    sw.init()
    for call in OF_TORCH:
        check_collective_of_torch(call, "hybrid_parallel")
    net = nn.Linear(8, 8 // world, dtype=D)  # each rank draws a slice of its own, and does not say so
    net.weight.data += rank
    with pytest.raises(sw.RuntimeMismatchError, match="'weight' starts from other values") as caught:
        hybrid(net)(X)
    assert "sw.layerwise_parallel on 'weight'" in caught.value.legal


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_mistakes_on_two_ranks() -> None:
    run_ranks(collectives_of_torch_on_ranks, 2)


# -- in processes ------------------------------------------------------------------------------------------------------


def tutorial_on_ranks(rank: int, world: int) -> None:
    sw.init()
    assert (sw.rank(), sw.world_size()) == (rank, world)
    for broadcast in (False, True):  # which leaves what is each rank's own alone
        net = Tutorial()
        assert net.weight.shape == (512, 64)
        optimizer = torch.optim.SGD(net.parameters(), 1e-5)
        model = hybrid(net, dataset="full_batch", parameter_broadcast=broadcast)
        for x, expected, gradient in one_device():
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            close(loss.detach(), expected)
            close(net.weight.grad, gradient.chunk(2, 1)[rank])
            optimizer.step()
    assert type(net.weight) is nn.Parameter and net.weight.layerwise_parallel


def programs_on_ranks(rank: int, world: int) -> None:
    sw.init()
    for program in PROGRAMS:
        expected, ws, p = reference(program, list(X.chunk(RANKS)))
        sum(loss_of(y) for y in expected).div(RANKS).backward()
        for mean in (True, False) if program == "mixture of experts" else (True,):
            net = Net(program)
            model = hybrid(net).enable_gradients_mean(mean)
            out = model(X.chunk(RANKS)[rank])
            close(out, expected[rank], program)
            with model.no_sync():
                (loss_of(out) / 2).backward(retain_graph=True)
            (loss_of(out) / 2).backward()
            factor = 1 if mean else world
            close(none_is_zero(net.w.grad, net.w), none_is_zero(ws[rank].grad, ws[rank]) * factor, program)
            held = None if net.p.grad is None else net.p.grad.full_tensor()
            close(none_is_zero(held, p), none_is_zero(p.grad, p) * factor, program)
    net, targets = (
        Net("all_reduce"),
        [torch.ones_like(y) * r for r, y in enumerate(reference("all_reduce", list(X.chunk(4)))[0])],
    )
    loss = hybrid(net, nn.MSELoss())(X.chunk(RANKS)[rank], targets[rank])
    close(loss, sum(F.mse_loss(y, t) for y, t in zip(reference("all_reduce", list(X.chunk(4)))[0], targets)) / RANKS)


def test_the_tutorial_on_two_ranks() -> None:
    run_ranks(tutorial_on_ranks, 2)


def test_programs_on_four_ranks() -> None:
    run_ranks(programs_on_ranks, RANKS)


def test_a_copy_keeps_no_mark_of_an_attribute() -> None:
    sw.init(devices=1)
    marked = sw.layerwise_parallel(nn.Parameter(torch.ones(2)))
    assert marked.layerwise_parallel and not hasattr(copy.deepcopy(marked), "layerwise_parallel")


def test_the_example_prints_what_one_device_gives(capsys) -> None:
    path = EXAMPLES / "hybrid_parallel.py"
    runpy.run_path(str(path))["main"](["--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(float(line.split()[3].rstrip(",")) == float(line.split()[-1]) for line in lines)

"""`sw.plan`: what it says of operators, parameters and collectives, for any number of devices and no process group."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.partition.local_program import SearchResult
from shardwright.report.format import cost_text, time_text


class Tutorial(nn.Module):
    def __init__(self, first=((2, 4), (4, 1)), second=((1, 8), (8, 1))) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(784, 512, device="meta"))
        self.w2 = nn.Parameter(torch.empty(512, 512, device="meta"))
        self.w3 = nn.Parameter(torch.empty(512, 10, device="meta"))
        self.matmul1, self.relu1 = sw.shard(torch.matmul, first), sw.shard(torch.relu, ((first[0][0], 1),))
        self.matmul2, self.relu2 = sw.shard(torch.matmul, second), sw.shard(torch.relu, ((1, 1),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu1(self.matmul1(x.flatten(1), self.w1))
        return self.relu2(self.matmul2(x, self.w2)) @ self.w3


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def train_plan(net: nn.Module, batch: int, **settings) -> sw.Plan:
    return sw.plan(net, (meta(batch, 1, 28, 28),), nn.CrossEntropyLoss(), meta(batch, dtype=torch.int64), **settings)


def test_what_a_plan_says_of_an_operator() -> None:
    plan = train_plan(Tutorial(), 32, devices=8)
    assert not dist.is_initialized()
    assert [o.name for o in plan.operators] == [
        "flatten",
        "matmul1",
        "relu1",
        "matmul2",
        "relu2",
        "matmul_2",
        "cross_entropy_loss",
    ]
    operator = plan.operator("matmul1")
    assert (operator.op, operator.module, operator.cause) == ("matmul", "", "mark")
    assert operator.source.startswith("test_planning.py:")
    assert operator.in_strategy == ((2, 4), (4, 1)) and operator.out_strategy == ((2, 1),)
    assert operator.in_layouts == (sw.Layout((2, 4), ("m", "k"))("m", "k"), sw.Layout((2, 4), ("m", "k"))("k", "None"))
    assert operator.out_layouts == (sw.Layout((2, 4), ("m", "k"))("m", "None"),)
    assert operator.local_shapes(5) == (((16, 196), (196, 512)), ((16, 512),))
    with pytest.raises(sw.PlanError, match="matmul9"):
        plan.operator("matmul9")


def test_what_a_plan_says_of_a_parameter() -> None:
    parameter = train_plan(Tutorial(), 32, devices=8).parameters["w1"]
    assert parameter.shape == (784, 512) and parameter.local_shape(5) == (196, 512)
    assert parameter.slice(5) == (slice(196, 392), slice(0, 512))
    assert parameter.layout == parameter.storage


def test_what_a_plan_says_of_collectives() -> None:
    plan = train_plan(Tutorial(), 32, devices=8)
    first = plan.collectives(5)[0]
    assert (first.op, first.ranks, first.shape, first.bytes) == ("all_reduce", (4, 5, 6, 7), (16, 512), 32768)
    assert (first.phase, first.cause, first.operator) == ("forward", "operator", "matmul1")
    phases = [c.phase for c in plan.collectives(5)]
    backward = [p != "forward" for p in phases]
    assert backward == sorted(backward), "the forward comes first"
    gradients = {c.shape: c.ranks for c in plan.collectives(5) if c.phase == "gradient"}
    assert gradients == {(196, 512): (1, 5), (512, 10): tuple(range(8))}
    assert all(c.cause == "parameter" for c in plan.collectives(5) if c.phase == "gradient")
    with pytest.raises(sw.PlanError, match="rank 8"):
        plan.collectives(8)


@pytest.mark.parametrize("devices", [1, 2, 6, 8, 12, 64, 1024])
def test_any_number_of_devices(devices: int) -> None:
    rows = math.gcd(devices, 2)
    inner = math.gcd(devices // rows, 4)
    net = Tutorial(((rows, inner), (inner, 1)), ((1, math.gcd(devices, 512)), (math.gcd(devices, 512), 1)))
    plan = train_plan(net, 48, devices=devices)
    assert plan.devices == devices
    for rank in {0, devices // 2, devices - 1}:
        for collective in plan.collectives(rank):
            assert rank in collective.ranks and collective.ranks == tuple(sorted(set(collective.ranks)))
            assert min(collective.ranks) >= 0 and max(collective.ranks) < devices
        for parameter in plan.parameters.values():
            assert tuple(s.stop - s.start for s in parameter.slice(rank)) == parameter.local_shape(rank)
    repeated = [n for n in plan.notes if "repeat the same work" in n]
    assert bool(repeated) == (48 % devices != 0)


def test_three_ways_on_six_devices() -> None:
    net = Tutorial(((2, 3), (3, 1)), ((1, 2), (2, 1)))
    net.w1 = nn.Parameter(meta(783, 512))
    plan = sw.plan(net, (meta(6, 783),), devices=6)
    assert plan.parameters["w1"].slice(4) == (slice(261, 522), slice(0, 512))
    assert plan.collectives(4)[0].ranks == (3, 4, 5)


def test_unmarked_operators_are_cut_along_the_batch() -> None:
    plan = sw.plan(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), (meta(12, 16),), devices=8)
    assert [o.in_strategy[0] for o in plan.operators] == [(4, 1)] * 3
    assert all(o.cause == "batch" for o in plan.operators)
    assert all(p.local_shape(0) == p.shape for p in plan.parameters.values())
    assert len(plan.notes) == 3 and all("cut 4 ways on 8 devices" in note for note in plan.notes)
    assert plan.operator("0").op == "linear"


def test_views_follow_their_input_or_their_consumer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(32, 64))
            self.matmul = sw.shard(torch.matmul, ((2, 1), (1, 4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.matmul(x.reshape(-1, 64), self.w.t()).reshape(8, 4, 32)

    plan = sw.plan(Net(), (meta(8, 4, 64),), devices=8)
    assert plan.parameters["w"].layout.cuts == (4, 1), "stored as the transposed view's consumer asks for it"
    assert [c for c in plan.collectives(3) if c.phase == "forward" and c.operator != "output"] == []
    assert [o.cause for o in plan.operators] == ["follow", "follow", "mark", "follow"]


def test_the_same_model_gives_the_same_plan() -> None:
    one, two = train_plan(Tutorial(), 32, devices=8), train_plan(Tutorial(), 32, devices=8)
    assert one.fingerprint == two.fingerprint and one.collectives(3) == two.collectives(3)
    assert one.cost == two.cost == one.price.total > 0 and one.sent == two.sent
    assert train_plan(Tutorial(), 64, devices=8).fingerprint != one.fingerprint
    assert one.bound is None and one.gap is None, "nothing was searched"


def test_memory_by_kind() -> None:
    memory = train_plan(Tutorial(), 32, devices=8).memory(0)
    assert memory["parameters"] == memory["gradients"] == 4 * (196 * 512 + 64 * 512 + 512 * 10)
    assert memory["activations"] > 0


def test_marks_given_to_the_plan() -> None:
    plan = train_plan(Tutorial(), 32, devices=8, marks={"matmul_2": ((2, 4), (4, 1)), "matmul1": ((8, 1), (1, 1))})
    assert plan.operator("matmul_2").in_strategy == ((2, 4), (4, 1))
    assert plan.parameters["w1"].local_shape(0) == (784, 512)
    with pytest.raises(sw.SettingError, match="matmul9"):
        train_plan(Tutorial(), 32, devices=8, marks={"matmul9": ((8, 1), (1, 1))})


def test_a_sum_wanted_in_slices_is_reduce_scattered() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(64, 64))
            self.matmul, self.relu = sw.shard(torch.matmul, ((1, 8), (8, 1))), sw.shard(torch.relu, ((8, 1),))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(self.matmul(x, self.w))

    plan = sw.plan(Net(), (meta(64, 64),), devices=8)
    forward = [c for c in plan.collectives(0) if c.phase == "forward" and c.operator != "output"]
    assert [(c.op, c.cause, c.operator) for c in forward] == [("reduce_scatter", "operator", "matmul")]


def test_a_sum_with_a_bias_is_reduce_scattered_too() -> None:
    """The bias goes to the first term, so that the sum may stay open until the next operator wants slices of it."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = sw.shard(torch.nn.Linear(16, 8), ((2, 4), (1, 4), (1,)))
            self.relu = sw.shard(torch.relu, ((8, 1),))

        def forward(self, x):
            return self.relu(self.down(x))

    plan = sw.plan(Net(), (torch.randn(16, 16),), devices=8)
    forward = [c for c in plan.collectives(0) if c.phase == "forward" and c.operator != "output"]
    assert [(c.op, c.ranks, c.operator) for c in forward] == [("reduce_scatter", (0, 1, 2, 3), "down")]


def test_no_more_is_proved_than_the_search_has_proved() -> None:
    sw.init(devices=2)
    net = nn.Linear(4, 4)
    sw.shard(net, ((2, 1), (1, 1)))
    plan = sw.plan(net, (torch.ones(4, 4),), devices=2)
    for factor, bound, expected in ((2.0, 1.5, 0.25), (1.0, 0.75, 0.25), (0.5, 0.25, 0.75), (2.0, 2.0, 0.0)):
        found = SearchResult(factor * plan.cost, bound * plan.cost, 1, 1)
        priced = replace(plan, found=found)
        assert priced.gap == pytest.approx(expected), factor
        assert priced.bound == bound * plan.cost, "as it was proved, also where the program costs less than the price"
        text = cost_text(priced.cost, priced.bound, priced.gap)
        assert (f"priced {time_text(factor * plan.cost, 6)} by the search" in text) == (factor > 1), text


PIECES = {
    "chunk": lambda h: h.chunk(2),
    "split": lambda h: h.split([16, 16]),
    "tensor_split": lambda h: h.tensor_split(2),
    "narrow": lambda h: (h.narrow(0, 0, 16), h[16:]),
    "unbind": lambda h: h.view(2, 16, 64).unbind(0),
    "select": lambda h: (h.view(2, 16, 64)[1], h.view(2, 16, 64).select(0, 0)),
}


class Pieces(nn.Module):
    """Layers behind pieces of the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64, dtype=torch.float64), nn.Linear(64, 64, dtype=torch.float64)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = PIECES[self.kind](self.first(x))
        return torch.relu(self.second(left)) + self.second(right)


@pytest.mark.parametrize("mode", ["semi_auto", "data_parallel"])
@pytest.mark.parametrize("kind", PIECES)
def test_what_follows_a_piece_of_the_batch_is_cut_along_it(kind: str, mode: str) -> None:
    x, y = (torch.randn(n, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (32, 16))
    plan = sw.plan(Pieces(kind), (x,), nn.MSELoss(), y, devices=8, parallel_mode=mode)
    layers = [op.in_strategy[0] for op in plan.operators if op.op in ("linear", "relu", "add")]
    assert layers == [(8, 1)] * 5, plan.operators
    report = sw.verify(Pieces(kind), (x,), y, loss_fn=nn.MSELoss(), devices=8, parallel_mode=mode, steps=2)
    assert report.ok and report.max_loss_difference < 1e-12, report.summary()


ROWS = {"select": lambda x: x.select(0, 1), "index": lambda x: x[-1], "unbind": lambda x: x.unbind(0)[3]}


class OneRow(nn.Module):
    """A layer that reads the whole batch, and one row of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layer = kind, nn.Linear(32, 16, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.layer(ROWS[self.kind](x))


@pytest.mark.parametrize("kind", ROWS)
def test_a_layer_of_the_batch_and_of_one_row_of_it(kind: str) -> None:
    """The row's only dim is contracted: cut like a batch, it would ask for another layout of the weight."""
    x, y = (torch.randn(64, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (32, 16))
    plan = sw.plan(OneRow(kind), (x,), nn.MSELoss(), y, devices=8)
    assert [op.in_strategy[1] for op in plan.operators if op.op == "linear"] == [(1, 1)] * 2
    assert sw.verify(OneRow(kind), (x,), y, loss_fn=nn.MSELoss(), devices=8, steps=2).ok


READS = {
    "embedding": lambda x, index: nn.functional.embedding(index, x),
    "constant index": lambda x, index: nn.functional.embedding(torch.arange(48), x),
    "index_select": lambda x, index: x.index_select(0, index),
    "index": lambda x, index: x[index],
}


class Reads(nn.Module):
    """Rows of the batch, read by an index, and a layer behind them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layer = kind, nn.Linear(16, 16, dtype=torch.float64)
        self.register_buffer("index", torch.randint(0, 64, (48,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(READS[self.kind](x, self.index))


@pytest.mark.parametrize("kind", READS)
def test_rows_of_the_batch_that_an_index_reads(kind: str) -> None:
    """The index is cut and the batch is whole: a cut batch would sum a term of each rank for each row."""
    x, y = (torch.randn(n, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (64, 48))
    plan = sw.plan(Reads(kind), (x,), nn.MSELoss(), y, devices=8)
    read, layer = (
        next(op for op in plan.operators if op.op in kinds)
        for kinds in (("embedding", "index_select", "index"), ("linear",))
    )
    assert read.in_strategy == ((1, 1), (8,)) and layer.in_strategy[0] == (8, 1)
    assert not [c for c in plan.collectives(0) if c.operator == read.name and c.op == "all_reduce"]
    report = sw.verify(Reads(kind), (x,), y, loss_fn=nn.MSELoss(), devices=8, parallel_mode="semi_auto", steps=2)
    assert report.ok and report.max_loss_difference < 1e-12, report.summary()

"""`Costs`: seconds of collectives, conversions, operators and whole plans."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, strategies as st
from test_redistributions import pairs
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import shardwright as sw
from shardwright.cost import cost_model
from shardwright.cost.cost_model import CostModel
from shardwright.graph import Op, Value, map_values
from shardwright.layout import Digit, Layout, digits_size
from shardwright.partition.local_program import GlobalExtreme, LocalOp, Redistribute, Ref
from shardwright.partition.rematerialization import RecomputedInstruction, Regather
from shardwright.redistribution import CollectiveKind, Window, halo_exchange, halo_reduce, redistribution

aten = torch.ops.aten

# Devices 0-3 and 4-7 of the inner level, in microseconds and bytes a microsecond: α 1, β 1/1000; α 10, β 1/100.
INNER, OUTER = sw.Level("inner", 4, 1e9, 1e-6), sw.Level("outer", 2, 1e8, 1e-5)
TWO = sw.Cluster("two", (INNER, OUTER), 1e9, {"float32": 1e12, "bfloat16": 4e12}, 1e10, 1e-6)
FOUR, TWO_OUTSIDE, ALL = (Digit(4, 1),), (Digit(2, 4),), (Digit(8, 1),)
MOVING = [kind for kind in CollectiveKind if kind.communicates]


def us(cluster: Any, kind: str, digits: tuple[Digit, ...], nbytes: float, devices: int = 8) -> float:
    return CostModel(cluster, devices).collective(kind, digits, nbytes) * 1e6


# -- collectives by hand: microseconds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "digits", "nbytes", "expected"),
    [
        # Four on the inner level. Halving and doubling: 2 rounds; the whole in 2 rounds.
        ("reduce_scatter", FOUR, 1000, 2 + 0.75),
        ("all_gather", FOUR, 1000, 2 + 3),
        ("all_reduce", FOUR, 1000, 2 + 2),  # the whole, twice
        ("all_reduce", FOUR, 1_000_000, 4 + 1500),  # halves and back: 2 · 2 rounds, 2 · 3/4
        ("all_to_all", FOUR, 1000, 2 + 1),  # Bruck: in each of 2 rounds a half
        ("all_to_all", FOUR, 1_000_000, 3 + 750),  # three partners, a quarter for each
        ("permute", FOUR, 1000, 1 + 1),
        # Two on the outer one.
        ("reduce_scatter", TWO_OUTSIDE, 1000, 10 + 5),
        ("all_gather", TWO_OUTSIDE, 1000, 10 + 10),
        ("all_reduce", TWO_OUTSIDE, 1000, 10 + 10),
        ("all_to_all", TWO_OUTSIDE, 1000, 10 + 5),
        ("permute", TWO_OUTSIDE, 1000, 10 + 10),
        # All eight, level by level: the outer one sees a quarter.
        ("reduce_scatter", ALL, 1_000_000, 2 + 750 + 10 + 250_000 / 2 / 100),
        ("all_gather", ALL, 1_000_000, 10 + 10_000 + 2 + 2_000_000 * 3 / 1000),
        ("all_reduce", ALL, 1_000_000, 4 + 1500 + 10 + 2500),
        ("all_reduce", ALL, 8, 2 + 2 * 0.008 + 10 + 0.08),
        ("all_to_all", ALL, 1_000_000, 3 + 750 / 2 + 4 * 10 + 4 / 8 * 10_000),  # pairs: 3 inside, 4 outside
        ("all_to_all", ALL, 8, 2 + 0.008 + 10 + 0.04),  # level by level
        ("permute", ALL, 1000, 10 + 10),
        # A digit that straddles the border: two inside, two outside.
        ("reduce_scatter", (Digit(4, 2),), 1_000_000, 1 + 500 + 10 + 2500),
        ("slice", ALL, 1_000_000, 0),
        ("send", TWO_OUTSIDE, 1000, 20),
        ("recv", TWO_OUTSIDE, 1000, 20),
        ("all_reduce", (), 1000, 0),
    ],
)
def test_collectives_by_hand(kind: str, digits: tuple[Digit, ...], nbytes: int, expected: float) -> None:
    assert us(TWO, kind, digits, nbytes) == pytest.approx(expected, rel=1e-12)


def test_numbers_that_are_no_powers_of_two() -> None:
    three = replace(TWO, levels=(replace(INNER, size=3),))
    for kind, expected in (
        ("reduce_scatter", 2 + 2000 / 3),
        ("all_gather", 2 + 2000),
        ("all_to_all", 2 + 2000 / 3),
        ("all_reduce", 4 + 4000 / 3),
    ):
        assert us(three, kind, (Digit(3, 1),), 1_000_000, 3) == pytest.approx(expected), kind


def test_what_devices_share_is_divided_among_them() -> None:
    shared = replace(TWO, levels=(replace(INNER, size=8, shared=True),))
    # Eight devices send at once, in one group or in four.
    assert us(shared, "reduce_scatter", ALL, 1000) == pytest.approx(3 + 7 / 8 * 8)
    assert us(shared, "reduce_scatter", (Digit(2, 1),), 1000) == pytest.approx(1 + 1 / 2 * 8)
    assert us(shared, "permute", (Digit(2, 1),), 1000) == pytest.approx(1 + 8)
    # Of a cluster of eight only four are used.
    assert us(shared, "permute", (Digit(2, 1),), 1000, 4) == pytest.approx(1 + 4)
    # A bus between two nodes of four: 8 lanes at once.
    bus = replace(TWO, levels=(INNER, replace(OUTER, shared=True)))
    assert us(bus, "all_gather", TWO_OUTSIDE, 1000) == pytest.approx(10 + 80)
    assert us(bus, "reduce_scatter", ALL, 1_000_000) == pytest.approx(12 + 750 + 250_000 / 2 * 8 / 100)
    # A quick bus: in a ring over all one device in four sends over it while the others send inside, in more rounds.
    quick = replace(bus, levels=(INNER, replace(OUTER, shared=True, bandwidth=2e9)))
    assert us(quick, "reduce_scatter", ALL, 1_000_000) == pytest.approx(7 * 10 + 7 / 8 * 1000)
    assert us(quick, "all_reduce", ALL, 1_000_000) == pytest.approx(2 * (70 + 875))
    assert us(quick, "reduce_scatter", ALL, 10_000) == pytest.approx(12 + 7.5 + 2500 / 2 * 8 / 2000)


def test_an_unknown_kind() -> None:
    with pytest.raises(sw.SettingError, match="unknown kind of collective 'broadcast'"):
        CostModel(TWO).collective("broadcast", ALL, 8)


@st.composite
def settings_of_a_cluster(draw: Any) -> sw.Cluster:
    levels = tuple(
        sw.Level(
            f"level {i}",
            draw(st.integers(1, 8)),
            draw(st.sampled_from((1e8, 1e9, 3e10))),
            draw(st.sampled_from((1e-7, 1e-6, 2e-5))),
            draw(st.booleans()),
        )
        for i in range(draw(st.integers(1, 3)))
    )
    return replace(TWO, levels=levels)


SIZES = st.floats(0, 1e10)


@given(settings_of_a_cluster(), st.sampled_from(MOVING), SIZES, SIZES)
def test_time_grows_with_the_bytes(cluster: sw.Cluster, kind: str, few: float, many: float) -> None:
    few, many = sorted((few, many))
    costs, digits = CostModel(cluster), (Digit(cluster.devices, 1),)
    assert costs.collective(kind, digits, few) <= costs.collective(kind, digits, many)
    assert costs.collective(kind, digits, few) > 0 or cluster.devices == 1


@given(settings_of_a_cluster(), st.sampled_from(MOVING))
def test_only_algorithms_that_are_the_quickest_for_some_size_are_kept(cluster: sw.Cluster, kind: str) -> None:
    lines = CostModel(cluster).lines(kind, (Digit(cluster.devices, 1),))
    turns = [(c - a) / (b - d) for (a, b), (c, d) in zip(lines, lines[1:])]
    assert all(t > 0 for t in turns) and all(t <= u * (1 + 1e-9) for t, u in zip(turns, turns[1:]))


@given(st.sampled_from(MOVING), st.integers(1, 64), st.integers(1, 64), SIZES, st.booleans())
def test_more_devices_of_a_level_are_never_quicker(
    kind: str, one: int, other: int, nbytes: float, shared: bool
) -> None:
    few, many = (
        CostModel(replace(TWO, levels=(replace(INNER, size=size, shared=shared),))).collective(
            kind, (Digit(size, 1),), nbytes
        )
        for size in sorted((one, other))
    )
    assert few <= many * (1 + 1e-12)


@given(settings_of_a_cluster(), SIZES)
def test_levels_together_are_never_dearer_than_one_after_the_other(cluster: sw.Cluster, nbytes: float) -> None:
    assume(len(cluster.levels) > 1)
    costs, inside = CostModel(cluster), cluster.levels[0].size
    outside = cluster.devices // inside
    whole, inner, outer = (Digit(cluster.devices, 1),), (Digit(inside, 1),), (Digit(outside, inside),)

    def time(kind: str, digits: tuple[Digit, ...], size: float) -> float:
        return costs.collective(kind, digits, size)

    reduced = time("reduce_scatter", inner, nbytes) + time("all_gather", inner, nbytes / inside)
    for kind, parts in (
        ("reduce_scatter", time("reduce_scatter", inner, nbytes) + time("reduce_scatter", outer, nbytes / inside)),
        ("all_gather", time("all_gather", outer, nbytes) + time("all_gather", inner, nbytes * outside)),
        ("all_reduce", reduced + time("all_reduce", outer, nbytes / inside)),
        ("all_reduce", time("all_reduce", inner, nbytes) + time("all_reduce", outer, nbytes)),
        ("all_reduce", time("reduce_scatter", whole, nbytes) + time("all_gather", whole, nbytes / cluster.devices)),
        ("all_to_all", time("all_to_all", inner, nbytes) + time("all_to_all", outer, nbytes)),
    ):
        assert time(kind, whole, nbytes) <= parts * (1 + 1e-12), kind


# -- conversions -------------------------------------------------------------------------------------------------------


@given(pairs())
def test_a_conversion_costs_what_its_steps_do(drawn: tuple[Layout, Layout, tuple[int, ...]]) -> None:
    source, target, shape = drawn
    found, nbytes = redistribution(source, target), 4 * math.prod(shape)
    costs = CostModel("h100x8x2", source.devices)
    expected, seen = 0.0, []
    for step, before in zip(found.steps, found.local_shapes(source.local_shape(shape))):
        if step.communicates:
            local, pieces = 4 * math.prod(before), step.geometry(before).pieces
            kind = "permute" if step.permuted else step.kind
            lines = costs.lines(kind, step.digits, pieces if step.permuted else 1)
            expected += min(a + b * local for a, b in lines)
            seen.append((kind, local, step.digits))
            if not step.permuted:
                assert min(a + b * local for a, b in lines) == costs.collective(step.kind, step.digits, local)
    assert costs.redistribution(found, nbytes) == pytest.approx(expected, rel=1e-12, abs=0)
    assert costs.redistribution(found, nbytes) == costs.redistribution(found, nbytes)
    assert [(s.kind, pytest.approx(s.fraction * nbytes), s.digits) for s in costs.sends(found)] == seen


def test_a_permutation_sends_all_and_to_one() -> None:
    swap = redistribution(
        Layout.of(8, [(Digit(2, 1),), (Digit(2, 4),)]), Layout.of(8, [(Digit(2, 4),), (Digit(2, 1),)])
    )
    assert [(s.kind, bool(s.permuted)) for s in swap.steps] == [("all_to_all", True)]
    assert CostModel(TWO).redistribution(swap, 4000) * 1e6 == pytest.approx(10 + 10)


def test_an_exchange_of_halos_takes_time_for_its_rows() -> None:
    """Each of 8 ranks has 8 rows of 4 bytes · 1000 and sends one to each neighbour: two messages, 8,000 bytes."""
    layout = Layout.of(8, [(Digit(8, 1),), ()])
    halo = Window(count=64, size=64, stride=1, padding=1, extent=3).cut(0, layout.dims[0])
    costs, nbytes = CostModel(TWO), 64 * 1000 * 4
    exchange, back = halo_exchange(layout, (halo,)), halo_reduce(layout, (halo,))
    (sent,) = costs.sends(exchange)
    assert (sent.kind, sent.fraction * nbytes) == ("halo_exchange", 8000)
    latency, seconds = costs.lines(CollectiveKind.HALO_EXCHANGE, (Digit(8, 1),))[0]
    assert costs.redistribution(exchange, nbytes) == pytest.approx(2 * latency + 8000 * seconds)
    assert costs.redistribution(back, nbytes) == pytest.approx(costs.redistribution(exchange, nbytes))
    assert costs.redistribution(exchange, nbytes) < costs.redistribution(
        redistribution(layout, Layout.replicated(8, 2)), nbytes
    )


# -- operators ---------------------------------------------------------------------------------------------------------


def op_of(
    target: Any, *shapes: tuple[int, ...], args: Any = None, dtype: torch.dtype = torch.float32, grad: Any = True
) -> Op:
    """A call with whole values of these shapes; `args` puts them in their places; `grad`: of all, or of each."""
    grads = [grad] * len(shapes) if isinstance(grad, bool) else grad
    values = tuple(Value(f"x{i}", s, dtype, g) for i, (s, g) in enumerate(zip(shapes, grads)))
    placed = args(*values) if args else values
    made = target(*map_values(placed, lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta")))
    outputs = tuple(
        Value(f"y{i}", tuple(y.shape), y.dtype, any(grads))
        for i, y in enumerate(made if isinstance(made, (tuple, list)) else [made])
    )
    return Op("op", target, placed, {}, values, outputs)


def compute(op: Op, costs: CostModel, *ins: tuple[int, ...]) -> tuple[float, float]:
    """Microseconds of the operator on inputs of these shapes, forward and backward; none: its own."""
    ins = ins or tuple(v.shape for v in op.inputs)
    tensors = iter(torch.empty(s, dtype=v.dtype, device="meta") for s, v in zip(ins, op.inputs))
    made = op.target(*map_values(op.args, lambda _: next(tensors)))
    outs = [tuple(y.shape) for y in (made if isinstance(made, (tuple, list)) else [made])]
    forward, backward = costs.compute(op, list(ins), outs)
    return forward * 1e6, backward * 1e6


SQUARE = ((1000, 1000), (1000, 1000))
MB4 = 4 * 1e6 / 1e4  # microseconds to bring 1000 · 1000 numbers of 4 bytes past the memory


def test_operators_by_hand() -> None:
    costs = CostModel(TWO)
    # Products: 2 · 10⁹ flop at 10⁶ a microsecond; one for each input that wants a gradient.
    assert compute(op_of(aten.mm.default, *SQUARE), costs) == pytest.approx((2000 + 1, 2 * 2000 + 2))
    assert compute(op_of(aten.mm.default, *SQUARE, grad=[False, True]), costs) == pytest.approx((2001, 2001))
    assert compute(op_of(aten.mm.default, *SQUARE, grad=False), costs) == pytest.approx((2001, 0))
    # Four times as quick in bfloat16; half as quick in float64, which the cluster does not list.
    fast, slow = (op_of(aten.mm.default, *SQUARE, dtype=d) for d in (torch.bfloat16, torch.float64))
    assert compute(fast, costs)[0] == pytest.approx(3 * MB4 / 2 + 1) and 3 * MB4 / 2 > 2000 / 4  # memory holds it up
    assert compute(slow, costs)[0] == pytest.approx(4000 + 1)
    # Bytes: in and out; backward the output's gradient, what was saved, the input's gradient.
    assert compute(op_of(aten.relu.default, SQUARE[0]), costs) == pytest.approx((2 * MB4 + 1, 3 * MB4 + 1))
    assert compute(op_of(aten.mul.Tensor, *SQUARE), costs) == pytest.approx((3 * MB4 + 1, 5 * MB4 + 2))
    assert compute(op_of(aten.add.Tensor, *SQUARE), costs) == pytest.approx((3 * MB4 + 1, 0))  # gradients go on
    # Views.
    for view in (
        op_of(aten.transpose.int, SQUARE[0], args=lambda x: (x, 0, 1)),
        op_of(aten.reshape.default, SQUARE[0], args=lambda x: (x, [-1])),
    ):
        assert compute(view, costs) == (0, 0)


@pytest.mark.parametrize(
    ("op", "ins", "parts"),
    [
        (op_of(aten.linear.default, (4, 8, 64), (32, 64), (32,)), ((2, 8, 16), (16, 16), (16,)), 16),
        (
            op_of(aten.einsum.default, (4, 8, 16), (4, 16, 32), args=lambda x, y: ("bij,bjk->bik", [x, y])),
            ((2, 8, 16), (2, 16, 8)),
            8,
        ),
        (op_of(aten.conv2d.default, (8, 6, 9, 9), (12, 6, 3, 3)), ((4, 3, 9, 9), (4, 3, 3, 3)), 12),
        (
            op_of(
                aten.conv2d.default,
                (8, 6, 9, 9),
                (12, 2, 3, 3),
                args=lambda x, w: (x, w, None, [1, 1], [0, 0], [1, 1], 3),
            ),
            ((4, 6, 9, 9), (12, 2, 3, 3)),
            2,
        ),
        (
            op_of(aten.scaled_dot_product_attention.default, (4, 8, 16, 8), (4, 8, 32, 8), (4, 8, 32, 8)),
            ((2, 2, 8, 8), (2, 2, 32, 8), (2, 2, 32, 8)),
            16,
        ),
        (op_of(aten.bmm.default, (4, 8, 16), (4, 16, 32)), ((4, 2, 4), (4, 4, 32)), 16),
    ],
    ids=lambda x: x.kind if isinstance(x, Op) else "",
)
def test_flops_of_slices_are_torchs_own(op: Op, ins: tuple, parts: int) -> None:
    work = CostModel(TWO).work(op)
    inputs = [torch.empty(s, device="meta", requires_grad=True) for s in ins]
    feed = iter(inputs)
    counted = []
    with FlopCounterMode(display=False) as counter:
        y = op.target(*map_values(op.args, lambda _: next(feed)))
        counted.append(counter.get_total_flops())
        y.backward(torch.empty_like(y))
    counted.append(counter.get_total_flops() - counted[0])
    (forward, _), (backward, _) = work.local(ins, [tuple(y.shape)])
    assert [forward, backward] == counted and counted[0] > 0
    assert work.flops[0] == parts * forward


@torch.library.custom_op("shardwright_costs::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """An operator without a fake: only tensors with values go through it."""
    return x + float(x.sum())


def test_what_runs_on_values_only_is_priced_by_its_bytes() -> None:
    x, y = Value("x", (1000, 1000), torch.float32, True), Value("y", (1000, 1000), torch.float32, True)
    op = Op("op", torch.ops.shardwright_costs.opaque.default, (x,), {}, (x,), (y,))
    forward, backward = CostModel(TWO).compute(op, [(1000, 1000)], [(1000, 1000)])
    assert (forward * 1e6, backward * 1e6) == pytest.approx((2 * MB4 + 1, 3 * MB4 + 1))


# -- plans -------------------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self, first: Any = ((2, 4), (4, 1)), relu: Any = ((8, 1),), second: Any = ((1, 8), (8, 1))) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(64, 128)), nn.Parameter(torch.randn(128, 64))
        self.matmul1, self.relu = sw.shard(torch.matmul, first), sw.shard(torch.relu, relu)
        self.matmul2 = sw.shard(torch.matmul, second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul2(self.relu(self.matmul1(x, self.w1)), self.w2)


class Block(nn.Module):
    """A block of GPT: heads and columns cut four ways, the batch two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.columns = [sw.Operator(F.linear).shard(((2, 1, 1), (4, 1), (4,))) for _ in range(4)]
        self.rows = [sw.Operator(F.linear).shard(((2, 1, 4), (1, 4), (1,))) for _ in range(2)]
        self.attend = sw.Operator(F.scaled_dot_product_attention).shard(((2, 4, 1, 1),) * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            apply(y, layer.weight, layer.bias).reshape(*x.shape[:2], 8, 8).transpose(1, 2)
            for apply, layer in zip(self.columns, self.qkv)
        )
        y = self.attend(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.rows[0](y, self.out.weight, self.out.bias)
        y = F.gelu(self.columns[3](self.norm2(x), self.up.weight, self.up.bias))
        return x + self.rows[1](y, self.down.weight, self.down.bias)


class Blocks(nn.Module):
    def __init__(self, count: int, mark: Any = lambda block: block) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(mark(Block()) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class Softmax(nn.Module):
    """A maximum over ranks is found, and its gradient goes to those that hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))
        self.softmax, self.maximum = sw.shard(torch.softmax, ((2, 4),)), sw.shard(torch.amax, ((2, 4),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.w
        return self.softmax(x, -1) * self.maximum(x, -1, keepdim=True)


def planned(make: Any, *shape: int, **options: Any) -> sw.Plan:
    with torch.device("meta"):
        net, x = make(), torch.empty(*shape)
        y = net(x) if options.get("parallel_mode") != "hybrid_parallel" else x
    return sw.plan(net, (x,), F.mse_loss, y, devices=8, **options)


TOKENS = (4, 16, 64)
PLANS: dict[str, Any] = {
    "perceptron": lambda: planned(Perceptron, 16, 64),
    "fed in parts": lambda: planned(Perceptron, 16, 64, dataset_strategy="data_parallel"),
    "data parallel": lambda: planned(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)),
        16,
        64,
        parallel_mode="data_parallel",
        dataset_strategy="data_parallel",
    ),
    "block": lambda: planned(Block, *TOKENS),
    "recomputed": lambda: planned(lambda: Blocks(2, sw.recompute), *TOKENS),
    "stored cut": lambda: planned(Block, *TOKENS, hsdp={"threshold": 0}),
    "stored cut, level 3": lambda: planned(Block, *TOKENS, hsdp={"threshold": 0, "optimizer_level": "level3"}),
    "a maximum": lambda: planned(Softmax, 16, 64),
    "padded": lambda: planned(lambda: Perceptron(((8, 1), (1, 1)), ((8, 1),), ((8, 1), (1, 1))), 12, 64, uneven=True),
    "each its own program": lambda: planned(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh()),
        16,
        64,
        parallel_mode="hybrid_parallel",
        dataset_strategy="data_parallel",
    ),
    "halos": lambda: planned(lambda: sw.shard(nn.Conv2d(4, 8, 7, 2, 3), ((1, 1, 4, 2), (1, 1, 1, 1))), 1, 4, 64, 64),
    "one device": lambda: planned(Perceptron, 16, 64, parallel_mode="stand_alone"),
}


@cache
def plan_of(name: str) -> sw.Plan:
    return PLANS[name]()


def known_of(plan: sw.Plan) -> dict[str, Any]:
    program = plan.program
    out = {
        i.name: i
        for i in (*program.inputs, *program.parameters.values(), *program.buffers.values(), *program.constants.values())
    }
    for i in program.instructions:
        out.update((o.name, o) for o in (i.outputs if isinstance(i, LocalOp) else (i.target,)) if o is not None)
    return out


@pytest.mark.parametrize("name", PLANS)
def test_the_price_of_a_plan_is_that_of_what_runs(name: str) -> None:
    plan = plan_of(name)
    costs, known = CostModel(TWO, plan.devices), known_of(plan)
    price = costs.plan(plan)
    forward = [costs.forward(i, known) for i in plan.program.instructions]
    backward = [costs.backward(i, known) for i in plan.backward]
    assert min(forward + backward) >= 0 and price.total > 0 and price.forward > 0 and price.backward > 0
    assert price.forward == pytest.approx(sum(forward)) and price.backward == pytest.approx(sum(backward))
    assert price.total == pytest.approx(price.forward + price.backward)
    assert price.total == pytest.approx(price.compute + price.communication)
    assert price.total == pytest.approx(sum(price.by_operator.values()))
    # Communication is that of the plan's collectives: the same ones, of the same bytes, for the same operators.
    assert price.communication == pytest.approx(sum(c.seconds for c in price.collectives))
    theirs = Counter((c.op, c.ranks, c.bytes, c.operator, c.phase) for c in plan.collectives(0))
    kinds = {"permute": "all_to_all"}
    mine = Counter(
        (kinds.get(c.kind, c.kind), sw.layout.group_of(0, c.digits), round(c.bytes), c.operator, c.phase)
        for c in price.collectives
    )
    assert mine == theirs
    assert [c.seconds for c in price.collectives] == sorted((c.seconds for c in price.collectives), reverse=True)
    assert all(str(c).startswith(c.kind) and c.operator in str(c) for c in price.collectives)
    if plan.devices == 1:
        assert not price.collectives and price.communication == 0


def test_every_kind_of_instruction_is_among_the_plans() -> None:
    plans = list(map(plan_of, PLANS))
    seen = {type(i) for plan in plans for i in (*plan.program.instructions, *plan.backward)}
    assert seen == {LocalOp, Redistribute, GlobalExtreme, Regather, RecomputedInstruction}


@pytest.mark.parametrize("name", PLANS)
def test_flops_of_a_plan_are_those_of_its_local_calls(name: str) -> None:
    plan = plan_of(name)
    costs, known, seen = CostModel(TWO, plan.devices), known_of(plan), 0
    for i in plan.program.instructions:
        if not isinstance(i, LocalOp):
            continue
        refs = [known[a.name] for a in pytree.tree_leaves((i.args, i.kwargs)) if isinstance(a, Ref)]
        tensors = {r.name: torch.empty(r.local_shape, dtype=r.value.dtype, device="meta") for r in refs}
        args, kwargs = pytree.tree_map(lambda a: tensors[a.name] if isinstance(a, Ref) else a, (i.args, i.kwargs))
        with FlopCounterMode(display=False) as counter:
            i.target(*args, **kwargs)
        (flops, _), _ = costs.work(i.op).local(
            [r.local_shape for r in refs], [o.local_shape for o in i.outputs if o is not None]
        )
        assert flops == pytest.approx(counter.get_total_flops()), i.op.kind
        seen += flops > 0
    assert seen


def test_work_that_is_done_alike_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Op] = []
    monkeypatch.setattr(cost_model, "work_of", lambda op, ask=cost_model.work_of: asked.append(op) or ask(op))
    counts = []
    for blocks in (1, 3):
        costs = CostModel(TWO)
        costs.plan(planned(lambda blocks=blocks: Blocks(blocks), *TOKENS))
        counts.append(len(asked))
        asked.clear()
    assert counts[1] <= counts[0] + 2  # only the first block's input wants no gradient


def test_an_operator_with_the_id_of_one_that_is_gone_has_its_own_work() -> None:
    costs, relu, mm = CostModel(TWO), op_of(aten.relu.default, (4, 4)), op_of(aten.mm.default, (8, 16), (16, 32))
    operators = [replace(relu) for _ in range(100)]
    assert {id(costs.work(op)) for op in operators} == {id(costs.work(relu))}
    numbers = set(map(id, operators))
    operators.clear()
    later = [replace(mm) for _ in range(1000)]
    assert numbers & set(map(id, later))
    assert all(costs.work(op) is costs.work(mm) for op in later)


def test_gradients_are_summed_once_a_step() -> None:
    plan, costs = plan_of("block"), CostModel(TWO)
    one, four = costs.plan(plan), costs.plan(plan, micro_batches=4)
    gradients = sum(c.seconds for c in one.collectives if c.phase in ("gradient", "storage"))
    assert gradients > 0 and one.once == four.once == pytest.approx(gradients)
    assert four.total == pytest.approx(4 * (one.total - one.once) + one.once)
    assert sum(four.by_operator.values()) == pytest.approx(four.total)
    assert four.compute + four.communication == pytest.approx(four.total)
    with pytest.raises(sw.SettingError, match="micro_batches=0"):
        costs.plan(plan, micro_batches=0)


def test_what_optimizer_parallel_repeats_for_each_micro_batch() -> None:
    costs = CostModel(TWO)
    for level, phases in (("level1", {"storage", "gradient"}), ("level2", {"storage"}), ("level3", set())):
        plan = planned(Block, *TOKENS, hsdp={"threshold": 0, "optimizer_level": level})
        one, three = costs.plan(plan), costs.plan(plan, micro_batches=3)
        seconds = [Counter(), Counter()]
        for price, by_phase in zip((one, three), seconds):
            for c in price.collectives:
                summed = c.phase == "gradient" and c.kind == "all_reduce"  # of a parameter that is stored whole
                by_phase["sum" if summed else c.phase] += c.seconds
        for phase in ("storage", "gradient", "sum", "forward", "backward"):
            times = 1 if phase in phases or phase == "sum" else 3
            assert seconds[1][phase] == pytest.approx(times * seconds[0][phase]), (level, phase)
            assert seconds[0][phase] > 0


def test_weights_that_are_dropped_are_gathered_for_each_micro_batch() -> None:
    recompute = partial(sw.recompute, parallel_optimizer_comm_recompute=True)
    plan, costs = planned(lambda: Blocks(1, recompute), *TOKENS, hsdp={"threshold": 0}), CostModel(TWO)
    dropped, known = plan.regions[0].dropped, known_of(plan)
    gathers = [i for i in plan.program.instructions if isinstance(i, Redistribute) and i.cause == "parameter"]
    assert {i.target.name in dropped for i in gathers} == {True, False}  # a bias is not asked for again
    kept = sum(costs.forward(i, known) for i in gathers if i.target.name not in dropped)
    gradients = sum(costs.backward(i, known) for i in gathers)
    assert costs.plan(plan, micro_batches=3).once == pytest.approx(kept + gradients)


def test_the_same_plan_is_slower_on_slower_links_and_of_1024_devices() -> None:
    plan = plan_of("block")
    prices = [CostModel(sw.Cluster.of(name), 8).plan(plan) for name in ("h100x8", "a100x8")]
    assert prices[0].communication < prices[1].communication and prices[0].compute <= prices[1].compute
    with torch.device("meta"):
        net, x = nn.Linear(4096, 4096), torch.empty(1024, 4096)
    many = sw.plan(
        net, (x,), F.mse_loss, x, devices=1024, parallel_mode="data_parallel", dataset_strategy="data_parallel"
    )
    price = CostModel(None, 1024).plan(many)
    (weight, *_) = price.collectives
    assert (weight.kind, digits_size(weight.digits), weight.phase) == ("all_reduce", 1024, "gradient")
    # 2 · 7/8 of 64 MiB by NVLink in 2 · 3 rounds, and 2 · 127/128 of an eighth through the network in 2 · 7.
    assert weight.bytes == 4 * 4096**2
    sent = 4**13 * (2 * 7 / 8 / 450e9 + 2 * 127 / 128 / 8 / 50e9)
    assert weight.seconds == pytest.approx(sent + 2 * 3 * 1.9e-6 + 2 * 7 * 4e-6)

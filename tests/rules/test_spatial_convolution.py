"""Convolutions under cuts: random ones against one device, and what each cut sends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, note, settings
from one_device import assert_as_one_device, close, parallel, squares
from small_networks import draw, labels
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.layout import allocate
from shardwright.rules import Bound, bound_rule

DEVICES = [2, 3, 4, 6, 8]

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


class Convolution(nn.Module):
    """One marked convolution of an input by a weight and perhaps a bias."""

    def __init__(self, function: Any, weight: tuple[int, ...], bias: int | None, **arguments: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(*weight, seed=1))
        self.bias = nn.Parameter(draw(bias, seed=2)) if bias else None
        self.arguments = arguments
        self.conv = sw.Operator(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x, self.weight, self.bias, **self.arguments)


def divided(pick: Any, devices: int, stride: int, extent: int, padding: int) -> int | None:
    """A size that some of the devices divide together with its number of windows, where there is one."""
    parts, each = pick(*(n for n in range(2, devices + 1) if devices % n == 0)), pick(1, 2, 3)
    least = (parts * each - 1) * stride + extent - 2 * padding
    sizes = [size for size in range(max(least, 1), least + stride) if size % parts == 0]
    return pick(*sizes) if sizes else None


@st.composite
def convolutions(draw_: Any, devices: int) -> tuple[Convolution, tuple[int, ...], str]:
    def pick(*options: Any) -> Any:
        return draw_(st.sampled_from(options))

    count, transposed, groups = pick(1, 2), pick(False, True), pick(1, 1, 2, 3, 4)
    inward, outward = (groups * pick(1, 2, 4) for _ in range(2))
    stride, dilation, kernel = ([pick(1, 2, 3) for _ in range(count)] for _ in range(3))
    extent = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    named = None if transposed else pick(None, None, "valid", "same")
    if named == "same":
        stride = [1] * count
    padding = [0 if named == "valid" else pick(0, 0, 1, (e - 1) // 2, (e - 1) // 2) for e in extent]
    # Sizes that the windows fill often, sizes that are divided with them, and any others that hold one window.
    sizes = [max(s * pick(2, 3, 4, 6), e - 2 * p) + pick(0, 0, 1) for s, e, p in zip(stride, extent, padding)]
    if pick(False, True, True):
        sizes = [divided(pick, devices, *each) or size for size, *each in zip(sizes, stride, extent, padding)]
    arguments: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        arguments["output_padding"] = [pick(*range(max(s, d))) for s, d in zip(stride, dilation)]
        sizes = [max(1, size // s) + pick(0, 2 * p) for size, s, p in zip(sizes, stride, padding)]
        sizes = [max(z, (2 * p - e + s) // s + 1) for z, s, p, e in zip(sizes, stride, padding, extent)]
        filters = (inward, outward // groups)
    else:
        filters = (outward, inward // groups)
        arguments["padding"] = named or padding
    function = getattr(F, f"conv{'_transpose' * transposed}{count}d")
    batch = pick((), (2,), (4,), (6,))
    return (
        Convolution(function, (*filters, *kernel), pick(None, outward), **arguments),
        (*batch, inward, *sizes),
        f"{function.__name__} {filters} {kernel} {arguments}",
    )


def any_strategy(draw_: Any, bound: Bound, devices: int) -> tuple:
    """A legal in_strategy by tuples; factors that hide in a compound dim come second there. Those of windows over
    several slices often come first."""
    cuts, left = [1] * len(bound.factors), devices
    windows_first = draw_(st.integers(0, 2)) > 0
    order = draw_(st.permutations(range(len(bound.factors))))
    for i in sorted(order, key=lambda i: bound.factors[i].window is None) if windows_first else order:
        size = bound.factors[i].size
        if bound.factors[i].splittable:
            options = [c for c in range(left, 0, -1) if left % c == 0 and size % c == 0]
            if windows_first and bound.factors[i].window is not None:
                options = [c for c in options if c > 1] or [1]
            cuts[i] = draw_(st.sampled_from(options))
            left //= cuts[i]
    assignment = bound.cut_by(devices, dict(enumerate(allocate(devices, cuts))))
    return bound.in_strategy(assignment if bound.is_consistent(assignment) else bound.whole(devices))


class Pool(nn.Module):
    """One marked pool."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        super().__init__()
        self.arguments, self.conv = arguments, sw.Operator(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x, *self.arguments)


@st.composite
def pools(draw_: Any, devices: int) -> tuple[Pool, tuple[int, ...], str]:
    def pick(*options: Any) -> Any:
        return draw_(st.sampled_from(options))

    count = pick(1, 2, 3)
    kernel, stride, dilation = ([pick(1, 2, 3) for _ in range(count)] for _ in range(3))
    padding = [pick(0, k // 2) for k in kernel]
    ceil, is_mean = pick(False, True), pick(False, True)
    extent = [k if is_mean else d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    sizes = [max(s * pick(2, 3, 4, 6), e) + pick(0, 0, 0, 1) for s, e in zip(stride, extent)]
    if pick(False, True, True):
        sizes = [
            max(divided(pick, devices, *each) or size, each[1]) for size, *each in zip(sizes, stride, extent, padding)
        ]
    further = [ceil, pick(False, True)] if is_mean else [dilation, ceil]
    if is_mean and count > 1:
        further.append(pick(None, None, 5))
    function = getattr(torch.ops.aten, f"{'avg' if is_mean else 'max'}_pool{count}d")
    arguments = (kernel, stride, padding, *further)
    return Pool(function, *arguments), (*pick((1,), (2, 3)), *sizes), f"{function} {arguments}"


def check_any_cut(made: Callable[[int], Any], data: Any) -> None:
    """A marked operator under a random legal cut: values and gradients of one device."""
    devices = data.draw(st.sampled_from(DEVICES))
    net, shape, reported = data.draw(made(devices))
    x, y = (draw(*shape).requires_grad_() for _ in range(2))
    net.conv.shard(())
    (op,) = (op for op in capture(net, (x,)).ops if op.mark is not None)
    bound = bound_rule(op)
    strategy = any_strategy(data.draw, bound, devices)
    net.conv.shard(strategy)
    note(f"{reported} of {shape}: {strategy}")
    model = parallel(net, devices=devices)
    got, expected = model(x), net(y)
    close(got, expected, "outputs")
    close(
        torch.autograd.grad(squares(got), [x, *net.parameters()]),
        torch.autograd.grad(squares(expected), [y, *net.parameters()]),
        "gradients",
    )
    halos = bound.halos(0, model.plan.decisions[op.name].assignment)
    event(f"{len(halos)} halos")
    sent = [c.op for c in model.plan.collectives(0) if c.op in ("halo_exchange", "halo_reduce")]
    assert len(sent) == 2 * sum(halo.sent > 0 for halo in halos)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_convolutions(data) -> None:
    check_any_cut(convolutions, data)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_pools(data) -> None:
    check_any_cut(pools, data)


# -- what lies where, and what is sent ---------------------------------------------------------------------------------


def planned(net: Convolution, shape: tuple[int, ...], strategy: tuple, devices: int = 8) -> sw.Plan:
    net.conv.shard(strategy)
    return sw.plan(net, (torch.empty(shape, dtype=torch.float64),), devices=devices)


def sent_forward(plan: sw.Plan) -> list:
    return [c for c in plan.collectives(5 % plan.devices) if c.phase == "forward" and c.operator != "output"]


def test_factors_stand_as_n_cin_h_w_cout() -> None:
    net = Convolution(F.conv2d, (4, 6, 3, 3), None, padding=1)
    plan = planned(net, (8, 6, 5, 5), ((2, 2, 1, 1), (2, 2, 1, 1)))
    assert plan.parameters["weight"].slice(5)[:2] == (slice(2, 4), slice(0, 3))  # rank 5 = (n 1, ci 0, co 1)
    assert plan.parameters["weight"].slice(6)[:2] == (slice(0, 2), slice(3, 6))
    assert plan.operator("conv").local_shapes(5)[1] == ((4, 2, 5, 5),)
    (total,) = sent_forward(plan)
    assert (total.op, total.ranks, total.shape) == ("all_reduce", (5, 7), (4, 2, 5, 5))


def test_spatial_factors_stand_between_the_channels() -> None:
    net = Convolution(F.conv2d, (4, 4, 1, 1), None)
    plan = planned(net, (2, 4, 4, 4), ((1, 2, 2, 1), (2, 2, 1, 1)))
    assert plan.operator("conv").in_layouts[0].slice((2, 4, 4, 4), 2)[1:3] == (slice(0, 2), slice(2, 4))
    assert plan.parameters["weight"].slice(4)[:2] == (slice(0, 2), slice(2, 4))  # rank 4 = (ci 1, h 0, co 0)
    net = Convolution(F.conv_transpose2d, (4, 6, 3, 3), None)
    plan = planned(net, (8, 4, 5, 5), ((2, 2, 1, 1), (2, 2, 1, 1)))
    assert plan.parameters["weight"].slice(5)[:2] == (slice(0, 2), slice(3, 6))


def test_a_bias_is_added_once() -> None:
    net = Convolution(F.conv2d, (4, 8, 3, 3), 4)
    net.conv.shard(((1, 4, 1, 1), (2, 4, 1, 1), (2,)))
    x = draw(2, 8, 4, 4)
    close(parallel(net)(x), net(x))
    with torch.no_grad():
        net.bias.fill_(1e3)
        close(parallel(net)(x), net(x))


def test_groups_are_cut_without_a_sum() -> None:
    """Depthwise: each rank convolves its own channels."""
    net = Convolution(F.conv2d, (8, 1, 3, 3), 8, groups=8, padding=1)
    plan = planned(net, (2, 8, 4, 4), ((2, 4, 1, 1), (4, 1, 1, 1)))
    assert sent_forward(plan) == []
    assert plan.parameters["bias"].local_shape(3) == (2,)
    assert_as_one_device(net, (draw(2, 8, 4, 4),), (draw(2, 8, 4, 4, seed=1),))


def test_patches_are_cut_where_they_meet() -> None:
    net = Convolution(F.conv2d, (6, 3, 4, 4), 6, stride=4)
    plan = planned(net, (2, 3, 16, 8), ((1, 1, 4, 2), (1, 1, 1, 1)))
    assert sent_forward(plan) == []
    assert plan.operator("conv").local_shapes(0) == (((2, 3, 4, 4), (6, 3, 4, 4), (6,)), ((2, 6, 1, 1),))
    assert_as_one_device(net, (draw(2, 3, 16, 8),), (draw(2, 3, 16, 8, seed=1),))


@pytest.mark.parametrize(
    ("net", "strategy", "why"),
    [
        (
            Convolution(F.conv2d, (4, 4, 3, 3), None),
            ((1, 1, 4, 1), (1, 1, 1, 1)),
            "dim 2 has size 8 and this operator 6 windows over it: 4 does not divide both",
        ),
        (
            Convolution(F.conv_transpose2d, (4, 4, 3, 3), None, stride=2),
            ((1, 1, 2, 1), (1, 1, 1, 1)),
            "dim 2 .* may not be split",
        ),
        (
            Convolution(F.conv2d, (4, 4, 2, 2), None, stride=2),
            ((1, 1, 1, 8), (1, 1, 1, 1)),
            "dim 3 .* may not be split",
        ),
        (
            Convolution(F.conv2d, (4, 4, 2, 2), None, stride=2),
            ((1, 1, 1, 1), (1, 1, 2, 1)),
            "dim 2 .* may not be split",
        ),
        (Convolution(F.conv2d, (4, 4, 2, 2), None), ((1, 4, 1, 1), (1, 2, 1, 1)), "shared factor 'ci'"),
        (Convolution(F.conv2d, (4, 2, 2, 2), None, groups=2), ((1, 1, 1, 1), (2, 1, 1, 1)), "shared factor 'g'"),
    ],
)
def test_refused(net: Convolution, strategy: tuple, why: str) -> None:
    with pytest.raises(sw.StrategyError, match=why) as raised:
        planned(net, (2, 4, 8, 8), strategy)
    legal = eval(raised.value.legal)
    assert planned(net, (2, 4, 8, 8), legal).operator("conv").in_strategy == legal


class SmallNet(nn.Module):
    """Plain, strided, depthwise and pointwise convolutions, all kinds of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(4, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.stem(x)), 3, 2, 1)
        x = self.up(self.pointwise(torch.relu(self.depthwise(x))))
        x = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear")
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


@pytest.mark.parametrize("mode", ["semi_auto", "data_parallel"])
def test_unmarked_everything_runs_along_the_batch(mode: str) -> None:
    net = SmallNet()
    plan = sw.plan(net, (torch.empty(8, 3, 8, 8, dtype=torch.float64),), devices=4, parallel_mode=mode)
    assert sent_forward(plan) == []
    assert all(math.prod(o.in_strategy[0]) == o.in_strategy[0][0] == 4 for o in plan.operators), plan.operators
    batches = [(draw(8, 3, 8, 8, seed=i), labels(8, seed=i)) for i in range(2)]
    assert_as_one_device(net, *batches, loss_fn=nn.CrossEntropyLoss(), devices=4, mode=mode)

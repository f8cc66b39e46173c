"""Networks of images and volumes with height, width and depth cut: trained as on one device, with every other setting;
and searches that cut so."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_device import assert_as_one_device, close, parallel
from small_networks import draw, labels
from spatial_networks import Residual, ResNet, UNet, Volumes, block, mark
from torch import Tensor, nn

import shardwright as sw
from shardwright.cluster import Cluster, Level
from shardwright.partition.local_program import Redistribute
from shardwright.report.ir_dump import execute_text
from shardwright.runtime.local import local_executor

HALOS = {"halo_exchange", "halo_reduce"}
FOLLOW = "sharding_propagation"


def images(steps: int = 5, size: int = 32, batch: int = 1) -> list[tuple[Tensor, Tensor]]:
    return [(draw(batch, 2, size, size, seed=i), draw(batch, 3, size, size, seed=50 + i)) for i in range(steps)]


def photographs(steps: int = 5, size: int = 64, batch: int = 1) -> list[tuple[Tensor, Tensor]]:
    return [(draw(batch, 3, size, size, seed=i), labels(batch, 8, seed=i)) for i in range(steps)]


def volumes(steps: int = 5) -> list[tuple[Tensor, Tensor]]:
    return [(draw(1, 1, 8, 16, 8, seed=i), draw(1, 2, 8, 8, 8, seed=50 + i)) for i in range(steps)]


def kinds(plan: sw.Plan) -> set[str]:
    return {str(c.op) for c in plan.collectives(0)}


def exchanges(plan: sw.Plan) -> list[Redistribute]:
    return [i for i in plan.program.instructions if isinstance(i, Redistribute) and i.forward.exchanges_halos]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list], Callable, tuple[tuple[int, ...], ...]]] = {
    "unet": (UNet, images, nn.MSELoss, ((2, 2), (4, 1), (4, 2), (1, 8))),
    "resnet": (ResNet, photographs, nn.CrossEntropyLoss, ((2, 2), (1, 4), (2, 4), (4, 2))),
    "volumes": (Volumes, volumes, nn.MSELoss, ((2, 2, 1), (1, 2, 2), (2, 2, 2), (4, 1, 2))),
}


@pytest.mark.parametrize(("name", "cuts"), [(name, cuts) for name, case in CASES.items() for cuts in case[3]])
def test_trains_as_one_device(name: str, cuts: tuple[int, ...]) -> None:
    make, batches, loss, _ = CASES[name]
    torch.manual_seed(0)
    net = mark(make().double(), *cuts)
    model = assert_as_one_device(net, *batches(), loss_fn=loss(), devices=math.prod(cuts), mode=FOLLOW)
    assert kinds(model.plan) >= HALOS
    convolutions = [o for o in model.plan.operators if "conv" in o.op]
    assert all(o.in_strategy[0][2:] == cuts for o in convolutions), [(o.name, o.in_strategy) for o in convolutions]
    others = {o.op for o in model.plan.operators if o.in_strategy[0][2:] == cuts}
    assert "relu" in others and (name == "volumes" or "batch_norm" in others)


def test_six_devices_cut_three_ways() -> None:
    torch.manual_seed(0)
    net = mark(UNet().double(), 2, 3)
    batches = [(draw(1, 2, 16, 36, seed=i), draw(1, 3, 16, 36, seed=9 + i)) for i in range(2)]
    assert kinds(assert_as_one_device(net, *batches, loss_fn=nn.MSELoss(), devices=6, mode=FOLLOW).plan) >= HALOS


def test_batch_channels_and_height_together() -> None:
    """Two rows of the batch, two halves of the input channels, two of the height."""
    torch.manual_seed(0)
    net = nn.Sequential(block(2, 4), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)).double()
    sw.shard(net[0][0], ((2, 2, 2, 1), (1, 2, 1, 1)))
    sw.shard(net[1], ((2, 1, 2, 1), (2, 1, 1, 1), (2,)))
    sw.shard(net[3], ((2, 2, 2, 1),))
    batches = [(draw(2, 2, 16, 8, seed=i), draw(2, 4, 8, 4, seed=9 + i)) for i in range(2)]
    model = assert_as_one_device(net, *batches, loss_fn=nn.MSELoss(), devices=8)
    assert kinds(model.plan) >= HALOS


@pytest.mark.parametrize("entry", [("None", "None", ("c", "a"), "b"), ("None", "None", "b", ("c", "a"))])
def test_layouts_in_any_order_of_axes(entry: tuple) -> None:
    """The parts of a dim lie on ranks in another order than that of the ranks."""
    layout = sw.Layout((2, 2, 2), ("a", "b", "c"))
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 5, 2, 2)).double()
    for conv in (net[0], net[2]):
        sw.shard(conv, (layout(*entry), layout(*["None"] * 4)))
    batches = [(draw(1, 2, 16, 16, seed=i), draw(1, 2, 8, 8, seed=9 + i)) for i in range(2)]
    model = assert_as_one_device(net, *batches, loss_fn=nn.MSELoss(), devices=8)
    assert {c.ranks for c in model.plan.collectives(5) if c.op in HALOS} == {(0, 1, 4, 5), (5, 7)}


class OfAParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Parameter(draw(1, 2, 16, 8))
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.image) + x


def test_a_convolution_of_a_parameter() -> None:
    batches = [(draw(1, 2, 16, 8, seed=i), draw(1, 2, 16, 8, seed=9 + i)) for i in range(2)]
    model = assert_as_one_device(mark(OfAParameter().double(), 4, 2), *batches, loss_fn=nn.MSELoss(), devices=8)
    assert kinds(model.plan) >= HALOS and model.plan.parameters["image"].local_shape(0) == (1, 2, 4, 4)


class Branches(nn.Module):
    """Several convolutions of one value, two of them with the same windows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 1)
        self.ways = nn.ModuleList(
            [nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 5, padding=2)]
        )
        self.pool = nn.MaxPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return torch.cat([*(way(x) for way in self.ways), self.pool(x)], 1)


def test_equal_windows_share_an_exchange() -> None:
    net = mark(Branches().double(), 4, 1)
    batches = [(draw(1, 2, 16, 8, seed=i), draw(1, 10, 16, 8, seed=9 + i)) for i in range(2)]
    model = assert_as_one_device(net, *batches, loss_fn=nn.MSELoss(), devices=4, mode=FOLLOW)
    made = [c for c in model.plan.collectives(0) if c.op in HALOS]
    assert [c.op for c in made] == ["halo_exchange"] * 3 + ["halo_reduce"] * 3  # 3 x 3 once, 5 x 5, the pool


def test_a_cut_that_does_not_divide_is_padded() -> None:
    """15 rows in 4 parts of 4; windows read the operator's padding in place of the row that is not there."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, 1, 1),
        nn.ReLU(),
        nn.MaxPool2d(3, 1, 1),
        nn.Conv2d(4, 4, 5, 1, 2),
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        nn.Conv2d(4, 2, 3, padding="same"),
    ).double()
    batches = [(draw(2, 2, 15, 6, seed=i), draw(2, 2, 15, 6, seed=9 + i)) for i in range(2)]
    model = assert_as_one_device(mark(net, 4, 1), *batches, loss_fn=nn.MSELoss(), devices=4, mode=FOLLOW, uneven=True)
    plan = model.plan
    assert all(plan.operator(name).local_shapes(3)[1][0][2] == 4 for name in ("0", "2", "3", "4", "5"))
    assert len([c for c in plan.collectives(0) if c.op == "halo_exchange"]) == 5


def test_a_cut_that_does_not_divide_is_refused() -> None:
    with pytest.raises(sw.StrategyError, match="dim 2 has size 15, which does not divide by 4") as raised:
        sw.plan(mark(nn.Conv2d(2, 4, 3, padding=1), 4, 1), (torch.empty(1, 2, 15, 6),), devices=4)
    assert "legal" in str(raised.value)


# -- other settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["level1", "level2", "level3"])
def test_stored_in_parts(level: str) -> None:
    torch.manual_seed(0)
    net = mark(UNet().double(), 2, 2)
    one, loss = copy.deepcopy(net), nn.MSELoss()
    model = parallel(net, loss, mode=FOLLOW).hsdp(threshold=0, optimizer_level=level)
    for x, y in images(2):
        model(x, y).backward()
        loss(one(x), y).backward()
    close({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in one.named_parameters()})
    assert HALOS | {"reduce_scatter"} <= kinds(model.plan)


@pytest.mark.parametrize("again", [True, False])
def test_recomputed(again: bool) -> None:
    """Exchanges run again with their operators, or their results are kept."""
    torch.manual_seed(0)
    net = mark(UNet().double(), 2, 2)
    for part in (net.down1, net.bottom, net.side1):
        sw.recompute(part, mp_comm_recompute=again)
    model = assert_as_one_device(net, *images(2), loss_fn=nn.MSELoss(), devices=4, mode=FOLLOW)
    repeated = [c for c in model.plan.collectives(0) if c.again and c.op == "halo_exchange"]
    assert bool(repeated) == again


def test_in_a_pipeline() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(block(2, 4), Residual(4, 4, 2), Residual(4, 4, 1), nn.Conv2d(4, 3, 3, padding=1)).double()
    mark(net, 2, 2)
    for module in (net[1].shortcut, net[2].shortcut):
        sw.shard(module, ((1, 1, 2, 2), (1, 1, 1, 1)))
    one, loss = copy.deepcopy(net), nn.MSELoss()
    model = parallel(net, loss, devices=8, mode=FOLLOW).pipeline(
        stages=2, micro_batches=2, stage_config={"0": 0, "1": 0, "2": 1, "3": 1}
    )
    x, y = draw(4, 2, 16, 16), draw(4, 3, 8, 8, seed=1)
    got = model(x, y)
    got.backward()
    expected = sum(loss(one(a), b) for a, b in zip(x.chunk(2), y.chunk(2))) / 2
    expected.backward()
    close(got.detach(), expected.detach())
    close({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in one.named_parameters()})
    assert all({str(c.op) for c in stage.plan.collectives(0)} >= HALOS for stage in model.plan.stages)


def test_under_autocast() -> None:
    torch.manual_seed(0)
    net = mark(UNet(), 2, 2)
    one = copy.deepcopy(net)
    (x, y), *_ = images(1)
    x, y = x.float(), y.float()
    model = parallel(net, nn.MSELoss(), devices=4, mode=FOLLOW)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = model(x, y), nn.functional.mse_loss(one(x).float(), y)
    got.backward()
    expected.backward()
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=0)
    for (name, a), b in zip(net.named_parameters(), one.parameters(), strict=True):
        apart = (a.grad - b.grad).norm() / b.grad.norm().clamp(min=1e-3)
        assert apart < 6e-2, (name, apart)
    moved = {i.target.value.dtype for i in exchanges(model.plan)}
    assert torch.bfloat16 in moved, moved


def test_an_input_that_needs_a_gradient() -> None:
    net, x = mark(nn.Conv2d(2, 3, 5, 2, 2).double(), 4, 2), draw(2, 2, 16, 8)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    model = parallel(net)
    (model(ours) ** 2).sum().backward()
    (copy.deepcopy(net)(theirs) ** 2).sum().backward()
    close(ours.grad, theirs.grad)


# -- searches ----------------------------------------------------------------------------------------------------------


def high_resolution(mode: str, block: int = 0, **options: Any) -> sw.Plan:
    """The plan for one large image.

    Args:
        block: the first block that the network has.
    """
    with torch.device("meta"):
        net = ResNet(width=32, classes=16)
        net.blocks = net.blocks[block:]
        x, y = torch.empty(1, 3, 2048, 2048), torch.empty(1, dtype=torch.int64)
    return sw.plan(
        net, (x,), loss_fn=nn.CrossEntropyLoss(), targets=y, parallel_mode=mode, devices=8, cluster="a100x8", **options
    )


@pytest.mark.parametrize("mode", ["dynamic_programming", "recursive_programming"])
def test_a_search_cuts_one_large_image(mode: str) -> None:
    plan = high_resolution(mode)
    spatial = [o for o in plan.operators if o.op == "conv2d" and math.prod(o.in_strategy[0][2:]) > 1]
    assert spatial and kinds(plan) >= HALOS
    assert plan.cost < 0.5 * high_resolution("semi_auto").cost
    if mode == "dynamic_programming":
        assert plan.gap < 1e-3


def test_a_searched_plan_trains() -> None:
    torch.manual_seed(0)
    net = ResNet(width=4, classes=8).double()
    slow = Cluster("slow", (Level("links", 4, 1e8, 1e-9),), 1e9, {"float64": 1e9}, 1e11, 1e-9)
    model = assert_as_one_device(
        net, *photographs(2), loss_fn=nn.CrossEntropyLoss(), devices=4, mode="dynamic_programming", cluster=slow
    )
    assert kinds(model.plan) >= HALOS


def test_a_search_leaves_halos_out_where_the_batch_suffices() -> None:
    with torch.device("meta"):
        net, x, y = ResNet(width=8), torch.empty(16, 3, 128, 128), torch.empty(16, dtype=torch.int64)
        net.blocks = net.blocks[1:]
    plan = sw.plan(net, (x,), loss_fn=nn.CrossEntropyLoss(), targets=y, parallel_mode="dynamic_programming", devices=8)
    assert not HALOS & kinds(plan)


@pytest.mark.long
def test_a_limit_of_memory_counts_halos() -> None:
    free = high_resolution("dynamic_programming", block=1)
    held = sum(i.target.local_bytes for i in exchanges(free))
    assert held and free.peak > held  # saved by the convolutions that read them
    within = high_resolution("dynamic_programming", block=1, memory=0.9 * free.peak)
    assert within.peak <= 0.9 * free.peak and within.cost >= free.cost


# -- verify ------------------------------------------------------------------------------------------------------------


def verified(**options: Any) -> Any:
    torch.manual_seed(0)
    (x, y), *_ = images(1)
    net = mark(UNet().double(), 2, 2)
    return sw.verify(net, (x,), y, loss_fn=nn.MSELoss(), devices=4, parallel_mode=FOLLOW, steps=2, **options)


def test_verify_proves_it() -> None:
    report = verified()
    assert report.ok and report.proved, report.summary()


@pytest.mark.parametrize("way", ["forward", "gradient"])
def test_verify_names_a_wrong_exchange(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of one halo is wrong: of the values, or of the gradients."""
    plain = local_executor.convert_shards

    def wrong(redistribution: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        made = run(x)
        kind = "halo_exchange" if way == "forward" else "halo_reduce"
        if (
            redistribution.exchanges_halos
            and redistribution.steps[0].kind == kind
            and redistribution.steps[0].halo.size == 16
        ):
            made = made.clone()
            made.select(-2, 0).mul_(1.5)
        return made

    monkeypatch.setattr(local_executor, "convert_shards", wrong)
    report = verified()
    assert plain is not wrong and not report.ok
    first = report.first_difference
    assert first.phase == way and first.operator in ("down2.0", "smooth", "side2.0"), first
    assert first.part == "conversion" or way == "gradient"  # run alone, an operator still exchanges its halos


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_rows_that_neighbours_need() -> None:
    """A 3 x 3 convolution of [1, 4, 16, 16] float32 in 4 x 2 parts: an inner part of rows sends two rows of 8 columns;
    then one column of 6 rows, two of them from the neighbours."""
    plan = sw.plan(mark(nn.Conv2d(4, 4, 3, padding=1), 4, 2), (torch.empty(1, 4, 16, 16),), devices=8)
    rows, columns = (c for c in plan.collectives(3) if c.op == "halo_exchange")
    assert (rows.ranks, rows.shape, rows.sent) == ((1, 3, 5, 7), (1, 4, 4, 8), 4 * 4 * 2 * 8)
    assert (columns.ranks, columns.shape, columns.sent) == ((2, 3), (1, 4, 6, 8), 4 * 4 * 6)
    priced = [c.bytes for c in plan.price.collectives if c.kind == "halo_exchange"]
    assert sorted(priced) == [columns.sent, rows.sent] == [columns.bytes, rows.bytes]


def test_the_dump_says_what_each_rank_has_and_reads() -> None:
    net = mark(nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 7, 2, 3)), 4, 2)
    plan = sw.plan(net, (torch.empty(1, 2, 32, 32),), devices=8)
    text = execute_text(plan, 3)
    for line in (
        "halo_exchange(%2)  {ranks: (1, 3, 5, 7), bytes: 1280, dim: 2, has: 8:16, reads: 5:18}  "
        "f32[1, 4, 8, 16] -> f32[1, 4, 13, 16]   # for 1",
        "halo_exchange(%3)  {ranks: (2, 3), bytes: 624, dim: 3, has: 16:32, reads: 13:34}  "
        "f32[1, 4, 13, 16] -> f32[1, 4, 13, 21]   # for 1",
        "halo_reduce(%",
        "{ranks: (2, 3), bytes: 624, dim: 3, has: 16:32, reads: 13:34}  "
        "f32[1, 4, 13, 21] -> f32[1, 4, 13, 16]   # gradient of %2, transpose of halo_exchange, halo_exchange for 1",
    ):
        assert line in text, f"{line}\n{text}"

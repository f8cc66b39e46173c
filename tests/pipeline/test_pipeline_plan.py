"""Pipelines in one process: every schedule, and every kind of model, as one device has it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_networks import SHAPES, Chain, TiedEnds, assert_pipeline_as_one_device, batches, setting, staged
from small_networks import D, draw, labels
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import SettingError

TWO = dict(stages=2, micro_batches=4)

#: How a `Chain` is made.
KINDS: dict[str, dict[str, bool]] = {
    "plain": {},
    "tied": {"tied": True},
    "skip": {"skip": True},
    "tied and skip": {"tied": True, "skip": True},
}


# -- every schedule ----------------------------------------------------------------------------------------------------


#: Each schedule with each kind of chain, and with each number of micro-batches.
CASES = [(name, kind, 4) for name in SHAPES for kind in ("plain", "tied", "skip")]
CASES += [(name, ("plain", "tied", "skip")[(i + few) % 3], few) for i, name in enumerate(SHAPES) for few in (1, 2)]


@pytest.mark.parametrize(("name", "kind", "micro_batches"), CASES)
def test_every_schedule(name: str, kind: str, micro_batches: int, tmp_path: Path) -> None:
    given = setting(name, micro_batches, tmp_path)
    model = assert_pipeline_as_one_device(
        Chain(**KINDS[kind]), batches(), given, loss_fn=nn.MSELoss(), devices=2 * given["stages"]
    )
    plan = model.plan
    assert len(plan.stages) == given["stages"] * given.get("chunks", 1) and plan.micro_batches == micro_batches
    kinds = Counter(action.kind for row in plan.schedule.actions for action in row)
    assert kinds["F"] == kinds["B"] + kinds["I"] == len(plan.stages) * micro_batches
    assert bool(kinds["I"]) == (name in ("zero_bubble", "zbv"))
    crossings = {(t.kind, t.source, t.target) for t in plan.transfers}
    cut = staged(len(plan.stages))
    if "skip" in kind and len(plan.stages) == 4:
        assert ("value", 0, 2) in crossings
    assert any(t[0] == "parameter" for t in crossings) == ("tied" in kind and cut["layers.1"] != cut["layers.2"])


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "csv"])
def test_fewer_micro_batches_than_stages_are_refused(name: str) -> None:
    given = setting(name, 2) | {"micro_batches": 1}
    sw.init(devices=4)
    model = sw.AutoParallel(Chain(), nn.MSELoss()).pipeline(**given)
    with pytest.raises(SettingError, match="micro_batches"):
        model(*batches()[0])


# -- every kind of model -----------------------------------------------------------------------------------------------


class Unlike(nn.Module):
    """Stages of other ranks and other modules: a convolution, a linear layer of pixels, an embedding of a further
    input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(1, 8, 3, padding=1, dtype=D), nn.MaxPool2d(2)
        self.wide, self.table = nn.Linear(8 * 16, 24, dtype=D), nn.Embedding(5, 24, dtype=D)
        self.norm, self.out = nn.LayerNorm(24, dtype=D), nn.Linear(24, 5, dtype=D)

    def forward(self, image: Tensor, kind: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv(image))).flatten(1)
        return self.out(self.norm(F.gelu(self.wide(x)) + self.table(kind)))


@pytest.mark.parametrize("scheduler", ["1f1b", "zero_bubble"])
def test_stages_of_unlike_modules(scheduler: str) -> None:
    given = dict(
        stages=4,
        micro_batches=4,
        scheduler=scheduler,
        stage_config={"conv": 0, "wide": 1, "table": 2, "norm": 3, "out": 3},
    )
    model = assert_pipeline_as_one_device(
        Unlike(),
        [(draw(16, 1, 8, 8, seed=i), labels(16, 5, seed=i), labels(16, 5, seed=7 + i)) for i in range(2)],
        given,
        loss_fn=nn.CrossEntropyLoss(),
    )
    # What no module in a stage makes goes with what it reads: the ReLU, the pool and the flattening are the
    # convolution's.
    assert [o.op for o in model.plan.stages[0].plan.operators if o.op != "send"][:3] == ["conv2d", "relu", "max_pool2d"]


class Returning(nn.Module):
    """Several inputs, by name too, and several outputs: its loss first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, dtype=D) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, *, target: Tensor, weight: Tensor, scale: float = 1.0) -> tuple:
        first = torch.tanh(self.a(x) * weight)
        second = torch.tanh(self.b(first + y)) * scale
        logits = self.c(second)
        loss = F.cross_entropy(logits, target) + 0.1 * first.square().mean()
        return loss, {"logits": logits.detach(), "first": first.detach()}, target.sum(), "ours"


@pytest.mark.parametrize("scheduler", ["gpipe", "1f1b", "zero_bubble"])
def test_inputs_by_name_and_outputs_of_several_stages(scheduler: str) -> None:
    given = dict(stages=2, micro_batches=4, scheduler=scheduler, stage_config={"a": 0, "b": 0, "c": 1})
    feeding = [(draw(16, 8, seed=i), draw(16, 8, seed=5 + i)) for i in range(2)]
    model = assert_pipeline_as_one_device(
        Returning(), feeding, given, named=dict(target=labels(16), weight=draw(8, seed=3), scale=0.5)
    )
    assert model.plan.split == (
        True,
        True,
        True,
        False,
    )  # the weight has no rows: every micro-batch gets the whole of it


class Pair(nn.Module):
    """A stage of several inputs and outputs, some of them used two stages on."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.relu(self.left(x)), torch.relu(self.right(y)), x + y


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept: Any = 0
        for pair in self.pairs:
            x, y, both = pair(x, y)
            kept = kept + both
        return x * y + kept


@pytest.mark.parametrize(("scheduler", "groups"), [("1f1b", 4), ("interleaved", 2), ("zero_bubble", 4), ("zbv", 2)])
def test_stages_of_several_inputs_and_outputs(scheduler: str, groups: int) -> None:
    given = dict(stages=groups, micro_batches=4, scheduler=scheduler, stage_config={f"pairs.{i}": i for i in range(4)})
    assert_pipeline_as_one_device(
        Pairs(),
        [(draw(16, 8, seed=i), draw(16, 8, seed=5 + i), draw(16, 8)) for i in range(2)],
        given,
        loss_fn=nn.L1Loss(),
    )


class Shared(nn.Module):
    """One embedding in the first stage, in the last one, and in one between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8, dtype=D)
        self.mid = nn.ModuleList(nn.Linear(8, 8, dtype=D) for _ in range(3))
        self.head = nn.Linear(8, 8, dtype=D)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.relu(self.mid[0](self.table(tokens)))
        x = torch.relu(self.mid[1](x) @ self.table.weight)
        return self.head(self.mid[2](x))


@pytest.mark.parametrize(("scheduler", "groups"), [("1f1b", 4), ("interleaved", 2), ("zero_bubble", 4), ("zbv", 2)])
def test_a_weight_of_three_stages(scheduler: str, groups: int) -> None:
    net = Shared()
    given = dict(
        stages=groups,
        micro_batches=4,
        scheduler=scheduler,
        stage_config={"table": 0, "mid.0": 1, "mid.1": 2, "mid.2": 3, "head": 3},
    )
    model = assert_pipeline_as_one_device(
        net,
        [(labels(16, seed=i), labels(16, seed=4 + i)) for i in range(2)],
        given,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
    )
    assert sorted(t.target for t in model.plan.transfers if t.kind == "parameter") == [2, 3]


class Frozen(Chain):
    """The second layer is not trained, and takes no gradient from the first, which has one by the skip alone."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.layers[0](x))
        third = torch.relu(self.layers[2](torch.relu(self.layers[1](first.detach()))))
        return self.layers[3](third + first)


@pytest.mark.parametrize("scheduler", ["1f1b", "zero_bubble", "gpipe"])
def test_values_without_gradients_cross_too(scheduler: str) -> None:
    given = dict(stages=2, micro_batches=2, scheduler=scheduler, stage_config=staged(2))
    net = Frozen()
    net.layers[1].requires_grad_(False)
    assert_pipeline_as_one_device(
        net,
        batches(),
        given,
        loss_fn=nn.MSELoss(),
        optimizer=lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], 0.1),
    )


# -- stages ------------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Blocks of a layer and its function, operators between them, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, dtype=D), nn.Tanh()) for _ in range(3))
        self.gain = nn.Parameter(draw(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain  # with the first that uses it: stage 0
        for block in self.blocks:
            x = block(x).square().sin() + 0.5  # with the block
        return x.roll(1, -1) * 2


def test_modules_and_paths_say_stages() -> None:
    net = Blocks()
    assert sw.set_stage(net.blocks[0], 0) is net.blocks[0]
    sw.set_stage(net.blocks, 1)  # all inside that is in no stage of its own
    given = dict(TWO, stage_config={"blocks.1": 1})
    feeding = [(draw(8, 8, seed=i), draw(8, 8)) for i in range(2)]
    model = assert_pipeline_as_one_device(net, feeding, given, loss_fn=nn.MSELoss())
    stages = [[o.op for o in stage.plan.operators if o.op != "send"] for stage in model.plan.stages]
    assert stages[0] == ["mul", "linear", "tanh", "square", "sin", "add"]
    assert stages[1] == stages[0][1:] * 2 + ["roll", "mul", "broadcast_tensors", "mse_loss"]
    assert [list(stage.ranks) for stage in model.plan.stages] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_tuples_and_layouts_speak_of_a_stages_devices() -> None:
    net = Chain()
    layout = sw.Layout((2, 2), ("dp", "mp"))
    sw.shard(net.layers[0], ((2, 1), (2, 1), (2,)))
    sw.shard(net.layers[1], (layout("dp", "mp"), layout("None", "mp"), layout("None")))
    sw.shard(net.layers[2], ((1, 4), (1, 4), (1,)))
    model = assert_pipeline_as_one_device(net, batches(), dict(TWO, stage_config=staged(2)), loss_fn=nn.MSELoss())
    weight = model.plan.parameters["layers.2.weight"]
    assert [weight.slice(rank)[1] for rank in range(4, 8)] == [slice(4 * i, 4 * i + 4) for i in range(4)]
    assert all(weight.slice(rank) == (slice(0, 0),) * 2 for rank in range(4))
    assert model.plan.parameters["layers.1.weight"].slice(2)[1] == slice(0, 8)
    assert model.plan.operator("layers.2").local_shapes(5)[0][0] == (4, 4)  # of 16 rows and 16 columns


# -- modes and settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", ["data_parallel", "semi_auto", "sharding_propagation", "recursive_programming", "dynamic_programming"]
)
@pytest.mark.parametrize("kind", ["plain", "tied and skip"])
def test_every_mode(mode: str, kind: str) -> None:
    net = Chain(**KINDS[kind])
    if mode == "sharding_propagation":
        sw.shard(net.layers[3], ((2, 1), (2, 1), (2,)))
    dataset = "data_parallel" if mode == "data_parallel" else "full_batch"
    model = assert_pipeline_as_one_device(
        net, batches(), dict(TWO, stage_config=staged(2)), loss_fn=nn.MSELoss(), mode=mode, dataset=dataset
    )
    assert model.plan.mode == mode


@pytest.mark.parametrize("mode", ["stand_alone", "hybrid_parallel"])
def test_modes_without_a_plan_of_stages_are_refused(mode: str) -> None:
    sw.init(devices=4)
    model = sw.AutoParallel(Chain(), nn.MSELoss(), parallel_mode=mode).pipeline(**setting("1f1b", 2))
    with pytest.raises(SettingError, match=f"a pipeline in {mode}"):
        model(*batches()[0])


@pytest.mark.parametrize("level", ["level1", "level2", "level3"])
@pytest.mark.parametrize("kind", ["plain", "tied and skip"])
@pytest.mark.parametrize("scheduler", ["1f1b", "zero_bubble"])
def test_optimizer_parallel(level: str, kind: str, scheduler: str) -> None:
    given = dict(TWO, scheduler=scheduler, stage_config=staged(2))
    model = assert_pipeline_as_one_device(
        Chain(**KINDS[kind]),
        batches(),
        given,
        loss_fn=nn.MSELoss(),
        settle=lambda m: m.hsdp(threshold=0, optimizer_level=level),
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
    )
    storage = model.plan.parameters["layers.3.weight"]
    assert [storage.slice(rank)[0] for rank in range(4, 8)] == [slice(4 * i, 4 * i + 4) for i in range(4)]


@pytest.mark.parametrize("scheduler", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("level", [None, "level1", "level3"])
def test_a_stage_whose_only_trained_parameter_belongs_to_another_one(scheduler: str, level: str | None) -> None:
    given = dict(stages=2, micro_batches=4, scheduler=scheduler, stage_config={"first": 0, "inner": 0, "last": 1})
    model = assert_pipeline_as_one_device(
        TiedEnds(),
        batches(),
        given,
        loss_fn=nn.MSELoss(),
        settle=lambda m: level and m.hsdp(threshold=0, optimizer_level=level),
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
    )
    assert not model.plan.stages[1].plan.parameters and model.plan.parameters["first.weight"].stage == 0


def test_gradients_are_scattered_after_each_micro_batch_from_level_2_on() -> None:
    """Level 1 adds up whole gradients and scatters them once a step; level 2 adds up parts."""
    net, x = Chain(width=64), torch.empty(16, 64, dtype=D)
    given, plans = dict(TWO, stage_config=staged(2)), {}
    for level in ("level1", "level2", "level3"):
        hsdp = {"threshold": 0, "optimizer_level": level}
        plans[level] = sw.plan(net, (x,), nn.MSELoss(), x, devices=4, pipeline=given, hsdp=hsdp, comm_memory=0)
    whole = 2 * (64 * 64 + 64) * x.element_size()  # of two layers
    assert plans["level1"].memory(0)["accumulated"] == whole
    assert not any("accumulated" in plans[level].memory(0) for level in ("level2", "level3"))
    assert 0.95 * whole < plans["level1"].peak - plans["level2"].peak <= whole
    counts = {level: Counter((c.op, c.phase) for c in plan.collectives(3)) for level, plan in plans.items()}
    assert [counts[level]["reduce_scatter", "gradient"] for level in counts] == [4, 4 * 4, 4 * 4]
    assert [counts[level]["all_gather", "storage"] for level in counts][:2] == [4, 4]
    assert plans["level1"].cost < plans["level2"].cost < plans["level3"].cost


def test_replicas_are_summed_once_a_step_at_every_level() -> None:
    """Biases below the threshold are whole, and have one sum a step."""
    net, x = Chain(width=64), torch.empty(16, 64, dtype=D)
    hsdp = {"threshold": 1, "optimizer_level": "level2"}
    plan = sw.plan(net, (x,), nn.MSELoss(), x, devices=4, pipeline=dict(TWO, stage_config=staged(2)), hsdp=hsdp)
    sums = [c for c in plan.collectives(0) if c.phase == "gradient"]
    assert Counter(c.op for c in sums) == {"reduce_scatter": 2 * 4, "all_reduce": 2}


@pytest.mark.parametrize("scheduler", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
@pytest.mark.parametrize("kind", ["plain", "tied and skip"])
def test_recomputed_layers(scheduler: str, kind: str) -> None:
    net = Chain(**KINDS[kind])
    for layer in net.layers[1:3]:
        sw.recompute(layer)
    chunks = 2 if scheduler in ("interleaved", "zbv") else 1
    given = dict(TWO, scheduler=scheduler, stage_config=staged(2 * chunks))
    model = assert_pipeline_as_one_device(
        net, batches(), given, loss_fn=nn.MSELoss(), settle=lambda m: m.hsdp(threshold=0, optimizer_level="level3")
    )
    assert any(stage.plan.regions for stage in model.plan.stages)

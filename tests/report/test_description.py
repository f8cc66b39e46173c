"""`plan.describe()`: plans in the field's words, compared with the layouts that the plans have."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from paths import EXAMPLES
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.cluster import Cluster
from shardwright.layout import digits_size
from shardwright.report.description import (
    Axis,
    Block as BlockOfPlan,
    PlanPart,
    cluster_line,
    describe,
    inputs_line,
    layer_of,
)
from shardwright.report.operator_cuts import operator_cuts
from shardwright.report.tables import explain, summary

sys.path.insert(0, str(EXAMPLES))
import gpt
import language
import llama

D = torch.float64
DEVICES = 8


def transformer(module: Any, mode: str = "semi_auto", dp: int = 2, mp: int = 4, **how: Any) -> Any:
    """A plan of an example's GPT or Llama, marked as the example marks it; other modes take no marks."""
    net = {gpt: gpt.GPT, llama: llama.Llama}[module](layers=3)
    loss, tokens = language.Loss(), torch.zeros(8, 64, dtype=torch.long)
    if mode == "semi_auto":
        module.mark(net, loss, dp, mp)
    how.setdefault("devices", DEVICES)
    return sw.plan(net, (tokens,), loss, tokens, parallel_mode=mode, **how)


def lines(plan: Any) -> list[str]:
    return str(plan.describe()).splitlines()


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, marks: dict[str, Any], width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        for name, strategy in marks.items():
            sw.shard(getattr(self, name), strategy)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, marks: list[dict[str, Any]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, marks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tower(*marks: dict[str, Any], **how: Any) -> Any:
    x = torch.zeros(8, 16, 32)
    return sw.plan(Tower(list(marks)), (x,), nn.MSELoss(), x, devices=DEVICES, **how)


def column_row(dp: int, sp: int, mp: int) -> dict[str, Any]:
    """Megatron's marks: columns, then rows; the sequence between, in a norm of ``dp x mp`` devices."""
    return {
        "norm": ((dp, sp * mp, 1), (1,), (1,)),
        "up": ((dp, sp, 1), (mp, 1), (mp,)),
        "down": ((dp, sp, mp), (1, mp), (1,)),
    }


# -- kinds of parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [gpt, llama], ids=["gpt", "llama"])
def test_data_parallel(module: Any) -> None:
    plan = transformer(module, "data_parallel")
    assert "blocks 0-2: data 8" in lines(plan)
    assert all(p.layout.is_replicated for p in plan.parameters.values())


@pytest.mark.parametrize(
    ("module", "dp", "mp"),
    [(gpt, 2, 4), (gpt, 4, 2), (gpt, 1, 8), (gpt, 8, 1), (llama, 2, 4), (llama, 4, 2), (llama, 8, 1)],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_tensor_parallel(module: Any, dp: int, mp: int) -> None:
    """Llama's four heads of keys are cut in four at most."""
    plan = transformer(module, dp=dp, mp=mp)
    (text,) = (line for line in lines(plan) if line.startswith("blocks 0-2: "))
    (block,) = (b for b in describe(plan).blocks if b.numbers)
    sizes = {axis.family: axis.size for axis in block.parts[0].axes}
    assert sizes == {k: n for k, n in (("data", dp), ("tensor", mp)) if n > 1}
    weights = plan.parameters["blocks.1.up.weight"], plan.parameters["blocks.1.down.weight"]
    assert [w.layout.cuts for w in weights] == [(mp, 1), (1, mp)], "what the words must say"
    assert ("column, row, heads" in text) == (mp > 1)
    if mp > 1:
        tensor = next(axis for axis in block.parts[0].axes if axis.family == "tensor")
        assert tensor.digits == weights[0].layout.carried and tensor.words == ("column", "row", "heads")
        assert any(f"vocabulary {mp}" in line for line in lines(plan) if line.startswith("tokens"))
        assert plan.parameters["tokens.weight"].layout.cuts == (mp, 1)


def test_sequence_parallel_between() -> None:
    plan = tower(column_row(2, 1, 4), column_row(2, 1, 4))
    assert plan.operator("blocks.0.norm").in_strategy[0] == (2, 4, 1)
    (text,) = lines(plan)[1:]
    assert text.startswith("blocks 0-1: data 2 x tensor 4 (column, row; sequence parallel")


def test_context_and_sequence() -> None:
    """A sequence that is cut in the products too: with attention it is context parallel."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
            sw.shard(self.query, ((2, 4, 1), (1, 1), (1,))), sw.shard(self.out, ((2, 4, 1), (1, 1), (1,)))
            self.attend = sw.Operator(F.scaled_dot_product_attention)
            self.attend.shard(((2, 1, 4, 1), (2, 1, 1, 1), (2, 1, 1, 1)))

        def forward(self, x: Tensor) -> Tensor:
            heads = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
            return self.out(self.attend(heads, heads, heads).transpose(1, 2).flatten(2))

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attending(), Attending()])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    x = torch.zeros(8, 16, 32)
    assert "layers 0-1: data 2 x context 4" in lines(sw.plan(Layers(), (x,), nn.MSELoss(), x, devices=DEVICES))
    assert "blocks 0: " not in str(tower(column_row(2, 4, 1)).describe())
    assert lines(tower(column_row(2, 4, 1)))[1] == "block 0: data 2 x sequence 4"


class Experts(nn.Module):
    """Eight experts, each of which works on all tokens; a router weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 8, bias=False)
        self.up, self.down = nn.Parameter(torch.zeros(8, 32, 64)), nn.Parameter(torch.zeros(8, 64, 32))
        self.first, self.second = sw.Operator(torch.bmm), sw.Operator(torch.bmm)
        self.first.shard(((8, 1, 1), (8, 1, 1))), self.second.shard(((8, 1, 1), (8, 1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.router(tokens).softmax(-1)
        each = self.second(torch.relu(self.first(tokens.expand(8, -1, -1), self.up)), self.down)
        return (each * weights.t().unsqueeze(-1)).sum(0).view_as(x)


def test_experts_beside_data() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.ModuleDict({"mixer": nn.Linear(32, 32), "experts": Experts()}) for _ in range(2)]
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer["experts"](layer["mixer"](x))
            return x

    x = torch.zeros(8, 16, 32)
    plan = sw.plan(Mixture(), (x,), nn.MSELoss(), x, devices=DEVICES)
    assert plan.parameters["layers.0.experts.up"].layout.cuts == (8, 1, 1)
    text = lines(plan)
    assert text[1] == "layers 0-1: in parts"
    assert any("experts.first" in line and line.endswith(": expert 8") for line in text)
    assert any(line.strip().startswith("mixer") and line.endswith(": data 8") for line in text)


def test_a_network_of_convolutions() -> None:
    """Data, then pixels: a cut of rows reads halos."""

    class Stage(nn.Module):
        def __init__(self, strategy: Any = None) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            if strategy is not None:
                sw.shard(self.conv1, strategy), sw.shard(self.conv2, strategy)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv2(torch.relu(self.conv1(x)))

    x = torch.zeros(8, 4, 16, 16)
    whole = nn.Sequential(Stage(), Stage())
    assert lines(sw.plan(whole, (x,), parallel_mode="data_parallel", devices=8))[1] == "modules 0-1: data 8"
    cut = nn.Sequential(*(Stage(((2, 1, 4, 1), (1, 1, 1, 1), (1,))) for _ in range(2)))
    plan = sw.plan(cut, (x,), devices=8)
    assert lines(plan)[1] == "modules 0-1: data 2 x spatial 4"
    assert any(c.op == "halo_exchange" for c in plan.collectives(0)), "the pixels are cut"


# -- storage, recomputation, pipelines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["level1", "level2", "level3"])
def test_storage(level: str) -> None:
    plan = transformer(gpt, "data_parallel", hsdp={"optimizer_level": level, "threshold": 0})
    assert f"blocks 0-2: data 8; ZeRO-{level[-1]} over data 8" in lines(plan)
    part = transformer(gpt, "data_parallel", hsdp={"optimizer_level": level, "threshold": 16})
    mine = [p for name, p in part.parameters.items() if name.startswith("blocks.1.")]
    numel = lambda p: int(torch.Size(p.shape).numel())
    whole = sum(numel(p) for p in mine if p.storage == p.layout) / sum(map(numel, mine))
    assert 0 < whole < 1
    (text,) = (line for line in lines(part) if line.startswith("blocks 0-2"))
    assert f"ZeRO-{level[-1]} over data 8 ({whole:.1%} of the parameters whole)" in text


def test_storage_over_the_replicas_of_tensor_parallel() -> None:
    plan = transformer(gpt, hsdp={"threshold": 16})
    up = plan.parameters["blocks.0.up.weight"]
    assert digits_size(up.storage.carried) // digits_size(up.layout.carried) == 2
    (text,) = (line for line in lines(plan) if line.startswith("blocks 0-2"))
    assert "; ZeRO-1 over data 2" in text


def test_recomputation() -> None:
    net, tokens = gpt.GPT(layers=2), torch.zeros(8, 64, dtype=torch.long)
    for block in net.blocks:
        sw.recompute(block.attention)
    plan = sw.plan(net, (tokens,), language.Loss(), tokens, parallel_mode="data_parallel", devices=8)
    assert "blocks 0-1: data 8; recompute: attention only" in lines(plan)
    assert {region.path for region in plan.regions} == {"blocks.0.attention", "blocks.1.attention"}
    sw.recompute(net.blocks[1])
    plan = sw.plan(net, (tokens,), language.Loss(), tokens, parallel_mode="data_parallel", devices=8)
    assert [line for line in lines(plan) if "block" in line] == [
        "block 0: data 8; recompute: attention only",
        "block 1: data 8; recompute: all",
    ]


def test_a_pipeline() -> None:
    stages = {"tokens": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "head": 1}
    setting = {"stages": 2, "micro_batches": 4, "scheduler": "gpipe", "stage_config": stages}
    plan = transformer(gpt, dp=2, mp=2, pipeline=setting)
    assert lines(plan)[:4] == [
        "semi_auto on 8 devices of h100x8, each fed the whole batch",
        "pipeline: 2 stages (2 x 4 devices), schedule gpipe, 4 micro-batches",
        "stage 0 on ranks 0-3: tokens, positions, block 0",
        "stage 1 on ranks 4-7: blocks 1-2, head",
    ]
    assert any(line.startswith("blocks 0-2: data 2 x tensor 2 (column, row, heads") for line in lines(plan))
    assert "tokens, head: data 2 x vocabulary 2" in lines(plan), "the head shares the embedding of another stage"
    assert repr(plan).count("\n") < 3 and "2 stages, gpipe, 4 micro-batches" in repr(plan)


# -- mixtures, by the layouts ------------------------------------------------------------------------------------------


def test_layers_that_differ_are_told_apart() -> None:
    plan = tower(column_row(2, 1, 4), column_row(2, 1, 4), column_row(8, 1, 1))
    text = lines(plan)
    assert text[1].startswith("blocks 0-1: data 2 x tensor 4") and text[2] == "block 2: data 8"


def test_a_mixture_inside_of_a_layer() -> None:
    plan = tower({"up": ((8, 1, 1), (1, 1), (1,)), "down": ((1, 1, 8), (1, 8), (1,))})
    assert lines(plan)[1:] == ["block 0: in parts", "    up: data 8", "    down: tensor 8 (row)"]


SEARCHES = {
    "wide": lambda: tower(*({},) * 3, parallel_mode="dynamic_programming", cluster="a100x8"),
    "gpt": lambda: transformer(gpt, "dynamic_programming", devices=4),
    "recursive": lambda: transformer(llama, "recursive_programming"),
    "marked": lambda: tower(column_row(2, 1, 4), {}, {"up": ((1, 1, 1), (8, 1), (8,))}),
    "llama": lambda: transformer(llama, dp=2, mp=2),
}


@pytest.mark.parametrize("made", SEARCHES.values(), ids=SEARCHES)
def test_each_part_has_the_placement_of_its_operators(made: Callable[[], Any]) -> None:
    """Each axis of a part cuts each of its main operators, except those it names, along the digits that it says."""
    plan = made()
    known = {c.op.name: c for c in operator_cuts(plan)}
    seen = set()
    for block in describe(plan).blocks:
        for names in block.operators:
            for c in map(known.__getitem__, names):
                if not c.main:
                    continue
                seen.add(c.op.name)
                parts = [part for part in block.parts if covers(part, c.op)]
                assert len(parts) == 1, (c.op.name, block)
                check(parts[0], c, plan)
    assert seen == {name for name, c in known.items() if c.main}


def covers(part: PlanPart, op: Any) -> bool:
    place = op.name if "." in op.name else op.module
    return not part.names or any(f".{place}.".find(f".{name}.") >= 0 for name in part.names)


def check(part: PlanPart, c: Any, plan: Any) -> None:
    """Compared with the layouts of the operator's inputs and results, whose sums are open."""
    named = {
        rank: tuple(digit.value(rank) for axis in part.axes for digit in axis.digits) for rank in range(plan.devices)
    }
    used = {rank: tuple(digit.value(rank) for digit in c.decision.assignment.used) for rank in range(plan.devices)}
    whole = [axis for axis in part.axes if any(name in f"{c.op.module}.{c.op.name}" for name in axis.whole)]
    if not whole:
        assert len(set(named.values())) == len(set(used.values()))
        assert len(set(zip(named.values(), used.values()))) == len(set(used.values())), "the same groups of ranks"
    batch = next((axis for axis in part.axes if axis.family == "data" and axis not in whole), None)
    if batch is not None and c.op.kind == "linear":
        assert c.decision.output_layout(0).cuts[0] == batch.size
    column = next((axis for axis in part.axes if axis.words == ("column",) and axis not in whole), None)
    if column is not None and c.op.kind == "linear":
        assert c.decision.input_layout(1).cuts == (column.size, 1)


# -- texts -------------------------------------------------------------------------------------------------------------


def test_a_search_that_splits_nothing_says_so() -> None:
    net, x = nn.Linear(4, 4), torch.zeros(2, 4)
    plan = sw.plan(net, (x,), parallel_mode="dynamic_programming", devices=2)
    assert not any(d.assignment.used for d in plan.decisions.values())
    assert lines(plan)[-1] == (
        f"the search splits nothing, since on {plan.cluster.name} messages would cost more than they save: each of the "
        "2 devices does all the work"
    )
    assert "nothing" not in str(transformer(gpt, "data_parallel").describe())


def test_one_module_and_a_small_part() -> None:
    """One module is not several, and a part that is not zero is not called so."""

    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.LayerNorm(2048)), nn.Linear(2048, 64))

    net, x = Net(), torch.empty(64, 2048)
    plan = sw.plan(net, (x,), parallel_mode="data_parallel", devices=8, hsdp={"optimizer_level": "level3"})
    text = str(plan.describe())
    assert "modules 0:" not in text and "0.0%" not in text and "less than 0.1% of the parameters whole" in text
    assert BlockOfPlan("", (0,), (), (), "", "", ()).title == "module 0"
    assert BlockOfPlan("", (0, 1), (), (), "", "", ()).title == "modules 0-1"


def test_the_cluster_that_was_assumed() -> None:
    plan = tower({})
    assert cluster_line(plan).endswith("; it is the default, and cluster= or --cluster names another")
    assert "default" not in cluster_line(plan, named=True)
    assert cluster_line(tower({}, cluster="a100x8")).startswith("cluster: a100x8, ")
    assert "default" not in cluster_line(tower({}, cluster="a100x8"))
    assert Cluster.of(None, DEVICES).name in cluster_line(plan)


def test_how_inputs_are_fed() -> None:
    assert 'dataset_strategy="full_batch", the default of a plan for all devices' in inputs_line(tower({}))
    own = inputs_line(tower({}, dataset_strategy="data_parallel"))
    assert 'dataset_strategy="data_parallel", the default of a training step' in own
    tuples = inputs_line(tower({}, dataset_strategy=((2, 1, 1), (2, 1, 1))))
    assert tuples.startswith("inputs: each rank is fed the slices of dataset_strategy=") and "2, 1, 1" in tuples


def test_results_that_fill_a_device_are_named(capsys: pytest.CaptureFixture) -> None:
    cluster = replace(Cluster.of("h100x8"), memory=1e4)
    summary(sw.plan(nn.Linear(8, 8), (torch.zeros(512, 8),), devices=8, cluster=cluster))
    assert "every device gets the model's results whole, 16 KiB: return the loss alone" in capsys.readouterr().out
    net, y = nn.Linear(8, 8), torch.zeros(512, 8)
    summary(sw.plan(net, (torch.zeros(512, 8),), nn.MSELoss(), y, devices=8, cluster=cluster))
    assert "return the loss alone" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("strategy", "feeding"),
    [
        ("full_batch", "the whole batch"),
        ("data_parallel", "its part of the batch"),
        (((2, 1, 1), (2, 1, 1)), "slices of the inputs"),
    ],
)
def test_the_first_line_says_what_a_device_is_fed(strategy: Any, feeding: str) -> None:
    plan = tower({}, dataset_strategy=strategy)
    for text in (str(plan), repr(plan), plan._repr_html_()):
        assert f"8 devices of h100x8, each fed {feeding}" in text
    table = io.StringIO()
    explain(plan, table, width=300)
    assert inputs_line(plan) in table.getvalue()


@pytest.mark.parametrize("mode", ["stand_alone", "hybrid_parallel"])
def test_modes_that_cut_nothing(mode: str) -> None:
    plan = sw.plan(nn.Linear(8, 8), (torch.zeros(16, 8),), parallel_mode=mode, devices=4)
    message = {"stand_alone": "the model: one device", "hybrid_parallel": "every rank runs its own program"}
    assert message[mode] in str(plan.describe())


def test_layers_by_their_paths() -> None:
    inside = {"layers.0.up": ("layers", 0), "layers.0.down": ("layers", 0), "layers.1.up": ("layers", 1)}
    assert layer_of([*inside, "head", "0"]) == inside
    assert layer_of(["0", "1", "2"]) == {} == layer_of(["experts.0", "experts.1"])
    deep = layer_of(["h.0.experts.0.up", "h.0.experts.0.down", "h.0.mixer"])
    assert set(deep.values()) == {("h", 0)}, "the outermost"


def test_axes_as_text() -> None:
    digits = sw.Digit(4, 1)
    assert str(Axis("tensor", (digits,), ("column",), ("data",), ("gate",))) == (
        "tensor 4 (column; batch cut between; not gate)"
    )
    assert str(PlanPart((), (Axis("data", (digits,), ("data",)),), 2)) == "data 4 x 2 replicas"


@pytest.mark.parametrize("count", [1, 40])
def test_short_texts_of_plans(count: int) -> None:
    """A repr is a line, a str fits a screen, for any number of layers that differ."""
    marks = [{"up": ((8 >> i % 3, 1, 1), (1 << i % 3, 1), (1 << i % 3,))} for i in range(count)]
    plan = tower(*marks)
    assert len(repr(plan)) < 200 and "\n" not in repr(plan)
    assert len(str(plan).splitlines()) <= 24 and str(plan).startswith("semi_auto on 8 devices")
    assert all(len(repr(operator)) < 250 and repr(operator).count("\n") < 3 for operator in plan.operators)


def test_html_is_escaped_and_alone() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"<b>": nn.Linear(8, 8), "&c": nn.Linear(8, 8)})

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["&c"](self.parts["<b>"](x))

    net, x = Odd(), torch.zeros(16, 8)
    sw.shard(net.parts["<b>"], ((8, 1), (1, 1), (1,))), sw.shard(net.parts["&c"], ((1, 8), (1, 8), (1,)))
    plan = sw.plan(net, (x,), devices=8)
    report = sw.verify(net, (x.double(),), x.double(), loss_fn=nn.MSELoss(), devices=8, steps=1)
    pages = plan, plan.operators[0], plan.describe(), plan.parameters["parts.<b>.weight"].layout, report
    for page in (each._repr_html_() for each in pages):
        assert page.startswith("<div>") and page.endswith("</div>") and "<b>.weight" not in page
        assert not re.search(r"src=|href=|<script", page)
    assert "parts.&lt;b&gt;" in plan._repr_html_() and "tensor 8 (row)" in plan._repr_html_()
    assert repr(report).count("\n") < 3 and repr(report).startswith("<ok: semi_auto on 8 devices")

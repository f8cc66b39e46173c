"""The goldens of operator strategies: what the original system compiles for the same networks."""

from __future__ import annotations

import json
import re

import pytest
import torch
from golden_reading import (
    SHARED,
    OnParameters,
    layout_of,
    ranks_of,
    read_call,
    read_extra,
    sent_by_golden,
    torch_operator,
)
from one_device import assert_as_one_device
from torch import nn

import shardwright as sw

FOLDER = SHARED / "goldens" / "semi_auto"
CASES = {c["case"]: c for c in json.loads((FOLDER / "operators.json").read_text())["cases"]}
HONOURED = {
    "op_matmul_out_invalid": "one more conversion brings the output to the layout that was asked for",
    "op_layernorm_axis_split": "the statistics of the parts are put together",
    "op_maxpool_w_k_gt_s": "neighbours exchange the columns that windows of both read",
}


def sent(plan: sw.Plan, rank: int, *, outputs: bool = False) -> int:
    """Bytes that a rank sends in conversions and operators' sums, forward and backward."""
    return sum(c.sent for c in plan.collectives(rank) if c.cause != "parameter" and (outputs or c.operator != "output"))


def golden_sent(collectives: list[dict], devices: int) -> float:
    return sum(sent_by_golden(c, devices) for c in collectives if not c["kind"].startswith("gradient sum"))


ONE_OPERATOR = [c for c in CASES.values() if c["kind"].startswith("one operator")]


@pytest.mark.parametrize("name", [c["case"] for c in ONE_OPERATOR])
def test_one_operator(name: str) -> None:
    case = CASES[name]
    call, extra = read_call(case["call"]), read_extra(case["extra"])
    function = torch_operator(call, extra)
    if call.name == "Gather":
        call.out_strategy = left_by_gather(case)
    net = OnParameters(function, eval(case["shapes"]), call, extra.dtypes)
    if "error" in case["expect"] and name not in HONOURED:
        with pytest.raises(sw.ShardwrightError) as raised:
            sw.plan(net, (), devices=case["devices"])
        assert not isinstance(raised.value, sw.MissingRuleError)
        assert raised.value.operator.startswith("operator") and raised.value.legal
        return
    plan = sw.plan(net, (), devices=case["devices"])
    if "error" in case["expect"]:
        operator = plan.operator("operator")
        assert operator.in_strategy == tuple(call.in_strategy), HONOURED[name]
        assert operator.out_strategy == tuple(call.out_strategy or operator.out_strategy), HONOURED[name]
        assert_as_one_device(net.double(), (), devices=case["devices"])
        return
    for parameter, slices in case["expect"]["slices"].items():
        for rank, expected in slices.items():
            got = [[s.start, s.stop] for s in plan.parameters[parameter].slice(int(rank))]
            assert got == expected, (parameter, rank)
    expected = case["expect"]["collectives_of_rank_5"]
    mine = [c for c in plan.collectives(5) if c.phase == "forward" and c.operator != "output"]
    if (
        call.name == "BatchNorm"
    ):  # the original's list has no exchange that makes the statistics those of the whole batch
        assert [(c.op, c.ranks) for c in mine] == [("all_gather", sw_group(5, plan.parameters["p1"].layout))]
        mine = []
    completing = [c for c in mine if c.cause == "operator"]
    golden = [c for c in expected if c["kind"] == "inside the operator" or call.name == "Gather"]
    assert all(
        g["ranks"] is None or c.ranks == ranks_of(g["ranks"], case["devices"])
        for c, g in zip(completing, golden, strict=True)
    )
    assert [list(c.shape) for c in completing] == [c["in"][0] for c in golden]
    assert sum(c.sent for c in mine) <= golden_sent(expected, case["devices"])


def left_by_gather(case: dict) -> tuple | None:
    """The out_strategy that says where the original leaves the sum of a gather from a table cut by rows: on the ranks
    that hold the rows, each a part of the result. (Its records call that sum a conversion, and leave out its ranks.)"""
    for c in case["expect"]["collectives_of_rank_5"]:
        if c["op"] == "ReduceScatter":
            rows = c["in"][0][0] // c["out"][0][0]
            return (sw.Layout((case["devices"] // rows, rows), ("rest", "rows"))("rows", "None", "None"),)
    return None


class ReluAbs(nn.Module):
    def __init__(self, first: tuple, second: tuple, between=lambda x: x) -> None:
        super().__init__()
        self.relu, self.abs = sw.shard(torch.relu, first), sw.shard(torch.abs, second)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.abs(self.between(self.relu(x)))


def strategy(text: str) -> tuple:
    """``((8, 1))``: one tuple per input, written without the comma."""
    return (eval(text),)


@pytest.mark.parametrize("name", [c for c in CASES if c.startswith("redist_")])
def test_two_pointwise_operators(name: str, figures) -> None:
    case = CASES[name]
    first, second = map(strategy, case["strategies"])
    dataset = case["dataset_strategy"]
    if dataset != "full_batch":
        # The one Layout case is the same placement as rows cut two ways.
        dataset = (tuple(eval(dataset)[0]),) if "Layout" not in dataset else ((2, 1),)
    plan = sw.plan(ReluAbs(first, second), (torch.empty(case["x"]),), devices=8, dataset_strategy=dataset)
    mine = [c for c in plan.collectives(5) if c.phase == "forward" and c.operator != "output"]
    theirs = golden_sent(case["expect"]["collectives_of_rank_5"], 8)
    figures("forward conversions between two operators", sum(c.sent for c in mine), theirs)
    assert sum(c.sent for c in mine) <= theirs
    assert plan.operator("relu").in_strategy == first and plan.operator("abs").in_strategy == second


@pytest.mark.parametrize("name", [c for c in CASES if c.startswith("reshape_")])
def test_reshape_between(name: str, figures) -> None:
    case = CASES[name]
    source, target, first, second = (eval(t) for t in re.findall(r"\(\d[\d, ]*\)", case["what"]))
    net = ReluAbs((first,), (second,), lambda x: x.reshape(target))
    plan = sw.plan(net, (torch.empty(source),), devices=8)
    mine = [c for c in plan.collectives(5) if c.phase == "forward" and c.operator != "output"]
    theirs = golden_sent(case["expect"]["collectives_of_rank_5"], 8)
    figures("forward conversions around a reshape", sum(c.sent for c in mine), theirs)
    assert sum(c.sent for c in mine) <= theirs


# -- networks ----------------------------------------------------------------------------------------------------------


class Tutorial(nn.Module):
    """flatten, three products, two ReLUs; marked by tuples or by Layouts."""

    def __init__(self, layouts: bool) -> None:
        super().__init__()
        self.fc1_weight = nn.Parameter(torch.randn(784, 512))
        self.fc2_weight = nn.Parameter(torch.randn(512, 512))
        self.fc3_weight = nn.Parameter(torch.randn(512, 10))
        first, second = ((2, 4), (4, 1)), ((1, 8), (8, 1))
        if layouts:
            layout, tp = sw.Layout((2, 2, 2), ("dp", "sp", "mp")), sw.Layout((8,), ("tp",))
            first = (layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None"))
            second = (tp("None", "tp"), tp("tp", "None"))
        self.matmul1, self.relu1 = sw.shard(torch.matmul, first), sw.shard(torch.relu, ((4, 1),))
        self.matmul2, self.relu2 = sw.shard(torch.matmul, second), sw.shard(torch.relu, ((8, 1),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu1(self.matmul1(x.flatten(1), self.fc1_weight))
        return self.relu2(self.matmul2(x, self.fc2_weight)) @ self.fc3_weight


MARKED = {"matmul1", "matmul2", "relu1", "relu2"}


def load(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())["ranks"]


@pytest.mark.parametrize(
    ("name", "layouts", "train"),
    [
        ("operator_tutorial_forward_full_batch", False, False),
        ("operator_tutorial_train_data_parallel_ds", False, True),
        ("layout_tutorial_forward_full_batch", True, False),
    ],
)
def test_tutorial_networks(name: str, layouts: bool, train: bool, figures) -> None:
    ranks = load(name)
    batch = ranks["0"]["inputs"][0][0][0] * (8 if train else 1)
    x = torch.empty(batch, 1, 28, 28, device="meta")
    loss = (
        {"loss_fn": nn.CrossEntropyLoss(), "targets": torch.empty(batch, dtype=torch.int64, device="meta")}
        if train
        else {}
    )
    plan = sw.plan(
        Tutorial(layouts), (x,), devices=8, dataset_strategy="data_parallel" if train else "full_batch", **loss
    )
    for rank, golden in ranks.items():
        compare_network(plan, int(rank), golden, MARKED, figures, name, train)


def compare_network(plan: sw.Plan, rank: int, golden: dict, marked: set[str], figures, name: str, train: bool) -> None:
    for parameter, record in golden["parameters"].items():
        if parameter == "x":
            continue
        expected = layout_of(record)
        assert plan.parameters[parameter].layout == expected, parameter
        assert plan.parameters[parameter].slice(rank) == expected.slice(record["shape"], rank)
    for record in golden["operators"]:
        if record["name"] not in marked:
            continue
        operator = plan.operator(record["name"])
        inputs, outputs = operator.local_shapes(rank)
        assert list(map(list, inputs)) == record["local_inputs"], record["name"]
        assert list(map(list, outputs)) == record["local_outputs"], record["name"]
    for record in golden["collectives"]:
        if record["kind"] == "inside the operator" and record["in"] != [[]]:
            completing = [
                c.ranks
                for c in plan.collectives(rank)
                if c.cause == "operator" and c.phase == "forward" and list(c.shape) == record["in"][0]
            ]
            assert ranks_of(record["ranks"], plan.devices) in completing
    summed = sorted(c["in"][0] for c in golden["collectives"] if c["kind"].startswith("gradient sum"))
    if train:
        mine = [c for c in plan.collectives(rank) if c.phase == "gradient"]
        assert sorted(list(c.shape) for c in mine) == summed
        for c in mine:
            parameter = next(p for p in plan.parameters.values() if p.local_shape(rank) == c.shape)
            assert c.ranks == sw_group(rank, parameter.layout)
    theirs = golden_sent(golden["collectives"], plan.devices)
    figures(f"{name}, rank {rank}", sent(plan, rank), theirs)
    assert sent(plan, rank) <= theirs


def sw_group(rank: int, layout: sw.Layout) -> tuple[int, ...]:
    """The ranks that hold the same slice as `rank`: over them a gradient is summed."""
    return tuple(
        r
        for r in range(layout.devices)
        if layout.slice((64 * 1024,) * len(layout.dims), r) == layout.slice((64 * 1024,) * len(layout.dims), rank)
    )


class OutMatmul(nn.Module):
    def __init__(self, out: tuple) -> None:
        super().__init__()
        layout = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))
        self.matmul = sw.shard(
            torch.matmul, (layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")), (layout(*out),)
        )

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.matmul(x, w)


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("layout_matmul_out_allreduce", ("mp", "None")),
        ("layout_matmul_out_reduce_scatter", (("mp", "sp", "dp"), "None")),
        ("layout_matmul_out_wrong", (("sp", "dp", "mp"), "None")),
    ],
)
def test_out_strategy(name: str, out: tuple, figures) -> None:
    ranks = load(name)
    plan = sw.plan(OutMatmul(out), (torch.empty(64, 64), torch.empty(64, 32)), devices=8)
    for rank, golden in ranks.items():
        mine = [c for c in plan.collectives(int(rank)) if c.operator != "output"]
        if "error" in golden:
            # Refused by the original; one more conversion makes it right here, and the result is compared below.
            assert plan.operator("matmul").out_layouts[0] == sw.Layout((2, 2, 2), ("dp", "sp", "mp"))(*out)
            continue
        expected = golden["collectives"]
        assert [c.ranks for c in mine] == [ranks_of(c["ranks"], 8) for c in expected]
        assert [list(c.shape) for c in mine] == [c["in"][0] for c in expected]
        figures(name, sum(c.sent for c in mine), golden_sent(expected, 8))
        assert sum(c.sent for c in mine) <= golden_sent(expected, 8)
    x, w = torch.randn(64, 64, dtype=torch.float64), torch.randn(64, 32, dtype=torch.float64)
    sw.init(devices=8)
    model = sw.AutoParallel(OutMatmul(out)).dataset_strategy("full_batch")
    torch.testing.assert_close(model(x, w), x @ w)


class MatmulSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 128))
        self.fc = sw.shard(torch.matmul, ((1, 1), (1, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x, self.weight).sum(-1)


def test_basics_matmul_sum_on_two_devices(figures) -> None:
    for rank, golden in load("basics_matmul_sum_2_devices").items():
        if int(rank) >= 2:  # compiled as "rank 5" of two devices
            continue
        plan = sw.plan(MatmulSum(), (torch.empty(64, 512),), devices=2, dataset_strategy="data_parallel")
        compare_network(plan, int(rank), golden, {"fc"}, figures, "basics_matmul_sum", train=False)

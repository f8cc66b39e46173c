"""The goldens of optimizer parallel: which parameters are stored in parts, over which ranks, and what that sends."""

from __future__ import annotations

import json
import math

import pytest
import torch
from golden_reading import SHARED, layout_of, ranks_of, sent_by_golden
from test_goldens_semi_auto import sw_group
from torch import nn

import shardwright as sw

FOLDER = SHARED / "goldens" / "models"
DEVICES, BATCH, WIDTH, HIDDEN = 8, 64, 256, 512
SETTINGS = {
    "semi_baseline": None,
    "optpar_default": {},
    "optpar_level3": {"optimizer_level": "level3"},
    "optpar_shard_size2": {"shard_size": 2},
    "optpar_threshold0": {"threshold": 0},
    "optpar_threshold_512KB_equal": {"threshold": 512},
}
OURS = {"m1": "matmul1", "r": "relu", "m2": "matmul2", "ba": "add"}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.b = (
            nn.Parameter(torch.empty(*shape, device="meta")) for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH,))
        )
        self.matmul1, self.relu = sw.shard(torch.matmul, ((4, 1), (1, 2))), sw.shard(torch.relu, ((4, 2),))
        self.matmul2, self.add = sw.shard(torch.matmul, ((4, 2), (2, 1))), sw.shard(torch.add, ((4, 1), (1,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(self.matmul2(self.relu(self.matmul1(x, self.w1)), self.w2), self.b)


def ranks(name: str) -> dict[int, dict]:
    return {int(rank): golden for rank, golden in json.loads((FOLDER / f"{name}.json").read_text())["ranks"].items()}


def planned(hsdp: dict | None) -> sw.Plan:
    x = torch.empty(BATCH, WIDTH, device="meta")
    return sw.plan(Network(), (x,), nn.MSELoss(), x, devices=DEVICES, dataset_strategy="data_parallel", hsdp=hsdp)


def is_storage(collective: dict) -> bool:
    return "parallel_optimizer" in collective["kind"]


def is_gradient_sum(collective: dict) -> bool:
    return collective["kind"].startswith("gradient sum")


@pytest.mark.parametrize("name", SETTINGS)
def test_optimizer_parallel(name: str, figures) -> None:
    plan = planned(SETTINGS[name])
    for rank, golden in ranks(name).items():
        gathers = [c for c in golden["collectives"] if is_storage(c) and c["op"] == "AllGather"]
        for parameter, record in golden["parameters"].items():
            ours, used = plan.parameters[parameter], layout_of(record)
            assert ours.layout == used
            cut = cut_over(record)
            rows, *others = used.slice(record["shape"], rank)
            part = (math.ceil((rows.stop - rows.start) / cut), *used.local_shape(record["shape"])[1:])
            assert ours.local_shape(rank) == part
            if cut == 1:
                assert ours.storage == used
                continue
            # The ranks whose parts, in their order, are the slice of the use.
            members = next(ranks_of(c["ranks"], DEVICES) for c in gathers if c["out"] == [record["slice_shape"]])
            assert len(members) == cut and rank in members
            parts = [ours.slice(r) for r in members]
            assert [p[0].start for p in parts] == [rows.start + i * (rows.stop - rows.start) // cut for i in range(cut)]
            assert parts[-1][0].stop == rows.stop and all(list(p[1:]) == others for p in parts)
        for record in golden["operators"][:4]:
            inputs, outputs = plan.operator(OURS[record["name"]]).local_shapes(rank)
            assert [*map(list, inputs), *map(list, outputs)] == record["local_inputs"] + record["local_outputs"]
        mine = plan.collectives(rank)
        completing = [(c.ranks, list(c.shape)) for c in mine if c.cause == "operator" and c.phase == "forward"]
        assert completing == [
            (ranks_of(c["ranks"], DEVICES), c["in"][0])
            for c in golden["collectives"]
            if c["kind"] == "inside the operator"
        ]

        ours = [(c.ranks, list(c.shape)) for c in mine if c.phase == "storage"]
        assert sorted(ours) == sorted((ranks_of(c["ranks"], DEVICES), c["in"][0]) for c in gathers)
        stored = sum(cut_over(record) > 1 for record in golden["parameters"].values())
        assert [c.again for c in mine if c.phase == "storage"].count(True) == len(gathers) - stored
        scattered = [c for c in mine if c.op == "reduce_scatter"]
        theirs = [c for c in golden["collectives"] if c["op"] == "ReduceScatter"]
        # What they scatter of the bias are four times two equal terms; ours scatters four, and slices.
        assert sorted(list(c.shape) for c in scattered if len(c.shape) > 1) == sorted(
            c["in"][0] for c in theirs if len(c["in"][0]) > 1
        )
        assert {c.ranks for c in scattered if len(c.shape) > 1} <= {ranks_of(c["ranks"], DEVICES) for c in gathers}
        summed = [c for c in mine if c.phase == "gradient" and c.op == "all_reduce"]
        assert sorted(list(c.shape) for c in summed) == sorted(
            c["in"][0] for c in golden["collectives"] if is_gradient_sum(c)
        )
        for c in summed:
            parameter = next(p for p in plan.parameters.values() if p.local_shape(rank) == c.shape)
            assert set(c.ranks) <= set(sw_group(rank, parameter.storage))
            assert c.ranks == sw_group(rank, parameter.storage) or parameter.name == "b", "repeated work is summed once"

        conversions = [c for c in golden["collectives"] if not is_storage(c) and not is_gradient_sum(c)]
        others = [c for c in golden["collectives"] if is_storage(c) or is_gradient_sum(c)]
        for what, sent, theirs in (
            (
                "conversions",
                sum(c.sent for c in mine if c.cause != "parameter"),
                sum(sent_by_golden(c, DEVICES) for c in conversions),
            ),
            (
                "parameters",
                sum(c.sent for c in mine if c.cause == "parameter"),
                sum(sent_by_golden(c | {"ranks": group_of(c, golden, gathers)}, DEVICES) for c in others),
            ),
        ):
            figures(f"{name}, {what}, rank {rank}", sent, theirs)
            assert sent <= theirs, what


def cut_over(record: dict) -> int:
    """Over how many ranks a parameter's slice is stored in parts; the name of their group begins with that."""
    group = record["opt_shard_group"]
    return DEVICES if group == "hccl_world_group" else int(group.split("-")[0]) if group else 1


def group_of(collective: dict, golden: dict, gathers: list[dict]) -> str | None:
    """The ranks of a gradient's sum, which the records of all-reduces leave out: as many as hold the same part."""
    if collective["ranks"] is not None or collective["op"] != "AllReduce":
        return collective["ranks"]
    whole = next((p for p in golden["parameters"].values() if p["slice_shape"] == collective["in"][0]), None)
    if whole is not None:
        return "-".join(map(str, sw_group(0, layout_of(whole))))
    cut = next(c for c in gathers if c["in"] == collective["in"])
    use = next(p for p in golden["parameters"].values() if p["slice_shape"] == cut["out"][0])
    return "-".join(map(str, range(len(sw_group(0, layout_of(use))) // len(cut["ranks"].split("-")))))


class TwoUsers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
        self.first, self.second = sw.shard(torch.matmul, ((4, 1), (1, 2))), sw.shard(torch.matmul, ((4, 2), (2, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, self.w), self.w)


@pytest.mark.parametrize("hsdp", [None, {}])
def test_a_parameter_wanted_in_two_layouts_is_refused(hsdp) -> None:
    assert all("multiple users" in golden["error"][1] for golden in ranks("param_two_users_conflict").values())
    x = torch.empty(BATCH, WIDTH, device="meta")
    with pytest.raises(sw.PlanError, match="'w'.*first.*second"):
        sw.plan(TwoUsers(), (x,), nn.MSELoss(), x, devices=DEVICES, dataset_strategy="data_parallel", hsdp=hsdp)

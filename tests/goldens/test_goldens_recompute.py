"""The goldens of two feed-forward blocks, the first of them recomputed: with its collectives, and without."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from golden_reading import SHARED, layout_of, ranks_of, sent_by_golden
from test_goldens_semi_auto import golden_sent, sent, sw_group
from torch import nn

import shardwright as sw

NAMES = {True: "recompute_block_default", False: "recompute_block_no_mp_comm"}
GOLDEN = {
    again: json.loads((SHARED / f"goldens/models/{name}.json").read_text())["ranks"] for again, name in NAMES.items()
}


class Biased(nn.Module):
    def __init__(self, ins: int, outs: int, product: tuple, added: tuple) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outs, ins)), nn.Parameter(torch.randn(outs))
        self.product, self.added = sw.shard(F.linear, product), sw.shard(torch.add, added)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.added(self.product(x, self.weight), self.bias)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d1 = Biased(256, 512, ((4, 1), (2, 1)), ((4, 2), (2,)))
        self.d2 = Biased(512, 256, ((4, 2), (1, 2)), ((4, 1), (1,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d2(torch.relu(self.d1(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b[1](self.b[0](x))


def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((x - target) ** 2).mean()


def planned(again: bool | None) -> sw.Plan:
    with torch.device("meta"):
        net, x = Network(), torch.empty(64, 256)
    if again is not None:
        sw.recompute(net.b[0], mp_comm_recompute=again)
    return sw.plan(net, (x,), loss, x, devices=8, dataset_strategy="data_parallel")


@pytest.mark.parametrize("again", [True, False], ids=NAMES.values())
@pytest.mark.parametrize("rank", [0, 5])
def test_recomputed_block(again: bool, rank: int, figures) -> None:
    plan, golden = planned(again), GOLDEN[again][str(rank)]
    for name, record in golden["parameters"].items():
        layout = layout_of(record)
        assert plan.parameters[name].layout == layout, name
        assert plan.parameters[name].slice(rank) == layout.slice(record["shape"], rank)
    marked = [f"b.{b}.{d}.{op}" for b in (0, 1) for d in ("d1", "d2") for op in ("product", "added")]
    theirs = [o for o in golden["operators"] if o["op"] in ("MatMul", "BiasAdd")]
    for name, record in zip(marked, theirs):
        inputs, outputs = plan.operator(name).local_shapes(rank)
        assert [*map(list, inputs), *map(list, outputs)] == record["local_inputs"] + record["local_outputs"], name

    mine = plan.collectives(rank)
    completing = [(c.ranks, list(c.shape)) for c in mine if c.cause == "operator" and c.phase == "forward"]
    for c in golden["collectives"]:
        if c["kind"] == "inside the operator":
            assert (ranks_of(c["ranks"], 8), c["in"][0]) in completing
    sums = [c for c in mine if c.phase == "gradient"]
    assert sorted(list(c.shape) for c in sums) == sorted(
        c["in"][0] for c in golden["collectives"] if c["kind"].startswith("gradient sum")
    )
    # Of d2's whole bias as of the cut weights: the addition is done twice, its gradient is not summed twice.
    assert {c.ranks for c in sums} == {sw_group(rank, plan.parameters["b.0.d1.weight"].layout)}
    figures(f"{NAMES[again]}, rank {rank}", sent(plan, rank), golden_sent(golden["collectives"], 8))
    assert sent(plan, rank) <= golden_sent(golden["collectives"], 8)


@pytest.mark.parametrize("rank", [0, 5])
def test_what_is_sent_again(rank: int) -> None:
    # What the original sends again is what it sends in the one case and not in the other.
    theirs = Counter(json.dumps(c) for c in GOLDEN[True][str(rank)]["collectives"])
    theirs -= Counter(json.dumps(c) for c in GOLDEN[False][str(rank)]["collectives"])
    golden = [json.loads(c) for c in theirs.elements()]
    assert [c["op"] for c in golden] == ["AllGather"] * 3
    plain, default, kept = (planned(again).collectives(rank) for again in (None, True, False))
    again = [c for c in default if c.again]
    assert {(c.op, c.phase, c.ranks) for c in again} <= {
        (op, "backward", ranks_of(golden[0]["ranks"], 8)) for op in ("all_gather", "all_to_all")
    }
    assert 0 < sum(c.sent for c in again) <= sum(sent_by_golden(c, 8) for c in golden)
    # The sum of the block's last product is not: nobody saves it.
    assert not any(c.op == "all_reduce" for c in again)
    assert [c for c in default if not c.again] == list(plain) == list(kept)
    inside = [c for c in again if c.operator.startswith("b.0") or c.operator == "relu"]
    assert len(inside) == len(again)

"""The golden of a transformer block: products split as in tensor parallelism, the rest along the batch."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from golden_reading import SHARED, layout_of, ranks_of, sent_by_golden
from test_goldens_semi_auto import golden_sent, sent, sw_group
from torch import nn

import shardwright as sw

GOLDEN = json.loads((SHARED / "goldens/models/transformer_block_semi_auto_megatron.json").read_text())["ranks"]
BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 8, 128, 512, 16, 2048
COLUMNS, ROWS = ((2, 1), (4, 1)), ((2, 4), (1, 4))
MARKED = ("at.q", "at.k", "at.v", "at.o", "f1", "f2")


class Biased(nn.Module):
    """A marked product and, unmarked, the bias that is added to it."""

    def __init__(self, ins: int, outs: int, strategy: tuple) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outs, ins)), nn.Parameter(torch.randn(outs))
        self.product = sw.Operator(F.linear).shard(strategy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight) + self.bias


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5, -1) @ v


class Attention(nn.Module):
    def __init__(self, attend) -> None:
        super().__init__()
        self.q, self.k, self.v = (Biased(WIDTH, WIDTH, COLUMNS) for _ in range(3))
        self.o, self.attend = Biased(WIDTH, WIDTH, ROWS), attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).reshape(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v).transpose(1, 2).reshape(BATCH * LENGTH, WIDTH))


class Block(nn.Module):
    def __init__(self, attend) -> None:
        super().__init__()
        self.ln1, self.ln2, self.at = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(attend)
        self.f1, self.f2 = Biased(WIDTH, HIDDEN, COLUMNS), Biased(HIDDEN, WIDTH, ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.at(self.ln1(x))
        return x + self.f2(F.gelu(self.f1(self.ln2(x))))


@pytest.mark.parametrize("attend", [written_out, F.scaled_dot_product_attention], ids=["written out", "one operator"])
def test_transformer_block(attend, figures) -> None:
    with torch.device("meta"):
        net, x = Block(attend), torch.empty(BATCH * LENGTH, WIDTH)
    plan = sw.plan(net, (x,), F.mse_loss, x, devices=8)
    ours = {"gamma": "weight", "beta": "bias"}
    for rank, golden in ((int(rank), golden) for rank, golden in GOLDEN.items()):
        layouts = {}
        for name, record in golden["parameters"].items():
            name = ".".join(ours.get(part, part) for part in name.split("."))
            layouts[name] = layout_of(record)
            assert plan.parameters[name].layout == layouts[name], name
            assert plan.parameters[name].slice(rank) == layouts[name].slice(record["shape"], rank)
        assert layouts.keys() == plan.parameters.keys()

        theirs = [o for o in golden["operators"] if o["op"] == "MatMul"]
        for name, record in zip(MARKED, theirs, strict=True):
            inputs, outputs = plan.operator(f"{name}.product").local_shapes(rank)
            assert [*map(list, inputs), *map(list, outputs)] == record["local_inputs"] + record["local_outputs"], name

        completing = [
            (c.ranks, list(c.shape)) for c in plan.collectives(rank) if c.cause == "operator" and c.phase == "forward"
        ]
        for c in golden["collectives"]:
            if c["kind"] == "inside the operator":
                assert (ranks_of(c["ranks"], 8), c["in"][0]) in completing

        sums = [c for c in plan.collectives(rank) if c.phase == "gradient"]
        assert sorted(list(c.shape) for c in sums) == sorted(
            c["in"][0] for c in golden["collectives"] if c["kind"].startswith("gradient sum")
        )
        assert {(c.shape, c.ranks) for c in sums} == {
            (layout.local_shape(plan.parameters[name].shape), sw_group(rank, layout))
            for name, layout in layouts.items()
        }

        assert sent(plan, rank) <= golden_sent(golden["collectives"], 8)
        figures(
            f"transformer block, {attend.__name__}, rank {rank}",
            sent(plan, rank),
            golden_sent(golden["collectives"], 8),
        )
        assert sum(c.sent for c in sums) <= sum(
            sent_by_golden(c, 8) for c in golden["collectives"] if c["kind"].startswith("gradient sum")
        )

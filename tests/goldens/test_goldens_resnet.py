"""The golden of a small ResNet in semi_auto with nothing marked: what the original system compiles for it."""

from __future__ import annotations

import json

import pytest
import torch
from golden_reading import SHARED, layout_of, sent_by_golden
from resnet_like import KINDS, NAMES, ResNetLike, expanded_cross_entropy

import shardwright as sw

DEVICES = 8
GOLDEN = json.loads((SHARED / "goldens" / "models" / "resnet_like_semi_auto_default.json").read_text())["ranks"]


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    shape = GOLDEN["0"]["inputs"][0][0]
    batch = shape[0] * DEVICES
    with torch.device("meta"):
        net, x, target = ResNetLike(), torch.empty(batch, *shape[1:]), torch.empty(batch, dtype=torch.int64)
    return sw.plan(net, (x,), expanded_cross_entropy, target, devices=DEVICES, dataset_strategy="data_parallel")


@pytest.mark.parametrize("rank", GOLDEN)
def test_slices_of_parameters(plan: sw.Plan, rank: str) -> None:
    for name, record in GOLDEN[rank]["parameters"].items():
        module, _, last = name.rpartition(".")
        mine = plan.parameters[f"{module}.{NAMES.get(last, last)}"]
        assert list(mine.shape) == record["shape"]
        assert mine.slice(int(rank)) == layout_of(record).slice(record["shape"], int(rank)), name
    named = {n for n in plan.parameters if not n.endswith("num_batches_tracked")}
    assert len(named) == len(GOLDEN[rank]["parameters"])


@pytest.mark.parametrize("rank", GOLDEN)
def test_local_shapes(plan: sw.Plan, rank: str) -> None:
    """Shapes of the input and the weight of the operators that both name alike, in order."""
    theirs = [(KINDS[o["op"]], o["local_inputs"][:2]) for o in GOLDEN[rank]["operators"] if o["op"] in KINDS]
    mine = [(o.op, [*map(list, o.local_shapes(int(rank))[0][:2])]) for o in plan.operators if o.op in KINDS.values()]
    assert mine == theirs


@pytest.mark.parametrize("rank", GOLDEN)
def test_gradient_sums(plan: sw.Plan, rank: str) -> None:
    """One for every parameter, over all devices."""
    theirs = [c["in"][0] for c in GOLDEN[rank]["collectives"] if c["kind"].startswith("gradient sum")]
    mine = [c for c in plan.collectives(int(rank)) if c.phase == "gradient"]
    assert sorted(list(c.shape) for c in mine) == sorted(theirs)
    assert {(c.op, c.ranks) for c in mine} == {("all_reduce", tuple(range(DEVICES)))}


@pytest.mark.parametrize("rank", GOLDEN)
def test_bytes(plan: sw.Plan, rank: str, figures) -> None:
    """Batch norms apart, which the original's list leaves without an exchange: here their statistics are those of the
    whole batch, by one exchange forward and one backward each."""
    golden = GOLDEN[rank]["collectives"]
    theirs = sum(sent_by_golden(c, DEVICES) for c in golden if not c["kind"].startswith("gradient sum"))
    moved = [c for c in plan.collectives(int(rank)) if c.cause != "parameter"]
    layers = [o.name for o in plan.operators if o.op == "batch_norm"]
    for name in layers:
        assert [(c.op, c.phase) for c in moved if c.operator == name] == [
            ("all_gather", "forward"),
            ("all_reduce", "backward"),
        ]
    mine = sum(c.sent for c in moved if c.operator not in layers)
    figures(f"resnet_like, rank {rank}", mine, theirs)
    assert mine <= theirs
    assert len(layers) == 9

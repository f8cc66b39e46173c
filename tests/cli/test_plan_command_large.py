"""`shardwright plan` on a script that trains the whole of GPT-3, for a thousand devices and more than that."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest
from test_plan_command import _as_a_process_of_its_own, command  # noqa: F401  a fixture of every test here

import shardwright as sw
from shardwright.layout import digits_size
from shardwright.report.format import cost_text, size_text, time_text
from shardwright.report.operator_names import OperatorNames
from shardwright.report.table_elements import operators_text

#: What a user might train; the weights of 175 billion parameters would be 650 GiB.
SCRIPT = """
import sys
import torch
import shardwright as sw
from gpt import GPT
from gpt3 import loss_of

layers = int(sys.argv[1])
sw.init()
net = GPT(vocabulary=50257, length=2048, layers=layers, width=12288, heads=96)
model = sw.AutoParallel(net, loss_fn=loss_of, parallel_mode="dynamic_programming").dataset_strategy("full_batch")
optimizer = torch.optim.Adam(model.parameters())
tokens = torch.zeros(1536, 2048, dtype=torch.long)
model(tokens, tokens).backward()
print("the script goes no further")
"""


def shown(plan: sw.Plan, out: str) -> None:
    """The step's time, memory by kind and the dearest communications are printed, as the plan has them."""
    lines = out.splitlines()
    price, kinds = plan.price, plan.timeline.kinds
    assert lines[0] == (
        f"dynamic_programming on {plan.devices} devices of {plan.cluster.name}: {len(plan.operators)} "
        f"operators, plan {plan.fingerprint}"
    )
    described = str(plan.describe()).splitlines()
    assert lines[1 : len(described)] == described[1:], "the plan in the field's words, below its first line"
    step = next(i for i, line in enumerate(lines) if line.startswith("a step takes "))
    assert lines[step].startswith(f"a step takes {time_text(price.total)}: forward {time_text(price.forward)}, ")
    assert lines[step + 1].startswith("with messages beside computation, as on a library such as NCCL, a step takes ")
    assert lines[step + 2].startswith("waited for longest: ")
    assert lines[step + 3] == cost_text(plan.cost, plan.bound, plan.gap)
    assert {"parameters", "gradients", "optimizer", "activations"} <= kinds.keys()
    for kind, count in (*kinds.items(), ("all together", sum(kinds.values()))):
        (line,) = (line for line in lines if line.startswith(f" {kind}"))
        assert line.split()[-2:] == size_text(count).split()
    assert sum(kinds.values()) == pytest.approx(plan.peak)
    at = next(i for i, line in enumerate(lines) if line.startswith(" communication"))
    alike: dict[tuple, float] = {}
    for c in price.collectives:
        key = c.kind, digits_size(c.digits), size_text(c.bytes), c.phase
        alike[key] = alike.get(key, 0.0) + c.seconds
    (kind, ranks, size, phase), _ = max(alike.items(), key=lambda entry: entry[1])
    cells = " ".join(line.strip() for line in takewhile(lambda line: line.startswith("    "), lines[at + 3 :]))
    assert lines[at + 2].strip() == kind
    assert (
        cells.startswith(f"ranks: {ranks}; over: ") and f"; bytes: {size}; " in cells and f"; phase: {phase}; " in cells
    )
    mine = [
        c.operator
        for c in price.collectives
        if (c.kind, digits_size(c.digits), size_text(c.bytes), c.phase) == (kind, ranks, size, phase)
    ]
    assert cells.endswith(f"; for: {operators_text(OperatorNames(plan), mine)}"), "and whose it is"
    assert "IB NDR" in "".join(lines[at + 2 :]), "and where it goes"


def written_plan(script: Path, layers: int, capsys: pytest.CaptureFixture, *words: object) -> sw.Plan:
    """The plan that the command writes and shows."""
    script.write_text(SCRIPT)
    assert command(script, *words, layers) == 0
    out, plan = capsys.readouterr().out, sw.Plan.load("plan.json")
    assert "no further" not in out and out.splitlines()[-1] == "written to plan.json"
    shown(plan, out)
    assert plan.mode == "dynamic_programming" and 0 <= plan.gap <= 1e-3
    assert len([o for o in plan.operators if o.op == "scaled_dot_product_attention"]) == layers
    return plan


@pytest.mark.long
def test_a_quarter_of_gpt3_on_1024_devices_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    cluster = sw.Cluster.of("h200x8x128")
    cluster.save(tmp_path / "h200x128.json")
    plan = written_plan(tmp_path / "script.py", 24, capsys, "--devices", 1024, "--cluster", "h200x128.json")
    assert plan.devices == 1024 and plan.cluster == cluster
    sizes = {name: p.shape for name, p in plan.parameters.items()}
    assert sizes["tokens.weight"] == (50257, 12288) and sizes["blocks.23.up.weight"] == (49152, 12288)
    # alike layers are planned alike, but for those at the ends
    per_layer = [[o.in_strategy for o in plan.operators if f"blocks.{k}." in o.module] for k in range(2, 22)]
    assert per_layer[0] and all(strategies == per_layer[0] for strategies in per_layer)


@pytest.mark.scale
def test_the_whole_of_gpt3_within_the_memory_of_a_device(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The memory that the search counts is the memory of the program: with less, the plan would be further from its
    bound."""
    limit = sw.Cluster.of("h200x8x128").memory
    plan = written_plan(
        tmp_path / "script.py", 96, capsys, "--devices", 1024, "--cluster", "h200x8x128", "--memory", "cluster"
    )
    assert plan.devices == 1024 and plan.found.limit == limit and 0.98 * limit < plan.peak <= limit
    assert 174e9 < sum(v.numel for v in plan.graph.parameters.values()) < 176e9
    assert plan.bound < plan.cost and plan.gap <= 1e-3 and plan.regions and plan.hsdp is not None


@pytest.mark.scale
def test_a_script_s_gpt3_on_16384_devices(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Two of its layers; within the memory of a device."""
    limit = sw.Cluster.of("h200x8x2048").memory
    plan = written_plan(
        tmp_path / "script.py", 2, capsys, "--devices", 16384, "--cluster", "h200x8x2048", "--memory", "cluster"
    )
    assert plan.devices == 16384 and plan.peak <= plan.found.limit == limit

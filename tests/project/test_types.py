"""The types of the public names, as a user's type checker sees them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

#: A user's script: every call is right.
RIGHT = """
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import shardwright as sw
from shardwright import ops
from shardwright.settings import (
    DatasetStrategy,
    HsdpSetting,
    MixedPrecisionSetting,
    OptimizerState,
    ParallelMode,
    PipelineSetting,
    Schedule,
)

DEVICES = 8
MODES: tuple[ParallelMode, ...] = ("semi_auto", "sharding_propagation", "dynamic_programming")
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "zero_bubble")
FEEDINGS: tuple[DatasetStrategy, ...] = ("full_batch", ((8, 1), (8, 1)), (sw.Layout((8,), ("dp",))("dp", "None"),) * 2)
STATES: tuple[OptimizerState, ...] = ("adam", "sgd", 6.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layout = sw.Layout((2, 4), ("dp", "mp"))
        assert_type(layout, sw.Layout)
        self.w = nn.Parameter(torch.zeros(64, 16))
        self.matmul = sw.shard(torch.matmul, in_strategy=((2, 4), (4, 1)))
        self.linear = sw.shard(nn.Linear(16, 16), in_strategy=((8, 1), (1, 1), (1,)))
        assert_type(self.matmul, sw.Operator)
        assert_type(self.linear, nn.Linear)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(self.matmul(x, self.w))
        return made


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return made


class Stack(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        for i, block in enumerate(self.blocks):
            sw.set_stage(block, 2 * i // depth)
            assert_type(sw.recompute(nn.Linear(2, 2)), nn.Linear)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(steps):
        yield torch.zeros(32, 64), torch.zeros(32, 16)


def planned() -> sw.Plan | sw.PipelinePlan:
    x, target = torch.zeros(32, 64), torch.zeros(32, 16)
    cluster = sw.Cluster.of("h100x8", DEVICES)
    hsdp: HsdpSetting = {"shard_size": -1, "threshold": 0, "optimizer_level": "level3"}
    pipeline: PipelineSetting = {"stages": 2, "micro_batches": 4, "scheduler": "1f1b"}
    dtypes: MixedPrecisionSetting = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    made = sw.plan(Net(), (x,), nn.MSELoss(), target, devices=DEVICES, cluster=cluster, hsdp=hsdp)
    for mode in MODES:
        for feeding in FEEDINGS:
            made = sw.plan(Net(), (x,), nn.MSELoss(), target, parallel_mode=mode, dataset_strategy=feeding)
    for state in STATES:
        made = sw.plan(Net(), (x,), nn.MSELoss(), target, memory="70GB", optimizer=state, mixed_precision=dtypes)
    made = sw.plan(Stack(64, 4), (x,), nn.MSELoss(), x, pipeline=pipeline, recompute=lambda op: op.kind == "relu")
    if isinstance(made, sw.Plan):
        assert_type(made.cost, float)
    made.save("plan.json")
    return made


def verified() -> bool:
    x, target = torch.zeros(32, 64), torch.zeros(32, 16)
    report = sw.verify(Net(), (x,), target, loss_fn=nn.MSELoss(), devices=DEVICES, steps=2)
    assert_type(report, sw.VerifyReport)
    assert_type(report.ok, bool)
    return report.ok


def wrapped() -> sw.AutoParallel:
    model = sw.AutoParallel(
        Net(),
        nn.MSELoss(),
        "semi_auto",
        on_missing_rule="replicate",
        random="fast",
        compile={"mode": "max-autotune"},
        cluster="h100x8",
        memory=70e9,
        optimizer="adamw",
        mixed_precision=sw.MixedPrecision(torch.bfloat16),
        recompute=lambda op: "save" if op.kind == "linear" else None,
        varying=(0,),
    )
    model.dataset_strategy("full_batch").parameter_broadcast()
    model.hsdp(optimizer_level="level2", threshold=0).comm_fusion(allreduce={"mode": "size", "config": 25})
    return model


def piped(schedule: Schedule) -> sw.AutoParallel:
    model = sw.AutoParallel(Stack(64, 4), nn.MSELoss())
    model.pipeline(stages=2, scheduler=schedule, micro_batches="auto", stage_config={"blocks.0": 0})
    model.pipeline(stages="auto").enable_gradients_mean()
    return model


def trained(steps: int) -> float:
    sw.init(devices=DEVICES)
    model = wrapped()
    optimizer = torch.optim.AdamW(model.parameters())
    last = 0.0
    with sw.Monitor(model, every=5) as monitor:
        for x, target in batches(steps):
            loss = model(x, target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss, lr=1e-3)
            last = float(loss)
    sw.save_checkpoint(model, optimizer, Path("run"), step=1)
    restored = sw.load_checkpoint(model, optimizer, "run", missing_ok=True)
    assert_type(restored, sw.Restored | None)
    with model.whole():
        model.eval()
    return last


def summed(x: Tensor) -> Tensor | None:
    try:
        assert_type(ops.all_reduce(x), Tensor)
        return ops.all_reduce(x)
    except sw.StrategyError as error:
        assert_type(error.legal, str | None)
    except sw.ShardwrightError as error:
        assert_type(error.message, str)
    return None


def main() -> None:
    assert_type(sw.rank(), int)
    assert_type(sw.world_size(), int)
    print(planned(), verified(), trained(10), summed(torch.zeros(4)), [piped(s) for s in SCHEDULES])


if __name__ == "__main__":
    main()
"""

#: A user's mistakes, one a line -> the words in the checker's finding.
WRONG = {
    'sw.Layout((2, 4), ("dp", "mp"), 3)': 'Argument 3 to "Layout" has incompatible type "int"',
    "sw.init(devices=8, rank=3)": "Unexpected keyword argument",
    "sw.init(device=8)": "incompatible type",
    'sw.AutoParallel(torch.nn.ReLU(), max_programs="many")': "incompatible type",
    "sw.save_checkpoints": "has no attribute",
    "sw.rank().upper()": "has no attribute",
    'sw.Digit("2", 4)': "incompatible type",
    'sw.AutoParallel(torch.nn.ReLU(), parallel_mode="semi_atuo")': 'expected "Literal[',
    'sw.AutoParallel(torch.nn.ReLU(), random="exactly")': 'expected "Literal[',
    'sw.AutoParallel(torch.nn.ReLU(), compile={"level": 3})': "incompatible type",
    'sw.AutoParallel(torch.nn.ReLU()).hsdp(optimizer_level="level4")': 'expected "Literal[',
    'sw.AutoParallel(torch.nn.ReLU()).pipeline(stages="many")': "incompatible type",
    'sw.AutoParallel(torch.nn.ReLU()).dataset_strategy("half_batch")': "incompatible type",
    'sw.plan(torch.nn.ReLU(), (), hsdp={"size": 2})': "incompatible type",
    'sw.plan(torch.nn.ReLU(), (), pipeline={"stages": 2, "scheduler": 1})': "ncompatible type",
    'sw.plan(torch.nn.ReLU(), (), mixed_precision="bf16")': "incompatible type",
}


def _mypy(file: Path) -> list[str]:
    """The findings of mypy in one file, which is checked as strictly as mypy can."""
    beside = Path(sys.executable).with_name("mypy")
    command = str(beside) if beside.exists() else shutil.which("mypy")
    if command is None:
        pytest.skip("mypy is not installed")
    found = subprocess.run(
        [command, "--strict", "--follow-imports=silent", "--python-executable", sys.executable, "--no-error-summary",
         "--config-file", "", "--cache-dir", str(file.parent / "cache"), str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert not found.stderr, found.stderr
    return found.stdout.splitlines()


@pytest.mark.long
def test_a_users_script_has_types(tmp_path: Path) -> None:
    """One run checks both scripts, since a cold run reads all of torch."""
    lines = ["import torch", "", "import shardwright as sw", "", *WRONG]
    wrong = "\n".join(lines) + "\n"
    file = tmp_path / "script.py"
    file.write_text(RIGHT + "\n\n" + wrong.replace("import torch\n\nimport shardwright as sw\n", ""))
    first = len(file.read_text().splitlines()) - len(WRONG)
    found = [line for line in _mypy(file) if ": error: " in line]
    by_line = {int(line.split(":")[1]): line for line in found}
    assert not [line for number, line in by_line.items() if number <= first]
    for number, (call, words) in enumerate(WRONG.items(), start=first + 1):
        assert words in by_line.get(number, ""), f"{call}: {by_line.get(number)}"

"""The types of the public names, as a user's type checker sees them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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
    made: sw.Plan | sw.PipelinePlan
    made = sw.plan(Net(), (x,), nn.MSELoss(), target, devices=DEVICES, cluster=cluster, hsdp=hsdp)
    for mode in MODES:
        for feeding in FEEDINGS:
            made = sw.plan(Net(), (x,), nn.MSELoss(), target, parallel_mode=mode, dataset_strategy=feeding)
    for state in STATES:
        made = sw.plan(Net(), (x,), nn.MSELoss(), target, memory="70GB", optimizer=state, mixed_precision=dtypes)
    made = sw.plan(Stack(64, 4), (x,), nn.MSELoss(), x, pipeline=pipeline, recompute=lambda op: op.kind == "relu")
    made.save("plan.json")
    return made


def without_a_pipeline() -> float:
    x, target = torch.zeros(32, 64), torch.zeros(32, 16)
    plan = sw.plan(Net(), (x,), nn.MSELoss(), target, devices=DEVICES)
    assert_type(plan, sw.Plan)
    assert_type(plan.cost, float)
    assert_type(plan.bound, float | None)
    assert_type(plan.price.total, float)
    assert_type(plan.price.by_operator, dict[str, float])
    assert_type(plan.timeline.peak, float)
    assert_type(plan.operator("matmul").in_strategy, tuple[tuple[int, ...], ...])
    assert_type(plan.parameters["w"].storage, sw.Layout)
    assert_type(plan.parameters["w"].local_shape(0), tuple[int, ...])
    assert_type(plan.memory(0), dict[str, int])
    for operator in plan.operators:
        print(operator.name, operator.cause, operator.local_shapes(3))
    for collective in plan.collectives(0):
        print(collective.op, collective.ranks, collective.bytes)
    for name, value in plan.graph.parameters.items():
        print(name, value.shape, value.dtype)
    plan.explain("matmul")
    plan.report("plan.html")
    alone = sw.plan(Net(), (x,), pipeline=None, parallel_mode="data_parallel")
    assert_type(alone, sw.Plan)
    return plan.price.total + plan.price.communication + alone.peak


def with_a_pipeline(asked: PipelineSetting | None) -> int:
    x = torch.zeros(32, 64)
    plan = sw.plan(Stack(64, 4), (x,), nn.MSELoss(), x, pipeline={"stages": 2, "micro_batches": 4}, devices=DEVICES)
    assert_type(plan, sw.PipelinePlan)
    assert_type(plan.simulation.bubble, float)
    assert_type(plan.micro_batches, int)
    for stage in plan.stages:
        assert_type(stage.plan, sw.Plan)
        assert_type(stage.plan.price.total, float)
        print(stage.number, stage.ranks, stage.plan.peak)
    for transfer in plan.transfers:
        print(transfer.source, transfer.target, transfer.nbytes)
    either = sw.plan(Stack(64, 4), (x,), nn.MSELoss(), x, pipeline=asked)
    assert_type(either, sw.Plan | sw.PipelinePlan)
    return len(plan.stages) + either.devices


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
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]  torch does not say its type
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
    print(planned(), without_a_pipeline(), with_a_pipeline(None), verified(), trained(10))
    print(summed(torch.zeros(4)), [piped(s) for s in SCHEDULES])


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
    'sw.plan(torch.nn.ReLU(), (), hsdp={"size": 2})': 'No overload variant of "plan" matches',
    'sw.plan(torch.nn.ReLU(), (), pipeline={"stages": 2, "scheduler": 1})': 'No overload variant of "plan" matches',
    'sw.plan(torch.nn.ReLU(), (), mixed_precision="bf16")': 'No overload variant of "plan" matches',
    "sw.plan(torch.nn.ReLU(), (), pipeline={'stages': 2}).price": 'has no attribute "price"',
}


#: Beside the cache of `make lint`, whose options are others. mypy reads anew what has changed since.
CACHE = ROOT / ".mypy_cache" / "users"

#: Types of public names come from none of these modules, which have half of what mypy would read.
UNREAD = (
    *(f"torch.{name}" for name in "_dynamo _export _functorch _higher_order_ops _inductor _numpy _refs".split()),
    *("torch._subclasses", "torch.ao", "torch.export", "torch.fx", "torch.onnx"),
    *("IPython", "highspy", "numpy", "prompt_toolkit", "rich", "sympy", "traitlets"),
)


def _mypy(file: Path) -> list[str]:
    """The findings of mypy in one file, which is checked as strictly as mypy can."""
    settings = file.with_name("mypy.ini")
    unread = ",".join(f"{name}.*" for name in UNREAD)
    settings.write_text(f"[mypy]\nstrict = True\nfollow_imports = silent\n[mypy-{unread}]\nfollow_imports = skip\n")
    beside = Path(sys.executable).with_name("mypy")
    command = str(beside) if beside.exists() else shutil.which("mypy")
    if command is None:
        pytest.skip("mypy is not installed")
    found = subprocess.run(
        [command, "--config-file", str(settings), "--python-executable", sys.executable, "--no-error-summary",
         "--cache-dir", str(CACHE), str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert not found.stderr, found.stderr
    return found.stdout.splitlines()


def scripts(folder: Path) -> tuple[Path, int]:
    """A file with the user's script and behind it the mistakes, one a line; the number of lines before these."""
    lines = ["import torch", "", "import shardwright as sw", "", *WRONG]
    wrong = "\n".join(lines) + "\n"
    file = folder / "script.py"
    file.write_text(RIGHT + "\n\n" + wrong.replace("import torch\n\nimport shardwright as sw\n", ""))
    return file, len(file.read_text().splitlines()) - len(WRONG)


def test_the_script_is_long_and_asks_for_no_type() -> None:
    """Findings are not hidden by questions about types, nor by casts."""
    assert len(RIGHT.splitlines()) >= 200
    assert not re.search(r"isinstance\(|\bcast\(|Any\b|type: ignore", RIGHT)


@pytest.mark.long
def test_a_users_script_has_types(tmp_path: Path) -> None:
    """One run checks both scripts, since a run without a cache reads all of torch."""
    file, first = scripts(tmp_path)
    found = [line for line in _mypy(file) if ": error: " in line]
    by_line = {int(line.split(":")[1]): line for line in found}
    assert not [line for number, line in by_line.items() if number <= first]
    for number, (call, words) in enumerate(WRONG.items(), start=first + 1):
        assert words in by_line.get(number, ""), f"{call}: {by_line.get(number)}"


@pytest.mark.long
def test_pyright_finds_the_same(tmp_path: Path) -> None:
    """Pyright, which editors run, finds nothing in the script at its strictest, and each mistake."""
    if torch.__version__ < "2.10":
        pytest.skip("torch 2.9 does not say the types of its modules' settings")
    names = ("pyright", "basedpyright")
    beside = [path for name in names if (path := Path(sys.executable).with_name(name)).exists()]
    command = str(beside[0]) if beside else next(filter(None, map(shutil.which, names)), None)
    if command is None:
        pytest.skip("neither pyright nor basedpyright is installed")
    file, first = scripts(tmp_path)
    settings = {"typeCheckingMode": "strict", "include": [file.name], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    ran = subprocess.run(
        [command, "--project", str(tmp_path), "--pythonpath", sys.executable, "--outputjson"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    found = json.loads(ran.stdout)["generalDiagnostics"]
    errors = {one["range"]["start"]["line"] + 1: one["message"] for one in found if one["severity"] == "error"}
    assert not {number: message for number, message in errors.items() if number <= first}
    assert set(errors) == set(range(first + 1, first + 1 + len(WRONG)))

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
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import shardwright as sw
from shardwright import ops


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


x, target = torch.zeros(32, 64), torch.zeros(32, 16)
cluster = sw.Cluster.of("h100x8", 8)
plan = sw.plan(Net(), (x,), nn.MSELoss(), target, devices=8, cluster=cluster)
if isinstance(plan, sw.Plan):
    assert_type(plan.cost, float)
report = sw.verify(Net(), (x,), target, loss_fn=nn.MSELoss(), devices=8, steps=2)
assert_type(report, sw.VerifyReport)
assert_type(report.ok, bool)

sw.init(devices=8)
model = sw.AutoParallel(Net(), nn.MSELoss(), "semi_auto", mixed_precision=sw.MixedPrecision(torch.bfloat16))
model.dataset_strategy("full_batch").parameter_broadcast()
optimizer = torch.optim.AdamW(model.parameters())
with sw.Monitor(model, every=5) as monitor:
    loss = model(x, target)
    loss.backward()
    optimizer.step()
    monitor.step(loss, lr=1e-3)
sw.save_checkpoint(model, optimizer, Path("run"), step=1)
restored = sw.load_checkpoint(model, optimizer, "run", missing_ok=True)
assert_type(restored, sw.Restored | None)
assert_type(sw.rank(), int)
try:
    assert_type(ops.all_reduce(x), Tensor)
except sw.ShardwrightError as error:
    assert_type(error.legal, str | None)
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

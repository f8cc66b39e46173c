"""The scripts of the tutorials as users start them: by python, by ``shardwright run`` and by torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import forked_python
import operator_objects
import pytest
from paths import SCRIPTS
from ranks import PATIENCE
from test_pipeline_hybrid import one_device as hybrid_on_one_device
from test_run import free_port
from test_tutorials import TOLERANCE, one_device

EXAMPLES = Path(operator_objects.__file__).parent
IN_TURN = str(SCRIPTS / "in_turn.py")
HYBRID = "multi_dimensional_hybrid"


def first_loss(name: str) -> float:
    """On one device."""
    return (hybrid_on_one_device() if name == HYBRID else one_device(name))[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "launcher"),
    [
        (["layout_functional"], []),
        (["operator_functional"], ["-m", "shardwright", "run", "--devices", "8"]),
        (
            ["operator_objects", "train_step", HYBRID],
            [
                "-m",
                "shardwright",
                "run",
                "--worker_num=8",
                "--local_worker_num=8",
                "--master_addr=127.0.0.1",
                "--master_port={port}",
                "--join=True",
                "--log_dir={logs}",
            ],
        ),
        (
            ["layout_objects"],
            [
                "-m",
                "torch.distributed.run",
                "--nproc-per-node=8",
                "--master-port={port}",
                "--redirects=3",
                "--log-dir={logs}",
            ],
        ),
    ],
    ids=["python", "one process", "shardwright run", "torchrun"],
)
def test_scripts_run_unchanged(names: list[str], launcher: list[str], tmp_path: Path) -> None:
    """Each of the six by one launcher, and the first by an interpreter of its own. What they compute in eight processes
    is told by test_tutorials and test_pipeline_hybrid."""
    scripts = [str(EXAMPLES / f"{name}.py") for name in names]
    command = [
        sys.executable,
        *(part.format(logs=tmp_path, port=free_port()) for part in launcher),
        *(scripts if len(scripts) == 1 else [IN_TURN, *scripts, "--"]),
        "--steps",
        "2",
        "--dtype",
        "float64",
    ]
    if launcher:
        done = forked_python.run(command, forks=True, timeout=PATIENCE, cwd=tmp_path)
    else:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path.name != "scheduler.log"]
    written = [text for text in (logs or [done.stdout]) if "loss is" in text]
    assert len(written) == (8 if logs else 1)
    for text in written:
        losses = [float(loss) for loss in re.findall(r"loss is (\S+)", text)]
        assert losses == pytest.approx([first_loss(name) for name in names], rel=0, abs=TOLERANCE)

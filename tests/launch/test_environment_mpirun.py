"""mpirun: Open MPI's own launcher starts the ranks, and `sw.init` finds its place among them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_scripts import train
from ranks import PATIENCE

TRAIN = Path(train.__file__)


@pytest.fixture(scope="module")
def mpirun() -> list[str]:
    """The command that starts processes on this machine, however few cores it has."""
    path = shutil.which("mpirun")
    if path is None:
        pytest.skip("there is no mpirun here (Debian: apt-get install openmpi-bin)")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=PATIENCE).stdout
    if "Open MPI" not in version:
        pytest.skip(f"{path} is not Open MPI's: {version.splitlines()[:1]}")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [path, *root, "--oversubscribe", "--bind-to", "none"]


def run(mpirun: list[str], *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, or fail. A session of its own, so that nothing is left behind where it hangs."""
    process = subprocess.Popen(
        [*mpirun, *map(str, arguments)],
        env=os.environ | environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"mpirun did not end; it wrote:\n{process.communicate()[0]}")
    return subprocess.CompletedProcess(process.args, process.returncode, out)


@pytest.mark.long
def test_two_ranks_under_mpirun_train_as_one_device(mpirun, tmp_path):
    ended = run(mpirun, "-n", 2, sys.executable, TRAIN, tmp_path)
    assert ended.returncode == 0, ended.stdout
    losses, weight = train.on_one_device()
    for rank in range(2):
        facts = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert (facts["rank"], facts["size"], facts["processes"]) == (rank, 2, True)
        assert facts["losses"] == pytest.approx(losses, abs=1e-12) and facts["local"] == [24, 12]
        for row, expected in zip(facts["weight"], weight, strict=True):
            assert row == pytest.approx(expected, abs=1e-12)


def test_a_leftover_of_another_launcher_is_found_before_anything_starts(mpirun):
    """RANK=0 for all, as a profile may export it: each rank says which variables contradict, none waits."""
    look = "import os\nfrom shardwright.launch.environment import find\nprint(find(os.environ))"
    ended = run(mpirun, "-n", 2, sys.executable, "-c", look, RANK="0", WORLD_SIZE="8")
    assert ended.returncode != 0
    assert "WORLD_SIZE=8 (torchrun) and OMPI_COMM_WORLD_SIZE=2 (Open MPI) contradict one another" in ended.stdout

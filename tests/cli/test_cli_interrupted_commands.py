"""Commands that show their progress, and that Ctrl-C ends: the phase, the best plan so far, and what is left."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import ForkedPython
from ranks import PATIENCE
from torch import nn

import shardwright as sw
from shardwright.checkpoint import tensor_files, writer
from shardwright.cli import main
from shardwright.pipeline.stage_search import StageSearch
from shardwright.planners import dynamic_programming
from shardwright.solver import anytime, solve
from shardwright.solver.problem import Problem, StoppedSearch

MODEL = """
import torch
from torch import nn


def model():
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return dict(net=net, inputs=(torch.zeros(64, 64),), parallel_mode="dynamic_programming", devices=8)
"""

#: The same, with a search that takes until Ctrl-C, shown at once and renewed without a pause.
SLOW = (
    MODEL
    + """

import time
from pathlib import Path
from shardwright.launch import progress
from shardwright.planners import dynamic_programming
progress.FIRST = progress.RENEWED = 0.01


def solve(problem):
    Path("searching").touch()
    time.sleep(120)


dynamic_programming.solve = solve
"""
)


def ctrl_c(*_: Any, **__: Any) -> Any:
    """A real SIGINT, at the place of a function."""
    signal.raise_signal(signal.SIGINT)


#: Five layers, of which a search makes stages.
DEEP = """
import torch
from torch import nn


def model():
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    return dict(net=net, inputs=(torch.zeros(64, 64),), parallel_mode="dynamic_programming", devices=4,
                pipeline=dict(stages="auto", micro_batches=4))
"""


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """SIGINT raises, in a process too that a shell has started in the background, where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model's file."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path[1:]])
    return tmp_path


# -- a search ----------------------------------------------------------------------------------------------------------


def test_the_best_plan_so_far_is_written_where_a_file_is_named(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert main.main(["plan", "model.py:model", "-o", "whole.json"]) == 0
    monkeypatch.setattr(dynamic_programming, "solve", ctrl_c)
    assert main.main(["plan", "model.py:model", "-o", "best.json"]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("shardwright plan: stopped by Ctrl-C in search") and ", after " in last
    best, whole = sw.Plan.load("best.json"), sw.Plan.load("whole.json")
    assert last.endswith(f"; the best plan so far is in best.json: {best.cost * 1e3:.4g} ms a step, no bound is proved")
    assert best.cost >= whole.cost and best.bound is None  # of the recursion, which proves nothing
    assert best.found is not None and "stopped by Ctrl-C: the best plan until then" in best.found.notes


def test_without_a_file_nothing_is_written(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(dynamic_programming, "solve", ctrl_c)
    assert main.main(["plan", "model.py:model"]) == 130
    assert capsys.readouterr().err.endswith("; no plan is written; --output FILE keeps the best one so far\n")
    assert not (inside / "plan.json").exists()


def test_a_plan_that_does_not_fit_is_not_kept(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(dynamic_programming, "solve", ctrl_c)
    assert main.main(["plan", "model.py:model", "-o", "best.json", "--memory", "1KB"]) == 130
    assert capsys.readouterr().err.endswith("; no plan that fits in the memory was found; none is written\n")
    assert not (inside / "best.json").exists()


@pytest.mark.parametrize(
    ("place", "name", "calls"),
    [(dynamic_programming, "solve", 0), (StageSearch, "price", 2), (StageSearch, "settle", 0)],
    ids=["the plan of a stage", "prices", "choice"],
)
def test_the_best_pipeline_so_far_is_written(
    place: Any, name: str, calls: int, inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Also where the stages are chosen and none of them is planned yet."""
    (inside / "model.py").write_text(DEEP)
    real, left = getattr(place, name), [calls]

    def stopped(*given: Any, **how: Any) -> Any:
        left[0] -= 1
        return ctrl_c() if left[0] == -1 else real(*given, **how)

    monkeypatch.setattr(place, name, stopped)
    assert main.main(["plan", "model.py:model", "-o", "best.json"]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    best = sw.Plan.load("best.json")
    assert last.startswith("shardwright plan: stopped by Ctrl-C in ") and last.endswith(
        f"; the best plan so far is in best.json: {best.cost * 1e3:.4g} ms a step, no bound is proved"
    )
    assert best.devices == 4 and best.notes[0].startswith("stopped by Ctrl-C: the best pipeline until then")


@pytest.mark.parametrize("searched", [0, 1, 2])
def test_a_pipeline_of_given_stages_keeps_the_stages_that_are_searched(
    searched: int, inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The others keep the best plan so far, or follow the batch."""
    stages = 'stages=3, micro_batches=3, stage_config={"0": 0, "2": 1, "4": 2}'
    wide = DEEP.replace("nn.Linear(64, 64)", "nn.Linear(2048, 2048)").replace("(64, 64)", "(48, 2048)")
    (inside / "model.py").write_text(wide.replace('stages="auto", micro_batches=4', stages).replace("=4,", "=12,"))
    assert main.main(["plan", "model.py:model", "-o", "whole.json"]) == 0
    capsys.readouterr()
    real, left = dynamic_programming.solve, [searched]

    def stopped(*given: Any, **how: Any) -> Any:
        left[0] -= 1
        return ctrl_c() if left[0] == -1 else real(*given, **how)

    monkeypatch.setattr(dynamic_programming, "solve", stopped)
    assert main.main(["plan", "model.py:model", "-o", "best.json"]) == 130
    best, whole = sw.Plan.load("best.json"), sw.Plan.load("whole.json")
    assert capsys.readouterr().err.endswith(
        f"; the best plan so far is in best.json: {best.cost * 1e3:.4g} ms a step, no bound is proved\n"
    )
    assert f"stopped by Ctrl-C: {searched} of 3 stages were searched until then" in best.notes
    for number, (mine, theirs) in enumerate(zip(best.stages, whole.stages)):
        assert mine.plan.devices == 4
        equal = [o.in_strategy for o in mine.plan.operators] == [o.in_strategy for o in theirs.plan.operators]
        assert equal or number >= searched
    assert best.cost >= whole.cost


def test_a_pipeline_that_does_not_fit_is_not_kept(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (inside / "model.py").write_text(DEEP)
    monkeypatch.setattr(StageSearch, "settle", ctrl_c)
    assert main.main(["plan", "model.py:model", "-o", "best.json", "--memory", "1KB"]) == 130
    assert capsys.readouterr().err.endswith("; no plan that fits in the memory was found; none is written\n")
    assert not (inside / "best.json").exists()


def test_a_search_carries_its_best_states_and_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    random = np.random.default_rng(0)
    sizes = range(12)
    problem = Problem(
        tuple(random.random(5) for _ in sizes),
        {(i, j): random.random((5, 5)) for i in sizes for j in sizes if i < j},
        tuple(map(str, sizes)),
    )
    for module in (anytime, solve):  # else it is solved exactly, at once
        monkeypatch.setattr(module, "eliminated", lambda *_: None)
    monkeypatch.setattr(anytime, "milp", ctrl_c)
    with pytest.raises(StoppedSearch) as stopped:
        solve.solve(problem)
    found = stopped.value.found
    assert problem.cost(found.states) == found.cost and 0 < found.bound <= found.cost
    monkeypatch.setattr(anytime.Messages, "sweep", ctrl_c)
    with pytest.raises(StoppedSearch) as stopped:
        solve.solve(problem)
    assert stopped.value.found is None


def test_python_gets_a_keyboard_interrupt_after_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(dynamic_programming, "solve", ctrl_c)
    net, x = nn.Linear(64, 64), torch.zeros(64, 64)
    with pytest.raises(KeyboardInterrupt) as stopped:
        sw.plan(net, (x,), parallel_mode="dynamic_programming", devices=8)
    assert stopped.type is KeyboardInterrupt
    assert capsys.readouterr().err.startswith("shardwright: stopped by Ctrl-C in search")
    with pytest.raises(KeyboardInterrupt):
        sw.plan(net, (x,), parallel_mode="dynamic_programming", devices=8, search_progress=False)
    assert not capsys.readouterr().err


def test_a_script_that_catches_ctrl_c_does_not_keep_it(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (inside / "train.py").write_text(
        "import torch\nimport shardwright as sw\nmodel = sw.AutoParallel(torch.nn.Linear(64, 64), "
        "parallel_mode='dynamic_programming')\ntry:\n    model(torch.zeros(64, 64))\nexcept KeyboardInterrupt:\n"
        "    print('caught')\n"
    )
    monkeypatch.setattr(dynamic_programming, "solve", ctrl_c)
    monkeypatch.setenv("SHARDWRIGHT_DEVICES", "8")
    assert main.main(["plan", "train.py", "--devices", "8", "-o", "best.json"]) == 130
    assert capsys.readouterr().out == "" and sw.Plan.load("best.json").devices == 8


def test_on_a_terminal(inside: Path) -> None:
    """One command in a pseudo-terminal of 70 columns: its line, SIGINT from outside, the last words, the plan."""
    (inside / "slow.py").write_text(SLOW)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 70, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-m", "shardwright", "plan", "slow.py:model", "-o", "best.json"]
    with ForkedPython(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        out = b""
        while not (inside / "searching").exists() and process.poll() is None:  # earlier phases lie in a search too
            out += os.read(ours, 65536)
        shown_before = len(out)
        while b"search" not in out[shown_before:] and process.poll() is None:
            out += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        try:
            while more := os.read(ours, 65536):
                out += more
        except OSError:  # the command has ended
            pass
    os.close(ours)
    shown = out.decode()
    assert process.returncode == 130
    assert "\x1b[3" not in shown  # no colours
    lines = shown.split("\r\n")
    assert all(len(part.rpartition("\x1b[2K")[2]) <= 70 for line in lines[:1] for part in line.split("\r"))
    assert lines[-2].startswith("shardwright plan: stopped by Ctrl-C in search") and "best.json" in lines[-2]
    assert json.loads((inside / "best.json").read_text())["devices"] == 8


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved(folder: Path, step: int, **how: Any) -> None:
    net = nn.Linear(16, 16)
    sw.save_checkpoint(net, torch.optim.SGD(net.parameters(), 0.1), folder, step=step, **how)


@pytest.mark.parametrize(
    ("whole", "where", "phase"),
    [
        (True, (tensor_files.WholeFiles, "write"), "checkpoint of step 2: 0.0 of 1.1 KB"),
        (False, (tensor_files.PartFile, "close"), "checkpoint of step 2: 1.1 of 1.1 KB"),
        (True, (writer, "sealed"), "checkpoint of step 2: 1.1 of 1.1 KB > to the disk"),
    ],
)
def test_a_save_leaves_the_earlier_checkpoint_alone(
    whole: bool,
    where: tuple[Any, str],
    phase: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    saved(tmp_path, 1, integrated_save=whole)
    before = sorted(p.name for p in tmp_path.iterdir())
    monkeypatch.setattr(*where, ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 2, integrated_save=whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert capsys.readouterr().err == (
        f"shardwright: stopped by Ctrl-C in {phase}, after 0 s; the earlier checkpoints are whole, and nothing is left "
        "of this one\n"
    )
    monkeypatch.undo()
    saved(tmp_path, 2, integrated_save=whole)
    assert main.main(["checkpoint", "verify", str(tmp_path)]) == 0


@pytest.mark.parametrize("command", ["transform", "merge"])
def test_a_transform_leaves_nothing(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    saved(tmp_path / "run", 1, integrated_save=False)
    from shardwright.checkpoint.stored_checkpoint import StoredTensors

    read: Callable[..., Any] = StoredTensors.read
    left = [1]  # tensors that are read before

    def second(self: StoredTensors, *given: Any) -> Any:
        return read(self, *given) if left and left.pop() else ctrl_c()

    monkeypatch.setattr(StoredTensors, "read", second)
    more = ["--to", "1"] if command == "transform" else []
    assert main.main(["checkpoint", command, str(tmp_path / "run"), str(tmp_path / "new"), *more]) == 130
    text = capsys.readouterr().err
    assert text.startswith(f"shardwright checkpoint {command}: stopped by Ctrl-C in {command}: writing: ")
    assert text.endswith(" KB, after 0 s; nothing is left of the new checkpoint\n")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_wait_for_a_save_in_the_background_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    import threading

    may = threading.Event()
    sealed = writer.sealed
    monkeypatch.setattr(writer, "sealed", lambda *given, **how: (may.wait(PATIENCE), sealed(*given, **how)))
    net = nn.Linear(16, 16)
    saving = sw.save_checkpoint(net, None, tmp_path, step=1, asynchronous=True)
    monkeypatch.setattr(threading.Thread, "join", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        saving.wait()
    monkeypatch.undo()
    assert "stopped by Ctrl-C in wait for the checkpoint of step 1" in capsys.readouterr().err
    may.set()
    assert saving.wait() == tmp_path / "step-00000001"

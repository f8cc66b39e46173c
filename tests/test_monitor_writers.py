"""TensorBoard and W&B get the figures of the lines, by their own writers."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import monitor as room
from shardwright.monitor import Figure


@pytest.fixture(autouse=True)
def known_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [Figure("memory/peak_resident_bytes", 2.0**20, "peak 1.0 MiB resident")]
    monkeypatch.setattr(room, "memory_figures", lambda device, plan: figures)


def two_lines(**given: Any) -> list[str]:
    """The lines of four steps."""
    out = io.StringIO()
    with sw.Monitor(every=2, out=out, **given) as monitor:
        for loss in (1.0, 3.0, 5.0, 7.0):
            monitor.step(torch.tensor(loss), lr=0.1)
    return out.getvalue().splitlines()


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    two_lines(tensorboard=tmp_path)
    found = read(tmp_path)
    assert sorted(found.Tags()["scalars"]) == ["loss", "lr", "memory/peak_resident_bytes", "throughput/steps_per_s"]
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 2.0), (3, 6.0)]
    assert [(e.step, e.value) for e in found.Scalars("memory/peak_resident_bytes")] == [(1, 2.0**20), (3, 2.0**20)]


def read(folder: Path) -> Any:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reading.EventAccumulator(str(folder))
    found.Reload()
    return found


def test_a_users_own_writer_stays_open(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    two_lines(tensorboard=writer)
    assert [e.value for e in read(tmp_path).Scalars("loss")] == [2.0, 6.0], "they are on the disk"
    writer.add_scalar("mine", 5.0, 7)
    writer.close()
    assert [e.step for e in read(tmp_path).Scalars("mine")] == [7]


def test_without_tensorboard_a_line_says_so(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    lines = two_lines(tensorboard=tmp_path)
    assert lines[0].startswith("TensorBoard is not installed") and lines[1].startswith("step 1  loss 2")


# -- W&B ---------------------------------------------------------------------------------------------------------------


class Run:
    """A run with the methods of W&B's, of version 0.31, that are called."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.defined: list[tuple[str, str | None]] = []
        self.codes: list[int | None] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is None, "W&B drops what comes with an earlier step than it has seen"
        assert commit is None and not self.codes
        self.logged.append(data)

    def define_metric(
        self,
        name: str,
        step_metric: str | None = None,
        step_sync: bool | None = None,
        hidden: bool | None = None,
        summary: str | None = None,
        overwrite: bool | None = None,
    ) -> None:
        self.defined.append((name, step_metric))

    def finish(self, exit_code: int | None = None) -> None:
        self.codes.append(exit_code)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Run]]:
    """The runs that `wandb.init` has made, with its arguments."""
    made: list[tuple[dict[str, Any], Run]] = []

    def init(project: str | None = None, dir: str | None = None, mode: str | None = None) -> Run:
        made.append(({"project": project, "dir": dir, "mode": mode}, Run()))
        return made[-1][1]

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def test_wandb_gets_what_the_lines_say(runs) -> None:
    two_lines(wandb=True)
    ((given, run),) = runs
    assert set(given.values()) == {None}
    assert [(d["step"], d["loss"], d["lr"]) for d in run.logged] == [(1, 2.0, 0.1), (3, 6.0, 0.1)]
    tags = ["loss", "lr", "throughput/steps_per_s", "memory/peak_resident_bytes"]
    assert list(run.logged[0]) == [*tags, "step"]
    assert run.defined == [(tag, "step") for tag in tags], "each once, over the step"
    assert run.codes == [0]


def test_wandb_is_given_a_users_arguments_or_run(runs) -> None:
    two_lines(wandb={"project": "gpt", "mode": "offline"})
    assert runs[0][0] == {"project": "gpt", "dir": None, "mode": "offline"}
    mine = Run()
    two_lines(wandb=mine)
    assert len(mine.logged) == 2 and not mine.codes and len(runs) == 1
    two_lines(wandb=False)
    assert len(runs) == 1


def test_a_run_that_fails_is_a_failed_run_of_wandb(runs) -> None:
    with pytest.raises(KeyError), sw.Monitor(every=9, wandb=True, out=io.StringIO()) as monitor:
        monitor.step(1.0)
        raise KeyError
    monitor.close()
    assert runs[0][1].codes == [1], "and once is enough"


def test_without_wandb_a_line_says_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    lines = two_lines(wandb=True)
    assert lines[0].startswith("W&B is not installed (pip install wandb)") and lines[1].startswith("step 1  loss 2")


def test_other_ranks_open_nothing(monkeypatch, runs, tmp_path: Path) -> None:
    monkeypatch.setattr(room, "rank", lambda: 1)
    assert two_lines(wandb=True, tensorboard=tmp_path / "none") == []
    assert not runs and not (tmp_path / "none").exists()


@pytest.mark.parametrize("given", [{"tensorboard": 3}, {"wandb": "gpt"}, {"wandb": 1.0}])
def test_what_is_no_writer_is_refused_on_each_rank(monkeypatch, given: dict[str, Any]) -> None:
    monkeypatch.setattr(room, "rank", lambda: 1)
    with pytest.raises(sw.SettingError, match=rf"(?s)Monitor\({next(iter(given))}=.*legal"):
        sw.Monitor(**given)

"""A disk that is full: every kind of file says so, and leaves what was there before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_runs import KINDS, trained, unlocked
from small_networks import Marked, draw

import shardwright as sw
from shardwright.checkpoint.transform import merge
from shardwright.cli.main import main
from shardwright.json_files.json_values import write_text
from shardwright.report.ir_dump import write_dumps

FULL = "No space left on device"


def fill(disk: Path) -> None:
    """Take all that is left of a disk."""
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


@KINDS
@pytest.mark.parametrize("room", [0, 64, 120])  # KiB: for nothing, for some of the files, for all but the last ones
@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_a_checkpoint(whole: bool, room: int, background: bool, small_disk) -> None:
    disk = small_disk(2 << 20)
    model = sw.AutoParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))))
    folder = disk / "run"
    sw.save_checkpoint(model, None, folder, step=1, integrated_save=whole)
    (disk / "kept").write_bytes(bytes(room << 10))
    fill(disk)
    (disk / "kept").unlink()
    with pytest.raises(sw.CheckpointError, match=f"the checkpoint cannot be written: {FULL}"):
        sw.save_checkpoint(model, None, folder, step=2, integrated_save=whole, asynchronous=background).wait()
    assert unlocked(folder) == {"step-00000001"}, "nothing is left of it, and the one before is whole"
    (disk / "filler").unlink()
    sw.save_checkpoint(model, None, folder, step=2, integrated_save=whole)


def test_a_checkpoint_that_is_merged(small_disk, tmp_path) -> None:
    model, optimizer = trained()
    sw.save_checkpoint(model, optimizer, tmp_path / "run", step=1, integrated_save=False)
    disk = small_disk(64 << 10)
    fill(disk)
    with pytest.raises(sw.CheckpointError, match="it takes 19 KiB, and 0 B are free"):
        merge(tmp_path / "run", disk / "new")
    assert os.listdir(disk) == ["filler"]


PLAN = sw.plan(Marked(None, None, None), (draw(16, 8),), devices=2)
FILES: dict[str, tuple[type[sw.ShardwrightError], str, Callable[[Path], object]]] = {
    "plan": (sw.PlanError, "the plan", PLAN.save),
    "cluster": (sw.SettingError, "the cluster", lambda path: sw.Cluster.of("h100x8", 8).save(path)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file(name: str, small_disk) -> None:
    disk = small_disk(64 << 10)
    kind, what, save = FILES[name]
    path = disk / "file.json"
    path.write_text("what was there")
    fill(disk)
    with pytest.raises(kind, match=f"{what} cannot be written: {FULL}") as raised:
        save(path)
    assert raised.value.source == str(path) and path.read_text() == "what was there"
    assert sorted(os.listdir(disk)) == ["file.json", "filler"]
    (disk / "filler").unlink()
    save(path)
    assert path.read_text().startswith("{")


def test_files_of_commands(small_disk, tmp_path, capsys) -> None:
    disk = small_disk(64 << 10)
    fill(disk)
    PLAN.save(tmp_path / "plan.json")
    for option, what in (("--trace", "the trace"), ("--picture", "the picture")):
        assert main(["simulate", f"{option}={disk / 'made.svg'}", str(tmp_path / "plan.json")]) == 2
        assert f"{what} cannot be written: {FULL}" in capsys.readouterr().err
    with pytest.raises(sw.PlanError, match=f"the dump cannot be written: {FULL}"):
        write_dumps(PLAN, disk, [0])


def test_a_file_that_is_written_keeps_its_mode_and_its_link(tmp_path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to(file)
    write_text(link, "after", sw.PlanError, "the plan")
    assert link.is_symlink() and file.read_text() == "after" and file.stat().st_mode & 0o777 == 0o640
    write_text("/dev/null", "after", sw.PlanError, "the plan")
    assert Path("/dev/null").is_char_device()
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none" / "file", "No such file or directory")):
        with pytest.raises(sw.PlanError, match=f"the plan cannot be written: {reason}"):
            write_text(path, "x", sw.PlanError, "the plan")
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]

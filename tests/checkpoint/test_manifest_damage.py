"""Damage to a checkpoint's files is found by `verify` and by loading, with the name of the file, before anything is
changed."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from paths import BENCHMARKS
from torch import nn

import shardwright as sw
from shardwright.checkpoint.manifest import MANIFEST, verify
from shardwright.errors import CheckpointError

sys.path.append(str(BENCHMARKS))
from damage import KINDS, Subjects, damage

#: The files of the tests have no room for blocks; `test_digests` exchanges them.
SMALL = [kind for kind in KINDS if kind != "blocks exchanged"]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    return Subjects(tmp_path_factory.mktemp("damage"))


@pytest.mark.parametrize("kind", SMALL)
def test_all_kinds(subjects: Subjects, kind: str) -> None:
    assert subjects.kinds == tuple(SMALL)
    sw.init(devices=4)
    for seed in range(10):
        assert subjects.unnoticed(kind, random.Random(f"{kind} {seed}")) is None


@hypothesis.given(st.booleans(), st.randoms(use_true_random=False))
@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_verify_finds_any_single_bit(subjects: Subjects, whole: bool, rng: random.Random) -> None:
    sound = subjects.sound[not whole]
    assert verify(sound) == []
    copy = subjects.folder / "bit" / sound.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sound, copy)
    (name,) = damage(copy, "bit", {}, rng)
    found = verify(copy)
    assert found and all(p.startswith(f"{name}:") for p in found)


@pytest.fixture
def copies(subjects: Subjects, tmp_path: Path) -> list[Path]:
    """A checkpoint of each format that may be damaged."""
    return [Path(shutil.copytree(sound, tmp_path / str(i) / sound.name)) for i, sound in enumerate(subjects.sound)]


def refused(subjects: Subjects, folder: Path, what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        sw.load_checkpoint(subjects.model, subjects.optimizer, folder)
    assert all(torch.equal(a, b) for a, b in zip(subjects._state(), subjects.before, strict=True))


def test_what_is_said(subjects: Subjects, copies: list[Path]) -> None:
    for copy, name in zip(copies, ("optimizer.safetensors", "__0_0.distcp")):
        file = copy / name
        whole = file.read_bytes()
        refusing = re.escape(str(file))
        other = next(p for p in subjects.others["other step"] if (p / name).exists())
        for content, what in (
            (whole[:100], "it has 100 bytes instead of"),
            (None, "it is missing"),
            (whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:], "it was altered within bytes 0 to"),
            ((other / name).read_bytes(), "it belongs to another save, [0-9a-f]{32}, and not to this one"),
        ):
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_bytes(content)
            refused(subjects, copy, f"{refusing}: the checkpoint is damaged: {name}: {what}")
        (copy / "state.json").write_text("{}")
        refused(subjects, copy, "and 1 more files\n")
        file.write_bytes(whole)
        (copy / MANIFEST).unlink()
        refused(subjects, copy, f"{MANIFEST}: the checkpoint's manifest cannot be read: No such file")
        with pytest.raises(CheckpointError, match="manifest cannot be read"):
            sw.load_checkpoint(subjects.model, path=copy)  # which has the weights in a file as Hugging Face names it


def test_manifests(subjects: Subjects, copies: list[Path]) -> None:
    path = copies[0] / MANIFEST
    text = path.read_text()
    for other, what in (
        (text.replace('"schema": 2', '"schema": 3'), "schema 3: a newer version.*\n.*schema 1 or 2, or that version"),
        (text[:-10], "cut short"),
        (text.replace('"step": 1', '"step": 2'), "damaged: it is not what was written"),
        (text.replace('"step": 1,', '"step":  1,'), "not what was written"),
        (text + " ", "not what was written"),
        (text.replace('"step": 1,', '"step": 1, "step": 1,'), 'at step: "step" stands twice in one object: 1 and 1'),
        ("[]", "the checkpoint's manifest is a list, and no object"),
        ("{}", "damaged"),
        (json.dumps({"schema": True}), "damaged"),
        ("\x00", "the checkpoint's manifest is no JSON"),
    ):
        assert other != text
        path.write_text(other)
        refused(subjects, copies[0], what)
    path.write_bytes(b"\xff\xfe")
    refused(subjects, copies[0], "it is not text")


def test_another_checkpoint_is_offered(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    for step in (1, 2):
        sw.save_checkpoint(net, path=tmp_path, step=step)
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="another checkpoint of the run: step 1"):
        sw.load_checkpoint(net, path=tmp_path)
    assert sw.load_checkpoint(net, path=tmp_path, step=1).step == 1

"""Names in a profile: of operators, redistributions, buckets, stages and ranks, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from profile_runs import OPERATORS, Blocks, batch, check_backward, profiled, ranges, wrapped
from torch import Tensor, nn

import shardwright as sw
from shardwright import process_runtime as process
from shardwright.runtime import profile_ranges
from shardwright.runtime.profile_ranges import RangeNames


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices in this process."""
    monkeypatch.setattr(process, "_current", [])
    sw.init(devices=2)


@pytest.mark.parametrize("kind", ["searched", "recompute", "level3"])
def test_names_in_one_process(kind: str, local: None, tmp_path: Path) -> None:
    model = wrapped(kind)
    path = profiled(model, tmp_path / "trace.json", steps=1)
    found = ranges(path)
    assert found[0] == f"step 2 ranks in one process, plan {model.plan.fingerprint}"
    assert [text for text in OPERATORS if found.count(text) < 1 or f"{text} backward" not in found] == []
    assert ("layers.1.relu recomputed" in found) == (kind == "recompute")
    assert ("gather: head.weight again" in found) == (kind == "level3")
    check_backward(path)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.norm(x), x)


def test_rank_after_rank_is_named(local: None, tmp_path: Path) -> None:
    found = ranges(profiled(wrapped("", Normed()), tmp_path / "trace.json", steps=1))
    at = found.index("norm group_norm")
    assert found[at + 1 : at + 3] == ["rank 0", "rank 1"]


def test_a_pipeline_in_one_process(local: None, tmp_path: Path) -> None:
    found = ranges(profiled(wrapped("pipeline"), tmp_path / "trace.json", steps=1))
    actions = [text for text in found if text.startswith("stage ")]
    assert len(actions) == len(set(actions)) == 8
    assert found.count("layers.1.up linear") == 2 and found.count("layers.0.relu backward") == 2


def test_one_device_has_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "_current", [])
    sw.init(devices=1)
    path = profiled(wrapped(""), tmp_path / "trace.json", steps=1)
    assert set(OPERATORS) < set(ranges(path))
    check_backward(path)


def test_without_a_profiler_nothing_is_named(local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a profile: the program that ran in it is not used again."""
    model = wrapped("recompute")
    model(*batch()).backward()

    def made(*_: Any) -> Any:
        raise AssertionError("a range is made, and no profiler is active")

    with monkeypatch.context() as patch:
        patch.setattr(profile_ranges, "record_function", made)
        patch.setattr(RangeNames, "of_instruction", made)
        model(*batch()).backward()
    with torch.profiler.profile():
        model(*batch()).backward()
    monkeypatch.setattr(profile_ranges, "record_function", made)
    monkeypatch.setattr(RangeNames, "of_instruction", made)
    model(*batch()).backward()
    with pytest.raises(AssertionError, match="a range is made"), torch.profiler.profile():
        model(*batch()).backward()


@pytest.mark.skipif(not torch.profiler.itt.is_available(), reason="a build of torch without ITT")
def test_other_profilers_have_the_names(local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """VTune by ``emit_itt``, which torch does as ``emit_nvtx`` for nsys: ranges of record_function are handed on."""
    model, texts = wrapped(""), list[str]()
    model(*batch()).backward()
    made = profile_ranges.record_function
    monkeypatch.setattr(profile_ranges, "record_function", lambda text: texts.append(text) or made(text))
    with torch.autograd.profiler.emit_itt():
        model(*batch()).backward()
    assert {"sw::head linear", "sw::head linear backward"} < set(texts)


def test_a_profile_changes_no_number(local: None) -> None:
    net = Blocks().double()
    model = wrapped("searched recompute", net)
    x, y = batch()
    found = []
    for profile in (False, True):
        with torch.profiler.profile() if profile else torch.enable_grad():
            loss = model(x.double(), y)
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
        for p in net.parameters():
            p.grad = None
    assert all(map(torch.equal, *found))

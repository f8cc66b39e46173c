"""Names in a profile: of operators, redistributions, buckets, stages and ranks, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from profile_runs import Blocks, batch, linked_by_autograd, on_ranks, profiled, ranges, wrapped
from ranks import run_ranks
from torch import Tensor, nn

import shardwright as sw
from shardwright import process
from shardwright.runtime import profile_ranges
from shardwright.runtime.profile_ranges import RangeNames

OPERATORS = [
    *(f"layers.{i}.{name}" for i in (0, 1) for name in ("up linear", "relu", "down linear", "add")),
    "head linear",
    "cross_entropy_loss",
]

#: On ranks: what each kind has, beside its operators.
KINDS: dict[str, list[str]] = {
    "plain": [
        "bucket 1: all_reduce of the gradients of head.bias to layers.0.up.weight (10) issue",
        "bucket 1: all_reduce of the gradients of head.bias to layers.0.up.weight (10) wait",
        "redistribute: the result of cross_entropy_loss [-] +sum 2@1 -> [-] by all_reduce(2@1)",
    ],
    "level3 recompute": [
        "redistribute: head.weight [2@1, -] -> [-, -] by all_gather(2@1)",
        "redistribute: head.weight [2@1, -] -> [-, -] by all_gather(2@1) backward",
        "gather: head.weight again",
        "layers.1.up linear recomputed",
    ],
    "pipeline": [
        "stage 1, micro-batch 1, forward",
        "stage 1, micro-batch 0, backward",
        "receive: the value 'add', micro-batch 1, of stage 0 for stage 1",
    ],
    "level3 library": [
        "bucket 1: all_gather of the weights of layers.1.up.weight to layers.1.down.bias (4) issue",
        "bucket 1: all_gather of the weights of layers.1.up.weight to layers.1.down.bias (4) wait",
        "bucket 4: all_gather of the weights of head.weight, again issue",
        "bucket 8: reduce_scatter of the gradients of layers.1.down.bias to layers.1.up.weight (4) issue",
        "bucket 8: reduce_scatter of the gradients of layers.1.down.bias to layers.1.up.weight (4) wait",
    ],
    "towers library": [
        f"redistribute: the result of first linear [2@1, -] -> [-, 2@1] by all_to_all(2@1){part}"
        for part in (" issue", " wait", " backward issue", " backward wait")
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traces of two ranks."""
    made = tmp_path_factory.mktemp("traces")
    run_ranks(on_ranks, 2, made, tuple(KINDS))
    return made


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices in this process."""
    monkeypatch.setattr(process, "_current", [])
    sw.init(devices=2)


def check_backward(path: Path) -> None:
    """Each function of autograd runs in the range that belongs to the range of its operator."""
    links = linked_by_autograd(path)
    assert len([link for link in links if link[1]]) > 10
    assert [link for link in links if link[2] != (f"{link[1]} backward" if link[1] else "")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_names_on_ranks(kind: str, folder: Path) -> None:
    path = folder / f"{kind}.1.json"
    found = ranges(path)
    print(kind, *dict.fromkeys(found), sep="\n")
    assert [text for text in KINDS[kind] if text not in found] == []
    mine = [text for text in OPERATORS if kind != "pipeline" or not text.startswith("layers.0")]
    if "towers" in kind:
        mine = ["first linear", "second linear", "tanh", "sin", "join add", "cross_entropy_loss"]
    assert [text for text in mine if text not in found or f"{text} backward" not in found] == []
    plan = sw.Plan.load(folder / f"{kind}.plan.json")
    assert found.count(f"step rank 1 of 2, plan {plan.fingerprint}") == 2
    check_backward(path)


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
        model(*batch()).backward()
    with torch.profiler.profile():
        model(*batch()).backward()
    monkeypatch.setattr(profile_ranges, "record_function", made)
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


def test_names_are_unique(folder: Path) -> None:
    for kind in KINDS:
        plan = sw.Plan.load(folder / f"{kind}.plan.json")
        names = RangeNames.of(plan)
        texts = [names.operator(name) for name in names.paths]
        assert len(texts) == len(set(texts))

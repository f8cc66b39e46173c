"""Files of checkpoints that are whole by their digests and seals, and say what cannot be: refused, with the place."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st
from torch import nn

import shardwright as sw
from shardwright.checkpoint import manifest
from shardwright.checkpoint.checkpoint_folders import LOCK
from shardwright.checkpoint.digests import digest
from shardwright.checkpoint.manifest import untiled
from shardwright.checkpoint.stored_checkpoint import StoredTensors
from shardwright.checkpoint.tensor_files import header_of
from shardwright.cli.main import main
from shardwright.errors import CheckpointError


def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    net, optimizer, schedule = made()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step(), schedule.step()
    folder = tmp_path_factory.mktemp("sound")
    return sw.save_checkpoint(net, optimizer, folder, step=3, schedulers=schedule, integrated_save=False).wait()


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run" / sound.name))


def refused(folder: Path, says: str) -> CheckpointError:
    net, optimizer, schedule = made()
    before = [p.detach().clone() for p in net.parameters()], torch.get_rng_state(), dict(optimizer.param_groups[0])
    with pytest.raises(CheckpointError) as caught:
        sw.load_checkpoint(net, optimizer, folder, schedulers=schedule)
    assert says in str(caught.value) and caught.value.legal, str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before[0]))
    assert torch.equal(torch.get_rng_state(), before[1]) and dict(optimizer.param_groups[0]) == before[2]
    return caught.value


# -- manifests ---------------------------------------------------------------------------------------------------------


def sealed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, under a seal of what it says now."""
    words = json.loads((folder / "manifest.json").read_text())
    change(words)
    words.pop("seal")
    body = json.dumps(words, ensure_ascii=False)[:-1]
    text = f'{body},\n "seal": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'
    (folder / "manifest.json").write_text(text)


def pieces(words: dict[str, Any], name: str = "model.weight") -> list[Any]:
    return words["tensors"][name]["pieces"]


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a file of another folder": (
        lambda w: w["files"].update({"../other": w["files"].pop("plan.json", {"bytes": 0, "digest": ""})}),
        'files["../other"]: it is no name of a file in the checkpoint\'s folder',
    ),
    "a file of the system": (lambda w: w["files"].update({"/etc/passwd": {"bytes": 0, "digest": ""}}), "it is no name"),
    "the folder itself": (lambda w: w["files"].update({"..": {"bytes": 0, "digest": ""}}), 'files[".."]'),
    "a cursor that moves": (lambda w: w["files"].update({"\x1b[2J": {"bytes": 0, "digest": ""}}), "it is no name"),
    "a piece of a file that is none of its": (
        lambda w: pieces(w)[0].__setitem__(0, "../x"),
        "is no file of the checkpoint",
    ),
    "a piece beyond its file": (lambda w: pieces(w)[0].__setitem__(1, 10**9), "it ends at byte 1,000,000,024 of __0_0"),
    "a piece before its file": (lambda w: pieces(w)[0].__setitem__(1, -1), "-1 is no whole number from 0"),
    "a piece too many": (lambda w: pieces(w).append(pieces(w)[0]), "they have 12 elements, the tensor has 6"),
    "no piece": (lambda w: pieces(w).clear(), "they have 0 elements, the tensor has 6"),
    "pieces that overlap": (
        lambda w: pieces(w).__setitem__(
            slice(None), [[*pieces(w)[0][:2], [0, 0], [2, 2]], [*pieces(w)[0][:2], [1, 1], [1, 2]]]
        ),
        "the pieces at [0, 0] of [2, 2] and at [1, 1] of [1, 2] overlap",
    ),
    "a piece outside of its tensor": (lambda w: pieces(w)[0].__setitem__(2, [0, 1]), "is not within [2, 3]"),
    "a piece of other dims": (
        lambda w: pieces(w)[0].__setitem__(3, [6]),
        "[6] is no whole number from 0 for each of 2 dims",
    ),
    "no shape": (lambda w: w["tensors"]["model.weight"].update(shape=[2**40, 2**40]), "is no shape"),
    "no dtype": (lambda w: w["tensors"]["model.weight"].update(dtype="onnx"), "no dtype 'onnx'"),
    "no layout": (lambda w: w["tensors"]["model.weight"].update(layout={"devices": 2}), "layout"),
    "no size": (lambda w: w["files"]["state.json"].update(bytes=True), 'files["state.json"].bytes: True is no whole'),
    "a digest that is none": (
        lambda w: w["files"]["state.json"].update(digest="0" * 8),
        "is not 16 hexadecimal digits",
    ),
    "no step": (lambda w: w.update(step="3"), "step: '3' is no whole number"),
    "no world": (lambda w: w.update(world=10**9), "world: 1000000000 is no whole number from 1 to 1,048,576"),
    "no kind": (lambda w: w.update(kind=[]), "kind: [] is none of integrated, parts"),
    "no files": (lambda w: w.update(files=[]), "files: it is a list, and no object"),
    "more": (lambda w: w.update(more=1), "is no object with schema, kind"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_a_manifest_cannot_say(name: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, says = MANIFESTS[name]
    sealed(copy, lambda words: None)
    manifest.read(copy)
    sealed(copy, change)
    error = refused(copy, says)
    assert error.source == str(copy / "manifest.json")
    assert main(["checkpoint", "verify", str(copy)]) == 1
    out = capsys.readouterr()
    assert f"{copy}/manifest.json: the manifest is damaged: " in out.out and says in out.out and "\x1b" not in out.out


PAIR = st.tuples(st.integers(0, 3), st.integers(0, 3))
BOXES = st.lists(st.tuples(PAIR, PAIR), max_size=5)


@given(st.tuples(st.integers(0, 4), st.integers(0, 4)), BOXES)
def test_pieces_fill_a_tensor_exactly_once_or_not(shape: tuple[int, int], boxes: list[Any]) -> None:
    given_ = tuple((tuple(starts), tuple(sizes)) for starts, sizes in boxes)
    cells = [
        cell
        for starts, sizes in given_
        for cell in itertools.product(*(range(a, a + n) for a, n in zip(starts, sizes)))
    ]
    inside = all(a + n <= dim for starts, sizes in given_ for a, n, dim in zip(starts, sizes, shape))
    exact = sorted(cells) == sorted(itertools.product(*map(range, shape)))
    assert (untiled(shape, given_) is None) == (inside and exact)


@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_cut_of_a_tensor_fills_it(dims: int, rng: random.Random) -> None:
    shape = tuple(rng.randint(1, 9) for _ in range(dims))
    boxes = [((0,) * dims, shape)]
    for _ in range(rng.randint(0, 20)):
        starts, sizes = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(dims)
        at = rng.randint(0, sizes[dim])
        for first, count in ((0, at), (at, sizes[dim] - at)):
            if count:
                start = (*starts[:dim], starts[dim] + first, *starts[dim + 1 :])
                boxes.append((start, (*sizes[:dim], count, *sizes[dim + 1 :])))
    rng.shuffle(boxes)
    assert untiled(shape, tuple(boxes)) is None
    assert untiled(shape, tuple(boxes[1:])) is not None and math.prod(shape) > 0


# -- state.json --------------------------------------------------------------------------------------------------------


def stated(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the state, under a digest of what it says now."""
    file, made_ = folder / "state.json", manifest.read(folder)
    words = json.loads(file.read_text())
    change(words)
    file.write_text(json.dumps(words))
    files = {**made_.files, file.name: manifest.CheckpointFile(file.stat().st_size, digest(file))}
    manifest.write(folder, replace(made_, files=files))


def settings_of(words: dict[str, Any]) -> dict[str, Any]:
    return words["optimizer"]["groups"][0]["settings"]


STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a rate of text": (lambda w: settings_of(w).update(lr="0.1"), "the optimizer's group 0: lr is '0.1'"),
    "a rate below 0": (lambda w: settings_of(w).update(lr=-0.1), "lr is -0.1\n  legal: a number from 0"),
    "a rate that is true": (lambda w: settings_of(w).update(lr=True), "lr is True"),
    "an infinite rate": (lambda w: settings_of(w).update(lr={"float": "inf"}), "lr is inf\n  legal: a number from 0"),
    "a rate that is no number": (lambda w: settings_of(w).update(initial_lr={"float": "nan"}), "initial_lr is nan"),
    "three betas": (lambda w: settings_of(w).update(betas={"tuple": [0.9, 0.9, 0.9]}), "betas is (0.9, 0.9, 0.9)"),
    "a beta above 1": (lambda w: settings_of(w).update(betas={"tuple": [0.9, 1.5]}), "legal: a number from 0 to 1"),
    "a flag of 2": (lambda w: settings_of(w).update(amsgrad=2), "amsgrad is 2"),
    "parameters": (lambda w: settings_of(w).update(params=[]), "params is []"),
    "settings of a list": (lambda w: w["optimizer"]["groups"][0].update(settings=[1]), "settings is [1]"),
    "another step": (
        lambda w: w.update(step=4),
        "the state of the run: step is 4\n  legal: the step of the manifest, 3",
    ),
    "no kind": (lambda w: w["optimizer"].update(kind=1), "optimizer is {'kind': 1"),
    "no groups": (lambda w: w["optimizer"].update(groups=None), "optimizer is"),
    "no schedulers": (lambda w: w.update(schedulers={}), "schedulers is {}"),
    "no ranks": (lambda w: w["random"].update(ranks=[5]), "random.ranks is [5]"),
    "no tied names": (lambda w: w.update(tied={"a": 1}), "tied['a'] is 1"),
    "a tensor that is too large": (
        lambda w: w.update(extra={"tensor": "AAAA", "dtype": "float32", "shape": [10**12]}),
        "extra cannot be read: a tensor of the shape [1000000000000] with 3 bytes",
    ),
    "an object of numpy": (
        lambda w: w.update(extra={"array": "AAAAAAAAAAA=", "dtype": "|O", "shape": [1]}),
        "extra cannot be read: an array of '|O'",
    ),
    "a generator's state": (
        lambda w: w["random"]["states"][0].update(torch={"bytes": "AAAA"}),
        "random['torch'] cannot be set: ",
    ),
    "a schedule's state": (
        lambda w: w["schedulers"][0].update(state=5),
        "StepLR does not take the state that was saved",
    ),
    "a depth": (
        lambda w: w.update(extra=json.loads("[" * 150 + "]" * 150)),
        "objects and lists are more than 100 deep",
    ),
    "digits": (lambda w: w.update(extra=10**150), "at extra: an integer of 151 digits"),
}


@pytest.mark.parametrize("name", STATES)
def test_what_a_state_cannot_say(name: str, copy: Path) -> None:
    change, says = STATES[name]
    stated(copy, change)
    assert "state.json" in str(refused(copy, says).source)


def test_settings_that_may_differ(copy: Path) -> None:
    stated(
        copy,
        lambda w: settings_of(w).update(
            lr=1, foreach=True, fused=None, note="mine", eps={"tensor": "AACAPw==", "dtype": "float32", "shape": []}
        ),
    )
    net, optimizer, schedule = made()
    sw.load_checkpoint(net, optimizer, copy, schedulers=schedule)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["foreach"], group["note"]) == (1, True, "mine") and float(group["eps"]) == 1.0


def test_values_that_could_not_be_read_again_are_not_written(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(150):
        deep = [deep]
    endless: list[Any] = []
    endless.append(endless)
    for extra, says in (
        (10**100, "at extra: an integer of 101 digits"),
        ({"a": ["\ud800"]}, r'at extra.a\[0\]: the text "\\ud800" has half of a surrogate pair'),
        (deep, "objects and lists are more than 100 deep"),
        (endless, "extra is nested too deep"),
    ):
        with pytest.raises(CheckpointError, match=says):
            sw.save_checkpoint(nn.Linear(2, 2), path=tmp_path, step=1, extra=extra)
        assert [file.name for file in tmp_path.iterdir()] in ([], [LOCK])


# -- files of others ---------------------------------------------------------------------------------------------------


def header(path: Path, words: Any, data: int) -> None:
    text = json.dumps(words).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


def span(shape: Any, first: int, last: int, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    "words, data, says",
    [
        (
            {"a": span([2], 0, 8), "b": span([2], 4, 12)},
            12,
            "'b' begins at byte 4 of the tensors, and those before it end at",
        ),
        ({"a": span([2], 4, 12)}, 12, "'a' begins at byte 4"),
        ({"a": span([2], 0, 8)}, 4, "bytes instead of"),
        ({"a": span([2], 0, 8)}, 20, "longer than its tensors"),
        ({"a": span([-2], 0, 8)}, 8, "has the shape [-2]"),
        ({"a": span([2**62, 4], 0, 8)}, 8, "has the shape"),
        ({"a": span([2], 8, 0)}, 8, "at [8, 0]"),
        ({"a": span([2], 0, 8, "Q4")}, 8, "has the dtype 'Q4', of which torch has none"),
        ({"a": span([2], 0, 8, ["F32"])}, 8, "has the dtype ['F32']"),
        ({"a": 1}, 0, "'a' is 1"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__ is {'a': 1}"),
        ([1], 0, "its header is a list, and no object"),
    ],
)
def test_headers_of_safetensors(words: Any, data: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header(path, words, data)
    with pytest.raises(CheckpointError) as caught:
        header_of(path)
    assert says in str(caught.value) and caught.value.source == str(path)


def test_a_large_file_of_safetensors(tmp_path: Path) -> None:
    """Offsets beyond 4 GiB; the file has holes on the disk."""
    path, size = tmp_path / "model.safetensors", 5 << 30
    words = {
        "a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "b": {"dtype": "U8", "shape": [size], "data_offsets": [size, 2 * size]},
    }
    header(path, words, 0)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + 2 * size)
    assert [span.shape for span in header_of(path).tensors.values()] == [(size,), (size,)]


@pytest.mark.parametrize("file", ["../a.safetensors", "/a.safetensors", "sub/a.safetensors", "", "..", 3, None, ["a"]])
def test_an_index_names_files_of_its_folder(file: Any, tmp_path: Path) -> None:
    folder = tmp_path / "face"
    folder.mkdir()
    safetensors.torch.save_file({"weight": torch.ones(2)}, tmp_path / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": file}}))
    with pytest.raises(CheckpointError, match="'weight' is in .*, which is no file beside the index"):
        StoredTensors(folder)

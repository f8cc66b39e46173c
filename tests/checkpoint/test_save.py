"""Saving in one process: what a checkpoint holds, that it is there whole or not at all, and when one is made."""

from __future__ import annotations

import collections
import json
import math
import os
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_runs import KINDS, Net, steps, trained, unlocked
from small_networks import D, draw
from torch import nn

import shardwright as sw
from shardwright.checkpoint import callback, checkpoint_folders, manifest, save, tensor_files, writer
from shardwright.checkpoint.stored_checkpoint import StoredTensors
from shardwright.errors import CheckpointError, SettingError
from shardwright.json_files import json_values
from shardwright.json_files.json_values import decode, encode

# -- what it holds -----------------------------------------------------------------------------------------------------


@KINDS
def test_names_and_values(tmp_path: Path, whole: bool) -> None:
    model, optimizer = trained()
    path = sw.save_checkpoint(model, optimizer, tmp_path, step=1, integrated_save=whole).wait()
    assert path == tmp_path / "step-00000001" == sw.latest_checkpoint(tmp_path)
    assert manifest.verify(path) == []
    stored = StoredTensors(path)
    state = model.state_dict()
    assert [n for n in stored.names if n.startswith("model.")] == [f"model.{n}" for n in state]
    for name, value in state.items():
        assert torch.equal(stored.read(f"model.{name}"), value)
    for name, parameter in model.named_parameters():
        assert torch.equal(
            stored.read(f"optimizer.{name}.momentum_buffer"), optimizer.state[parameter]["momentum_buffer"]
        )
    assert sw.Plan.load(path / "plan.json").fingerprint == model.plan.fingerprint == stored.manifest.plan
    layout = stored.entries["model.layers.0.weight"].layout
    assert layout == {"devices": 4, "first": 0, "layout": [4, 1]}


def test_the_latest_checkpoint_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_text("")
    assert sw.latest_checkpoint(tmp_path) is None and sw.latest_checkpoint(tmp_path / "none") is None
    with pytest.raises(sw.CheckpointError, match="it is a file, and not the folder of a checkpoint") as error:
        sw.latest_checkpoint(tmp_path / "model.ckpt")
    assert error.value.source == str(tmp_path / "model.ckpt") and error.value.legal == "the folder of a run"


def test_integrated_is_plain_safetensors_with_tied_weights_once(tmp_path: Path) -> None:
    net = Net(tied=True)
    path = sw.save_checkpoint(net, path=tmp_path, step=0).wait()
    held = safetensors.torch.load_file(path / "model.safetensors")
    assert set(held) == {n for n in net.state_dict() if n != "layers.2.weight"}
    other = Net(tied=True)
    nn.init.zeros_(other.layers[1].weight)
    assert safetensors.torch.load_model(other, str(path / "model.safetensors")) == (set(), [])
    assert torch.equal(other.layers[2].weight, net.layers[1].weight)
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt" and file.metadata()["layers.2.weight"] == "layers.1.weight"


def test_parts_are_read_by_plain_torch(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained()
    path = sw.save_checkpoint(model, optimizer, tmp_path, step=1, integrated_save=False).wait()
    held = {
        "model": {n: torch.zeros_like(p) for n, p in model.state_dict().items()},
        "optimizer": {"head.bias": {"momentum_buffer": torch.zeros(8, dtype=D)}},
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(held, checkpoint_id=path)
    assert all(torch.equal(held["model"][n], p) for n, p in model.state_dict().items())
    assert torch.equal(
        held["optimizer"]["head.bias"]["momentum_buffer"],
        optimizer.state[model.get_parameter("head.bias")]["momentum_buffer"],
    )


@KINDS
def test_dtypes_shapes_and_losses_with_parameters(tmp_path: Path, whole: bool) -> None:
    net = nn.Linear(4, 4).to(torch.bfloat16)
    net.register_buffer("count", torch.tensor(3))
    net.register_buffer("none", torch.empty(0, 3))
    net.register_buffer("flags", torch.tensor([True, False]))
    net.register_buffer("turned", draw(6, 5).t())
    net.register_buffer("unsaved", draw(2), persistent=False)
    loss = nn.PReLU()
    path = sw.save_checkpoint(sw.AutoParallel(net, loss), path=tmp_path, step=0, integrated_save=whole).wait()
    stored = StoredTensors(path)
    assert set(stored.names) == {*(f"model.{n}" for n in net.state_dict()), "loss_fn.weight"}
    for name, value in net.state_dict().items():
        assert torch.equal(stored.read(f"model.{name}"), value) and stored.dtype(f"model.{name}") == value.dtype
    if whole:
        net.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"))


def test_what_the_format_does_not_know(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match="complex128.*\n.*integrated_save=False"):
        sw.save_checkpoint(net, path=tmp_path, step=0)
    assert unlocked(tmp_path) == set()
    path = sw.save_checkpoint(net, path=tmp_path, step=0, integrated_save=False).wait()
    assert torch.equal(StoredTensors(path).read("model.wide"), net.wide)


# -- whole or not at all -----------------------------------------------------------------------------------------------


def killed(call: Any) -> None:
    """Run something in a process of its own that dies of it."""
    child = os.fork()
    if not child:
        try:
            call()
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def dies(*args: Any, **kwargs: Any) -> None:
    os._exit(9)


@pytest.mark.parametrize(
    "where",
    [
        (tensor_files, "_put"),
        (checkpoint_folders, "synced"),
        (checkpoint_folders, "write_manifest"),
        (checkpoint_folders, "sync_folder"),
        (checkpoint_folders, "prune"),
    ],
    ids=lambda w: w[1],
)
def test_a_killed_save_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]) -> None:
    model, optimizer = trained()
    sw.save_checkpoint(model, optimizer, tmp_path, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(*where, dies)
        killed(lambda: sw.save_checkpoint(model, optimizer, tmp_path, step=2))
    done = where[1] == "prune"
    assert sw.latest_checkpoint(tmp_path).name == f"step-0000000{2 if done else 1}"
    assert manifest.verify(sw.latest_checkpoint(tmp_path)) == []
    assert len(unlocked(tmp_path)) == 2, "what it left"
    sw.save_checkpoint(model, optimizer, tmp_path, step=3)
    assert unlocked(tmp_path) == {"step-00000001", "step-00000003"} | ({"step-00000002"} if done else set())


@pytest.mark.parametrize("dies_at", [1, 2])
def test_a_step_is_replaced_without_a_moment_in_which_it_could_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    model, optimizer = trained()
    sw.save_checkpoint(model, optimizer, tmp_path, step=1, extra="first")
    rename, count = os.rename, []

    def renamed(*args: Any) -> None:
        count.append(args)
        rename(*args) if len(count) < dies_at else os._exit(9)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", renamed)
        killed(lambda: sw.save_checkpoint(model, optimizer, tmp_path, step=1, extra="second"))
    assert manifest.verify(sw.latest_checkpoint(tmp_path)) == []
    assert sw.load_checkpoint(model, optimizer, tmp_path, step=1).extra == "first"
    sw.save_checkpoint(model, optimizer, tmp_path, step=0, extra="third")
    assert unlocked(tmp_path) == {"step-00000000", "step-00000001"}
    sw.save_checkpoint(model, optimizer, tmp_path, step=1, extra="second")
    assert sw.load_checkpoint(model, optimizer, tmp_path).extra == "second"
    assert unlocked(tmp_path) == {"step-00000000", "step-00000001"}


def test_the_oldest_go_once_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(2, 2)
    there: list[list[int]] = []
    prune = checkpoint_folders.prune
    monkeypatch.setattr(
        checkpoint_folders, "prune", lambda path, *rest: (there.append(steps(path)), prune(path, *rest))
    )
    for step in (1, 2, 3, 4):
        sw.save_checkpoint(net, path=tmp_path, step=step, keep_checkpoint_max=2)
    assert there == [[1], [1, 2], [1, 2, 3], [2, 3, 4]] and steps(tmp_path) == [3, 4]
    sw.save_checkpoint(net, path=tmp_path, step=0, keep_checkpoint_max=2)
    assert steps(tmp_path) == [0, 4], "the new one stays, whatever its number"
    for step in (7, 8, 9):
        sw.save_checkpoint(net, path=tmp_path, step=step, keep_checkpoint_max=None)
    assert steps(tmp_path) == [0, 4, 7, 8, 9]


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_input(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    (tmp_path / "file").write_text("")
    with sw.no_init_parameters():
        later = nn.Linear(2, 2)
    for what, call in {
        r"step=-1\n.*from 0": lambda: sw.save_checkpoint(net, path=tmp_path, step=-1),
        r"step=True": lambda: sw.save_checkpoint(net, path=tmp_path, step=True),
        r"step=1.5": lambda: sw.save_checkpoint(net, path=tmp_path, step=1.5),
        r"path=None": lambda: sw.save_checkpoint(net, step=1),
        r"keep_checkpoint_max=0\n.*None": lambda: sw.save_checkpoint(net, path=tmp_path, step=1, keep_checkpoint_max=0),
        r"file: it is a file": lambda: sw.save_checkpoint(net, path=tmp_path / "file", step=1),
        r"file.*Not a directory": lambda: sw.save_checkpoint(net, path=tmp_path / "file" / "run", step=1),
        r"extra\['a'\]\[1\] is a object, which cannot be saved": lambda: sw.save_checkpoint(
            net, path=tmp_path, step=1, extra={"a": [1, object()]}
        ),
        r"OrderedDict is no model": lambda: sw.save_checkpoint(net.state_dict(), path=tmp_path, step=1),
        r"SGD has in group 0 a parameter of shape \(3, 3\) that is none of the model's": lambda: sw.save_checkpoint(
            net, torch.optim.SGD([nn.Parameter(torch.zeros(3, 3))], 0.1), tmp_path, step=1
        ),
        r"'weight' has no values yet": lambda: sw.save_checkpoint(sw.AutoParallel(later), path=tmp_path, step=1),
    }.items():
        with pytest.raises(CheckpointError, match=what):
            call()
    assert unlocked(tmp_path) == {"file"}, "nothing is left of any of them"
    assert sw.latest_checkpoint(tmp_path / "nowhere") is None


# -- when --------------------------------------------------------------------------------------------------------------


def test_every_n_steps(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    regular = sw.CheckpointCallback(
        sw.CheckpointConfig(tmp_path, every_n_steps=3, keep_checkpoint_max=2, integrated_save=False, asynchronous=True),
        net,
    )
    made = [regular.step(step, extra={"step": step}) for step in range(11)]
    regular.wait()
    assert [m.step for m in made if m is not None] == [3, 6, 9] and steps(tmp_path) == [6, 9]
    assert (tmp_path / "step-00000009" / ".metadata").exists()
    assert sw.load_checkpoint(net, path=tmp_path).extra == {"step": 9}
    assert regular.step(9) is None, "it has been saved"


def test_every_n_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [100.0], []
    monkeypatch.setattr(callback.time, "monotonic", lambda: now[0])

    class Counted(save.ranks_of_now().__class__):
        def from_first(self, mine: Any) -> Any:
            asked.append(now[0])
            return mine

    monkeypatch.setattr(callback, "ranks_of_now", lambda purpose: Counted())
    regular = sw.CheckpointCallback(
        sw.CheckpointConfig(tmp_path, every_n_minutes=10, every_n_steps=1500), nn.Linear(2, 2)
    )
    made = []
    for step in range(1, 2001):
        now[0] += 1
        if regular.step(step) is not None:
            made.append(step)
    assert made == [600, 1200, 1500], "minutes are counted from the last one"
    assert len(asked) < 60, "most steps ask nobody"


def test_configurations() -> None:
    for what, given in {
        "neither every_n_steps nor every_n_minutes": {},
        "every_n_steps=0": {"every_n_steps": 0},
        "every_n_steps=True": {"every_n_steps": True},
        "every_n_minutes=-1": {"every_n_minutes": -1},
        "every_n_minutes='1'": {"every_n_minutes": "1"},
    }.items():
        with pytest.raises(SettingError, match=what):
            sw.CheckpointConfig("path", **given)
    with pytest.raises(SettingError, match="path=3"):
        sw.CheckpointConfig(3, every_n_steps=1)
    with pytest.raises(SettingError, match="CheckpointConfig"):
        sw.CheckpointCallback({"path": 1}, nn.Linear(2, 2))


# -- the ground --------------------------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([torch.float32, torch.bool, torch.device("cpu")]),
)
KEYS = st.one_of(
    st.text(max_size=8),
    st.integers(),
    st.booleans(),
    st.tuples(st.integers()),
    st.sampled_from(["tuple", "dict", "tensor", "array", "float", "bytes", "shape"]),
)
SETS = st.sets(st.integers(), max_size=3).map(
    lambda s: set(sorted(s, key=repr))
)  # of one order, on which their repr depends
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        SETS,
        st.lists(st.integers(), max_size=4).map(collections.Counter),
    ),
    max_leaves=10,
)


@hypothesis.given(VALUES)
@hypothesis.settings(max_examples=60)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and repr(back) == repr(value)


def test_tensors_and_arrays_come_back_too() -> None:
    given = {
        "t": [torch.tensor([1.5, math.inf]).bfloat16(), torch.zeros(0, 2), torch.tensor(True)],
        "a": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "n": np.float64(2.5),
    }
    back = decode(json.loads(json.dumps(encode(given))))
    assert all(torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape for a, b in zip(back["t"], given["t"]))
    assert np.array_equal(back["a"], given["a"]) and back["a"].dtype == np.uint32 and back["n"] == 2.5
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan)))))


def test_which_boxes_are_joined() -> None:
    shapes = {
        "columns": (6, 2**13),
        "blocks": (4, 2**14),
        "last": (2, 3, 2**14),
        "long": (6, 2**17),
        "rows": (8, 2**13),
    }
    tensors = {name: (shape, "float32", None) for name, shape in shapes.items()}
    message = [
        {
            "columns": ((0, 2**11 * r), (6, 2**11)),
            "blocks": ((2 * (r // 2), 2**13 * (r % 2)), (2, 2**13)),
            "last": ((0, 0, 2**12 * r), (2, 3, 2**12)),
            "long": ((0, 2**15 * r), (6, 2**15)),  # 128 KiB
            "rows": ((2 * r, 0), (2, 2**13)),
        }
        for r in range(4)
    ]
    joints = writer.joints_of(tensors, message, 2**16)
    assert [(j.name, j.ranks, j.dims, j.first, j.rows) for j in joints] == [
        ("columns", (0, 1, 2, 3), 1, 0, 6),
        ("blocks", (0, 1), 1, 0, 2),
        ("blocks", (2, 3), 1, 2, 2),
        ("last", (0, 1, 2, 3), 2, 0, 6),
    ]
    for joint in joints:
        shares = [joint.share(number, step) for number in range(len(joint.ranks)) for step in range(joint.steps)]
        assert [row for share in shares for row in range(*share)] == list(range(joint.rows)), "each row once"
        assert all((end - begin) * joint.row * 4 <= 2**16 for begin, end in shares), "as much as fits"
    rounds = writer._rounds(joints)
    assert len(rounds) == sum(j.steps for j in joints if j.name != "blocks") + 1, "two blocks at once"
    for rank in range(4):
        taken = [now[rank] for now in rounds if rank in now]
        assert taken == [(j, step) for j in joints if rank in j.ranks for step in range(j.steps)], (
            "each its own, in order"
        )
    assert all(now[other] == now[rank] for now in rounds for rank in now for other in now[rank][0].ranks), "all at once"
    del message[2]["columns"]
    assert "columns" not in {j.name for j in writer.joints_of(tensors, message, 2**16)}, (
        "rows of which a part is not there"
    )


@st.composite
def boxes(draw_: Any) -> tuple[list[int], list[slice], list[slice]]:
    shape = draw_(st.lists(st.integers(0, 6), max_size=4))

    def box() -> list[slice]:
        ends = [sorted(draw_(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        return [slice(a, b) for a, b in ends]

    return shape, box(), box()


@hypothesis.given(boxes(), st.sampled_from([torch.float32, torch.int8, torch.bfloat16]), st.integers(0, 3))
@hypothesis.settings(max_examples=60)
def test_any_box_is_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, given: tuple, dtype: torch.dtype, page: int
) -> None:
    from shardwright.checkpoint import stored_checkpoint

    shape, first, second = given
    kept = stored_checkpoint._APART, stored_checkpoint._TOGETHER
    stored_checkpoint._APART, stored_checkpoint._TOGETHER = (0, 8, 64, 4096)[page], (8, 64, 256, 4096)[page]
    try:
        folder = tmp_path_factory.mktemp("box")
        whole = torch.arange(math.prod(shape) + 1, dtype=torch.float32)[1:].to(dtype).reshape(shape)
        described = {
            "model.other": ((3,), "uint8", None),
            "model.x": (tuple(shape), json_values.dtype_name(dtype), None),
        }
        files = tensor_files.WholeFiles(described, "ab", 1)
        files.begin(folder)
        files.write(folder, [("model.x", [0] * len(shape), torch.zeros(shape, dtype=dtype))])
        files.write(folder, [("model.x", [s.start for s in first], whole[tuple(first)])])
        expected = torch.zeros(shape, dtype=dtype)
        expected[tuple(first)] = whole[tuple(first)]
        assert torch.equal(safetensors.torch.load_file(folder / "model.safetensors")["x"], expected)
        assert torch.equal(StoredTensors(folder).read("model.x", second), expected[tuple(second)])
    finally:
        stored_checkpoint._APART, stored_checkpoint._TOGETHER = kept

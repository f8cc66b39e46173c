"""Checkpoints cut for other plans and numbers of devices, merged, looked at and verified, in one process without
devices."""

from __future__ import annotations

import ctypes
import errno
import json
import multiprocessing
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_runs import PLANS, Net, adamw, alike, batch, train
from hypothesis import given, settings, strategies as st
from ranks import PATIENCE, run_ranks

import shardwright as sw
from shardwright.checkpoint import manifest, tensor_files
from shardwright.checkpoint.stored_checkpoint import StoredTensors
from shardwright.checkpoint.transform import merge, transform
from shardwright.cli import main
from shardwright.errors import CheckpointError
from shardwright.planfile.parameter_file import ParameterStrategies, TensorStorage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it is: plain DCP in one process

#: Of these a real run of four saves, whose parts are compared with ours.
REAL = ("rows and columns", "level1", "two stages")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of whole files, step 2, and one in parts, step 3; its losses from step 2 on."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(5)
    sw.init(devices=4)
    model = PLANS["rows and columns"](4)
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    sw.save_checkpoint(model, optimizer, folder, step=2, extra={"losses": "beside"})
    sw.save_checkpoint(model, optimizer, folder, step=3, integrated_save=False)
    (folder / "losses.json").write_text(json.dumps(train(model, optimizer, 2, 4)))
    return folder


def of_ones_own(devices: int) -> tuple[sw.AutoParallel, torch.optim.Optimizer]:
    """A model of which each rank has a weight of its own, and all have the same bias."""
    sw.init(devices=devices)
    net = torch.nn.Linear(8, 8, dtype=torch.float64)
    with torch.no_grad():
        net.bias.fill_(0.5)
    net.weight = sw.layerwise_parallel(lambda rank: torch.linspace(-1, 1 + rank, 64, dtype=torch.float64).view(8, 8))
    model = sw.AutoParallel(net, torch.nn.MSELoss(), "hybrid_parallel").dataset_strategy("full_batch")
    return model, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def test_slices_that_are_each_ranks_own_are_those_of_as_many_ranks(tmp_path):
    x, y = torch.ones(8, 8, dtype=torch.float64), torch.zeros(8, 8, dtype=torch.float64)

    def steps(model: sw.AutoParallel, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        out = []
        for _ in range(count):
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        return out

    def strategies(devices: int) -> Path:
        path = tmp_path / f"{devices}.json"
        of_ones_own(devices)[0].save_param_strategy_file(path).infer_layout(x, y)
        return path

    model, optimizer = of_ones_own(4)
    steps(model, optimizer, 2)
    sw.save_checkpoint(model, optimizer, tmp_path / "run", step=2)
    later = steps(model, optimizer, 2)
    moved = transform(tmp_path / "run", tmp_path / "four", strategies(4))
    model, optimizer = of_ones_own(4)
    sw.load_checkpoint(model, optimizer, moved)
    assert steps(model, optimizer, 2) == later
    with pytest.raises(CheckpointError, match=r"'weight' is \[4, 8, 8\] in it and \[2, 8, 8\] in them"):
        transform(tmp_path / "run", tmp_path / "two", strategies(2))
    assert not (tmp_path / "two").exists()
    with pytest.raises(CheckpointError, match="'weight' is the slices of 4 ranks, each its own"):
        sw.load_checkpoint(*of_ones_own(2), tmp_path / "run")


def plan_of(name: str, devices: int, folder: Path) -> Path:
    """The plan of a model of `PLANS`, saved."""
    path = folder / "plan.json"
    torch.manual_seed(5)
    sw.init(devices=devices)
    PLANS[name](devices).save_operator_strategy_file(path).infer_layout(*batch(0))
    return path


def equal(one: Path, other: Path) -> None:
    """Two checkpoints hold the same tensors, bit for bit, and the same of all else but how they lie."""
    with StoredTensors(one) as a, StoredTensors(other) as b:
        assert set(a.names) == set(b.names)
        for name in a.names:
            assert a.dtype(name) == b.dtype(name) and torch.equal(a.read(name), b.read(name)), name
        assert (a.manifest.model, a.manifest.step) == (b.manifest.model, b.manifest.step)
    states = [json.loads((folder / "state.json").read_text()) for folder in (one, other)]
    assert all(state.pop("id") == manifest.read(folder).id for state, folder in zip(states, (one, other)))
    assert states[0] == states[1]


def command(*words: object) -> int:
    try:
        return main.main(["checkpoint", *map(str, words)])
    except SystemExit as exit_:
        assert isinstance(exit_.code, int)
        return exit_.code


# -- what is made ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, devices", [("columns", 8), ("level1", 4), ("level2", 8), ("data_parallel", 2), ("two stages", 4)]
)
def test_parts_for_another_plan(name: str, devices: int, run: Path, tmp_path: Path) -> None:
    """Each rank's file has that rank's slices alone; plain DCP reads them; training goes on from them."""
    source, target, path = run / "step-00000002", tmp_path / "new", plan_of(name, devices, tmp_path)
    assert transform(source, target, path) == target and manifest.verify(target) == []
    equal(source, target)
    plan, made = sw.Plan.load(path), manifest.read(target)
    assert (made.kind, made.world, made.plan) == ("parts", devices, plan.fingerprint)
    assert (target / "plan.json").read_bytes() == path.read_bytes()
    assert {f for f in made.files if f.endswith(".distcp")} == {tensor_files.part_name(rank) for rank in range(devices)}
    for called, entry in made.tensors.items():
        tree, _, rest = called.partition(".")
        held = plan.parameters[rest if tree == "model" else rest.rpartition(".")[0]]
        if held.shape != entry.shape:
            continue  # a count of steps
        assert sum(_size(piece.sizes) for piece in entry.pieces) == _size(entry.shape)
        for piece in entry.pieces:
            box = held.slice(int(piece.file.split("_")[2]))
            assert all(s.start <= a and a + n <= s.stop for s, a, n in zip(box, piece.starts, piece.sizes)), called
    with StoredTensors(source) as stored:
        wanted = {name: stored.read(name) for name in stored.names}
    read = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    dcp.load(read, checkpoint_id=target, no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in wanted.items())

    model = PLANS[name](devices)
    optimizer = adamw(model)
    assert sw.load_checkpoint(model, optimizer, target).extra == {"losses": "beside"}
    alike(train(model, optimizer, 2, 4), json.loads((run / "losses.json").read_text()))


def _size(sizes: tuple[int, ...]) -> int:
    return torch.Size(sizes).numel()


def _on_ranks(rank: int, world: int, folder: str) -> dict[str, list[float]]:
    out = {}
    for name in REAL:
        torch.manual_seed(5)
        sw.init()
        model = PLANS[name](world)
        optimizer = adamw(model)
        sw.load_checkpoint(model, optimizer, Path(folder) / f"{name} transformed")
        out[name] = train(model, optimizer, 2, 4)
        sw.save_checkpoint(model, optimizer, Path(folder) / name, step=2, integrated_save=False)
        dist.barrier()
    return out


def test_parts_are_those_that_ranks_save(run: Path, tmp_path: Path) -> None:
    """The same boxes in the same files, and ranks go on from them."""
    for name in REAL:
        transform(run / "step-00000003", tmp_path / f"{name} transformed", plan_of(name, 4, tmp_path))
    for losses in run_ranks(_on_ranks, 4, str(tmp_path)):
        for name in REAL:
            alike(losses[name], json.loads((run / "losses.json").read_text()))
    for name in REAL:
        ours, theirs = (manifest.read(tmp_path / folder) for folder in (f"{name} transformed", f"{name}/step-00000002"))
        assert (ours.world, ours.plan, ours.model) == (theirs.world, theirs.plan, theirs.model)
        assert set(ours.tensors) == set(theirs.tensors)
        for called, entry in ours.tensors.items():
            assert entry.layout == theirs.tensors[called].layout, called
            assert {(p.file, p.starts, p.sizes) for p in entry.pieces} == {
                (p.file, p.starts, p.sizes) for p in theirs.tensors[called].pieces
            }, called


def test_one_device_whole_files_and_back(run: Path, tmp_path: Path) -> None:
    transform(run, tmp_path / "four", plan_of("columns", 4, tmp_path), step=3)
    transform(tmp_path / "four", tmp_path / "one", 1)
    assert manifest.read(tmp_path / "one").world == 1 and not (tmp_path / "one" / "plan.json").exists()
    merge(tmp_path / "four", tmp_path / "whole")
    assert manifest.read(tmp_path / "whole").kind == "integrated" and manifest.verify(tmp_path / "whole") == []
    for made in ("four", "one", "whole"):
        equal(run / "step-00000003", tmp_path / made)
    model = safetensors.torch.load_file(tmp_path / "whole" / "model.safetensors")
    Net().load_state_dict(model)
    with StoredTensors(run / "step-00000003") as stored:
        assert all(torch.equal(stored.read(f"model.{name}"), tensor) for name, tensor in model.items())


def test_a_model_of_hugging_face(tmp_path: Path) -> None:
    net = Net()
    (tmp_path / "face").mkdir()
    safetensors.torch.save_file(net.state_dict(), tmp_path / "face" / "model.safetensors")
    (tmp_path / "face" / "config.json").write_text('{"a": 1}')
    transform(tmp_path / "face", tmp_path / "parts", plan_of("level1", 4, tmp_path))
    assert (tmp_path / "parts" / "config.json").read_text() == '{"a": 1}'
    model = PLANS["columns"](4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert sw.load_checkpoint(model, path=tmp_path / "parts").step == 0
    assert all(torch.equal(p, q) for p, q in zip(model.net.parameters(), net.parameters()))


@st.composite
def strategies_of(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]]) -> ParameterStrategies:
    """Any cuts of tensors on any devices, of which a stage may have some alone; padded where they do not divide."""
    devices, out = draw(st.sampled_from([1, 2, 3, 4, 6, 8])), {}
    for name, shape in shapes.items():
        count = draw(st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]))
        left, cuts = count, []
        for _ in shape:
            cuts.append(draw(st.sampled_from([c for c in range(1, left + 1) if left % c == 0])))
            left //= cuts[-1]
        layout = sw.Layout.from_cuts(count, cuts) if shape else sw.Layout.replicated(count, 0)
        if len(shape) > 1 and draw(st.booleans()):
            layout = sw.Layout.of(count, reversed(layout.dims))
        out[name] = TensorStorage(shape, "float32", layout, draw(st.integers(0, devices // count - 1)) * count)
    return ParameterStrategies(devices, out, {})


SHAPES = {"a": (12, 10), "b": (7,), "c.d": (), "e": (3, 4, 5), "empty": (0, 4), "large": (1536, 1024)}


@settings(max_examples=8)
@given(data=st.data())
def test_whatever_the_layouts_not_a_bit_changes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("layouts")
    first, second = data.draw(strategies_of(SHAPES)), data.draw(strategies_of(SHAPES))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}
    (folder / "face").mkdir()
    safetensors.torch.save_file(tensors, folder / "face" / "model.safetensors")
    transform(folder / "face", folder / "first", first)
    transform(folder / "first", folder / "second", second)
    merge(folder / "second", folder / "whole")
    assert manifest.verify(folder / "second") == manifest.verify(folder / "whole") == []
    made = safetensors.torch.load_file(folder / "whole" / "model.safetensors")
    assert set(made) == set(tensors) and all(torch.equal(made[name], tensor) for name, tensor in tensors.items())
    read = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(read, checkpoint_id=folder / "second", no_dist=True)
    assert all(torch.equal(read[f"model.{name}"], tensor) for name, tensor in tensors.items())
    shutil.rmtree(folder)


# -- the command -------------------------------------------------------------------------------------------------------


def test_info(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("info", run) == 0
    reported = capsys.readouterr().out
    assert "step 3, parts, saved by 1 rank\n" in reported and manifest.read(run / "step-00000003").plan in reported
    rows = {
        line.split()[0]: line.split()[1:] for line in reported.splitlines() if line.startswith(" ") and line.strip()
    }
    assert rows["model.layers.1.weight"] == ["16x16", "float64", "1x4", "of", "4", "1", "2.0", "KiB"]
    equal = ["16", "float64", "1", "of", "4", "2", "256", "B"]
    assert rows["model.layers.{1-2}.bias"] == equal, "equal layers once"
    assert rows["optimizer.*.exp_avg"][0] == "10"
    transform(run, tmp_path / "new", plan_of("two stages", 4, tmp_path))
    assert command("info", tmp_path / "new") == 0
    assert "1x1 of 2 from rank 2" in capsys.readouterr().out
    assert command("info", "--json", "--step", 2, run) == 0
    message = json.loads(capsys.readouterr().out)
    assert (message["step"], message["kind"], message["world"]) == (2, "integrated", 1)
    assert message["tensors"]["model.layers.0.weight"]["shape"] == [16, 16]
    assert message["bytes"] == sum(t["bytes"] for t in message["tensors"].values())
    assert set(message["files"]) == {p.name for p in (run / "step-00000002").iterdir()} - {"manifest.json"}


def test_the_commands_make_what_they_say(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plan_of("columns", 8, tmp_path)
    assert command("transform", "--to", path, "--step", 2, run, tmp_path / "eight") == 0
    shown = capsys.readouterr()
    assert "step 2, parts, 11 files" in shown.out and shown.err == "", "short work shows no progress"
    ParameterStrategies.read(path).save(tmp_path / "parameters.json")
    assert command("transform", "--to", tmp_path / "parameters.json", tmp_path / "eight", tmp_path / "again") == 0
    assert command("transform", tmp_path / "again", tmp_path / "one", "--to", 1) == 0
    assert command("merge", tmp_path / "again", tmp_path / "whole") == 0
    for made in ("eight", "again", "one", "whole"):
        equal(run / "step-00000002", tmp_path / made)
    pieces = [
        {(p.file, p.starts, p.sizes) for e in manifest.read(tmp_path / made).tensors.values() for p in e.pieces}
        for made in ("eight", "again")
    ]
    assert pieces[0] == pieces[1]
    capsys.readouterr()
    assert command("verify", run) == 0 and capsys.readouterr().out.count(": sound, ") == 2


def test_verify_finds_a_single_bit_of_any_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    transform(run, tmp_path / "whole", plan_of("columns", 2, tmp_path))
    for file in sorted(p.name for p in (tmp_path / "whole").iterdir()):
        copy = shutil.copytree(tmp_path / "whole", tmp_path / "copy")
        data = bytearray((copy / file).read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (copy / file).write_bytes(data)
        assert command("verify", copy) == 1
        assert capsys.readouterr().out.startswith(f"{copy}/{file}: ")
        assert command("transform", "--to", 1, copy, tmp_path / "new") == 1
        assert file in capsys.readouterr().err and not (tmp_path / "new").exists()
        assert command("merge", copy, tmp_path / "new") == 1 and not (tmp_path / "new").exists()
        capsys.readouterr()
        (copy / file).unlink()
        assert command("verify", copy) == 1 and f"{copy}/{file}: " in capsys.readouterr().out
        shutil.rmtree(copy)


def test_a_checkpoint_without_its_manifest_is_none_and_no_model_either(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run / "step-00000002", tmp_path / "copy")
    (copy / "manifest.json").unlink()
    assert command("verify", copy) == 1 and f"{copy}/manifest.json: " in capsys.readouterr().out
    assert command("transform", "--to", 1, copy, tmp_path / "new") == 1 and not (tmp_path / "new").exists()
    assert f"{copy}/manifest.json: the checkpoint's manifest cannot be read" in capsys.readouterr().err
    with pytest.raises(CheckpointError):
        sw.load_distributed_checkpoint(Net(), copy)
    (tmp_path / "face").mkdir()
    shutil.copy(run / "step-00000002" / "model.safetensors", tmp_path / "face")  # by itself it is as good as any
    assert command("verify", tmp_path / "face") == 2 and "no digests" in capsys.readouterr().err
    assert command("info", tmp_path / "face") == 0 and "Hugging Face" in capsys.readouterr().out


def _without(words: dict[str, Any], name: str) -> None:
    words["parameters"] = [line for line in words["parameters"] if line["name"] != name]


def _called(words: dict[str, Any], before: str, after: str) -> None:
    next(line for line in words["parameters"] if line["name"] == before)["name"] = after


@pytest.mark.parametrize(
    "change, says",
    [
        (
            lambda w: _called(w, "head.bias", "heads.bias"),
            "it has no 'heads.bias'; they have no 'head.bias' (is 'heads.bias' what",
        ),
        (lambda w: _without(w, "head.bias"), "they have no 'head.bias'"),
        (
            lambda w: w["parameters"].append({"name": "new", "shape": [2], "dtype": "float32", "storage": [1]}),
            "it has no 'new'",
        ),
        (
            lambda w: w["parameters"][0].update(shape=[32, 16]),
            "'layers.0.weight' is [16, 16] in it and [32, 16] in them",
        ),
        (lambda w: w["parameters"][0].update(storage=[16, 16]), "parameters.json"),
        (lambda w: w.update(schema=7), "schema 7"),
    ],
)
def test_strategies_of_another_model(
    change: Callable, says: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "parameters.json"
    with StoredTensors(run / "step-00000002") as stored:
        lines = [
            {
                "name": name.removeprefix("model."),
                "shape": list(e.shape),
                "dtype": e.dtype,
                "storage": [1] * len(e.shape),
            }
            for name, e in stored.entries.items()
            if name.startswith("model.")
        ]
    words = {"schema": 1, "kind": "parameter strategies", "devices": 4, "parameters": lines}
    change(words)
    path.write_text(json.dumps(words))
    assert command("transform", "--to", path, run, tmp_path / "new") == 1
    assert says in capsys.readouterr().err and list(tmp_path.iterdir()) == [path]


def test_what_cannot_be(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(code: int, says: str, *words: object) -> None:
        assert command(*words) == code
        reported = capsys.readouterr().err
        assert says in reported and "Traceback" not in reported, reported
        assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "here"]

    (tmp_path / "here").mkdir()
    (tmp_path / "file").write_text("text")
    new = tmp_path / "new"
    for there in ("here", "file"):
        refused(1, "it is there already", "merge", "--step", 3, run, tmp_path / there)
        refused(1, "it is there already", "transform", "--to", 1, run, tmp_path / there)
        refused(1, "it is no checkpoint" if there == "here" else "it is a file", "merge", tmp_path / there, new)
        refused(2, "it is no checkpoint" if there == "here" else "it is a file", "verify", tmp_path / there)
    refused(1, "no such folder", "transform", "--to", 1, tmp_path / "nowhere", new)
    refused(2, "no such folder", "info", tmp_path / "nowhere")
    refused(1, "there is no checkpoint of step 9", "merge", "--step", 9, run, new)
    refused(1, "there is no folder", "merge", "--step", 3, run, new / "in" / "nothing")
    refused(1, "whole already", "merge", "--step", 2, run, new)
    refused(1, "the file of parameters' strategies cannot be read: No such file", "transform", "--to", "8", run, new)
    refused(1, "cut short", "transform", "--to", tmp_path / "file", run, new)
    refused(2, "required: --to", "transform", run, new)
    refused(2, "no such module", "transform", "--to", 1, "--import", "nowhere", run, new)


def test_an_interrupted_one_leaves_nothing(run: Path, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == at and done >= total // 2:
            raise KeyboardInterrupt

    for at in ("checking", "writing", "to the disk"):  # noqa: B007  `interrupt` reads it
        with pytest.raises(KeyboardInterrupt):
            transform(run, tmp_path / "new", 1, progress=interrupt)
        assert list(tmp_path.iterdir()) == []


def _in_a_small_disk(run: Path, folder: Path, limit: int, command_: str) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        {"transform": lambda: transform(run, folder / "new", 1), "merge": lambda: merge(run, folder / "new")}[
            command_
        ]()
    except CheckpointError as error:
        os._exit(0 if str(folder / "new") in str(error) and os.strerror(errno.EFBIG) in str(error) else 3)
    os._exit(4)


@pytest.mark.parametrize("limit", [0, 2000, 12000])
@pytest.mark.parametrize("name", ["transform", "merge"])
def test_a_full_disk_leaves_nothing(name: str, limit: int, run: Path, tmp_path: Path) -> None:
    """A limit on the length of files stands for it: it fails in the same calls."""
    child = multiprocessing.get_context("fork").Process(
        target=_in_a_small_disk, args=(run / "step-00000003", tmp_path, limit, name)
    )
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0 and list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_said_before(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 999, 1))
    with pytest.raises(CheckpointError, match="it takes .* KiB, and 1 B are free"):
        transform(run, tmp_path / "new", 1)
    assert list(tmp_path.iterdir()) == []


# -- memory ------------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def _memory(word: str) -> int:
    found = re.search(rf"{word}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def _measured(pipe: Any, work: Callable[[], Any]) -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if (
        trim is not None
    ):  # what earlier tests have freed goes back to the kernel, so that it counts when it is taken again
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # from here on the kernel marks the highest
    before = _memory("VmRSS")
    work()
    pipe.send(_memory("VmHWM") - before)
    os._exit(0)


def more_memory(work: Callable[[], Any]) -> int:
    """The most memory that a process takes for a piece of work, besides the memory that it had."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_measured, args=(sender, work))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        child.join(PATIENCE)


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """Three times as much at the most, however many there are. (In a process of its own, with the 300 MiB that torch
    takes: benchmarks/transforming.py.)"""
    largest, count = 8 * MIB, 8
    (tmp_path / "face").mkdir()
    tensors = {f"w{i}": torch.full((largest // 4096, 1024), float(i)) for i in range(count)}
    safetensors.torch.save_file(tensors, tmp_path / "face" / "model.safetensors")

    def lying(devices: int, cuts: tuple[int, ...]) -> ParameterStrategies:
        layout = sw.Layout.from_cuts(devices, cuts)
        return ParameterStrategies(
            devices, {n: TensorStorage(tuple(t.shape), "float32", layout) for n, t in tensors.items()}, {}
        )

    # It is measured; some of it may fit into what the process has had and given back.
    assert more_memory(lambda: bytearray(os.urandom(16 * largest))) > 8 * largest
    for took in (
        more_memory(lambda: transform(tmp_path / "face", tmp_path / "eight", lying(8, (8, 1)))),
        more_memory(lambda: transform(tmp_path / "eight", tmp_path / "four", lying(4, (1, 4)))),
        more_memory(lambda: transform(tmp_path / "four", tmp_path / "one", 1)),
        more_memory(lambda: merge(tmp_path / "four", tmp_path / "whole")),
    ):
        assert took < 3 * largest + 16 * MIB, f"{took / MIB:.0f} MiB"
    for made in ("one", "whole"):
        with StoredTensors(tmp_path / made) as stored:
            assert all(torch.equal(stored.read(f"model.{name}"), tensor) for name, tensor in tensors.items())

"""Checkpoints of real ranks: saved by four, read by four, two and one; what one rank cannot do, none has done.

Ranks are started once for each world size; each scenario runs on every rank and asserts there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import threading
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_runs import CROSS_ENTROPY, PLANS, Net, adamw, alike, batch, marked, sgd, train, unlocked
from ranks import PATIENCE, run_ranks, run_scenarios
from small_networks import D, draw
from torch import Tensor, nn

import shardwright as sw
from shardwright.checkpoint import manifest, save as copies, tensor_files, writer
from shardwright.checkpoint.stored_checkpoint import StoredTensors
from shardwright.errors import CheckpointError
from shardwright.runtime.distributed import rank_messages
from shardwright.runtime.distributed.rank_messages import ProcessRanks

WORLD = 4
LATER = (2, 4)  # steps after the save, compared with those of the run that goes on


#: Models that have been planned on this rank, by the name of their plan: planning takes longer than all the rest.
MODELS: dict[str, sw.AutoParallel] = {}


def fresh(name: str) -> sw.AutoParallel:
    """A model that has not been called."""
    sw.init()
    model = PLANS[name](dist.get_world_size())
    torch.manual_seed(5)  # building draws: a run's random numbers begin with the seed after it
    return model


def known(name: str) -> sw.AutoParallel:
    """A model that has been called, in whatever state."""
    if name not in MODELS:
        MODELS[name] = fresh(name)
        train(MODELS[name], sgd(MODELS[name]), 9, 10)
    return MODELS[name]


def went_on(model: sw.AutoParallel, path: Path, make: Callable = sgd, **given: Any) -> list[float]:
    """Load, and go on: the losses."""
    torch.manual_seed(6)  # not that of the run: it comes with the checkpoint
    optimizer = make(model)
    restored = sw.load_checkpoint(model, optimizer, path, **given)
    assert restored.step == 2 and restored.extra == {"step": 2}
    return train(model, optimizer, *LATER)


def save(model: sw.AutoParallel, optimizer: torch.optim.Optimizer, path: Path, whole: bool, **options: Any) -> Any:
    return sw.save_checkpoint(model, optimizer, path, step=2, extra={"step": 2}, integrated_save=whole, **options)


def refused(what: str, call: Callable[[], Any]) -> CheckpointError:
    """The error of a call, the same on all ranks."""
    with pytest.raises(CheckpointError) as caught:
        call()
    assert what in str(caught.value), str(caught.value)
    text: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(text, str(caught.value))
    assert len(set(text)) == 1, text
    return caught.value


# -- on four ranks -----------------------------------------------------------------------------------------------------


def scenarios_of(folder: Path) -> dict[str, Callable[[int, int], None]]:
    """Each with a folder of its own, in which later tests of fewer ranks find what was saved."""

    @lru_cache
    def of(name: str) -> tuple[Path, Path, list[float]]:
        """A model trained for two steps: where it is whole, where it is in parts, the losses of the steps after."""
        whole, parts = folder / f"{name} whole", folder / f"{name} parts"
        model = fresh(name)
        optimizer = sgd(model)
        train(model, optimizer, 0, 2)
        save(model, optimizer, whole, True), save(model, optimizer, parts, False)
        MODELS[name] = model
        return whole, parts, train(model, optimizer, *LATER)

    def same_plan(rank: int, world: int) -> None:
        for number, name in enumerate(PLANS):
            whole, parts, losses = of(name)
            for path in (whole, parts):
                if number % world == rank:
                    assert manifest.verify(sw.latest_checkpoint(path)) == [], name
                assert went_on(known(name), path) == losses, f"{name}: to the bit"

    def before_the_first_call(rank: int, world: int) -> None:
        for name in ("rows and columns", "level3", "two stages"):
            whole, parts, losses = of(name)
            assert went_on(fresh(name), parts if name == "level3" else whole) == losses, f"{name}: to the bit"

    def another_plan(rank: int, world: int) -> None:
        for source, target in (
            ("rows and columns", "columns"),
            ("two stages", "as many stages"),
            ("level3", "two stages"),
            ("as many stages", "level1"),
            ("data_parallel", "rows and columns"),
        ):
            for path in of(source)[:2]:
                alike(went_on(known(target), path), of(source)[2])

    def optimizers(rank: int, world: int) -> None:
        for number, make in enumerate(
            (
                lambda m: adamw(m, fused=True),
                lambda m: adamw(m, foreach=True, amsgrad=True),
                lambda m: torch.optim.NAdam(m.parameters()),
            )
        ):
            path, model = folder / f"optimizer {number}", known("level1")
            sw.load_checkpoint(model, path=of("level1")[0])
            optimizer = make(model)
            train(model, optimizer, 0, 2)
            save(model, optimizer, path, bool(number % 2))
            losses = train(model, optimizer, *LATER)
            assert went_on(model, path, make) == losses
            alike(went_on(known("two stages"), path, make), losses)
        refused("SGD (momentum_buffer)", lambda: sw.load_checkpoint(model, adamw(model), of("columns")[0]))

    def in_the_background(rank: int, world: int) -> None:
        for whole in (True, False):
            path, model = folder / f"background {whole}", known("rows and columns")
            optimizer = sgd(model)
            sw.load_checkpoint(model, optimizer, of("rows and columns")[1])
            saving = save(model, optimizer, path, whole, asynchronous=True)
            losses = train(model, optimizer, *LATER)  # while it is written
            again = sw.save_checkpoint(model, optimizer, path, step=4, integrated_save=whole, asynchronous=True)
            assert saving.done and saving.path.is_dir(), "the next save waits for the last"
            assert again.wait() == path / "step-00000004"
            opens, complete = threading.Event(), copies.HostCopies.complete
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(copies.HostCopies, "complete", lambda made: (opens.wait(PATIENCE), complete(made))[1])
                held = sw.save_checkpoint(model, optimizer, path, step=5, integrated_save=whole, asynchronous=True)
                if rank in (1, 2):  # slices of one tensor
                    optimizer.state[model.get_parameter("layers.1.weight")]["momentum_buffer"].mul_(1)
                opens.set()
                refused("layers.1.weight.momentum_buffer: it was changed while it was copied", held.wait)
            dist.barrier()
            assert manifest.verify(saving.path) == []
            assert went_on(model, path, step=2) == losses == of("rows and columns")[2]

    def reads_its_slices_alone(rank: int, world: int) -> None:
        path, held = of("level3")[0], StoredTensors(of("level3")[0] / "step-00000002")
        total, count, fill = sum(entry.bytes for entry in held.entries.values()), [], StoredTensors._fill
        try:
            StoredTensors._fill = lambda self, name, target, offset: (
                count.append(len(target)),
                fill(self, name, target, offset),
            )[1]
            for name, share in (("level3", 1 / world), ("data_parallel", 1)):
                model = known(name)
                sw.load_checkpoint(model, sgd(model), path)
                assert sum(count) == total * share, name
                count.clear()
            model = fresh("level3")
            sw.load_checkpoint(model, sgd(model), path)
            assert not count, "nothing is read before there are slices"
        finally:
            StoredTensors._fill = fill

    def uneven(rank: int, world: int) -> None:
        def make() -> sw.AutoParallel:
            torch.manual_seed(0)
            net = Net(width=10)
            marked(net, ((1, 1), (world, 1)), ((1, world), (1, world)))
            return sw.AutoParallel(net, nn.CrossEntropyLoss(), uneven=True).dataset_strategy("full_batch")

        def go(model: sw.AutoParallel, optimizer: Any, steps: range) -> list[float]:
            out = []
            for step in steps:
                x, y = draw(16, 10, seed=step), batch(step)[1]
                loss = model(x, y)
                loss.backward(), optimizer.step(), optimizer.zero_grad()
                out.append(loss.item())
            return out

        model = make()
        for whole in (True, False):
            optimizer = sgd(model)
            go(model, optimizer, range(2))
            path = sw.save_checkpoint(
                model, optimizer, folder / f"uneven {whole}", step=2, integrated_save=whole
            ).wait()
            stored = StoredTensors(path)
            assert stored.shape("model.layers.0.weight") == (10, 10)
            assert torch.equal(
                stored.read("model.layers.0.weight"), model.get_parameter("layers.0.weight").full_tensor()
            )
            losses = go(model, optimizer, range(2, 4))
            model = make() if whole else model
            optimizer = sgd(model)
            sw.load_checkpoint(model, optimizer, path)
            assert go(model, optimizer, range(2, 4)) == losses

    def slices_of_ones_own(rank: int, world: int) -> None:
        def make() -> tuple[sw.AutoParallel, torch.optim.Optimizer]:
            net = nn.Linear(16, 8, dtype=D)
            net.weight = sw.layerwise_parallel(lambda r: draw(8, 16, seed=r))
            return sw.AutoParallel(net, nn.CrossEntropyLoss(), "hybrid_parallel"), torch.optim.Adam(
                net.parameters(), 0.1
            )

        model, optimizer = make()
        for whole in (True, False):
            train(model, optimizer, 0, 2)
            path = sw.save_checkpoint(model, optimizer, folder / f"own {whole}", step=2, integrated_save=whole).wait()
            stored = StoredTensors(path)
            assert stored.shape("model.weight") == (world, 8, 16) and stored.entries["model.weight"].layout["own"]
            assert torch.equal(stored.read("model.weight")[rank], model.get_parameter("weight"))
            losses = train(model, optimizer, *LATER)
            if whole:
                model, optimizer = make()
            sw.load_checkpoint(model, optimizer, path)
            assert train(model, optimizer, *LATER) == losses

    def one_rank_cannot_write(rank: int, world: int) -> None:
        path, model = of("rows and columns")[0], known("rows and columns")
        before = unlocked(path)
        optimizer = sgd(model)
        dist.barrier()  # nobody looks while another saves

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the file")

        for module, name, whole in ((tensor_files, "_put", True), (writer, "PartFile", False)):
            kept = getattr(module, name)
            if rank == 2:
                setattr(module, name, full)
            refused(
                "No space left on device",
                lambda: sw.save_checkpoint(model, optimizer, path, step=3, integrated_save=whole),
            )
            saving = sw.save_checkpoint(model, optimizer, path, step=3, integrated_save=whole, asynchronous=True)
            refused("on rank 2", saving.wait)
            saving = sw.save_checkpoint(model, optimizer, path, step=3, integrated_save=whole, asynchronous=True)
            refused("No space left", lambda: sw.save_checkpoint(model, optimizer, path, step=4))
            setattr(module, name, kept)
        words = writer.encode
        writer.encode = words if rank != 2 else lambda value: 1 / 0
        refused(
            "ZeroDivisionError: division by zero (on rank 2)",
            lambda: sw.save_checkpoint(model, optimizer, path, step=3),
        )
        writer.encode = words
        dist.barrier()
        assert unlocked(path) == before, "no new checkpoint, and nothing left of it"
        dist.barrier()
        refused(
            "rank 1 saves with step=4, rank 0 with 3",
            lambda: sw.save_checkpoint(model, optimizer, path, step=4 if rank == 1 else 3),
        )
        state = type("Position", (), {"state_dict": lambda self: {"at": object() if rank == 3 else 1}})()
        refused(
            "object, which cannot be saved (on rank 3)",
            lambda: sw.save_checkpoint(model, optimizer, path, step=3, data=state),
        )
        assert rank or unlocked(path) == before

    def rows_of_several_ranks(rank: int, world: int) -> None:
        model, written, patch = known("rows and columns"), [], pytest.MonkeyPatch()
        optimizer, path = sgd(model), folder / "joined"
        sw.load_checkpoint(model, optimizer, of("rows and columns")[1])
        kept, run = (writer.LARGE, writer.SHORT, writer.STEP), tensor_files.WholeFiles.write_run
        # One matrix is cut in columns: 16 rows of 128 bytes, of which a rank has 32, joined in two steps.
        writer.LARGE, writer.SHORT, writer.STEP = 1, 32, 3 * 128

        def noted(files: Any, part: Path, name: str, first: int, rows: Tensor) -> None:
            written.append((name, first, rows.numel()))
            run(files, part, name, first, rows)

        tensor_files.WholeFiles.write_run = noted
        try:
            saving = save(model, optimizer, path, True)
            text: list[Any] = [None] * world
            dist.all_gather_object(text, written)
            for name in ("model.layers.1.weight", "optimizer.layers.1.weight.momentum_buffer"):
                runs = sorted(r[1:] for theirs in text for r in theirs if r[0] == name)
                assert runs == [(32 * i, 32) for i in range(8)], name
                assert all(len([r for r in theirs if r[0] == name]) == 2 for theirs in text), "each rank a share"
            assert all("layers.1.weight" in r[0] for theirs in text for r in theirs), "the others are in rows already"
            expected = StoredTensors(of("rows and columns")[0] / "step-00000002")
            stored = StoredTensors(saving.wait())
            assert all(torch.equal(stored.read(name), expected.read(name)) for name in expected.names)
            assert rank or manifest.verify(saving.path) == []
            dist.barrier()

            def full(*args: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the file")

            if rank == 2:
                tensor_files.WholeFiles.write_run = full
            for asynchronous in (False, True):
                refused(
                    "No space left on device (on rank 2)",
                    lambda: sw.save_checkpoint(model, optimizer, path, step=3, asynchronous=asynchronous).wait(),
                )
            tensor_files.WholeFiles.write_run = run
            if rank == 1:
                patch.setattr(writer, "_write", lambda *args: 1 / 0)
            refused("ZeroDivisionError: division by zero", lambda: sw.save_checkpoint(model, optimizer, path, step=3))
            patch.undo()
            assert rank or unlocked(path) == {"step-00000002"}  # rank 0 removes what there is, and is done with it
            sw.save_checkpoint(model, optimizer, path, step=4)
        finally:
            patch.undo()
            tensor_files.WholeFiles.write_run = run
            writer.LARGE, writer.SHORT, writer.STEP = kept

    def columns_without_memory_to_share(rank: int, world: int) -> None:
        model, path = known("rows and columns"), folder / "apart"
        optimizer, ranks_before, sizes = sgd(model), dict(rank_messages._ranks), (writer.LARGE, writer.SHORT)
        sw.load_checkpoint(model, optimizer, of("rows and columns")[1])
        writer.LARGE, writer.SHORT = 1, 32
        rank_messages._ranks.clear()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SHARDWRIGHT_SHARED_MEMORY", "0")
                saving = save(model, optimizer, path, True)
        finally:
            writer.LARGE, writer.SHORT = sizes
            rank_messages._ranks.update(ranks_before)
        stored, expected = StoredTensors(saving.path), StoredTensors(of("rows and columns")[0] / "step-00000002")
        assert all(torch.equal(stored.read(name), expected.read(name)) for name in expected.names)

    def damage_is_the_same_for_all(rank: int, world: int) -> None:
        copy = folder / "damaged"
        if rank == 0:
            shutil.copytree(of("rows and columns")[1], copy)
            file = copy / "step-00000002" / "__3_0.distcp"
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 4
            file.write_bytes(data)
        dist.barrier()
        model = known("rows and columns")
        optimizer = sgd(model)
        before = {n: p.to_local().clone() for n, p in model.named_parameters()}
        state, seed = torch.get_rng_state(), optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = 7.0
        error = refused("__3_0.distcp", lambda: sw.load_checkpoint(model, optimizer, copy))
        assert error.source.endswith("__3_0.distcp")
        assert all(torch.equal(p.to_local(), before[n]) for n, p in model.named_parameters())
        assert torch.equal(torch.get_rng_state(), state) and optimizer.param_groups[0]["lr"] == 7.0 != seed
        for file in sorted(
            p.name for p in (of("rows and columns")[1] / "step-00000002").iterdir()
        ):  # of every rank's share
            if rank == 0:
                shutil.rmtree(copy), shutil.copytree(of("rows and columns")[1], copy)
                path = copy / "step-00000002" / file
                path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
            dist.barrier()
            assert file in refused(file, lambda: sw.load_checkpoint(model, optimizer, copy)).source
            dist.barrier()
        assert all(torch.equal(p.to_local(), before[n]) for n, p in model.named_parameters())

    def two_hosts(rank: int, world: int) -> None:
        model = known("rows and columns")
        optimizer = sgd(model)
        sw.load_checkpoint(model, optimizer, of("rows and columns")[0])
        kept, path = ProcessRanks.remote, folder / "two hosts"
        ProcessRanks.remote = lambda self, r: r >= 2
        try:
            save(model, optimizer, path, True)
        finally:
            ProcessRanks.remote = kept
        assert manifest.verify(sw.latest_checkpoint(path)) == []
        assert went_on(model, path) == of("rows and columns")[2]

    def seeds_and_positions(rank: int, world: int) -> None:
        class Position:
            def __init__(self, at: int) -> None:
                self.at = at

            def state_dict(self) -> dict[str, int]:
                return {"at": self.at}

            def load_state_dict(self, state: dict[str, int]) -> None:
                self.at = state["at"]

        path = folder / "positions"
        model = known("data_parallel")
        random.seed(rank)
        sw.save_checkpoint(model, path=path, step=1, data=Position(rank))
        upcoming = random.random()
        position = Position(-1)
        sw.load_checkpoint(model, path=path, data=position)
        assert position.at == rank and random.random() == upcoming

    return {
        f.__name__: f
        for f in (
            same_plan,
            before_the_first_call,
            another_plan,
            optimizers,
            in_the_background,
            reads_its_slices_alone,
            uneven,
            slices_of_ones_own,
            one_rank_cannot_write,
            rows_of_several_ranks,
            columns_without_memory_to_share,
            damage_is_the_same_for_all,
            two_hosts,
            seeds_and_positions,
        )
    }


def on_ranks(rank: int, world: int, folder: Path) -> dict[str, str | None]:
    return run_scenarios(rank, world, scenarios_of(folder))


def on_two_ranks(rank: int, world: int, folder: Path) -> tuple[dict[str, str | None], dict[str, list[float]]]:
    gone_on: dict[str, list[float]] = {}

    def of_four_ranks(rank: int, world: int) -> None:
        for source, target in (
            ("rows and columns parts", "rows and columns"),
            ("two stages parts", "level1"),
            ("level3 whole", "two stages"),
        ):
            gone_on[source] = went_on(fresh(target), folder / source)

    def of_one_process(rank: int, world: int) -> None:
        gone_on["local"] = went_on(fresh("columns"), folder / "local")

    def of_hugging_face(rank: int, world: int) -> None:
        for called in (False, True):
            sw.init()
            with contextlib.nullcontext() if called else sw.no_init_parameters():
                net = Bare()
            model = sw.AutoParallel(net, CROSS_ENTROPY).dataset_strategy("full_batch").hsdp(threshold=0)
            if called:
                model(*batch(0))
            restored = sw.load_checkpoint(model, path=folder / "hugging face")
            assert restored.step is None
            torch.testing.assert_close(model(*batch(0)).item(), BARE_LOSS[0])
            assert {n: tuple(p.to_local().shape) for n, p in net.named_parameters()} == {
                "first.weight": (8, 16),
                "last.weight": (4, 16),
            }, "slices"

    def positions_of_four_ranks(rank: int, world: int) -> None:
        model, state = fresh("data_parallel"), random.getstate()
        refused(
            "of 4 ranks, and there are 2", lambda: sw.load_checkpoint(model, path=folder / "positions", data=Anything())
        )
        sw.load_checkpoint(model, path=folder / "positions")
        assert random.getstate() == state, "it differed between ranks: nobody can say which is this one's"

    return run_scenarios(
        rank, world, {f.__name__: f for f in (of_four_ranks, of_one_process, of_hugging_face, positions_of_four_ranks)}
    ), gone_on


class Anything:
    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("not before all is known to be sound")


class Bare(nn.Module):
    """Two layers without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16, bias=False, dtype=D), nn.Linear(16, 8, bias=False, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def stored_as_hugging_face(folder: Path) -> float:
    """Write a model of another dtype in two shards; the loss that one device has with it."""
    folder.mkdir()
    values = {"first.weight": draw(16, 16, seed=40).bfloat16(), "last.weight": draw(8, 16, seed=41).bfloat16()}
    for number, (name, value) in enumerate(values.items()):
        safetensors.torch.save_file(
            {name: value}, folder / f"model-{number + 1:05d}-of-00002.safetensors", {"format": "pt"}
        )
    index = {"metadata": {}, "weight_map": {n: f"model-{i + 1:05d}-of-00002.safetensors" for i, n in enumerate(values)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    one = Bare()
    one.load_state_dict(values)
    x, y = batch(0)
    return CROSS_ENTROPY(one(x), y).item()


BARE_LOSS: list[float] = []


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str | None]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(on_ranks, WORLD, folder)


@pytest.mark.parametrize("name", list(scenarios_of(Path())))
def test_on_four_ranks(four: tuple[Path, list[dict[str, str | None]]], name: str) -> None:
    for rank, results in enumerate(four[1]):
        assert results[name] is None, f"rank {rank}: {results[name]}"


def local(name: str, devices: int) -> sw.AutoParallel:
    sw.init(devices=devices)
    model = PLANS[name](devices)
    torch.manual_seed(5)
    return model


def test_of_four_ranks_on_two_on_one_process_and_without_us(four: tuple[Path, list[dict[str, str | None]]]) -> None:
    folder = four[0]
    model = local("level1", 8)
    optimizer = sgd(model)
    train(model, optimizer, 0, 2)
    sw.save_checkpoint(model, optimizer, folder / "local", step=2, extra={"step": 2})
    expected = train(model, optimizer, *LATER)
    BARE_LOSS[:] = [stored_as_hugging_face(folder / "hugging face")]
    for rank, (results, gone_on) in enumerate(run_ranks(on_two_ranks, 2, folder)):
        assert not any(results.values()), f"rank {rank}: {results}"
        for losses in gone_on.values():
            alike(losses, expected)
    for source, target, devices in (
        ("rows and columns parts", "columns", 8),
        ("two stages whole", "level2", 4),
        ("as many stages whole", "as many stages", 4),
    ):
        model = local(target, devices)
        optimizer = sgd(model)
        sw.load_checkpoint(model, optimizer, folder / source)
        alike(train(model, optimizer, *LATER), expected)
    whole = folder / "two stages whole" / "step-00000002"
    plain, ours = Net(), Net()
    plain.load_state_dict(safetensors.torch.load_file(whole / "model.safetensors"))
    sw.load_checkpoint(ours, sgd(ours), folder / "two stages parts")
    for (name, p), q in zip(plain.named_parameters(), ours.parameters()):
        assert torch.equal(p, q), name
    parts = {"model": {name: torch.zeros_like(p) for name, p in plain.named_parameters()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(parts, checkpoint_id=folder / "two stages parts" / "step-00000002")
    assert all(torch.equal(parts["model"][name], p) for name, p in plain.named_parameters())

"""Checkpoints of ranks that share no file system: each writes its parts to a folder of its own and goes on from there.

Hosts are played by groups of ranks that see their own folders alone. Ranks are started once.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from checkpoint_runs import PLANS, Net, alike, batch, sgd, train, unlocked
from ranks import run_ranks, run_scenarios

import shardwright as sw
from shardwright.checkpoint import manifest, stored_checkpoint
from shardwright.checkpoint.checkpoint_folders import LOCK, steps_in
from shardwright.checkpoint.stored_checkpoint import StoredTensors
from shardwright.cli.main import main
from shardwright.errors import CheckpointError
from shardwright.runtime.distributed import rank_messages

WORLD, LATER, STEP = 4, (2, 4), "step-00000002"

#: The folder that a rank sees, by rank: two hosts of two ranks.
HOSTS = ("a", "a", "b", "b")


@contextmanager
def hosts(folder: Path, rank: int) -> Iterator[Path]:
    """Play a host whose disk no other host sees; the run has the same relative path on all of them."""
    mine = folder / HOSTS[rank]
    mine.mkdir(exist_ok=True)
    here = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            stored_checkpoint, "_holds_one", lambda other: str(other).startswith(f"{mine}/") and other.exists()
        )
        patch.setattr(socket, "gethostname", lambda: f"host-{HOSTS[rank]}")
        os.chdir(mine)
        try:
            yield Path("run")
        finally:
            os.chdir(here)


def fresh(name: str) -> sw.AutoParallel:
    sw.init()
    model = PLANS[name](dist.get_world_size())
    torch.manual_seed(5)
    return model


#: Models that have been planned on this rank, by the name of their plan, with the slices that they began with: planning
#: takes longer than all the rest.
MODELS: dict[str, tuple[sw.AutoParallel, list[torch.Tensor]]] = {}


def known(name: str) -> sw.AutoParallel:
    """A model that has been called, in whatever state."""
    if name not in MODELS:
        model = fresh(name)
        loss = model(*batch(0))
        MODELS[name] = model, [p.to_local().detach().clone() for p in model.parameters()]
        loss.backward()
    return MODELS[name][0]


def trained(name: str) -> tuple[sw.AutoParallel, torch.optim.Optimizer]:
    """A model after two steps from its beginning."""
    model = known(name)
    for parameter, first in zip(model.parameters(), MODELS[name][1], strict=True):
        parameter.to_local().detach().copy_(first)
        parameter.grad = None
    torch.manual_seed(5)
    optimizer = sgd(model)
    train(model, optimizer, 0, 2)
    return model, optimizer


def saved(model: Any, optimizer: Any, path: Path, whole: bool = False, step: int = 2, **options: Any) -> Any:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        made = sw.save_checkpoint(
            model, optimizer, path, step=step, extra={"step": step}, integrated_save=whole, **options
        )
        made.wait()
    return made


def went_on(name: str, path: Path, make: Callable[[str], sw.AutoParallel] = known) -> list[float]:
    model = make(name)
    torch.manual_seed(6)  # not that of the run: it comes with the checkpoint
    optimizer = sgd(model)
    restored = sw.load_checkpoint(model, optimizer, path)
    assert restored is not None and restored.step == 2 and restored.extra == {"step": 2}
    return train(model, optimizer, *LATER)


def refused(call: Callable[[], Any], *says: str) -> CheckpointError:
    """The error of a call, the same on all ranks."""
    with pytest.raises(CheckpointError) as caught:
        call()
    assert all(text in str(caught.value) for text in says), str(caught.value)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts
    return caught.value


def scenarios_of(folder: Path) -> dict[str, Callable[[int, int], None]]:
    @lru_cache
    def of(name: str) -> tuple[Path, list[float]]:
        """A run that has saved after two steps, on two hosts; the losses of the steps after."""
        place = folder / name
        if dist.get_rank() == 0:
            place.mkdir()
        dist.barrier()
        model, optimizer = trained(name)
        with hosts(place, dist.get_rank()) as path:
            saved(model, optimizer, path)
        return place, train(model, optimizer, *LATER)

    def each_host_has_its_parts(rank: int, world: int) -> None:
        place, _ = of("rows and columns")
        there = {p.name for p in (place / HOSTS[rank] / "run" / STEP).iterdir()}
        parts = {f"__{r}_0.distcp" for r in range(world) if HOSTS[r] == HOSTS[rank]}
        assert there == {*parts, ".metadata", "manifest.json", "plan.json", "state.json"}
        one, other = (manifest.read(place / host / "run" / STEP) for host in "ab")
        assert one == other and dict(one.places) == {
            f"host-{host}:{place}/{host}/run/{STEP}": tuple(f"__{r}_0.distcp" for r in range(world) if HOSTS[r] == host)
            for host in "ab"
        }
        assert unlocked(place / HOSTS[rank] / "run") == {STEP}

    def the_same_plan(rank: int, world: int) -> None:
        for name in ("rows and columns", "level3", "data_parallel", "two stages"):
            place, losses = of(name)
            with hosts(place, rank) as path:
                assert went_on(name, path) == losses, f"{name}: to the bit"

    def another_plan(rank: int, world: int) -> None:
        for source, target in (("rows and columns", "columns"), ("level3", "two stages"), ("two stages", "level1")):
            place, losses = of(source)
            with hosts(place, rank) as path:
                alike(went_on(target, path, fresh), losses)

    def a_file_that_a_rank_sees_is_not_sent(rank: int, world: int) -> None:
        place, losses = of("level3")  # each rank has slices of its own
        sent: list[Any] = []
        with pytest.MonkeyPatch.context() as patch, hosts(place, rank) as path:
            send = rank_messages.ProcessRanks.send
            patch.setattr(
                rank_messages.ProcessRanks,
                "send",
                lambda self, tensor, to=0: (sent.append(tensor.numel()), send(self, tensor, to))[1],
            )
            assert went_on("level3", path) == losses
        assert sum(sent) < 4096, "the biases that one rank has whole, and numbers of steps"

    def whole_files_lie_with_rank_0(rank: int, world: int) -> None:
        place = folder / "whole"
        if rank == 0:
            place.mkdir()
        dist.barrier()
        model, optimizer = trained("rows and columns")
        with hosts(place, rank) as path:
            saved(model, optimizer, path, whole=True)
            dist.barrier()
            assert path.exists() == (HOSTS[rank] == "a")
            losses = train(model, optimizer, *LATER)
            assert went_on("rows and columns", path) == losses
            alike(went_on("level3", path), losses)
        if rank == 0:
            assert manifest.verify(place / "a" / "run" / STEP) == []
        dist.barrier()

    def relative_paths_in_different_folders(rank: int, world: int) -> None:
        place, here = folder / "relative", Path.cwd()
        mine = place / f"of rank {rank}"
        mine.mkdir(parents=True)
        for whole in (False, True):
            model, optimizer = trained("rows and columns")
            os.chdir(mine)
            try:
                path = Path("run, whole" if whole else "run")
                saved(model, optimizer, path, whole)
                losses = train(model, optimizer, *LATER)
                assert path.exists() == (not whole or rank == 0)
                dist.barrier()
                assert went_on("rows and columns", path) == losses
            finally:
                os.chdir(here)

    def in_the_background(rank: int, world: int) -> None:
        place = folder / "background"
        if rank == 0:
            place.mkdir()
        dist.barrier()
        model, optimizer = trained("rows and columns")
        with hosts(place, rank) as path:
            for step in (1, 2):
                saving = sw.save_checkpoint(
                    model, optimizer, path.absolute(), step=step, extra={"step": step}, integrated_save=False,
                    asynchronous=True, keep_checkpoint_max=1,
                )  # fmt: skip
                saving.wait()
            losses = train(model, optimizer, *LATER)
            dist.barrier()
            assert unlocked(path) == {STEP}, "the older one is gone on each host"
            assert went_on("rows and columns", path) == losses

    def a_death_between_two_renames(rank: int, world: int) -> None:
        place, losses = of("level1")
        model = fresh("level1")
        with hosts(place, rank) as path:
            optimizer = sgd(model)
            sw.load_checkpoint(model, optimizer, path)
            model(*batch(0))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("shardwright.checkpoint.writer.SaveJob._named", lambda job: 1 / 0)
                refused(lambda: saved(model, optimizer, path, step=3), "ZeroDivisionError: division by zero")
            there = [f"step-0000000{step}" for step in ((2,) if HOSTS[rank] == "a" else (2, 3))]
            dist.barrier()
            assert sorted(unlocked(path)) == there, "host b has renamed its folder, rank 0 has not"
            assert went_on("level1", path) == losses, "the step that is whole on all of them"
            saved(model, optimizer, path, step=3)
            dist.barrier()
            assert unlocked(path) == {"step-00000002", "step-00000003"}
            assert manifest.read(path / "step-00000003").step == 3

    def damage_on_one_host(rank: int, world: int) -> None:
        place, _ = of("columns")
        copy = folder / "damaged"
        if rank == 0:
            shutil.copytree(place, copy)
        dist.barrier()
        model = fresh("columns")
        file = copy / "b" / "run" / STEP / "state.json"
        content = file.read_bytes()
        with hosts(copy, rank) as path:
            for damage, says in (
                (content.replace(b'"step": 2', b'"step": 3'), "state.json: it was altered within bytes 0 to"),
                (content[:-1], "state.json: it has"),
            ):
                if rank == 0:
                    file.write_bytes(damage)
                dist.barrier()
                refused(lambda: sw.load_checkpoint(model, sgd(model), path), says)
                dist.barrier()

    def what_cannot_be_brought_together(rank: int, world: int) -> None:
        place, _ = of("data_parallel")
        model, copy = fresh("data_parallel"), folder / "apart"
        without_lock = shutil.ignore_patterns(LOCK)
        if rank == 0:
            shutil.copytree(place, copy, ignore=without_lock)
            (copy / "b" / "run" / STEP / "__3_0.distcp").unlink()
        dist.barrier()
        with hosts(copy, rank) as path:
            refused(
                lambda: sw.load_checkpoint(model, path=path),
                f"__3_0.distcp: it is missing: it was written to host-b:{place}/b/run/{STEP}",
            )
        dist.barrier()
        other = of("rows and columns")[0]
        if rank == 0:  # host b has another save of the step
            shutil.rmtree(copy / "b" / "run")
            shutil.copytree(other / "b" / "run", copy / "b" / "run", ignore=without_lock)
        dist.barrier()
        with hosts(copy, rank) as path:
            refused(
                lambda: sw.load_checkpoint(model, path=path),
                "ranks have different checkpoints: rank 0 has ",
                f" in host-a:{copy}/a/run/{STEP}, rank 2 has ",
                f" in host-b:{copy}/b/run/{STEP}",
            )
        model, optimizer = trained("data_parallel")
        with hosts(copy, rank) as path, pytest.MonkeyPatch.context() as patch:
            if rank == 3:

                def no(path: Path, step: int, save_id: str) -> bool:
                    raise PermissionError(13, "Permission denied")

                patch.setattr("shardwright.checkpoint.checkpoint_folders.join", no)
            refused(
                lambda: saved(model, optimizer, path, step=7),
                f"rank 3 does not see the folder that rank 0 saves to, host-a:{copy}/a/run, and cannot make its own, "
                f"host-b:{copy}/b/run: Permission denied",
            )
            dist.barrier()
            assert unlocked(path) == {STEP}, "nothing is left of it"

    def a_model_of_hugging_face(rank: int, world: int) -> None:
        place = folder / "face"
        if rank == 0:
            (place / "a").mkdir(parents=True)
            torch.manual_seed(0)
            sw.init(devices=1)
            safetensors.torch.save_file({n: t.clone() for n, t in Net().state_dict().items()}, place / "model")
            for host in "ab":
                (place / host / "run").mkdir(parents=True)
            shutil.copyfile(place / "model", place / "a" / "run" / "model.safetensors")
        dist.barrier()
        model = fresh("columns")
        with hosts(place, rank) as path:
            refused(
                lambda: sw.load_checkpoint(model, path=path),
                f"rank 2 does not see the model that rank 0 has in host-a:{place}/a/run",
            )
            dist.barrier()
            if rank == 0:
                shutil.copyfile(place / "model", place / "b" / "run" / "model.safetensors")
            dist.barrier()
            assert sw.load_checkpoint(model, path=path).step is None
            model(*batch(0))

    def no_checkpoint_on_any_host(rank: int, world: int) -> None:
        place = folder / "none"
        if rank == 0:
            place.mkdir()
        dist.barrier()
        model = fresh("columns")
        with hosts(place, rank) as path:
            assert sw.load_checkpoint(model, path=path, missing_ok=True) is None
            refused(lambda: sw.load_checkpoint(model, path=path), "there is no such folder")
            refused(lambda: sw.load_checkpoint(model, path=path, step=3), "there is no checkpoint of step 3")

    def host_b_alone_has_one(rank: int, world: int) -> None:
        """Hosts that have changed their places: rank 0 is on one that never had whole files."""
        place = folder / "changed"
        model, optimizer = trained("columns")
        if rank == 0:
            place.mkdir()
        dist.barrier()
        if rank == 0:
            (place / "b").mkdir()
        dist.barrier()
        whole = sw.save_checkpoint(model, optimizer, place / "b" / "run", step=2, extra={"step": 2}).wait()
        assert whole.exists()
        losses = train(model, optimizer, *LATER)
        with hosts(place, rank) as path:
            assert went_on("columns", path) == losses

    return {
        function.__name__: function
        for function in (
            each_host_has_its_parts,
            the_same_plan,
            another_plan,
            a_file_that_a_rank_sees_is_not_sent,
            whole_files_lie_with_rank_0,
            relative_paths_in_different_folders,
            in_the_background,
            a_death_between_two_renames,
            damage_on_one_host,
            what_cannot_be_brought_together,
            a_model_of_hugging_face,
            no_checkpoint_on_any_host,
            host_b_alone_has_one,
        )
    }


def on_ranks(rank: int, world: int, folder: Path) -> dict[str, str | None]:
    return run_scenarios(rank, world, scenarios_of(folder))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str | None]]]:
    folder = tmp_path_factory.mktemp("apart")
    return folder, run_ranks(on_ranks, WORLD, folder)


@pytest.mark.parametrize("name", list(scenarios_of(Path())))
def test_on_four_ranks(four: tuple[Path, list[dict[str, str | None]]], name: str) -> None:
    for rank, results in enumerate(four[1]):
        assert results[name] is None, f"rank {rank}: {results[name]}"


def test_folders_that_are_copied_together_are_read_as_one(
    four: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = four[0] / "rows and columns"
    alone = place / "a" / "run" / STEP
    assert main(["checkpoint", "verify", str(alone)]) == 1
    out = capsys.readouterr().out
    missing = f"{alone}/__2_0.distcp: it is missing: it was written to "
    assert missing in out and f":{place}/b/run/{STEP} (copy the folders of all hosts together)" in out
    with pytest.raises(CheckpointError, match="__2_0.distcp: it is missing: it was written to host-b:.*and 1 more"):
        sw.load_checkpoint(Net(), path=alone)
    assert main(["checkpoint", "info", str(alone)]) == 0
    assert f"2 of them written to host-b:{place}/b/run/{STEP}" in capsys.readouterr().out
    assert main(["checkpoint", "merge", str(alone), str(tmp_path / "merged")]) == 1
    assert "it was written to host-b:" in capsys.readouterr().err

    both = tmp_path / "run" / STEP
    for host in random.sample("ab", 2):
        shutil.copytree(place / host / "run" / STEP, both, dirs_exist_ok=True)
    assert main(["checkpoint", "verify", str(both)]) == 0
    sw.init(devices=WORLD)
    model = PLANS["columns"](WORLD)
    optimizer = sgd(model)
    restored = sw.load_checkpoint(model, optimizer, both.parent)
    assert restored is not None and restored.step == 2 and list(steps_in(both.parent)) == [2]
    merged = tmp_path / "merged"
    assert main(["checkpoint", "merge", str(both), str(merged)]) == 0
    with StoredTensors(both) as one, StoredTensors(merged) as other:
        assert all(torch.equal(one.read(name), other.read(name)) for name in one.names)

"""Seconds of checkpoints: ours against plain torch.distributed.checkpoint, and the part of a save that a training step
feels.

    python benchmarks/checkpoint_speed.py               some minutes
    python benchmarks/checkpoint_speed.py --quick       few rounds
    python benchmarks/checkpoint_speed.py --devices 4 --megabytes 1200

A network of layers of 2048 x 2048, its weights cut over the ranks in rows and in columns by turns, and the state of
AdamW besides. Gloo processes of one thread each, on one disk.

    parts           each rank its own: against dcp.save
    integrated      one whole file for any reader of safetensors: against dcp.save with Hugging Face's storage, which
                    writes parts and then makes one file of them

    save, load      each contender in turn, in the same processes; into a fresh folder, to the disk; from the cache
    background      the seconds of the call; of the call and what the next training step takes longer than one alone,
                    which has to wait for copies and shares the processor with the save; of the call and all steps until
                    the save is done; each against the seconds of the same save that is waited for; async_save, for
                    comparison

Each puts every byte through to the disk with fsync before it says that it is done. Ours besides makes a digest of every
file and looks for damage with it before it loads anything, gives the folder its name last, and puts the names through;
theirs makes a CRC-32 of each tensor, as torch.save does, of which loading looks at none.

What counts is the ratio of two contenders of one round, its median and quartiles. Before anything is timed each loads
what it has saved, and values are compared.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from race import Results, order, run_ranks
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

import shardwright as sw

WIDTH = 2048
PLAIN, PLAIN_WHOLE = "torch.distributed.checkpoint", "torch.distributed.checkpoint, one file"
PARTS, WHOLE = "ours, in parts", "ours, integrated"
ENTRIES = (PLAIN, PARTS, PLAIN_WHOLE, WHOLE)
BACKGROUND = ("waited for", "call", "call and next step", "call and steps")
LIKE = {PARTS: PLAIN, WHOLE: PLAIN_WHOLE}


class Theirs:
    """The result of async_save, as a `shardwright` save."""

    def __init__(self, future: Any) -> None:
        self._future, self.wait = future, future.result

    @property
    def done(self) -> bool:
        return self._future.done()


class Setup:
    """A model that has been trained for a step, on one rank."""

    def __init__(self, world: int, megabytes: int) -> None:
        sw.init()
        torch.manual_seed(0)
        net = nn.Sequential(
            *[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(2, megabytes * 2**20 // (12 * WIDTH**2)))]
        )
        for number, layer in enumerate(net):
            sw.shard(layer, ((1, 1), (world, 1)) if number % 2 else ((1, world), (1, world)))
        self.model = sw.AutoParallel(net, nn.MSELoss()).dataset_strategy("full_batch")
        self.optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        self.x = torch.randn(8, WIDTH)
        self.group = dist.new_group(backend="gloo")  # for async_save, which talks while the training does
        self.train()

    def train(self) -> None:
        self.model(self.x, self.x).backward()
        self.optimizer.step(), self.optimizer.zero_grad()

    def tensors(self, entry: str) -> dict[str, Tensor]:
        """The state that a contender saves, as DTensors, made as quickly as possible. It has no numbers of steps:
        torch 2.13 loads other numbers from one file than were saved (tensors without dims)."""
        out = {}
        for name, parameter in self.model.named_parameters():
            out[f"model.{name}"] = parameter.detach()
            out |= {f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return {key: x for key, x in out.items() if x.dim() or entry != PLAIN_WHOLE}

    def save(self, name: str, folder: Path, asynchronous: bool = False) -> Any:
        if name in LIKE.values():
            tensors = self.tensors(name)
            to = (
                FileSystemWriter(folder)
                if name == PLAIN
                else HuggingFaceStorageWriter(
                    str(folder), dict.fromkeys(tensors, 1), save_distributed=True, enable_consolidation=True
                )
            )
            if asynchronous:
                return Theirs(dcp.async_save(tensors, storage_writer=to, process_group=self.group))
            return dcp.save(tensors, storage_writer=to)
        return sw.save_checkpoint(
            self.model, self.optimizer, folder, step=1, integrated_save=name == WHOLE, asynchronous=asynchronous
        )

    def load(self, name: str, folder: Path) -> None:
        if name in LIKE.values():
            dcp.load(
                self.tensors(name),
                storage_reader=FileSystemReader(folder) if name == PLAIN else HuggingFaceStorageReader(str(folder)),
            )
        else:
            sw.load_checkpoint(self.model, self.optimizer, folder)


def timed(work: Callable[[], Any]) -> float:
    """Seconds, of all ranks together."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def removed(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def check(setup: Setup, name: str, folder: Path) -> None:
    setup.save(name, folder)
    before = {n: getattr(t, "_local_tensor", t).clone() for n, t in setup.tensors(name).items()}
    setup.train()
    setup.load(name, folder)
    for key, tensor in setup.tensors(name).items():
        assert torch.equal(getattr(tensor, "_local_tensor", tensor), before[key]), f"{name}: {key}"


def race(rank: int, world: int, megabytes: int, rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """On one rank: section -> contender -> the seconds of each round."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    setup = Setup(world, megabytes)
    for name in ENTRIES:
        check(setup, name, folder / f"kept {name}")
    out: dict[str, dict[str, list[float]]] = {s: {n: [] for n in ENTRIES} for s in ("save", "load")}
    out["background"] = {f"{n}: {what}": [] for n in ENTRIES for what in BACKGROUND}
    for turn in range(rounds):
        for name in order(ENTRIES, turn):
            out["save"][name].append(timed(lambda: setup.save(name, folder / "made")))
            removed(folder / "made")
            out["load"][name].append(timed(lambda: setup.load(name, folder / f"kept {name}")))
    for turn in range(rounds + 1):
        for name in order(ENTRIES, turn):
            seconds = background(setup, name, folder / "made")
            if turn:  # the first one makes the memory that tensors are copied to
                for what, value in seconds.items():
                    out["background"][f"{name}: {what}"].append(value)
    return out


def background(setup: Setup, name: str, folder: Path) -> dict[str, float]:
    """The seconds of a save that is waited for, of a call that is not, and of what it adds to the next step and to all
    steps until it is done."""
    alone = statistics.median(timed(setup.train) for _ in range(3))
    waited = timed(lambda: setup.save(name, folder))
    removed(folder)
    saving: list[Any] = []
    call = timed(lambda: saving.append(setup.save(name, folder, True)))
    added = [call]
    done = torch.zeros(1)
    while not done:
        added.append(timed(setup.train) - alone)
        done.fill_(saving[0].done)
        dist.all_reduce(done, dist.ReduceOp.MIN)
    saving[0].wait()
    removed(folder)
    return dict(zip(BACKGROUND, (waited, call, sum(added[:2]), sum(added))))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--megabytes", type=int, default=600, help="of parameters and state (default: 600)")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to write to; default: the system's for temporary files"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("checkpoint_speed.json"), help="default: checkpoint_speed.json"
    )
    args = parser.parse_args(argv)
    console, results = Console(), Results()
    for devices in args.devices:
        with console.status(f"{devices} processes"), tempfile.TemporaryDirectory(dir=args.folder) as folder:
            rounds = 5 if args.quick else args.rounds
            by_rank = run_ranks(
                partial(race, megabytes=args.megabytes, rounds=rounds, folder=Path(folder)), devices, timeout=7200
            )
        for section, times in by_rank[0].items():
            results.times[f"{section}, {devices} processes"] = {
                name: [1e3 * max(t) for t in zip(*(r[section][name] for r in by_rank))] for name in times
            }
        for section in ("save", "load"):
            for ours, theirs in LIKE.items():
                results.compare(f"{section}, {devices} processes", ours, theirs, at_most=1.1)
            results.compare(f"{section}, {devices} processes", WHOLE, PLAIN, at_most=1.1)
        for name in (PARTS, WHOLE):
            section = f"background, {devices} processes"
            results.compare(section, f"{name}: call", f"{name}: waited for", at_most=0.1)
            for what in BACKGROUND[2:]:
                results.compare(section, f"{name}: {what}", f"{name}: waited for")
        for theirs in LIKE.values():
            results.compare(section, f"{theirs}: call", f"{theirs}: waited for")
    return results.finish(console, args.output)


if __name__ == "__main__":
    sys.exit(main())

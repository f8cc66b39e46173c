"""A search for losses of checkpoints: runs that are killed at random moments, and files that are damaged.

    python benchmarks/durability.py                 200 kills, 1,000 damages: half an hour
    python benchmarks/durability.py --worlds 2 4    runs of two and of four processes alone
    python benchmarks/durability.py --quick         a few of each
    python benchmarks/durability.py --json OUT      the figures as a document

A run trains a small network with dropout, AdamW and a schedule, on data whose position is saved, and saves every other
step; whoever runs it is killed by SIGKILL at a random moment, while it starts, loads, trains or saves, and is started
again, until the run is at its end. It is one process that plays four devices, or two or four Gloo processes, of which
one is killed, and the others at the same time, a moment later, or not at all: these have to end by themselves.
Checkpoints are whole or in parts, saved at once or in the background. After each kill:

    lost        a checkpoint whose save had returned is not there any more, though it is among those to be kept, or it
                is damaged; or any folder under its final name is not whole
    wrong       a loss of a resumed run is not, to the bit, that of the run that nobody killed
    unnoticed   the other processes have not ended within half a minute after one was killed

Damages are those of `damage`: bits are flipped, files cut, replaced by those of another step or another model, removed,
in copies of good checkpoints. A damage is unnoticed if ``verify`` finds nothing, or a load succeeds, or fails having
changed something.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from damage import Subjects
from torch import nn

import shardwright as sw
from shardwright.checkpoint.checkpoint_folders import LOCK, steps_in
from shardwright.checkpoint.manifest import verify
from shardwright.process_runtime import _current

STEPS, QUICK_STEPS = 40, 16
KEPT = 3
EVERY = 2
#: Seconds in which the others have to end after one process was killed: 10 on an idle machine.
NOTICED = 30.0


@dataclass(frozen=True)
class Way:
    """The way in which a run is saved, by how many processes, and after how many steps it ends."""

    whole: bool
    background: bool
    processes: int
    steps: int = STEPS

    def __str__(self) -> str:
        return (
            f"{'whole' if self.whole else 'in parts'}, {'in the background' if self.background else 'at once'}, "
            f"{self.processes} process{'es' if self.processes > 1 else ''}"
        )


ALONE = [Way(whole, background, 1) for whole in (True, False) for background in (True, False)]
TOGETHER = [
    Way(whole, background, world) for world in (2, 4) for whole in (True, False) for background in (True, False)
]


class Data:
    """Batches drawn one after the other; its position is its state."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        return torch.randn(16, 32, generator=generator), torch.randint(0, 8, (16,), generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Training:
    """All that a run is made of."""

    def __init__(self, devices: int, processes: bool) -> None:
        if not processes:
            sw.init(devices=devices)
        torch.manual_seed(0)
        cut = devices if processes else 2
        net = nn.Sequential(
            sw.shard(nn.Linear(32, 64), ((1, 1), (cut, 1), (cut,))), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8)
        )
        self.model = sw.AutoParallel(net, nn.CrossEntropyLoss()).dataset_strategy("full_batch")
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        self.data = Data()

    def state(self) -> dict[str, Any]:
        return {"schedulers": self.schedule, "data": self.data}

    def step(self) -> float:
        loss = self.model(*next(self.data))
        loss.backward()
        self.optimizer.step(), self.optimizer.zero_grad(), self.schedule.step()
        return loss.item()


class Journal:
    """The record of a run, in a file that outlives it: a line a step, and a line a save that has returned."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, word: str, step: int, loss: float = 0.0) -> None:
        os.write(self._file, f"{word} {step} {struct.pack('>d', loss).hex()}\n".encode())

    @staticmethod
    def read(path: Path) -> list[tuple[str, int, float]]:
        if not path.exists():
            return []
        lines = [line.split() for line in path.read_text().split("\n")[:-1]]
        return [(word, int(step), struct.unpack(">d", bytes.fromhex(loss))[0]) for word, step, loss in lines]


def run(way: Way, folder: Path, journal: Journal | None) -> None:
    """Train from the last checkpoint to the end."""
    training = Training(way.processes if way.processes > 1 else 4, way.processes > 1)
    restored = sw.load_checkpoint(training.model, training.optimizer, folder, missing_ok=True, **training.state())
    first = 0 if restored is None else restored.step
    if journal:
        journal.write("from", first)
    pending = None
    for step in range(first, way.steps):
        loss = training.step()
        if journal:
            journal.write("loss", step, loss)
        if (step + 1) % EVERY == 0:
            saving = sw.save_checkpoint(
                training.model,
                training.optimizer,
                folder,
                step=step + 1,
                integrated_save=way.whole,
                asynchronous=way.background,
                keep_checkpoint_max=KEPT,
                **training.state(),
            )
            if pending is not None:
                pending.wait()  # a save in the background has begun, so the one before is at its end
                if journal:
                    journal.write("saved", pending.step)
            pending = saving
            if not way.background:
                if journal:
                    journal.write("saved", saving.step)
                pending = None
    if pending is not None:
        pending.wait()
    if journal:
        journal.write("end", way.steps)


def _child(way: Way, rank: int, port: int, folder: Path, journal: Path) -> None:
    """Run in a forked process, and leave nothing behind."""
    code = 1
    try:
        os.setpgid(0, 0)
        warnings.simplefilter("ignore")
        log = os.open(journal.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2), os.dup2(log, 1)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  open as long as the process
        _current.clear()
        torch.set_num_threads(1)
        if way.processes > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=way.processes,
                timeout=timedelta(seconds=60),
            )
            sw.init()
        run(way, folder, Journal(journal) if rank == 0 else None)
        if way.processes > 1:
            dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(code)


def start(way: Way, folder: Path, journal: Path) -> list[int]:
    """Fork the processes of a run; their ids."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    pids = []
    for rank in range(way.processes):
        pid = os.fork()
        if pid == 0:
            _child(way, rank, port, folder, journal)
        pids.append(pid)
    return pids


def wait(pids: list[int], seconds: float) -> dict[int, int]:
    """Exit statuses of those that have ended within that time."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(ended) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid] = status
        time.sleep(0.002)
    return ended


def kill(pids: list[int], ended: dict[int, int]) -> None:
    for pid in pids:
        if pid not in ended:
            os.kill(pid, signal.SIGKILL)
            ended[pid] = os.waitpid(pid, 0)[1]


@dataclass
class Kills:
    """The outcome of the killing."""

    kills: int = 0
    runs: int = 0
    resumed: int = 0
    saving: int = 0
    lost: int = 0
    wrong: int = 0
    unnoticed: int = 0
    alone: int = 0  # kills of one process alone, whose end the others had to notice
    failed: int = 0
    problems: tuple[str, ...] = ()

    def problem(self, kind: str, text: str) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        self.problems += (f"{kind}: {text}",)


def reference(way: Way, folder: Path) -> tuple[list[float], float]:
    """The losses of a run that nobody kills, and how long it took."""
    journal = folder / "reference"
    began = time.monotonic()
    pids = start(way, folder / "reference_checkpoints", journal)
    statuses = wait(pids, 600)
    seconds = time.monotonic() - began
    kill(pids, statuses)
    lines = Journal.read(journal)
    if set(statuses.values()) != {0} or lines[-1][0] != "end":
        raise SystemExit(f"the run that nobody kills failed:\n{journal.with_suffix('.log').read_text()[-3000:]}")
    shutil.rmtree(folder / "reference_checkpoints")
    return [loss for word, _, loss in lines if word == "loss"], seconds


def kill_runs(way: Way, count: int, chance: random.Random, found: Kills, folder: Path) -> None:
    """Kill runs of one way, `count` times; the last of them comes to its end."""
    folder.mkdir()
    expected, seconds = reference(way, folder)
    number = 0
    journal, checkpoints = folder / "run_0", folder / "checkpoints_0"
    before = killed = 0
    finished = False
    while killed < count or not finished:
        pids = start(way, checkpoints, journal)
        # As likely early, where it starts and loads, as late.
        lives = chance.uniform(0, seconds * chance.choice((0.3, 1.0))) if killed < count else 600
        ended = wait(pids[:1], lives)
        finished = len(ended) == 1
        if not finished:
            killed += 1
            found.kills += 1
            victims = [p for p in pids if p not in ended]
            chance.shuffle(victims)
            os.kill(victims[0], signal.SIGKILL)
            how = chance.random() if len(victims) > 1 else 1.0
            # Before its first step a process may still wait for the others to join, as long as it is told to.
            if how < 0.3 and any(word == "loss" for word, _, _ in Journal.read(journal)[before:]):
                found.alone += 1
                others = wait(victims[1:], NOTICED)
                if len(others) < len(victims) - 1:
                    found.problem("unnoticed", f"{way}: {len(victims) - 1 - len(others)} processes went on")
                ended |= others
            elif how < 0.6:
                ended |= wait(victims[1:], 0.3)  # the others hear of it as they do
            kill(pids, ended)
            found.saving += any(name.startswith(".") and name != LOCK for name in _names(checkpoints))
        else:
            ended |= wait(pids[1:], 30)
            kill(pids, ended)
        lines = Journal.read(journal)
        _check(way, lines, before, expected, checkpoints, found)
        if finished and (set(ended.values()) != {0} or lines[-1][0] != "end"):
            found.problem("failed", f"{way}: {journal.with_suffix('.log').read_text()[-2000:]}")
        before = len(lines)
        if finished:
            found.runs += 1
            number += 1
            shutil.rmtree(checkpoints, ignore_errors=True)
            journal, checkpoints, before = folder / f"run_{number}", folder / f"checkpoints_{number}", 0
    shutil.rmtree(folder)


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _check(
    way: Way, lines: list[tuple[str, int, float]], before: int, expected: list[float], folder: Path, found: Kills
) -> None:
    """Check the remains of a life of a run.

    Args:
        lines: its journal, of which the first `before` are of earlier lives.
    """
    there = steps_in(folder) if folder.is_dir() else {}
    for step, checkpoint in there.items():
        problems = verify(checkpoint)
        if problems:
            found.problem("lost", f"{way}: step {step} is damaged: {problems[0]}")
    returned = [step for word, step, _ in lines if word == "saved"]
    if returned:
        newest = max(there, default=-1)
        if newest < max(returned):
            found.problem("lost", f"{way}: the save of step {max(returned)} had returned, and {newest} is the newest")
        # Of those that had returned the newest are there, as many as are kept less one that is newer than they.
        for step in sorted(set(returned))[-(KEPT - 1) :]:
            if step not in there and step > newest - KEPT * EVERY:
                found.problem("lost", f"{way}: step {step} is gone; there are {sorted(there)}")
    for word, step, loss in lines[before:]:
        if word == "from" and step:
            found.resumed += 1
        if word == "loss" and loss != expected[step]:
            found.problem("wrong", f"{way}: step {step} has the loss {loss!r}, not {expected[step]!r}")
            break


# -- damages -----------------------------------------------------------------------------------------------------------


def damage_files(count: int, chance: random.Random, folder: Path) -> dict[str, Any]:
    """Damage good checkpoints, one file or two of a copy at a time."""
    subjects, done, unnoticed = Subjects(folder), Counter(), []
    for number in range(count):
        kind = subjects.kinds[number % len(subjects.kinds)]
        problem = subjects.unnoticed(kind, chance)
        done[kind] += 1
        if problem is not None:
            unnoticed.append(problem)
    return {"damages": done.total(), "by_kind": dict(done), "unnoticed": len(unnoticed), "problems": unnoticed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few of each, and runs of 16 steps")
    parser.add_argument("--kills", type=int, help="how many (default 200; quick: 4)")
    parser.add_argument(
        "--worlds", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4], help="processes of a run"
    )
    parser.add_argument("--damages", type=int, help="how many (default 1000; quick: 27)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    kills = arguments.kills if arguments.kills is not None else 4 if arguments.quick else 200
    damages = arguments.damages if arguments.damages is not None else 27 if arguments.quick else 1000
    chance = random.Random(arguments.seed)
    torch.set_num_threads(1)
    found, figures = Kills(), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.ones(
            1, requires_grad=True
        ).sum().backward()  # before a capture, for children's: tests/support/ranks.py says why
        warm = Training(4, False)
        warm.step()  # what a first step loads is loaded before processes are forked
        if kills:
            ways = [way for way in (*ALONE, *TOGETHER) if way.processes in arguments.worlds]
            if arguments.quick:
                ways = [replace(way, steps=QUICK_STEPS) for way in ways]
            if kills <= 50:
                ways = [way for way in ways if replace(way, steps=STEPS) in (ALONE[0], TOGETHER[3], TOGETHER[-1])]
                ways = ways if len(arguments.worlds) < 3 else ways[:2]
            for i, way in enumerate(ways):
                share = kills * (i + 1) // len(ways) - kills * i // len(ways)
                if share:
                    kill_runs(way, share, chance, found, folder / f"way_{i}")
                    print(
                        f"{found.kills} of {kills} kills ({way}): {found.resumed} resumptions, {found.saving} while "
                        f"saving, {found.alone} of one process alone, {found.lost} lost, {found.wrong} wrong, "
                        f"{found.unnoticed} unnoticed, {found.failed} failed",
                        flush=True,
                    )
            figures["kills"] = vars(found)
        if damages:
            figures["damages"] = damage_files(damages, chance, folder / "damages")
            print(
                f"{figures['damages']['damages']} damages {figures['damages']['by_kind']}: "
                f"{figures['damages']['unnoticed']} unnoticed",
                flush=True,
            )
    for problem in (*found.problems, *figures.get("damages", {}).get("problems", ())):
        print(problem)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    bad = found.lost + found.wrong + found.unnoticed + found.failed + figures.get("damages", {}).get("unnoticed", 0)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

"""How long a training step takes: ours against DTensor, the same collectives by hand, and one device.

    python benchmarks/step_time.py                   everything: some minutes
    python benchmarks/step_time.py --quick           few steps
    python benchmarks/step_time.py --only local planning

A step is forward, backward, ``optimizer.step()`` and ``optimizer.zero_grad()``. Contenders take turns step by step in
the same processes, so that whatever else the machine does meets all of them; what counts is the ratio of two steps of
one round, its median and quartiles over the rounds. Before anything is timed, losses and parameters of all contenders
are compared with one device.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardwright as sw
from shardwright.lower import lower
from shardwright.runtime.init import Runtime

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))  # for its forked ranks

from by_hand import BY_HAND, Exchanges, Natural  # noqa: E402
from networks import DEVICES, MLP, TUTORIAL, Network  # noqa: E402
from on_dtensors import ON_DTENSORS  # noqa: E402
from ranks import run_ranks  # noqa: E402

SECTIONS = ("tutorial", "mlp", "local", "launch", "planning")
CHECKED_STEPS = 5
SECONDS_ALONE = 0.05
LOSS_TOLERANCE, PARAMETER_TOLERANCE = 2e-6, 2e-3


# -- contenders --------------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    """One way to train the network.

    Attributes:
        step: a whole step; gives the loss, as a tensor.
        parameters: what this process holds of the parameters, as plain tensors.
        alone: it runs on rank 0, while the others wait.
    """

    step: Callable[[], Tensor]
    parameters: Callable[[], list[Tensor]]
    alone: bool = False


def contender(network: Network, module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], *,
              alone: bool = False) -> Contender:
    """The step that all have in common.

    Args:
        module: owns the parameters.
        loss: called with the batch.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=network.learning_rate)
    x, y = network.batch()

    def step() -> Tensor:
        value = loss(x, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    def parameters() -> list[Tensor]:
        return [getattr(p, "_local_tensor", p).detach() for p in module.parameters()]

    return Contender(step, parameters, alone)


def one_device(network: Network) -> Contender:
    """Plain PyTorch."""
    module = network.make()
    return contender(network, module, lambda x, y: network.loss_fn(module(x), y), alone=True)


def ours(network: Network) -> Contender:
    """One process a device."""
    model = sw.AutoParallel(network.make(sw.shard), loss_fn=network.loss_fn).dataset_strategy("full_batch")
    return contender(network, model, model)


class InThisProcess(sw.AutoParallel):
    """All devices in this process, though it is one of several."""

    def _runtime(self) -> Runtime:
        return Runtime(False, DEVICES, 0, torch.device("cpu"))


def local(network: Network) -> Contender:
    """All devices in this process."""
    model = InThisProcess(network.make(sw.shard), loss_fn=network.loss_fn)
    return contender(network, model, model, alone=True)


def on_dtensors(network: Network, flattened: bool) -> Contender:
    """DTensor, eager."""
    module = ON_DTENSORS[network.name](network, flattened)
    return contender(network, module, module)


def by_hand(network: Network, collectives: Natural) -> Contender:
    """Explicit collectives."""
    module = BY_HAND[network.name](network, collectives)
    return contender(network, module, module)


#: The contenders of eight processes.
PROCESSES: dict[str, Callable[[Network], Contender]] = {
    "ours": ours,
    "DTensor": lambda network: on_dtensors(network, False),
    "DTensor, flattened mesh": lambda network: on_dtensors(network, True),
    "by hand": lambda network: by_hand(network, Natural()),
    "by hand, all-to-alls": lambda network: by_hand(network, Exchanges()),
    "one device": one_device,
    "ours, local runtime": local,
}
#: Those of one process.
ONE_PROCESS = {"one device": one_device, "ours, local runtime": local}


# -- races -------------------------------------------------------------------------------------------------------------


def race(rank: int, world: int, network: Network, entries: Sequence[str], steps: int) -> dict[str, list[float]]:
    """On one rank: check all contenders, then time them in turns.

    Returns:
        Contender -> the seconds of each of its steps on this rank; nothing for one that ran elsewhere.
    """
    logging.disable(logging.WARNING)  # DTensor says that its all-to-all is slow here, and asks for a flattened mesh
    contenders = {}
    for name in entries:
        made = PROCESSES[name](network)
        if rank == 0 or not made.alone:
            contenders[name] = made
        check(name, made, network, rank)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(steps):
        for name in order(entries, turn):
            if world > 1:
                dist.barrier()
            if name in contenders:
                times[name].append(timed(contenders[name]))
    return times


def timed(entry: Contender) -> float:
    """The seconds of one step; of a short one alone the median of several in a row, for what the others have left in the
    caches would count."""
    seconds = []
    while True:
        start = time.perf_counter()
        entry.step()
        seconds.append(time.perf_counter() - start)
        if not entry.alone or sum(seconds) > SECONDS_ALONE:
            return statistics.median(seconds)


def order(entries: Sequence[str], turn: int) -> list[str]:
    """Everybody comes first in turn, and every second round goes backwards: nobody always follows the same one."""
    first = turn // 2 % len(entries)
    turned = [*entries[first:], *entries[:first]]
    return turned[::-1] if turn % 2 else turned


def check(name: str, made: Contender, network: Network, rank: int) -> None:
    """A few steps give the losses of one device, and change the parameters as they change there.

    Raises:
        AssertionError: they do not.
    """
    plain = one_device(network)
    initial = [p.clone() for p in plain.parameters()]
    for step in range(CHECKED_STEPS):
        want, got = plain.step().item(), made.step().item()
        if not abs(got - want) <= LOSS_TOLERANCE * abs(want):
            raise AssertionError(f"{network.name}, {name}, rank {rank}, step {step}: loss {got}, on one device {want}")
    cut = (lambda whole: whole) if made.alone else (lambda whole: network.slices(whole, rank))
    for i, (start, want, got) in enumerate(zip(cut(initial), cut(plain.parameters()), made.parameters(), strict=True)):
        change, difference = (want - start).norm().item(), (got - want).norm().item()  # rounding may flip a relu
        if not difference <= PARAMETER_TOLERANCE * change:
            raise AssertionError(f"{network.name}, {name}, rank {rank}: parameter {i} has changed by {change}, "
                                 f"but differs from one device by {difference}")


def run_race(network: Network, world: int, entries: Sequence[str], steps: int) -> dict[str, list[float]]:
    """Contender -> the milliseconds of each step, those of the rank that took longest."""
    by_rank = run_ranks(race, world, network, entries, steps, timeout=120 + 5.0 * steps)
    return {name: [1e3 * max(t) for t in zip(*(times[name] for times in by_rank if name in times))]
            for name in entries}


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        digits = 2 if self.median < 10 else 1
        return f"{self.median:.{digits}f}  ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True)
class Figure:
    """What is compared with a target: median `at` most or at least so much; None: for information."""

    section: str
    name: str
    spread: Spread
    at_most: float | None = None
    at_least: float | None = None

    @property
    def ok(self) -> bool | None:
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or self.spread.median <= self.at_most) and \
            (self.at_least is None or self.spread.median >= self.at_least)

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:g}" if self.at_least is not None else ""


@dataclass
class Results:
    """Everything that was measured.

    Attributes:
        times: section -> contender -> milliseconds of each step.
        figures: in the order of the sections.
    """

    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)

    def compare(self, section: str, one: str, other: str, **target: float) -> None:
        """The ratio of two contenders' steps, round by round."""
        pairs = zip(self.times[section][one], self.times[section][other], strict=True)
        self.figures.append(Figure(section, f"{one} / {other}", Spread.of([a / b for a, b in pairs]), **target))

    def fastest(self, section: str, word: str) -> str:
        """Of the forms of a contender the one with the lowest median."""
        forms = [name for name in self.times[section] if name.startswith(word)]
        return min(forms, key=lambda name: statistics.median(self.times[section][name]))

    def write(self, path: Path) -> None:
        figures = [asdict(f) | {"ok": f.ok} for f in self.figures]
        path.write_text(json.dumps({"machine": machine(), "figures": figures, "milliseconds": self.times}, indent=1))

    def show(self, console: Console) -> None:
        for section, times in self.times.items():
            table = Table("step", "ms", title=f"{section}: median (quartiles)", title_justify="left", box=box.SIMPLE)
            for name, values in times.items():
                table.add_row(name, str(Spread.of(values)))
            console.print(table)
        table = Table("", "", "median (quartiles)", "target", "", box=box.SIMPLE)
        for f in self.figures:
            table.add_row(f.section, f.name, str(f.spread), f.target, {True: "ok", False: "MISSED", None: ""}[f.ok])
        console.print(table)


def machine() -> dict[str, Any]:
    return {"torch": torch.__version__, "python": platform.python_version(), "processor": platform.processor(),
            "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S")}


# -- sections ----------------------------------------------------------------------------------------------------------


def measure_processes(results: Results, network: Network, steps: int) -> None:
    """Eight Gloo processes of one thread each."""
    section = network.name
    results.times[section] = run_race(network, DEVICES, list(PROCESSES), steps)
    best, exact = results.fastest(section, "DTensor"), network is TUTORIAL
    results.compare(section, "ours", best, **({"at_most": 0.45} if exact else {}))
    results.compare(section, "ours", results.fastest(section, "by hand"), at_most=1.0)
    results.compare(section, "ours", "one device")
    results.compare(section, "ours", "ours, local runtime", **({"at_least": 10.0} if exact else {}))


def measure_local(results: Results, steps: int) -> None:
    """All devices in one process of one thread, which does nothing else."""
    for network in (TUTORIAL, MLP):
        section = f"local, {network.name}"
        results.times[section] = run_race(network, 1, list(ONE_PROCESS), steps)
        results.compare(section, "ours, local runtime", "one device",
                        **({"at_most": 3.0} if network is TUTORIAL else {}))


def measure_launch(results: Results, runs: int) -> None:
    """A whole program in one process, from its launch to its end after one step."""
    script = ROOT / "examples" / "operator_functional.py"
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, script, "--steps", "1"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    results.figures.append(Figure("launch", "seconds to the end of the first step", Spread.of(seconds), at_most=6.0))


def measure_planning(results: Results, runs: int) -> None:
    """Planning and lowering in processes that have imported torch and shardwright and done nothing yet."""
    pairs = [run_ranks(plan_twice, 1)[0] for _ in range(runs)]
    for name, seconds in zip(("first", "second"), zip(*pairs)):
        results.figures.append(Figure("planning", f"seconds to plan and lower, {name} time", Spread.of(seconds),
                                      at_most=2.0 if name == "first" else None))


def plan_twice(rank: int, world: int) -> tuple[float, float]:
    x, y = TUTORIAL.batch()
    seconds = []
    for _ in range(2):
        network = TUTORIAL.make(sw.shard)
        start = time.perf_counter()
        lower(sw.plan(network, (x,), loss_fn=TUTORIAL.loss_fn, targets=y, devices=DEVICES))
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="rounds of a race of eight processes (default: 100)")
    parser.add_argument("--quick", action="store_true", help="15 rounds, one launch")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all")
    parser.add_argument("--output", type=Path, default=Path("step_time.json"), help="default: step_time.json")
    args = parser.parse_args(argv)
    steps, runs = (15, 1) if args.quick else (args.steps, 3)
    console, results = Console(), Results()
    measures: dict[str, Callable[[], None]] = {
        "tutorial": lambda: measure_processes(results, TUTORIAL, steps),
        "mlp": lambda: measure_processes(results, MLP, steps),
        "local": lambda: measure_local(results, steps),
        "launch": lambda: measure_launch(results, runs),
        "planning": lambda: measure_planning(results, runs),
    }
    for section in SECTIONS:
        if section in args.only:
            with console.status(section):
                measures[section]()
    results.show(console)
    results.write(args.output)
    console.print(f"written to {args.output}")
    return 0 if all(f.ok is not False for f in results.figures) else 1


if __name__ == "__main__":
    sys.exit(main())

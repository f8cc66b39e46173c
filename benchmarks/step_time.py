"""Seconds of a training step: ours against DTensor, the same collectives by hand, and one device.

    python benchmarks/step_time.py                   everything: some minutes
    python benchmarks/step_time.py --quick           few steps
    python benchmarks/step_time.py --only local planning

A step is forward, backward, ``optimizer.step()`` and ``optimizer.zero_grad()``; contenders take turns, see `race`.
Before anything is timed, losses and parameters of all contenders are compared with one device.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from by_hand import BY_HAND, Exchanges, Natural
from networks import DEVICES, MLP, TUTORIAL, Network
from on_dtensors import ON_DTENSORS
from race import ROOT, Contender, Figure, Results, Spread, run_race
from ranks import run_ranks
from rich.console import Console
from torch import Tensor, nn

import shardwright as sw
from shardwright.process_runtime import Runtime
from shardwright.runtime.lowering import lower

SECTIONS = ("tutorial", "mlp", "local", "launch", "planning")
CHECKED_STEPS = 5
LOSS_TOLERANCE, PARAMETER_TOLERANCE = 2e-6, 2e-3


# -- contenders --------------------------------------------------------------------------------------------------------


def contender(
    network: Network, module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], *, alone: bool = False
) -> Contender:
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


def check(network: Network, name: str, made: Contender, rank: int) -> None:
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
            raise AssertionError(
                f"{network.name}, {name}, rank {rank}: parameter {i} has changed by {change}, "
                f"but differs from one device by {difference}"
            )


# -- sections ----------------------------------------------------------------------------------------------------------


def race_of(network: Network, world: int, entries: Sequence[str], steps: int) -> dict[str, list[float]]:
    return run_race(world, lambda name: PROCESSES[name](network), partial(check, network), entries, steps)


def measure_processes(results: Results, network: Network, steps: int) -> None:
    """Eight Gloo processes of one thread each."""
    section = network.name
    results.times[section] = race_of(network, DEVICES, list(PROCESSES), steps)
    best, exact = results.fastest(section, "DTensor"), network is TUTORIAL
    results.compare(section, "ours", best, **({"at_most": 0.45} if exact else {}))
    results.compare(section, "ours", results.fastest(section, "by hand"), at_most=1.0)
    results.compare(section, "ours", "one device")
    results.compare(section, "ours", "ours, local runtime", **({"at_least": 10.0} if exact else {}))


def measure_local(results: Results, steps: int) -> None:
    """All devices in one process of one thread, which does nothing else."""
    for network in (TUTORIAL, MLP):
        section = f"local, {network.name}"
        results.times[section] = race_of(network, 1, list(ONE_PROCESS), steps)
        results.compare(
            section, "ours, local runtime", "one device", **({"at_most": 3.0} if network is TUTORIAL else {})
        )


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
        results.figures.append(
            Figure(
                "planning",
                f"seconds to plan and lower, {name} time",
                Spread.of(seconds),
                at_most=2.0 if name == "first" else None,
            )
        )


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
    return results.finish(console, args.output)


if __name__ == "__main__":
    sys.exit(main())

"""Cost of the guards of a captured program at each call: a check that finds nothing changed, on GPTs of 12 and 48
layers.

    python benchmarks/guards.py               half a minute
    python benchmarks/guards.py --quick       few rounds
    python benchmarks/guards.py --output guards.json

Host time of one thread. ``check``: `Guards.hold` alone, while nothing has changed and after an equal object took the
place of another; each time is the median of 20 checks in a row. ``call``: a whole call without gradients of a model so
narrow that its operators take little, with its guards and with guards that look at nothing, in turns. Before anything
is timed, guards are seen to fail when a module's attribute is changed, and to hold again when it is changed back.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from race import ROOT, Figure, Results, Spread, order
from rich.console import Console

import shardwright as sw

sys.path.append(str(ROOT / "examples"))

from gpt import GPT

LAYERS, TARGET, IN_A_ROW = (12, 48), {12: 150.0}, 20


def called(layers: int) -> tuple[sw.AutoParallel, Callable[[], object]]:
    """A model that has been captured, and a call of it."""
    torch.manual_seed(0)
    sw.init(devices=1)
    model = sw.AutoParallel(GPT(vocabulary=64, length=8, layers=layers, width=16, heads=2), parallel_mode="stand_alone")
    tokens = torch.randint(0, 64, (2, 8))

    def call() -> object:
        with torch.no_grad():
            return model(tokens)

    call()
    return model, call


def microseconds(call: Callable[[], object], times: int = 1) -> float:
    """The median of several calls in a row."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def measure(results: Results, layers: int, rounds: int) -> None:
    """One model."""
    model, call = called(layers)
    guards = next(iter(model._programs.values())).guards
    heads = model.net.blocks[-1].attention
    heads.heads = 1
    if guards.hold():
        raise AssertionError("the guards do not see a change")
    heads.heads = 2
    if not guards.hold():
        raise AssertionError("the guards do not hold again")
    section = f"GPT of {layers} layers"
    modules = len(list(model.net.modules()))

    def equal() -> bool:
        heads.dropout = float("0.0")  # another object of the same value
        return guards.hold()

    checks = {
        "unchanged": lambda: microseconds(guards.hold, IN_A_ROW),
        "an equal object": lambda: microseconds(equal, IN_A_ROW),
    }
    kinds = {"with guards": guards.hold, "without": lambda: True}
    found: dict[str, list[float]] = {name: [] for name in (*checks, *kinds)}
    for turn in range(rounds):
        for name in order(list(found), turn):
            if name in checks:
                found[name].append(checks[name]())
            else:
                vars(guards)["hold"] = kinds[name]
                found[name].append(microseconds(call, 3))
                del vars(guards)["hold"]
    results.times[section] = {name: [us / 1e3 for us in found[name]] for name in kinds}
    target = {"at_most": TARGET[layers]} if layers in TARGET else {}
    results.figures += [
        Figure(section, f"a check of {modules} modules, us", Spread.of(found["unchanged"]), **target),
        Figure(section, "a check that finds an equal object, us", Spread.of(found["an equal object"])),
    ]
    results.compare(section, "with guards", "without")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds (default: 30)")
    parser.add_argument("--quick", action="store_true", help="10 rounds")
    parser.add_argument("--output", type=Path, default=Path("guards.json"), help="default: guards.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    console, results = Console(), Results()
    for layers in LAYERS:
        with console.status(f"GPT of {layers} layers"):
            measure(results, layers, 10 if args.quick else args.rounds)
    return results.finish(console, args.output)


if __name__ == "__main__":
    sys.exit(main())

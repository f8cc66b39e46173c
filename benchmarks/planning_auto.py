"""Seconds of stages="auto", and its result: GPT-3 on 1,024 devices, a single thread, CPU seconds.

python benchmarks/planning_auto.py                    96 layers, some minutes
python benchmarks/planning_auto.py --layers 12        fewer

capture     the model on the meta device, twice: for a micro-batch, and for twice its rows
choose      where to cut it, for how many micro-batches: every alternative that is priced
stages      the plan of each stage, alike ones once; and the step in time
step        by the formula that chose, and of the pipeline that was made
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt3 import BATCH, LAYERS, gpt3
from race import machine

import shardwright as sw
from shardwright import planning
from shardwright.pipeline import stage_search
from shardwright.report.tables import summary

#: CPU seconds, all in all.
TARGET = 60.0


def timed(seconds: dict[str, float], name: str, call: Any) -> Any:
    """A function that adds what it takes to a part."""

    def called(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - begin

    return called


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--cluster", default="h200x8x128")
    parser.add_argument("--micro-batches", type=int, help="default: chosen too")
    parser.add_argument("--output", type=Path, default=Path("planning_auto.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, float] = {}
    planning.capture_micro = timed(seconds, "capture", planning.capture_micro)
    stage_search.StageSearch.run = timed(seconds, "choose", stage_search.StageSearch.run)
    begin, wall = time.process_time(), time.perf_counter()
    plan = sw.plan(
        **gpt3(arguments.layers, BATCH),
        devices=arguments.devices,
        cluster=arguments.cluster,
        pipeline={"stages": "auto", "micro_batches": arguments.micro_batches or "auto"},
    )
    step, peak = plan.cost, plan.peak
    total, wall = time.process_time() - begin, time.perf_counter() - wall
    seconds["stages"] = total - sum(seconds.values())
    summary(plan)
    print(
        ", ".join(f"{name} {each:.1f} s" for name, each in seconds.items())
        + f"; {total:.1f} CPU s, {wall:.1f} s by the clock"
    )
    print(
        f"step {plan.chosen.seconds:.3f} s by the formula, {step:.3f} s in the simulation; "
        f"peak {plan.chosen.peak / 1e9:.1f} and {peak / 1e9:.1f} GB"
    )
    missed = total > TARGET
    print(f"target {TARGET:g} s: {'MISSED' if missed else 'ok'}")
    arguments.output.write_text(
        json.dumps(
            {
                "machine": machine(),
                "layers": arguments.layers,
                "devices": arguments.devices,
                "seconds": seconds,
                "total": total,
                "step": step,
                "formula": plan.chosen.seconds,
                "peak": peak,
                "stages": [list(stage) for stage in plan.chosen.stages],
                "micro_batches": plan.micro_batches,
            },
            indent=1,
        )
    )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

"""Seconds of planning, and the quality of the plan: a single thread, CPU seconds, sizes doubled to show growth.

python benchmarks/planning.py                     GPT-3's widths, 12 to 96 layers, 1,024 devices: some minutes
python benchmarks/planning.py --quick             12 and 24 layers
python benchmarks/planning.py --devices 16384

capture     the model on the meta device to a graph
costs       the strategies, what each costs, what lies between each two: up to the problem
search      the problem solved; limited: with what is kept, dropped and stored cut, within --memory of a device
recursive   the recursion over the device count, all in all
gap         how far the plan may be from the best one of those that were considered
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
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt3 import BATCH, gpt3
from race import machine

from shardwright.capture.export import capture
from shardwright.cluster import Cluster, memory_of
from shardwright.cost.cost_model import CostModel
from shardwright.cost.memory_timeline import optimizer_bytes
from shardwright.partition.local_program import place_inputs
from shardwright.planners.memory_fit import ENOUGH
from shardwright.planners.memory_problem import add_memory
from shardwright.planners.plan_search import Search
from shardwright.planners.planning_problem import CUT, PlanningProblem
from shardwright.planners.recursive_programming import recursive_programming
from shardwright.solver.solve import solve

#: Targets in CPU seconds, for 96 layers on 1,024 devices.
TARGETS = {"capture": 30.0, "costs": 10.0, "search": 1.0, "search, limited": 6.0, "gap": 1e-3, "gap, limited": 1e-3}


class Clock:
    """CPU seconds of parts of a program, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def of(self, name: str, call: Any) -> Any:
        begin = time.process_time()
        out = call()
        self.seconds[name] = time.process_time() - begin
        return out


def measure(layers: int, devices: int, cluster: str, memory: float) -> dict[str, float]:
    """Plan so many of GPT-3's layers, part by part."""
    clock, model = Clock(), gpt3(layers, BATCH * max(devices // 1024, 1))
    inputs = (*model["inputs"], model["targets"])
    graph = clock.of("capture", lambda: capture(model["net"], inputs, None, loss_fn=model["loss_fn"]))
    input_placement, costs = (
        place_inputs(graph, devices, "full_batch"),
        CostModel(Cluster.of(cluster, devices), devices),
    )
    problem = PlanningProblem(graph, devices, input_placement, cost_model=costs)
    search = Search.of(problem)
    made = clock.of("costs", lambda: search.cost_graph(search.options()))
    found = clock.of("search", lambda: solve(made.problem))
    out = {
        "layers": layers,
        "operators": len(graph.ops),
        "nodes": len(made.problem.costs),
        "step": found.cost,
        "gap": found.gap,
    } | clock.seconds
    recursion = clock.of("recursive", lambda: recursive_programming(problem))
    out |= {"recursive": clock.seconds["recursive"], "step, recursive": recursion.found.cost}
    if memory:
        held = clock.of(
            "costs, limited",
            lambda: add_memory(
                search.cost_graph(search.options(), cut=CUT),
                input_placement,
                search.batch_dims,
                memory,
                optimizer_bytes("adam"),
            ),
        )
        found = clock.of("search, limited", lambda: solve(held.cost_graph.problem, gap=ENOUGH))
        out |= {
            "nodes, limited": len(held.cost_graph.problem.costs),
            "step, limited": found.cost,
            "gap, limited": found.gap,
            "peak, limited": held.peak(found.states),
            **{name: clock.seconds[name] for name in ("costs, limited", "search, limited")},
        }
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 and 24 layers")
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--cluster", help="default: as many nodes of h200x8 as it takes")
    parser.add_argument(
        "--memory",
        metavar="AMOUNT",
        default="cluster",
        help='of a device, for the search with a limit: "80GB", bytes, "cluster" (the default) or 0: no such search',
    )
    parser.add_argument("--output", type=Path, default=Path("planning.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cluster = arguments.cluster or f"h200x8x{max(arguments.devices // 8, 1)}"
    memory = (
        0.0 if arguments.memory == "0" else memory_of(arguments.memory, Cluster.of(cluster, arguments.devices)) or 0.0
    )
    counts = (12, 24) if arguments.quick else (12, 24, 48, 96)
    rows = [measure(layers, arguments.devices, cluster, memory) for layers in counts]
    table = Table(
        "layers",
        *(str(row["layers"]) for row in rows),
        "target",
        "",
        box=box.SIMPLE,
        title=f"GPT-3's layers on {arguments.devices} devices ({cluster}), CPU seconds",
        title_justify="left",
    )
    missed = False
    for name in rows[0]:
        if name == "layers":
            continue
        target, last = TARGETS.get(name), rows[-1][name]
        ok = target is None or arguments.quick or last <= target
        missed |= not ok
        table.add_row(
            name,
            *(f"{row[name]:.4g}" for row in rows),
            "" if target is None else f"<= {target:g}",
            "" if target is None or arguments.quick else "ok" if ok else "MISSED",
        )
    Console().print(table)
    figures = {"machine": machine(), "devices": arguments.devices, "cluster": cluster, "memory": memory, "rows": rows}
    arguments.output.write_text(json.dumps(figures, indent=1))
    print(f"written to {arguments.output}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

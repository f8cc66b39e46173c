"""Bytes that a process holds under optimizer parallel: parameters, gradients, the optimizer's state, and at the most.

    python benchmarks/optimizer_parallel.py            a minute
    python benchmarks/optimizer_parallel.py --ranks 4

Measured is the memory of all tensors that are alive, after every operator; what several lie in counts once. It is to be
within a tenth of the arithmetic, which stands with what is measured in ``tests/support/held_bytes.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from race import machine  # isort: skip  (puts tests/support on the path)
from held_bytes import LEVELS, Held, arithmetic, measure
from ranks import run_ranks
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import shardwright as sw

LAYERS, WIDTH = 32, 512
TOLERANCE = 0.1
MIB = 1 << 20


def warm_up() -> None:
    """Load once, before the processes fork, all that a first capture and a first backward load in each of them."""
    sw.init(devices=2)
    model = sw.AutoParallel(nn.Linear(2, 2), nn.MSELoss(), "data_parallel")
    model(torch.zeros(2, 2), torch.zeros(2, 2)).backward()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="processes (default: 8)")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"default: {LAYERS}")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"default: {WIDTH}")
    parser.add_argument("--output", type=Path, default=Path("optimizer_parallel.json"))
    args = parser.parse_args(argv)
    console, rows, within = Console(width=120), {}, True
    warm_up()
    table = Table(
        "",
        *Held.__dataclass_fields__,
        box=box.SIMPLE_HEAD,
        title=f"MiB on each of {args.ranks} processes (by arithmetic)",
    )
    for level in LEVELS:
        by_rank = run_ranks(measure, args.ranks, level, args.layers, args.width, timeout=300.0)
        got = Held(*map(max, zip(*(asdict(held).values() for held in by_rank))))
        want = arithmetic(level, args.ranks, args.layers, args.width)
        rows[level] = {"measured": asdict(got), "arithmetic": asdict(want)}
        pairs = [(asdict(got)[name], asdict(want)[name]) for name in asdict(got)]
        within &= all(abs(a - b) <= TOLERANCE * b for a, b in pairs)
        table.add_row(level, *(f"{a / MIB:.2f} ({b / MIB:.2f})" for a, b in pairs))
    console.print(table)
    made = {"machine": machine(), "ranks": args.ranks, "layers": args.layers, "width": args.width, "levels": rows}
    args.output.write_text(json.dumps(made, indent=1))
    console.print(f"written to {args.output}" + ("" if within else f"; some are more than {TOLERANCE:.0%} off"))
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())

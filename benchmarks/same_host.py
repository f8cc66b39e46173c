"""Seconds of collectives of the ranks of one host: by Gloo, and through memory that they share.

    python benchmarks/same_host.py              eight ranks, in groups of 8, 4 and 2: a minute
    python benchmarks/same_host.py --quick      fewer rounds

Eight processes of one thread; all groups of a size are at work at once. Bytes are those of a rank's tensor before the
collective, of an all-gather after it. Contenders take turns within a round; what counts is the ratio of two of one
round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from race import Results
from ranks import run_ranks
from rich.console import Console
from torch import Tensor

from shardwright.layout import Digit, Layout
from shardwright.redistribution import Redistribution, redistribution
from shardwright.runtime.distributed.collectives import bind_all
from shardwright.runtime.distributed.process_groups import ProcessGroups

WORLD, GROUPS = 8, (8, 4, 2)
KIBIBYTES = (4, 64, 512, 4096, 16384)
WAYS = {"memory": True, "Gloo": False}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
# Bytes that a timing moves at least, in several collectives one after the other: ranks come out of a barrier a
# millisecond apart.
LONG_ENOUGH, MOST = 4 << 20, 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument("--output", type=Path, default=Path("same_host.json"), help="default: same_host.json")
    arguments = parser.parse_args(argv)
    results = Results()
    by_rank = run_ranks(measured, WORLD, 3 if arguments.quick else arguments.rounds)
    for section in by_rank[0]:
        results.times[section] = {
            way: [1e3 * max(turn) for turn in zip(*(times[section][way] for times in by_rank))] for way in WAYS
        }
        results.compare(section, *WAYS, at_most=1.0)
    return results.finish(Console(), arguments.output)


def measured(rank: int, world: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Section -> way -> the seconds of one collective, for each round."""
    out: dict[str, dict[str, list[float]]] = {}
    groups = {way: ProcessGroups(world, rank, share=share) for way, share in WAYS.items()}
    for size in GROUPS:
        for kind in KINDS:
            for kib in KIBIBYTES:
                found, x = a_conversion(kind, Digit(size, 1), world, kib << 10)
                ways = {way: bound(found, x, rank, of) for way, of in groups.items()}
                torch.testing.assert_close(*(run(x) for run in ways.values()))
                times = out[f"{size} ranks, {kind}, {kib} KiB"] = {way: [] for way in WAYS}
                for turn in range(rounds):
                    for way in list(WAYS) if turn % 2 else list(WAYS)[::-1]:
                        times[way].append(timed(ways[way], x))
    return out


def a_conversion(kind: str, digit: Digit, world: int, nbytes: int) -> tuple[Redistribution, Tensor]:
    """A conversion that is such a collective, and what a rank has before it."""
    rows, columns, whole = (Layout.of(world, dims) for dims in (((digit,), ()), ((), (digit,)), ((), ())))
    partial = Layout.of(world, ((), ()), (digit,))
    source, target = {
        "all-reduce": (partial, whole),
        "all-gather": (rows, whole),
        "reduce-scatter": (partial, rows),
        "all-to-all": (rows, columns),
    }[kind]
    shape = (64, nbytes // 4 // 64 * (digit.size if kind == "all-to-all" else 1))
    found = redistribution(source, target)
    assert [step.kind.replace("_", "-") for step in found.steps] == [kind]
    return found, torch.randn(source.local_shape(shape))


def bound(found: Redistribution, x: Tensor, rank: int, groups: ProcessGroups) -> Callable[[Tensor], Tensor]:
    (step,) = bind_all(found, tuple(x.shape), rank, groups)
    return step


def timed(run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    times = max(2, min(MOST, LONG_ENOUGH // x.nbytes))
    run(x)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        run(x)
    return (time.perf_counter() - start) / times


if __name__ == "__main__":
    raise SystemExit(main())

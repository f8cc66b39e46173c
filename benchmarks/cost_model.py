"""Seconds of a step by the cost model against those that the step takes: is the better plan known before it runs?

    python benchmarks/cost_model.py                 calibrates, predicts and measures: some minutes
    python benchmarks/cost_model.py --rounds 5      fewer rounds
    python benchmarks/cost_model.py --cluster F     with a cluster that was calibrated before

Plans of a multilayer perceptron and a GPT, good ones and bad ones, on eight Gloo processes of one thread each. A step
is forward and backward with all sums of gradients, in the prediction and in the measurement; the optimizer's step is in
neither. Plans take turns, see `race`; what a plan took is the median of its rounds, each that of the slowest rank. The
processes calibrate before, between and after the rounds, so that whatever else the machine does meets all of it.

What counts is the rank correlation of predicted and measured seconds, over all plans; those of each network alone are
for information.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from networks import DEVICES, MLP
from race import ROOT, Spread, machine, order
from ranks import run_ranks
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

import shardwright as sw
from shardwright.cluster import Cluster
from shardwright.cost.cost_model import CostModel
from shardwright.runtime.calibrate import calibrate

sys.path.append(str(ROOT / "examples"))

import gpt
from language import Loss

TO_REACH = 0.9  # the rank correlation
CALIBRATION = 5  # rounds of each calibration


# -- plans -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A network with the marks that make one plan of it.

    Attributes:
        name: the network, then the plan.
        make: gives the marked network, its loss, and the batch.
        mode: the parallel mode.
        hsdp: the settings of optimizer parallel, or None.
    """

    name: str
    make: Callable[[], tuple[nn.Module, Callable, tuple[Tensor, Tensor]]]
    mode: str = "semi_auto"
    hsdp: dict | None = None

    @property
    def network(self) -> str:
        return self.name.partition(":")[0]

    def plan(self) -> sw.Plan:
        net, loss, (x, y) = self.make()
        return sw.plan(net, (x,), loss_fn=loss, targets=y, devices=DEVICES, parallel_mode=self.mode, hsdp=self.hsdp)

    def model(self) -> Callable[[], Tensor]:
        """The model that gives the loss, in a process of its own for each device."""
        net, loss, (x, y) = self.make()
        model = sw.AutoParallel(net, loss_fn=loss, parallel_mode=self.mode).dataset_strategy("full_batch")
        if self.hsdp is not None:
            model.hsdp(**self.hsdp)
        parameters = list(model.parameters())

        def step() -> Tensor:
            for parameter in parameters:
                parameter.grad = None
            loss = model(x, y)
            loss.backward()
            return loss.detach()

        return step


def mlp(name: str, first: tuple, relu: tuple, second: tuple, **settings: object) -> Planned:
    """256 x 1024 -> 4096 -> 1024, the three operators marked."""

    def make() -> tuple[nn.Module, Callable, tuple[Tensor, Tensor]]:
        strategies = iter((first, (relu,), second))
        return (
            MLP.make(lambda operator, in_strategy: sw.shard(operator, in_strategy=next(strategies))),
            MLP.loss_fn,
            MLP.batch(),
        )

    return Planned(f"mlp: {name}", make, **settings)


def small_gpt(name: str, mark: Callable[[nn.Module, Loss], None], **settings: object) -> Planned:
    """2 layers, width 256, 8 heads, 128 tokens, vocabulary 1024, batch 8."""

    def make() -> tuple[nn.Module, Callable, tuple[Tensor, Tensor]]:
        torch.manual_seed(0)
        net, loss = gpt.GPT(vocabulary=1024, length=128, layers=2, width=256, heads=8), Loss()
        mark(net, loss)
        passage = torch.randint(0, 1024, (8, 129), generator=torch.Generator().manual_seed(1))
        return net, loss, (passage[:, :-1].contiguous(), passage[:, 1:].contiguous())

    return Planned(f"gpt: {name}", make, **settings)


def unmarked(net: nn.Module, loss: Loss) -> None:
    """Everything follows the batch."""


def layers(dp: int, mp: int) -> Callable[[nn.Module, Loss], None]:
    """Attention and perceptron in `mp`, embedding and head whole."""

    def mark(net: nn.Module, loss: Loss) -> None:
        gpt.mark(net, loss, dp, mp)
        sw.shard(net.tokens, ((dp, 1), (1, 1)))
        sw.shard(net.head, ((dp, 1, 1), (1, 1)))
        loss.cross_entropy.shard(((dp, 1), (dp,)))

    return mark


def rows_first(net: nn.Module, loss: Loss) -> None:
    """Each product by rows, each with a sum of its own: what one would not do."""
    for block in net.blocks:
        for layer in (
            block.attention.query,
            block.attention.key,
            block.attention.value,
            block.attention.out,
            block.up,
            block.down,
        ):
            sw.shard(layer, ((1, 1, 8), (1, 8)))


def columns_only(net: nn.Module, loss: Loss) -> None:
    """Each product by columns, each with a gather before it."""
    for block in net.blocks:
        for layer in (
            block.attention.query,
            block.attention.key,
            block.attention.value,
            block.attention.out,
            block.up,
            block.down,
        ):
            sw.shard(layer, ((1, 1, 1), (8, 1)))


PLANS: tuple[Planned, ...] = (
    mlp("batch 8", ((8, 1), (1, 1)), (8, 1), ((8, 1), (1, 1))),
    mlp("batch 8, hsdp", ((8, 1), (1, 1)), (8, 1), ((8, 1), (1, 1)), hsdp={}),
    mlp("batch 8, hsdp level 3", ((8, 1), (1, 1)), (8, 1), ((8, 1), (1, 1)), hsdp={"optimizer_level": "level3"}),
    mlp("batch 8, hsdp of 2", ((8, 1), (1, 1)), (8, 1), ((8, 1), (1, 1)), hsdp={"shard_size": 2}),
    mlp("batch 4, operators 2", ((4, 1), (1, 2)), (4, 2), ((4, 2), (2, 1))),
    mlp("batch 2, operators 4", ((2, 1), (1, 4)), (2, 4), ((2, 4), (4, 1))),
    mlp("batch 2, operators 4, hsdp", ((2, 1), (1, 4)), (2, 4), ((2, 4), (4, 1)), hsdp={}),
    mlp("operators 8", ((1, 1), (1, 8)), (1, 8), ((1, 8), (8, 1))),
    mlp("rows 8, rows 8", ((1, 8), (8, 1)), (1, 8), ((1, 8), (8, 1))),
    mlp("columns 8, columns 8", ((1, 1), (1, 8)), (1, 8), ((1, 1), (1, 8))),
    mlp("columns 8, batch 8", ((1, 1), (1, 8)), (1, 8), ((8, 1), (1, 1))),
    mlp("2 x 2 x 2", ((2, 2), (2, 2)), (2, 2), ((2, 2), (2, 2))),
    mlp("batch 2, the rest repeated", ((2, 1), (1, 1)), (2, 1), ((2, 1), (1, 1))),
    mlp("operators 2, the rest repeated", ((1, 1), (1, 2)), (1, 2), ((1, 2), (2, 1))),
    small_gpt("batch 8", unmarked),
    small_gpt("batch 8, hsdp", unmarked, hsdp={"threshold": 0}),
    small_gpt("batch 8, hsdp level 3", unmarked, hsdp={"optimizer_level": "level3"}),
    small_gpt("batch 4, operators 2", lambda net, loss: gpt.mark(net, loss, 4, 2)),
    small_gpt("batch 2, operators 4", lambda net, loss: gpt.mark(net, loss, 2, 4)),
    small_gpt("operators 8", lambda net, loss: gpt.mark(net, loss, 1, 8)),
    small_gpt("batch 2, layers 4", layers(2, 4)),
    small_gpt("batch 2, the rest repeated", layers(2, 1)),
    small_gpt("rows 8", rows_first),
    small_gpt("columns 8", columns_only),
)


# -- measuring ---------------------------------------------------------------------------------------------------------


def measured(
    rank: int, world: int, names: Sequence[str], rounds: int, calibrates: bool
) -> tuple[list[Cluster], dict[str, list[float]]]:
    """On one rank: what it finds the cluster to be, each time, and the seconds of each plan's steps."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    steps = {p.name: p.model() for p in PLANS if p.name in names}
    for step in steps.values():
        for _ in range(2):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    clusters, pauses = [], {0, rounds // 2, rounds} if calibrates else set()
    for turn in range(rounds + 1):
        if turn in pauses:
            clusters.append(calibrate(sw.init(), rounds=CALIBRATION))
        for name in order(list(steps), turn) if turn < rounds else ():
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    return clusters, seconds


def measure(names: Sequence[str], rounds: int, calibrates: bool) -> tuple[list[Cluster], dict[str, list[float]]]:
    """The clusters that were found, and of each plan the seconds of its rounds, those of the slowest rank."""
    by_rank = run_ranks(measured, DEVICES, names, rounds, calibrates, timeout=600 + 15.0 * (rounds + 3) * len(names))
    seconds = [found for _, found in by_rank]
    return by_rank[0][0], {name: [max(turn) for turn in zip(*(found[name] for found in seconds))] for name in names}


def middle(clusters: Sequence[Cluster]) -> Cluster:
    """The median of each number."""

    def of(read: Callable[[Cluster], float]) -> float:
        return statistics.median(map(read, clusters))

    first = clusters[0]
    levels = tuple(
        replace(level, bandwidth=of(lambda c: c.levels[i].bandwidth), latency=of(lambda c: c.levels[i].latency))
        for i, level in enumerate(first.levels)
    )
    return replace(
        first,
        levels=levels,
        peak={name: of(lambda c: c.peak[name]) for name in first.peak},
        memory_bandwidth=of(lambda c: c.memory_bandwidth),
        overhead=of(lambda c: c.overhead),
    )


# -- predicted against measured ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A plan's step, in seconds.

    Attributes:
        forward, backward: what is predicted; of both, communication.
        measured: over the rounds.
    """

    name: str
    forward: float
    backward: float
    communication: float
    measured: Spread

    @property
    def predicted(self) -> float:
        return self.forward + self.backward

    @property
    def error(self) -> float:
        """The error of the prediction, as a part of what was measured."""
        return self.predicted / self.measured.median - 1


def rank_correlation(plans: Sequence[Compared]) -> float:
    """Spearman's: the correlation of the places of plans in the orders by predicted and by measured seconds."""
    places = [
        np.argsort(np.argsort(seconds))
        for seconds in ([p.predicted for p in plans], [p.measured.median for p in plans])
    ]
    return float(np.corrcoef(places)[0, 1])


def show(console: Console, compared: Sequence[Compared], correlations: dict[str, float]) -> None:
    heads = ("plan", "predicted ms", "sending", "measured ms (quartiles)", "error")
    table = Table(*(Column(name, no_wrap=True) for name in heads), box=box.SIMPLE)
    for plan in sorted(compared, key=lambda p: p.measured.median):
        spread = Spread(*(1e3 * value for value in asdict(plan.measured).values()))
        table.add_row(
            plan.name,
            f"{1e3 * plan.predicted:.1f}",
            f"{plan.communication / plan.predicted:.0%}",
            str(spread),
            f"{plan.error:+.0%}",
        )
    console.print(table)
    for name, value in correlations.items():
        console.print(f"rank correlation, {name}: {value:.3f}")
    console.print(f"median error: {np.median([abs(p.error) for p in compared]):.0%}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each plan (default: 15)")
    parser.add_argument("--cluster", type=Path, help="a cluster file, instead of calibrating")
    parser.add_argument("--only", nargs="+", choices=("mlp", "gpt"), default=("mlp", "gpt"), help="default: both")
    parser.add_argument("--output", type=Path, default=Path("cost_model.json"), help="default: cost_model.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 100)
    plans = [plan for plan in PLANS if plan.network in args.only]
    with console.status("measuring"):
        clusters, seconds = measure([plan.name for plan in plans], args.rounds, args.cluster is None)
    cluster = middle(clusters) if clusters else Cluster.of(args.cluster, DEVICES)
    costs = CostModel(cluster, DEVICES)
    prices = {plan.name: costs.plan(plan.plan()) for plan in plans}
    compared = [
        Compared(name, price.forward, price.backward, price.communication, Spread.of(seconds[name]))
        for name, price in prices.items()
    ]
    correlations = {"all": rank_correlation(compared)}
    for network in args.only:
        correlations[network] = rank_correlation([p for p in compared if p.name.startswith(network)])
    show(console, compared, correlations)
    args.output.write_text(
        json.dumps(
            {
                "machine": machine(),
                "cluster": cluster.to_dict(),
                "calibrations": [c.to_dict() for c in clusters],
                "rank correlation": correlations,
                "seconds": seconds,
                "plans": [asdict(p) | {"predicted": p.predicted, "error": p.error} for p in compared],
            },
            indent=1,
        )
    )
    console.print(f"written to {args.output}")
    return 0 if correlations["all"] >= TO_REACH else 1


if __name__ == "__main__":
    sys.exit(main())

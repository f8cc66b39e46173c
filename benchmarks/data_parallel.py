"""Seconds of a data-parallel training step: ours against DistributedDataParallel.

    python benchmarks/data_parallel.py               some minutes
    python benchmarks/data_parallel.py --quick       few steps
    python benchmarks/data_parallel.py --buckets     ours with buckets of several sizes instead
    python benchmarks/data_parallel.py --devices 2 --only mlp

    mlp         8 layers of 1024 x 1024, 32 rows a rank: 32 MiB of gradients and little to compute meanwhile
    convs       a stem and 6 residual pairs of convolutions with batch norms, 64 to 256 channels, 4 pictures of 16 x 16
                a rank; running statistics are averaged over the ranks by us, sent from rank 0 by DDP

Gloo processes of one thread each. Contenders take turns, see `race`. Before anything is timed, losses and parameters of
all are compared with those of DDP.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from race import Contender, Results, run_race
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw

SECTIONS = ("mlp", "convs")
CHECKED_STEPS, TOLERANCE = 3, 1e-4
OURS, DDP = "ours", ("DDP", "DDP, buckets as views")
SIZES = (0.25, 1, 2, 4, 8, 16, 32, 64)


class Pair(nn.Module):
    """Two convolutions and what goes around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.around(x))


def make(section: str) -> nn.Module:
    torch.manual_seed(0)
    if section == "mlp":
        return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.ReLU())), nn.Linear(1024, 10))
    pairs = [
        Pair(64, 64, 1),
        Pair(64, 64, 1),
        Pair(64, 128, 2),
        Pair(128, 128, 1),
        Pair(128, 256, 2),
        Pair(256, 256, 1),
    ]
    return nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), *pairs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def batch(section: str, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shape = (32, 1024) if section == "mlp" else (4, 3, 16, 16)
    return torch.randn(shape, generator=generator), torch.randint(0, 10, shape[:1], generator=generator)


def contender(section: str, name: str) -> Contender:
    """Ours, whole or with buckets of so many MB; or DDP."""
    net = make(section)
    if name in DDP:
        model: nn.Module = DistributedDataParallel(net, gradient_as_bucket_view=name != "DDP")
    else:
        model = sw.AutoParallel(net, parallel_mode="data_parallel")
        if name != OURS:
            model.comm_fusion(allreduce=float(name.split()[1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    x, y = batch(section, torch.distributed.get_rank())

    def step() -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contender(step, lambda: [getattr(p, "_local_tensor", p).detach() for p in model.parameters()])


@cache
def expected(section: str) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and parameters of the checked steps of DDP, on this rank."""
    made = contender(section, DDP[0])
    return [made.step() for _ in range(CHECKED_STEPS)], [p.clone() for p in made.parameters()]


def check(section: str, name: str, made: Contender, rank: int) -> None:
    losses, parameters = expected(section)
    for theirs in losses:
        torch.testing.assert_close(
            made.step(), theirs, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{name}: {text}"
        )
    for mine, theirs in zip(made.parameters(), parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{name}: {text}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="rounds of a race (default: 60)")
    parser.add_argument("--quick", action="store_true", help="15 rounds")
    parser.add_argument("--buckets", action="store_true", help="ours, with buckets of several sizes")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8], help="default: 2 4 8")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all")
    parser.add_argument("--output", type=Path, default=Path("data_parallel.json"), help="default: data_parallel.json")
    args = parser.parse_args(argv)
    entries = [*(f"ours {size} MB" for size in SIZES), *DDP] if args.buckets else [OURS, *DDP]
    console, results = Console(), Results()
    contenders: dict[str, Callable[[str], Contender]] = {section: partial(contender, section) for section in SECTIONS}
    for section in args.only:
        for devices in args.devices:
            name = f"{section}, {devices} processes"
            with console.status(name):
                results.times[name] = run_race(
                    devices, contenders[section], partial(check, section), entries, 15 if args.quick else args.steps
                )
            if not args.buckets:
                results.compare(name, OURS, results.fastest(name, "DDP"), at_most=1.0)
    return results.finish(console, args.output)


if __name__ == "__main__":
    sys.exit(main())

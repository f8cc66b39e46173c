"""Seconds of a step of a pipeline: ours against torch.distributed.pipelining, used by hand on the same split.

    python benchmarks/pipeline.py                    some minutes
    python benchmarks/pipeline.py --quick            few steps
    python benchmarks/pipeline.py --only gpt --schedules 1f1b

    mlp     8 stages of two layers of 512 x 512, 256 rows
    gpt     8 stages of one block of 128, 4 heads; tokens and positions first, the head last; 16 rows of 64

Eight Gloo processes of one thread each, each a stage of its own, eight micro-batches: what is compared is the
schedules' work and what is sent between stages; how operators and sums within a stage compare is told by `step_time`
and `models`. By hand a rank makes a `PipelineStage` of its part of the model and a schedule of it, and sends everyone
the loss, as every rank has it with us; also without that, where the last stage alone knows the loss.

Contenders take turns, see `race`. Before anything is timed, losses and parameters of all are compared with one device.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from race import ROOT, Contender, Results, run_race
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import shardwright as sw

sys.path.append(str(ROOT / "examples"))

from gpt import Block
from language import VOCABULARY, passages

SECTIONS, SCHEDULES = ("mlp", "gpt"), {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
STAGES, MICRO_BATCHES = 8, 8
WIDTH, LENGTH = 128, 64
RATE, CHECKED_STEPS, TOLERANCE = 1e-2, 3, 1e-5
OURS, HAND, HAND_LAST = "ours", "by hand", "by hand, the loss in the last stage alone"


# -- networks ----------------------------------------------------------------------------------------------------------


class Embedded(nn.Module):
    """Tokens and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(LENGTH, device=tokens.device))


def make(section: str) -> nn.Sequential:
    """A network as the sequence of its stages."""
    torch.manual_seed(0)
    if section == "mlp":
        layers = [[m for _ in range(2) for m in (nn.Linear(512, 512), nn.ReLU())] for _ in range(STAGES)]
        return nn.Sequential(*(nn.Sequential(*stage[: 3 if s == STAGES - 1 else 4]) for s, stage in enumerate(layers)))
    stages = [[Block(WIDTH, 4)] for _ in range(STAGES)]
    stages[0].insert(0, Embedded())
    stages[-1] += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)]
    return nn.Sequential(*(nn.Sequential(*stage) for stage in stages))


def batch(section: str) -> tuple[Tensor, Tensor]:
    if section == "gpt":
        return next(passages(16, LENGTH))
    generator = torch.Generator().manual_seed(1)
    return torch.randn(256, 512, generator=generator), torch.randn(256, 512, generator=generator)


def loss_of(section: str) -> Callable[[Tensor, Tensor], Tensor]:
    return F.mse_loss if section == "mlp" else lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten())


# -- contenders --------------------------------------------------------------------------------------------------------


def contender(parameters: Sequence[nn.Parameter], run: Callable[[], Tensor]) -> Contender:
    """`run`: forward and backward; the loss."""
    optimizer = torch.optim.SGD(parameters, RATE, momentum=0.9)

    def step() -> Tensor:
        loss = run()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contender(step, lambda: [x for p in parameters if (x := getattr(p, "_local_tensor", p).detach()).numel()])


def ours(section: str, schedule: str) -> Contender:
    model = sw.AutoParallel(make(section), loss_of(section)).dataset_strategy("full_batch")
    model.pipeline(STAGES, schedule, MICRO_BATCHES, {str(s): s for s in range(STAGES)})
    x, y = batch(section)

    def run() -> Tensor:
        loss = model(x, y)
        loss.backward()
        return loss

    model(x, y)  # parameters come into being as slices
    return contender(list(model.parameters()), run)


def by_hand(section: str, schedule: str, everywhere: bool) -> Contender:
    """`everywhere`: whether every rank learns the loss."""
    rank = dist.get_rank()
    part = make(section)[rank]
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
    plays = SCHEDULES[schedule](stage, MICRO_BATCHES, loss_fn=loss_of(section))
    x, y = batch(section)

    def run() -> Tensor:
        loss = torch.zeros(())
        if rank == 0:
            plays.step(x)
        elif rank == STAGES - 1:
            losses: list[Tensor] = []
            plays.step(target=y, losses=losses)
            loss = torch.stack(losses).mean().detach()
        else:
            plays.step()
        if everywhere:
            dist.broadcast(loss, STAGES - 1)
        return loss

    return contender(list(part.parameters()), run)


#: (section, schedule) -> the contender.
CONTENDERS: dict[str, Callable[[str, str], Contender]] = {
    OURS: ours,
    HAND: partial(by_hand, everywhere=True),
    HAND_LAST: partial(by_hand, everywhere=False),
}


@cache
def one_device(section: str) -> tuple[list[float], list[list[Tensor]]]:
    """The losses of a few steps, and the parameters of each stage after them."""
    net, (x, y) = make(section), batch(section)

    def run() -> Tensor:
        loss = loss_of(section)(net(x), y)
        loss.backward()
        return loss

    made = contender(list(net.parameters()), run)
    losses = [made.step().item() for _ in range(CHECKED_STEPS)]
    return losses, [[p.detach().clone() for p in stage.parameters()] for stage in net]


def check(section: str, name: str, made: Contender, rank: int) -> None:
    """A few steps give the losses of one device, and change the parameters as they change there.

    Raises:
        AssertionError: they do not.
    """
    losses, stages = one_device(section)
    for step, want in enumerate(losses):
        got = made.step().item()
        if not abs(got - want) <= TOLERANCE * abs(want) and (name != HAND_LAST or rank == STAGES - 1):
            raise AssertionError(f"{section}, {name}, rank {rank}, step {step}: loss {got}, on one device {want}")
    before = make(section)[rank].parameters()
    for i, (start, want, got) in enumerate(zip(before, stages[rank], made.parameters(), strict=True)):
        change, difference = (want - start).norm().item(), (got - want).norm().item()
        if not difference <= 1e-3 * change:
            raise AssertionError(
                f"{section}, {name}, rank {rank}: parameter {i} has changed by {change}, but differs from "
                f"one device by {difference}"
            )


# -- the race ----------------------------------------------------------------------------------------------------------


def measure(results: Results, section: str, schedule: str, steps: int) -> None:
    one_device(section)  # before the ranks are forked
    title = f"{section}, {schedule}"
    results.times[title] = run_race(
        STAGES, lambda name: CONTENDERS[name](section, schedule), partial(check, section), list(CONTENDERS), steps
    )
    results.compare(title, OURS, HAND, at_most=1.05)
    results.compare(title, OURS, HAND_LAST)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="rounds of a race of eight processes (default: 100)")
    parser.add_argument("--quick", action="store_true", help="15 rounds")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: both")
    parser.add_argument(
        "--schedules", nargs="+", choices=tuple(SCHEDULES), default=tuple(SCHEDULES), help="default: both"
    )
    parser.add_argument("--output", type=Path, default=Path("pipeline.json"), help="default: pipeline.json")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.disable(logging.WARNING)
    console, results = Console(), Results()
    for section in args.only:
        for schedule in args.schedules:
            with console.status(f"{section}, {schedule}"):
                measure(results, section, schedule, 15 if args.quick else args.steps)
    return results.finish(console, args.output)


if __name__ == "__main__":
    sys.exit(main())

"""Seconds of a call with sizes of the inputs that are new: a GPT of 12 layers, captured, planned, lowered.

    python benchmarks/further_sizes.py               some minutes
    python benchmarks/further_sizes.py --quick       few sizes
    python benchmarks/further_sizes.py --output further_sizes.json

One thread, four devices in this process: modes that decide by rules and by a search, and a pipeline of two stages and
two micro-batches. Batch size and sequence length change at each call. The figures are seconds of processor time of the
first call at a size, less those of the quicker of two more:

    first          the first call of the model, which exports it
    further sizes  each call at another size, the second one too, which follows that export by a light run
    alone          the first call of a model that is exported and planned for this size alone, right beside it

The losses of both at each size are compared.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from race import ROOT, Figure, Results, Spread
from rich.console import Console
from torch import Tensor, nn

sys.path.append(str(ROOT / "examples"))

from gpt import GPT

import shardwright as sw

LAYERS, DEVICES, VOCABULARY, LENGTH = 12, 4, 64, 64
MICRO_BATCHES = 2
MODES = ("semi_auto", "dynamic_programming", "pipeline")
#: Seconds that a further size may take beyond a call at a known one.
MOST = 0.1


class Language(nn.Module):
    """A GPT with its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = GPT(vocabulary=VOCABULARY, length=LENGTH, layers=LAYERS, width=32, heads=4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())


def wrapped(mode: str) -> sw.AutoParallel:
    model = sw.AutoParallel(Language(), parallel_mode="semi_auto" if mode == "pipeline" else mode)
    model.dataset_strategy("full_batch")
    if mode == "pipeline":
        stages = {f"net.blocks.{i}": 2 * i // LAYERS for i in range(LAYERS)} | {"net.norm": 1}
        model.pipeline(stages=2, micro_batches=MICRO_BATCHES, stage_config=stages)
    return model


def added(model: sw.AutoParallel, tokens: Tensor) -> tuple[float, float]:
    """Seconds that a call takes beyond one of the next two, and its loss.

    What other models have left is collected before. The quicker one counts: in the other Python may look for cycles of
    objects, which would make the first look cheap.
    """
    gc.collect()
    start = time.process_time()
    loss = model(tokens).item()
    ends = [time.process_time()]
    for _ in range(2):
        model(tokens)
        ends.append(time.process_time())
    return ends[0] - start - min(ends[1] - ends[0], ends[2] - ends[1]), loss


def measure(results: Results, sizes: Sequence[tuple[int, int]]) -> None:
    wrapped(MODES[0])(torch.zeros(4, 8, dtype=torch.long))  # what torch loads at its first capture is no model's cost
    for mode in MODES:
        model = wrapped(mode)
        seconds: dict[str, list[float]] = {}
        for number, (rows, length) in enumerate(sizes):
            rows *= MICRO_BATCHES if mode == "pipeline" else 1
            tokens = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(number))
            taken, loss = added(model, tokens)
            seconds.setdefault("further sizes" if number else "first", []).append(taken)
            taken, expected = added(wrapped(mode), tokens)
            if number:
                seconds.setdefault("alone", []).append(taken)
            if abs(loss - expected) > 1e-5 * abs(expected):
                raise AssertionError(f"{mode}, {rows} x {length}: {loss}, exported by itself {expected}")
        for name, taken in seconds.items():
            most = MOST if name == "further sizes" else None
            results.figures.append(Figure(mode, f"{name}, s", Spread.of(taken), at_most=most))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four further sizes")
    parser.add_argument("--output", type=Path, default=Path("further_sizes.json"), help="default: further_sizes.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", sw.RecaptureWarning)
    sw.init(devices=DEVICES)
    console, results = Console(), Results()
    sizes = [(8, 32), (16, 48), (24, 64), (12, 16), (40, 32), (16, 24), (8, 56), (32, 32), (20, 40), (4, 64)]
    with console.status("further sizes"):
        measure(results, sizes[:5] if args.quick else sizes)
    return results.finish(console, args.output)


if __name__ == "__main__":
    sys.exit(main())

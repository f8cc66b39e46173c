"""How long a call takes with sizes of the inputs that are new: a GPT of 12 layers, captured, planned, lowered.

    python benchmarks/further_sizes.py               a minute
    python benchmarks/further_sizes.py --quick       few sizes
    python benchmarks/further_sizes.py --output further_sizes.json

One thread, four devices in this process, in modes that decide by rules and by a search. Batch size and sequence length
change at each call. "added": seconds of processor time of the first call at a size, less those of a second one. ``first``:
the first call of the model; ``second size``: the first of another size, which captures the model with symbols;
``further sizes``: each one after it, with the loss compared with that of a model that is captured and planned for this
size alone, whose first call is ``alone``.
"""

from __future__ import annotations

import argparse
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

import shardwright as sw  # noqa: E402
from gpt import GPT  # noqa: E402

LAYERS, DEVICES, VOCABULARY, LENGTH = 12, 4, 64, 64
MODES = ("semi_auto", "dynamic_programming")
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
    return sw.AutoParallel(Language(), parallel_mode=mode).dataset_strategy("full_batch")


def added(model: sw.AutoParallel, tokens: Tensor) -> tuple[float, float]:
    """Seconds that a call takes beyond the next one, and its loss."""
    start = time.process_time()
    loss = model(tokens).item()
    middle = time.process_time()
    model(tokens)
    return 2 * middle - start - time.process_time(), loss


def measure(results: Results, sizes: Sequence[tuple[int, int]]) -> None:
    for mode in MODES:
        model, further, alone = wrapped(mode), [], []
        for number, (rows, length) in enumerate(sizes):
            tokens = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(number))
            seconds, loss = added(model, tokens)
            if number < 2:
                name = ("first", "second size")[number]
                results.figures.append(Figure(mode, f"{name}, s", Spread.of([seconds])))
                continue
            own, expected = added(wrapped(mode), tokens)
            if abs(loss - expected) > 1e-5 * abs(expected):
                raise AssertionError(f"{mode}, {rows} x {length}: {loss}, captured by itself {expected}")
            further.append(seconds)
            alone.append(own)
        results.figures.append(Figure(mode, "alone, s", Spread.of(alone)))
        results.figures.append(Figure(mode, "further sizes, s", Spread.of(further), at_most=MOST))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three further sizes")
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

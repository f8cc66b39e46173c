"""Seconds of a call with sizes of the inputs that are new: language models of 12 layers, captured, planned, lowered.

    python benchmarks/further_sizes.py               some minutes
    python benchmarks/further_sizes.py --quick       few sizes
    python benchmarks/further_sizes.py --output further_sizes.json

One thread, four devices in this process, or two Gloo processes of one thread each. A GPT in modes that decide by rules
and by a search, with its loss beside it (`loss_fn`), with its parameters cut (`hsdp`), and as a pipeline of two stages
and two micro-batches; the GPT-2 of transformers, without and with such a pipeline. Batch size and sequence length
change at each call. The figures are seconds of processor time of the first call at a size, less those of the quicker of
two more:

    first          the first call of the model, which exports it
    further sizes  each call at another size, the second one too, which follows that export by a light run
    alone          the first call of a model that is exported and planned for this size alone, right beside it
    another model  the first call of one more model at this size, which follows the export of the one before

One step on one device at the largest size comes first, for the memory of the process. The losses of all at each size
are compared.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from race import ROOT, Figure, Results, Spread
from rich.console import Console
from torch import Tensor, nn

sys.path += [str(ROOT / "examples"), str(ROOT / "tests" / "support")]

import torchvision_operators  # noqa: F401  before transformers imports torchvision
import transformers
from gpt import GPT
from ranks import run_ranks

import shardwright as sw
from shardwright.capture.recapture import forget_programs

LAYERS, DEVICES, VOCABULARY, LENGTH, WIDTH, HEADS = 12, 4, 64, 64, 32, 4
MICRO_BATCHES = 2
#: Seconds that a further size may take beyond a call at a known one.
MOST = 0.1


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Language(nn.Module):
    """A GPT with its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_of(self.net(tokens), tokens)


class HuggingFace(nn.Module):
    """The GPT-2 of transformers with its loss."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        self.net = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens, labels=tokens).loss


class Case(NamedTuple):
    """A model and its settings.

    Args:
        mode: the parallel mode.
        hugging_face: True for the GPT-2 of transformers.
        beside: True where the loss is not in the model.
        cut: True where parameters are cut over their replicas.
        stages: number of pipeline stages.
    """

    mode: str = "semi_auto"
    hugging_face: bool = False
    beside: bool = False
    cut: bool = False
    stages: int = 1

    @property
    def rows(self) -> int:
        """Factor of the rows of a batch."""
        return MICRO_BATCHES if self.stages > 1 else 1

    def wrapped(self) -> sw.AutoParallel:
        torch.manual_seed(0)
        if self.hugging_face:
            net: nn.Module = HuggingFace()
            block, last = "net.transformer.h", "net.transformer.ln_f"
        else:
            gpt = GPT(vocabulary=VOCABULARY, length=LENGTH, layers=LAYERS, width=WIDTH, heads=HEADS)
            net, block, last = gpt if self.beside else Language(gpt), "net.blocks", "net.norm"
        model = sw.AutoParallel(net, loss_fn=loss_of if self.beside else None, parallel_mode=self.mode)
        model.dataset_strategy("full_batch")
        if self.cut:
            model.hsdp(threshold=0)
        if self.stages > 1:
            stages = {f"{block}.{i}": self.stages * i // LAYERS for i in range(LAYERS)} | {last: self.stages - 1}
            model.pipeline(stages=self.stages, micro_batches=MICRO_BATCHES, stage_config=stages)
        return model


CASES = {
    "semi_auto": Case(),
    "dynamic_programming": Case("dynamic_programming"),
    "loss_fn": Case(beside=True),
    "hsdp": Case(cut=True),
    "pipeline": Case(stages=2),
    "GPT-2 of transformers": Case(hugging_face=True),
    "GPT-2, pipeline": Case(hugging_face=True, stages=2),
}
#: The cases that run in processes too.
PROCESSES, WORLD = ("semi_auto", "hsdp", "GPT-2 of transformers"), 2


def added(model: sw.AutoParallel, batch: Sequence[Tensor]) -> tuple[float, float]:
    """Seconds that a call takes beyond one of the next two, and its loss.

    What other models have left is collected before, and the rest is frozen: Python looks for cycles among the objects
    of this call alone. The quicker one counts: in the other Python may look for them too, which would make the first
    look cheap.
    """
    gc.collect()
    gc.freeze()
    start = time.process_time()
    loss = model(*batch).item()
    ends = [time.process_time()]
    for _ in range(2):
        model(*batch)
        ends.append(time.process_time())
    return ends[0] - start - min(ends[1] - ends[0], ends[2] - ends[1]), loss


def grow(case: Case, sizes: Sequence[tuple[int, int]]) -> None:
    """Run one step of the plain model at the largest size.

    The kernel gives the process the memory of such a step, a millisecond for each four megabytes, in a step on one
    device as well: what a new size costs beside a plan is not measured.
    """
    net = case.wrapped().net
    rows, length = max(sizes, key=lambda size: size[0] * size[1])
    tokens = torch.zeros(rows * case.rows, length, dtype=torch.long)
    made = net(tokens)
    (loss_of(made, tokens) if case.beside else made).backward()


def measure(results: Results, sizes: Sequence[tuple[int, int]]) -> None:
    small = torch.zeros(4, 8, dtype=torch.long)
    for case in CASES.values():  # what torch loads at its first capture is no model's cost
        if case in (Case(), Case(hugging_face=True)):
            case.wrapped()(small)
    for name, case in CASES.items():
        grow(case, sizes)
        model = case.wrapped()
        seconds: dict[str, list[float]] = {}
        for number, (rows, length) in enumerate(sizes):
            shape = rows * case.rows, length
            tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(number))
            batch = (tokens, tokens) if case.beside else (tokens,)
            taken, loss = added(model, batch)
            seconds.setdefault("further sizes" if number else "first", []).append(taken)
            for what in ("alone", "another model"):
                if what == "alone":
                    forget_programs()
                taken, expected = added(case.wrapped(), batch)
                if number:
                    seconds.setdefault(what, []).append(taken)
                if abs(loss - expected) > 1e-5 * abs(expected):
                    raise AssertionError(f"{name}, {shape}: {loss}, {what} {expected}")
        for what, taken_each in seconds.items():
            most = MOST if what == "further sizes" else None
            results.figures.append(Figure(name, f"{what}, s", Spread.of(taken_each), at_most=most))


def first_calls(rank: int, world: int, case: Case, sizes: Sequence[tuple[int, int]]) -> list[float]:
    """On a rank: the seconds of the first call of a model at each size."""
    quiet()
    grow(case, sizes)
    model, seconds = case.wrapped(), []
    for number, (rows, length) in enumerate(sizes):
        shape = rows * case.rows, length
        tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(number))
        seconds.append(added(model, (tokens, tokens) if case.beside else (tokens,))[0])
    return seconds


def measure_processes(results: Results, sizes: Sequence[tuple[int, int]]) -> None:
    """The same in processes; of each size the rank that took longest counts."""
    for name in PROCESSES:
        first, *further = map(max, zip(*run_ranks(first_calls, WORLD, CASES[name], sizes, timeout=600)))
        section = f"{name}, {WORLD} processes"
        results.figures.append(Figure(section, "first, s", Spread.of([first])))
        results.figures.append(Figure(section, "further sizes, s", Spread.of(further), at_most=MOST))


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", sw.RecaptureWarning)
    transformers.logging.set_verbosity_error()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four further sizes")
    parser.add_argument("--output", type=Path, default=Path("further_sizes.json"), help="default: further_sizes.json")
    args = parser.parse_args(argv)
    quiet()
    console, results = Console(), Results()
    sizes = [(8, 32), (16, 48), (24, 64), (12, 16), (40, 32), (16, 24), (8, 56), (32, 32), (20, 40), (4, 64)]
    if args.quick:
        sizes = sizes[:5]
    with console.status("further sizes"):
        measure_processes(results, sizes)  # before this process has planned anything, of which ranks would know
        sw.init(devices=DEVICES)
        measure(results, sizes)
    return results.finish(console, args.output)


if __name__ == "__main__":
    sys.exit(main())

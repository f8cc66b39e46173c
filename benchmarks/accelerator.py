"""Host time and communication on the path of accelerators: one rank of eight on torch's "fake" process group.

    python benchmarks/accelerator.py              some minutes
    python benchmarks/accelerator.py --quick      few steps
    python benchmarks/accelerator.py --output accelerator.json

Collectives of the fake group take no time, so the seconds of a step are those of the host: Python, autograd, dispatch.
A GPT of 8 layers is small for that reason too. All contenders take turns step by step in one process, and the ratio to
plain eager PyTorch of the same round counts. Beside it stand the collectives of a step and their bytes, ours and
those of DistributedDataParallel and FSDP2 (`fully_shard`) on the same model. A redistribution is measured in units of
`torch.add`. Where there is an accelerator, the same runs on its tensors, with an exact dropout against torch's.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from race import ROOT, Figure, Results, Spread
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]
from collective_log import collective_log, rank_of_eight
from gpt import GPT, mark

import shardwright as sw
from shardwright.layout import Digit, Layout
from shardwright.redistribution import redistribution
from shardwright.runtime.distributed.collectives import bind_all
from shardwright.runtime.distributed.process_groups import ProcessGroups
from shardwright.runtime.distributed.rank_executor import BoundRedistribute

LAYERS, LENGTH, VOCABULARY, WIDTH, BATCH, RANKS = 8, 16, 64, 64, 8, 8
#: Units of `torch.add` that a redistribution may take, and the ratio to eager of a step with marks.
ADDS, STEP = 20, 1.3


class TokenLoss(nn.Module):
    """Cross entropy of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(logits.flatten(0, 1), target.flatten())


def ours(device: torch.device, x: Tensor, y: Tensor, plan: str) -> Callable[[], Tensor]:
    """A step of the model under one of our plans."""
    net, loss = GPT(VOCABULARY, LENGTH, LAYERS, WIDTH, heads=8).to(device), TokenLoss()
    if plan == "dp2 x tp4":
        mark(net, loss, 2, 4)
    model = sw.AutoParallel(net, loss, parallel_mode="semi_auto" if plan == "dp2 x tp4" else "data_parallel")
    if plan.startswith("hsdp"):
        model.hsdp(threshold=0, optimizer_level=plan.partition(" ")[2])
    model.dataset_strategy("full_batch" if plan == "dp2 x tp4" else "data_parallel")
    return partial(stepped, lambda: model(x, y), net)


def theirs(device: torch.device, x: Tensor, y: Tensor, kind: str) -> Callable[[], Tensor]:
    """A step of the same model in plain PyTorch, alone or under one of PyTorch's wrappers."""
    net, loss = GPT(VOCABULARY, LENGTH, LAYERS, WIDTH, heads=8).to(device), TokenLoss()
    call: Any = net
    if kind == "DDP":
        call = DistributedDataParallel(net, broadcast_buffers=False)
    elif kind == "FSDP2":
        mesh = init_device_mesh(device.type, (RANKS,))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return partial(stepped, lambda: loss(call(x), y), net)


def stepped(call: Callable[[], Tensor], net: nn.Module) -> Tensor:
    """Forward and backward."""
    for parameter in net.parameters():
        parameter.grad = None
    loss = call()
    loss.backward()
    return loss


def host_seconds(run: Callable[[], Any], times: int = 1) -> float:
    """Seconds of this thread of the host."""
    begin = time.thread_time()
    for _ in range(times):
        run()
    return (time.thread_time() - begin) / times


def contenders(device: torch.device) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Name -> a step, planned and run once. A contender that this machine cannot have says so and is left out."""
    x, y = (torch.randint(VOCABULARY, (BATCH, LENGTH), device=device) for _ in range(2))
    of = {name: partial(theirs, device, x, y, name) for name in ("eager", "DDP", "FSDP2")}
    of |= {
        name: partial(ours, device, x, y, name) for name in ("data_parallel", "dp2 x tp4", "hsdp level1", "hsdp level3")
    }
    for name, make in of.items():
        try:
            step = make()
            for _ in range(3):
                step()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            print(f"{name} is left out: {str(error).partition(chr(10))[0]}", file=sys.stderr)
            continue
        yield name, step


def redistributions(device: torch.device, times: int) -> dict[str, float]:
    """Kind -> host time in units of `torch.add`: a forward with a gradient to come; half of a forward and backward."""
    groups, z = ProcessGroups(RANKS, 3), torch.ones(64, 64, device=device)
    add = median(host_seconds(lambda: torch.add(z, z), times) for _ in range(7))
    rows, columns = Layout.from_cuts(RANKS, (8, 1)), Layout.from_cuts(RANKS, (1, 8))
    whole = Layout.replicated(RANKS, 2)
    terms = whole.with_partial((Digit(RANKS, 1),))
    out = {}
    for name, source, target in (
        ("all_gather", rows, whole),
        ("all_to_all", rows, columns),
        ("reduce_scatter", terms, rows),
        ("all_reduce", terms, whole),
    ):
        there = redistribution(source, target)
        back = redistribution(target, source.without_partial())
        x = torch.ones(source.local_shape((64, 64)), device=device, requires_grad=True)
        steps = bind_all(there, tuple(x.shape), 3, groups)
        moved = BoundRedistribute(steps, bind_all(back, target.local_shape((64, 64)), 3, groups), name)
        gradient = torch.ones_like(moved(x))
        both = lambda x=x, moved=moved, gradient=gradient: torch.autograd.grad(moved(x), x, gradient)
        out[f"{name}, forward"] = median(host_seconds(lambda: moved(x), times) for _ in range(7)) / add
        out[f"{name}, half of both directions"] = median(host_seconds(both, times) for _ in range(7)) / add / 2
    return out


def dropout(device: torch.device, times: int) -> float:
    """Seconds of an exact dropout, as a multiple of torch's own, on an accelerator."""
    x = torch.ones(8192, 4096, device=device, dtype=torch.bfloat16)
    mask = torch.ops.shardwright.mask.default
    size, seed = list(x.shape), torch.tensor([1, 2, 1, 0])
    wait = torch.get_device_module(device).synchronize

    def seconds(run: Callable[[], Any]) -> float:
        run()
        wait()
        begin = time.perf_counter()
        for _ in range(times):
            run()
        wait()
        return time.perf_counter() - begin

    exact = lambda: x * mask(seed, [], x, [], size, size, 0, 0.9, torch.bool, None) * (1 / 0.9)
    return median(seconds(exact) / seconds(lambda: F.dropout(x, 0.1)) for _ in range(7))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("accelerator.json"))
    given = parser.parse_args()
    rounds, times = (7, 200) if given.quick else (41, 1500)
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    results = Results()
    with rank_of_eight(rank=3), contextlib.redirect_stdout(sys.stderr):
        steps = dict(contenders(device))
        for name, units in redistributions(device, times).items():
            results.figures.append(Figure("units of torch.add", name, Spread.of([units]), at_most=ADDS))
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(rounds):
            order = list(steps) if turn % 2 else list(steps)[::-1]
            for name in order:
                seconds[name].append(1e3 * host_seconds(steps[name]))
        results.times["host ms of a step"] = seconds
        for name in steps:
            if name != "eager":
                most = {"at_most": STEP} if name == "dp2 x tp4" else {}
                results.compare("host ms of a step", name, "eager", **most)
        for name, step in steps.items():
            with collective_log() as log:
                step()
            for kind, count in sorted(log.counts().items()):
                results.figures.append(Figure("collectives of a step", f"{name}: {kind}", Spread.of([count])))
                results.figures.append(Figure("bytes of a step", f"{name}: {kind}", Spread.of([log.bytes(kind)])))
    if device.type != "cpu":
        ratio = dropout(device, 20)
        results.figures.append(Figure("exact dropout", "ours / torch's", Spread.of([ratio]), at_most=1.5))
    if dist.is_initialized():
        dist.destroy_process_group()
    return results.finish(Console(), given.output)


if __name__ == "__main__":
    sys.exit(main())

"""Seconds of a training step of whole models: ours against DTensor, FSDP2, DDP, the same by hand and one device.

    python benchmarks/models.py                     everything: some minutes
    python benchmarks/models.py --quick             few steps
    python benchmarks/models.py --only gpt memory

    gpt         4 layers, width 512, 8 heads, 256 tokens, vocabulary 8192, batch 8; the batch in 2, operators in 4
    compiled    the same, under torch.compile; on DTensors block by block
    resnet      ResNet-50 on 32 x 32, batch 32, data-parallel
    memory      the peak of each contender's processes, summed, each in processes of its own
    gpu         one device: the lowered program against the plain model, eager and compiled; where there is a GPU

Eight Gloo processes of one thread each. Contenders take turns, see `race`. Before anything is timed the losses of all
are compared with one device over some steps.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import Exchanges, Natural
from gpt_by_hand import GptByHand
from race import ROOT, Contender, Figure, Results, Spread, run_race
from ranks import run_ranks
from rich.console import Console
from torch import Tensor, nn

import shardwright as sw

sys.path.append(str(ROOT / "examples"))

import gpt
import resnet50
from language import Loss

SECTIONS = ("gpt", "compiled", "resnet", "memory", "gpu")
DEVICES, BATCH_PARTS, OPERATOR_PARTS = 8, 2, 4
CHECKED_STEPS, TOLERANCE = 3, 1e-4
RATE = 0.05


# -- the GPT -----------------------------------------------------------------------------------------------------------


def make_gpt() -> nn.Module:
    torch.manual_seed(0)
    return gpt.GPT(vocabulary=8192, length=256, layers=4, width=512, heads=8)


@cache
def gpt_batch() -> tuple[Tensor, Tensor]:
    """Tokens [batch, length] and those that follow."""
    generator = torch.Generator().manual_seed(1)
    passage = torch.randint(0, 8192, (8, 257), generator=generator)
    return passage[:, :-1].contiguous(), passage[:, 1:].contiguous()


def trained(
    parameters: Sequence[Tensor],
    loss: Callable[[], Tensor],
    *,
    whole: Callable[[Tensor], Tensor] | None = None,
    alone: bool = False,
) -> Contender:
    """The step that all have in common.

    Args:
        loss: of this rank.
        whole: makes the loss of the whole batch of it.
    """
    parameters = list(parameters)
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9)

    def step() -> Tensor:
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach() if whole is None else whole(value.detach())

    return Contender(step, lambda: parameters, alone)


def gpt_alone() -> Contender:
    net, loss = make_gpt(), Loss()
    x, y = gpt_batch()
    return trained(net.parameters(), lambda: loss(net(x), y), alone=True)


def gpt_ours(*, compile: bool = False, level: str | None = None) -> Contender:
    net, loss = make_gpt(), Loss()
    gpt.mark(net, loss, BATCH_PARTS, OPERATOR_PARTS)
    model = sw.AutoParallel(net, loss_fn=loss, **({"compile": True} if compile else {})).dataset_strategy("full_batch")
    if level is not None:
        model.hsdp(optimizer_level=level)
    x, y = gpt_batch()
    model(x, y)
    return trained(model.parameters(), lambda: model(x, y))


def gpt_by_hand(collectives: Natural) -> Contender:
    model = GptByHand(make_gpt(), collectives)
    x, y = gpt_batch()
    return trained(model.parameters(), lambda: model(x, y))


def gpt_on_dtensors(*, fully: bool = False, compile: bool = False) -> Contender:
    """``parallelize_module`` over four, and over the two halves of the batch sums of gradients or ``fully_shard``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    mesh = init_device_mesh("cpu", (BATCH_PARTS, OPERATOR_PARTS), mesh_dim_names=("dp", "tp"))
    net, loss = make_gpt(), nn.CrossEntropyLoss()
    for block in net.blocks:
        block.attention.heads //= OPERATOR_PARTS
        block.attention.attend = F.scaled_dot_product_attention  # no operator object of ours, which breaks a graph
        parallelize_module(
            block,
            mesh["tp"],
            {
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )
    parallelize_module(
        net,
        mesh["tp"],
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    net.head.weight = net.tokens.weight  # tied again
    rank, pair = dist.get_rank(), mesh["dp"].get_group()
    if fully:
        for block in net.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
    else:
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(partial(averaged, group=pair))
    rows = slice(4, 8) if rank >= OPERATOR_PARTS else slice(0, 4)
    x, y = (t[rows] for t in gpt_batch())
    if compile:
        # Block by block, as torchtitan does: the embedding on DTensors cannot be traced (torch 2.13 mixes its fake
        # modes).
        for block in net.blocks:
            block.compile()

    def half() -> Tensor:
        return loss(net(x).flatten(0, 1), y.flatten())

    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9)

    def step() -> Tensor:
        with loss_parallel():
            value = half()
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()
        dist.all_reduce(total, group=pair)
        return total / BATCH_PARTS

    return Contender(step, lambda: parameters)


def averaged(parameter: Tensor, group: dist.ProcessGroup) -> None:
    """The gradient of the two halves' mean."""
    local = getattr(parameter.grad, "_local_tensor", parameter.grad)
    dist.all_reduce(local, group=group)
    local.div_(BATCH_PARTS)


# -- ResNet-50 ---------------------------------------------------------------------------------------------------------


def make_resnet() -> nn.Module:
    torch.manual_seed(0)
    return resnet50.ResNet()


@cache
def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 3, 32, 32, generator=generator), torch.randint(0, 10, (32,), generator=generator)


def per_rank_batch() -> tuple[Tensor, Tensor]:
    x, y = images()
    part = len(x) // DEVICES
    rows = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
    return x[rows], y[rows]


def mean(loss: Tensor) -> Tensor:
    """Over all ranks."""
    dist.all_reduce(loss)
    return loss / DEVICES


def resnet_ours() -> Contender:
    model = sw.AutoParallel(make_resnet(), loss_fn=nn.CrossEntropyLoss(), parallel_mode="data_parallel")
    x, y = per_rank_batch()
    kept = copy.deepcopy(dict(model.named_buffers()))
    model(x, y)
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    return trained(model.parameters(), lambda: model(x, y))


def resnet_ddp() -> Contender:
    model = nn.parallel.DistributedDataParallel(make_resnet())
    x, y = per_rank_batch()
    return trained(model.parameters(), lambda: F.cross_entropy(model(x), y), whole=mean)


def resnet_fsdp() -> Contender:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (DEVICES,)), make_resnet()
    for module in model.modules():
        if isinstance(module, resnet50.Bottleneck):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x, y = per_rank_batch()
    return trained(model.parameters(), lambda: F.cross_entropy(model(x), y), whole=mean)


# -- races -------------------------------------------------------------------------------------------------------------

GPT: dict[str, Callable[[], Contender]] = {
    "ours": gpt_ours,
    "DTensor": gpt_on_dtensors,
    "DTensor + FSDP2": partial(gpt_on_dtensors, fully=True),
    "by hand": lambda: gpt_by_hand(Natural()),
    "by hand, all-to-alls": lambda: gpt_by_hand(Exchanges()),
    "ours, level3": partial(gpt_ours, level="level3"),
    "one device": gpt_alone,
}
COMPILED: dict[str, Callable[[], Contender]] = {
    "ours, compiled": partial(gpt_ours, compile=True),
    "DTensor, compiled": partial(gpt_on_dtensors, compile=True),
}
RESNET: dict[str, Callable[[], Contender]] = {"ours": resnet_ours, "DDP": resnet_ddp, "FSDP2": resnet_fsdp}


def check(expected: list[float], name: str, made: Contender, rank: int) -> None:
    """The first losses are those that were expected.

    Raises:
        AssertionError: they are not.
    """
    got = [float(made.step()) for _ in expected]
    if any(not abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(got, expected)):
        raise AssertionError(f"{name}, rank {rank}: losses {got}, on one device {expected}")


def gpt_losses() -> list[float]:
    entry = gpt_alone()
    return [float(entry.step()) for _ in range(CHECKED_STEPS)]


def resnet_losses() -> list[float]:
    """Losses of the first step alone: batch norms have statistics of their own on each rank, so that later ones have no
    counterpart on one device."""
    net, (x, y) = make_resnet(), images()
    with torch.no_grad():
        losses = [F.cross_entropy(copy.deepcopy(net)(a), b) for a, b in zip(x.chunk(DEVICES), y.chunk(DEVICES))]
    return [float(sum(losses) / DEVICES)]


def race(entries: dict[str, Callable[[], Contender]], expected: list[float], steps: int) -> dict[str, list[float]]:
    return run_race(DEVICES, lambda name: entries[name](), partial(check, expected), list(entries), steps, seconds=60.0)


def measure_gpt(results: Results, steps: int) -> None:
    results.times["gpt"] = race(GPT, gpt_losses(), steps)
    results.compare("gpt", "ours", "DTensor", at_most=0.85)
    results.compare("gpt", "ours", "DTensor + FSDP2", at_most=0.70)
    results.compare("gpt", "ours, level3", "DTensor + FSDP2")
    results.compare("gpt", "ours", results.fastest("gpt", "by hand"), at_most=1.02)
    results.compare("gpt", "ours", "one device")


def measure_compiled(results: Results, steps: int) -> None:
    results.times["compiled"] = race(COMPILED, gpt_losses(), steps)
    results.compare("compiled", "ours, compiled", "DTensor, compiled", at_most=0.95)


def measure_resnet(results: Results, steps: int) -> None:
    results.times["resnet"] = race(RESNET, resnet_losses(), steps)
    results.compare("resnet", "ours", "DDP", at_most=1.0)
    results.compare("resnet", "ours", "FSDP2")


# -- memory ------------------------------------------------------------------------------------------------------------


def peak(rank: int, world: int, make: Callable[[], Contender]) -> int:
    """By how many bytes this process grows at most over some steps, the making of the contender included."""
    logging.disable(logging.WARNING)
    ctypes.CDLL(None).malloc_trim(
        0
    )  # what earlier sections have freed before the fork would be used again, and not count
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    entry = make()
    for _ in range(CHECKED_STEPS):
        entry.step()
    return status("VmHWM") - before


def status(name: str) -> int:
    """A size of this process, as Linux counts it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def measure_memory(results: Results, steps: int) -> None:
    peaks = {}
    for name in ("ours", "DTensor", "ours, level3", "DTensor + FSDP2"):
        peaks[name] = sum(run_ranks(peak, DEVICES, GPT[name], timeout=600))
        results.figures.append(Figure("memory", f"GPT, {name}: MiB in all processes", Spread.of([peaks[name] / 2**20])))
    for one, other in (("ours", "DTensor"), ("ours, level3", "DTensor + FSDP2")):
        results.figures.append(
            Figure("memory", f"GPT: {one} / {other}", Spread.of([peaks[one] / peaks[other]]), at_most=1.0)
        )


# -- one GPU -----------------------------------------------------------------------------------------------------------


def measure_gpu(results: Results, steps: int) -> None:
    """The lowered program on one device against the plain model, paired."""
    if not torch.cuda.is_available():
        return
    for compiled in (False, True):
        section = "gpu, compiled" if compiled else "gpu"
        times = results.times[section] = {"plain": [], "ours": []}
        entries = {"plain": on_gpu(False, compiled), "ours": on_gpu(True, compiled)}
        for turn in range(10 + 10 * steps):
            for name in list(entries)[:: 1 if turn % 2 else -1]:
                torch.cuda.synchronize()
                start = time.perf_counter()
                entries[name].step()
                torch.cuda.synchronize()
                if turn >= 10:
                    times[name].append(1e3 * (time.perf_counter() - start))
        results.compare(section, "ours", "plain", at_most=1.01)


def on_gpu(ours: bool, compiled: bool) -> Contender:
    net, loss = make_gpt().cuda(), Loss()
    x, y = (t.cuda() for t in gpt_batch())
    if ours:
        sw.init(devices=1, device="cuda")
        model = sw.AutoParallel(
            net, loss_fn=loss, parallel_mode="stand_alone", **({"compile": True} if compiled else {})
        )
        model(x, y)
        return trained(model.parameters(), lambda: model(x, y))
    run = torch.compile(lambda: loss(net(x), y)) if compiled else lambda: loss(net(x), y)
    return trained(net.parameters(), run)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="rounds of a race of eight processes (default: 20)")
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all")
    parser.add_argument("--output", type=Path, default=Path("models.json"), help="default: models.json")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.disable(logging.WARNING)
    steps = 5 if args.quick else args.steps
    console, results = Console(), Results()
    measures = {
        "gpt": measure_gpt,
        "compiled": measure_compiled,
        "resnet": measure_resnet,
        "memory": measure_memory,
        "gpu": measure_gpu,
    }
    for section in SECTIONS:
        if section in args.only:
            with console.status(section):
                measures[section](results, steps)
    return results.finish(console, args.output)


if __name__ == "__main__":
    sys.exit(main())

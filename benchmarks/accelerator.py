"""Host time and communication on the path of accelerators: one rank of eight on torch's "fake" process group.

    python benchmarks/accelerator.py              some minutes
    python benchmarks/accelerator.py --quick      few steps
    python benchmarks/accelerator.py --output accelerator.json

Collectives of the fake group take no time, so the seconds of a step are those of the host: Python, autograd, dispatch.
A GPT of 8 layers is small for that reason too. All contenders take turns step by step in one process, and the ratio to
plain eager PyTorch of the same round counts. Beside it stand the kernels of a step, and its collectives and their
bytes, ours and those of DistributedDataParallel, FSDP2 (`fully_shard`) and DTensor on the same model. A redistribution
is measured in units of `torch.add`, ours and DTensor's.

Then one process plans a larger GPT for itself alone: a step against plain PyTorch, eager and compiled; an exact dropout
against torch's own; the call of a save in the background against all of the save; the draws of an eighth of a model's
parameters against those of the whole.

Where there is an accelerator, all of it runs on its tensors, and kernels are those that its profiler counts: on the CPU
they are the operators below autograd that are no views. Targets of the second part are those of an accelerator.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import tempfile
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
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]
from collective_log import collective_log, rank_of_eight
from gpt import GPT, mark

import shardwright as sw
from shardwright.layout import Digit, Layout
from shardwright.process_runtime import Runtime, playing
from shardwright.redistribution import redistribution
from shardwright.runtime.deferred_init import materialize
from shardwright.runtime.distributed.collectives import bind_all
from shardwright.runtime.distributed.process_groups import ProcessGroups
from shardwright.runtime.distributed.rank_executor import BoundRedistribute

LAYERS, LENGTH, VOCABULARY, WIDTH, BATCH, RANKS = 8, 16, 64, 64, 8, 8
#: Units of `torch.add` that a redistribution may take, and the ratio to eager of a step with marks.
ADDS, STEP = 20, 1.3
EMPTY = "a call of torch.autograd.grad itself"
#: The most, on an accelerator: a step on one device against plain PyTorch, exact dropout against torch's, the part of a
#: save that its call takes.
ALONE, DROPOUT, SAVE = 1.01, 1.5, 0.05


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
        if device.type == "cpu":  # its own sum awaits a result, which the fake group does not give on the CPU
            call.register_comm_hook(None, summed)
    elif kind == "FSDP2":
        mesh = init_device_mesh(device.type, (RANKS,))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif kind == "DTensor dp2 x tp4":
        mesh = init_device_mesh(device.type, (2, 4), mesh_dim_names=("dp", "tp"))
        columns = ("attention.query", "attention.key", "attention.value", "up")
        cuts = {name: ColwiseParallel() for name in columns}
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], cuts | dict.fromkeys(("attention.out", "down"), RowwiseParallel()))
            block.attention.heads //= 4
        fully_shard(net, mesh=mesh["dp"])
        x, y = x[: len(x) // 2], y[: len(y) // 2]
    return partial(stepped, lambda: loss(call(x), y), net)


def summed(state, bucket):  # torch reads annotations, which are texts in this file
    """The sum of a bucket, as a hook of DistributedDataParallel."""
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


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
    of = {name: partial(theirs, device, x, y, name) for name in ("eager", "DDP", "FSDP2", "DTensor dp2 x tp4")}
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


class Kernels(TorchDispatchMode):
    """Counts the operators on plain tensors that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        views = any(made.alias_info and not made.alias_info.is_write for made in function._schema.returns)
        self.count += not views and not any(issubclass(kind, DTensor) for kind in types)
        return function(*args, **(kwargs or {}))


def kernels(device: torch.device, step: Callable[[], Any]) -> int:
    """The kernels of a step on an accelerator, or the operators on the CPU."""
    if device.type == "cpu":
        with Kernels() as counted:
            step()
        return counted.count
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.get_device_module(device).synchronize()
    names = [event.name for event in seen.events() if event.device_type != torch.autograd.DeviceType.CPU]
    return len([name for name in names if not name.startswith(("Memcpy", "Memset"))])


def units(device: torch.device, times: int, run: Callable[[], Any]) -> float:
    """Host time in units of `torch.add`, in turns: the median of 15 ratios."""
    z = torch.ones(64, 64, device=device)
    ratios = []
    for _ in range(15):
        add = host_seconds(lambda: torch.add(z, z), times)
        ratios.append(host_seconds(run, times) / add)
    return median(ratios)


def less(device: torch.device, times: int, run: Callable[[], Any], empty: Callable[[], Any]) -> float:
    """Host time of `run` less that of `empty` in units of `torch.add`, in turns: the median of 15 ratios."""
    z = torch.ones(64, 64, device=device)
    ratios = []
    for _ in range(15):
        add = host_seconds(lambda: torch.add(z, z), times)
        ratios.append((host_seconds(run, times) - host_seconds(empty, times)) / add)
    return median(ratios)


def redistributions(device: torch.device, times: int) -> dict[str, float]:
    """Kind -> host time in units of `torch.add`: a forward with a gradient to come; half of both directions, less
    a call of `torch.autograd.grad` in which nothing is computed: a step has one, however many redistributions it has.
    """
    in_adds = partial(units, device, times)
    groups = ProcessGroups(RANKS, 3)
    rows, columns = Layout.from_cuts(RANKS, (8, 1)), Layout.from_cuts(RANKS, (1, 8))
    whole = Layout.replicated(RANKS, 2)
    terms = whole.with_partial((Digit(RANKS, 1),))
    leaf = torch.ones(64, 64, device=device, requires_grad=True)
    ones = torch.ones_like(leaf)
    empty = lambda: torch.autograd.grad(leaf, leaf, ones)
    out = {EMPTY: in_adds(empty)}
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
        out[f"{name}, forward"] = in_adds(lambda x=x, moved=moved: moved(x))
        out[f"{name}, half of both directions"] = less(device, times, both, empty) / 2
        out[f"{name}, half of both directions and the call"] = in_adds(both) / 2
    return out


def redistributions_of_dtensors(device: torch.device, times: int) -> dict[str, float]:
    """The same of DTensor."""
    mesh, out = init_device_mesh(device.type, (RANKS,)), {}
    pairs: tuple[tuple[str, Placement, Placement], ...] = (
        ("all_gather", Shard(0), Replicate()),
        ("all_to_all", Shard(0), Shard(1)),
    )
    for name, source, target in pairs:
        local = torch.ones(8, 64, device=device)
        x = DTensor.from_local(local, mesh, [source], run_check=False).requires_grad_()
        move = partial(x.redistribute, mesh, [target])
        gradient = torch.ones_like(move()).detach()
        both = lambda x=x, move=move, gradient=gradient: torch.autograd.grad(move(), x, gradient)
        out[f"{name}, forward"] = units(device, times, move)
        out[f"{name}, half of both directions and the call"] = units(device, times, both) / 2
    return out


# -- one device --------------------------------------------------------------------------------------------------------


def finished(device: torch.device, run: Callable[[], Any], times: int = 1) -> float:
    """Seconds until the device has done the work."""
    wait = (lambda: None) if device.type == "cpu" else torch.get_device_module(device).synchronize
    wait()
    begin = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return time.perf_counter() - begin


def alone(device: torch.device, width: int, compile: bool) -> dict[str, Callable[[], Tensor]]:
    """Steps of one model on one device: ours and plain PyTorch's, operator by operator or compiled."""
    torch.manual_seed(0)
    net, loss = GPT(VOCABULARY, 4 * LENGTH, 4, width, heads=8).to(device), TokenLoss()
    x, y = (torch.randint(VOCABULARY, (BATCH, 4 * LENGTH), device=device) for _ in range(2))
    own = copy.deepcopy(net)
    model = sw.AutoParallel(own, copy.deepcopy(loss), compile=compile).dataset_strategy("full_batch")
    call = torch.compile(net) if compile else net
    steps = {
        "ours": partial(stepped, lambda: model(x, y), own),
        "plain": partial(stepped, lambda: loss(call(x), y), net),
    }
    with playing(Runtime(False, 1, 0, device)):
        values = [float(step()) for step in steps.values() for _ in range(2)]
    assert max(values) - min(values) < 1e-2, values
    return steps


def ratios(device: torch.device, one: Callable[[], Any], other: Callable[[], Any], rounds: int) -> list[float]:
    """Seconds of one over those of the other, in turns."""
    out = []
    for turn in range(rounds):
        order = (one, other) if turn % 2 else (other, one)
        seconds = {run: finished(device, run) for run in order}
        out.append(seconds[one] / seconds[other])
    return out


def dropout(device: torch.device, rows: int, rounds: int) -> list[float]:
    """Seconds of an exact dropout over those of torch's own."""
    x = torch.ones(rows, 4096, device=device, dtype=torch.bfloat16)
    mask = torch.ops.shardwright.mask.default
    size, seed = list(x.shape), torch.tensor([1, 2, 1, 0])
    exact = lambda: x * mask(seed, [], x, [], size, size, 0, 0.9, torch.bool, None) * (1 / 0.9)
    theirs = lambda: F.dropout(x, 0.1)
    exact(), theirs()
    return ratios(device, exact, theirs, rounds)


def save(device: torch.device, layers: int, rounds: int) -> list[float]:
    """The seconds of the call of a save, as part of those until the save is done."""
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers))).to(device)
    x = torch.ones(8, 1024, device=device)
    model = sw.AutoParallel(net, nn.MSELoss()).dataset_strategy("full_batch")
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    out = []
    with playing(Runtime(False, 1, 0, device)), tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds + 1):
            model(x, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            begin = time.perf_counter()
            saving: list[Any] = []
            call = finished(
                device,
                lambda: saving.append(sw.save_checkpoint(model, optimizer, folder, step=turn, asynchronous=True)),
            )
            saving[0].wait()
            out.append(call / (time.perf_counter() - begin))
    return out[1:]  # the first one makes the buffers


def draws(width: int, rounds: int) -> list[float]:
    """The host's seconds of an eighth of a model's parameters over those of the whole."""

    def seconds(part: int) -> float:
        with sw.no_init_parameters():
            net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        rows = (width // 2, width // 2 + width // part)
        keep = lambda name, old, whole: whole[slice(*rows) if part > 1 else slice(None)].clone()
        asked = (lambda name, old: (slice(*rows), slice(width))) if part > 1 else (lambda name, old: None)
        return host_seconds(lambda: materialize(net, lambda *sizes: keep(*sizes)[:0], real=False, part=asked))

    return [seconds(RANKS) / seconds(1) for _ in range(rounds)]


def on_one_device(results: Results, device: torch.device, quick: bool) -> None:
    real = device.type != "cpu"
    rounds = 5 if quick else 15
    width = 1024 if real else 256

    def noted(section: str, name: str, values: list[float], most: float | None = None) -> None:
        results.figures.append(Figure(section, name, Spread.of(values), at_most=most if real else None))

    with playing(Runtime(False, 1, 0, device)):
        for compile in (False, True):
            steps = alone(device, width, compile)
            values = ratios(device, steps["ours"], steps["plain"], 3 * rounds)
            noted("a step on one device", f"ours / plain, {'compiled' if compile else 'eager'}", values, ALONE)
            if not compile:
                for name, step in steps.items():
                    noted("kernels of a step on one device", name, [kernels(device, step)])
    noted("exact dropout", "ours / torch's", dropout(device, 8192 if real else 512, rounds), DROPOUT)
    noted("a save", "its call / all of it", save(device, 64 if real else 16, rounds), SAVE)
    noted("parameters at the start", "an eighth / the whole", draws(4096, 1 if quick else 3))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("accelerator.json"))
    arguments = parser.parse_args()
    rounds, times = (7, 100) if arguments.quick else (41, 700)
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    results = Results()
    with rank_of_eight(rank=3), contextlib.redirect_stdout(sys.stderr):
        for name, units in redistributions(device, times).items():
            most = None if name == EMPTY else ADDS
            results.figures.append(Figure("units of torch.add", name, Spread.of([units]), at_most=most))
        for name, units in redistributions_of_dtensors(device, times // 5).items():
            results.figures.append(Figure("units of torch.add", f"DTensor: {name}", Spread.of([units])))
        steps = dict(contenders(device))
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
            results.figures.append(Figure("kernels of a step", name, Spread.of([kernels(device, step)])))
            with collective_log() as log:
                step()
            for kind, count in sorted(log.counts().items()):
                results.figures.append(Figure("collectives of a step", f"{name}: {kind}", Spread.of([count])))
                results.figures.append(Figure("bytes of a step", f"{name}: {kind}", Spread.of([log.bytes(kind)])))
    if dist.is_initialized():
        dist.destroy_process_group()
    with contextlib.redirect_stdout(sys.stderr):
        on_one_device(results, device, arguments.quick)
    return results.finish(Console(), arguments.output)


if __name__ == "__main__":
    sys.exit(main())

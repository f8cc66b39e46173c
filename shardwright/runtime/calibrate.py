"""Calibration: measure the cluster of a run (collectives, matmuls, memory) while all ranks are at work at once.

    seconds of a redistribution = c + A latency + B / bandwidth     in the cost model, by its cheapest algorithm
    (latency, 1 / bandwidth) of a level = argmin Σ over its redistributions of (seconds - measured)² / (seconds ·
        measured)

Redistributions are measured as steps run them, on the transport in use: all groups of a level at once, all kinds of
collectives, groups and messages from small to large. Each number is the median of several rounds in which the tasks
take turns; the time of a round is that of the slowest rank. The levels are the ranks of one host, and the hosts.

On an accelerator every task ends with a synchronisation, so that queued kernels are counted.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..accelerators import is_accelerator, sum_type, total_memory
from ..cluster import Cluster, Level
from ..cost.cost_model import CostModel
from ..errors import SettingError
from ..launch.progress import Work, each, phase
from ..layout import Digit, Layout
from ..process_runtime import Runtime
from ..redistribution import CollectiveKind, Placement, Redistribution, redistribution
from .distributed.collectives import bind_all
from .distributed.process_groups import ProcessGroups
from .distributed.rank_messages import exchanged

__all__ = ["Timing", "calibrate", "fit", "levels_of"]

KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
#: Bytes of the largest of a rank's tensors, before or after a redistribution.
MESSAGES = (4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20)
#: Further ones on accelerators, whose links are not full before.
LARGE = (64 << 20, 256 << 20)
DTYPES = ("float32", "float64", "bfloat16", "float16")
# A task is repeated until it takes this many seconds, because ranks leave a barrier milliseconds apart.
LONG_ENOUGH = 0.03
ROUNDS = 7
# A latency or a bandwidth that takes less than this share of every measured time is not seen among the noise: this
# share is assumed, so that a busy machine never makes a link that is free.
VISIBLE = 0.01


@dataclass(frozen=True)
class Timing:
    """The measured time of a redistribution.

    Attributes:
        redistribution: the redistribution.
        nbytes: of the whole tensor.
        seconds: of the slowest rank.
    """

    redistribution: Redistribution
    nbytes: int
    seconds: float


@phase("calibration")
def calibrate(runtime: Runtime, name: str | None = None, rounds: int = ROUNDS) -> Cluster:
    """Measure the ranks of the default process group. All ranks call this at the same time; all get the same cluster.

    Args:
        runtime: of processes, from `shardwright.init`.
        name: of the cluster; None: that of rank 0's host.
        rounds: the number of rounds of which medians are taken.

    Raises:
        SettingError: one rank alone; hosts with different numbers of ranks, or with ranks that are not neighbours.
    """
    hosts: list[str] = exchanged(socket.gethostname())
    ranks_of_host, host_count = levels_of(hosts)
    if len(hosts) == 1:
        raise SettingError("one rank alone has no links to measure", legal="two ranks or more")
    watch = _Watch(runtime.device, rounds)
    peak = {dtype: rate for dtype in DTYPES for rate in (_matmul_rate(watch, getattr(torch, dtype)),) if rate}
    # Placeholders: the loop below replaces each level's latency and bandwidth by measured ones.
    levels = tuple(
        Level(level, size, 1.0, 1.0) for level, size in (("host", ranks_of_host), ("network", host_count)) if size > 1
    )
    memory = -int(watch.slowest([-_memory(runtime.device, ranks_of_host)])[0])  # the least of all ranks
    cluster = Cluster(name or hosts[0], levels, memory, peak, _memory_bandwidth(watch), _overhead(watch))
    groups, stride = ProcessGroups(len(hosts), runtime.rank), 1
    for place, level in enumerate(each(levels, "calibration", "levels of links")):
        timings = _redistributions(watch, groups, level.size, stride)
        cluster = _with_level(
            cluster,
            place,
            *fit(
                timings,
                lambda latency, bandwidth: CostModel(_with_level(cluster, place, latency, bandwidth), len(hosts)),
            ),
        )
        stride *= level.size
    return cluster


def levels_of(hosts: Sequence[str]) -> tuple[int, int]:
    """(ranks of a host, hosts), from the host of each rank.

    Raises:
        SettingError: the hosts have different numbers of ranks, or ranks that are not neighbours.
    """
    names = list(dict.fromkeys(hosts))
    ranks_of_host = len(hosts) // len(names)
    if list(hosts) != [name for name in names for _ in range(ranks_of_host)]:
        counts = ", ".join(f"{name}: ranks {[r for r, host in enumerate(hosts) if host == name]}" for name in names)
        raise SettingError(
            f"the ranks do not make levels of links: {counts}",
            legal="as many ranks on every host, with neighbouring numbers",
        )
    return ranks_of_host, len(names)


def fit(timings: Sequence[Timing], costs: Callable[[float, float], CostModel]) -> tuple[float, float]:
    """The latency (seconds) and bandwidth (bytes/s) at which the cost model comes closest to the measured times.

    Args:
        timings: the measured times.
        costs: (latency, bandwidth) -> cost model; costs are piecewise linear in latency and 1 / bandwidth.
    """
    measured = np.array([t.seconds for t in timings])
    best = np.array([measured.min(), measured.max() / max(t.nbytes for t in timings)])  # latency, 1 / bandwidth
    known, least, floors = best, math.inf, np.zeros(2)
    while True:  # fix the cheapest algorithms, solve least squares for these, repeat while the error falls
        now, slopes = _linear(timings, costs, known)
        weights = 1 / np.sqrt(now * measured)  # symmetric: a factor too much is as bad as the same factor too little
        error = float(np.sum(((now - measured) * weights) ** 2))
        if error >= least * (1 - 1e-9):
            return float(best[0]), float(1 / best[1])
        best, least = known, error
        if not floors.any():
            floors = VISIBLE * np.min(measured[:, None] / np.maximum(slopes, 1e-300), axis=0)
        known = _least_squares(slopes * weights[:, None], (measured - (now - slopes @ known)) * weights, floors)


def _least_squares(rows: np.ndarray, wanted: np.ndarray, floors: np.ndarray) -> np.ndarray:
    """The two numbers x that minimise |rows · x - wanted|² and are not below their floors."""
    found = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    for i in (0, 1):
        if found[i] < floors[i]:  # noise hides this one: the other explains what it can
            found[i] = floors[i]
            other = rows[:, 1 - i]
            found[1 - i] = max(other @ (wanted - rows[:, i] * found[i]) / (other @ other), floors[1 - i])
    return found


def _linear(
    timings: Sequence[Timing], costs: Callable[[float, float], CostModel], at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The cost of each timing at (latency, 1 / bandwidth), and its two slopes there."""

    def seconds(latency: float, inverse: float) -> np.ndarray:
        priced = costs(float(latency), float(1 / inverse))
        return np.array([priced.redistribution(t.redistribution, t.nbytes) for t in timings])

    now, step = seconds(*at), 1e-4
    slopes = [(seconds(*(at * (1 + step * (np.arange(2) == i)))) - now) / (step * at[i]) for i in (0, 1)]
    return now, np.stack(slopes, axis=1)


def _with_level(cluster: Cluster, place: int, latency: float, bandwidth: float) -> Cluster:
    levels = list(cluster.levels)
    levels[place] = replace(levels[place], latency=latency, bandwidth=bandwidth)
    return replace(cluster, levels=tuple(levels))


# -- measurements


class _Watch:
    """A stopwatch that times tasks on all ranks at once."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds

    def __call__(self, tasks: Sequence[Callable[[], object]], what: str) -> list[float]:
        """The seconds of each task.

        Args:
            what: the tasks measure, for who shows the progress.
        """
        once = []
        with Work(f"measuring {what}", len(tasks) * (1 + self.rounds), "measurements") as work:
            for task in tasks:
                self._seconds(task, 1)
                once.append(self._seconds(task, 1))
                work.add()
            times = [min(64, math.ceil(LONG_ENOUGH / seconds)) for seconds in self.slowest(once)]
            rounds = []
            for _ in range(self.rounds):
                rounds.append([self._seconds(task, n) for task, n in zip(tasks, times)])
                work.add(len(tasks))
            return self.slowest(rounds).median(0).values.tolist()

    def _seconds(self, task: Callable[[], object], times: int) -> float:
        dist.barrier()
        self._synchronize()
        start = time.perf_counter()
        for _ in range(times):
            task()
        self._synchronize()
        return (time.perf_counter() - start) / times

    def slowest(self, numbers: object) -> Tensor:
        """The elementwise maximum of all ranks' numbers."""
        everyone = torch.tensor(numbers, dtype=sum_type(self.device), device=self.device)
        dist.all_reduce(everyone, dist.ReduceOp.MAX)
        return everyone.cpu().double()

    def _synchronize(self) -> None:
        if is_accelerator(self.device):
            torch.accelerator.synchronize(self.device)


def _redistributions(watch: _Watch, groups: ProcessGroups, size: int, stride: int) -> list[Timing]:
    """The timings of all kinds of collectives among the `size` units of a level, each of `stride` ranks."""
    parts = [n for n in range(2, size + 1) if size % n == 0]
    tasks, found = [], []
    for n in dict.fromkeys((parts[0], parts[len(parts) // 2], parts[-1])):
        for kind in KINDS:
            made = _redistribution(kind, groups.devices, Digit(n, stride))
            for nbytes in (*MESSAGES, *LARGE) if is_accelerator(watch.device) else MESSAGES:
                numel = nbytes // 4 // (n * n) * (n * n)
                shape = (n, numel // n)  # of the whole tensor: n rows
                x = torch.zeros(made.source.local_shape(shape), device=watch.device)
                tasks.append(_task(bind_all(made, tuple(x.shape), groups.rank, groups), x))
                found.append((made, 4 * numel))
    return [Timing(*pair, seconds) for pair, seconds in zip(found, watch(tasks, f"links among {size}"), strict=True)]


def _redistribution(kind: CollectiveKind, devices: int, digit: Digit) -> Redistribution:
    """The redistribution of a matrix that is one collective of this kind over the digit."""
    whole = Layout.replicated(devices, 2)
    rows, columns = Layout.of(devices, ((digit,), ())), Layout.of(devices, ((), (digit,)))
    layouts = {Placement.SHARD: rows, Placement.REPLICA: whole, Placement.PARTIAL: whole.with_partial((digit,))}
    assert kind.source is not None and kind.target is not None
    source, target = layouts[kind.source], layouts[kind.target]
    made = redistribution(source, columns if source == target else target)
    assert [step.kind for step in made.steps] == [kind]
    return made


def _task(steps: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Callable[[], object]:
    def run() -> None:
        y = x
        for step in steps:
            y = step(y)

    return run


def _matmul_rate(watch: _Watch, dtype: torch.dtype) -> float:
    """The best flop/s of square matmuls, forward and backward, of growing size; 0 where the device has none of this
    dtype."""
    best, size = 0.0, 128
    while True:
        a, b = (torch.ones(size, size, device=watch.device, dtype=dtype, requires_grad=True) for _ in range(2))
        gradient = torch.ones(size, size, device=watch.device, dtype=dtype)

        def task() -> object:
            return torch.autograd.grad(a @ b, (a, b), gradient)

        try:
            task()
        except RuntimeError:  # all ranks fail alike
            return best
        seconds = watch([task], f"matmuls in {str(dtype).removeprefix('torch.')}")[0]
        best = max(best, 3 * 2 * size**3 / seconds)
        if seconds > LONG_ENOUGH or size == 16384:
            return best
        size *= 2


def _memory_bandwidth(watch: _Watch) -> float:
    """Bytes/s that a pointwise operator reads and writes. Several results are kept at a time, as in a forward, because
    memory that is new to the process costs its pages."""
    nbytes, results = (4 << 20, 8) if watch.device.type == "cpu" else (256 << 20, 4)
    x = torch.ones(nbytes // 4, device=watch.device)
    return 2 * results * nbytes / watch([lambda: [torch.relu(x) for _ in range(results)]], "memory")[0]


def _overhead(watch: _Watch) -> float:
    """Seconds to launch one operator, from a chain of small operators, forward and backward."""
    length, x = 100, torch.ones(8, device=watch.device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(length):
            y = y * 1.0
        torch.autograd.grad(y.sum(), x)

    return watch([chain], "operators")[0] / (2 * length)


def _memory(device: torch.device, ranks: int) -> int:
    """Bytes of memory of a rank: its accelerator's, or its share of the host's."""
    if is_accelerator(device):
        return total_memory(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks

"""The storage of parameters, chosen by the step in time: ``hsdp(optimizer_level="auto")``.

A search compares plans by the sum of their seconds, of which bounds can be proved. Whether parameters are stored in
parts shows in that sum as gathers and scatters alone; in a step they travel beside computation, and their sums may be
waited for less than one all-reduce of all gradients. So the storages of one set of strategies are compared by
`Price.elapsed`, the step with the plan's own schedule of communication:

    whole       each parameter as its operators use it
    level1      in parts, the gathered weights kept from the forward to the backward
    level3      in parts, gathered again in the backward

in parts over all replicas, or over those within a unit of each level of links. The fastest one that fits into memory is
taken. Example: a GPT with 8 blocks of width 2048 on two hosts of eight H100, a batch of 32 x 1024 tokens. By the sums
whole parameters take 15.4 ms and parts on all devices 17.5 ms; in time 10.7 and 10.4 ms, and parts on each host 10.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ..cluster import Cluster, format_bytes
from ..errors import PlanError, SettingError
from ..partition.local_program import SearchResult
from ..partition.parameter_sharding import OptimizerParallel
from ..sharded_plan import Plan

__all__ = ["fastest_storage", "storages"]


def storages(
    setting: OptimizerParallel, cluster: Cluster, devices: int, settled: bool
) -> Iterator[OptimizerParallel | None]:
    """The storages to compare; None is whole.

    Args:
        setting: the user's setting; its level is "auto".
        cluster: the links.
        devices: the number of devices.
        settled: True where the layouts of storage are fixed already.
    """
    sizes, inside = [setting.shard_size], 1
    if setting.shard_size == -1 and not settled:
        for level in cluster.levels:
            inside *= level.size
            if 1 < inside < devices:
                sizes.append(inside)
    if not settled:
        yield None
    for level_of in ("level1", "level3"):
        for size in sizes:
            yield replace(setting, shard_size=size, optimizer_level=level_of)


def fastest_storage(
    of: Callable[[OptimizerParallel | None], Plan],
    storages: Iterable[OptimizerParallel | None],
    searched: OptimizerParallel | None,
    memory: float | None,
) -> Plan:
    """The plan of the storage with the fastest step that fits into memory.

    Args:
        of: storage -> the plan.
        storages: the storages.
        searched: the storage under which the strategies were searched, if they were: a bound was proved for it alone.
        memory: bytes a device; None: no limit.

    Raises:
        PlanError: no storage fits.
    """
    tried: list[tuple[float, Plan, OptimizerParallel | None]] = []
    refused: list[tuple[float, str]] = []
    for storage in storages:
        try:
            plan = of(storage)
        except SettingError:  # a number of replicas that does not divide those of a parameter
            continue
        if memory is not None:
            found = plan.found or SearchResult(plan.cost, None, len(plan.decisions), 0)
            plan = replace(plan, found=replace(found, limit=memory))
            if plan.unscheduled.peak > memory:
                needs = plan.unscheduled.peak
                refused.append((needs, f"{_words(storage)} needs {format_bytes(needs)}"))
                continue
        tried.append((plan.price.elapsed, plan, storage))
    if not tried:
        least = min(refused)[0]
        raise PlanError(
            f"no storage of the parameters fits in {format_bytes(memory or 0.0)} a device: "
            + "; ".join(text for _, text in refused),
            legal=f"memory={int(-(-least // 1))} ({format_bytes(least)}) or more, or more devices",
        )
    ordered = sorted(tried, key=lambda entry: entry[0])
    _, best, storage = ordered[0]
    others = [f"{_words(other)} {seconds * 1e3:.3g} ms" for seconds, _, other in ordered[1:]]
    others += [text for _, text in refused]
    note = (
        f"parameters are stored {_words(storage)}: a step takes {ordered[0][0] * 1e3:.3g} ms with messages beside "
        f"computation ({'; '.join(others)})"
    )
    found = best.found or SearchResult(best.cost, None, len(best.decisions), 0)
    bound = found.bound if storage == searched else None
    counted = found.strategies or len(tried) + len(refused)
    report = replace(found, cost=best.cost, bound=bound, strategies=counted, notes=(*found.notes, note), limit=memory)
    return replace(best, found=report)


def _words(storage: OptimizerParallel | None) -> str:
    if storage is None:
        return "whole"
    over = "" if storage.shard_size == -1 else f" over {storage.shard_size} replicas"
    return f"by {storage.optimizer_level}{over}"

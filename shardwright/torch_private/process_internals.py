"""Private names of process groups, launchers and pipeline schedules."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from . import version_lookup

__all__ = [
    "backward_can_start_at_functions",
    "computation",
    "default_store",
    "gather_flat",
    "group_timeout",
    "number_of_groups",
    "scatter_flat",
    "schedule_without_transfers",
    "worker_processes",
]


def default_store() -> Any:
    """The store by which the ranks of the default process group met."""
    feature = "watching the ranks, which init(watch=False) does without"
    return version_lookup.required("torch.distributed.distributed_c10d._get_default_store", feature)()


def group_timeout(device: torch.device | str) -> timedelta | None:
    """The timeout of collectives of the default process group; None if its backend does not tell."""
    try:
        world: Any = torch.distributed.group.WORLD
        return world._get_backend(torch.device(device)).options._timeout
    except (AttributeError, RuntimeError):
        return None


def gather_flat(group: torch.distributed.ProcessGroup, out: Tensor, x: Tensor) -> torch.distributed.Work:
    """A process group's own all-gather of a flat tensor, as work. Torch 2.13 has given it a public name."""
    return (getattr(group, "all_gather_single", None) or group._allgather_base)(out, x)


def scatter_flat(group: torch.distributed.ProcessGroup, out: Tensor, x: Tensor, options: Any) -> torch.distributed.Work:
    """A process group's own reduce-scatter of a flat tensor, as work."""
    return (getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base)(out, x, options)


def number_of_groups() -> int:
    """The number of process groups made by this process, as torch uses it in the names of groups of some ranks."""
    d = version_lookup.required("torch.distributed.distributed_c10d", "pipelines on ranks")
    return d._world.group_count if "group_count" in d._hash_ranks_to_str.__code__.co_names else len(d._world.pg_names)


def worker_processes(agent: object) -> Any:
    """The started workers of an elastic agent, None before they start."""
    return version_lookup.read_private(agent, "_pcontext", "`shardwright run`")


def computation(action: Any) -> str:
    """The letter of an action of torch's own schedules, F, B, I or W: the value of an enum, in torch 2.9 its text."""
    value = action.computation_type.value
    return value if isinstance(value, str) else str(action.computation_type)


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()


@functools.cache
def backward_can_start_at_functions() -> bool:
    """True where a backward may start at a torch.autograd.Function, as one to the weights does; False in torch 2.9."""
    with torch.enable_grad():
        node = _Probe.apply(torch.ones(1, device="cpu", requires_grad=True)).grad_fn
    try:
        return node._input_metadata is not None
    except RuntimeError:
        return False


def schedule_without_transfers(base: type) -> type:
    """A schedule class of torch.distributed.pipelining whose constructor only makes the order of computations.

    Its sends and receives follow from a plan, and torch takes seconds to make them for long schedules.
    """
    return type(base.__name__, (base,), {"_prepare_schedule_with_comms": lambda self, order: None})

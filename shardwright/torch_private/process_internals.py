"""Private names of process groups, launchers and pipeline schedules.

1. Process groups: their store, timeout and number; the names of their methods for one tensor; meshes without names.
2. Launchers: the workers that an elastic agent has started.
3. Pipeline schedules of torch: the letter of an action, the order without transfers.

Example: the method for an all-gather (`GATHER_METHOD`) is "all_gather_single" in torch 2.13, and "_allgather_base" in
the versions before.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import version_lookup

MeshT = TypeVar("MeshT")

__all__ = [
    "GATHER_METHOD",
    "SCATTER_METHOD",
    "backward_can_start_at_functions",
    "computation",
    "default_store",
    "group_timeout",
    "lost_names",
    "number_of_groups",
    "schedule_without_transfers",
    "without_names",
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


#: The methods of a process group for an all-gather and a reduce-scatter of one tensor: (out, x), (out, x, options) ->
#: work. Torch 2.13 has given them public names.
_RENAMED = hasattr(torch.distributed, "ProcessGroup") and hasattr(torch.distributed.ProcessGroup, "all_gather_single")
GATHER_METHOD = "all_gather_single" if _RENAMED else "_allgather_base"
SCATTER_METHOD = "reduce_scatter_single" if _RENAMED else "_reduce_scatter_base"


def number_of_groups() -> int:
    """The number of process groups made by this process, as torch uses it in the names of groups of some ranks."""
    d = version_lookup.required("torch.distributed.distributed_c10d", "pipelines on ranks")
    return d._world.group_count if "group_count" in d._hash_ranks_to_str.__code__.co_names else len(d._world.pg_names)


def without_names(mesh: MeshT, world: int) -> MeshT:
    """A device mesh that was just made, without names of its axes: torch makes one of several groups with names alone.

    The mesh itself has lost them. Its hash, which counts them, is made anew where it was made already.

    Args:
        mesh: the mesh.
        world: the number of default process groups before the current one. The mesh has a number of a thread that no
            thread has. So meshes of two groups are not equal, and none equals a mesh of the user's.
    """
    setattr(mesh, "_mesh_dim_names" if hasattr(mesh, "_mesh_dim_names") else "mesh_dim_names", None)
    setattr(mesh, "_thread_id", -1 - world)  # noqa: B010  attributes that types do not know
    setattr(mesh, "_hash", None)  # noqa: B010
    return mesh


def lost_names(mesh: object) -> bool:
    """True for a device mesh that `without_names` has made, or for its copy."""
    thread = getattr(mesh, "_thread_id", None)
    return thread is not None and thread < 0


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

"""Where the program runs: in processes that a launcher started, or all devices in this one.

The one piece of state that outlives a call: a process has one runtime, as it has one default process group. What the
launcher's environment says is read by `launch.environment`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import SettingError
from ..launch.environment import Place, find
from ..launch.interface import leading_to

__all__ = ["Runtime", "current", "init", "rank", "world_size"]

#: Without an answer from a peer for this long a collective fails: torch waits 30 minutes by default.
DEFAULT_TIMEOUT = timedelta(minutes=5)
#: Torch itself gives up a collective after so many times that: by then ranks have looked who is missing.
TORCH_WAITS = 1.5


@dataclass(frozen=True)
class Runtime:
    """Attributes:
        processes: one process a device; else all devices in this process.
        devices: how many; None in the local runtime: as many as the model's marks speak of.
        rank: of this process; 0 in the local runtime.
        device: where this process computes.
        timeout: seconds that a rank waits for another.
        watch: whether ranks look after one another (`peers`).
    """

    processes: bool
    devices: int | None
    rank: int
    device: torch.device
    timeout: float = DEFAULT_TIMEOUT.total_seconds()
    watch: bool = True


_current: list[Runtime] = []


def init(devices: int | None = None, *, backend: str | None = None, timeout: float | None = None,
         watch: bool | None = None) -> Runtime:
    """Find out where the program runs. May be called again.

    Under a launcher (torchrun, ``shardwright run``, mpirun, Slurm's srun, a rank table) it joins the process group of
    the processes that were started; `launch.environment` says which variables are read and who is believed. Otherwise
    all devices live in this process, which needs no launcher.

    Args:
        devices: how many devices there are in this process when no launcher says. None: as many as the marks of the
            model speak of.
        backend: of the process group; None: NCCL, HCCL or Gloo, whichever fits the device.
        timeout: seconds that all ranks have to come in, and that a rank waits for another in a collective or at the
            start of a step; None: 300. What ends the run says which rank is missing from what.
        watch: whether ranks look after one another while they run: that all run the same program, and which of them does
            not come. With False a collective fails after the timeout, and that is all. None: True, or as before.

    Returns:
        The runtime.

    Raises:
        SettingError: a number of devices below 1, asked for here or in the environment; variables of launchers, or a
            rank table, that are faulty or contradict one another; ranks that do not come.
    """
    if devices is not None and (not isinstance(devices, int) or isinstance(devices, bool) or devices < 1):
        raise SettingError(f"init(devices={devices!r})", legal="a whole number of at least 1")
    before = _current[0] if _current else Runtime(False, None, 0, torch.device("cpu"))
    watched = before.watch if watch is None else watch
    if dist.is_available() and dist.is_initialized():
        runtime = Runtime(True, dist.get_world_size(), dist.get_rank(), _device(_place_in_group()),
                          before.timeout if timeout is None else timeout, watched)
    elif dist.is_available() and (place := find(os.environ)) is not None:
        device = _device(place)
        wait = DEFAULT_TIMEOUT if timeout is None else timedelta(seconds=timeout)
        _join(place, backend or {"cuda": "nccl", "npu": "hccl"}.get(device.type, "gloo"), wait,
              wait * TORCH_WAITS if watched else wait)
        runtime = Runtime(True, dist.get_world_size(), dist.get_rank(), device, wait.total_seconds(), watched)
    else:
        asked = os.environ.get("SHARDWRIGHT_DEVICES")
        if asked and not (asked.isdecimal() and int(asked)):
            raise SettingError(f"SHARDWRIGHT_DEVICES={asked}", legal="a whole number of at least 1")
        runtime = Runtime(False, int(asked) if asked else devices, 0, torch.get_default_device())
    _current[:] = [runtime]
    return runtime


def _place_in_group() -> Place | None:
    """The place of this process in a group that the program has made itself; None where the environment has another."""
    try:
        place = find(os.environ)
    except SettingError:
        return None  # the group is there, however its ranks were told
    return place if place is not None and (place.rank, place.size) == (dist.get_rank(), dist.get_world_size()) else None


def _join(place: Place, backend: str, timeout: timedelta, collectives: timedelta) -> None:
    """Join the process group, for which all ranks have `timeout` to come, and its collectives another one."""
    if backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = leading_to(place.master_addr, place.master_port)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface  # the only way in which Gloo takes it
    if place.agent:
        dist.init_process_group(backend, timeout=collectives)
    else:
        from ..launch.meeting import meet

        dist.init_process_group(backend, store=meet(place, timeout.total_seconds()), rank=place.rank,
                                world_size=place.size, timeout=collectives)


def _device(place: Place | None) -> torch.device:
    """The accelerator of this process if there is one for every process of this host, else the CPU."""
    index, needed = (place.device, place.devices) if place is not None else (0, 1)
    if not torch.accelerator.is_available() or torch.accelerator.device_count() < needed:
        return torch.device("cpu")
    torch.accelerator.set_device_index(index)
    return torch.device(torch.accelerator.current_accelerator().type, index)


def current() -> Runtime:
    """The runtime of this process; found out now if `init` was not called."""
    return _current[0] if _current else init()


def rank() -> int:
    """The rank of this process; 0 where all devices are in one process."""
    return current().rank


def world_size() -> int:
    """The number of devices; 1 where all are in one process and nobody has said how many (`init`)."""
    return current().devices or 1

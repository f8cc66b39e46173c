"""Where the program runs: in processes that a launcher started, or all devices in this one.

The one place that reads the launcher's environment, and the one piece of state that outlives a call: a process has one
runtime, as it has one default process group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import SettingError

__all__ = ["Runtime", "current", "init", "rank", "world_size"]

#: Without an answer from a peer for this long a collective fails: torch waits 30 minutes by default.
DEFAULT_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Runtime:
    """Attributes:
        processes: one process a device; else all devices in this process.
        devices: how many; None in the local runtime: as many as the model's marks speak of.
        rank: of this process; 0 in the local runtime.
        device: where this process computes.
    """

    processes: bool
    devices: int | None
    rank: int
    device: torch.device


_current: list[Runtime] = []


def init(devices: int | None = None, *, backend: str | None = None, timeout: float | None = None) -> Runtime:
    """Find out where the program runs. May be called again.

    Under torchrun or ``shardwright run`` it joins the process group of the processes that they started. Otherwise all
    devices live in this process, which needs no launcher.

    Args:
        devices: how many devices there are in this process when no launcher says. None: as many as the marks of the
            model speak of.
        backend: of the process group; None: NCCL, HCCL or Gloo, whichever fits the device.
        timeout: seconds after which a collective without an answer fails; None: 300.

    Returns:
        The runtime.

    Raises:
        SettingError: a number of devices below 1, asked for here or in the environment.
    """
    if devices is not None and (not isinstance(devices, int) or isinstance(devices, bool) or devices < 1):
        raise SettingError(f"init(devices={devices!r})", legal="a whole number of at least 1")
    started = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    if dist.is_available() and (dist.is_initialized() or started):
        device = _device(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if not dist.is_initialized():
            backends = {"cuda": "nccl", "npu": "hccl"}
            wait = DEFAULT_TIMEOUT if timeout is None else timedelta(seconds=timeout)
            dist.init_process_group(backend or backends.get(device.type, "gloo"), timeout=wait)
        runtime = Runtime(True, dist.get_world_size(), dist.get_rank(), device)
    else:
        asked = os.environ.get("SHARDWRIGHT_DEVICES")
        if asked and not (asked.isdecimal() and int(asked)):
            raise SettingError(f"SHARDWRIGHT_DEVICES={asked}", legal="a whole number of at least 1")
        runtime = Runtime(False, int(asked) if asked else devices, 0, torch.get_default_device())
    _current[:] = [runtime]
    return runtime


def _device(local_rank: int, local_world_size: int) -> torch.device:
    """The accelerator of this process if there is one for every process of this host, else the CPU."""
    if not torch.accelerator.is_available() or torch.accelerator.device_count() < local_world_size:
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(torch.accelerator.current_accelerator().type, local_rank)


def current() -> Runtime:
    """The runtime of this process; found out now if `init` was not called."""
    return _current[0] if _current else init()


def rank() -> int:
    """The rank of this process; 0 where all devices are in one process."""
    return current().rank


def world_size() -> int:
    """The number of devices; 1 where all are in one process and nobody has said how many (`init`)."""
    return current().devices or 1

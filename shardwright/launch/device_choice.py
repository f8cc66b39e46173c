"""The device of a process: which accelerator of its host it takes, or the CPU.

Let a host have c visible accelerators and p processes of the run, and let this process be the i-th of the host:

    c = 0, or backend="gloo"   the CPU
    c >= p                     accelerator i
    c = 1 < p                  accelerator 0: the launcher shows each process its own (Slurm's --gpus-per-task=1,
                               CUDA_VISIBLE_DEVICES); two processes that see the same one are an error
    1 < c < p                  an error

Where the program has initialised a process group itself, the process keeps the accelerator that it has set
(``torch.cuda.set_device``), or the CPU where the group is a Gloo group.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SettingError
from .environment import RankInRun

__all__ = ["accelerators", "asked_device", "check_shared", "device_of_group", "device_of_rank"]

CPU = torch.device("cpu")


def accelerators() -> int:
    """The number of accelerators that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def asked_device(device: Any, setting: str = "init") -> torch.device | None:
    """The device that the user names, as ``setting(device=...)``; None: none.

    Raises:
        SettingError: no device, or one that is not there.
    """
    if device is None:
        return None
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError):
        raise SettingError(f"{setting}(device={device!r})", legal='"cpu", "cuda", "cuda:1", …') from None
    if made.type in ("cpu", "meta"):
        if made.type == "meta":
            raise SettingError(f"{setting}(device={device!r}): no values are computed there", legal='"cpu", or "cuda"')
        return CPU
    count = accelerators()
    mine = torch.accelerator.current_accelerator() if count else None
    if mine is None or mine.type != made.type or (made.index or 0) >= count:
        devices = [f"{mine.type}:{i}" for i in range(count)] if mine is not None else []
        raise SettingError(f"{setting}(device={device!r}): there is no such device", legal=", ".join(["cpu", *devices]))
    return made


def device_of_rank(place: RankInRun, backend: str | None = None, device: torch.device | None = None) -> torch.device:
    """The device of a process under a launcher. The accelerator becomes torch's current one.

    Args:
        place: the place of the process in the run.
        backend: the backend that the user names; with "gloo" processes compute on the CPU.
        device: the device that the user names; one without an index: of that kind, the index as above.

    Raises:
        SettingError: fewer accelerators than processes of the host.
    """
    count = accelerators()
    if (device is not None and device.type == "cpu") or not count or (device is None and backend == "gloo"):
        return CPU
    if device is not None and device.index is not None:
        index = device.index
    elif count >= place.devices:
        index = place.device
    elif count == 1:
        index = 0
    else:
        raise SettingError(
            f"{place.devices} processes run on the host {socket.gethostname()}, which shows {count} accelerators",
            legal=f"{count} processes on the host, or init(device='cpu') for all processes",
        )
    return _current(index)


def device_of_group(place: RankInRun | None, device: torch.device | None = None) -> torch.device:
    """The device of a process whose program has initialised the process group itself.

    Args:
        place: the place of the process by its environment, where the environment agrees with the group.
        device: the device that the user names; None: by the group.

    Raises:
        SettingError: the group communicates on accelerators alone, and there is none.
    """
    count = accelerators()
    if device is not None and (device.type == "cpu" or device.index is not None):
        return device if device.type == "cpu" else _current(device.index)
    if device is None and (not count or _only_gloo()):
        return CPU
    bound = dist.group.WORLD.bound_device_id if dist.group.WORLD is not None else None
    if bound is not None:
        return _current(bound.index or 0)
    index = torch.accelerator.current_device_index()
    if index == 0 and place is not None and count >= place.devices:
        index = place.device  # nothing was set
    return _current(index)


def check_shared(device: torch.device, place: RankInRun, store: dist.Store, timeout: timedelta) -> None:
    """Check that all ranks have devices of one kind, and no two processes one accelerator, before they communicate.
    All ranks call it.

    Args:
        device: the device of this process.
        place: its place in the run.
        store: a store that all ranks of the run have.
        timeout: the time in which all ranks have to arrive.

    Raises:
        SettingError: on every rank alike, with the host and the ranks.
    """
    arrived = store.add(f"{place.size}/arrived", 1)  # workers that are started anew find the keys of the first ones
    hostname, keys = socket.gethostname(), dist.PrefixStore(f"{place.size}/{(arrived - 1) // place.size}", store)
    mine = f"{device.type}|{place.rank}|{hostname}"
    first = keys.compare_set("kind", "", mine).decode()
    if first.split("|")[0] != device.type:
        keys.set("unlike", f"{first}|{mine}")
    name = None if device.type == "cpu" else _identity(device)
    if name is not None and keys.add(f"{hostname}/{name}", 1) > 1:
        keys.set("twice", f"{hostname}|{place.rank}|{device}")
    if keys.add("ready", 1) == place.size:
        keys.set("all", "1")
    keys.wait(["all"], timeout)
    if keys.check(["unlike"]):
        one, rank, host, other, second, other_host = keys.get("unlike").decode().split("|")
        raise SettingError(
            f"rank {rank} on the host {host} has the device {one}, rank {second} on the host {other_host} has {other}",
            legal="the same kind of device for all ranks; init(device='cpu') on all ranks",
        )
    if keys.check(["twice"]):
        host, rank, name = keys.get("twice").decode().split("|")
        raise SettingError(
            f"rank {rank} and another process of the host {host} have the same device {name}",
            legal="one process for each accelerator: as many processes as the host has, or one visible device for each",
        )


def _only_gloo() -> bool:
    """True where the process group has no backend for accelerators."""
    kind = torch.accelerator.current_accelerator()
    backends = dict(part.split(":") for part in dist.get_backend_config().split(",") if ":" in part)
    return kind is None or backends.get(kind.type, "gloo") in ("gloo", "mpi")


def _current(index: int) -> torch.device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def _identity(device: torch.device) -> str | None:
    """A name of a device that is the same in every process of the host; None where the backend has none."""
    properties = getattr(torch.get_device_module(device.type), "get_device_properties", None)
    uuid = getattr(properties(device.index), "uuid", None) if properties is not None else None
    return None if uuid is None else str(uuid)

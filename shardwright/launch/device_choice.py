"""The device of a process: which accelerator of its host it takes, or the CPU.

Let a host have c visible accelerators and p processes of the run, and let this process be the i-th of the host:

    backend="gloo"   the CPU
    c = 0            the CPU, and a line that says so where torch is built for accelerators; an error where the backend
                     has no CPU, or where the launcher gives the process an accelerator (`_IMPLYING`)
    c >= p           accelerator i
    c = 1 < p        accelerator 0: the launcher shows each process its own (Slurm's --gpus-per-task=1,
                     CUDA_VISIBLE_DEVICES); two processes that see the same one are an error
    1 < c < p        an error

Where the program has initialised a process group itself, the process keeps the accelerator that it has set
(``torch.cuda.set_device``), or the CPU, with a line, where the group is a Gloo group.

A rank that finds no device tells the other ranks (`Companions`), so that all raise the same error at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SettingError
from .environment import RankInRun

__all__ = ["Companions", "accelerator_count", "asked_device", "cpu_remark", "device_of_group", "device_of_rank"]

CPU = torch.device("cpu")
#: The longest time that the process of rank 0 stays for ranks that still read an error from its store.
LEAVE = timedelta(seconds=2)


def accelerator_count() -> int:
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
    count = accelerator_count()
    mine = torch.accelerator.current_accelerator() if count else None
    if mine is None or mine.type != made.type or (made.index or 0) >= count:
        devices = [f"{mine.type}:{i}" for i in range(count)] if mine is not None else []
        raise SettingError(f"{setting}(device={device!r}): there is no such device", legal=", ".join(["cpu", *devices]))
    return made


def device_of_rank(
    place: RankInRun,
    backend: str | None = None,
    device: torch.device | None = None,
    environment: Mapping[str, str] | None = None,
) -> torch.device:
    """The device of a process under a launcher. The accelerator becomes torch's current one.

    Args:
        place: the place of the process in the run.
        backend: the backend that the user names; with "gloo" processes compute on the CPU.
        device: the device that the user names; one without an index: of that kind, the index as above.
        environment: the variables of the process, which may imply an accelerator.

    Raises:
        SettingError: fewer accelerators than processes of the host; none where one is implied.
    """
    count = accelerator_count()
    if (device is not None and device.type == "cpu") or (device is None and backend == "gloo"):
        return CPU
    if not count:
        implied = _implied(backend, environment or {})
        if implied:
            raise SettingError(
                f"{implied}, and torch {torch.__version__} sees no accelerator on the host {socket.gethostname()}",
                legal="a driver and a build of torch for it; init(device='cpu') on all ranks for the CPU",
            )
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


#: Variables that show a process some accelerators of its host.
_SHOWING = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    "ZE_AFFINITY_MASK",
)
#: Variables by which a launcher or a user gives a process accelerators.
_IMPLYING = (*_SHOWING, "SLURM_STEP_GPUS", "SLURM_GPUS_PER_TASK")
#: Values of these variables that mean no accelerator.
_NO_DEVICES = ("", "-1", "none", "NoDevFiles")


def _implied(backend: str | None, environment: Mapping[str, str]) -> str:
    """The reason why this process is to have an accelerator; "": none."""
    if backend is not None and not any("cpu" in _kinds_of(part) for part in backend.split(",")):
        return f"the backend {backend!r} communicates on accelerators alone"
    if any(environment.get(name) in _NO_DEVICES for name in _IMPLYING):
        return ""
    return next((f"{name}={environment[name]}" for name in _IMPLYING if name in environment), "")


def _kinds_of(part: str) -> list[str]:
    """The kinds of devices of one part of a backend's name: "nccl" or "cuda:nccl"."""
    kind, named, name = part.strip().lower().rpartition(":")
    return [kind] if named else [*dist.Backend.backend_capability.get(name, ["npu" if name == "hccl" else "cpu"])]


def device_of_group(place: RankInRun | None, device: torch.device | None = None) -> torch.device:
    """The device of a process whose program has initialised the process group itself.

    Args:
        place: the place of the process by its environment, where the environment agrees with the group.
        device: the device that the user names; None: by the group.

    Raises:
        SettingError: the group communicates on accelerators alone, and there is none.
    """
    count = accelerator_count()
    if device is not None and (device.type == "cpu" or device.index is not None):
        return device if device.type == "cpu" else _current(device.index)
    if device is None and not count and (kinds := _backends()) and "cpu" not in kinds:
        raise SettingError(
            f"the process group ({dist.get_backend_config()}) communicates on accelerators alone, and torch "
            f"{torch.__version__} sees none on the host {socket.gethostname()}",
            legal='init_process_group("gloo"), or a driver and a build of torch for the accelerator',
        )
    if device is None and (not count or _only_gloo()):
        return CPU
    bound = dist.group.WORLD.bound_device_id if dist.group.WORLD is not None else None
    if bound is not None:
        return _current(bound.index or 0)
    index = torch.accelerator.current_device_index()
    if index == 0 and place is not None and count >= place.devices:
        index = place.device  # nothing was set
    return _current(index)


def cpu_remark(device: torch.device, asked: bool) -> str | None:
    """The line about a process that computes on the CPU although torch is made for accelerators; None: there is
    nothing to say.

    Args:
        device: the device that the process takes.
        asked: True where the user has named the CPU, or a backend.
    """
    if asked or device.type != "cpu":
        return None
    count, kind = accelerator_count(), torch.accelerator.current_accelerator(check_available=False)
    if kind is None:
        return None
    legal = "shardwright.init(device='cpu') says that this is meant"
    host = socket.gethostname()
    if not count:
        return (
            f"the ranks compute on the CPU: torch is built for {kind.type} and sees no accelerator on {host}. {legal}"
        )
    return (
        f"the ranks compute on the CPU: the process group is one of Gloo, and {host} shows {count} {kind.type} "
        f"devices, of which this process has set number {torch.accelerator.current_device_index()}. {legal}, "
        f"shardwright.init(device={kind.type!r}) takes the accelerators"
    )


class Companions:
    """The devices of all ranks of a run, of which each rank tells its own, before they communicate.

    Args:
        store: a store that all ranks of the run have.
        rank: of this process.
        size: the number of ranks.
        legal: the way out where two processes have one accelerator.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, legal: str) -> None:
        self.rank, self.size, self.legal = rank, size, legal
        self._hostname = socket.gethostname()
        arrived = store.add(f"{size}/arrived", 1)  # workers that are started anew find the keys of the first ones
        self._keys = dist.PrefixStore(f"{size}/{(arrived - 1) // size}", store)

    def tell(self, device: torch.device | SettingError) -> None:
        """Tell the other ranks the device of this process, or the error that keeps it from having one."""
        keys = self._keys
        if isinstance(device, SettingError):
            keys.compare_set("fault", "", json.dumps([self.rank, device.message, device.legal]))
        else:
            mine = f"{device.type}|{self.rank}|{self._hostname}"
            first = keys.compare_set("kind", "", mine).decode()
            if first.split("|")[0] != device.type:
                keys.set("unlike", f"{first}|{mine}")
            name, known = ("", True) if device.type == "cpu" else _identity(device)
            if name and keys.add(f"{self._hostname}/{name}", 1) > 1:
                keys.set("twice" if known else "unclear", f"{self._hostname}|{self.rank}|{device}")
        if keys.add("told", 1) == self.size:
            keys.set("all", "1")

    def check(self, timeout: timedelta) -> str | None:
        """Wait for the other ranks. Check that all have devices, of one kind, and no two processes one accelerator.
        All ranks call it.

        Args:
            timeout: the time in which all ranks have to arrive.

        Returns:
            A remark about devices that may be one, on rank 0; None: there is none.

        Raises:
            SettingError: on every rank alike, with the host and the ranks.
        """
        self._keys.wait(["all"], timeout)
        error = self.fault()
        if error is not None:
            # The process of rank 0 has the store, and ends with the error: the other ranks read the error before.
            if self._keys.add("read", 1) == self.size:
                self._keys.set("left", "1")
            elif not self.rank:
                with contextlib.suppress(RuntimeError):
                    self._keys.wait(["left"], LEAVE)
            raise error
        if self.rank or not self._keys.check(["unclear"]):
            return None
        host, rank, name = self._keys.get("unclear").decode().split("|")
        return (
            f"rank {rank} and another process of the host {host} see one accelerator each, {name}, and torch tells no "
            "identity (uuid) of it: whether they are two accelerators is not known"
        )

    def fault(self) -> SettingError | None:
        """The error that some ranks have told; None: there is none yet."""
        keys = self._keys
        if keys.check(["fault"]):
            rank, message, legal = json.loads(keys.get("fault"))
            return SettingError(f"{message} (on rank {rank})", legal=legal)
        if keys.check(["unlike"]):
            one, rank, host, other, second, other_host = keys.get("unlike").decode().split("|")
            return SettingError(
                f"rank {rank} on the host {host} has the device {one}, rank {second} on the host {other_host} has "
                f"{other}",
                legal="the same kind of device for all ranks; init(device='cpu') on all ranks",
            )
        if keys.check(["twice"]):
            host, rank, name = keys.get("twice").decode().split("|")
            return SettingError(
                f"rank {rank} and another process of the host {host} have the same device {name}", legal=self.legal
            )
        return None


def _backends() -> dict[str, str]:
    """Kind of device -> the backend of the process group for it."""
    return dict(part.split(":", 1) for part in dist.get_backend_config().split(",") if ":" in part)


def _only_gloo() -> bool:
    """True where the process group has no backend for accelerators."""
    kind = torch.accelerator.current_accelerator()
    return kind is None or _backends().get(kind.type, "gloo") in ("gloo", "mpi")


def _current(index: int) -> torch.device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def _identity(device: torch.device) -> tuple[str, bool]:
    """A name of a device that is the same in every process of the host, and True where other devices have other names
    for certain.

    Where torch tells no uuid, the name is the index among the devices of the host, as far as variables tell. A process
    that sees one device alone may see another one than its neighbour under the same name.
    """
    properties = getattr(torch.get_device_module(device.type), "get_device_properties", None)
    uuid = getattr(properties(device.index), "uuid", None) if properties is not None else None
    if uuid is not None:
        return str(uuid), True
    index = device.index or 0
    shown = next((os.environ[name] for name in _SHOWING if os.environ.get(name)), "").split(",")
    return (shown[index] if index < len(shown) and shown[index] else str(index)), accelerator_count() > 1

"""Streams, events, memory and random states of an accelerator, of whichever vendor, by its module of torch.

    torch.device("cuda")   torch.cuda          torch.device("npu")   torch.npu          torch.device("cpu")   none

A vendor's module may lack a function. Each function here says what it returns then, so that callers name no vendor.

Example: on a CPU `event`, `side_stream` and `peak_allocated` return None, `on_host_soon` returns the tensor itself, and
`sum_type` is float64. On an "mps" device `sum_type` is float32.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from .errors import SettingError

__all__ = [
    "current_stream",
    "default_device",
    "event",
    "host_memory",
    "is_accelerator",
    "is_recording_graph",
    "module_of",
    "moved",
    "on_host_soon",
    "peak_allocated",
    "random_state",
    "random_states",
    "set_random_state",
    "set_random_states",
    "side_stream",
    "sum_type",
    "total_memory",
    "within",
]

#: Kinds of devices whose hardware adds float64 numbers; others emulate that type, or lack it.
_FLOAT64 = ("cpu", "meta", "cuda", "xpu")


def is_accelerator(device: torch.device) -> bool:
    """True for a device with memory and a queue of its own."""
    return device.type not in ("cpu", "meta")


def default_device() -> torch.device:
    """The device on which torch makes a tensor that names none.

    `torch.get_default_device` raises in torch 2.9 after ``torch.set_default_device(None)``.
    """
    return torch.empty(0).device


def module_of(device: torch.device) -> Any:
    """torch's module of an accelerator, such as ``torch.cuda``; None for the CPU, and where torch has none."""
    if not is_accelerator(device):
        return None
    try:
        return torch.get_device_module(device.type)
    except (RuntimeError, AttributeError):
        return None


def _made(device: torch.device, name: str, /, *args: object, **kwargs: object) -> Any:
    found = getattr(module_of(device), name, None)
    return None if found is None else found(*args, **kwargs)


def event(device: torch.device, timed: bool = False) -> Any:
    """A new event of an accelerator: ``record``, ``query``, ``synchronize``, and ``elapsed_time`` of one that is
    timed. None where there is none."""
    return _made(device, "Event", enable_timing=True) if timed else _made(device, "Event")


def side_stream(device: torch.device) -> Any:
    """A new queue of an accelerator beside the one that computes; None where there is none."""
    return _made(device, "Stream", device=device)


def current_stream(device: torch.device) -> Any:
    """The queue of an accelerator to which this thread's operators go."""
    return _made(device, "current_stream", device)


def within(device: torch.device, stream: object) -> contextlib.AbstractContextManager[Any]:
    """Let this thread's operators go to another queue inside the ``with`` block."""
    return module_of(device).stream(stream)


def is_recording_graph() -> bool:
    """True while this process's accelerator records a graph (``torch.cuda.graph``), whose replays run no Python."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kind is not None and bool(_made(kind, "is_current_stream_capturing"))


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; from pinned memory the host does not wait for the copy."""
    return x if x.device == device else x.to(device, non_blocking=x.is_pinned())


def host_memory(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """New contiguous memory of the host for a tensor's values; pinned where the accelerator can copy to or from it
    beside its work.

    Args:
        like: gives shape, device and dtype.
        dtype: another one; None: that of `like`.
    """
    dtype = dtype or like.dtype
    try:
        return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=is_accelerator(like.device))
    except RuntimeError:  # the backend has no pinned memory
        return torch.empty(like.shape, dtype=dtype, device="cpu")


def on_host_soon(x: Tensor) -> tuple[Tensor, Any]:
    """A tensor's values on the host, and the event after which they are there; the event is None where they are there
    already."""
    if not is_accelerator(x.device):
        return x, None
    host_copy = host_memory(x)
    ready = event(x.device) if host_copy.is_pinned() else None
    host_copy.copy_(x, non_blocking=ready is not None)
    if ready is not None:
        ready.record()
    return host_copy, ready


def random_state(device: torch.device) -> Tensor:
    """The state of torch's generator of a device."""
    made = _made(device, "get_rng_state", device)
    return torch.get_rng_state() if made is None else made


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set what `random_state` returned."""
    if hasattr(module_of(device), "set_rng_state"):
        module_of(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def random_states() -> dict[str, bytes]:
    """The states of the generators of this process's current accelerator, by its kind; empty while it is not in use."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = None if kind is None else module_of(kind)
    read = getattr(module, "get_rng_state", None)
    if kind is None or read is None or not getattr(module, "is_initialized", lambda: True)():
        return {}
    return {kind.type: read().numpy().tobytes()}


def set_random_states(states: dict[str, Any]) -> None:
    """Set what `random_states` returned, where this process has an accelerator of the kind."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None and kind.type in states:
        _made(kind, "set_rng_state", torch.frombuffer(bytearray(states[kind.type]), dtype=torch.uint8))


def sum_type(device: torch.device) -> torch.dtype:
    """The widest floating type in which the device itself adds."""
    return torch.float64 if device.type in _FLOAT64 else torch.float32


def peak_allocated(device: torch.device) -> int | None:
    """The most bytes of an accelerator's memory that torch has given out since the last call of this function, or
    since torch's own count began; None where torch does not count.

    The count of torch (``torch.cuda.max_memory_allocated``) begins again.
    """
    found = _made(device, "max_memory_allocated", device)
    _made(device, "reset_peak_memory_stats", device)
    return None if found is None else int(found)


def total_memory(device: torch.device) -> int:
    """Bytes of memory of an accelerator.

    Raises:
        SettingError: torch cannot tell.
    """
    info = _made(device, "mem_get_info", device)
    if info is not None:
        return int(info[1])
    found = getattr(_made(device, "get_device_properties", device), "total_memory", None)
    if found is None:
        raise SettingError(f"torch does not tell how much memory the device {device} has", legal='"cuda", "npu", "cpu"')
    return int(found)

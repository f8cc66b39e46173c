"""State of objects that no attribute shows: copied when a capture meets them, compared after it and before each call.

    random.Random, numpy generators                   their internal state; drawing from them is an error
    numpy arrays; bytearray, array.array, mmap,       shape, dtype and bytes. An array above `LARGEST` is refused:
        memoryview, ctypes, multiprocessing.Value     comparing it at each call would take longer than the call
    contextvars.ContextVar                            its value in this context

Example: the state of ``numpy.ones(2)`` is ("array", (2,), "<f8", b"...").
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import mmap
import random
import sys
from collections.abc import Callable
from typing import Any

from ...errors import CaptureError

__all__ = ["draws", "equal_states", "global_generators", "guarded_state", "set_state", "state_of", "watch_state"]

#: The largest array that is compared at each call, in bytes: 16 MiB are compared in about 4 ms.
LARGEST = 16 << 20

_BYTES = (bytearray, array.array, memoryview, mmap.mmap, ctypes.Structure, ctypes.Union, ctypes.Array)
_EMPTY = object()


def _numpy() -> Any:
    """The module numpy, where the program has imported it."""
    return sys.modules.get("numpy")


def draws(value: Any) -> bool:
    """True for a generator of random numbers, besides those of torch."""
    numpy = _numpy()
    return isinstance(value, random.Random) or (
        numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))
    )


def global_generators() -> list[tuple[Any, str]]:
    """The generators behind ``random.random()`` and ``numpy.random.rand()``, with their names."""
    numpy = _numpy()
    return [(random._inst, "random")] + ([] if numpy is None else [(numpy.random.mtrand._rand, "numpy.random")])


def state_of(value: Any) -> tuple[Any, ...] | None:
    """The state of an object, to be compared by `equal_states`; None for an object of another kind."""
    kind = type(value)
    if kind.__module__ in ("builtins", "torch") and not isinstance(value, _BYTES):
        return None
    numpy = _numpy()
    if isinstance(value, random.Random):
        try:
            return "draws", value.getstate()
        except NotImplementedError:  # the numbers of the system
            return None
    if isinstance(value, contextvars.ContextVar):
        return "context", value.get(_EMPTY)
    if isinstance(value, _BYTES):
        return _of_buffer(value)
    if kind.__module__ in ("ctypes", "_ctypes") and hasattr(value, "value"):
        return _of_buffer(value)
    if kind.__module__.startswith("multiprocessing.") and hasattr(value, "get_obj"):
        return _of_buffer(value.get_obj())
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return "draws", value.bit_generator.state
    if isinstance(value, numpy.random.RandomState):
        return "draws", value.get_state(legacy=False)
    if isinstance(value, numpy.ndarray):
        held = tuple(value.ravel().tolist()) if value.dtype.hasobject else value.tobytes()
        return "array", value.shape, value.dtype.str, held
    return None


def _of_buffer(value: Any) -> tuple[Any, ...] | None:
    try:
        return "bytes", memoryview(value).tobytes()
    except (TypeError, ValueError):  # closed, or released
        return None


def guarded_state(value: Any, path: str, source: str | None = None) -> tuple[Any, ...] | None:
    """The state of an object on which a program may depend; None for a generator, and for objects of other kinds.

    Args:
        path: the user's name for the object.
        source: the line that reads it, where it is known.

    Raises:
        CaptureError: an array that is too large to be compared at each call.
    """
    numpy = _numpy()
    size = value.nbytes if numpy is not None and isinstance(value, numpy.ndarray) else 0
    if size > LARGEST:
        raise CaptureError(
            f"the forward reads {path}, a numpy array of {size >> 20} MiB, which may change in place at any time and "
            "is too large to be compared at each call",
            source=source,
            legal="a tensor in its place: register_buffer(name, torch.from_numpy(array))",
        )
    return None if draws(value) else state_of(value)


def set_state(value: Any, state: tuple[Any, ...]) -> None:
    """Give an object an earlier state, where it has another one and takes it back."""
    if equal_states(state_of(value), state):
        return
    kind, *held = state
    if isinstance(value, random.Random):
        value.setstate(held[0])
    elif kind == "draws" and hasattr(value, "bit_generator"):
        value.bit_generator.state = held[0]
    elif kind == "draws":
        value.set_state(held[0])
    elif kind == "context":
        if held[0] is not _EMPTY:
            value.set(held[0])
    elif kind == "array":
        numpy = _numpy()
        shape, dtype, content = held
        flat = (
            numpy.array(content, dtype=object)
            if isinstance(content, tuple)
            else numpy.frombuffer(content, dtype=value.dtype)
        )
        if value.shape == shape and value.dtype.str == dtype and value.flags.writeable:
            value[...] = flat.reshape(shape)
    else:
        target = value.get_obj() if hasattr(value, "get_obj") else value
        if isinstance(target, (bytearray, array.array)):
            if isinstance(target, bytearray):
                target[:] = held[0]
            else:
                del target[:]
                target.frombytes(held[0])
            return
        with memoryview(target) as view:
            if view.nbytes == len(held[0]) and not view.readonly:
                view.cast("B")[:] = held[0]


def watch_state(value: Any) -> Callable[[], Callable[[], bool]]:
    """A function that starts to watch an object; what it returns is True once the object has changed."""

    def start() -> Callable[[], bool]:
        return functools.partial(_differs, value, state_of(value))

    return start


def _differs(value: Any, before: Any) -> bool:
    return not equal_states(state_of(value), before)


def equal_states(a: Any, b: Any) -> bool:
    """True for two states of one object that mean the same."""
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        if len(a) == len(b) == 2 and type(a[0]) is str and a[0] == "draws" and type(a[1]) is tuple:
            return bool(a == b)  # the 625 integers of `random.Random`, by one call
        return len(a) == len(b) and all(map(equal_states, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_states(held, b[name]) for name, held in a.items())
    if type(a) is type(b) and type(a).__module__ == "numpy" and hasattr(a, "tobytes") and not a.dtype.hasobject:
        return bool((a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes())
    if hasattr(a, "tolist") and hasattr(b, "tolist"):
        return bool(a.tolist() == b.tolist())
    return type(a) is type(b) and isinstance(a, (int, float, complex, str, bytes)) and (a == b or a != a)

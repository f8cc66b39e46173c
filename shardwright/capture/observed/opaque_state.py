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
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ...errors import CaptureError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["draws", "equal_states", "global_generators", "guarded_state", "set_state", "state_of", "watch_state"]

#: The largest array that is compared at each call, in bytes: 16 MiB are compared in about 4 ms.
LARGEST = 16 << 20

_BYTES = (bytearray, array.array, memoryview, mmap.mmap, ctypes.Structure, ctypes.Union, ctypes.Array)
_EMPTY = object()


def _numpy() -> types.ModuleType | None:
    """The module numpy, where the program has imported it."""
    return sys.modules.get("numpy")


def draws(value: object) -> bool:
    """True for a generator of random numbers, besides those of torch."""
    numpy = _numpy()
    return isinstance(value, random.Random) or (
        numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))
    )


def global_generators() -> list[tuple[object, str]]:
    """The generators behind ``random.random()`` and ``numpy.random.rand()``, with their names."""
    numpy, generators = _numpy(), [(random._inst, "random")]
    return [*generators, *([] if numpy is None else [(numpy.random.mtrand._rand, "numpy.random")])]


def state_of(value: object) -> tuple[object, ...] | None:
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
        content = tuple(value.ravel().tolist()) if value.dtype.hasobject else value.tobytes()
        return "array", value.shape, value.dtype.str, content
    return None


def _of_buffer(value: object) -> tuple[object, ...] | None:
    try:
        return "bytes", _memory(value).tobytes()
    except (TypeError, ValueError):  # closed, or released
        return None


def _memory(value: object) -> memoryview:
    """The memory of a bytearray, an array, an mmap, an object of ctypes."""
    return memoryview(cast("Buffer", value))


def guarded_state(value: object, path: str, source: str | None = None) -> tuple[object, ...] | None:
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


def set_state(value: object, state: tuple[object, ...]) -> None:
    """Give an object an earlier state, where it has another one and takes it back."""
    if equal_states(state_of(value), state):
        return
    numpy, content = _numpy(), state[-1]
    if isinstance(value, random.Random):
        assert isinstance(content, tuple)
        value.setstate(content)
    elif isinstance(value, contextvars.ContextVar):
        if content is not _EMPTY:
            value.set(content)
    elif numpy is not None and isinstance(value, numpy.random.Generator):
        value.bit_generator.state = content
    elif numpy is not None and isinstance(value, numpy.random.RandomState):
        value.set_state(content)
    elif numpy is not None and isinstance(value, numpy.ndarray):
        _, shape, dtype, _ = state
        flat = (
            numpy.array(content, dtype=object)
            if isinstance(content, tuple)
            else numpy.frombuffer(content, dtype=value.dtype)
        )
        if value.shape == shape and value.dtype.str == dtype and value.flags.writeable:
            value[...] = flat.reshape(shape)
    else:
        assert isinstance(content, bytes)
        target = value.get_obj() if hasattr(value, "get_obj") else value
        if isinstance(target, bytearray):
            target[:] = content
            return
        if isinstance(target, array.array):
            del target[:]
            target.frombytes(content)
            return
        with _memory(target) as view:
            if view.nbytes == len(content) and not view.readonly:
                view.cast("B")[:] = content


def watch_state(value: object) -> Callable[[], Callable[[], bool]]:
    """A function that starts to watch an object; what it returns is True once the object has changed."""

    def start() -> Callable[[], bool]:
        return functools.partial(_differs, value, state_of(value))

    return start


def _differs(value: object, before: object) -> bool:
    return not equal_states(state_of(value), before)


def equal_states(a: object, b: object) -> bool:
    """True for two states of one object that mean the same."""
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        if len(a) == len(b) == 2 and type(a[0]) is str and a[0] == "draws" and type(a[1]) is tuple:
            return bool(a == b)  # the 625 integers of `random.Random`, by one call
        return len(a) == len(b) and all(map(equal_states, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_states(part, b[name]) for name, part in a.items())
    numpy = _numpy() if type(a) is type(b) and type(a).__module__ == "numpy" else None
    if numpy is not None:
        arrays = numpy.ndarray, numpy.generic
        if isinstance(a, arrays) and isinstance(b, arrays) and not a.dtype.hasobject:
            return bool((a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes())
    if hasattr(a, "tolist") and hasattr(b, "tolist"):
        return bool(a.tolist() == b.tolist())
    return type(a) is type(b) and isinstance(a, (int, float, complex, str, bytes)) and (a == b or a != a)

"""Values as JSON, and back: the states of schedulers, samplers, generators and users that are stored beside tensors.

A value that JSON has no word for is an object with one key:

    {"tuple": [...]}    {"dict": [[key, value], ...]}    {"set": [...]}       {"counter": [[key, count], ...]}
    {"float": "inf"}    {"bytes": base64}                {"complex": [0, 1]}  {"dtype": "float32"}    {"device": "cpu"}
    {"tensor": base64, "dtype": "float32", "shape": [2]}                      {"array": base64, ...} of numpy

Example: ``(1, float("inf"))`` is ``{"tuple": [1, {"float": "inf"}]}``.

Nothing is unpickled: reading a checkpoint, or a message of another rank (`dumps`, `loads`), runs no code of its writer.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import numpy as np
import torch

from ..errors import ShardwrightError, shown

__all__ = ["decode", "dtype_name", "dtype_named", "dumps", "encode", "is_shape", "loads", "write_text"]

_LEAVES = frozenset((bool, int, str, type(None)))
_PLAIN = _LEAVES | {float}

#: Kinds of numpy's dtypes that arrays may have: truth values, numbers.
_KINDS = "biufc"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(word: object) -> torch.dtype:
    """The dtype of a name.

    Raises:
        ValueError: there is no such dtype.
    """
    dtype = (
        vars(torch).get(word) if isinstance(word, str) else None
    )  # getattr would import what torch imports at the first use
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {shown(word)}")
    return dtype


def is_shape(value: object) -> TypeGuard[list[int]]:
    """True for a list of sizes that a tensor may have: at most 64, with fewer than 2^63 elements in all."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
        and math.prod(max(size, 1) for size in value) < 1 << 63
    )


def encode(value: object, where: str = "") -> object:
    """A value in the form that `json.dumps` takes.

    Args:
        value: the value.
        where: the name of the value, for errors.

    Raises:
        TypeError: a part of the value has no form in JSON; the error names the path to it.
    """
    try:
        return _encoded(value)
    except _NoForm as error:
        path = where + "".join(f"[{key!r}]" for key in reversed(error.keys))
        raise TypeError(f"{path or 'the value'} is a {error.kind}") from None


class _NoForm(Exception):
    """A value that has no form in JSON: the name of its class, and the keys that lead to it, the last one first."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.keys: list[object] = []


def _encoded(value: object) -> object:
    if type(value) in _LEAVES:
        return value
    if isinstance(value, (tuple, list)):
        plain = _LEAVES.issuperset(map(type, value))
        encoded_items = (
            list(value) if plain else [v if type(v) in _LEAVES else _inside(v, i) for i, v in enumerate(value)]
        )
        return encoded_items if type(value) is list else {"tuple": encoded_items}
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return _encoded(value.item())
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, collections.Counter):
        return {"counter": [[_encoded(k), _inside(v, k)] for k, v in value.items()]}
    if isinstance(value, dict):
        if (
            all(isinstance(k, str) for k in value)
            and not (len(value) == 1 and next(iter(value)) in _READERS)
            and not {"tensor", "array"} & set(value)
        ):
            return {k: _inside(v, k) for k, v in value.items()}
        return {"dict": [[_encoded(k), _inside(v, k)] for k, v in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"set": [_encoded(v) for v in sorted(value, key=repr)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": _base64(bytes(value))}
    if isinstance(value, complex):
        return {"complex": [_encoded(value.real), _encoded(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
        tensor = value.detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return {"tensor": _base64(data), "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        return {"array": _base64(value.tobytes()), "dtype": value.dtype.str, "shape": list(value.shape)}
    raise _NoForm(type(value).__name__)


def _inside(value: object, key: object) -> object:
    """The form of a value that a container has under `key`."""
    try:
        return _encoded(value)
    except _NoForm as error:
        error.keys.append(key)
        raise


def decode(encoded: object) -> Any:
    """The value that `encode` wrote.

    Args:
        encoded: the JSON.

    Raises:
        ValueError: `encode` did not write this.
    """
    try:
        return _decoded(encoded)
    except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _decoded(encoded: object) -> Any:
    if isinstance(encoded, list):
        return encoded if _PLAIN.issuperset(map(type, encoded)) else [_decoded(w) for w in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "tensor" in encoded:
        data, dtype = (
            _sized(encoded, encoded["tensor"], dtype_named(encoded["dtype"]).itemsize),
            dtype_named(encoded["dtype"]),
        )
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
        return flat.reshape(encoded["shape"])
    if "array" in encoded:
        kind = np.dtype(encoded["dtype"])
        if kind.kind not in _KINDS or not isinstance(encoded["dtype"], str):
            raise ValueError(f"an array of {shown(encoded['dtype'])}")
        return (
            np.frombuffer(_sized(encoded, encoded["array"], kind.itemsize), dtype=kind).reshape(encoded["shape"]).copy()
        )
    if len(encoded) == 1:
        key, content = next(iter(encoded.items()))
        if key in _READERS:
            return _READERS[key](content)
    return {key: _decoded(content) for key, content in encoded.items()}


def _sized(encoded: dict[str, object], text: str, size: int) -> bytearray:
    """The bytes of a tensor or an array with elements of `size` bytes."""
    data, shape = bytearray(_bytes(text)), encoded["shape"]
    if set(encoded) - {"tensor", "array"} != {"dtype", "shape"} or not is_shape(shape):
        raise ValueError(f"no tensor of the shape {shown(shape)}")
    if len(data) != math.prod(shape) * size:
        raise ValueError(f"a tensor of the shape {shape} with {len(data)} bytes")
    return data


def dumps(value: object) -> bytes:
    """A value as the text of a message.

    Raises:
        TypeError: as `encode`.
    """
    return json.dumps(encode(value), separators=(",", ":")).encode()


def loads(text: bytes) -> Any:
    """The value of a message that `dumps` wrote.

    Raises:
        ValueError: `dumps` did not write this.
    """
    return decode(json.loads(text))


def write_text(path: str | os.PathLike[str], text: str, kind: type[ShardwrightError], what: str) -> None:
    """Write a file whole or not at all: a file that was there stays as it was where the disk is full.

    Args:
        path: the file.
        text: its content.
        kind: the class of the error.
        what: the content in words, for the error: "the plan".

    Raises:
        ShardwrightError: of class `kind`: the file cannot be written, with the reason.
    """
    file = os.path.realpath(path)  # the file itself stays, not a link to it
    part = os.path.join(os.path.dirname(file), f".{os.path.basename(file)}.{os.getpid()}.part")
    try:
        if os.path.exists(file) and not os.path.isfile(file):
            part = file  # a device, such as /dev/stdout
        with open(part, "w", encoding="utf-8") as written:
            written.write(text)
            written.flush()
            if part != file:
                os.fsync(written.fileno())
                if os.path.exists(file):
                    shutil.copymode(file, part)
        if part != file:
            os.replace(part, file)
    except OSError as error:
        if part != file:
            with contextlib.suppress(OSError):
                os.unlink(part)
        raise kind(
            f"{what} cannot be written: {error.strerror or error}",
            source=os.fspath(path),
            legal="a file in a folder that can be written, and room on its disk",
        ) from None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _pairs(content: Iterable[tuple[object, object]]) -> dict[object, object]:
    return {_decoded(k): _decoded(v) for k, v in content}


def _count(content: Iterable[tuple[object, object]]) -> collections.Counter[object]:
    made = _pairs(content)
    if not all(isinstance(count, (int, float)) for count in made.values()):
        raise ValueError("a counter of what are no numbers")
    return collections.Counter(made)


def _float(content: str) -> float:
    return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]


_READERS: dict[str, Callable[[Any], object]] = {
    "tuple": lambda content: tuple(_decoded(content)),
    "dict": _pairs,
    "set": lambda content: set(map(_decoded, content)),
    "counter": _count,
    "float": _float,
    "bytes": _bytes,
    "complex": lambda content: complex(*map(_decoded, content)),
    "dtype": dtype_named,
    "device": torch.device,
}

"""The safetensors format: 8 bytes with the length n of the header (little endian), n bytes of JSON, then the tensors, row-major
and without gaps. Of each the header says dtype, shape and [begin, end) counted from the end of the header:

    {"__metadata__": {"format": "pt"}, "w1": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}}

Headers alone are read and written here: several ranks write one file, each at its own places, and read their slices alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError
from .manifest import element_size

__all__ = ["Header", "Lying", "header_of", "laid_out"]

#: A header is at most this long, by the definition of the format.
_LONGEST = 100 << 20

_WORDS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
          "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16",
          "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64"}
_DTYPES = {word: dtype for dtype, word in _WORDS.items()}


class Lying(NamedTuple):
    """A tensor in a file: its dtype as torch calls it, its shape, and the offset of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """What a file says it holds, and its metadata."""

    tensors: dict[str, Lying]
    metadata: dict[str, str]


def laid_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
             ) -> tuple[bytes, dict[str, int], int]:
    """How a file of these tensors looks.

    Args:
        tensors: name -> (dtype, shape), in their order in the file; larger elements come first, so that all are aligned.

    Returns:
        The file's beginning; the offset of each tensor's first byte; the length of the whole file.

    Raises:
        CheckpointError: a dtype that the format does not know, without a source.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    place, places = 0, {}
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -element_size(item[1][0])):
        if dtype not in _WORDS:
            raise CheckpointError(f"{name!r} is of {dtype}, which the safetensors format does not know",
                                  legal="integrated_save=False, or one of " + ", ".join(_WORDS))
        places[name] = place
        end = place + math.prod(shape) * element_size(dtype)
        header[name] = {"dtype": _WORDS[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + at for name, at in places.items()}, begin + place


def header_of(path: Path) -> Header:
    """The header of a file.

    Raises:
        CheckpointError: it cannot be read, is not of this format, or is cut short.
    """
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(what, source=str(path), legal="a whole file in the safetensors format")

    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(_LONGEST, size - 8):
                raise wrong(f"its header is said to have {length:,} bytes, and the file has {size:,}: cut short or altered")
            words = json.loads(file.read(length))
    except OSError as error:
        raise wrong(f"it cannot be read: {error.strerror}") from None
    except ValueError:
        raise wrong("its header is damaged") from None
    tensors, end = {}, 0
    try:
        metadata = words.pop("__metadata__", {})
        for name, said in words.items():
            dtype, shape, (first, last) = _DTYPES[said["dtype"]], tuple(said["shape"]), said["data_offsets"]
            if last - first != math.prod(shape) * element_size(dtype) or first < 0:
                raise wrong(f"its header is damaged: {name!r} has {last - first} bytes for {shape} of {dtype}")
            tensors[name] = Lying(dtype, shape, 8 + length + first)
            end = max(end, last)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise wrong(f"its header is damaged, or has a dtype that torch does not: {error}") from None
    if size != 8 + length + end:
        raise wrong(f"it has {size:,} bytes instead of {8 + length + end:,}: cut short")
    return Header(tensors, metadata)

"""Digests of a checkpoint's files, in blocks of 4 MiB that several ranks check together.

    digest(file)  = d(block 0), d(block 1), …
    d(block)      = XXH3_64(bytes of the block)                           16 hexadecimal digits

XXH3 depends on the order of the bytes as well as on the bytes: a flipped bit, a run of zeros, and pages, rows or words
in the place of one another go unnoticed once in 2^64 cases. Its value depends on the length too, and the digests stand
in the order of the blocks, so that whole blocks cannot change places either. Forgery is not guarded against. One core
does as much of it as memory gives (36 GB/s; 3 of CRC-32, 2 of BLAKE3), which is more than reading the bytes takes.
Blocks let several ranks check one file together: `shares` splits a file of 10 MiB (blocks 0 to 2) between two ranks as
block 0, and blocks 1 and 2.

Checkpoints of schema 1 have another digest, which is read and no longer written:

    d(block)      = crc32(s_0, …, s_508), begun with the block's length    8 hexadecimal digits
    s_c           = Σ_r w[509 r + c]  mod 2^64                             w: the block as words of 8 bytes

Its sums have no order: a page that moves by a multiple of 509 words goes unnoticed.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

__all__ = ["ALGORITHMS", "BLOCK", "Algorithm", "blocks_of", "digest", "shares"]

BLOCK = 4 << 20

_COLUMNS = 509
_ROW = 8 * _COLUMNS

#: Bytes read and summed at a time: they stay in a core's own cache. Whole rows of the digest of schema 1.
_PIECE = 128 * _ROW


class _Sum(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class _ColumnSums:
    """The digest of a block in schema 1. All updates but the last one are whole rows."""

    def __init__(self) -> None:
        self._sums, self._size = np.zeros(_COLUMNS, "<u8"), 0

    def update(self, data: memoryview) -> None:
        encoded = np.frombuffer(data, np.uint8)
        self._size += len(encoded)
        if len(encoded) % _ROW:
            encoded = np.concatenate([encoded, np.zeros(-len(encoded) % _ROW, np.uint8)])
        self._sums += np.add.reduce(encoded.view("<u8").reshape(-1, _COLUMNS), axis=0)

    def hexdigest(self) -> str:
        return f"{zlib.crc32(self._sums.data, self._size):08x}"


@dataclass(frozen=True)
class Algorithm:
    """A way to digest a block.

    Attributes:
        encoded: its description in a manifest.
        digits: the hexadecimal digits of a block's digest.
        begin: the sum of a block, before its bytes.
    """

    encoded: Mapping[str, object]
    digits: int
    begin: Callable[[], _Sum]


#: The algorithm of each schema of manifests.
ALGORITHMS: dict[int, Algorithm] = {
    1: Algorithm({"name": "crc32 of column sums", "block": BLOCK, "columns": _COLUMNS}, 8, _ColumnSums),
    2: Algorithm({"name": "xxh3_64", "block": BLOCK}, 16, xxhash.xxh3_64),
}


def blocks_of(size: int) -> int:
    """The number of blocks of a file of `size` bytes."""
    return -(-size // BLOCK)


def digest(path: Path, first: int = 0, last: int | None = None, algorithm: Algorithm = ALGORITHMS[2]) -> str:
    """The digests of blocks `first` to `last` (exclusive; None: the end), `Algorithm.digits` digits each.

    Raises:
        OSError: the file cannot be read.
    """
    out = []
    buffer = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        number = first
        while last is None or number < last:
            size, made = 0, algorithm.begin()
            while count := _read(file.fileno(), buffer[: min(_PIECE, BLOCK - size)], number * BLOCK + size):
                made.update(buffer[:count])
                size += count
            if not size:
                break
            out.append(made.hexdigest())
            number += 1
    return "".join(out)


def _read(handle: int, into: memoryview, at: int) -> int:
    """Fill `into` with a file's bytes from `at` on; the number of bytes read."""
    count = 0
    while count < len(into) and (got := os.preadv(handle, [into[count:]], at + count)):
        count += got
    return count


def shares(sizes: Mapping[str, int], part: int, parts: int) -> Iterator[tuple[str, int, int]]:
    """The blocks that share `part` of `parts` has to check, as (file, first, last): a run in the list of all blocks.

    Args:
        sizes: file -> its size in bytes.
        part: the number of the share, from 0.
        parts: the number of shares.
    """
    total = sum(map(blocks_of, sizes.values()))
    begin, end = total * part // parts, total * (part + 1) // parts
    seen = 0
    for name, size in sizes.items():
        count = blocks_of(size)
        first, last = max(begin - seen, 0), min(end - seen, count)
        if first < last:
            yield name, first, last
        seen += count

"""Digests of a file: that of checkpoints against others, on one core.

    python benchmarks/digests.py                    a file of 256 MiB, 15 rounds
    python benchmarks/digests.py --megabytes 64 --rounds 5

    in memory       the digest alone, over bytes that are there, in pieces that stay in a core's own cache
    a file          `digest` as a save and a load call it: from the kernel's cache of the file, and the reading alone

Contenders: XXH3_64, which checkpoints have; the column sums of checkpoints of schema 1; CRC-32 (zlib), SHA-256; BLAKE3
and CRC-32C, where their packages are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash
from race import Figure, Results, Spread, order
from rich.console import Console

from shardwright.checkpoint.digests import _PIECE, ALGORITHMS, digest

OURS, EARLIER = "XXH3_64", "column sums"


class Running:
    """A checksum in the form of hashlib."""

    def __init__(self, function: Callable[..., int]) -> None:
        self._function, self._value = function, 0

    def update(self, data: Any) -> None:
        self._value = self._function(data, self._value)


def contenders() -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {
        OURS: xxhash.xxh3_64,
        EARLIER: ALGORITHMS[1].begin,
        "CRC-32": lambda: Running(zlib.crc32),
        "SHA-256": hashlib.sha256,
    }
    for package, name, begin in (
        ("blake3", "BLAKE3", lambda module: module.blake3),
        ("crc32c", "CRC-32C", lambda module: lambda: Running(module.crc32c)),
    ):
        with contextlib.suppress(ImportError):
            made[name] = begin(importlib.import_module(package))
    return made


def in_memory(begin: Callable[[], Any], data: memoryview) -> None:
    made = begin()
    for at in range(0, len(data), _PIECE):
        made.update(data[at : at + _PIECE])


def read_alone(path: Path) -> None:
    buffer = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="default: 256")
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    parser.add_argument("--output", type=Path, default=Path("digests.json"), help="default: digests.json")
    args = parser.parse_args(argv)
    console, results, size = Console(), Results(), args.megabytes << 20
    data = memoryview(os.urandom(size))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        entries = {
            "in memory": {n: lambda begin=begin: in_memory(begin, data) for n, begin in contenders().items()},
            "a file": {
                OURS: lambda: digest(path),
                EARLIER: lambda: digest(path, algorithm=ALGORITHMS[1]),
                "reading alone": lambda: read_alone(path),
            },
        }
        for section, those in entries.items():
            times = results.times[section] = {name: [] for name in those}
            for turn in range(args.rounds):
                for name in order(list(those), turn):
                    times[name].append(1e3 * seconds(those[name]))
            for name in those:
                rates = Spread.of([size / 1e6 / t for t in times[name]])
                target = {"at_least": 5.0} if (section, name) == ("in memory", OURS) else {}
                results.figures.append(Figure(section, f"{name}, GB/s", rates, **target))
            results.compare(section, OURS, EARLIER, at_most=1.1)
    return results.finish(console, args.output)


if __name__ == "__main__":
    sys.exit(main())

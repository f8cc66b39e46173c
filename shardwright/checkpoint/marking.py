"""How a data file carries the id of its save, so that a file of another save is told at once.

    *.safetensors      the entry ``shardwright_id`` of its header's metadata
    *.distcp           its last 64 bytes, which belong to no tensor: "shardwright ", the id, the rank that wrote it
    *.json             the member "id", the first of the object
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

__all__ = ["ID_KEY", "TRAILER", "mark_of", "trailer"]

ID_KEY = "shardwright_id"

#: Bytes at the end of a rank's part.
TRAILER = 64

#: A header of safetensors is at most this long, by its definition.
_LONGEST = 100 << 20


def trailer(save_id: str, rank: int) -> bytes:
    """The last bytes of a rank's part."""
    return f"shardwright {save_id} {rank}".encode().ljust(TRAILER - 1) + b"\n"


def mark_of(path: Path) -> str | None:
    """The id that a file carries; None: it carries none.

    Raises:
        OSError, ValueError: a file that cannot be read, or not be understood.
    """
    with open(path, "rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _LONGEST else {}
            return header.get("__metadata__", {}).get(ID_KEY) if isinstance(header, dict) else None
        if path.suffix == ".distcp":
            file.seek(max(0, os.fstat(file.fileno()).st_size - TRAILER))
            found = re.match(rb"shardwright ([0-9a-f]+) ", file.read())
        elif path.suffix == ".json":
            found = re.match(rb'\{\s*"id": "([0-9a-f]+)"', file.read(64))
        else:
            return None
        return found[1].decode() if found else None

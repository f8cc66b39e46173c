"""How much memory someone speaks of."""

from __future__ import annotations

import math
import re
from typing import Any

from ..cluster import Cluster
from ..errors import SettingError

__all__ = ["amount_of", "memory_of", "words_of"]

#: Bytes of each unit; "70G" is "70GB".
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

LEGAL = '"70GB", "64GiB", a number of bytes, or "cluster" for that of its devices'


def memory_of(given: Any, cluster: Cluster) -> float | None:
    """The bytes that a device may hold; None: no limit is asked for.

    Args:
        given: a number of bytes; text such as "70GB" or "1.5 TiB"; "cluster" or True: as much as a device has; None or
            False: no limit.

    Raises:
        SettingError: another thing, or nothing above 0.
    """
    if given is None or given is False:
        return None
    if given is True or isinstance(given, str) and given.strip().lower() == "cluster":
        return float(cluster.memory)
    return amount_of(given, "memory", LEGAL)


def amount_of(given: Any, name: str, legal: str) -> float:
    """The bytes that a number or text such as "70GB" says.

    Args:
        name, legal: of the setting, for the error.

    Raises:
        SettingError: another thing, or nothing above 0.
    """
    if isinstance(given, str):
        read = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)(b?)", given.strip().lower())
        unit = read[2].upper() if read else "?"
        try:
            found = float(read[1]) * UNITS[unit] if read and unit in UNITS else math.nan
        except ValueError:
            found = math.nan
    else:
        found = float(given) if isinstance(given, (int, float)) and not isinstance(given, bool) else math.nan
    if not 0 < found < math.inf:
        raise SettingError(f"{name}={given!r} is no amount of memory", legal=legal)
    return found


def words_of(count: float) -> str:
    """An amount as a report says it: "1.50 GB"; never less than it is."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{math.ceil(count / size * 100) / 100:.2f} {unit}"
    return f"{math.ceil(count)} bytes"

"""Numbers with their units, as people read them."""

from __future__ import annotations

__all__ = ["size_text", "time_text"]


def size_text(count: float) -> str:
    """Bytes: ``392 KiB``; below 10 of a unit with one decimal."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 10 else f"{size:.1f} {units[0]}"


def time_text(seconds: float) -> str:
    """Seconds: ``1.23 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds / 1e-6:.3g} us"

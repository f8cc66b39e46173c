"""A picture of a simulated step as text: the README's, which a package registry shows as well."""

from __future__ import annotations

import re

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SHADES = {"forward": "░", "backward": "▓", "once a step": "▪"}


def drawn(svg: str, seconds: float = 0.1) -> str:
    """A row of characters for each group of devices, each character `seconds` long; the number is the micro-batch's."""
    groups: dict[int, list[tuple[float, float, str, str]]] = {}
    top: list[float] = []
    for y, label, kind, length, start in re.findall(
        r'<rect class="span" x="[\d.]+" y="([\d.]+)"[^>]*><title>([^,<]*), ([^:<]*): ([^<]*?) from ([^<]*)</title>', svg
    ):
        if float(y) not in top:
            top.append(float(y))
        begin = _seconds(start)
        groups.setdefault(top.index(float(y)), []).append((begin, begin + _seconds(length), label, kind))
    lines = []
    for group, spans in groups.items():
        row = ["·"] * round(max(stop for all_ in groups.values() for _, stop, _, _ in all_) / seconds)
        for begin, stop, label, kind in spans:
            first, last = round(begin / seconds), round(stop / seconds)
            row[first:last] = SHADES[kind] * (last - first)
            number = re.search(r"[FB](\d+)$", label)
            if number:
                row[(first + last - 1) // 2] = number[1]
        lines.append(f"stage {group}  {''.join(row)}")
    return "\n".join(lines)


def _seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]

"""Slurm's host lists: ``node[01-03,07],gpu[1-2]-[0-1],login`` written out, without asking Slurm.

    list    = item ("," item)*                  commas inside brackets do not count
    item    = (text | "[" ranges "]")*          the product of its brackets, the last one fastest
    ranges  = (n | n "-" m) ("," ...)*          as wide as the low end is written: 01-03 has zeros, 1-3 has none
"""

from __future__ import annotations

import itertools
import re

from shardwright.errors import SettingError

__all__ = ["expand"]

_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str, name: str) -> tuple[str, ...]:
    """The hosts of a list, in its order.

    Args:
        text: the list.
        name: the variable that holds it, for errors.

    Raises:
        SettingError: a list that cannot be read.
    """
    hosts: list[str] = []
    at = 0
    while True:
        item = _ITEM.match(text, at)
        if item is None:
            break
        pieces = [_ranges(piece[1], text, name) if piece[1] is not None else [piece[2]]
                  for piece in _PIECE.finditer(item[0])]
        hosts += map("".join, itertools.product(*pieces))
        at = item.end()
        if not text.startswith(",", at):
            break
        at += 1
    if at != len(text) or not hosts or text.endswith(","):
        raise SettingError(f"{name}={text} cannot be read from its character {at + 1} on",
                           legal="a list of hosts such as node[01-03,07],login1")
    return tuple(hosts)


def _ranges(inside: str, text: str, name: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part)
        if found is None or found[2] is not None and int(found[2]) < int(found[1]):
            raise SettingError(f"{name}={text}: [{inside}] cannot be read at {part!r}",
                               legal="numbers and ranges from low to high, such as [01-03,07]")
        low, high = found[1], found[2] or found[1]
        numbers += (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
    return numbers

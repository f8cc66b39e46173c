"""What is known of single tables: what share of a table is allowed, and which of its columns are equal.

A layout says which strategy left it, and of what is kept only whether it is: such tables are mostly forbidden, or have
few different columns. Elimination then has less to do than the number of states says.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

__all__ = ["FEW", "SPARSE", "Facts", "slices"]

FEW = 0.5  # the share of different columns up to which a table is worth going through by these
SPARSE = 0.25  # the share of finite entries up to which a table is worth going through by what it allows
SAMPLE = 8  # entries along each further dim that are looked at first, to tell slices apart


def slices(table: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray | None]:
    """A table with each different slice along a dim once, and which of these each one was; the table itself and None where
    few are equal. Nothing is remembered: it is for large tables that are made and gone."""
    rows = np.moveaxis(table, axis, 0)
    some = rows[(slice(None), *(slice(None, None, max(1, size // SAMPLE)) for size in rows.shape[1:]))]
    alike: dict[bytes, list[int]] = {}
    first: list[int] = []
    which = np.empty(len(rows), np.int64)
    for n, row in enumerate(some):
        found = alike.setdefault(row.tobytes(), [])
        same = next((k for k in found if np.array_equal(rows[first[k]], rows[n])), None)
        if same is None:
            same = len(first)
            first.append(n)
            found.append(same)
            if len(first) > FEW * len(rows):
                return table, None
        which[n] = same
    return np.ascontiguousarray(table.take(first, axis=axis)), which


class Facts:
    """What is known of single tables, by identity."""

    def __init__(self) -> None:
        self._columns: dict[tuple[int, int], tuple] = {}
        self._shares: dict[int, tuple[float, np.ndarray]] = {}

    def share(self, table: np.ndarray) -> float:
        """The share of a table's entries that is finite."""
        if id(table) not in self._shares:
            self._shares[id(table)] = np.count_nonzero(np.isfinite(table)) / max(table.size, 1), table
        return self._shares[id(table)][0]

    def columns(self, table: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray | None]:
        """A table of two dims with each different column (along `axis`) once, and which of these each one was; the
        table itself and None where few are equal."""
        key = (id(table), axis)
        if key not in self._columns:
            rows = np.ascontiguousarray(table.T if axis else table)
            place: dict[bytes, int] = {}
            which = np.array([place.setdefault(row.tobytes(), len(place)) for row in rows])
            if len(place) <= FEW * len(rows):
                first = np.unique(which, return_index=True)[1]
                self._columns[key] = np.ascontiguousarray(table.take(first, axis=axis)), which, table
            else:
                self._columns[key] = table, None, table
        return self._columns[key][:2]

    def sparse(self, edges: Mapping[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], float]:
        """The share of the entries that is finite, of edges that allow few pairs."""
        return {pair: share for pair, table in edges.items() if (share := self.share(table)) <= SPARSE}

    def few(self, edges: Mapping[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], int]:
        """By (node, other): how many states of the other the edge tells apart, where that is few of them."""
        out = {}
        for pair, table in edges.items():
            for axis in (0, 1):
                small, which = self.columns(table, axis)
                if which is not None:
                    out[pair[1 - axis], pair[axis]] = small.shape[axis]
        return out

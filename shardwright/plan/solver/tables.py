"""Tables made of tables: what was made of the same ones in the same way is made once.

Few states: where a table allows few pairs of a node and a neighbour, their joint is gone through by what it allows;
where it tells few states of a neighbour apart, by those that it does (facts.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .budget import current
from .facts import SPARSE, Facts, slices

__all__ = ["Shapes", "Tables"]

BLOCK = 2**14  # entries of what is left that are made at once, where it is made state by state: 128 KiB; measured
AT_ONCE = 2**18  # entries of a joint up to which it is made at once, not state by state: 2 MiB; measured


class Tables:
    """What was made of which tables: the same of the same is made once.

    Tables are known by identity. All that were ever asked about are held, so that an identity is not used again.
    """

    def __init__(self, facts: Facts | None = None) -> None:
        self.facts = Facts() if facts is None else facts
        self.budget = current()
        self._made: dict[tuple, tuple[np.ndarray, tuple]] = {}
        self._vectors: dict[bytes, np.ndarray] = {}

    def vector(self, values: np.ndarray) -> np.ndarray:
        """The one table of one dim with these values."""
        return self._vectors.setdefault(values.tobytes(), values)

    def sum(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """one + other, of equal shapes."""
        key = (id(one), id(other))
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = (self._add(one, other), (one, other))
        return found[0]

    def _add(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        self.budget.ask(one.nbytes)
        return one + other

    def least(self, where: tuple[tuple[int, ...], ...], tables: Sequence[np.ndarray], dims: int) -> np.ndarray:
        """The joint of tables, less its dim -1 by a minimum.

        Args:
            where: for each table the dim of the joint that each of its own is; -1: the one that goes.
            dims: of the result.
        """
        key = (where, *map(id, tables))
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = (self._reduce(list(zip(where, tables)), dims), tuple(tables))
        return found[0]

    def _reduce(self, parts: Sequence[tuple[tuple[int, ...], np.ndarray]], dims: int) -> np.ndarray:
        sizes = {dim: size for where, table in parts for dim, size in zip(where, table.shape) if dim >= 0}
        self.budget.ask(8 * math.prod(sizes.values()))
        seen = [dim for where, _ in parts for dim in where]
        spread: dict[int, np.ndarray] = {}
        out = []
        for where, table in parts:
            alone = [dim for dim in where if dim >= 0 and seen.count(dim) == 1]
            if len(where) == 2 and alone and dims > 1:
                few, which = self.facts.columns(table, where.index(alone[0]))
                if which is not None:
                    table, spread[alone[0]] = few, which
            elif len(where) > 2 and table.size > AT_ONCE:
                for dim in alone:
                    table, which = slices(table, where.index(dim))
                    if which is not None:
                        spread[dim] = which
            out.append((where, table))
        least = _least(out, dims, self.facts)
        for dim, which in spread.items():
            least = least.take(which, axis=dim)
        return least

    def slice(self, table: np.ndarray, axis: int) -> np.ndarray:
        """The table without a dim of size one."""
        key = (id(table), "slice", axis)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = (np.squeeze(table, axis), (table,))
        return found[0]


def _least(parts: Sequence[tuple[tuple[int, ...], np.ndarray]], dims: int, facts: Facts) -> np.ndarray:
    """Tables.least, computed."""
    # the dims it has; with all of them, the one that goes first; whether it is a copy, which may be added to in place
    aligned: list[tuple[frozenset[int], np.ndarray, bool]] = []
    for where, table in parts:
        by_dim = sorted(range(len(where)), key=where.__getitem__)
        shape = [1] * (dims + 1)
        for axis in by_dim:
            shape[where[axis] + 1] = table.shape[axis]
        turned = table.transpose(by_dim)
        if table.size <= AT_ONCE or where[-1] == -1:  # another is gone through as it lies: that is less than to turn it
            turned = np.ascontiguousarray(turned)
        aligned.append((frozenset(where), turned.reshape(shape), turned.base is None))
    pairs = [(facts.share(table), where, n) for n, (where, table) in enumerate(parts) if len(where) == 2 and dims > 1]
    found = min(pairs, key=lambda entry: entry[0], default=(1.0, (), -1))
    if found[0] <= SPARSE:
        found = found[0], found[1], aligned[found[2]][1]
    aligned.sort(key=lambda part: -part[1].size)
    joined: list[tuple[frozenset[int], np.ndarray, bool]] = []
    for has, table, own in aligned:  # a table within another is added there: that is less to do than in the joint
        for n, (more, larger, mine) in enumerate(joined):
            if has <= more and (mine or larger.size <= AT_ONCE):
                joined[n] = more, np.add(larger, table, out=larger if mine else None), True
                break
        else:
            joined.append((has, table, own))
    tables = [table for _, table, _ in sorted(joined, key=lambda part: part[1].size)]
    if len(tables) == 1:
        return tables[0].min(axis=0)
    if found[0] <= SPARSE:
        return _by_group(tables, dims, max(found[1]), found[2])
    shape = np.broadcast_shapes(*(table.shape for table in tables))
    if math.prod(shape) <= AT_ONCE:
        joint = tables[0]
        for table in tables[1:]:
            joint = joint + table
        return joint.min(axis=0)
    least = np.empty(shape[1:])
    rows = max(1, BLOCK // math.prod(shape[2:]))
    for first in range(0, shape[1], rows):
        part = slice(first, first + rows)
        _by_state([table if table.shape[1] == 1 else table[:, part] for table in tables], least[part])
    return least


def _by_state(tables: Sequence[np.ndarray], least: np.ndarray) -> None:
    """The least of a joint over its first dim, state by state.

    Args:
        tables: two or more, the smallest first.
        least: where to.
    """
    joint = np.empty(least.shape)
    for state in range(max(len(table) for table in tables)):
        part = tables[0][state]
        for table in tables[1:-1]:
            part = part + table[state]
        if state == 0:
            np.add(part, tables[-1][state], out=least)
        else:
            np.minimum(least, np.add(part, tables[-1][state], out=joint), out=least)


def _by_group(tables: Sequence[np.ndarray], dims: int, dim: int, which: np.ndarray) -> np.ndarray:
    """The least of a joint over its first dim, state by state of a dim with which few states of the first are allowed.

    Args:
        tables: of `dims` + 1 dims, that go or are of size one.
        dim: of the result.
        which: the table of the first dim and that one.
    """
    shape = np.broadcast_shapes(*(table.shape for table in tables))
    least = np.empty(shape[1:])
    finite = np.isfinite(which).reshape(which.shape[0], -1)
    at = (slice(None),) * (dim + 1)
    for state in range(finite.shape[1]):
        rows = np.flatnonzero(finite[:, state])
        if not len(rows):
            least[(*at[1:], state)] = np.inf
            continue
        joint: np.ndarray | None = None
        for table in tables:
            part = table if table.shape[dim + 1] == 1 else table[(*at, slice(state, state + 1))]
            part = part if part.shape[0] == 1 else part[rows]
            joint = part if joint is None else joint + part
        least[(*at[1:], slice(state, state + 1))] = joint.min(axis=0)
    return least


class Shapes(Tables):
    """Tables whose values are not computed: only how many entries their joints would have."""

    def __init__(self, facts: Facts | None = None) -> None:
        super().__init__(facts)
        self.entries = 0

    def _add(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        self.entries += one.size
        return np.broadcast_to(0.0, one.shape)

    def _reduce(self, parts: Sequence[tuple[tuple[int, ...], np.ndarray]], dims: int) -> np.ndarray:
        shape, share = [1] * (dims + 1), 1.0
        for where, table in parts:
            for dim, size in zip(where, table.shape):
                shape[dim + 1] = size
            if len(where) == 2 and dims > 1 and table.strides != (0, 0):
                share = min(share, self.facts.share(table))
        self.entries += int(math.prod(shape) * (share if share <= SPARSE else 1.0))
        return np.broadcast_to(0.0, shape[1:])

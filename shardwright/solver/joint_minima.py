"""Least entries of a joint of tables over its first dim, where the joint is too large to be made at once.

    by_state    state by state of the first dim
    by_group    one dim of the result allows few states of the first: those alone

Example: of a joint of 150 · 150 · 20 entries whose second dim allows 4 states of the first each, `by_group` makes
4 · 150 · 20.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["BLOCK", "by_group", "by_state"]

BLOCK = 2**14  # entries of the result made at once, where it is made state by state: 128 KiB; measured
TOGETHER = 16  # the fewest states of a block that `_together` takes; with fewer it takes longer, measured


def by_state(tables: Sequence[np.ndarray], least: np.ndarray) -> None:
    """Write the least of a joint over its first dim, state by state, into `least`.

    Args:
        tables: two or more, the smallest first.
        least: the result.
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


def by_group(tables: Sequence[np.ndarray], dims: int, dim: int, which: np.ndarray) -> np.ndarray:
    """The least of a joint over its first dim, state by state of a dim that allows few states of the first.

    Args:
        tables: of `dims` + 1 dims; each dim has its full size or size one.
        dims: the number of dims of the result.
        dim: that dim of the result.
        which: the table of the first dim and that one.
    """
    shape = np.broadcast_shapes(*(table.shape for table in tables))
    least = np.empty(shape[1:])
    finite = np.isfinite(which).reshape(which.shape[0], -1)
    rest = math.prod(shape[1:]) // shape[dim + 1]
    if rest * TOGETHER <= BLOCK:
        _together(tables, dim, finite, np.moveaxis(least, dim, 0), BLOCK // rest)
        return least
    at: tuple[slice | int, ...] = (slice(None),) * (dim + 1)
    for state in range(finite.shape[1]):
        rows = np.flatnonzero(finite[:, state])
        if not len(rows):
            least[(*at[1:], state)] = np.inf
            continue
        parts = []
        for table in tables:
            part = table if table.shape[dim + 1] == 1 else table[(*at, slice(state, state + 1))]
            parts.append(part if part.shape[0] == 1 else part[rows])
        joint = parts[0]
        for part in parts[1:]:
            joint = joint + part
        least[(*at[1:], slice(state, state + 1))] = joint.min(axis=0)
    return least


def _together(tables: Sequence[np.ndarray], dim: int, finite: np.ndarray, least: np.ndarray, most: int) -> None:
    """`by_group`, many states of the dim at a time: one sum for the first allowed state of the minimised dim of each,
    one for the second, and so on.

    Args:
        tables, dim: see `by_group`.
        finite: (state of the minimised dim, state of `dim`) -> True where the two are allowed.
        least: receives the result; `dim` is its first.
        most: the number of states at a time.
    """
    counts = finite.sum(axis=0)
    order = np.argsort(counts, kind="stable")  # states at a time have about equally many
    allowed = np.argsort(~finite, axis=0, kind="stable")
    turned = [np.moveaxis(table, dim + 1, 1) for table in tables]
    begin = int(np.searchsorted(counts[order], 1))
    least[order[:begin]] = np.inf
    for first in range(begin, len(order), most):
        states = order[first : first + most]
        found = None
        for n in range(int(counts[states[-1]])):
            rows = allowed[np.where(n < counts[states], n, 0), states]
            joint = None
            for table in turned:
                row = rows if table.shape[0] > 1 else 0
                part = table[row, states if table.shape[1] > 1 else 0]
                if part.ndim < least.ndim:  # a table without either dim
                    part = part[np.newaxis]
                joint = part if joint is None else joint + part
            assert joint is not None
            found = joint if found is None else np.minimum(found, joint)
        least[states] = found

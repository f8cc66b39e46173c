"""A search's energy with memory, and what its states say is stored cut and computed again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .energy import Energy
from .keep_states import DROPPED, Keeping
from .storage import OptimizerParallel

__all__ = ["Holding"]


@dataclass(frozen=True)
class Holding:
    """An energy with memory.

    Attributes:
        energy: its problem has a limit, usages, and the nodes of what is kept.
        kept: by value, the node of what is kept of it.
        states: by value, that node's states.
        segments: by operator, the segment of the program that it is in.
        remade: by value that may be dropped, the operators that then run again; what `recompute.hands_on` says of comes
            with what it views.
    """

    energy: Energy
    kept: dict[str, int]
    states: dict[str, tuple[Keeping, ...]]
    segments: dict[str, int]
    remade: dict[str, tuple[str, ...]]

    def recomputed(self, states: tuple[int, ...]) -> frozenset[str]:
        """The operators that run again."""
        return frozenset(name for v, names in self.remade.items() for name in names
                         if self.states[v][states[self.kept[v]]].how == DROPPED)

    def storage(self, states: tuple[int, ...]) -> OptimizerParallel | None:
        """The setting that stores parameters as the states say."""
        whole, kept, cut = set(), set(), False
        graph = self.energy.described.graph
        names = {value.name: name for name, value in graph.parameters.items()}
        for value, node in self.energy.parameters.items():
            state = self.energy.storages[value][states[node]]
            if state.stored == state.layout:
                whole.add(names[value])
            else:
                cut = True
                if not state.again:
                    kept.add(names[value])
        if not cut:
            return None
        return OptimizerParallel(-1, 0, "level3", frozenset(whole), frozenset(kept))

    def peak(self, states: tuple[int, ...]) -> float:
        """The most bytes that the states hold at any moment, as the problem reckons them."""
        uses = self.energy.problem.usages
        changes = np.zeros(max((u.stop for u in uses), default=0) + 1)
        for u in uses:
            held = u.held(states)
            changes[u.start] += held
            changes[u.stop] -= held
        return float(np.cumsum(changes).max(initial=0.0))

"""All ranks come to one plan before anything runs, or to one error.

    every rank:   capture ── plan ──────────────────────────── agree
    a search:     capture ── meet ── rank 0 searches ── hand ── agree

Planning that decides by rules alone is done by each rank for itself, and compared afterwards. A search is done once, by
rank 0: it takes long, and it weighs figures that machines may reckon differently, so that ranks could each find another
plan of nearly one price. The others take its decisions, or its error.

To meet and to agree, every rank says something to all others at once. One on which something has gone wrong in between
says so instead (`Agreement.missed`), whichever of the two the others have come to: nobody waits for one that has given
up.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ..errors import RuntimeMismatchError, ShardwrightError
from ..graph import Graph
from ..plan.handed import Handed, graph_digest
from ..plan.decision import Decided

__all__ = ["Agreement"]

#: Type and shape of each input of the whole batch.
Fed = list[tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class _Said:
    """What a rank says of itself.

    Attributes:
        mode: its parallel mode.
        failed: what it could not plan for, in words.
        program: what tells its plan, or before a search its graph, from others.
        settings: what else must be alike.
        started: what tells the values of each parameter from others.
        seed: of the program's random numbers, how many calls have drawn before, and the setting `random`.
    """

    mode: str
    fed: Fed
    failed: str | None
    program: str | None = None
    settings: Any = None
    started: dict[str, Any] = field(default_factory=dict)
    seed: tuple[int, int, str] | None = None


class Agreement:
    """One planning of one model, on this rank.

    Args:
        mode: the parallel mode.
        fed: shape and type of each input of the whole batch; may be filled in until something is asked.
    """

    def __init__(self, mode: str, fed: Fed) -> None:
        self.mode, self.fed = mode, fed
        self._known = False  # whether every rank is about to raise what this one will

    def search(self, graph: Graph, settings: Any, find: Callable[[], Decided],
               take: Callable[[Handed], Decided]) -> Decided:
        """What rank 0 finds, on every rank. There may be several searches, the same ones on every rank.

        Args:
            settings: what decides, besides the graph; values that can be pickled and compared.
            find: searches; called on rank 0 alone.
            take: how another rank makes what it is handed its own.

        Raises:
            RuntimeMismatchError: on every rank alike: ranks that would search for something else, or cannot plan.
            Exception: what rank 0's search raised, on every rank.
        """
        found: list[Decided] = []

        def handed() -> Handed:
            found.append(find())
            return Handed.of(found[0])
        given = self.first(graph, settings, handed)
        return found[0] if found else take(given)

    def first(self, graph: Graph, settings: Any, find: Callable[[], Any]) -> Any:
        """What rank 0 finds, on every rank, as it is.

        Args:
            settings: what decides, besides the graph; values that can be pickled and compared.
            find: called on rank 0 alone; what it returns can be pickled.

        Raises:
            RuntimeMismatchError, Exception: as `search`.
        """
        self._known = True
        everyone = _exchanged(_Said(self.mode, self.fed, None, graph_digest(graph), settings))
        _alike(everyone, "program", "have captured another model than rank 0", "marks and inputs")
        _alike(everyone, "settings", "search with other settings than rank 0", "marks and settings")
        if dist.get_rank():
            found = _from_first(None)
            if isinstance(found, Exception):
                raise found
            self._known = False
            return found
        try:
            found = find()
        except Exception as error:
            _from_first(_portable(error))
            raise
        _from_first(found)
        self._known = False
        return found

    def missed(self, error: Exception) -> None:
        """Tell the others what this rank cannot plan for, before it is raised.

        Raises:
            RuntimeMismatchError: on every rank alike, where others can plan.
        """
        if not self._known:
            _exchanged(_Said(self.mode, self.fed, _words(error)))

    def agree(self, plan: Any, started: dict[str, Any], seed: tuple[int, int, str] | None = None,
              settings: Any = None) -> None:
        """See, before anything runs, that all ranks have made the same plan from the same parameters.

        Args:
            plan: with a `fingerprint`.
            started, seed, settings: as of `_Said`.

        Raises:
            RuntimeMismatchError: on every rank alike, naming the ranks that differ and in what.
        """
        everyone = _exchanged(_Said(self.mode, self.fed, None, plan.fingerprint, settings, started, seed))
        first = everyone[0]
        _alike(everyone, "program", "have planned another program than rank 0", "marks and settings")
        settled = _others(everyone, "settings")
        if settled:
            raise RuntimeMismatchError(
                f"ranks {settled} have other settings than rank 0: {everyone[settled[0]].settings} against "
                f"{first.settings}", legal="the same comm_fusion and parameter_broadcast on every rank")
        seeds = _others(everyone, "seed")
        if seeds:
            raise RuntimeMismatchError(
                f"ranks {seeds} would draw other random numbers than rank 0: seed, calls so far and setting are "
                f"{everyone[seeds[0]].seed} against {first.seed}",
                legal="torch.manual_seed with the same number on every rank, and the same calls and setting")
        for name, value in first.started.items():
            other = [r for r, e in enumerate(everyone) if not _same(e.started.get(name), value)]
            if other:
                raise RuntimeMismatchError(
                    f"the parameter {name!r} starts from other values on ranks {other} than on rank 0",
                    legal="the same seed on every rank before the model is built")


def _exchanged(mine: _Said) -> list[_Said]:
    """What every rank says, by rank.

    Raises:
        RuntimeMismatchError: ranks in different modes, with different inputs, or some of which failed.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    first = everyone[0]
    modes = _others(everyone, "mode")
    if modes:
        raise RuntimeMismatchError(f"ranks {modes} plan in another parallel_mode than rank 0: "
                                   f"{everyone[modes[0]].mode} against {first.mode}",
                                   legal="the same parallel_mode on every rank")
    inputs = [r for r, other in enumerate(everyone) if other.fed != first.fed and other.fed and first.fed]
    if inputs:
        raise RuntimeMismatchError(
            f"ranks {inputs} feed other inputs than rank 0: {everyone[inputs[0]].fed} against {first.fed} "
            "(whole batch)",
            legal="the same shapes and types on every rank")
    failures = [r for r, other in enumerate(everyone) if other.failed]
    if failures and len(failures) < len(everyone):
        raise RuntimeMismatchError(
            f"ranks {failures} cannot plan what the others can: {everyone[failures[0]].failed}",
            legal="the same model, marks and settings on every rank")
    return everyone


def _others(everyone: list[_Said], name: str) -> list[int]:
    """The ranks that say something else than rank 0."""
    return [r for r, other in enumerate(everyone) if getattr(other, name) != getattr(everyone[0], name)]


def _alike(everyone: list[_Said], name: str, message: str, of: str) -> None:
    other = _others(everyone, name)
    if other:
        raise RuntimeMismatchError(f"ranks {other} {message}", legal=f"the same model, {of} on every rank")


def _from_first(mine: Handed | Exception | None) -> Any:
    """What rank 0 gives, on every rank."""
    held = [mine]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _portable(error: Exception) -> Exception:
    """An error as it can be sent: itself, or what it says."""
    if isinstance(error, ShardwrightError):
        strategy = error.strategy if error.strategy is None or isinstance(error.strategy, str) else repr(error.strategy)
        return type(error)(error.message, operator=error.operator, source=error.source, strategy=strategy,
                           legal=error.legal)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever an error of another library holds
        return RuntimeError(_words(error))
    return error


def _same(a: Any, b: Any) -> bool:
    return a == b or (a is not None and a != a and b != b)

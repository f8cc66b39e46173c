"""Agreement of all ranks: on one plan before anything runs, and on one program in each call; or one error on all ranks.

1. Planning (`Agreement`).

    every rank:   capture ── plan ──────────────────────────── agree
    a search:     capture ── meet ── rank 0 searches ── hand ── agree

Planning by rules alone is done by each rank for itself, and compared afterwards. A search is done once, by rank 0: it
takes long, and it compares figures that machines may compute differently, so that each rank could find another plan
of nearly the same cost. The other ranks take rank 0's decisions, or its error.

To meet and to agree, every rank sends a message to all others at once. A rank that has failed in between sends its
failure instead (`Agreement.missed`), at whichever of the two the others are: no rank waits for one that has given up.

2. Calls (`Steps`). Two programs that differ send different messages in a different order; ranks that run one each
   hang, or end deep inside a collective. Therefore a rank meets the others before it runs something other than in its
   last call:

    call n runs the program of call n-1    nothing is sent: two numbers are compared
    another program, or planning           meet: (n, program) is counted in the store until all have come

Proof by induction: at a meeting all ranks agree on (n, program), and until the next meeting each repeats its program.
Let one rank turn to another program at call n, and another rank not. The first waits at the meeting, outside of any
collective, and no rank waits for it by mistake: nothing of call n has been computed from it. After a look it asks for
the positions of the others (`watchdog.Peers`). A rank that has begun call n, or is at another meeting, has not come
and never will: this is the error, on every rank.

A program is identified by the number of its planning, which all ranks did together and alike. Calls of one program
are distinguished by whether a gradient is recorded, and by the number of such calls since the last backward (`MOST` at
most): a rank that makes a second forward waits at its call, and not in the middle of the others' backward. The others
wait in that backward for this rank, which is at the start of its next call and never comes: this is an error, too, as
soon as the positions are known. A program without any collective, as an evaluation in data_parallel, is not counted:
ranks may make different numbers of such calls.

A repeated call costs 0.4 µs; a meeting of four Gloo processes 0.4 ms (measured: benchmarks/README.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist

from ...errors import RuntimeMismatchError
from ...graph import Graph
from ...partition.local_program import Decisions, LocalOp, PortableDecisions, graph_digest
from ...pipeline.pipeline_plan import PipelinePlan
from ...sharded_plan import Plan
from .rank_messages import error_as_json, error_of, exchanged, from_first
from .rank_positions import Seen, WaitPoint, explaining, position, spelled, waiting
from .watchdog import Peers, peers

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Agreement", "Steps", "begin_planning", "begin_refused", "counted"]

#: Shape and dtype of each input of the whole batch.
InputSignature = list[tuple[tuple[int, ...], str]]


Found = TypeVar("Found", bound="Portable")


class Portable(Protocol):
    """A result that one rank hands to others: it has a form that `json_values` takes."""

    def encode(self) -> dict[str, object]:
        """The result's form."""
        ...

    @classmethod
    def read(cls, encoded: dict[str, object]) -> Self:
        """The result of the form."""
        ...


@dataclass(frozen=True)
class _Statement:
    """The message of a rank about itself.

    Attributes:
        mode: its parallel mode.
        signature: shape and dtype of each input of the whole batch.
        failed: the error of its planning, in words; None where it has not failed.
        program: the fingerprint of its plan, or before a search of its graph.
        settings: other settings that must be equal, as `_spelt`.
        started: a fingerprint of the values of each parameter.
        seed: the program's seed, the number of calls that have drawn before, and the setting `random`.
        data: a digest of the values that it feeds.
    """

    mode: str
    signature: InputSignature
    failed: str | None
    program: str | None = None
    settings: str = ""
    started: dict[str, object] = field(default_factory=dict)
    seed: tuple[int, int, str] | None = None
    data: str = ""


class Agreement:
    """One planning of one model, on this rank.

    Args:
        mode: the parallel mode.
        signature: shape and dtype of each input of the whole batch; may be filled in until the first message is sent.
    """

    def __init__(self, mode: str, signature: InputSignature) -> None:
        self.mode, self.signature = mode, signature
        self._known = False  # True where all ranks are about to raise the same error

    def search(
        self,
        graph: Graph,
        settings: object,
        find: Callable[[], Decisions],
        take: Callable[[PortableDecisions], Decisions],
    ) -> Decisions:
        """The decisions that rank 0 finds, on every rank. There may be several searches, the same ones on every rank.

        Args:
            graph: the captured graph.
            settings: all that decides besides the graph.
            find: searches; called on rank 0 alone.
            take: turns the portable decisions into those of another rank.

        Raises:
            RuntimeMismatchError: on every rank alike: ranks would search for something else, or cannot plan.
            Exception: the error of rank 0's search, on every rank.
        """
        found: list[Decisions] = []

        def portable() -> PortableDecisions:
            found.append(find())
            return PortableDecisions.of(found[0])

        from_first = self.first(PortableDecisions, graph, settings, portable)
        return found[0] if found else take(from_first)

    def first(self, kind: type[Found], graph: Graph, settings: object, find: Callable[[], Found]) -> Found:
        """The result of `find` on rank 0, on every rank.

        Args:
            kind: the class of the result.
            graph: the captured graph.
            settings: all that decides besides the graph.
            find: called on rank 0 alone.

        Raises:
            RuntimeMismatchError, Exception: as `search`.
        """
        self._known = True
        everyone = _exchanged(_Statement(self.mode, self.signature, None, graph_digest(graph), _spelt(settings)))
        _alike(everyone, "program", "have captured another model than rank 0", "marks and inputs")
        _alike(everyone, "settings", "search with other settings than rank 0", "marks and settings")
        if dist.get_rank():
            with explaining():
                first = from_first(None)
            if "error" in first:
                raise error_of(first["error"])
            self._known = False
            return kind.read(first["found"])
        try:
            found = find()
        except Exception as error:  # of any kind: the other ranks raise it too
            from_first({"error": error_as_json(error)})
            raise
        from_first({"found": found.encode()})
        self._known = False
        return found

    def missed(self, error: Exception) -> None:
        """Tell the others the error that keeps this rank from planning, before it is raised.

        Raises:
            RuntimeMismatchError: on every rank alike, where others can plan.
        """
        if not self._known:
            _exchanged(_Statement(self.mode, self.signature, _error_text(error)))

    def agree(
        self,
        plan: Plan | PipelinePlan,
        started: dict[str, object],
        seed: tuple[int, int, str] | None = None,
        settings: object = None,
        data: str = "",
    ) -> list[str]:
        """Check, before anything runs, that all ranks have made the same plan from the same parameters.

        Args:
            plan: with a `fingerprint`.
            started, seed, settings, data: as in `_Statement`.

        Returns:
            The `data` of each rank.

        Raises:
            RuntimeMismatchError: on every rank alike, with the ranks that differ and the difference.
        """
        mine = _Statement(self.mode, self.signature, None, plan.fingerprint, _spelt(settings), started, seed, data)
        everyone = _exchanged(mine)
        first = everyone[0]
        _alike(everyone, "program", "have planned another program than rank 0", "marks and settings")
        settled = _differing(everyone, "settings")
        if settled:
            raise RuntimeMismatchError(
                f"ranks {settled} have other settings than rank 0: {everyone[settled[0]].settings} against "
                f"{first.settings}",
                legal="the same comm_fusion and parameter_broadcast on every rank",
            )
        seeds = _differing(everyone, "seed")
        if seeds:
            raise RuntimeMismatchError(
                f"ranks {seeds} would draw other random numbers than rank 0: seed, calls so far and setting are "
                f"{everyone[seeds[0]].seed} against {first.seed}",
                legal="torch.manual_seed with the same number on every rank, and the same calls and setting",
            )
        for name, value in first.started.items():
            other = [r for r, e in enumerate(everyone) if not _same(e.started.get(name), value)]
            if other:
                raise RuntimeMismatchError(
                    f"the parameter {name!r} starts from other values on ranks {other} than on rank 0",
                    legal="torch.manual_seed with the same number on every rank before the model is built"
                    + (
                        f"; or sw.layerwise_parallel on {name!r}, where it is each rank's own slice"
                        if self.mode == "hybrid_parallel"
                        else ""
                    ),
                )
        return [statement.data for statement in everyone]


def _exchanged(mine: _Statement) -> list[_Statement]:
    """The messages of all ranks, by rank.

    Raises:
        RuntimeMismatchError: ranks have different modes or inputs, or some but not all ranks have failed.
    """
    with explaining():
        everyone = [_Statement(**statement) for statement in exchanged(vars(mine))]
    first = everyone[0]
    modes = _differing(everyone, "mode")
    if modes:
        raise RuntimeMismatchError(
            f"ranks {modes} plan in another parallel_mode than rank 0: {everyone[modes[0]].mode} against {first.mode}",
            legal="the same parallel_mode on every rank",
        )
    inputs = [
        r
        for r, other in enumerate(everyone)
        if other.signature != first.signature and other.signature and first.signature
    ]
    if inputs:
        raise RuntimeMismatchError(
            f"ranks {inputs} feed other inputs than rank 0: {everyone[inputs[0]].signature} against {first.signature} "
            "(whole batch)",
            legal="the same shapes and types on every rank",
        )
    failures = [r for r, other in enumerate(everyone) if other.failed]
    if failures and len(failures) < len(everyone):
        raise RuntimeMismatchError(
            f"ranks {failures} cannot plan what the others can: {everyone[failures[0]].failed}",
            legal="the same model, marks and settings on every rank",
        )
    return everyone


def _differing(everyone: list[_Statement], name: str) -> list[int]:
    """The ranks whose message differs from rank 0's in the attribute `name`."""
    return [r for r, other in enumerate(everyone) if getattr(other, name) != getattr(everyone[0], name)]


def _alike(everyone: list[_Statement], name: str, message: str, of: str) -> None:
    other = _differing(everyone, name)
    if other:
        raise RuntimeMismatchError(f"ranks {other} {message}", legal=f"the same model, {of} on every rank")


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _spelt(value: object) -> str:
    """A value in words that are the same on every rank that has an equal value: sets and dicts in order."""
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{f.name}={_spelt(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({inside})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_spelt(key)}: {_spelt(entry)}" for key, entry in value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_spelt, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_spelt, value)) + ")"
    return repr(value)


def _same(a: object, b: object) -> bool:
    return a == b or (a is not None and a != a and b != b)


# -- calls

#: A call: the number of its program, whether a gradient is recorded, the number of calls with a gradient since the last
#: backward.
Runs = tuple[int, bool, int]

_PLANNING: Runs = (0, False, 0)

#: Calls since the last backward that are told apart. A loop of more forwards, without a backward, meets no more.
MOST = 4


class Steps:
    """The calls of this rank.

    Args:
        ranks: the connection to the other ranks.
    """

    def __init__(self, ranks: Peers) -> None:
        self.ranks = ranks
        self._made = 0  # programs planned so far
        self._runs: Runs | None = None  # of the latest call
        self._forwards = 0  # calls with a gradient since the last backward
        self._fresh = False  # the program was planned in this call
        self._meetings = 0
        self._last = ""

    def plan(self, why: str = "") -> None:
        """Begin the planning of a model: a call of its own, until the program exists."""
        self._turn(_PLANNING, f"the planning of a model{': ' * bool(why)}{why}")

    def made(self) -> int:
        """The number of the program that all ranks have just planned."""
        self._made += 1
        self._runs, self._fresh = (self._made, torch.is_grad_enabled(), 0), True
        return self._made

    def begin(self, number: int, what: str, talks: bool) -> None:
        """Begin a call of a program; meet the other ranks where the program is not that of the latest call.

        Args:
            number: of the program.
            what: the program in words.
            talks: True where the program has collectives even if no gradient is recorded.

        Raises:
            RuntimeMismatchError: other ranks run something else in this call.
            StuckError: other ranks do not come to it.
        """
        grad = torch.is_grad_enabled()
        if self._fresh and self._runs is not None and self._runs[0] == number:
            self._fresh, position.program, self._forwards = False, what, 0
        elif grad or talks:
            if position.back:
                self._forwards = 0
            runs = (number, grad, min(self._forwards, MOST) if grad else 0)
            if self._runs == runs:
                position.call += 1
            else:
                count = f", call {self._forwards + 1} since the last backward" if self._forwards else ""
                self._turn(runs, f"{what}{count}" if grad else f"{what}, without gradients")
        else:
            return
        position.back = False
        self._forwards += grad

    def _turn(self, runs: Runs, what: str) -> None:
        """Change to another program than that of the latest call."""
        position.call += 1
        position.program = what
        self._runs, self._fresh = runs, False
        self._meetings += 1
        self._meet(f"{self._meetings}/{position.call}/{runs[0]}{'g' * runs[1]}{runs[2]}", what)

    def _meet(self, key: str, what: str) -> None:
        ranks = self.ranks
        with waiting(WaitPoint(f"the start of {what}", key=key)):
            if ranks.store.add(f"meet/{key}", 1) < ranks.world:
                ranks.wait(f"met/{key}", lambda seen: _mismatch(seen, ranks.rank) or self._missed(seen))
            else:
                ranks.store.set(f"met/{key}", "1")
                if self._last:  # all ranks have left it
                    for kind in ("meet", "met"):
                        ranks.store.delete_key(f"{kind}/{self._last}")
        self._last = key

    def _missed(self, seen: Mapping[int, Seen]) -> RuntimeMismatchError | None:
        """The error where others wait for this rank in the backward of its last call, which it has not made: it is at
        the start of another call."""
        rank, mine = self.ranks.rank, seen.get(self.ranks.rank)
        if mine is None or position.back or not self._forwards:
            return None
        late = {
            r: at
            for r, at in seen.items()
            if at.back and at.call == mine.call - 1 and rank in (at.ranks or range(self.ranks.world))
        }
        if not late:
            return None
        place = next(iter(late.values())).place.removesuffix(",")
        return RuntimeMismatchError(
            f"call {mine.call} of rank {rank} is {position.program}, without a backward of call {mine.call - 1}, in "
            f"which {spelled(late)} {'wait' if len(late) > 1 else 'waits'} for it at {place}",
            legal="on every rank as many calls of the model before each backward",
        )


def _mismatch(seen: Mapping[int, Seen], rank: int) -> RuntimeMismatchError | None:
    """The error where some ranks will never come to the meeting of `rank`, because they have begun its call with
    something else."""
    mine = seen.get(rank)
    if mine is None or not mine.key:
        return None
    if all(at.key == mine.key or (not at.key and at.call < mine.call) for at in seen.values()):
        return None
    groups: dict[tuple[int, str], list[int]] = {}
    for each, at in sorted(seen.items()):
        groups.setdefault((at.call, at.program), []).append(each)
    programs_text = "; ".join(
        f"call {call} of {spelled(rs)} is {program or 'none yet'}" for (call, program), rs in groups.items()
    )
    return RuntimeMismatchError(
        f"ranks do not call the same programs in the same order: {programs_text}",
        legal="as many calls of each model on every rank, in one order, with the same shapes",
    )


#: The calls that belong to the process group's peers: at most one entry.
_current: list[Steps] = []


def _steps() -> Steps | None:
    ranks = peers()
    if ranks is None:
        return None
    if not _current or _current[0].ranks is not ranks:
        _current[:] = [Steps(ranks)]
    return _current[0]


def begin_planning(why: str = "") -> None:
    """Note that this rank is about to plan a model, which all ranks do together.

    Args:
        why: what has changed since the model was planned before.

    Raises:
        RuntimeMismatchError, StuckError: as `Steps.begin`.
    """
    steps = _steps()
    if steps is not None:
        steps.plan(why)


def begin_refused(mode: str, error: Exception) -> None:
    """Tell the other ranks, in place of a call, the error that keeps this rank from it, before it is raised. Where
    ranks are not watched, nothing is told.

    Args:
        mode: the parallel mode.

    Raises:
        RuntimeMismatchError: on every rank, where the others can make the call.
        StuckError: as `Steps.begin`.
    """
    if _steps() is not None:
        begin_planning(str(error).partition("\n")[0])
        Agreement(mode, []).missed(error)


def counted(plan: Plan | PipelinePlan) -> Callable[[], None] | None:
    """The function that begins each call of a program that all ranks have just planned; None where ranks are not
    watched."""
    steps = _steps()
    if steps is None:
        return None
    number = steps.made()
    what = f"program {number} ({_call_text(plan)})"
    talks = (
        isinstance(plan, PipelinePlan)
        or plan.own is not None
        or any(not isinstance(i, LocalOp) and i.forward.collectives for i in plan.program.instructions)
    )
    return lambda: steps.begin(number, what, talks)


def _call_text(plan: Plan | PipelinePlan) -> str:
    signature = ", ".join(f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for v in plan.graph.inputs)
    return f"plan {plan.fingerprint} of inputs {signature}"

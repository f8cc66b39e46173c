"""The programs of a wrapped model: one for each kind of inputs and state of the model.

    kind of inputs    structure, shapes, dtypes, autocast, the function that is called: a key (`_found`)
    state             guards (`capture.guards`): programs of one kind differ in the state that they were captured in

A further program is announced by a `RecaptureWarning` (`_announce`). The least recently used one is dropped beyond
``max_programs``.

Example: calls with x [32, 16], x [64, 16] and x [32, 16] build 2 programs. After ``net.beta = 5.0``, which the forward
reads, the next call builds a third one; with ``max_programs=2`` the one that was used longest ago is dropped.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

import torch

from ..capture.source_lines import stack_level
from ..runtime.pipeline_step import PipelineProgram
from ..runtime.step_program import StepProgram
from .call_planning import CallPlanning

if TYPE_CHECKING:
    from .setting_methods import Feed, ProgramKey

__all__ = ["ProgramCache", "RecaptureWarning"]


class RecaptureWarning(UserWarning):
    """Warned when a further program is built: the inputs have other shapes, or something that the forward reads was
    changed."""


#: A change of a number, as guards say it.
_NUMBER = re.compile(r"(.*) was (?:-?[\d.]+(?:e[-+]?\d+)?|-?inf|nan) and is (?:-?[\d.]+(?:e[-+]?\d+)?|-?inf|nan)")

#: The change of one number whose warning advises a tensor in its place.
ADVISED = 3


class ProgramCache(CallPlanning):
    """The programs of a wrapped model, as a base class: `AutoParallel` has the attributes that are read here."""

    def _found(self, feed: Feed) -> StepProgram | PipelineProgram | None:
        """The program whose guards hold, of those built for such inputs; None: no guards hold.

        Programs of equal inputs differ in the state of the model that they were captured in.

        Args:
            feed: the inputs' structure, the type of autocast and the function that is called, and the inputs' shapes
                and dtypes.
        """
        states = self._states.get(feed)
        if states is None:
            return None
        for i, guards in enumerate(states):
            if guards.hold():
                if i:
                    states.insert(0, states.pop(i))
                key = (*feed, guards)
                self._programs.move_to_end(key)
                return self._programs[key]
        return None

    def _keep(self, feed: Feed, program: StepProgram | PipelineProgram) -> None:
        """Keep a new program, and load the values of a checkpoint that waited for the first plan."""
        self._programs[(*feed, program.guards)] = program
        self._states.setdefault(feed, []).insert(0, program.guards)
        settles = bool(self._awaited) or len(self._programs) == 1
        try:
            while self._awaited:
                self._awaited[0]()
                del self._awaited[0]
            if settles:  # values were loaded, or the first program has placed the parameters
                program.guards.settle()
        except BaseException:  # of any kind: raised again
            self._forget((*feed, program.guards))  # no call may run without the values of the checkpoint
            raise
        while len(self._programs) > self._running.max_programs:
            self._forget(next(iter(self._programs)))

    def _forget(self, key: ProgramKey) -> None:
        """Drop a program."""
        spec, called, signature, guards = key
        feed = spec, called, signature
        del self._programs[key]
        states = self._states[feed]
        states.remove(guards)
        if not states:
            del self._states[feed]

    def _announce(self, feed: Feed) -> str:
        """Warn that the model is captured anew: once for inputs of other shapes, and once for each change of its
        state. The change of state is returned; "": none."""
        if not self._programs:
            return ""
        same_entry = [key for key in self._programs if key[1][1] is self._entry]
        now = _shapes(feed)
        before = next((_shapes(key) for key in reversed(same_entry) if _shapes(key) != now and key[3].hold()), None)
        if before is not None:
            if not self._warned and not _differing(before, now) <= self._varying():
                self._warned = True
                warnings.warn(
                    f"inputs of shapes {now} after {before}: a program is planned for each set of shapes; further ones "
                    "are not announced. AutoParallel(…, varying=(0, 1)) says which dims vary",
                    RecaptureWarning,
                    stacklevel=stack_level(),
                )
            return ""
        states = self._states.get(feed) or [key[3] for key in reversed(self._programs)]
        change = states[0].change()
        if change is not None and not any(guards.only_mode_changed() for guards in states):
            advice = self._advice(change)
            if advice is not None:
                warnings.warn(
                    f"{change}: the model is captured and planned anew{advice}",
                    RecaptureWarning,
                    stacklevel=stack_level(),
                )
        return change or ""

    def _advice(self, change: str) -> str | None:
        """The advice of a warning about a number that changes again and again; "": none, None: no warning."""
        number = _NUMBER.fullmatch(change)
        if number is None:
            return ""
        self._number_changes[number[1]] += 1
        times = self._number_changes[number[1]]
        if times < ADVISED:
            return ""
        if times > ADVISED:
            return None
        return (
            f", for the {ADVISED}rd time. Where it changes at each step, a registered buffer, or a tensor as an input, "
            f"costs no plan: operators read it at each call. Further changes of {number[1]} are not announced"
        )


def _differing(before: list[tuple[int, ...]], now: list[tuple[int, ...]]) -> set[int]:
    """The dims in which the shapes of two calls differ; -1 where the calls have other tensors."""
    if [len(shape) for shape in before] != [len(shape) for shape in now]:
        return {-1}
    return {d for a, b in zip(before, now) for d, (x, y) in enumerate(zip(a, b)) if x != y}


def _shapes(key: Feed | ProgramKey) -> list[tuple[int, ...]]:
    return [tuple(entry[0]) for entry in key[2] if isinstance(entry[0], torch.Size)]

"""The errors that a user can cause: the operator, the source line, the mistake, and the legal alternative.

Every error that a user can cause is a `ShardwrightError`. It is raised while planning, from global shapes and the
plan alone, so that every rank raises the same one; nothing has run or been sent by then.

Example::

    LayoutError("dim 0 of size 10 is cut 4 ways", operator="matmul1", source="train.py:41", legal="1, 2, 5 or 10 ways")

    matmul1 (train.py:41): dim 0 of size 10 is cut 4 ways
      legal: 1, 2, 5 or 10 ways
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])

__all__ = [
    "PACKAGE_FOLDER",
    "CaptureError",
    "CheckpointError",
    "LayoutError",
    "MissingRuleError",
    "PlanError",
    "RuleError",
    "RuntimeMismatchError",
    "SettingError",
    "ShardwrightError",
    "StrategyError",
    "StuckError",
    "TorchVersionError",
    "did_you_mean",
    "known_keywords",
    "place_text",
    "shown",
]

#: The folder of this package, with a separator at its end. Frames of files in it are not the user's.
PACKAGE_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


#: Characters of a part of a message, at most.
_LONGEST = 4000


def place_text(file: str, line: int) -> str:
    """A line of the user's code, as ``train.py:41``; of a notebook as ``In[3]:6``, by the number beside the cell."""
    notebook = sys.modules.get("IPython")
    shell = None if notebook is None else notebook.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(file)
    return f"{os.path.basename(file) if cell is None else cell[1]}:{line}"


def shown(value: object) -> str:
    """A value of a file or a user, for a message: its repr, cut after 120 characters."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _cut(text: str) -> str:
    """A text of a message that someone can read: a file may hold anything."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


class ShardwrightError(Exception):
    """A mistake in a model, a strategy or a setting.

    Args:
        message: the mistake, with the sizes involved.
        operator: the operator's name as the user knows it (``matmul1``), if the error is about one.
        source: ``file.py:41``, the line that calls the operator or makes the mark.
        strategy: the requested strategy.
        legal: the legal alternative.
    """

    def __init__(
        self,
        message: str,
        *,
        operator: str | None = None,
        source: str | None = None,
        strategy: object | None = None,
        legal: str | None = None,
    ) -> None:
        message, legal = _cut(message), legal and _cut(legal)
        self.message, self.operator, self.source = message, operator, source
        self.strategy, self.legal = strategy, legal
        head = operator or ""
        if source:
            head = f"{head} ({source})" if head else source
        lines = [f"{head}: {message}" if head else message]
        if strategy is not None:
            lines.append(f"  strategy: {_cut(strategy if isinstance(strategy, str) else repr(strategy))}")
        if legal:
            lines.append(f"  legal: {legal}")
        super().__init__("\n".join(lines))

    def located(
        self, *, operator: str | None = None, source: str | None = None, strategy: object | None = None
    ) -> Self:
        """The same error with operator, source and strategy filled in where it had none."""
        return type(self)(
            self.message,
            operator=self.operator or operator,
            source=self.source or source,
            strategy=self.strategy if self.strategy is not None else strategy,
            legal=self.legal,
        )


class LayoutError(ShardwrightError):
    """An impossible Layout: axes that repeat, an unknown name, a wrong device count, a cut that does not divide."""


class StrategyError(ShardwrightError):
    """A strategy that the operator cannot follow."""


class RuleError(ShardwrightError):
    """A notation string that cannot be read, or that does not fit the operator it was given for."""


class MissingRuleError(RuleError):
    """An operator that has no rule."""


class CaptureError(ShardwrightError):
    """A model that cannot be captured as a graph."""


class PlanError(ShardwrightError):
    """Decisions that contradict one another, such as one parameter with two layouts."""


class SettingError(ShardwrightError):
    """A setting of the wrapper or the runtime that is unknown, late, or does not fit."""


class RuntimeMismatchError(ShardwrightError):
    """Ranks that are about to run different programs."""


class CheckpointError(ShardwrightError):
    """A checkpoint that cannot be written, is damaged, or is not of this model; its `source` is the file or folder."""


class StuckError(ShardwrightError):
    """Ranks wait for a rank that does not come."""


class TorchVersionError(ShardwrightError):
    """The installed version of torch lacks a name that a feature needs."""


# -- words of other systems --------------------------------------------------------------------------------------------


def did_you_mean(word: object, known: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """The legal words, with the one that was probably meant in front: ``"semi_auto"; or one of …``.

    Args:
        word: the unknown word.
        known: the legal words.
        elsewhere: words of other systems, in lower case with underscores -> the text of what is meant here.
    """
    known = tuple(known)
    spelled = str(word).lower().replace("-", "_").replace(" ", "_")
    meant = elsewhere.get(spelled)
    if meant is None:
        near = spelled if spelled in known else next(iter(difflib.get_close_matches(spelled, known, 1, 0.75)), None)
        meant = None if near is None else f'"{near}"'
    every = ", ".join(known)
    return every if meant is None else f"did you mean {meant}? All: {every}"


def known_keywords(elsewhere: Mapping[str, str]) -> Callable[[FunctionT], FunctionT]:
    """A decorator: an unknown keyword argument is a `SettingError` that says where the thing is set.

    Args:
        elsewhere: words of other systems -> the text of what is meant here.
    """

    def decorated(function: FunctionT) -> FunctionT:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        title = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            for name in kwargs:
                if name not in names:
                    near = [f"{word}=" for word in difflib.get_close_matches(name, names, 1, 0.7)]
                    meant = elsewhere.get(name) or next(iter(near), None)
                    raise SettingError(
                        f"{title} has no argument {name!r}",
                        strategy=f"{name}={kwargs[name]!r}"[:200],
                        legal=f"did you mean {meant}?" if meant else ", ".join(names),
                    )
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]  # the signature is that of the function

    return decorated

"""The errors that a user can cause: the operator, the source line, the mistake, and the legal alternative.

Every error that a user can cause is a `ShardwrightError`. It is raised while planning, from global shapes and the
plan alone, so that every rank raises the same one; nothing has run or been sent by then.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

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
    "shown",
]

#: The folder of this package, with a separator at its end. Frames of files in it are not the user's.
PACKAGE_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


#: Characters of a part of a message, at most.
_LONGEST = 4000


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

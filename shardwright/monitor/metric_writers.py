"""Writers of figures besides lines: TensorBoard and W&B, each by its own.

    TensorBoard    add_scalar(tag, value, step)
    W&B            run.log({tag: value, …, "step": step}), with "step" as the x-axis of each tag. W&B's own count of
                   steps is left alone: a line may be written later than a step that the user logs

A writer that the user has made stays open; one that a monitor has opened is closed with the monitor.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import SettingError

__all__ = ["MetricWriter", "check_tensorboard", "check_wandb", "tensorboard_writer", "wandb_writer"]


class MetricWriter(ABC):
    """A writer of figures."""

    @abstractmethod
    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Write the figures of a step, by tag."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Bring to disk what is left, and close what the monitor has opened."""


class _TensorBoard(MetricWriter):
    def __init__(self, writer: Any, ours: bool) -> None:
        self._writer, self._ours = writer, ours

    def write(self, figures: Mapping[str, float], step: int) -> None:
        for tag, value in figures.items():
            self._writer.add_scalar(tag, value, step)

    def close(self, failed: bool) -> None:
        if self._ours:
            self._writer.close()
        else:
            self._writer.flush()


class _WandB(MetricWriter):
    def __init__(self, run: Any, ours: bool) -> None:
        self._run, self._ours = run, ours
        self._defined: set[str] = set()

    def write(self, figures: Mapping[str, float], step: int) -> None:
        for tag in figures:
            if tag not in self._defined:
                self._run.define_metric(tag, step_metric="step")
                self._defined.add(tag)
        self._run.log({**figures, "step": step})

    def close(self, failed: bool) -> None:
        if self._ours:
            self._run.finish(exit_code=int(failed))


def check_tensorboard(setting: Any) -> None:
    """Check the argument ``tensorboard=`` of a monitor.

    Raises:
        SettingError: neither a folder nor a writer.
    """
    if setting is not None and not isinstance(setting, (str, os.PathLike)) and not hasattr(setting, "add_scalar"):
        raise SettingError(
            f"Monitor(tensorboard={setting!r})", legal="a folder, or a SummaryWriter of torch.utils.tensorboard"
        )


def check_wandb(setting: Any) -> None:
    """Check the argument ``wandb=`` of a monitor.

    Raises:
        SettingError: neither a run, nor arguments for one, nor True.
    """
    plain = setting is None or isinstance(setting, (bool, Mapping))
    if not plain and not (hasattr(setting, "log") and hasattr(setting, "define_metric")):
        raise SettingError(
            f"Monitor(wandb={setting!r})",
            legal='True, a dict of arguments of wandb.init such as {"project": "gpt"}, or a run of W&B',
        )


def tensorboard_writer(setting: str | Path | Any, say: Callable[[str], None]) -> MetricWriter | None:
    """The writer of a folder, or of a SummaryWriter.

    Args:
        setting: one of them.
        say: takes a line where TensorBoard is not installed; the result is None then.
    """
    if not isinstance(setting, (str, os.PathLike)):
        return _TensorBoard(setting, False)
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  TensorBoard may not be installed
    except ImportError:
        say("TensorBoard is not installed (pip install tensorboard): nothing is written for it")
        return None
    return _TensorBoard(SummaryWriter(str(setting)), True)


def wandb_writer(setting: bool | Mapping[str, Any] | Any, say: Callable[[str], None]) -> MetricWriter | None:
    """The writer of a run of W&B.

    Args:
        setting: the run; True: a new one; a dict: a new one with these arguments of ``wandb.init``.
        say: takes a line where W&B is not installed; the result is None then.
    """
    if not isinstance(setting, (bool, Mapping)):
        return _WandB(setting, False)
    try:
        import wandb  # noqa: PLC0415  W&B may not be installed
    except ImportError:
        say("W&B is not installed (pip install wandb): nothing is written for it")
        return None
    return _WandB(wandb.init(**(setting if isinstance(setting, Mapping) else {})), True)

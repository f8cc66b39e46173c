"""`Monitor`: a line about the training every few steps, from rank 0; and TensorBoard, where it is installed.

    step 120  loss 2.3456  8.31 steps/s  266 samples/s  0.124 TFLOP/s

    loss        the mean since the last line
    steps/s     steps since the last line over the time since then; the step that plans the model is in no line's time
    TFLOP/s     steps/s · the model's work in a step: the multiplications and additions of every operator on the whole
                batch, forward and backward, as on one device (`cost.primitives.work_of`); replicated or recomputed
                operators add none

The monitor does not wait for the loss: on an accelerator its mean is copied beside the computation, and the line is
written in the first step after the copy has finished.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from .accelerator_api import on_host_soon
from .cost.primitive_costs import work_of
from .errors import SettingError
from .process import rank

__all__ = ["Monitor"]


@dataclass
class _Line:
    """A line that waits for its loss."""

    step: int
    loss: Tensor | None
    rates: dict[str, float]
    others: dict[str, float] = field(default_factory=dict)
    ready: Any = None  # an event of the accelerator, or None


class Monitor:
    """Prints a line every few steps. Call `step` once a step, on every rank or on rank 0 alone. A ``with`` block
    closes it.

    Args:
        model: an `AutoParallel`, whose work in a step is shown if it is known; None: it is not shown.
        every: the number of steps from line to line.
        tensorboard: a folder for TensorBoard's files; None: none. Where TensorBoard is not installed, a line says so.
        samples, tokens: their numbers in the whole batch of a step; None: not shown.
        out: the file of the lines; None: standard output.

    Raises:
        SettingError: an `every` that is no whole number of at least 1.

    Example:
        >>> with sw.Monitor(model, every=10) as monitor:
        ...     for _ in range(3):
        ...         loss = model(x, y)
        ...         monitor.step(loss)
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        every: int = 10,
        tensorboard: str | Path | None = None,
        *,
        samples: float | None = None,
        tokens: float | None = None,
        out: TextIO | None = None,
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise SettingError(f"Monitor(every={every!r})", legal="a whole number of at least 1")
        self._model, self._every, self._samples, self._tokens, self._out = model, every, samples, tokens, out
        self._speaks = rank() == 0
        self._writer = self._open(tensorboard) if tensorboard is not None and self._speaks else None
        self._sum: Tensor | None = None
        self._count = 0  # the number of losses in the sum
        self._next = 0  # the number of the next step, where none is given
        self._steps = 0
        self._since: float | None = None  # None: before the first step
        self._waiting: list[_Line] = []
        self._work: float | None = None

    def step(self, loss: Tensor | float | None = None, step: int | None = None, **scalars: float) -> None:
        """Note that a step is done, and write the lines that are due.

        Args:
            loss: its loss; the monitor does not wait for it.
            step: its number; None: one more than the last.
            scalars: further numbers of this step for the line and TensorBoard (``lr=…``).
        """
        if not self._speaks:
            return
        number = self._next if step is None else step
        self._next = number + 1
        if loss is not None:
            loss = loss.detach().float() if isinstance(loss, Tensor) else torch.tensor(float(loss))
            self._sum = loss.clone() if self._sum is None else self._sum.add_(loss)
            self._count += 1
        now = time.perf_counter()
        if self._since is None:
            self._since = now  # the first step included planning, which counts in no rate
        else:
            self._steps += 1
        if (number + 1) % self._every == 0:
            self._waiting.append(self._line(number, now, scalars))
            self._sum, self._count, self._steps, self._since = None, 0, 0, now
        self._write()

    def close(self) -> None:
        """Write the lines that are left, waiting for their losses."""
        self._write(wait=True)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _line(self, step: int, now: float, scalars: dict[str, float]) -> _Line:
        loss, ready = (None, None) if self._sum is None else on_host_soon(self._sum / self._count)
        return _Line(step, loss, self._rates(now), scalars, ready)

    def _rates(self, now: float) -> dict[str, float]:
        if not self._steps or self._since is None:
            return {}
        each = self._steps / (now - self._since)
        rates = {"steps/s": each}
        if self._samples is not None:
            rates["samples/s"] = each * self._samples
        if self._tokens is not None:
            rates["tokens/s"] = each * self._tokens
        work = self._known_work()
        if work:
            rates["TFLOP/s"] = each * work / 1e12
        return rates

    def _known_work(self) -> float:
        """Multiplications and additions of a step of the model; 0: not known."""
        if self._work is None:
            programs = getattr(self._model, "_programs", None)
            if not programs:
                return 0.0
            plan: Any = getattr(self._model, "plan", None)
            flops = sum(sum(work_of(op).flops) for op in plan.graph.ops)
            self._work = flops * getattr(plan, "micro_batches", 1)
        return self._work

    def _write(self, wait: bool = False) -> None:
        while self._waiting:
            line = self._waiting[0]
            if line.ready is not None and not line.ready.query():
                if not wait and len(self._waiting) == 1:
                    return
                line.ready.synchronize()
            self._tell(self._waiting.pop(0))

    def _tell(self, line: _Line) -> None:
        shown = {} if line.loss is None else {"loss": float(line.loss)}
        shown |= line.others
        words = [
            f"step {line.step}",
            *(f"{name} {value:.6g}" for name, value in shown.items()),
            *(f"{value:{',.3g' if value < 1000 else ',.0f'}} {name}" for name, value in line.rates.items()),
        ]
        print("  ".join(words), file=self._out or sys.stdout, flush=True)
        if self._writer is not None:
            for name, value in shown.items():
                self._writer.add_scalar(name, value, line.step)
            for name, value in line.rates.items():
                self._writer.add_scalar(f"throughput/{name.replace('/', '_per_')}", value, line.step)

    def _open(self, folder: str | Path) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  TensorBoard may not be installed
        except ImportError:
            print(
                "TensorBoard is not installed (pip install tensorboard): the lines here are all that is written",
                file=self._out or sys.stdout,
                flush=True,
            )
            return None
        return SummaryWriter(str(folder))

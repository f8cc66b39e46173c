"""`Monitor`: a line about the training every few steps; and TensorBoard and W&B, by their own writers.

step_monitor         Monitor
line_figures         what a line says of a step: rates, share of peak, times, memory
metric_writers       TensorBoard and W&B
"""

from __future__ import annotations

from .step_monitor import Monitor

__all__ = ["Monitor"]

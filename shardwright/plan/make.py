"""Making a plan from a model: capture, decide, check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..capture import MarkUse, capture
from ..errors import SettingError
from ..graph import Graph
from ..layout import Layout
from .decision import feeding
from .plan import Plan
from .semi_auto import data_parallel, semi_auto

__all__ = ["MODES", "make_plan", "plan"]

#: Mode -> the planner: (graph, devices, fed, on_missing_rule=, stored=) -> (decisions, which dims carry the batch).
PLANNERS = {"data_parallel": data_parallel, "semi_auto": semi_auto}

#: All parallel modes.
MODES = ("stand_alone", *PLANNERS)


def make_plan(graph: Graph, devices: int, parallel_mode: str, dataset_strategy: Any, *,
              on_missing_rule: str = "error", stored: dict[str, Layout] | None = None) -> Plan:
    """Plan a captured model; every error that a strategy can cause is raised here.

    Raises:
        ShardwrightError: a strategy or a setting that does not fit, with the operator and a legal choice.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise SettingError(f"a plan is for a whole number of devices, not {devices!r}", legal="devices=8")
    if parallel_mode not in MODES:
        raise SettingError(f"unknown parallel_mode {parallel_mode!r}", legal=", ".join(MODES))
    if on_missing_rule not in ("error", "replicate"):
        raise SettingError(f"unknown on_missing_rule {on_missing_rule!r}", legal='"error" or "replicate"')
    if parallel_mode == "stand_alone":
        fed = feeding(graph, 1, "full_batch")
        made = Plan(graph, 1, "stand_alone", fed, *data_parallel(graph, 1, fed, on_missing_rule="replicate"))
        made.routed
        return made
    fed = feeding(graph, devices, dataset_strategy)
    decisions, carries = PLANNERS[parallel_mode](graph, devices, fed, on_missing_rule=on_missing_rule, stored=stored)
    made = Plan(graph, devices, parallel_mode, fed, decisions, carries, stored)
    made.routed  # whatever cannot be routed is said now
    return made


def plan(net: nn.Module, inputs: tuple, loss_fn: Any = None, targets: Any = None, *, parallel_mode: str = "semi_auto",
         devices: int = 8, dataset_strategy: Any = "full_batch", on_missing_rule: str = "error",
         marks: Mapping[str, Any] | None = None, kwargs: dict[str, Any] | None = None) -> Plan:
    """Plan a model without running it: no process group, no devices, nothing allocated.

    Args:
        net: the model; its parameters may be real or meta.
        inputs: the model's inputs, a tuple of tensors of **global** shapes; real, fake or meta.
        loss_fn, targets: the loss, called as ``loss_fn(net(*inputs), targets)``; None: the forward alone.
        parallel_mode: one of `MODES`.
        devices: how many devices.
        dataset_strategy: "full_batch", "data_parallel", or a tuple with one entry per tensor input.
        on_missing_rule: "error", or "replicate": operators without a rule run whole, and the plan says so.
        marks: in_strategies by the name of the operator (as `Plan.operators` has it), over what the model carries.
        kwargs: keyword inputs of the model.

    Returns:
        The plan.

    Raises:
        ShardwrightError: what does not fit, with the operator, the line, the sizes and a legal choice.
    """
    if not isinstance(net, nn.Module):
        raise SettingError(f"{net!r} is not an nn.Module", legal="a model, and its inputs as a tuple")
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if loss_fn is not None:
        inputs = (*inputs, targets)
    graph = _with_marks(capture(net, tuple(inputs), kwargs, loss_fn=loss_fn), marks or {})
    return make_plan(graph, devices, parallel_mode, dataset_strategy, on_missing_rule=on_missing_rule)


def _with_marks(graph: Graph, marks: Mapping[str, Any]) -> Graph:
    """The graph with further operators marked, by name."""
    names = [op.name for op in graph.ops]
    for name, strategy in marks.items():
        if name not in names:
            raise SettingError(f"marks: no operator is called {name!r}", strategy=strategy, legal=", ".join(names))
    return graph.with_ops(tuple(
        replace(op, mark=MarkUse(marks[op.name], None, op.source, tuple(range(len(op.inputs)))))
        if op.name in marks else op for op in graph.ops))

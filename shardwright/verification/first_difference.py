"""The first operator, in program order, whose result under a plan differs from the one-device program.

1. Capture: the captured graph runs on whole tensors; its results are compared with those of the model.
2. Forward: the local program runs once, node by node, next to the captured graph (`node_comparison`).
3. Backward: the first difference is the value whose gradient differs while those of everything computed from it
   agree. Each of its consumers then runs alone, on the reference's inputs and gradients, to find the faulty one.
4. Pipeline: the stages run by their schedule, each forward next to the captured graph on that micro-batch:

    total     = Σ over micro-batches k of the counts of k           further inputs of the graph
    gradient  = 1 / m of a loss that is a mean over micro-batches, else 1, given to each of the m micro-batches
    parameter : Σ_k of its gradients

Example: a rule that leaves out the sum over a cut contraction. The inputs of the matmul agree and its result differs,
so the matmul is named; all operators after it differ too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph, Value
from ..pipeline.pipeline_plan import Stage
from ..pipeline.schedules import Schedule
from ..process_runtime import of_micro_batch, stream
from ..pytree_objects import opened
from ..runtime.local.local_executor import LocalExecutor
from ..runtime.lowering import lower
from ..runtime.pipeline_step import LocalStageLink, PipelineProgram
from ..runtime.step_program import StepProgram
from ..torch_private import pytree
from .node_comparison import Comparison, Reference, difference
from .value_precision import Allowed
from .verify_report import FirstDifference

__all__ = ["find_first_difference"]


def find_first_difference(
    program: StepProgram | PipelineProgram,
    state: dict[str, Tensor],
    inputs: Sequence[Tensor],
    plain: object,
    loss_of: Callable[[object], Tensor | None],
    allowed: Allowed,
) -> FirstDifference | None:
    """Search the first step of a plan for the first difference from one device.

    Args:
        program: the plan on the local runtime.
        state: parameters and buffers by the graph's names, as before the first step.
        inputs: the whole input tensors.
        plain: the result of the model itself for these inputs.
        loss_of: maps a result to the scalar from which the backward starts, or to None.
        allowed: the largest relative difference allowed of each tensor.

    Returns:
        None where everything in the step agrees.
    """
    kind = _OfStages if isinstance(program, PipelineProgram) else _Search
    return kind(program, state, inputs, loss_of, allowed).run(plain)


class _Search:
    def __init__(
        self,
        program: Any,
        state: dict[str, Tensor],
        inputs: Sequence[Tensor],
        loss_of: Callable[[object], Tensor | None],
        allowed: Allowed,
    ) -> None:
        self.program, self.plan, self.graph = program, program.plan, program.plan.graph
        self.inputs, self.state, self.loss_of, self.allowed = inputs, state, loss_of, allowed
        before, random = stream.state_dict(), torch.get_rng_state()
        self.seed = stream.draw(program.exact)  # the seed that the program will draw: the stream is put back
        stream.load_state_dict(before)
        torch.set_rng_state(random)
        self.dtype = next(
            (t.dtype for t in (*state.values(), *inputs) if t.is_floating_point()), torch.get_default_dtype()
        )

    def run(self, plain: object) -> FirstDifference | None:
        self.reference = Reference(self.graph, self.state, self.inputs, self.seed)
        if (found := self.captured(self.reference.outputs, plain)) is not None:
            return found
        made = Comparison(self.plan, self.reference, self.allowed, self.dtype)
        body = self.program.body = LocalExecutor(self.program.body.lowered)  # node by node
        body.record = made.record
        try:
            result = self.program(*self.inputs)
        except Exception as error:  # a wrong program raises anything; the search names its operator
            return made.found or made.failed(body, error)
        finally:
            body.record = None
        return made.found or made.buffers(self.state) or self.backward(made, result)

    def captured(self, outputs: Sequence[Any], plain: object) -> FirstDifference | None:
        """The first result of the captured graph that is not the model's; None: all agree."""
        for output, value, result in zip(self.graph.outputs, outputs, pytree.tree_leaves(opened(plain))):
            if not isinstance(output, Value):
                continue
            precision, apart = self.allowed.value(output.name), difference(result, value)
            if apart > self.allowed.tolerance(precision):
                how = "run in micro-batches" if isinstance(self.program, PipelineProgram) else ""
                return FirstDifference(
                    "",
                    "",
                    "",
                    "forward",
                    "capture",
                    output.name,
                    apart,
                    self.dtype,
                    how,
                    self.allowed.tolerance(precision),
                    precision,
                )
        return None

    def backward(self, made: Comparison, result: object) -> FirstDifference | None:
        expected = self.loss_of(self.graph.result(self.reference.outputs))
        loss = self.loss_of(result)
        if expected is None or loss is None or not expected.requires_grad:
            return None
        expected.backward()
        message = self.went_back(loss)
        return made.gradients(message) or made.parameters(self.state, message)

    def went_back(self, loss: Tensor) -> str:
        """Run the program's backward. The text of its exception is returned; gradients from before it are compared
        all the same."""
        for name in self.graph.parameters:
            self.state[name].grad = None
        try:
            loss.backward()
        except Exception as error:  # a wrong program raises anything; its gradients are compared all the same
            return f"{type(error).__name__}: {error}"
        return ""


class _OfStages(_Search):
    """The search in a pipeline."""

    def run(self, plain: object) -> FirstDifference | None:
        plan = self.plan
        self.references, after = self.micro_references()
        joined = [
            None if join is None else _joined([r.outputs[i] for r in self.references], *join)
            for i, join in enumerate(plan.micro.joins)
        ]
        if (found := self.captured(joined, plain)) is not None:
            return found
        plans = {name: stage.plan for stage in plan.stages for name in stage.plan.decisions}
        self.made = {
            (stage.number, k): _Stage(stage.plan, reference, self.allowed, self.dtype, plans)
            for stage in plan.stages
            for k, reference in enumerate(self.references)
        }
        self.played: list[tuple[int, int]] = []
        self.bodies: dict[int, LocalExecutor] = {}
        # A backward that the schedule splits in two (I, W) runs as one here, and computes the same gradients.
        program = PipelineProgram(
            replace(plan, schedule=_whole_backwards(plan.schedule)),
            {s: replace(body, run=_Recorded(self, body.stage)) for s, body in self.program.bodies.items()},
            LocalStageLink(),
        )
        program.exact = self.program.exact
        try:
            result = program(*self.inputs)
        except Exception as error:  # a wrong program raises anything; the search names its operator
            if not self.played:
                raise
            last = self.made[self.played[-1]]
            return self.forwards() or last.failed(self.bodies[self.played[-1][0]], error)
        last = self.made[plan.stages[-1].number, len(self.references) - 1]
        return self.forwards() or last.buffers(self.state, after) or self.backwards(program, result)

    def micro_references(self) -> tuple[list[Reference], dict[str, Tensor]]:
        """The captured graph on each micro-batch, and the new values of the buffers that change once a step.

        Buffers begin a micro-batch as the one before left them; those that change once a step begin it as the step
        began.
        """
        plan, count = self.plan, self.plan.micro_batches
        parts = [
            [x.detach().chunk(count)[k] if split else x.detach() for x, split in zip(self.inputs, plan.split)]
            for k in range(count)
        ]
        state, totals, made = dict(self.state), [], []
        if plan.micro.counts is not None:
            each = [_counted(plan.micro.counts, self.graph, self.state, part) for part in parts]
            totals = [sum(counts[1:], counts[0]) for counts in zip(*each)]
        for k, part in enumerate(parts):
            reference = Reference(self.graph, state, [*part, *totals], of_micro_batch(self.seed, k))
            state |= {
                name: reference.values[v.name].detach()
                for name, v in self.graph.updates.items()
                if name not in plan.micro.updates
            }
            made.append(reference)
        after = {
            name: _joined([r.values[self.graph.updates[name].name] for r in made], *join)
            for name, join in plan.micro.updates.items()
        }
        return made, after

    def forwards(self) -> FirstDifference | None:
        """The first difference in the order of the stages, hence of the program, among the forwards that ran; None:
        they agree."""
        return next((self.made[key].found for key in sorted(self.played) if self.made[key].found is not None), None)

    def backwards(self, program: PipelineProgram, result: object) -> FirstDifference | None:
        loss = self.loss_of(result)
        if program.loss is None or loss is None or not loss.requires_grad:
            return None
        share = len(self.references) if self.plan.micro.joins[program.loss].how == "mean" else 1
        for reference in self.references:
            (reference.outputs[program.loss] / share).backward()
        message = self.went_back(loss)
        for stage in reversed(self.plan.stages):
            for k in range(len(self.references)):
                if (found := self.made[stage.number, k].gradients(message)) is not None:
                    return found
        first, *rest = self.references
        for name in (v.name for v in self.graph.parameters.values()):
            terms = [g for r in (first, *rest) if (g := r.gradient(name)) is not None]
            first.values[name].grad = sum(terms[1:], terms[0]) if terms else None
        return self.made[0, 0].parameters(self.state, message)


class _Stage(Comparison):
    """The program of a stage next to the reference."""

    def arrived(self, stage: Stage, tensors: Sequence[Tensor]) -> None:
        """Compare the values from other stages; the first operator that reads a differing value is named."""
        for value, source, tensor in zip(stage.plan.graph.inputs, stage.sources, tensors, strict=True):
            apart = difference(self.reference.values[value.name], tensor, self.reference.scales.get(value.name, 0.0))
            precision = self.allowed.value(value.name)
            if source.kind != "input" and self.found is None and self.differs(apart, precision):
                op = stage.plan.graph.consumers()[value.name][0][0]
                self.found = FirstDifference(
                    op.name,
                    op.kind,
                    op.source,
                    "forward",
                    "conversion",
                    value.name,
                    apart,
                    self.dtype,
                    f"as it came from stage {source.index}",
                    *self.decided(precision),
                )


class _Recorded:
    """The program of a stage, each forward of which is recorded for its micro-batch."""

    def __init__(self, search: _OfStages, stage: Stage) -> None:
        schedule = search.plan.schedule
        self.search, self.stage, self.body = search, stage, LocalExecutor(lower(stage.plan))
        self.micros = iter(
            [
                a.micro
                for a in schedule.actions[schedule.placement[stage.number]]
                if a.stage == stage.number and a.kind == "F"
            ]
        )
        search.bodies[stage.number] = self.body

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        key = self.stage.number, next(self.micros)
        self.search.played.append(key)
        self.search.made[key].arrived(self.stage, tensors[len(tensors) - len(self.stage.sources) :])
        self.body.record = self.search.made[key].record
        try:
            return self.body(*tensors)
        finally:
            self.body.record = None


def _whole_backwards(schedule: Schedule) -> Schedule:
    """A schedule with each split backward as one action, at the place of its first part."""
    return replace(
        schedule,
        actions=tuple(
            tuple(a._replace(kind="B") if a.kind == "I" else a for a in row if a.kind != "W")
            for row in schedule.actions
        ),
    )


def _counted(counts: Graph, whole: Graph, state: dict[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The counts of one micro-batch."""
    tensors = {v.name: x for v, x in zip(whole.inputs, inputs)}
    return Reference(counts, state, [tensors[v.name] for v in counts.inputs], torch.empty(0, device="cpu")).outputs


def _joined(parts: Sequence[Any], how: str, dim: int) -> Any:
    """The result of the whole batch, from those of its micro-batches."""
    if not isinstance(parts[0], Tensor) or how == "same":
        return parts[-1]
    parts = [x.detach() for x in parts]
    total = torch.cat(parts, dim) if how == "cat" else sum(parts[1:], parts[0])
    return total / len(parts) if how == "mean" else total

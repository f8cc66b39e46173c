"""The dumps of a plan: the user's operators, and the program of one rank, as plain text with one operator a line.

1. ``step_parallel_begin.ir`` (`begin_text`) has the user's operators, with global shapes:

    %3 = matmul(%1, %w1)  {in_strategy: ((2, 4), (4, 1))}  f32[32, 784], f32[784, 512] -> f32[32, 512]   # matmul1

2. ``execute.ir`` (`execute_text`, `Execute`) has the local program, forward then backward:

    %5 = matmul(%4, %w1)  f32[16, 196], f32[196, 512] -> f32[16, 512]   # matmul1  net.py:41
    %6 = all_reduce(%5)  {ranks: (4, 5, 6, 7), bytes: 32768}  f32[16, 512] -> f32[16, 512]   # completes %5

   The line of a collective stands where its result is needed. Two further lines say where a library such as NCCL
   issues a message that is under way beside other work, and where it is waited for (`Plan.schedule`):

    issue 3: all_gather  {ranks: (0, 1, 2, 3), bytes: 65536}   # weights of blocks.1: up.weight, down.weight
    wait 3   # all_gather, weights of blocks.1

3. A pipeline (`staged_texts`) has the schedule of the rank's group, and the program of each of its stages, for one
   micro-batch:

    %relu_1 = recv()  {ranks: (1, 5), bytes: 128}  f64[1, 16]   # from stage 0
    send(%7)  {ranks: (5, 1), bytes: 128}  f64[1, 16]   # gradient of %relu_1, to stage 0

   Ranks are those of the world, sender first; slices and layouts are those of the stage's own devices. Operations of
   once a step stand apart: the sums of the gradients of parameters, and parameters that several stages share.

A produced value has a number, a fed or stored value has its name. A dump is a function of the plan and the rank
alone, and needs no other rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..cost.communication_schedule import (
    Collective,
    CommunicationSchedule,
    ScheduledMessage,
    backward_collectives,
    forward_collectives,
)
from ..errors import PlanError
from ..graph import Value
from ..identity_tables import IdentityMap
from ..json_files.json_values import write_text
from ..layout import Digits, Layout, group_of
from ..partition.local_program import GlobalExtreme, Instruction, LocalOp, PlacedValue, Redistribute, made_by, read_by
from ..partition.rematerialization import BackwardStep, RecomputedInstruction, Regather, Region
from ..pipeline.pipeline_plan import PipelinePlan, Stage, Transfer
from ..redistribution import CollectiveKind, Redistribution, RedistributionStep, redistribution
from ..rules.dims import send
from ..sharded_plan import Plan
from .format import (
    ValueNumbers,
    arguments,
    details_of,
    halo_text,
    header,
    index_text,
    kind_of,
    layout_text,
    message_line,
    results_lines,
    sources,
    tensor_lines,
    types_text,
    where,
    written_line,
)

__all__ = ["BEGIN", "Execute", "begin_lines", "begin_text", "execute_text", "staged_texts", "write_dumps"]


def write_dumps(plan: Plan | PipelinePlan, directory: str | Path, ranks: Iterable[int]) -> None:
    """Write ``rank_R/step_parallel_begin.ir`` and ``rank_R/execute.ir`` below a directory, which is created where
    needed.

    Files of an earlier plan are replaced. The same plan gives the same bytes.

    Args:
        plan: the plan.
        directory: the directory.
        ranks: the ranks to write; other ranks take no time.

    Raises:
        PlanError: a rank outside the plan's devices; a file that cannot be written.
    """
    for rank in ranks:
        folder = Path(directory) / f"rank_{rank}"
        texts = (
            {"step_parallel_begin.ir": begin_text(plan, rank), "execute.ir": execute_text(plan, rank)}
            if isinstance(plan, Plan)
            else staged_texts(plan, rank)
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanError(
                f"the dump cannot be written: {error.strerror}", source=str(folder), legal="a folder that can be made"
            ) from None
        for name, text in texts.items():
            write_text(folder / name, text, PlanError, "the dump")


def begin_text(plan: Plan, rank: int) -> str:
    """The user's operators, each with its strategy, its global shapes and its call site.

    Raises:
        PlanError: a rank outside the plan's devices.
    """
    return (
        "\n".join(
            (
                *header(plan, rank, "the user's operators, global shapes"),
                *tensor_lines(plan, rank),
                BEGIN,
                *begin_lines(plan),
            )
        )
        + "\n"
    )


#: The line above the user's operators, which explains the last column.
BEGIN = "# a word in parentheses at the end says who chose the strategy where no mark did"


def begin_lines(plan: Plan) -> list[str]:
    """The user's operators, a line each, and the results."""
    graph, lines = plan.graph, []
    names = ValueNumbers(v.name for v in sources(plan))
    for planned, op in zip(plan.operators, graph.ops, strict=True):
        asked = [f"in_strategy: {planned.in_strategy}"]
        mark = op.mark
        if mark is not None and any(isinstance(entry, Layout) for entry in mark.in_strategy or ()):
            asked.append(f"in_layout: ({', '.join(map(layout_text, planned.in_layouts))})")
        if mark is not None and mark.out_strategy is not None:
            asked.append(f"out_strategy: {planned.out_strategy}")
            asked.append(f"out_layout: ({', '.join(map(layout_text, planned.out_layouts))})")
        outs = [v for v in op.outputs if v is not None]
        made = [names.new(v.name) for v in outs] or ["_"]
        comment = where(planned.name, planned.module, planned.source)
        if planned.cause != "mark":
            comment += f"  ({planned.cause})"
        lines.append(
            written_line(
                made,
                planned.op,
                arguments(op.args, op.kwargs, names),
                ", ".join(asked),
                types_text([(v, v.shape) for v in op.inputs], [(v, v.shape) for v in outs]),
                comment,
            )
        )
    lines += results_lines(
        [o.name if isinstance(o, Value) else o for o in graph.outputs],
        graph.outputs,
        {n: v.name for n, v in graph.updates.items()},
        names,
    )
    return lines


def execute_text(plan: Plan, rank: int) -> str:
    """The program of one rank: local operators, slices and collectives, forward and backward.

    Raises:
        PlanError: a rank outside the plan's devices.
    """
    return (
        "\n".join(
            (
                *header(plan, rank, "the program of this rank, local shapes"),
                *tensor_lines(plan, rank),
                *Execute(plan, rank).run(),
            )
        )
        + "\n"
    )


# -- the program of a rank ---------------------------------------------------------------------------------------------


class Execute:
    """The program of one rank, line by line.

    Args:
        plan: the plan.
        rank: the rank within the plan's devices.
        first: the world rank of the plan's first device.
    """

    def __init__(self, plan: Plan, rank: int, first: int = 0) -> None:
        self.plan, self.rank, self.first = plan, rank, first
        self.names = ValueNumbers(v.name for v in sources(plan))
        self.known: dict[str, PlacedValue] = {}
        for table in (plan.program.parameters, plan.program.buffers, plan.program.constants):
            self.known.update((i.name, i) for i in table.values())
        self.known.update((i.name, i) for i in plan.program.inputs)
        if plan.program.seed is not None:
            self.known[plan.program.seed.name] = plan.program.seed
        for i in plan.program.instructions:
            self.known.update((o.name, o) for o in made_by(i))
        self.lines: list[str] = []
        self.gradients: dict[str, list[str]] = {}  # name of a placed value -> the gradients of its uses so far
        self.recomputed: dict[str, str] = {}  # name of a placed value -> the number of the recomputed value
        self.schedule, count = self.scheduled(), len(plan.program.instructions)
        self.moments = IdentityMap[object, int]((i, moment) for moment, i in enumerate(plan.program.instructions))
        self.back_moments = IdentityMap[object, int]((i, moment) for moment, i in enumerate(plan.backward, count))
        self.due: dict[bool, list[tuple[int, str, int]]] = {False: [], True: []}  # of the forward, of the backward
        for moment, actions in self.schedule.actions.items():
            for action, number in actions:
                self.due[self.schedule.messages[number].issue >= count].append((moment, action, number))
        self.region: Region | None = None  # the recomputed region of the latest line

    def scheduled(self) -> CommunicationSchedule:
        """The moments at which messages are issued and waited for."""
        return self.plan.schedule

    def messages(self, moment: float, back: bool = False) -> None:
        """Write what is issued and waited for up to a moment of the forward, or of the backward."""
        while self.due[back] and self.due[back][0][0] <= moment:
            self.message(*self.due[back].pop(0)[1:])

    def message(self, action: str, number: int) -> None:
        """Write that a message is issued, or waited for."""
        message = self.schedule.messages[number]
        carried = number in self.schedule.carried
        self.lines.append(message_line(action, number, message, self.group(message.digits), carried))

    def run(self) -> list[str]:
        self.forward(self.plan.program.instructions)
        self.results()
        self.lines.append("# backward, in the order in which it runs")
        self.backward()
        self.final()
        return self.lines

    # -- forward --

    def forward(self, instructions: Iterable[Instruction]) -> None:
        self.lines.append("# forward")
        for instruction in instructions:
            self.messages(self.moments[instruction])
            if isinstance(instruction, LocalOp):
                self.compute(instruction)
            else:
                self.convert(instruction)
        self.messages(math.inf)

    def results(self) -> None:
        program = self.plan.program
        self.lines += results_lines(
            [o.name if isinstance(o, PlacedValue) else o for o in program.outputs],
            program.outputs,
            {n: i.name for n, i in program.updates.items()},
            self.names,
        )

    def compute(self, instruction: LocalOp) -> None:
        op, leaves = instruction.op, read_by(instruction)
        read = arguments(instruction.args, instruction.kwargs, self.names)
        made = [self.names.new(o.name) for o in made_by(instruction)] or ["_"]
        self.lines.append(
            written_line(
                made,
                kind_of(instruction),
                read,
                "",
                self.types(leaves, [o.name for o in made_by(instruction)]),
                where(instruction.operator, op.module, op.source),
            )
        )

    def convert(self, instruction: Redistribute | GlobalExtreme) -> None:
        source, written = instruction.source, self.names[instruction.source.name]
        purpose = {"output": "for the output"}.get(instruction.operator, f"for {instruction.operator}")
        if isinstance(instruction, Redistribute) and instruction.cause == "parameter":
            purpose = f"{source.value.name} {purpose}"

        def comment(step: RedistributionStep) -> str:
            if not step.reduces:
                return purpose
            # An all-reduce completes the operator's own result; a reduce-scatter also serves the consumer.
            return (
                f"completes {written}" if step.kind is CollectiveKind.ALL_REDUCE else f"completes {written} {purpose}"
            )

        target = instruction.target.value
        written = self.cast(source.value, target, source.local_shape, written, purpose)
        self.names[instruction.target.name] = self.steps(
            instruction.forward, target, source.local_shape, written, forward_collectives(instruction), comment
        )

    def types(self, before: Iterable[str], after: Iterable[str]) -> str:
        sides = [[(self.known[n].value, self.known[n].local_shape) for n in names] for names in (before, after)]
        return types_text(*sides)

    def steps(
        self,
        steps: Redistribution,
        value: Value,
        shape: tuple[int, ...],
        written: str,
        collectives: Iterator[tuple[Collective, Digits]],
        comment: Callable[[RedistributionStep], str],
    ) -> str:
        """Write a line for each step of a redistribution. The number of its result is returned, or `written` where it
        has no steps."""
        shapes = steps.local_shapes(shape)
        for step, before, after in zip(steps.steps, shapes, shapes[1:]):
            halo = () if step.halo is None else (halo_text(step.halo, self.rank),)
            if step.communicates:
                collective, digits = next(collectives)
                details = f"ranks: {self.group(digits)}, bytes: {collective.bytes}{details_of(step)}"
                attributes = ", ".join((details, *halo))
            else:
                attributes = halo[0] if halo else index_text(step, before, self.rank)
            made = self.names.number()
            self.lines.append(
                written_line(
                    [made],
                    step.kind,
                    [written],
                    attributes,
                    types_text([(value, before)], [(value, after)]),
                    comment(step),
                )
            )
            written = made
        return written

    def cast(self, before: Value, after: Value, shape: tuple[int, ...], written: str, comment: str) -> str:
        """Write a line for a change of dtype, if there is one. The number of its result is returned."""
        if before.dtype == after.dtype:
            return written
        made = self.names.number()
        self.lines.append(
            written_line([made], "to", [written], "", types_text([(before, shape)], [(after, shape)]), comment)
        )
        return made

    def group(self, digits: Digits) -> tuple[int, ...]:
        """The world ranks that take part in a collective."""
        return tuple(self.first + rank for rank in group_of(self.rank, digits))

    # -- backward --

    def backward(self) -> None:
        self.seed_gradients(self.plan.program.outputs)
        self.back(self.plan.backward)

    def seed_gradients(self, outputs: Iterable[object], comment: str = "given by the caller; 1 for a loss") -> None:
        """Write a line for each gradient that the caller passes to the backward."""
        seen: set[str] = set()
        for output in outputs:
            if isinstance(output, PlacedValue) and output.value.requires_grad and output.name not in seen:
                seen.add(output.name)
                made = self.names.number()
                types = self.types((), [output.name])
                self.lines.append(written_line([made], "gradient", [self.names[output.name]], "", types, comment))
                self.bring(output.name, made)

    def back(self, instructions: Iterable[BackwardStep]) -> None:
        """Write the backwards of instructions."""
        for instruction in instructions:
            self.messages(self.back_moments[instruction], back=True)
            if isinstance(instruction, LocalOp):
                self.compute_backward(instruction)
            elif isinstance(instruction, Redistribute):
                self.convert_backward(instruction)
            elif isinstance(instruction, Regather):
                self.regather(instruction)
            elif isinstance(instruction, RecomputedInstruction):
                self.recompute(instruction)
            else:
                self.extreme_backward(instruction)

    def final(self) -> None:
        self.messages(math.inf, back=True)
        program = self.plan.program
        final = [f"{name}: {self.total(i.name)}" for name, i in program.parameters.items() if i.name in self.gradients]
        self.lines.append(f"gradients {{{', '.join(final)}}}" if final else "# no parameter has a gradient")

    def bring(self, name: str, gradient: str) -> None:
        self.gradients.setdefault(name, []).append(gradient)

    def total(self, name: str) -> str:
        """The sum of a placed value's gradients from all its uses."""
        parts = self.gradients[name]
        if len(parts) > 1:
            made = self.names.number()
            self.lines.append(
                written_line(
                    [made],
                    "add",
                    parts,
                    "",
                    self.types([name] * len(parts), [name]),
                    f"gradient of {self.names[name]} from {len(parts)} uses",
                )
            )
            self.gradients[name] = parts = [made]
        return parts[0]

    def compute_backward(self, instruction: LocalOp) -> None:
        outs = [o.name for o in made_by(instruction) if o.name in self.gradients]
        ins = [n for n in read_by(instruction) if self.known[n].value.requires_grad]
        arguments = [self.total(n) for n in outs]
        made = [self.names.number() for _ in ins]
        for name, gradient in zip(ins, made):
            self.bring(name, gradient)
        self.lines.append(
            written_line(
                made,
                f"{kind_of(instruction)}_backward",
                arguments,
                "",
                self.types(outs, ins),
                f"gradient{'s' * (len(ins) > 1)} of {', '.join(self.names[n] for n in ins)}; "
                + where(instruction.operator, instruction.op.module, instruction.op.source),
            )
        )

    def convert_backward(self, instruction: Redistribute) -> None:
        source, target = instruction.source, instruction.target
        gradient = self.total(target.name)
        if instruction.backward is not None:
            whose = source.value.name if instruction.cause == "parameter" else self.names[source.name]
            comment = f"gradient of {whose}"
            if instruction.forward.steps:
                comment += f", transpose of {', '.join(s.kind for s in instruction.forward.steps)}"
            if instruction.operator != "output":
                comment += f" for {instruction.operator}"
            moved = instruction.back if instruction.backward.steps else source.value
            gradient = self.cast(target.value, moved, target.local_shape, gradient, comment)
            gradient = self.steps(
                instruction.backward,
                moved,
                target.local_shape,
                gradient,
                backward_collectives(instruction),
                lambda step: comment,
            )
            gradient = self.cast(moved, source.value, source.local_shape, gradient, comment)
        self.bring(source.name, gradient)

    def recompute(self, instruction: RecomputedInstruction) -> None:
        """Write a line of the forward once more. Its result gets a new number, for the backward of its region."""
        if instruction.region is not self.region:
            self.region = instruction.region
            self.lines.append(f"# {self.region.path} is computed again, for the backward of {instruction.operator}")
        first = {name: self.names[name] for name in self.names}
        self.names.update(self.recomputed)
        recomputed = instruction.instruction
        self.compute(recomputed) if isinstance(recomputed, LocalOp) else self.convert(recomputed)
        self.recomputed.update((o.name, self.names[o.name]) for o in made_by(recomputed))
        self.names.update(first)

    def regather(self, instruction: Regather) -> None:
        source, target = instruction.move.source, instruction.move.target.value
        comment = f"{source.value.name} again, for the backward of {instruction.operator}"
        written = self.cast(source.value, target, source.local_shape, self.names[source.name], comment)
        self.steps(
            instruction.move.forward,
            target,
            source.local_shape,
            written,
            backward_collectives(instruction),
            lambda step: comment,
        )

    def extreme_backward(self, instruction: GlobalExtreme) -> None:
        """Write the backward of a maximum or minimum over ranks: a rank's share of the gradient is its part of all
        ties."""
        source, reduced = instruction.source, self.names[instruction.source.name]
        gradient = self.total(instruction.target.name)
        layout = source.layout
        made = self.names.number()
        self.lines.append(
            written_line(
                [made],
                "ties",
                [self.names[instruction.operand.name], reduced, self.names[instruction.target.name]],
                "",
                self.types([instruction.operand.name, source.name, instruction.target.name], [source.name]),
                f"how many elements attain the {layout.reduction}",
            )
        )
        of_all = self.steps(
            redistribution(layout.without_partial().with_partial(layout.partial), layout.without_partial()),
            source.value,
            source.local_shape,
            made,
            backward_collectives(instruction),
            lambda step: f"gradient of {reduced}: the ties of all ranks",
        )
        shared = self.names.number()
        self.lines.append(
            written_line(
                [shared],
                f"{layout.reduction}_backward",
                [gradient, made, of_all],
                "",
                self.types([source.name] * 3, [source.name]),
                f"gradient of {reduced}",
            )
        )
        self.bring(source.name, shared)


# -- the dumps of a pipeline -------------------------------------------------------------------------------------------


def staged_texts(plan: PipelinePlan, rank: int) -> dict[str, str]:
    """The dumps of one rank of a pipeline, by file name.

    Raises:
        PlanError: a rank outside the plan's devices.
    """
    begin = [
        *header(plan, rank, "the user's operators of this rank's stages, global shapes of one micro-batch"),
        BEGIN,
        *_schedule(plan),
    ]
    execute = [*header(plan, rank, "the program of this rank, local shapes of one micro-batch"), *_schedule(plan)]
    for stage in plan.of_rank(rank):
        title = f"# stage {stage.number} of {len(plan.stages)}, ranks {stage.ranks[0]} to {stage.ranks[-1]}"
        tensors = list(tensor_lines(stage.plan, rank - stage.first))
        begin += ["", title, *tensors, *begin_lines(stage.plan)]
        execute += ["", title, *tensors, *_Staged(plan, stage, rank).run()]
    return {"step_parallel_begin.ir": "\n".join(begin) + "\n", "execute.ir": "\n".join(execute) + "\n"}


def _schedule(plan: PipelinePlan) -> Iterator[str]:
    """The actions of each group in order, and the grid of the schedule."""
    made = plan.schedule
    yield (
        f"# {made.name}: {made.stages} stages, {made.micro_batches} micro-batches; "
        "an action is stage, kind, micro-batch"
    )
    for group in range(made.groups):
        ranks = plan.stages[made.placement.index(group)].ranks
        yield f"# group {group}, ranks {ranks[0]} to {ranks[-1]}: {' '.join(map(str, made.actions[group]))}"
    yield from (f"#   {line}" for line in made.grid().splitlines())


class _Staged(Execute):
    """The program of one rank for one stage."""

    def __init__(self, plan: PipelinePlan, stage: Stage, rank: int) -> None:
        super().__init__(stage.plan, rank - stage.first, stage.first)
        self.whole, self.stage, self.world = plan, stage, rank
        inputs = [i.name for i in stage.plan.program.inputs]
        self.into = [
            (name, t)
            for name, source in zip(inputs, stage.sources)
            for t in plan.transfers
            if (t.kind, t.name, t.source, t.target)
            == ("value" if source.kind == "stage" else source.kind, source.name, source.index, stage.number)
        ]
        outputs = stage.plan.program.outputs
        self.results_of_model, self.sent = outputs[: len(stage.results)], outputs[len(stage.results) :]

    def scheduled(self) -> CommunicationSchedule:
        return self.plan.stage_schedule

    def part(self, back: bool, wanted: Callable[[int, ScheduledMessage], bool]) -> None:
        """Write what is issued and waited for in a half, where the moment and the message are `wanted`."""
        each = [(entry, wanted(entry[0], self.schedule.messages[entry[2]])) for entry in self.due[back]]
        self.due[back] = [entry for entry, now in each if not now]
        for entry, now in each:
            if now:
                self.message(*entry[1:])

    def run(self) -> list[str]:
        """The lines of the stage's program."""
        parameters = self.stage.plan.program.parameters
        shared = [
            (parameters[t.name].name, t)
            for t in self.whole.transfers
            if t.kind == "parameter" and t.source == self.stage.number
        ]
        shares = [(name, t) for name, t in self.into if t.kind == "parameter"]
        gathers = [i for i in self.plan.program.instructions if isinstance(i, Redistribute) and self.plan.once(i)]
        if shared or shares or any(i.forward.collectives for i in gathers):
            self.lines.append("# once a step, before the first micro-batch")
            for name, t in shared:
                self.gives(t, name, f"parameter {t.name}")
            for name, t in shares:
                self.takes(t, name, f"parameter {t.name}")
        self.part(False, lambda moment, message: message.once and not moment)
        for gather in gathers:
            self.convert(gather)
        values = [(name, t) for name, t in self.into if t.kind == "value"]
        for name, t in values:
            self.takes(t, name, "")
        self.forward(i for i in self.plan.program.instructions if not self.plan.once(i))
        self.results()
        for name, t in self.leaving():
            self.gives(t, name, "")
        self.lines.append("# backward, in the order in which it runs")
        count = self.whole.micro_batches
        how = {self.whole.micro.join(index).how for index in self.stage.results}
        self.seed_gradients(
            self.results_of_model,
            f"of a loss 1/{count}: its mean over micro-batches"
            if "mean" in how
            else "of a loss 1: its sum over micro-batches",
        )
        for name, t in self.leaving():
            if t.gradient:
                made = self.names.number()
                self.takes(t, name, f"gradient of {self.names[name]}", made)
                self.bring(name, made)
        self.back(i for i in self.plan.backward if not self.plan.once(i, back=True))
        for name, t in values:
            if t.gradient and name in self.gradients:
                self.gives(t, name, f"gradient of {self.names[name]}", self.total(name))
        self.part(True, lambda moment, message: moment < self.schedule.end or not message.once)
        self.lines.append("# once a step, after the last micro-batch: gradients that all micro-batches have added to")
        for name, t in shares:
            if t.gradient and name in self.gradients:
                self.gives(t, name, f"gradient of {t.name}", self.total(name))
        for name, t in shared:
            if t.gradient:
                made = self.names.number()
                self.takes(t, name, f"gradient of {t.name}", made)
                self.bring(name, made)
        self.back(i for i in self.plan.backward if self.plan.once(i, back=True))
        self.final()
        return self.lines

    def compute(self, instruction: LocalOp) -> None:
        """Write an operator. A `send` is an identity, so that it takes the number of its operand and no line."""
        if instruction.op.target is send:
            self.names[instruction.output(0).name] = self.names[read_by(instruction)[0]]
            return
        super().compute(instruction)

    def compute_backward(self, instruction: LocalOp) -> None:
        """Write the backward of an operator. A `send` passes its gradient on without a line."""
        if instruction.op.target is send:
            self.bring(read_by(instruction)[0], self.total(instruction.output(0).name))
            return
        super().compute_backward(instruction)

    def results(self) -> None:
        """Write the model's results that the stage produces."""
        outputs = self.results_of_model
        if outputs or self.plan.program.updates:
            self.lines += results_lines(
                [o.name for o in outputs],
                outputs,
                {n: i.name for n, i in self.plan.program.updates.items()},
                self.names,
            )

    def leaving(self) -> Iterator[tuple[str, Transfer]]:
        """The values that the stage sends with every micro-batch: (name of the placed value, transfer)."""
        for name, placed in zip(self.stage.sent, self.sent):
            for t in self.whole.transfers:
                if (t.kind, t.name, t.source) == ("value", name, self.stage.number):
                    yield placed.name, t

    def takes(self, t: Transfer, name: str, what: str, made: str | None = None) -> None:
        """Write the lines that receive a value under the number `made`, or under its own name where that is None."""
        back = made is not None
        other = t.target if back else t.source
        types, comment = self.types((), [name]), ", ".join(filter(None, (what, f"from stage {other}")))
        made = made or self.names[name]
        if self.on_one_rank(t):
            self.lines.append(written_line([made], "here", [], "", types, f"{comment}, which this rank runs too"))
            return
        for peer in self.whole.peers(t, self.world, back):
            self.lines.append(
                written_line(
                    [made], CollectiveKind.RECV, [], f"ranks: {(peer, self.world)}, bytes: {t.nbytes}", types, comment
                )
            )

    def gives(self, t: Transfer, name: str, what: str, written: str | None = None) -> None:
        """Write the lines that send `written`, or the value of that name where that is None."""
        back = written is not None
        other = t.source if back else t.target
        types, comment = self.types((), [name]), ", ".join(filter(None, (what, f"to stage {other}")))
        written = written or self.names[name]
        if self.on_one_rank(t):
            self.lines.append(f"hand_on({written})  {types}   # {comment}, which this rank runs too")
            return
        for peer in self.whole.peers(t, self.world, back):
            attributes = f"{{ranks: {(self.world, peer)}, bytes: {t.nbytes}}}"
            self.lines.append(f"{CollectiveKind.SEND}({written})  {attributes}  {types}   # {comment}")

    def on_one_rank(self, t: Transfer) -> bool:
        """True where both stages of a transfer run on this rank."""
        return self.world in self.whole.stages[t.source].ranks and self.world in self.whole.stages[t.target].ranks

"""The dumps of a pipeline: the schedule of a rank's group, and the program of each of its stages, for one micro-batch.

    %relu_1 = recv()  {ranks: (1, 5), bytes: 128}  f64[1, 16]   # from stage 0
    send(%7)  {ranks: (5, 1), bytes: 128}  f64[1, 16]   # gradient of %relu_1, to stage 0

Ranks are those of the world, sender first; parts and layouts are those of the stage's own devices. What is done once a
step, the sums of the gradients of parameters and what several stages share, stands by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..plan.pipelined import PipelinePlan, Stage, Transfer
from ..plan.instructions import Compute, read_by
from ..rules.send import send
from .ir import BEGIN, Execute, begin_lines
from .ir_text import header, held_lines, results_lines, written_line

__all__ = ["staged_texts"]


def staged_texts(plan: PipelinePlan, rank: int) -> dict[str, str]:
    """The dumps of one rank by the names of their files.

    Raises:
        PlanError: a rank outside the plan's devices.
    """
    begin = [*header(plan, rank, "the user's operators of this rank's stages, global shapes of one micro-batch"), BEGIN,
             *_schedule(plan)]
    execute = [*header(plan, rank, "the program of this rank, local shapes of one micro-batch"), *_schedule(plan)]
    for stage in plan.of_rank(rank):
        title = f"# stage {stage.number} of {len(plan.stages)}, ranks {stage.ranks[0]} to {stage.ranks[-1]}"
        held = list(held_lines(stage.plan, rank - stage.first))
        begin += ["", title, *held, *begin_lines(stage.plan)]
        execute += ["", title, *held, *_Staged(plan, stage, rank).run()]
    return {"step_parallel_begin.ir": "\n".join(begin) + "\n", "execute.ir": "\n".join(execute) + "\n"}


def _schedule(plan: PipelinePlan) -> Iterator[str]:
    """Who does what when."""
    made = plan.schedule
    yield (f"# {made.name}: {made.stages} stages, {made.micro_batches} micro-batches; "
           "an action is stage, kind, micro-batch")
    for group in range(made.groups):
        ranks = plan.stages[made.placement.index(group)].ranks
        yield f"# group {group}, ranks {ranks[0]} to {ranks[-1]}: {' '.join(map(str, made.actions[group]))}"
    yield from (f"#   {line}" for line in made.grid().splitlines())


class _Staged(Execute):
    """The program of one rank for one stage."""

    def __init__(self, plan: PipelinePlan, stage: Stage, rank: int) -> None:
        super().__init__(stage.plan, rank - stage.first, stage.first)
        self.whole, self.stage, self.world = plan, stage, rank
        inputs = [i.name for i in stage.plan.routed.inputs]
        self.into = [(name, t) for name, source in zip(inputs, stage.sources) for t in plan.transfers
                     if (t.kind, t.name, t.source, t.target) == (
                         "value" if source.kind == "stage" else source.kind, source.name, source.index, stage.number)]
        outputs = stage.plan.routed.outputs
        self.results_of_model, self.sent = outputs[:len(stage.results)], outputs[len(stage.results):]

    def run(self) -> list[str]:
        """Its lines."""
        parameters = self.stage.plan.routed.parameters
        shared = [(parameters[t.name].name, t) for t in self.whole.transfers
                  if t.kind == "parameter" and t.source == self.stage.number]
        shares = [(name, t) for name, t in self.into if t.kind == "parameter"]
        gathers = [i for i in self.plan.routed.instructions if self.plan.once(i)]
        if shared or shares or any(i.forward.collectives for i in gathers):
            self.lines.append("# once a step, before the first micro-batch")
            for name, t in shared:
                self.gives(t, name, f"parameter {t.name}")
            for name, t in shares:
                self.takes(t, name, f"parameter {t.name}")
        for gather in gathers:
            self.convert(gather)
        values = [(name, t) for name, t in self.into if t.kind == "value"]
        for name, t in values:
            self.takes(t, name, "")
        self.forward(i for i in self.plan.routed.instructions if not self.plan.once(i))
        self.results()
        for name, t in self.leaving():
            self.gives(t, name, "")
        self.lines.append("# backward, in the order in which it runs")
        count = self.whole.micro_batches
        how = {self.whole.micro.joins[index].how for index in self.stage.results}
        self.given(self.results_of_model, f"of a loss 1/{count}: its mean over micro-batches" if "mean" in how else
                   "of a loss 1: its sum over micro-batches")
        for name, t in self.leaving():
            if t.gradient:
                made = self.names.number()
                self.takes(t, name, f"gradient of {self.names[name]}", made)
                self.bring(name, made)
        self.back(i for i in self.plan.backward if not self.plan.once(i))
        for name, t in values:
            if t.gradient and name in self.gradients:
                self.gives(t, name, f"gradient of {self.names[name]}", self.total(name))
        self.lines.append("# once a step, after the last micro-batch: gradients that all micro-batches have added to")
        for name, t in shares:
            if t.gradient and name in self.gradients:
                self.gives(t, name, f"gradient of {t.name}", self.total(name))
        for name, t in shared:
            if t.gradient:
                made = self.names.number()
                self.takes(t, name, f"gradient of {t.name}", made)
                self.bring(name, made)
        self.back(i for i in self.plan.backward if self.plan.once(i))
        self.final()
        return self.lines

    def compute(self, instruction: Compute) -> None:
        """An operator; what is sent is what it is."""
        if instruction.op.target is send:
            self.names[instruction.outputs[0].name] = self.names[read_by(instruction)[0]]
            return
        super().compute(instruction)

    def compute_backward(self, instruction: Compute) -> None:
        """Its backward."""
        if instruction.op.target is send:
            self.bring(read_by(instruction)[0], self.total(instruction.outputs[0].name))
            return
        super().compute_backward(instruction)

    def results(self) -> None:
        """What of the model's results the stage has."""
        outputs = self.results_of_model
        if outputs or self.plan.routed.updates:
            self.lines += results_lines([o.name for o in outputs], outputs,
                                        {n: i.name for n, i in self.plan.routed.updates.items()}, self.names)

    def leaving(self) -> Iterator[tuple[str, Transfer]]:
        """What it sends with every micro-batch: by what name, and to whom."""
        for name, instance in zip(self.stage.sent, self.sent):
            for t in self.whole.transfers:
                if (t.kind, t.name, t.source) == ("value", name, self.stage.number):
                    yield instance.name, t

    def takes(self, t: Transfer, name: str, what: str, made: str | None = None) -> None:
        """A line that receives; as what `made` says, or as its own name."""
        back = made is not None
        other = t.target if back else t.source
        types, comment = self.types((), [name]), ", ".join(filter(None, (what, f"from stage {other}")))
        made = made or self.names[name]
        if self.here(t):
            self.lines.append(written_line([made], "here", [], "", types, f"{comment}, which this rank runs too"))
            return
        for peer in self.whole.peers(t, self.world, back):
            self.lines.append(written_line([made], "recv", [], f"ranks: {(peer, self.world)}, bytes: {t.nbytes}", types,
                                           comment))

    def gives(self, t: Transfer, name: str, what: str, written: str | None = None) -> None:
        """A line that sends `written`, or the value of that name."""
        back = written is not None
        other = t.source if back else t.target
        types, comment = self.types((), [name]), ", ".join(filter(None, (what, f"to stage {other}")))
        written = written or self.names[name]
        if self.here(t):
            self.lines.append(f"hand_on({written})  {types}   # {comment}, which this rank runs too")
            return
        for peer in self.whole.peers(t, self.world, back):
            self.lines.append(f"send({written})  {{ranks: {(self.world, peer)}, bytes: {t.nbytes}}}  {types}   "
                              f"# {comment}")

    def here(self, t: Transfer) -> bool:
        """Whether both of its stages are this rank's."""
        return self.world in self.whole.stages[t.source].ranks and self.world in self.whole.stages[t.target].ranks

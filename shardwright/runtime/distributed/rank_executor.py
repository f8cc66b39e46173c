"""The processes runtime: one process a device, the lowered program on this rank's local tensors.

The program stays a `torch.fx.GraphModule`; its redistributions become submodules that hold this rank's part of each
step, forward and transposed. A local operator costs what it costs in plain PyTorch. `local.local_executor` runs the
same program for all ranks in one process.

Example: a weight [32, 16] that 4 ranks store in slices [8, 16]. Its redistribution becomes a `BoundWeight`: an
all-gather to [32, 16] in the forward, and a reduce-scatter of the gradient [32, 16] to [8, 16] in the backward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node as FxNode
from torch.fx.node import Argument

from ...cost.communication_schedule import CommunicationSchedule, ScheduledMessage
from ...graph import map_leaves
from ...identity_tables import IdentityMap
from ...layout import Digits, group_of, merge
from ...partition.in_place_sums import sums_in_place
from ...partition.local_program import GlobalExtreme, Redistribute
from ...redistribution import Redistribution, redistribution
from ...torch_private import module_table
from ..compilation import Compilation
from ..local.operators import plain_function
from ..lowering import (
    Lowered,
    Node,
    cast,
    copied,
    extreme,
    followed_by_gathers,
    move,
    operand,
    sole_consumer,
    sum_of_gradient,
)
from ..profile_ranges import bucket_text, named_module, profiling
from ..redistribution_functions import ExtremeFunction, RedistributionFunction, Steps, redistributed, run_steps
from ..saved_tensors import LoweredRegions, RegatheredWeights, RegionRun, Saver, keep
from ..second_derivatives import refuse_graph_of_compiled
from .collectives import Bound, all_reduce, arrangements, bind_all
from .gradient_sums import Scatter
from .process_groups import ProcessGroups
from .rank_positions import WaitPoint, noted
from .scheduled_collectives import (
    BlockGather,
    BoundSum,
    GatherAgain,
    GatherOnce,
    IssuedGather,
    IssuedHalf,
    SplitRedistribute,
    SplitSteps,
    StepOfGather,
    SumsEnd,
    WaitedGather,
    WaitedHalf,
    WeightOfBlock,
    late_scatter,
    options_ahead,
    regathered_in_backward,
    taken,
)

__all__ = ["RankExecutor"]

# Up to this many elements a copy takes less time than a Python function in the backward.
SHORT = 1 << 10


class Cast:
    """A step that changes the dtype."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class BoundRedistribute(nn.Module):
    """This rank's part of a redistribution.

    Attributes:
        name: of the parameter that it gathers; "": it redistributes another value.
    """

    name = ""
    forward_steps: Steps
    backward_steps: Steps
    label: str

    def __init__(self, forward_steps: Steps, backward_steps: Steps, label: str) -> None:
        super().__init__()
        vars(self).update(forward_steps=forward_steps, backward_steps=backward_steps, label=label)  # in one go

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad or not torch.is_grad_enabled():
            return run_steps(x, self.forward_steps)
        if not self.backward_steps and x.numel() <= SHORT:
            y = x.clone()  # its backward is in C++; most often a loss
            y.detach().copy_(run_steps(x.detach(), self.forward_steps))
            if not torch.compiler.is_compiling():
                node: Any = y.grad_fn
                node.register_prehook(self._twice)
            return y
        return redistributed(x, self.forward_steps, self.backward_steps, self.name)

    def _twice(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The gradient of a gradient is summed like the value, where it is wanted (create_graph=True)."""
        if not torch.is_grad_enabled():
            return None
        return (RedistributionFunction.apply(gradients[0], (), (torch.clone, *self.forward_steps)),)

    __call__ = forward  # skips `nn.Module.__call__`: there are no hooks

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        return run_steps(gradient, self.backward_steps)

    def extra_repr(self) -> str:
        return self.label


class BoundWeight(BoundRedistribute):
    """The redistribution of a stored weight.

    Attributes:
        taken: the weight in the message with which it is gathered, and its number there; None: it is gathered by
            itself.
        regathered: None: the gathered weight is saved for the backward. Otherwise the backward regathers it.
        regather_steps: the steps of the gather in the backward.
        later: the message of that gather, and the weight's number in it; None: by itself.
        parameter: in a list, so that it is not registered as the module's.
    """

    def __init__(self, forward_steps: Steps, backward_steps: Steps, label: str, name: str) -> None:
        super().__init__(forward_steps, backward_steps, label)
        self.name = name
        self.taken: tuple[WeightOfBlock, int] | None = None
        self.regathered: RegatheredWeights | None = None
        self.regather_steps = forward_steps
        self.later: tuple[GatherAgain, int] | None = None
        self.parameter: list[Tensor] = []

    def forward(self, x: Tensor, parts: Sequence[Tensor] | None = None) -> Tensor:
        if self.taken is None or parts is None:
            gathered = super().forward(x)
        else:
            weight, index = self.taken
            gathered = taken(x, parts[index], weight, self.backward_steps)
        if self.later is not None:
            gather, index = self.later
            gather.stored[index] = x.detach()
        if self.regathered is not None:
            # Some writes raise the version of the parameter, others that of its local tensor.
            stored, steps = x.detach(), self.regather_steps
            self.regathered.note(self.name, (stored, *self.parameter), (gathered,), lambda: (run_steps(stored, steps),))
        return gathered

    __call__ = forward


class CompiledGather(BoundRedistribute):
    """The gather of a weight in a compiled program whose backward regathers the weight by itself."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return regathered_in_backward(super().forward, x)
        return super().forward(x)

    __call__ = forward


class CompiledBlock(nn.Module):
    """Several such weights, by one gather.

    Args:
        gather: the weights.
        backward_steps: of each: gradient of the weight -> gradient of its part on this rank.
    """

    def __init__(self, gather: BlockGather, backward_steps: Sequence[Steps]) -> None:
        super().__init__()
        self._gather, self._steps = gather, tuple(backward_steps)

    def _gathered(self, *stored: Tensor) -> tuple[Tensor, ...]:
        parts = self._gather.parts(self._gather.begin(stored))
        each = zip(stored, parts, self._gather.members, self._steps)
        return tuple(taken(x, part, member, steps) for x, part, member, steps in each)

    def forward(self, *stored: Tensor) -> tuple[Tensor, ...]:
        regathers = torch.is_grad_enabled() and any(x.requires_grad for x in stored)
        return regathered_in_backward(self._gathered, *stored) if regathers else self._gathered(*stored)

    __call__ = forward


def _cast(dtype: torch.dtype) -> Steps:
    return (Cast(dtype),)


class BoundExtreme(nn.Module):
    """This rank's part of a maximum or minimum over ranks."""

    def __init__(self, forward_steps: Steps, count_steps: Steps, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.forward_steps, self.count_steps, self.dims = forward_steps, count_steps, dims

    def forward(self, reduced: Tensor, operand: Tensor) -> Tensor:
        return ExtremeFunction.apply(reduced, operand, self.forward_steps, self.count_steps, self.dims)


class BoundRegions(nn.Module):
    """The first node of a program with recomputed regions: a run of each region, or None where no gradient is
    recorded."""

    def __init__(self, begin: Callable[[], list[RegionRun]]) -> None:
        super().__init__()
        self.begin = begin

    def forward(self) -> list[RegionRun] | None:
        return self.begin() if torch.is_grad_enabled() and not torch.compiler.is_compiling() else None


class BoundSaver(nn.Module):
    """An operator that saves dropped values."""

    def __init__(self, saver: Saver[str], target: Callable[..., object]) -> None:
        super().__init__()
        self.saver, self.target = saver, target

    def forward(
        self, runs: list[RegionRun] | None, watched: tuple[Tensor, ...], *args: object, **kwargs: object
    ) -> object:
        if runs is None:
            return self.target(*args, **kwargs)
        return self.saver(runs, watched, lambda: self.target(*args, **kwargs))


class _Event(NamedTuple):
    """A node that the schedule puts before the instruction number `place`; `order` is its place among others
    (`CommunicationSchedule.order`)."""

    place: int
    order: tuple[int, int, int]
    run: Callable[[], None]


class RankExecutor:
    """A lowered program on one rank.

    All ranks construct it from the same plan at the same time: process groups are made here, in the program's order.

    Args:
        lowered: the program.
        groups: this rank's process groups.
        schedule: where each message is issued and waited for; None: everything is waited for where it is issued, and
            no gradient is summed late.
        compiled: the way ``torch.compile`` compiles the program, or None. The compiler then chooses what is
            recomputed in the backward, gradients are scattered as they come, and on a library they are summed by the
            program itself (`scheduled_collectives`).
        stage: True for a stage of a pipeline: gradients of parameters that are stored in parts are scattered under
            `no_sync`, too.
        outside: names of gathered weights that the caller passes in already gathered (`Plan.gathered_once`); it
            gathers them by `gathers`, or together by `gathered_once`.

    Attributes:
        sums: parameter -> the digits over which its gradient is summed once it is complete, where the program does
            not sum it. The order is that of the schedule's buckets.
        types: parameter -> the dtype of this sum.
        followed: the parameters of `sums` after whose gradient the backward's next redistribution gathers over the
            same digits.
        scattered: a `Scatter` for each gradient that may be accumulated whole, of parameters that are stored in
            parts.
        gathers: parameter -> the redistribution from its storage to its use, for those that are gathered outside.
        gathered_once: the messages that gather such parameters, for those that travel with others.
        regathers: the messages that gather weights in the backward.
        module: the bound `torch.fx.GraphModule`: local parameters, buffers, constants, inputs in; outputs, then the
            new values of buffers, out.
    """

    def __init__(
        self,
        lowered: Lowered,
        groups: ProcessGroups,
        schedule: CommunicationSchedule | None = None,
        compiled: Compilation | None = None,
        stage: bool = False,
        outside: Collection[str] = (),
    ) -> None:
        self.lowered, self.groups, self._stage, self._outside = lowered, groups, stage, outside
        self.schedule = schedule or CommunicationSchedule((), 0, 0, 0.0, library=False)
        self.gathers: dict[str, BoundRedistribute] = {}
        self.gathered_once: list[GatherOnce] = []
        self.regathers: list[GatherAgain] = []
        self.types: dict[str, torch.dtype] = {}
        self._eager = not compiled
        self._late = IdentityMap[Redistribute, Bound]()  # by instruction: its backward, which does not wait
        self._regathered: RegatheredWeights | None = None
        self._meetings: dict[Redistribution, tuple[str, tuple[int, ...]]] = {}
        self._lines = {op.name: op.source for op in lowered.plan.graph.ops}
        self._instructions = lowered.plan.program.instructions
        self._places = IdentityMap((i, k) for k, i in enumerate(self._instructions))
        library, plan = self._eager and not groups.exchanges, lowered.plan
        self._in_place = sums_in_place(plan.program, plan.regions) if library else (frozenset[int](), frozenset[int]())
        self.scattered: list[Scatter] = []
        self._splits = self.schedule.splits if self._eager else {}
        self._scatter_messages = {m.place: n for n, message in self.schedule.of("scatter") for m in message.members}
        root = self._root = nn.Module()
        graph = self._graph = torch.fx.Graph()
        env: dict[Node, FxNode] = {}
        sums: dict[str, Digits] = {}
        last: dict[str, int] = {}
        number = {node: i for i, node in enumerate(lowered.nodes)}
        late = {m.place: m.name for _, message in self.schedule.of("sum") for m in message.members}
        summed: set[Node] = set()  # parameters whose gradients the program sums itself
        # In a pipeline micro-batches share one sum; on Gloo the buckets of `GradientSums` are faster.
        inside: list[Node] | None = [] if compiled and not groups.exchanges and not stage else None
        regions = LoweredRegions(lowered, lambda n: n.name)
        targets: dict[Node, Callable[..., object]] = {}
        runs: FxNode | None = None
        self._taken: dict[int, tuple[WeightOfBlock, int]] = {}  # by place: a weight, and its number in its message
        self._later: dict[int, tuple[GatherAgain, int]] = {}  # likewise, of the backward
        self._parts: dict[int, FxNode] = {}  # by place: the node that has waited for the weight's message
        self._blocks: dict[int, int] = {}  # by place, in a compiled program: a weight's number in a `CompiledBlock`
        events = self._events(env, by_blocks=self._eager or not regions.regions)
        for node in lowered.nodes:
            place = self._places[node.meta["instruction"]] if "instruction" in node.meta else None
            if node.op == "placeholder" and node.meta["instance"].value.name in lowered.parameters:
                if inside is not None and self._summed_late(node):
                    inside.append(node)
            elif node.op != "placeholder" and inside:
                root.add_module("sums_end", SumsEnd())
                ends = graph.call_module("sums_end", tuple(env[parameter] for parameter in inside))
                for i, parameter in enumerate(inside):
                    env[parameter] = graph.call_function(operator.getitem, (ends, i))
                summed, inside = set(inside), None
            if regions.regions and runs is None and node.op != "placeholder":
                runs = graph.call_module("regions")
            while events and (node.op == "output" or (place is not None and events[0].place <= place)):
                events.pop(0).run()
            for region, key, value, copy in regions.reads.get(node, ()):
                assert runs is not None
                graph.call_function(keep, (runs, region, key, env[value], copy))
            if place in late and operand(node) in summed:
                # Here, and not with its parameter: a backward runs in the opposite order of the forward.
                instruction = node.meta["instruction"]
                group = groups.seen(instruction.backward.steps[0].digits)
                env[node] = cast(graph, self._call("sum", BoundSum(group, instruction.sums), env[operand(node)]), node)
            elif place in late:
                instruction, name = node.meta["instruction"], late[place]
                sums[name] = instruction.backward.steps[0].digits
                last[name] = min(map(number.__getitem__, node.users), default=0)
                self.types[name] = instruction.sums
                env[node] = env[operand(node)]
                if instruction.target.name in outside:
                    self.gathers[name] = BoundRedistribute(
                        _cast(instruction.dtype), _cast(instruction.source.value.dtype), ""
                    )
                else:
                    env[node] = cast(graph, env[operand(node)], node)
            elif node.target is move and node.meta["instruction"].target.name in outside:
                env[node] = env[operand(node)]
                self.gathers[node.meta["instruction"].source.value.name] = self._bound(node.meta["instruction"], True)
            elif place in self._splits:
                if regions.regions:
                    targets[node] = self._bound(node.meta["instruction"])
            elif place in self._blocks:
                env[node] = graph.call_function(operator.getitem, (self._parts[place], self._blocks[place]))
            elif node.target is move or node.target is extreme:
                made = self._bound if node.target is move else self._extreme
                bound = targets[node] = made(node.meta["instruction"])
                arguments = tuple(env[operand(node, k)] for k in range(len(node.args)))
                if isinstance(bound, BoundWeight):
                    targets[node] = BoundRedistribute(bound.regather_steps, bound.backward_steps, bound.label)
                    arguments = (*arguments, self._parts[place]) if place in self._parts else arguments
                env[node] = self._call("convert", bound, *arguments)
                env[node].meta["instruction"] = node.meta["instruction"]
            else:
                env[node] = copied(graph, node, env)
                if node.op == "call_function":
                    env[node].target = targets[node] = plain_function(node)
            if node in regions.savers:
                plain, watched = env[node], tuple(env[n] for n in regions.watched(node))
                saver = BoundSaver(regions.savers[node], targets[node])
                env[node] = self._call("saving", saver, runs, watched, *plain.args, **plain.kwargs)
                env[node].meta["instruction"] = node.meta.get("instruction")
                graph.erase_node(plain)
        if regions.regions:
            root.add_module("regions", BoundRegions(regions.recomputation(lambda n: _recomputing(n, targets[n]))))
        self.module = torch.fx.GraphModule(root, graph)
        self._run = compiled.compiled(self.module, self._options_of_compiler()) if compiled else self.module.forward
        self._named: Callable[..., object] | None = None  # the program in ranges of a profile; made when one is taken
        buckets = (m.name for _, message in self.schedule.of("sum") for m in message.members)
        self.sums = {name: sums[name] for name in buckets if name in sums}
        self.followed = followed_by_gathers(lowered, {name: (last[name], merge(self.sums[name])) for name in self.sums})

    def attach(self, parameters: Mapping[str, Tensor]) -> None:
        """Tell the program the parameters whose local tensors will come in."""
        for part in self.module.children():
            if isinstance(part, BoundWeight):
                part.parameter = [parameters[part.name]]

    def __call__(self, *local: Tensor) -> list[Tensor]:
        run = self._run
        if profiling() and self._eager:
            run = self._named = self._named or named_module(self.module, self.lowered.names)
        if self._regathered is None:
            results = list(run(*local))
        else:
            with self._regathered:
                results = list(run(*local))
        if not self._eager:
            refuse_graph_of_compiled(results)
        return results

    def _options_of_compiler(self) -> dict[str, object]:
        """Options of inductor for the program: where the schedule has a gather under way while anything else runs, the
        compiled one has too."""
        gathers = (message for regathered in (False, True) for _, message in self.schedule.of("gather", regathered))
        return options_ahead() if any(message.apart for message in gathers) else {}

    def _call(self, kind: str, module: nn.Module, *args: Argument, **kwargs: Argument) -> FxNode:
        """A node that calls a new module."""
        name = f"{kind}_{len(module_table(self._root))}"
        self._root.add_module(name, module)
        return self._graph.call_module(name, args, kwargs)

    # -- what the schedule says

    def _events(self, env: dict[Node, FxNode], by_blocks: bool) -> list[_Event]:
        """The nodes that issue messages and wait for them, in the order in which they stand in the program.

        Args:
            env: a node of the lowered program -> the node here.
            by_blocks: False where regathered weights are gathered one by one.
        """
        events: list[_Event] = []
        nodes = {self._places[n.meta["instruction"]]: n for n in self.lowered.nodes if "instruction" in n.meta}
        for number, message in self.schedule.of("gather"):
            members = [m.place for m in message.members]
            if message.once:
                events += self._gather_once(number, message)
                continue
            regathered = not self._eager and any(self._redistribute(place).reshard_after_forward for place in members)
            if regathered and not by_blocks:
                continue
            gather = self._block(members, "forward", bucket_text(number, message))
            if regathered:
                self._blocks.update((place, index) for index, place in enumerate(members))

                def block(gather: BlockGather = gather, members: list[int] = members) -> None:
                    stored = [env[nodes[place].args[0]] for place in members]
                    steps = [self._backward(self._redistribute(place)) for place in members]
                    made = self._call("block", CompiledBlock(gather, steps), *stored)
                    self._parts.update((place, made) for place in members)

                events.append(_Event(message.wait, (1, 1, number), block))
                continue
            for index, place in enumerate(members):
                self._taken[place] = gather.members[index], index
            stored = [nodes[place].args[0] for place in members]
            issued: list[FxNode] = []

            def issue(gather: BlockGather = gather, stored: list[Node] = stored, issued: list[FxNode] = issued) -> None:
                issued.append(self._call("issue", IssuedGather(gather), *(env[x] for x in stored)))

            def wait(gather: BlockGather = gather, members: list[int] = members, issued: list[FxNode] = issued) -> None:
                waited = self._call("wait", WaitedGather(gather), issued[0])
                self._parts.update((place, waited) for place in members)

            events += [_Event(message.issue, (1, 0, number), issue), _Event(message.wait, (1, 1, number), wait)]
        if self._eager:
            self._gathers_of_backward()
        for place, (begin, end) in self._splits.items():
            node, moved = nodes[place], self._split(self._redistribute(place))
            halves: list[FxNode] = []

            def issue_half(node: Node = node, moved: SplitRedistribute = moved, halves: list[FxNode] = halves) -> None:
                halves.append(self._call("issue", IssuedHalf(moved), env[node.args[0]]))

            def wait_half(node: Node = node, moved: SplitRedistribute = moved, halves: list[FxNode] = halves) -> None:
                env[node] = self._call("wait", WaitedHalf(moved), halves[0])

            events += [_Event(begin, (0, 0, place), issue_half), _Event(end, (0, 1, place), wait_half)]
        return sorted(events, key=lambda event: event[:2])

    def _gather_once(self, number: int, message: ScheduledMessage) -> list[_Event]:
        """Make the gather of weights that micro-batches share; return the nodes that issue it and wait for it."""
        block = self._block([m.place for m in message.members], "forward", bucket_text(number, message), True)
        gather = GatherOnce(block, [m.name for m in message.members], not message.issue)
        self.gathered_once.append(gather)
        if not self._eager:  # the caller waits for all of them
            return []
        return [
            _Event(message.issue, (1, 0, number), lambda: self._step("issue", gather.issue)),
            _Event(message.wait, (1, 1, number), lambda: self._step("wait", gather.arrive)),
        ]

    def _step(self, kind: str, run: Callable[[], None]) -> None:
        self._call(kind, StepOfGather(run))

    def _redistribute(self, place: int) -> Redistribute:
        """The redistribution at this place of the program."""
        instruction = self._instructions[place]
        assert isinstance(instruction, Redistribute)
        return instruction

    def _block(self, places: Sequence[int], way: str, text: str, outside: bool = False) -> BlockGather:
        """The gather of the weights of one message, whose name in a profile is `text`; `outside` of the program, if it
        is compiled."""
        members = []
        for place in places:
            instruction = self._redistribute(place)
            (step,), shape = instruction.forward.steps, tuple(instruction.source.local_shape)
            pieces, arranged = arrangements(step.geometry(shape))
            single = self._steps(instruction.forward, shape, instruction, way)
            alone = partial(run_steps, steps=(*_cast(instruction.dtype), *single) if instruction.casts else single)
            name = instruction.source.value.name
            members.append(WeightOfBlock(instruction.dtype, pieces, arranged, alone, math.prod(shape), name))
        first = self._redistribute(places[0])
        wait = self._place(first.forward, first, way, len(places) - 1) if self._eager or outside else None
        return BlockGather(self.groups.seen(first.forward.steps[0].digits), members, wait, text)

    def _gathers_of_backward(self) -> None:
        """The gathers of the backward."""
        made: dict[int, GatherAgain] = {}
        for number, message in self.schedule.of("gather", repeats_forward=True):
            before = partial(_finish, self.scattered, self.schedule.early.get(number, ()))
            block = self._block([m.place for m in message.members], "backward", bucket_text(number, message))
            made[number] = GatherAgain(block, before, not self._stage)
            self.regathers.append(made[number])
            for index, member in enumerate(message.members):
                self._later[member.place] = made[number], index
        at = {m.moment: (n, k) for n in made for k, m in enumerate(self.schedule.messages[n].members)}
        for number, gather in made.items():
            asked, index = at[self.schedule.messages[number].issue]
            made[asked].begins.setdefault(index, []).append(gather)

    def _split(self, instruction: Redistribute) -> SplitRedistribute:
        forward, backward = instruction.forward, instruction.backward
        source, target = tuple(instruction.source.local_shape), tuple(instruction.target.local_shape)
        of = lambda steps, way: (
            self._place(steps, instruction, way) if steps is not None and steps.collectives else None
        )
        return SplitRedistribute(
            SplitSteps(forward, source, self.groups, of(forward, "forward"), self._dies(instruction, "forward")),
            SplitSteps(backward, target, self.groups, of(backward, "backward"), self._dies(instruction, "backward")),
            str(forward),
            self.lowered.names.redistribution(instruction) or "",
        )

    # -- redistributions

    def _extreme(self, instruction: GlobalExtreme) -> BoundExtreme:
        shape, layout = instruction.source.local_shape, instruction.source.layout
        summed = redistribution(layout.without_partial().with_partial(layout.partial), layout.without_partial())
        forward = self._steps(instruction.forward, shape, instruction, "forward")
        return BoundExtreme(forward, self._steps(summed, shape, instruction, "backward"), instruction.dims)

    def _bound(self, instruction: Redistribute, outside: bool = False) -> BoundRedistribute:
        forward = self._steps(instruction.forward, instruction.source.local_shape, instruction, "forward")
        if instruction.casts:
            forward = (*_cast(instruction.dtype), *forward)
        backward = self._backward(instruction, outside)
        label, place = str(instruction.forward), self._places[instruction]
        if instruction.reshard_after_forward and not self._eager:
            return CompiledGather(forward, backward, label)
        if not instruction.reshard_after_forward and place not in self._taken and place not in self._later:
            return BoundRedistribute(forward, backward, label)
        bound = BoundWeight(forward, backward, label, instruction.source.value.name)
        bound.taken, bound.later = self._taken.get(place), self._later.get(place)
        if bound.later is not None:
            gather, index = bound.later
            bound.regather_steps = (partial(gather.take, index),)
        if instruction.reshard_after_forward:
            bound.regathered = self._regathered = self._regathered or RegatheredWeights()
        return bound

    def _backward(self, instruction: Redistribute, outside: bool = False) -> Steps:
        if instruction.backward is None:
            return ()
        if instruction in self._late:
            return (*_cast(instruction.sums), self._late[instruction])
        shape, hsdp = instruction.target.local_shape, self.lowered.plan.hsdp
        parameter_dtype = instruction.source.value.dtype
        if (
            instruction.cause == "parameter"
            and instruction.forward.collectives
            and instruction.backward.source.partial
            and hsdp is not None
            and ((hsdp.accumulates_whole and not self._stage) or not self.groups.exchanges)
            and Scatter.fits(instruction.backward)
            and (self._eager or outside)
        ):
            self.scattered.append(
                Scatter(
                    instruction.source.value.name,
                    instruction.backward,
                    shape,
                    self.groups,
                    parameter_dtype,
                    instruction.sums,
                    hsdp.accumulates_whole and not self._stage,
                    self._scatter_messages.get(self._places[instruction]),
                )
            )
            return noted((self.scattered[-1],), self._place(instruction.backward, instruction, "backward"))
        steps = self._steps(instruction.backward, shape, instruction, "backward")
        if instruction.target.value.master is None:
            return steps
        return (*(_cast(instruction.sums) if steps else ()), *steps, *_cast(parameter_dtype))

    def _summed_late(self, parameter: Node) -> bool:
        """True where the gradient of a parameter is one sum or scatter, whose wait the program leaves to its end.

        A sum in another dtype than the parameter's is waited for at once: autograd itself casts it back.
        """
        user = sole_consumer(parameter)
        if user is None or user.target is not move:
            return False
        instruction, parameter_dtype = user.meta["instruction"], parameter.meta["instance"].value.dtype
        if instruction.backward is None or instruction.sums != parameter_dtype or parameter_dtype.is_complex:
            return False
        if sum_of_gradient(parameter) is not None:
            return True
        if not instruction.forward.collectives:
            return False
        late = late_scatter(instruction.backward, instruction.target.local_shape, self.groups)
        if late is not None:
            self._late[instruction] = late
        return late is not None

    def _steps(
        self, steps: Redistribution, shape: tuple[int, ...], instruction: Redistribute | GlobalExtreme, way: str
    ) -> Steps:
        """This rank's part of a redistribution. Unless compiled, a part that communicates notes the rank's position for
        the watchdog."""
        bound = bind_all(steps, shape, self.groups.rank, self.groups)
        if 0 not in shape and self._dies(instruction, way):
            bound = (all_reduce(self.groups.seen(steps.steps[0].digits), steps.steps[0].reduction, dies=True),)
        return noted(bound, self._place(steps, instruction, way)) if steps.collectives and self._eager else bound

    def _dies(self, instruction: Redistribute | GlobalExtreme, way: str) -> bool:
        """True where the one step of a redistribution may write to its input: a gradient that a pipeline keeps for
        the second half of a backward may not be written to."""
        forward, backward = self._in_place
        if way == "backward":
            return not self._stage and self._places.get(instruction) in backward
        return way == "forward" and self._places.get(instruction) in forward

    def _place(
        self, steps: Redistribution, instruction: Redistribute | GlobalExtreme, way: str, more: int = 0
    ) -> WaitPoint:
        """The wait point of a redistribution, or of a message of it and `more` others."""
        kinds, ranks = self._meetings.get(steps) or self._meetings.setdefault(steps, self._meeting(steps))
        line = self._lines.get(instruction.operator, "")
        value = instruction.source.value.name
        more_weights = f" and {more} other weights" if more else ""
        of = more_weights if value == instruction.operator else f" of {value!r}{more_weights}"
        return WaitPoint(
            f"the {kinds}{of} for operator {instruction.operator!r}{f' ({line})' if line else ''}"
            f"{', in its backward,' if way == 'backward' else ''}",
            ranks,
            way == "backward",
        )

    def _meeting(self, steps: Redistribution) -> tuple[str, tuple[int, ...]]:
        """The kinds of a redistribution's collectives, and the ranks of the processes that meet in them."""
        ranks = sorted({r for step in steps.collectives for r in group_of(self.groups.rank, step.digits)})
        kinds = " and ".join(dict.fromkeys(step.kind for step in steps.collectives))
        return kinds, tuple(self.groups.base + r for r in ranks)


def _finish(scattered: Sequence[Scatter], numbers: Sequence[int]) -> None:
    """Wait for messages of scatters, if they are under way."""
    for number in numbers:
        next(scatter for scatter in scattered if scatter.message == number).finish()


def _recomputing(node: Node, target: Callable[..., object]) -> Callable[[dict[str, object]], object]:
    """A function that computes a node from values by the names of their nodes."""

    def run(env: dict[str, object]) -> object:
        args, kwargs = map_leaves(lambda a: env[a.name] if type(a) is Node else a, (node.args, dict(node.kwargs)))
        return target(*args, **kwargs)

    return run

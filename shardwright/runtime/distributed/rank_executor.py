"""The processes runtime: one process a device, the lowered program on this rank's local tensors.

The program stays a `torch.fx.GraphModule`; its redistributions become submodules that hold this rank's part of each
step, forward and transposed. A local operator costs what it costs in plain PyTorch. `local.local_executor` runs the
same program for all ranks in one process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...layout import Digits, group_of, merge
from ...partition.local_program import GlobalExtreme, Redistribute
from ...redistribution import CollectiveKind, Redistribution, redistribution
from ...torch_private import module_table
from ..compilation import Compilation
from ..local.local_executor import ties
from ..local.operators import plain_function
from ..lower import Lowered, cast, extreme, move, sum_of_gradient
from ..saved_tensors import LoweredRegions, RegatheredWeights, RegionRun, Saver, keep
from .buckets import Scatter, block_of
from .collectives import Bound, arrangements, begin_gather, bind_all
from .compiled_parts import BoundSum, SumsEnd, gathered_again, late_scatter
from .process_groups import Group, ProcessGroups
from .watch.positions import WaitPoint, noted

__all__ = ["RankExecutor"]

Steps = tuple[Bound, ...]

# Up to this many elements a copy takes less time than a Python function in the backward.
SHORT = 1 << 10


class _Convert(torch.autograd.Function):
    """This rank's part of a redistribution and of its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Steps, backward: Steps) -> Tensor:
        ctx.steps = backward
        y = _run(x, forward)
        return y.view_as(y) if y is x else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _run(gradient, ctx.steps), None, None


def _run(x: Tensor, steps: Steps) -> Tensor:
    for step in steps:
        x = step(x)
    return x


class _Extreme(torch.autograd.Function):
    """A maximum or minimum over ranks; `local.local_executor` explains the gradient."""

    @staticmethod
    def forward(
        ctx: Any, reduced: Tensor, operand: Tensor, forward: Steps, count: Steps, dims: tuple[int, ...]
    ) -> Tensor:
        result = _run(reduced, forward)
        ctx.save_for_backward(reduced, operand, result)
        ctx.steps, ctx.dims = count, dims
        return result.view_as(result) if result is reduced else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced, operand, result = ctx.saved_tensors
        held = ties(operand, reduced, result, ctx.dims)
        return gradient * held / _run(held.to(gradient.dtype), ctx.steps), None, None, None, None


class Cast:
    """A step that changes the dtype."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class BoundRedistribute(nn.Module):
    """This rank's part of a redistribution."""

    def __init__(self, forward_steps: Steps, backward_steps: Steps, label: str) -> None:
        super().__init__()
        self.forward_steps, self.backward_steps, self.label = forward_steps, backward_steps, label

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad or not torch.is_grad_enabled():
            return _run(x, self.forward_steps)
        if not self.backward_steps and x.numel() <= SHORT:
            y = x.clone()  # its backward is in C++; most often a loss
            y.detach().copy_(_run(x.detach(), self.forward_steps))
            return y
        return _Convert.apply(x, self.forward_steps, self.backward_steps)

    __call__ = forward  # skips `nn.Module.__call__`: there are no hooks

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        return _run(gradient, self.backward_steps)

    def extra_repr(self) -> str:
        return self.label


class BoundGather(BoundRedistribute):
    """The redistribution of a weight whose gathered value is not kept for the backward."""

    def __init__(
        self, forward_steps: Steps, backward_steps: Steps, label: str, name: str, unkept: RegatheredWeights
    ) -> None:
        super().__init__(forward_steps, backward_steps, label)
        self.name, self.unkept = name, unkept
        self.again: Steps | None = None  # those of the backward, where they differ
        self.parameter: list[Tensor] = []  # in a list, so that it is not registered as the module's

    def forward(self, x: Tensor) -> Tensor:
        gathered, stored = super().forward(x), x.detach()
        # Some writes raise the version of the parameter, others that of its local tensor.
        steps = self.forward_steps if self.again is None else self.again
        self.unkept.note(self.name, (stored, *self.parameter), (gathered,), lambda: (_run(stored, steps),))
        return gathered

    __call__ = forward


class CompiledGather(BoundRedistribute):
    """The same in a compiled program, whose backward gathers again by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return gathered_again(super().forward, x) if x.requires_grad and torch.is_grad_enabled() else super().forward(x)

    __call__ = forward


def _cast(dtype: torch.dtype) -> Steps:
    return (Cast(dtype),)


class BlockGather:
    """The all-gathers of the weights of one block as one, on a library.

    The forward begins the gather of a block one block ahead of its first use, and each weight is taken where it is
    used. A backward that gathers again does the same in the opposite order, for the weights that were asked for in an
    earlier backward. A weight that is not under way is gathered by itself.

    Args:
        group: the ranks.

    Attributes:
        members: the weights, in the order of their first use.
        before: the block that the forward uses before this one, and the backward after it; None for the first.
    """

    def __init__(self, group: Group) -> None:
        self.members: list[WeightOfBlock] = []
        self.before: BlockGather | None = None
        self._group = group
        self._stored: list[Tensor] = []
        self._ahead: dict[int, tuple[Tensor, Any]] = {}  # of the forward: member -> what is received, and its work
        self._again: dict[int, tuple[Tensor, Any]] = {}  # of the backward
        self._asked: set[int] = set()  # members that a backward has gathered again
        self._went_back = False

    def begin(self, stored: Sequence[Tensor]) -> None:
        """Begin the gather of a forward."""
        self._stored, self._again, self._went_back = [x.detach() for x in stored], {}, False
        self._ahead = self._begun(range(len(self.members)))

    def _begun(self, which: Iterable[int]) -> dict[int, tuple[Tensor, Any]]:
        which = list(which)
        with torch.no_grad():
            pieces = [self.members[k].pieces(self._stored[k].to(self.members[k].dtype)) for k in which]
            if len({p.dtype for p in pieces}) > 1:  # autocast casts some weights of a block: all travel as bytes
                pieces = [p.view(torch.uint8) for p in pieces]
            received, work = begin_gather(self._group, pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        parts = received.view(self._group.size, -1).split([len(p) for p in pieces], 1)
        return {k: (part, work) for k, part in zip(which, parts)}

    def take(self, index: int, x: Tensor) -> Tensor:
        """A weight of the forward, from its part `x` on this rank."""
        if index not in self._ahead:
            return self.members[index].alone(x)
        return self._waited(index, self._ahead.pop(index))

    def take_again(self, index: int, x: Tensor) -> Tensor:
        """A weight of the backward."""
        if index not in self._asked:
            self._asked.add(index)
            return self.members[index].alone(x)
        if index not in self._again:
            self._go_back()
        if self.before is not None and not self.before._went_back:
            self.before._go_back()
        return self._waited(index, self._again.pop(index))

    def _go_back(self) -> None:
        self._went_back = True
        if self._asked:
            self._again = self._begun(sorted(self._asked))

    def _waited(self, index: int, under_way: tuple[Tensor, Any]) -> Tensor:
        part, work = under_way
        work.wait()
        member = self.members[index]
        return member.arranged(part.reshape(-1).view(member.dtype))


class WeightOfBlock(NamedTuple):
    """A weight of a `BlockGather`.

    Attributes:
        dtype: in which it is gathered.
        pieces: part -> what is sent to all ranks.
        arranged: what is received -> the weight.
        alone: part -> the weight, by a gather of its own.
    """

    dtype: torch.dtype
    pieces: Bound
    arranged: Bound
    alone: Bound


class BoundAhead(nn.Module):
    """The node that begins the gathers of a block."""

    def __init__(self, gathers: Sequence[BlockGather]) -> None:
        super().__init__()
        self.gathers = gathers

    def forward(self, *stored: Tensor) -> None:
        at = 0
        for gather in self.gathers:
            gather.begin(stored[at : at + len(gather.members)])
            at += len(gather.members)

    __call__ = forward


class BoundExtreme(nn.Module):
    """This rank's part of a maximum or minimum over ranks."""

    def __init__(self, forward_steps: Steps, count_steps: Steps, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.forward_steps, self.count_steps, self.dims = forward_steps, count_steps, dims

    def forward(self, reduced: Tensor, operand: Tensor) -> Tensor:
        return _Extreme.apply(reduced, operand, self.forward_steps, self.count_steps, self.dims)


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

    def __init__(self, saver: Saver, target: Callable[..., Any]) -> None:
        super().__init__()
        self.saver, self.target = saver, target

    def forward(self, runs: list[RegionRun] | None, watched: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        if runs is None:
            return self.target(*args, **kwargs)
        return self.saver(runs, watched, lambda: self.target(*args, **kwargs))


class RankExecutor:
    """A lowered program on one rank.

    All ranks construct it from the same plan at the same time: process groups are made here, in the program's order.

    Args:
        lowered: the program.
        groups: this rank's process groups.
        compiled: the way ``torch.compile`` compiles the program, or None. The compiler then chooses what is
            recomputed in the backward, gradients are scattered as they come, and on a library they are summed by the
            program itself (`compiled_parts`).
        scatters: True where gradients of parameters that are stored in parts are scattered as they come, in any case.
        outside: names of gathered weights that the caller passes in already gathered (`Plan.gathered_once`); it
            gathers them by `gathers`.

    Attributes:
        sums: parameter -> the digits over which its gradient is summed once it is complete, where the program does
            not sum it. The order is that in which gradients come: by the parameter's first use, last use first; among
            the parameters of one operator, the last first.
        types: parameter -> the dtype of this sum.
        followed: the parameters of `sums` after whose gradient the backward's next redistribution gathers over the
            same digits.
        scattered: a `Scatter` for each gradient that may be accumulated whole, of parameters that are stored in
            parts.
        gathers: parameter -> the redistribution from its storage to its use, for those that are gathered outside.
        module: the bound `torch.fx.GraphModule`: local parameters, buffers, constants, inputs in; outputs, then the
            new values of buffers, out.
    """

    def __init__(
        self,
        lowered: Lowered,
        groups: ProcessGroups,
        compiled: Compilation | None = None,
        scatters: bool = False,
        outside: Collection[str] = (),
    ) -> None:
        self.lowered, self.groups, self._scatters = lowered, groups, scatters
        self.gathers: dict[str, BoundRedistribute] = {}
        self.types: dict[str, torch.dtype] = {}
        self._eager = not compiled
        self._late: dict[int, Bound] = {}  # by id of an instruction: its backward, which does not wait
        self._of_block: dict[torch.fx.Node, tuple[BlockGather, int]] = {}
        self._unkept: RegatheredWeights | None = None
        self._lines = {op.name: op.source for op in lowered.plan.graph.ops}
        self.scattered: list[Scatter] = []
        root = nn.Module()
        graph = torch.fx.Graph()
        env: dict[torch.fx.Node, torch.fx.Node] = {}
        sums: list[tuple[int, str, Digits]] = []
        number = {node: i for i, node in enumerate(lowered.graph.nodes)}
        passed: set[torch.fx.Node] = set()
        summed: set[torch.fx.Node] = set()  # parameters whose gradients the program sums itself
        # In a pipeline micro-batches share one sum; on Gloo the buckets of `GradientSums` are faster.
        inside: list[torch.fx.Node] | None = [] if compiled and not groups.exchanges and not scatters else None
        regions, targets = LoweredRegions(lowered, lambda n: n.name), {}
        runs: torch.fx.Node | None = None
        ahead = self._blocks(outside) if self._eager and not groups.exchanges else {}
        for node in lowered.graph.nodes:
            if node in ahead:
                begun, stored = ahead[node]
                name = f"ahead_{len(module_table(root))}"
                root.add_module(name, BoundAhead(begun))
                graph.call_module(name, tuple(env[x] for x in stored))
            if regions.regions and runs is None and node.op != "placeholder":
                runs = graph.call_module("regions")
            for region, key, value, copy in regions.reads.get(node, ()):
                graph.call_function(keep, (runs, region, key, env[value], copy))
            if node.op == "placeholder" and node.meta["instance"].value.name in lowered.parameters:
                sole = sum_of_gradient(node)
                if sole is not None:
                    passed.add(sole)
                if inside is not None and self._summed_late(node):
                    inside.append(node)
            elif node.op != "placeholder" and inside:
                root.add_module("sums_end", SumsEnd())
                ends = graph.call_module("sums_end", tuple(env[parameter] for parameter in inside))
                for i, parameter in enumerate(inside):
                    env[parameter] = graph.call_function(operator.getitem, (ends, i))
                summed, inside = set(inside), None
            if node in passed and node.args[0] in summed:
                # Here, and not with its parameter: a backward runs in the opposite order of the forward.
                instruction, name = node.meta["instruction"], f"sum_{len(module_table(root))}"
                root.add_module(name, BoundSum(groups.seen(instruction.backward.steps[0].digits), instruction.sums))
                env[node] = cast(graph, graph.call_module(name, (env[node.args[0]],)), node)
            elif node in passed:
                instruction = node.meta["instruction"]
                name = instruction.source.value.name
                sums.append(
                    (min(map(number.__getitem__, node.users), default=0), name, instruction.backward.steps[0].digits)
                )
                self.types[name] = instruction.sums
                if instruction.target.name in outside:
                    env[node] = env[node.args[0]]
                    self.gathers[name] = BoundRedistribute(
                        _cast(instruction.dtype), _cast(instruction.source.value.dtype), ""
                    )
                else:
                    env[node] = cast(graph, env[node.args[0]], node)
            elif node.target is move and node.meta["instruction"].target.name in outside:
                env[node] = env[node.args[0]]
                self.gathers[node.meta["instruction"].source.value.name] = self._bound(node.meta["instruction"])
            elif node.target is move or node.target is extreme:
                name = f"convert_{len(module_table(root))}"
                root.add_module(name, self._bound(node.meta["instruction"], self._of_block.get(node)))
                targets[node] = getattr(root, name)
                env[node] = graph.call_module(name, tuple(env[a] for a in node.args))
            else:
                env[node] = graph.node_copy(node, env.__getitem__)
                if node.op == "call_function":
                    env[node].target = targets[node] = plain_function(node, bool(compiled))
            if node in regions.savers:
                plain, name = env[node], f"saving_{len(module_table(root))}"
                root.add_module(name, BoundSaver(regions.savers[node], targets[node]))
                watched = tuple(env[n] for n in regions.watched(node))
                env[node] = graph.call_module(name, (runs, watched, *plain.args), plain.kwargs)
                graph.erase_node(plain)
        if regions.regions:
            root.add_module("regions", BoundRegions(regions.again(lambda n: _again(n, targets[n]))))
        self.module = torch.fx.GraphModule(root, graph)
        self._call = compiled.compiled(self.module) if compiled else self.module.forward
        ordered = sorted(reversed(sums), key=lambda use: -use[0])
        self.sums = {name: digits for _, name, digits in ordered}
        self.followed = [name for use, name, digits in ordered if _gathers_next(lowered, use, digits)]

    def attach(self, parameters: Mapping[str, Tensor]) -> None:
        """Tell the program the parameters whose local tensors will come in."""
        for part in self.module.children():
            if isinstance(part, BoundGather):
                part.parameter = [parameters[part.name]]

    def __call__(self, *local: Tensor) -> list[Tensor]:
        if self._unkept is None:
            return list(self._call(*local))
        with self._unkept:
            return list(self._call(*local))

    def _blocks(
        self, outside: Collection[str]
    ) -> dict[torch.fx.Node, tuple[list[BlockGather], tuple[torch.fx.Node, ...]]]:
        """The gathers of weights that a library does together.

        Returns:
            Node -> the gathers that begin before it, and the parameters that they gather: those of a block begin
                before the first weight of the block before is used.
        """
        found: dict[str, dict[Hashable, tuple[BlockGather, list[torch.fx.Node]]]] = {}
        first: dict[str, torch.fx.Node] = {}
        for node in self.lowered.graph.nodes:
            if node.target is not move or node.args[0].op != "placeholder":
                continue
            instruction = node.meta["instruction"]
            name, steps = instruction.source.value.name, instruction.forward.steps
            if name not in self.lowered.parameters or instruction.target.name in outside or len(steps) != 1:
                continue
            if steps[0].pattern is not CollectiveKind.ALL_GATHER or not instruction.dtype.is_floating_point:
                continue
            block, digits = block_of(name), steps[0].digits
            first.setdefault(block, node)
            gathers = found.setdefault(block, {})
            gather, nodes = gathers.setdefault(digits, (BlockGather(self.groups.seen(digits)), []))
            shape = tuple(instruction.source.local_shape)
            pieces, arranged = arrangements(steps[0].geometry(shape))
            single = self._steps(instruction.forward, shape, instruction, "forward")
            alone = partial(_run, steps=(*_cast(instruction.dtype), *single) if instruction.casts else single)
            self._of_block[node] = gather, len(gather.members)
            gather.members.append(WeightOfBlock(instruction.dtype, pieces, arranged, alone))
            nodes.append(node.args[0])
        out: dict[torch.fx.Node, tuple[list[BlockGather], tuple[torch.fx.Node, ...]]] = {}
        before: str | None = None
        last: dict[Hashable, BlockGather] = {}
        for block, gathers in found.items():
            begun, stored = out.setdefault(first[before or block], ([], ()))
            for key, (gather, nodes) in gathers.items():
                gather.before, last[key] = last.get(key), gather
                begun.append(gather)
                stored = (*stored, *nodes)
            out[first[before or block]] = begun, stored
            before = block
        return out

    def _bound(
        self, instruction: Redistribute | GlobalExtreme, of_block: tuple[BlockGather, int] | None = None
    ) -> nn.Module:
        forward = self._steps(instruction.forward, instruction.source.local_shape, instruction, "forward")
        if isinstance(instruction, Redistribute) and instruction.casts:
            forward = (*_cast(instruction.dtype), *forward)
        if of_block is not None:
            gather, index = of_block
            forward = noted((partial(gather.take, index),), self._place(instruction.forward, instruction, "forward"))
        if isinstance(instruction, GlobalExtreme):
            layout = instruction.source.layout
            summed = redistribution(layout.without_partial().with_partial(layout.partial), layout.without_partial())
            counts = self._steps(summed, instruction.source.local_shape, instruction, "backward")
            return BoundExtreme(forward, counts, instruction.dims)
        backward = self._backward(instruction)
        label = str(instruction.forward)
        if not instruction.again:
            return BoundRedistribute(forward, backward, label)
        if not self._eager:
            return CompiledGather(forward, backward, label)
        self._unkept = self._unkept or RegatheredWeights()
        bound = BoundGather(forward, backward, label, instruction.source.value.name, self._unkept)
        if of_block is not None:
            gather, index = of_block
            bound.again = noted(
                (partial(gather.take_again, index),), self._place(instruction.forward, instruction, "backward")
            )
        return bound

    def _backward(self, instruction: Redistribute) -> Steps:
        if instruction.backward is None:
            return ()
        if id(instruction) in self._late:
            return (*_cast(instruction.sums), self._late[id(instruction)])
        shape, hsdp, held = instruction.target.local_shape, self.lowered.plan.hsdp, instruction.source.value.dtype
        if (
            instruction.cause == "parameter"
            and instruction.forward.collectives
            and instruction.backward.source.partial
            and hsdp is not None
            and (hsdp.accumulates_whole or not self.groups.exchanges)
            and Scatter.fits(instruction.backward)
            and self._eager
            and not self._scatters
        ):
            self.scattered.append(
                Scatter(
                    instruction.source.value.name,
                    instruction.backward,
                    shape,
                    self.groups,
                    held,
                    instruction.sums,
                    hsdp.accumulates_whole,
                )
            )
            return noted((self.scattered[-1],), self._place(instruction.backward, instruction, "backward"))
        steps = self._steps(instruction.backward, shape, instruction, "backward")
        if instruction.target.value.master is None:
            return steps
        return (*(_cast(instruction.sums) if steps else ()), *steps, *_cast(held))

    def _summed_late(self, parameter: torch.fx.Node) -> bool:
        """True where the gradient of a parameter is one sum or scatter, whose wait the program leaves to its end.

        A sum in another dtype than the parameter's is waited for at once: autograd itself casts it back.
        """
        user = next(iter(parameter.users), None)
        if len(parameter.users) != 1 or user.target is not move:
            return False
        instruction, held = user.meta["instruction"], parameter.meta["instance"].value.dtype
        if instruction.backward is None or instruction.sums != held or held.is_complex:
            return False
        if sum_of_gradient(parameter) is not None:
            return True
        if not instruction.forward.collectives:
            return False
        late = late_scatter(instruction.backward, instruction.target.local_shape, self.groups)
        if late is not None:
            self._late[id(instruction)] = late
        return late is not None

    def _steps(
        self, steps: Redistribution, shape: tuple[int, ...], instruction: Redistribute | GlobalExtreme, way: str
    ) -> Steps:
        """This rank's part of a redistribution. Unless compiled, a part that communicates notes the rank's position for
        the watchdog."""
        bound = bind_all(steps, shape, self.groups.rank, self.groups)
        return noted(bound, self._place(steps, instruction, way)) if steps.collectives and self._eager else bound

    def _place(self, steps: Redistribution, instruction: Redistribute | GlobalExtreme, way: str) -> WaitPoint:
        kinds = " and ".join(dict.fromkeys(step.kind for step in steps.collectives))
        line = self._lines.get(instruction.operator, "")
        value = instruction.source.value.name
        of = "" if value == instruction.operator else f" of {value!r}"
        ranks = sorted({r for step in steps.collectives for r in group_of(self.groups.rank, step.digits)})
        return WaitPoint(
            f"the {kinds}{of} for operator {instruction.operator!r}{f' ({line})' if line else ''}"
            f"{', in its backward,' if way == 'backward' else ''}",
            tuple(self.groups.base + r for r in ranks),
            way == "backward",
        )


def _gathers_next(lowered: Lowered, use: int, digits: Digits) -> bool:
    """True where, in a backward, the first redistribution that communicates after that of node `use` gathers over
    `digits`."""
    for node in reversed(list(lowered.graph.nodes)[:use]):
        backward = node.meta["instruction"].backward if node.target is move else None
        if backward is not None and backward.collectives and sum_of_gradient(node.args[0]) is not node:
            first = backward.steps[0]
            return first.kind is CollectiveKind.ALL_GATHER and first.digits == merge(digits)
    return False


def _again(node: torch.fx.Node, target: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """A function that computes a node from values by the names of their nodes."""

    def run(env: dict[str, Any]) -> Any:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: env[n.name])
        return target(*args, **kwargs)

    return run

"""The local runtime: all ranks in one process, in lockstep, operator by operator.

A value is one tensor with all ranks' shards (`shards`), so that an operator is one call for all ranks. The user sees
whole parameters; the ranks' slices are views of these. So a laptop runs a plan for eight or sixty-four devices
without a launcher, and runs the same redistributions, forward and backward, as eight or sixty-four processes would.
Replicas that were computed independently are stored once per rank and compared when gathered.

`SingleDeviceExecutor` runs a program of one device: the lowered graph itself, as plain PyTorch.
`distributed.rank_executor` runs the same programs with a process a rank.

Example: x [32, 16], cut along dim 0 on 8 devices, is one tensor [8, 4, 16] of shards, and a linear operator with 32
features runs once, with the result [8, 4, 32].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout import Layout
from ...partition.local_program import GlobalExtreme, PlacedValue, Redistribute
from ...partition.padded_dims import amounts
from ...redistribution import Redistribution, redistribution
from ..compilation import Compilation
from ..lowering import Lowered, Node, cast, copied, extreme, move, number_of_result, operand, sum_of_gradient
from ..profile_ranges import named_module, named_steps, profiling
from ..redistribution_functions import ExtremeFunction, RedistributionFunction, exchanging
from ..saved_tensors import LoweredRegions, RegatheredWeights, keep
from .operators import Call, plain_function
from .shards import Axes, RankShape, assemble, convert_shards as convert_list, converting, scatter, union

__all__ = ["LocalExecutor", "SingleDeviceExecutor"]


def convert_shards(redistribution: Redistribution, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """All ranks' shards in the target's layout, computed by `run`.

    Every redistribution of a program passes here, so that a test can make one wrong and check that `verify` names it.
    """
    return run(x)


class _Scatter(torch.autograd.Function):
    """Whole tensor -> every rank's slice. Backward: the ranks' slices of the gradient -> the whole gradient; replicas
    must agree."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, layout: Layout, axes: Axes, rank_shape: RankShape) -> Tensor:
        ctx.layout, ctx.axes, ctx.rank_shape = layout, axes, rank_shape
        return axes.stack(scatter(whole, layout), rank_shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():  # create_graph=True
            return _Assemble.apply(gradient, ctx.layout, ctx.axes, ctx.rank_shape, True), None, None, None
        return assemble(ctx.axes.shards(gradient, ctx.rank_shape), ctx.layout, check=True), None, None, None


class _Assemble(torch.autograd.Function):
    """Every rank's slice -> the whole tensor. Backward: the slices of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, axes: Axes, rank_shape: RankShape, check: bool) -> Tensor:
        ctx.layout, ctx.axes, ctx.rank_shape = layout, axes, rank_shape
        return assemble(axes.shards(x, rank_shape), layout, check=check)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return _Scatter.apply(gradient, ctx.layout, ctx.axes, ctx.rank_shape), None, None, None, None
        return ctx.axes.stack(scatter(gradient, ctx.layout), ctx.rank_shape), None, None, None, None


class _Ways(NamedTuple):
    """A redistribution and its transpose, with the functions that compute them.

    Types: the dtypes in which the value is moved, in which its gradient is moved, and of the resulting gradient; None
    where all are as they come.
    """

    forward: Redistribution
    backward: Redistribution | None
    run: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor] | None
    types: tuple[torch.dtype, torch.dtype, torch.dtype] | None = None

    def convert(self, x: Tensor) -> Tensor:
        return convert_shards(self.forward, x if self.types is None else x.to(self.types[0]), self.run)

    def transpose(self, gradient: Tensor) -> Tensor:
        assert self.backward is not None and self.back is not None
        if self.types is None:
            return convert_shards(self.backward, gradient, self.back)
        _, sums, dtype = self.types
        return convert_shards(self.backward, gradient.to(sums), self.back).to(dtype)


#: The values of a program by their slots, tensors, lists of tensors and plain values; the regions of the call are last.
#: Or the operands of a step among them.
_Values = Sequence[Any]
#: A step of a program: its operands -> the value of its slot.
_Step = Callable[[_Values], object]
#: The function that finds the operands of a step among all values.
_Read = Callable[[_Values], _Values]


class LocalExecutor:
    """A lowered program, run for all ranks at once.

    Args:
        lowered: the program.

    Attributes:
        record: called with (node, shards) after each node; used to compare a plan with one device.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.record: Callable[[Node, object], None] | None = None
        nodes = lowered.nodes
        self.axes = Axes.of_layouts(lowered.plan.devices, _layouts(nodes))
        self._slots = {node: i for i, node in enumerate(nodes)}
        self._rank_shapes: dict[Node, RankShape] = {}
        self._terms: dict[Node, RankShape] = {}
        self._gradients: dict[Node, Layout] = {}
        self._ways: dict[Node, _Ways] = {}
        self._calls: dict[object, _Step] = {}  # form of a call -> its step
        for node in nodes[:-1]:
            self._lay(node)
        # These redistributions only sum the gradients of a value that is stored once: its consumer sums them already.
        self._passed = {
            sole for n in nodes if n.op == "placeholder" for sole in [sum_of_gradient(n)] if sole in self._terms
        }
        parameters = lowered.plan.graph.parameters
        self._padded = {
            self._slots[n]: amounts(parameters[v.name].shape, v.shape)
            for n in nodes
            if n.op == "placeholder"
            for v in [n.meta["instance"].value]
            if v.name in parameters and parameters[v.name].shape != v.shape
        }
        self._placeholders = [(self._slots[n], self._scattering(n)) for n in nodes if n.op == "placeholder"]
        self._regathered = RegatheredWeights()
        self._regions = LoweredRegions(lowered, self._slots.__getitem__)
        self._begin = self._regions.recomputation(self._step)
        #: For each call its slot, and a function of what is read of all values.
        self._steps = [(n, self._slots[n], *self._saving(n)) for n in nodes if n.op == "call_function"]
        #: The steps as ranges of a profile; made when one is taken.
        self._named: list[tuple[Node, int, _Step, _Read]] | None = None
        self._outputs = [(self._slots[n], self._assembling(n)) for n in nodes[-1].args[0]]
        self._frees = _last_uses(nodes, self._slots)
        self._keeps = not any(n.target is move and n.meta["instruction"].reshard_after_forward for n in nodes)

    def __call__(self, *whole: Tensor) -> list[Tensor]:
        """Run on whole tensors: parameters, buffers, constants, then inputs.

        Returns:
            The whole outputs, then the whole new values of buffers.
        """
        if self._keeps:
            return self._run(whole)
        with self._regathered:
            return self._run(whole)

    def _run(self, whole: tuple[Tensor, ...]) -> list[Tensor]:
        env: list[Any] = [None] * len(self._slots)
        env.append(self._begin() if self._regions.regions and torch.is_grad_enabled() else None)
        for (slot, cut), tensor in zip(self._placeholders, whole, strict=True):
            if slot in self._padded:
                tensor = torch.nn.functional.pad(tensor, self._padded[slot])
            env[slot] = tensor if cut is None else cut(tensor)
        record = self.record
        for (node, slot, step, read), free in zip(self._named_steps() if profiling() else self._steps, self._frees):
            env[slot] = step(read(env))
            if record is not None and node not in self._passed:
                env[slot] = self._recorded(record, node, env[slot])
            for dead in free:
                env[dead] = None
        return [env[slot] if join is None else join(env[slot]) for slot, join in self._outputs]

    def _named_steps(self) -> list[tuple[Node, int, _Step, _Read]]:
        if self._named is None:
            steps = [(node, slot, _composed(step, read)) for node, slot, step, read in self._steps]
            named = named_steps(steps, self._slots, self.lowered.names, self._passed)
            self._named = [(node, slot, step, _all) for node, slot, step in named]
        return self._named

    def _recorded(self, record: Callable[[Node, object], None], node: Node, value: Tensor | Sequence[object]) -> object:
        """Pass a value to `record`, shard by shard; return a value built from these shards, so that they get
        gradients."""
        axes, rank_shape = self.axes, self._rank_shapes[node]
        if not isinstance(value, Tensor):
            each = (axes.shards(x, rank_shape) if isinstance(x, Tensor) else [x] * axes.devices for x in value)
            record(node, list(zip(*each)))
            return value
        parts = axes.unbind(value, rank_shape)
        record(node, [parts[k] for k in axes.places(rank_shape)])
        return axes.joined(parts, rank_shape)

    # -- the axes of each value --

    def _lay(self, node: Node) -> None:
        """Note the axes along which a value differs, and the layout of its gradient."""
        axes, placed = self.axes, node.meta.get("instance")
        if placed is not None:
            self._gradients[node] = placed.layout.without_partial()
        if node.op == "placeholder":
            assert placed is not None
            self._rank_shapes[node] = axes.along(placed.layout.carried)
        elif node.target is move or node.target is extreme:
            self._ways[node], self._rank_shapes[node] = (
                self._redistribution if node.target is move else self._extremes
            )(node)
            if node in self._terms and sum_of_gradient(operand(node)) is node:
                self._rank_shapes[node] = self._rank_shapes[operand(node)]  # the node is skipped
        elif "instruction" not in node.meta:  # one output of an operator with several
            self._rank_shapes[node] = self._rank_shapes[operand(node)]
        else:
            terms = [self._terms.get(a, ()) for a in node.all_input_nodes if a.meta["instance"].value.requires_grad]
            self._rank_shapes[node] = union(*(self._rank_shapes[a] for a in node.all_input_nodes), *terms)

    def _redistribution(self, node: Node) -> tuple[_Ways, RankShape]:
        instruction: Redistribute = node.meta["instruction"]
        source, target = instruction.source, instruction.target
        forward, backward, axes = instruction.forward, instruction.backward, self.axes
        before, after = self._rank_shapes[operand(node)], axes.along(target.layout.carried + target.layout.partial)
        # In `hybrid_parallel` programs each rank has its own term of an open sum: gradients of the terms need not be
        # equal.
        per_rank, run, back = self.lowered.plan.own is not None, None, None
        if forward.exchanges_halos:
            after = before
            run = exchanging(axes.numbers, len(axes.sizes), forward)
            back = None if backward is None else exchanging(axes.numbers, len(axes.sizes), backward)
        elif not per_rank or forward.is_identity:
            run = converting(axes, forward.source, forward.target, before, after, source.local_shape)
        if run is not None and backward is not None and back is None:
            back = converting(
                axes,
                backward.source,
                backward.target,
                after,
                before,
                target.local_shape,
                summed=True,
                alike=() if per_rank else target.layout.partial,
            )
        if run is None or (back is None and backward is not None):
            run, after = self._listed(forward, before, axes.sizes), axes.sizes
            back = None if backward is None else self._listed(backward, after, before)
        elif backward is not None:
            self._gradients[node] = backward.source
            self._terms[node] = axes.along(backward.source.partial)
        types = None if target.value.master is None else (instruction.dtype, instruction.sums, source.value.dtype)
        return _Ways(forward, backward, run, back, types), after

    def _extremes(self, node: Node) -> tuple[_Ways, RankShape]:
        instruction: GlobalExtreme = node.meta["instruction"]
        source, layout, axes = instruction.source.layout, instruction.target.layout, self.axes
        terms = source.without_partial().with_partial(source.partial)
        total = redistribution(terms, source.without_partial())
        after, local = axes.along(layout.carried), instruction.source.local_shape
        before = union(*(self._rank_shapes[operand(node, k)] for k in (0, 1)), after)
        run = converting(axes, source, layout, before, after, local)
        back = converting(axes, terms, source.without_partial(), before, after, local)
        if run is None or back is None or self.lowered.plan.own is not None:
            before = after = axes.sizes
            run, back = self._listed(instruction.forward, before, after), self._listed(total, before, after)
        return _Ways(instruction.forward, total, run, back), after

    def _listed(self, found: Redistribution, before: RankShape, wanted: RankShape) -> Callable[[Tensor], Tensor]:
        """A redistribution shard by shard."""
        axes = self.axes
        return lambda x: axes.stack(convert_list(found, axes.shards(x, before)), wanted)

    def _scattering(self, node: Node) -> Callable[[Tensor], Tensor] | None:
        """The function from a whole tensor to a placeholder's value; None where they are the same."""
        placed: PlacedValue = node.meta["instance"]
        layout, shape, axes = placed.layout, placed.value.shape, self.axes
        if layout.is_replicated:
            return None
        cut = converting(
            axes, Layout.replicated(axes.devices, len(shape)), layout, (), self._rank_shapes[node], tuple(shape)
        )
        return cut or (lambda whole: _Scatter.apply(whole, layout, axes, axes.sizes))

    def _assembling(self, node: Node) -> Callable[[Tensor], Tensor] | None:
        """The function from an output's value to a whole tensor; None where they are the same."""
        placed: PlacedValue = node.meta["instance"]
        layout, rank_shape, axes = placed.layout, self._rank_shapes[node], self.axes
        if layout.is_replicated and not rank_shape:
            return None
        join = converting(
            axes, layout, Layout.replicated(axes.devices, len(placed.value.shape)), rank_shape, (), placed.local_shape
        )
        return join or (lambda x: _Assemble.apply(x, layout, axes, rank_shape, False))

    # -- the step of each node --

    def _saving(self, node: Node) -> tuple[_Step, _Read]:
        """A node's step with its part in recomputation: the values to keep and to drop. The call's regions are last in
        `env`."""
        compute, slots = self._computation(node)
        read = _reading(slots)
        reads, saver = self._regions.reads.get(node, ()), self._regions.savers.get(node)
        if not reads and saver is None:
            return compute, read

        def run(env: _Values) -> object:
            runs = env[-1]
            if runs is None:
                return compute(read(env))
            for region, slot, _, copy in reads:
                keep(runs, region, slot, env[slot], copy)
            if saver is None:
                return compute(read(env))
            return saver(runs, [env[slot] for _, slot in saver.inputs], lambda: compute(read(env)))

        return run, _all

    def _step(self, node: Node) -> Callable[[Mapping[int, object]], object]:
        """The step of a node as a function of values by their slots."""
        compute, slots = self._computation(node)
        return lambda env: compute([env[slot] for slot in slots])

    def _computation(self, node: Node) -> tuple[_Step, list[int]]:
        """The step of a node, and the slots of its operands."""
        slots = self._slots
        if node in self._passed:
            dtype = node.meta["instruction"].dtype
            return lambda read: read[0].to(dtype), [slots[operand(node)]]
        if node.target is move:
            return self._move(node)
        if node.target is extreme:
            return self._extreme(node)
        if "instruction" not in node.meta:
            return _result(number_of_result(node)), [slots[operand(node)]]
        call = Call(node, self.axes, self._rank_shapes, self._terms, self._gradients)
        return self._shared(call), [slots[a] for a in call.operands]

    def _shared(self, call: Call) -> _Step:
        """The step of a call: one for all calls of its form, since the layers of a model are often equal."""
        if not call.out:  # a plain call, which is made sooner than found
            return call.step()
        form = call.form()
        try:
            known = self._calls.get(form)
        except TypeError:  # an argument that cannot be looked up, such as a slice
            return call.step()
        if known is None:
            known = self._calls[form] = call.step()
        return known

    def _move(self, node: Node) -> tuple[_Step, list[int]]:
        instruction: Redistribute = node.meta["instruction"]
        ways = self._ways[node]
        forward, backward = (ways.convert,), (ways.transpose,)

        def run(read: _Values) -> Tensor:
            (x,) = read
            if ways.backward is not None and torch.is_grad_enabled() and x.requires_grad:
                return RedistributionFunction.apply(x, forward, backward)
            return ways.convert(x)

        made = self._gathering(instruction, ways, run) if instruction.reshard_after_forward else run
        return made, [self._slots[operand(node)]]

    def _gathering(self, instruction: Redistribute, ways: _Ways, run: Callable[[_Values], Tensor]) -> _Step:
        """The redistribution of a weight that is regathered in the backward."""
        name = instruction.source.value.name

        def gather(read: _Values) -> object:
            made, stored = run(read), read[0].detach()
            self._regathered.note(name, [stored], [made], lambda: [ways.convert(stored)])
            return made

        return gather

    def _extreme(self, node: Node) -> tuple[_Step, list[int]]:
        instruction: GlobalExtreme = node.meta["instruction"]
        ways, operands = self._ways[node], (operand(node, 0), operand(node, 1))
        rank_shape = union(*(self._rank_shapes[a] for a in (*operands, node)))
        shapes = [(*rank_shape, *placed.local_shape) for placed in (instruction.source, instruction.operand)]
        dims = tuple(len(rank_shape) + d for d in instruction.dims)
        forward, count = (ways.convert,), (ways.transpose,)
        return lambda read: ExtremeFunction.apply(
            read[0].expand(shapes[0]), read[1].expand(shapes[1]), forward, count, dims
        ), [self._slots[a] for a in operands]


def _reading(slots: Sequence[int]) -> _Read:
    """The function from all values to those in these slots."""
    return itemgetter(*slots) if len(slots) > 1 else _reading_few(*slots)


@cache
def _reading_few(*slots: int) -> _Read:
    """The same for one slot, or none."""
    return itemgetter(slice(slots[0], slots[0] + 1) if slots else slice(0))


def _all(env: _Values) -> _Values:
    """All values."""
    return env


def _composed(step: _Step, read: _Read) -> Callable[[_Values], object]:
    return lambda env: step(read(env))


@cache
def _result(index: int) -> _Step:
    """The function that takes one result of an operator with several."""
    return lambda read: read[0][index]


def _layouts(nodes: Sequence[Node]) -> list[Layout]:
    """All layouts of a program's values."""
    out = [n.meta["instance"].layout for n in nodes if "instance" in n.meta]
    out += [
        n.meta["instruction"].backward.source
        for n in nodes
        if n.target is move and n.meta["instruction"].backward is not None
    ]
    return out


def _last_uses(nodes: list[Node], slots: dict[Node, int]) -> list[Sequence[int]]:
    """For each call, the slots that no later node reads; their shards can be freed."""
    last: dict[int, int] = {}
    calls = [n for n in nodes if n.op == "call_function"]
    results = {slots[a] for a in nodes[-1].all_input_nodes}
    for i, node in enumerate(calls):
        for a in node.all_input_nodes:
            last[slots[a]] = i
    out: list[Sequence[int]] = [()] * len(calls)
    for slot, i in last.items():
        if slot not in results:
            out[i] = (*out[i], slot)
    return out


# -- one device


class SingleDeviceExecutor:
    """A lowered program of one device, where every redistribution is the identity, or a cast, and is removed.

    Args:
        lowered: the program.
        compiled: the way ``torch.compile`` compiles it, or None.

    Attributes:
        module: the `torch.fx.GraphModule`: parameters, buffers, constants, inputs in; outputs, then the new values of
            buffers, out.
    """

    def __init__(self, lowered: Lowered, compiled: Compilation | None = None) -> None:
        self.lowered = lowered
        graph = torch.fx.Graph()
        env: dict[Node, torch.fx.Node] = {}
        for node in lowered.nodes:
            if node.target is move or node.target is extreme:
                env[node] = cast(graph, env[operand(node)], node)
                continue
            env[node] = copied(graph, node, env)
            if node.op == "call_function":
                env[node].target = plain_function(node)
        self.module = torch.fx.GraphModule(torch.nn.Module(), graph)
        self._compiled = bool(compiled)
        self._run = compiled.compiled(self.module) if compiled else self.module.forward
        self._named: Callable[..., Any] | None = None  # the program in ranges of a profile; made when one is taken

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        if profiling() and not self._compiled:
            self._named = self._named or named_module(self.module, self.lowered.names)
            return list(self._named(*tensors))
        return list(self._run(*tensors))

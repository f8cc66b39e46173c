"""The local runtime: all ranks in one process, in lockstep, operator by operator.

A value is the list of its shards, one a rank. The user sees whole parameters: scattering one hands each rank its slice,
and the backward of that takes the ranks' gradients together again, checking that replicas agree. So a laptop runs a
plan for eight or sixty-four devices without a launcher, and runs the same conversions, forward and backward, as eight
or sixty-four processes would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..conversion import Conversion, conversion
from ..layout import Layout
from ..lower import Lowered, extreme, move, sum_of_gradient
from ..plan.padding import amounts
from ..plan.route import Extreme, Move
from ..rules.generator import PLAIN
from .products import products
from .recompute import Regions, keep
from .shards import assemble, convert_shards, scatter
from .unkept import Unkept

__all__ = ["LocalProgram"]

Shards = list[Tensor]


class _Scatter(torch.autograd.Function):
    """Whole tensor -> every rank's slice. Backward: the ranks' slices of the gradient -> the whole gradient.

    The slices of the gradient may be terms of sums: `gradient` is the layout in which they come.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, layout: Layout, gradient: Layout) -> tuple[Tensor, ...]:
        ctx.layout = gradient
        return _distinct(scatter(whole, layout), (whole,))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return assemble(list(gradients), ctx.layout, check=True), None, None


class _Assemble(torch.autograd.Function):
    """Every rank's slice -> the whole tensor. Backward: the gradient's slices."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *shards: Tensor) -> Tensor:
        ctx.layout = layout
        whole = assemble(list(shards), layout)
        return whole.view_as(whole) if any(whole is s for s in shards) else whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *scatter(gradient, ctx.layout)


class _Convert(torch.autograd.Function):
    """A conversion and its transpose. A value that is whole on every rank is one tensor, on either side."""

    @staticmethod
    def forward(ctx: Any, forward: Conversion, backward: Conversion, one_in: bool, one_out: bool, *tensors: Tensor
                ) -> Tensor | tuple[Tensor, ...]:
        ctx.conversion, ctx.one_in, ctx.one_out = backward, one_in, one_out
        devices = forward.source.devices
        results = convert_shards(forward, list(tensors) * devices if one_in else list(tensors))
        return _distinct(results[:1], tensors)[0] if one_out else _distinct(results, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        devices = ctx.conversion.source.devices
        results = convert_shards(ctx.conversion, list(gradients) * devices if ctx.one_out else list(gradients))
        return None, None, None, None, *(results[:1] if ctx.one_in else results)


class _Extreme(torch.autograd.Function):
    """A maximum or minimum over ranks.

    The gradient goes to the elements that attain it, shared equally: rank r with c_r of them gets c_r / Σ c of it,
    which its local operator shares among its own.
    """

    @staticmethod
    def forward(ctx: Any, instruction: Extreme, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        reduced, operands = tensors[:count], tensors[count:]
        results = convert_shards(instruction.forward, list(reduced))
        ctx.instruction = instruction
        ctx.save_for_backward(*reduced, *operands, *results)
        return _distinct(results, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        n = len(gradients)
        reduced, operands, results = (ctx.saved_tensors[i * n:(i + 1) * n] for i in range(3))
        held = [ties(x, m, y, ctx.instruction.dims) for x, m, y in zip(operands, reduced, results)]
        source = ctx.instruction.source.layout
        total = convert_shards(conversion(source.without_partial().with_partial(source.partial),
                                          source.without_partial()), [h.to(g.dtype) for h, g in zip(held, gradients)])
        return None, None, *(g * h / t for g, h, t in zip(gradients, held, total)), *([None] * n)


def ties(operand: Tensor, reduced: Tensor, result: Tensor, dims: Sequence[int]) -> Tensor:
    """How many of a rank's elements attain the extreme of all ranks, per element of the result."""
    shape = [1 if d in dims else size for d, size in enumerate(operand.shape)]
    count = (operand == reduced.reshape(shape)).sum(tuple(dims)).reshape(reduced.shape) if dims else \
        torch.ones_like(reduced)
    return torch.where(reduced == result, count, torch.zeros_like(count))


def _distinct(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Autograd tells the outputs of a function apart by object: aliases where two are one, or one is an input."""
    seen = {id(x) for x in inputs}
    out = []
    for x in results:
        if id(x) in seen:
            x = x.view_as(x)
        seen.add(id(x))
        out.append(x)
    return tuple(out)


class LocalProgram:
    """A lowered program, run for all ranks at once.

    A value is the list of its shards. One that is whole on every rank, and that every rank uses alike, is one tensor: what
    all ranks would do in the same way with the same thing is done once.

    Args:
        lowered: the program.

    Attributes:
        record: called with (node, shards) after each node; for comparing a plan with one device.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.lowered, self.devices = lowered, lowered.plan.devices
        self.record: Callable[[torch.fx.Node, Any], None] | None = None
        nodes = list(lowered.module.graph.nodes)
        self._slots = {node: i for i, node in enumerate(nodes)}
        self._one: dict[torch.fx.Node, bool] = {}
        for node in nodes[:-1]:
            self._one[node] = self._is_one(node)
        regions = Regions(lowered, self._slots.__getitem__)
        # Where parts are computed again, what is saved of a call has to be known one by one.
        self._products = {} if regions.regions else {n: p for n, p in products(lowered).items() if not self._one[n]}
        whole = {p.matrix for p in self._products.values()}
        self._passed = {p.passed for p in self._products.values()} - {None}
        self._summed = {sole: n for n in nodes if n.op == "placeholder" and not self._one[n]
                        for sole in [sum_of_gradient(n)] if sole is not None}
        gradients = {n: sole.meta["instruction"].backward.source for sole, n in self._summed.items()}
        self._padded = {self._slots[n]: amounts(true, instance.value.shape) for n in nodes if n.op == "placeholder"
                        for instance in [n.meta["instance"]] if instance.value.name in lowered.plan.graph.parameters
                        for true in [lowered.plan.graph.parameters[instance.value.name].shape]
                        if true != instance.value.shape}
        self._placeholders = [
            (self._slots[n], self._one[n] or n in whole, n.meta["instance"].layout, gradients.get(n, n.meta["instance"].layout))
            for n in nodes if n.op == "placeholder"]
        self._unkept = Unkept()
        self._regions = regions
        self._begin = self._regions.again(self._step)
        self._steps = [(n, self._slots[n], self._saving(n, self._step(n))) for n in nodes if n.op == "call_function"]
        self._outputs = [(self._slots[n], self._one[n], n.meta["instance"].layout) for n in nodes[-1].args[0]]
        self._frees = _last_uses(nodes, self._slots)
        self._keeps = not any(n.target is move and n.meta["instruction"].again for n in nodes)

    def __call__(self, *whole: Tensor) -> list[Tensor]:
        """Run on whole tensors: parameters, buffers, constants, then inputs.

        Returns:
            The whole outputs, then the whole new values of buffers.
        """
        if self._keeps:
            return self._run(whole)
        with self._unkept:
            return self._run(whole)

    def _run(self, whole: tuple[Tensor, ...]) -> list[Tensor]:
        env: list[Any] = [None] * len(self._slots)
        env.append(self._begin() if self._regions.regions and torch.is_grad_enabled() else None)
        for (slot, one, layout, gradient), tensor in zip(self._placeholders, whole, strict=True):
            if slot in self._padded:
                tensor = torch.nn.functional.pad(tensor, self._padded[slot])
            # Where no two ranks hold the same gradient, autograd itself sums the terms and joins the slices.
            env[slot] = tensor if one else _Scatter.apply(tensor, layout, gradient) \
                if gradient.replicas and tensor.requires_grad else scatter(tensor, layout)
        record = self.record
        for (node, slot, step), free in zip(self._steps, self._frees):
            env[slot] = step(env)
            if record is not None and node not in self._passed:
                record(node, [env[slot]] * self.devices if self._one[node] else env[slot])
            for dead in free:
                env[dead] = None
        return [env[slot] if one else _Assemble.apply(layout, *env[slot]) if env[slot][0].requires_grad
                else assemble(env[slot], layout) for slot, one, layout in self._outputs]

    def _is_one(self, node: torch.fx.Node) -> bool:
        """Whether a node's value is one tensor for all ranks."""
        if node.op == "placeholder":
            return node.meta["instance"].layout.is_replicated
        instruction = node.meta.get("instruction")
        if instruction is None:  # an output of an operator that has several
            return self._one[node.args[0]]
        if node.target is move:
            # The ranks' gradients of it are terms of a sum: each rank has a copy of its own.
            summed = instruction.backward is not None and bool(instruction.backward.source.partial)
            return instruction.target.layout.is_replicated and not summed
        if node.target is extreme:
            return instruction.target.layout.is_replicated
        made = [o.layout.is_replicated for o in instruction.outputs if o is not None]
        return all(made) and all(self._one[a] for a in node.all_input_nodes)

    def _saving(self, node: torch.fx.Node, step: Callable[[list], Any]) -> Callable[[list], Any]:
        """A node's step, and around it what recomputation keeps and drops; the call's regions are last in `env`."""
        reads, saver = self._regions.reads.get(node, ()), self._regions.savers.get(node)
        if not reads and saver is None:
            return step

        def run(env: list) -> Any:
            runs = env[-1]
            if runs is None:
                return step(env)
            for region, slot, _, copy in reads:
                keep(runs, region, slot, env[slot], copy)
            if saver is None:
                return step(env)
            return saver(runs, [env[slot] for _, slot in saver.inputs], lambda: step(env))
        return run

    def _step(self, node: torch.fx.Node) -> Callable[[Any], Any]:
        if node in self._products:
            return self._products[node].step(node, self._slots, self._one, self.devices)
        if node in self._passed:
            slot = self._slots[node.args[0]]
            return lambda env: env[slot]
        if node in self._summed:
            slot = self._slots[self._summed[node]]
            return lambda env: env[slot]
        if node.target is move:
            return self._move(node)
        if node.target is extreme:
            return self._extreme(node)
        return self._compute(node)

    def _move(self, node: torch.fx.Node) -> Callable[[list], Any]:
        instruction: Move = node.meta["instruction"]
        source, forward, backward = self._slots[node.args[0]], instruction.forward, instruction.backward
        one_in, one_out, devices = self._one[node.args[0]], self._one[node], self.devices

        def run(env: list) -> Any:
            tensors = (env[source],) if one_in else env[source]
            if backward is not None and torch.is_grad_enabled() and tensors[0].requires_grad:
                return _Convert.apply(forward, backward, one_in, one_out, *tensors)
            results = convert_shards(forward, list(tensors) * devices if one_in else list(tensors))
            return results[0] if one_out else results
        return self._gathering(instruction, source, one_in, run) if instruction.again else run

    def _gathering(self, instruction: Move, source: int, one_in: bool, run: Callable[[list], Any]
                   ) -> Callable[[list], Any]:
        """A weight's conversion whose result is not kept for the backward."""
        name, forward, devices = instruction.source.value.name, instruction.forward, self.devices

        def gather(env: list) -> Any:
            made = run(env)
            stored = [x.detach() for x in ((env[source],) * devices if one_in else env[source])]
            self._unkept.note(name, stored, made if isinstance(made, (list, tuple)) else [made],
                              lambda: convert_shards(forward, stored))
            return made
        return gather

    def _extreme(self, node: torch.fx.Node) -> Callable[[list], Any]:
        instruction: Extreme = node.meta["instruction"]
        reduced, operand = (self._slots[a] for a in node.args)
        one, layout = self._one[node], instruction.target.layout

        def run(env: list) -> Any:
            results = _Extreme.apply(instruction, self.devices, *env[reduced], *env[operand])
            return _Assemble.apply(layout, *results) if one else results
        return run

    def _compute(self, node: torch.fx.Node) -> Callable[[list], Any]:
        """The operator on every rank's shards, as one comprehension written for this call: ``[f(x, y, k) for …]``."""
        names: dict[str, Any] = {"f": plain_function(node)}
        shards: dict[torch.fx.Node, str] = {}

        def written(a: Any) -> str:
            if isinstance(a, torch.fx.Node):
                if self._one[a]:
                    # Else autograd would add up what every rank takes for the whole gradient.
                    assert self._one[node] or not a.meta["instance"].value.requires_grad, f"{a} in {node}"
                    return f"env[{self._slots[a]}]"
                return shards.setdefault(a, f"x{len(shards)}")
            if isinstance(a, (list, tuple)):
                inner = "".join(written(e) + ", " for e in a)
                return f"[{inner}]" if isinstance(a, list) else f"({inner})"
            name = f"k{len(names)}"
            names[name] = a
            return name

        call = ", ".join([*map(written, node.args), *(f"{k}={written(a)}" for k, a in node.kwargs.items())])
        if self._one[node]:
            return eval(f"lambda env: f({call})", names)
        if not shards:
            loop = f"_ in range({self.devices})"
        elif len(shards) == 1:
            loop = f"x0 in env[{self._slots[next(iter(shards))]}]"
        else:
            loop = f"{', '.join(shards.values())} in zip({', '.join(f'env[{self._slots[n]}]' for n in shards)})"
        return eval(f"lambda env: [f({call}) for {loop}]", names)


def plain_function(node: torch.fx.Node) -> Any:
    """What a node calls, without the Python layer of its overload object: ``torch.relu`` for ``aten.relu.default``; and
    ``torch.mm`` for a matmul of two matrices, which is what that comes to; our random operators as plain functions.

    Only where that name means this function in `torch` itself, for code that fx writes calls it by its name:
    ``torch.broadcast_tensors`` takes its tensors one by one.
    """
    target = PLAIN.get(node.target, node.target)
    if target is torch.ops.aten.matmul.default and all(len(a.meta["instance"].value.shape) == 2 for a in node.args):
        return torch.mm
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or \
            target._overloadname != "default" or any(a.kwarg_only for a in target._schema.arguments):
        return target
    name = target.overloadpacket.__name__
    function = getattr(torch._C._VariableFunctions, name, None)
    return function if function is not None and getattr(torch, name, None) == function else target


def _last_uses(nodes: list[torch.fx.Node], slots: dict[torch.fx.Node, int]) -> list[list[int]]:
    """Per call, the slots that no later node reads: their shards can go."""
    last: dict[int, int] = {}
    calls = [n for n in nodes if n.op == "call_function"]
    kept = {slots[a] for a in nodes[-1].all_input_nodes}
    for i, node in enumerate(calls):
        for a in node.all_input_nodes:
            last[slots[a]] = i
    out: list[list[int]] = [[] for _ in calls]
    for slot, i in last.items():
        if slot not in kept:
            out[i].append(slot)
    return out

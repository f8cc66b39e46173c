"""Products with a parameter, for all ranks in one process: their gradients come together in the whole parameter at once.

    forward     y_r = x_r · w[slice of r]
    backward    the gradient's slice of r += x_rᵀ · g_r, written where it lies in the whole

Autograd by itself makes a gradient a rank, adds up those of one slice and joins the slices: two more passes over all of it,
which take a fifth of a step of small networks. Sums are taken in ascending order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..conversion_steps import digits_value
from ..lower import Lowered, move, sum_of_gradient

__all__ = ["Product", "products"]

aten = torch.ops.aten

#: Operator -> which of its arguments is the matrix, and whether that comes transposed.
_MATRIX = {aten.matmul.default: (1, False), aten.mm.default: (1, False), aten.linear.default: (1, True)}


class Product(NamedTuple):
    """A call whose matrix is a parameter that nothing else reads.

    Attributes:
        matrix: the parameter's placeholder.
        passed: the conversion between the two, which sums the gradient and has nothing to do now; None: there is none.
    """

    matrix: torch.fx.Node
    passed: torch.fx.Node | None
    transposed: bool

    def step(self, node: torch.fx.Node, slots: Mapping[torch.fx.Node, int], one: Mapping[torch.fx.Node, bool],
             devices: int) -> Callable[[list], Any]:
        """What the call does on the whole parameter and all ranks' shards of the rest."""
        layout, value = self.matrix.meta["instance"].layout, self.matrix.meta["instance"].value
        gradient = layout if self.passed is None else self.passed.meta["instruction"].backward.source
        each = [layout.slice(value.shape, rank) for rank in range(devices)]
        owed = [not digits_value(gradient.replicas, rank) for rank in range(devices)]  # what replicas have counts once
        slices = tuple((s, owed[r], s not in [t for t, o in zip(each[:r], owed) if o]) for r, s in enumerate(each))
        matrix, operand = slots[self.passed or self.matrix], node.args[0]
        bias = node.args[2] if len(node.args) > 2 and node.args[2] is not None else None
        at = [slots[n] for n in (operand, bias) if n is not None]
        whole = [one[n] for n in (operand, bias) if n is not None]

        def run(env: list) -> Any:
            rest = [t for slot, single in zip(at, whole) for t in ([env[slot]] * devices if single else env[slot])]
            return list(_Products.apply(env[matrix], slices, self.transposed, *rest))
        return run


class _Products(torch.autograd.Function):
    """The operands of all ranks, then their biases, if there are any; `slices`: of each rank, whether its term
    of the gradient counts, and whether it is the first of these."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, slices: tuple, transposed: bool, *rest: Tensor) -> tuple[Tensor, ...]:
        count = len(slices)
        operands, biases = rest[:count], rest[count:]
        ctx.slices, ctx.transposed, ctx.biases = slices, transposed, len(biases)
        ctx.save_for_backward(matrix, *operands)
        if not transposed:
            return tuple(x @ matrix[s] for x, (s, _, _) in zip(operands, slices))
        return tuple(torch.nn.functional.linear(x, matrix[s], b) for x, (s, _, _), b in
                     zip(operands, slices, biases or (None,) * count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        matrix, *operands = ctx.saved_tensors
        count = len(operands)
        wanted = ctx.needs_input_grad
        out: list[Tensor | None] = [None] * (count + ctx.biases)
        for r, ((s, _, _), g) in enumerate(zip(ctx.slices, gradients)):
            if wanted[3 + r]:
                out[r] = g @ matrix[s] if ctx.transposed else g @ matrix[s].T
            if ctx.biases and wanted[3 + count + r]:
                out[count + r] = g.flatten(0, -2).sum(0) if g.dim() > 1 else g
        total = _gradient(matrix, operands, gradients, ctx.slices, ctx.transposed) if wanted[0] else None
        return total, None, None, *out


def _gradient(matrix: Tensor, operands: list[Tensor], gradients: tuple[Tensor, ...], slices: tuple, transposed: bool
              ) -> Tensor:
    """The gradient of the whole matrix."""
    total = torch.empty_like(matrix)
    for x, g, (s, owed, first) in zip(operands, gradients, slices):
        if not owed:
            continue
        if x.dim() != 2:
            x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        left, right = (g.T, x) if transposed else (x.T, g)
        if first:
            torch.mm(left, right, out=total[s])
        else:
            total[s].addmm_(left, right)
    return total


def products(lowered: Lowered) -> dict[torch.fx.Node, Product]:
    """The calls of a program that may be done so: of a matrix that is a parameter with one use, stored as it is used."""
    graph, out = lowered.plan.graph, {}
    for node in lowered.module.graph.nodes:
        if node.op != "call_function" or node.target not in _MATRIX:
            continue
        place, transposed = _MATRIX[node.target]
        held, passed = node.args[place], None
        if held.target is move and len(held.users) == 1 and sum_of_gradient(held.args[0]) is held:
            held, passed = held.args[0], held
        instance = held.meta.get("instance")
        parameter = None if held.op != "placeholder" else graph.parameters.get(instance.value.name)
        rest = [a for i, a in enumerate(node.args) if i != place and isinstance(a, torch.fx.Node)]
        if parameter is None or len(held.users) != 1 or not parameter.requires_grad or len(parameter.shape) != 2 or \
                parameter.shape != instance.value.shape or held in rest or len(instance.value.shape) != 2 or \
                node.args[0] is held or instance.layout.partial or node.kwargs:
            continue
        out[node] = Product(held, passed, transposed)
    return out

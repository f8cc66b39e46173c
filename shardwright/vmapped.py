"""`torch.vmap` inside a model: what it maps, written out as operators on whole batches.

Export leaves such a region as it was called: a batch dim goes in, operators that do not see it, a batch dim comes out.
Traced once more below vmap, it is operators that do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .graph import Value
from .torch_private import VMAP_ENDS, FakeTensorMode, OpOverload, make_fx, vmap_function

__all__ = ["regions", "written_out"]


def _named(node: torch.fx.Node) -> str:
    """The name of a function of vmap's own, else nothing."""
    return vmap_function(node.target) if node.op == "call_function" else ""


def regions(nodes: Iterable[torch.fx.Node]) -> Iterator[torch.fx.Node | list[torch.fx.Node]]:
    """The nodes of a program, those of an outermost vmap together."""
    region: list[torch.fx.Node] = []
    depth = 0
    for node in nodes:
        name = _named(node)
        depth += VMAP_ENDS.get(name, 0)
        if depth or name in VMAP_ENDS:
            region.append(node)
            if not depth:
                yield region
                region = []
        elif not name:
            yield node


def written_out(region: list[torch.fx.Node], held: Callable[[torch.fx.Node], Any]
                ) -> tuple[torch.fx.GraphModule, list[torch.fx.Node], list[torch.fx.Node]]:
    """A vmap as a program of its own.

    Args:
        held: the value, or the plain constant, that a node from outside of the region holds.

    Returns:
        The program; the nodes whose values it takes, and those that it makes.
    """
    inside = set(region)
    outside = dict.fromkeys(a for node in region for a in node.all_input_nodes if a not in inside)
    taken = [node for node in outside if isinstance(held(node), Value)]
    made = [node for node in region if any(user not in inside for user in node.users)]

    def run(*tensors: torch.Tensor) -> list[Any]:
        env = {node: held(node) for node in outside} | dict(zip(taken, tensors))
        for node in region:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
        return [env[node] for node in made]

    with FakeTensorMode():
        fakes = [torch.empty(v.shape, dtype=v.dtype, device=node.meta["val"].device, requires_grad=v.requires_grad)
                 for node, v in zip(taken, map(held, taken))]
    program = make_fx(run)(*fakes)
    program = make_fx(torch.func.functionalize(program, remove="mutations"))(*fakes)  # vmap's own rules write in place
    described = next((n for n in region if isinstance(n.target, OpOverload)), region[0])
    for node in program.graph.nodes:
        node.meta.update({k: v for k, v in described.meta.items() if k in ("nn_module_stack", "stack_trace")})
    return program, taken, made

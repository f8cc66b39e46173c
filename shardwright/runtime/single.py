"""A program for one device: the lowered graph itself, as plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..lower import Lowered, cast, extreme, move
from .calls import plain_function

__all__ = ["SingleProgram"]


class SingleProgram:
    """A lowered program of one device. On it every conversion is the identity, or a cast, and none is left.

    Args:
        lowered: the program.
        compiled: the backend by which ``torch.compile`` compiles it, or None.

    Attributes:
        module: the `torch.fx.GraphModule`: parameters, buffers, constants, inputs in; outputs, then the new values of
            buffers, out.
    """

    def __init__(self, lowered: Lowered, compiled: str | None = None) -> None:
        self.lowered = lowered
        graph = torch.fx.Graph()
        env: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in lowered.graph.nodes:
            if node.target is move or node.target is extreme:
                env[node] = cast(graph, env[node.args[0]], node)
                continue
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.op == "call_function":
                env[node].target = plain_function(node)
        self.module = torch.fx.GraphModule(torch.nn.Module(), graph)
        self._run = torch.compile(self.module, dynamic=False, backend=compiled) if compiled else self.module.forward

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        return list(self._run(*tensors))

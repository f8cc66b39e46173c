"""Captured graphs that are refused: trained constants, and buffers that would carry gradients into the next step.

1. `check_constants`: a tensor with ``requires_grad`` that is no parameter of the model. No optimizer would find it.
2. `check_updates`: a buffer whose new value has a gradient, where a result depends on it. One device raises at the
   second backward.

Example: a forward with ``x * self.scale``, where ``scale = torch.ones(4, requires_grad=True)`` is a plain attribute, is
the first case. ``self.mean = 0.9 * self.mean + h.mean(0)`` is the second one, where a result depends on ``mean``; with
``h.detach()`` it is none.
"""

from __future__ import annotations

import torch

from ..errors import CaptureError
from ..graph import Graph, values_in

__all__ = ["check_constants", "check_updates"]


def check_constants(graph: Graph) -> None:
    """Refuse trained tensors that belong to no module of the model.

    Raises:
        CaptureError: such a tensor, with the line of the operator that reads it.
    """
    for name, tensor in graph.constants.items():
        op = next((op for op in graph.ops if any(v.name == name for v in op.inputs)), None)
        if tensor.requires_grad and op is not None and torch.is_grad_enabled():
            raise CaptureError(
                f"a tensor of shape {list(tensor.shape)} requires a gradient, and is no parameter of the model",
                source=op.source or None,
                legal="an nn.Parameter of the model, or of a loss_fn that is a module; or requires_grad_(False)",
            )


def check_updates(graph: Graph) -> None:
    """Refuse buffers whose new value would carry gradients from one step into the next.

    One device keeps the autograd graph of the old value, and raises at the second backward where a result depends on
    it. Where no result depends on it, the values are the same without that graph, which is dropped.

    Raises:
        CaptureError: a result depends on such a buffer, with the line that produces its new value.
    """
    if not torch.is_grad_enabled():
        return
    producers, wanted = graph.producers(), {v.name for v in values_in(graph.outputs) if v.requires_grad}
    carrying = {name: value for name, value in graph.updates.items() if value.requires_grad}
    if not carrying or not wanted:
        return
    for op in reversed(graph.ops):
        if any(v is not None and v.name in wanted and v.requires_grad for v in op.outputs):
            wanted.update(v.name for v in op.inputs)
    for name, value in carrying.items():
        if name in wanted:
            producer = producers.get(value.name)
            raise CaptureError(
                f"the new value of the buffer {name!r} carries gradients into the next step, where one device "
                "raises at the second backward",
                source=producer.source or None if producer else None,
                legal="a value without them: .detach(), or torch.no_grad()",
            )

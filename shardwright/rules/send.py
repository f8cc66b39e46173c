"""The operator at which a value leaves a stage of a pipeline: an identity that moves nothing and takes no open sum along."""

from __future__ import annotations

import torch

from ..graph import Op
from .notation import Assignment, Bound
from .registry import Local, Rule, register

__all__ = ["send"]


@torch.library.custom_op("shardwright::send", mutates_args=())
def _send(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@_send.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


#: The operator, as it stands in graphs.
send = torch.ops.shardwright.send.default


def _alias(op: Op, bound: Bound, assignment: Assignment) -> Local:
    return Local(torch.ops.aten.alias.default, (op.inputs[0],), {})


register((send,), Rule("... -> ...", view=True, localize=_alias))

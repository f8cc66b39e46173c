"""The seed of a compiled program in the memory of its device.

A compiled mask (`rules.random_numbers.traced_dropout`) reads the seed of the call and the start of the rank's slice.
Both are tensors in host memory, which the operators of an uncompiled program read there. A compiler does not record a
CUDA graph of a program that has a tensor in host memory, so a compiled program has them on its device:

    seed      copied at each call, 32 bytes, without a wait: the one input that differs from step to step
    starts    an ``arange`` of the program, made on the device

A program with another random operator, which reads its seed on the host, keeps both in host memory.
"""

from __future__ import annotations

import torch

from ..rules.random_numbers.traced_dropout import TRACED
from .lowering import Lowered

__all__ = ["place_seed"]


def place_seed(lowered: Lowered, device: torch.device) -> torch.device | None:
    """Put the starts of a compiled program's masks on its device.

    Returns:
        The device on which the program takes the seed; None: it takes it in host memory, or draws nothing.
    """
    seed = lowered.plan.program.seed
    if seed is None or device.type == "cpu":
        return None
    inputs = [node for node in lowered.nodes if node.op == "placeholder"]
    readers = next(node for node in inputs if node.meta["instance"].name == seed.name).users
    if not all(node.target in TRACED for node in readers):
        return None
    for mask in readers:
        for start in mask.args[1]:
            while start.target is not torch.ops.aten.arange.start_step:
                (start,) = start.all_input_nodes
            start.kwargs = {**start.kwargs, "device": device}
    return device

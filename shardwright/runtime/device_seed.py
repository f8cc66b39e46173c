"""The seed of a compiled program in the memory of its device.

A compiled random operator (`rules.random_numbers.traced_numbers`) reads the seed of the call and the start of the
rank's slice. Both are tensors in host memory, which the operators of an uncompiled program read there. A compiler does
not record a CUDA graph of a program that has a tensor in host memory, so a compiled program has them on its device:

    seed      copied at each call, 32 bytes, without a wait: the one input that differs from step to step
    starts    an ``arange`` of the program, made on the device

A program with an operator that reads its seed on the host keeps both in host memory.
"""

from __future__ import annotations

import torch

from ..rules.random_numbers.counter_rng import has_words
from ..rules.random_numbers.traced_numbers import is_traced, traced
from .lowering import Lowered

__all__ = ["trace_random_numbers"]

#: The operators that have no slice, hence no starts.
_WITHOUT_STARTS = (torch.ops.shardwright.permutation.default,)


def trace_random_numbers(lowered: Lowered, device: torch.device) -> torch.device | None:
    """Let the random operators of a program that is to be compiled be computed by operators that the compiler sees
    through, with seed and starts on the program's device.

    Returns:
        The device on which the program takes the seed; None: it takes it in host memory, or draws nothing.
    """
    seed = lowered.plan.program.seed
    if seed is None:
        return None
    inputs = [node for node in lowered.nodes if node.op == "placeholder"]
    readers = next(node for node in inputs if node.meta["instance"].name == seed.name).users
    on_device = device.type != "cpu" and all(is_traced(node.target) for node in readers)
    for node in readers:
        if not is_traced(node.target):
            continue
        for start in node.args[1] if on_device and node.target not in _WITHOUT_STARTS else ():
            while start.target is not torch.ops.aten.arange.start_step:
                (start,) = start.all_input_nodes
            narrow = {} if has_words(device.type) else {"dtype": torch.int32}
            start.kwargs = {**start.kwargs, "device": device, **narrow}
        node.target = traced(node.target, device)
    return device if on_device else None

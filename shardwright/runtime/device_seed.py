"""The seed of a compiled program in the memory of its device.

A compiled random operator (`rules.random_numbers.traced_numbers`) reads the seed of the call and the start of the
rank's slice. Both are tensors in host memory, which the operators of an uncompiled program read there. A compiler does
not record a CUDA graph of a program that has a tensor in host memory, so a compiled program has them on its device:

    seed      copied at each call, 32 bytes, without a wait: the one input that differs from step to step
    starts    an ``arange`` of the program, made on the device

Attention with fast dropout draws from the device's own generator, inside of torch's kernel. The generator is seeded
before the program by the seed of the call and the rank's slice of the attentions (`GeneratorSeed`), and has its earlier
state afterwards. One seed serves the program where all its attentions are cut alike: replicas then agree, and slices
differ. Otherwise the attentions are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..partition.local_program import made_by
from ..rules.attention import attention_with_dropout, compiled_attention, seeded, written_out_attention
from ..rules.random_numbers.counter_rng import fast_seed, has_words
from ..rules.random_numbers.traced_numbers import is_traced, traced
from ..torch_private import FakeTensor
from .lowering import Lowered, Node

__all__ = ["NO_SEED", "CompiledSeed", "trace_random_numbers"]

#: The operators that have no slice, hence no starts.
_WITHOUT_STARTS = (torch.ops.shardwright.permutation.default,)

Body = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class CompiledSeed:
    """The place of a compiled program's seed.

    Attributes:
        device: on which the program takes the seed; None: in host memory, or it draws nothing.
        generator: seeds the device's generator; None: nothing draws from it.
    """

    device: torch.device | None = None
    generator: GeneratorSeed | None = None

    def around(self, body: Body) -> Body:
        """The program, with its generator seeded at each call."""
        if self.generator is None:
            return body
        generator = self.generator

        def run(*tensors: Tensor) -> list[Tensor]:
            seed = tensors[generator.place]
            moved = seed.to(generator.device, non_blocking=True)
            rest = tensors[: generator.place], tensors[generator.place + 1 :]
            if isinstance(tensors[-1], FakeTensor):
                return body(*rest[0], moved, *rest[1])
            with seeded(generator.device, generator.of(seed)):
                return body(*rest[0], moved, *rest[1])

        return run


#: The seed of a program that is not compiled, or draws nothing.
NO_SEED = CompiledSeed()


@dataclass(frozen=True)
class GeneratorSeed:
    """The seed of a device's generator for one rank, which replicas of a slice have in common.

    Attributes:
        place: of the seed among the program's tensors.
        device: whose generator draws.
        starts, dims, size, whole, number, micro: of the attentions, as of the operator ``shardwright.mask``.
    """

    place: int
    device: torch.device
    starts: tuple[int, ...]
    dims: tuple[int, ...]
    size: tuple[int, ...]
    whole: tuple[int, ...]
    number: int
    micro: tuple[int, ...]

    def of(self, seed: Tensor) -> int:
        """The seed of the generator for the seed of a call, in host memory."""
        starts = [torch.tensor(start, device="cpu") for start in self.starts]
        return fast_seed(seed, starts, self.dims, self.size, self.whole, self.number, self.micro)


def trace_random_numbers(lowered: Lowered, device: torch.device, rank: int) -> CompiledSeed:
    """Let the random operators of a program that is to be compiled be computed by operators that the compiler sees
    through, with seed and starts on the program's device.

    Args:
        lowered: the program; its nodes are changed.
        device: on which it runs.
        rank: this rank among those that the program's layouts refer to.
    """
    seed = lowered.plan.program.seed
    if seed is None:
        return NO_SEED
    inputs = [node for node in lowered.nodes if node.op == "placeholder"]
    place = next(i for i, node in enumerate(inputs) if node.meta["instance"].name == seed.name)
    consumers = list(inputs[place].users)
    attentions = [node for node in consumers if node.target is attention_with_dropout]
    alike = len({made_by(node.meta["instruction"])[0].layout for node in attentions}) == 1
    on_device = device.type != "cpu" and all(is_traced(n.target) or n in attentions for n in consumers)
    generator = _generator_seed(attentions[0], place, device, rank) if alike else None
    for node in consumers:
        attends = node in attentions
        if not attends and not is_traced(node.target):
            continue
        for start in node.args[1] if on_device and node.target not in _WITHOUT_STARTS else ():
            while start.target is not torch.ops.aten.arange.start_step:
                (start,) = start.all_input_nodes
            narrow = {} if has_words(device.type) else {"dtype": torch.int32}
            start.kwargs = {**start.kwargs, "device": device, **narrow}
        if attends:
            node.target = compiled_attention if alike else written_out_attention
        else:
            node.target = traced(node.target, device)
    return CompiledSeed(device if on_device and generator is None else None, generator)


def _generator_seed(node: Node, place: int, device: torch.device, rank: int) -> GeneratorSeed:
    arguments: tuple[Any, ...] = node.args
    _, _, dims, whole, number, *_ = arguments
    layout = made_by(node.meta["instruction"])[0].layout
    shape = made_by(node.meta["instruction"])[0].value.shape
    part = layout.slice(shape, rank)
    return GeneratorSeed(
        place,
        device,
        tuple(part[d].start for d in dims),
        tuple(dims),
        tuple(s.stop - s.start for s in part[:-1]),
        tuple(whole),
        number,
        tuple(arguments[12]) if len(arguments) > 12 else (),
    )

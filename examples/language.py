"""Text, and what the language-model examples share: English that lies on every machine, read byte by byte.

The text is the reference manual that Python brings along for its `help()`; a token is a byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pydoc_data.topics import topics

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import positive

import shardwright as sw

__all__ = ["VOCABULARY", "Loss", "options", "passages", "train"]

VOCABULARY = 256


@lru_cache
def text() -> torch.Tensor:
    """The whole manual as bytes, int64."""
    return torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()), device="cpu")


def passages(
    batch_size: int, length: int, *, seed: int = 0, limit: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of tokens [batch_size, length] and of what follows each of them, drawn from all places of the text.

    Args:
        seed: the places are a function of this alone, so that every process reads the same.
        limit: the most batches to give; None: as many as make up the length of the text.
    """
    tokens = text()
    if not 1 <= length < len(tokens):
        raise ValueError(f"length is {length}: the text has {len(tokens)} tokens")
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(len(tokens) // (batch_size * length) if limit is None else limit):
        begins = torch.randint(len(tokens) - length, (batch_size, 1), generator=generator, device="cpu")
        window = tokens[begins + torch.arange(length + 1, device="cpu")]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def options(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """`argv` (default: the command line) as the settings of a language-model example."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel_mode", choices=("stand_alone", "data_parallel", "semi_auto"), default="semi_auto")
    parser.add_argument("--devices", type=positive, default=8, help="devices in this one process, without a launcher")
    parser.add_argument(
        "--model_parallel",
        type=positive,
        default=None,
        help="over how many devices an operator is split (default: 4, or all if there are fewer)",
    )
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--batch_size", type=positive, default=8, help="passages in a step, over all devices")
    parser.add_argument("--length", type=positive, default=64, help="tokens in a passage")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--width", type=positive, default=64)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    args = parser.parse_args(argv)
    args.dtype = getattr(torch, args.dtype)
    return args


class Loss(nn.Module):
    """The mean cross entropy of logits [batch, length, vocabulary] with tokens [batch, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return self.cross_entropy(logits.flatten(0, 1), following.flatten())


def train(
    args: argparse.Namespace, build: Callable[[], nn.Module], mark: Callable[[nn.Module, Loss, int, int], None]
) -> list[float]:
    """Train a model as the settings say; returns the losses.

    Args:
        build: makes the model.
        mark: marks the operators of model and loss, for so many parts of the batch and so many of an operator.
    """
    runtime = sw.init(devices=args.devices)  # the world that a launcher started, or so many devices in this process
    model_parallel = args.model_parallel or min(4, runtime.devices)
    torch.manual_seed(0)
    with sw.no_init_parameters():  # nothing is allocated here
        net = build().to(args.dtype)
        optimizer = torch.optim.AdamW(net.parameters(), lr=args.learning_rate, fused=True)
    loss_fn = Loss()
    if args.parallel_mode == "semi_auto":
        mark(net, loss_fn, runtime.devices // model_parallel, model_parallel)

    model = sw.AutoParallel(net, loss_fn=loss_fn, parallel_mode=args.parallel_mode)
    model.dataset_strategy("full_batch")  # every process feeds the same whole batch
    losses = []
    for step, (tokens, following) in enumerate(passages(args.batch_size, args.length, limit=args.steps)):
        loss = model(tokens, following)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step: {step}, loss is {losses[-1]}", flush=True)
    return losses

"""Whole models on four real processes: the losses and parameters of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpt
import llama
import pytest
import torch
from language import Loss, passages
from optional_library import OptionalLibrary
from ranks import run_ranks, run_scenarios
from small_networks import D, labels
from torch import Tensor, nn

import shardwright as sw

transformers = OptionalLibrary("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
WORLD, LENGTH = 4, 8


def small_gpt() -> tuple[nn.Module, nn.Module]:
    """Tied weights, by the vocabulary; attention by heads."""
    net, loss = gpt.GPT(length=LENGTH, width=16, heads=4).to(D), Loss()
    gpt.mark(net, loss, 2, 2)
    return net, loss


def small_llama() -> tuple[nn.Module, nn.Module]:
    """Grouped queries, rotary positions, gated products."""
    net, loss = llama.Llama(length=LENGTH, width=16, heads=8, kv_heads=4, hidden=24).to(D), Loss()
    llama.mark(net, loss, 2, 2)
    return net, loss


class NextToken(nn.Module):
    """The loss that their models compute of logits."""

    def forward(self, output: Any, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def hugging_face_gpt2() -> tuple[nn.Module, nn.Module]:
    """Products of their own kind, tied weights, a dictionary of results."""
    net = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64,
            bos_token_id=1,
            eos_token_id=2,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    ).to(D)
    for block in net.transformer.h:
        sw.shard(block.mlp.c_fc, ((2, 1), (1, 2)))
        sw.shard(block.mlp.c_proj, ((2, 2), (2, 1)))
    sw.shard(net.transformer.wte, ((2, 1), (2, 1)))
    sw.shard(net.lm_head, ((2, 1, 1), (2, 1)))
    return net, NextToken()


def language_batches() -> list[tuple[Tensor, Tensor]]:
    return list(passages(4, LENGTH, limit=3))


def token_batches() -> list[tuple[Tensor, Tensor]]:
    return [(tokens, tokens) for tokens in labels(96, 64).view(3, 4, 8)]


Make = Callable[[], tuple[nn.Module, nn.Module]]
MODELS: dict[str, tuple[Make, Callable[[], list]]] = {
    "gpt": (small_gpt, language_batches),
    "llama": (small_llama, language_batches),
    "hugging_face_gpt2": (hugging_face_gpt2, token_batches),
}


def train(call: Callable[[Tensor, Tensor], Tensor], net: nn.Module, batches: list) -> list[float]:
    optimizer, losses = torch.optim.AdamW(net.parameters(), 1e-2), []
    for x, y in batches:
        loss = call(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def as_one_device(make: Make, batches: Callable[[], list]) -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        torch.manual_seed(1)
        plain, plain_loss = make()
        net, loss = make()
        net.load_state_dict(plain.state_dict())
        sw.init()
        model = sw.AutoParallel(net, loss).dataset_strategy("full_batch")
        with torch.no_grad():
            model(*batches()[0])  # cuts the parameters
        got, expected = train(model, net, batches()), train(lambda x, y: plain_loss(plain(x), y), plain, batches())
        assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 1e-10, (got, expected)
        assert abs(expected[0] - expected[-1]) > 1e-3, "three steps must show"
        cut = 0
        for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                ours.full_tensor(), theirs, rtol=0.0, atol=1e-7, msg=lambda text: f"{name}: {text}"
            )
            cut += ours.to_local().shape != theirs.shape
        assert cut > 2

    return scenario


def on_ranks(rank: int, world: int) -> dict[str, str | None]:
    return run_scenarios(rank, world, {name: as_one_device(*given) for name, given in MODELS.items()})


@pytest.fixture(scope="module")
def results() -> list[dict[str, str | None]]:
    return run_ranks(on_ranks, WORLD)


@pytest.mark.parametrize("name", MODELS)
def test_as_one_device(results: list[dict[str, str | None]], name: str) -> None:
    for rank, result in enumerate(results):
        assert result[name] is None, f"rank {rank}:\n{result[name]}"

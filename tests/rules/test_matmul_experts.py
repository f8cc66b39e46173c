"""Mixtures of experts of the transformers library: their grouped products with cut widths, as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from one_device import parallel
from optional_library import OptionalLibrary
from rule_reference import Case, check
from small_networks import labels
from torch import Tensor, nn

import shardwright as sw
from shardwright.cost.primitive_costs import work_of
from shardwright.graph import Op, Value

transformers = OptionalLibrary("transformers")

SMALL = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=32,
    pad_token_id=0,
    eos_token_id=1,
)
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: transformers.OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=4
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SMALL,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=8,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        first_k_dense_replace=0,
        n_shared_experts=1,
    ),
}

#: Links that cost nothing, beside slow arithmetic: whatever can be cut is.
FREE = sw.Cluster("free links", (sw.Level("link", 4, 1e18, 1e-18),), 1e15, {"float64": 1e6, "float32": 1e6}, 1e6, 1e-15)


class Language(nn.Module):
    """A language model's loss of its own input. `experts`: how its experts are called."""

    def __init__(self, name: str, experts: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).double()
        self.call_experts(experts)

    def call_experts(self, how: str) -> Language:
        for module in self.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = how
        return self

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids, labels=ids, use_cache=False).loss


def agree(mine: Any, theirs: Any) -> None:
    """Agreement as far as the float32 inside of these models allows: routers and norms."""
    torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-7)


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_with_cut_widths(name: str) -> None:
    net = Language(name, "grouped_mm")
    one = copy.deepcopy(net).call_experts("batched_mm")  # torch's own kernel knows no float64
    model = parallel(net, devices=4, mode="recursive_programming", cluster=FREE)
    optimizers = [torch.optim.SGD(n.parameters(), 0.1) for n in (net, one)]
    for seed in (3, 4):
        ids = labels(32, 32, seed).view(4, 8)
        losses = [model(ids), one(ids)]
        agree(*losses)
        for loss in losses:
            loss.backward()
        agree({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in one.named_parameters()})
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    agree(dict(net.state_dict()), dict(one.state_dict()))
    products = [op for op in model.plan.operators if op.op == "grouped_mm_fallback"]
    assert len(products) >= 2
    for op in products:
        (rows, k), (experts, k_too, n), (ends,) = op.in_strategy
        assert rows == experts == ends == 1 and k == k_too and k * n == 4, op.in_strategy
    experts = {n: p for n, p in model.plan.parameters.items() if "_proj" in n and len(p.shape) == 3}
    assert experts and all(p.local_shape(0)[0] == p.shape[0] for p in experts.values())
    assert any(p.local_shape(0) != p.shape for p in experts.values())


def test_the_fallback_sliced_is_the_fallback() -> None:
    """Forward and backward under every assignment; groups may be empty."""
    from transformers.integrations import moe  # noqa: F401  (registers the operator)

    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in ((10, 8), (3, 8, 12))
    )
    for ends in ([3, 3, 10], [0, 10, 10]):
        case = Case(
            2, torch.ops.transformers.grouped_mm_fallback.default, (x, w, torch.tensor(ends, dtype=torch.int32)), {}
        )
        assert check(case, 2, 4) > 4


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
def test_torchs_own_kernel_with_cut_widths() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(3, 32, 64, dtype=torch.bfloat16) / 8)
            self.product = sw.Operator(torch._grouped_mm)

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return self.product(x, self.w, ends)

    x, ends = torch.randn(12, 32, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.tensor([4, 4, 12]).int()
    for k, n in ((1, 4), (4, 1), (2, 2)):
        net = Grouped()
        one = copy.deepcopy(net)
        net.product.shard(((1, k), (1, k, n), (1,)))
        model = parallel(net, devices=4)
        for made in (model(x, ends), one(x, ends)):
            (made.float() * torch.linspace(-1, 1, 64)).sum().backward()
        torch.testing.assert_close(model(x, ends), one(x, ends), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(net.w.grad, one.w.grad, rtol=2e-2, atol=2e-2)
        assert model.plan.parameters["w"].local_shape(0) == (3, 32 // k, 64 // n)
    with pytest.raises(sw.StrategyError):  # parts of 4 elements are no multiple of the kernel's 16 bytes
        net = Grouped()
        net.product.shard(((1, 8), (1, 8, 1), (1,)))
        parallel(net, devices=8)(x, ends)


def test_its_work_is_known_to_the_cost_model() -> None:
    from transformers.integrations import moe  # noqa: F401  (registers the operator)

    x, w, ends = (
        Value("x", (12, 16), torch.float64, True),
        Value("w", (3, 16, 8), torch.float64, True),
        Value("ends", (3,), torch.int32),
    )
    op = Op(
        "product",
        torch.ops.transformers.grouped_mm_fallback.default,
        (x, w, ends),
        {},
        (x, w, ends),
        (Value("y", (12, 8), torch.float64, True),),
    )
    assert work_of(op).flops == (2 * 12 * 16 * 8, 4 * 12 * 16 * 8)

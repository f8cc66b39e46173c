"""Models of Hugging Face's transformers, captured as they are: tiny configurations, random weights, no download."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_device import assert_as_one_device, close, parallel
from optional_library import OptionalLibrary
from small_networks import labels
from torch import Tensor, nn

import shardwright as sw
from shardwright.pytree_objects import opened

transformers = OptionalLibrary("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = labels(64, 64).view(8, 8)
PADDING = (torch.arange(8) < torch.tensor([8, 5, 8, 3, 8, 8, 6, 8])[:, None]).long()


# GPT-2 has two layers, which have different marks; the layers of the others are alike, and one is there.


def gpt2(attention: str, **settings: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **SIZES,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=4,
            attn_implementation=attention,
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | settings,
        )
    )


def llama(attention: str, **settings: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SIZES,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=16,
            attn_implementation=attention,
            **settings,
        )
    )


def bert(attention: str, **settings: Any) -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=16,
            attn_implementation=attention,
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | settings,
        )
    )


def mark_gpt2(net: nn.Module, dp: int, mp: int) -> None:
    """Its Conv1D is one product between views: a strategy speaks of [batch · length, in] and of a weight [in, out]."""
    block = net.transformer.h[0]
    sw.shard(block.mlp.c_fc, ((dp, 1), (1, mp)))
    sw.shard(block.mlp.c_proj, ((dp, mp), (mp, 1)))
    sw.shard(net.transformer.h[1].attn.c_attn, ((dp, 1), (1, mp)))
    sw.shard(net.transformer.wte, ((dp, 1), (mp, 1)))  # tied
    sw.shard(net.lm_head, ((dp, 1, 1), (mp, 1)))


def mark_llama(net: nn.Module, dp: int, mp: int) -> None:
    for layer in net.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for product in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            sw.shard(product, ((dp, 1, 1), (mp, 1)))
        for product in (attention.o_proj, mlp.down_proj):
            sw.shard(product, ((dp, 1, mp), (1, mp)))
        sw.shard(mlp.act_fn, ((dp, 1, mp),))
    sw.shard(net.lm_head, ((dp, 1, 1), (mp, 1)))


def mark_bert(net: nn.Module, dp: int, mp: int) -> None:
    layer = net.bert.encoder.layer[0]
    for product in (
        layer.attention.self.query,
        layer.attention.self.key,
        layer.attention.self.value,
        layer.intermediate.dense,
    ):
        sw.shard(product, ((dp, 1, 1), (mp, 1)))
    for product in (layer.attention.output.dense, layer.output.dense):
        sw.shard(product, ((dp, 1, mp), (1, mp)))


MODELS = {"gpt2": (gpt2, mark_gpt2), "llama": (llama, mark_llama), "bert": (bert, mark_bert)}
SPLIT = {"data_parallel": (4, (1, 1)), "semi_auto": (8, (2, 4))}  # mode -> devices, parts of batch and operator


def made(name: str, attention: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0](attention, **settings).double()


def next_token(output: Any, tokens: Tensor) -> Tensor:
    """Outside of the model: its own loss is worked out in float32."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


@pytest.mark.parametrize(
    ("name", "attention", "padded", "mode"),
    [  # each two of them together
        (name, attention, padded, list(SPLIT)[(i + j) % len(SPLIT)])
        for i, name in enumerate(MODELS)
        for j, (attention, padded) in enumerate([("sdpa", False), ("sdpa", True), ("eager", True)])
    ],
)
def test_losses_and_gradients_as_on_one_device(name: str, attention: str, padded: bool, mode: str) -> None:
    net, (devices, split) = made(name, attention), SPLIT[mode]
    if mode == "semi_auto":
        MODELS[name][1](net, *split)
    model = assert_as_one_device(
        net,
        (TOKENS, TOKENS),
        (TOKENS.flip(0), TOKENS.flip(0)),
        loss_fn=next_token,
        optimizer=adamw,
        kwargs={"attention_mask": PADDING} if padded else None,
        devices=devices,
        mode=mode,
    )
    cut = [n for n, p in model.plan.parameters.items() if p.local_shape(0) != p.shape]
    assert bool(cut) == (mode == "semi_auto")


def test_the_marks_land_on_the_products() -> None:
    net = made("gpt2", "sdpa")
    mark_gpt2(net, 2, 4)
    plan = sw.plan(net, (TOKENS,), devices=8)
    up = plan.operator("transformer.h.0.mlp.c_fc")
    assert (up.op, up.cause, up.in_strategy) == ("addmm", "mark", ((4,), (2, 1), (1, 4)))
    assert plan.operator("lm_head").out_strategy == ((2, 1, 4),)
    assert plan.parameters["transformer.h.0.mlp.c_proj.weight"].local_shape(0) == (16, 16)
    assert plan.parameters["lm_head.weight"] == plan.parameters["transformer.wte.weight"]
    assert plan.parameters["lm_head.weight"].local_shape(0) == (16, 16)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_model_its_cache_included(name: str) -> None:
    net = made(name, "sdpa")
    one = copy.deepcopy(net)
    model = parallel(net, devices=4)
    kwargs = {
        "input_ids": TOKENS,
        "attention_mask": PADDING,
        "labels": TOKENS,
        "output_hidden_states": True,
        "token_type_ids": None,
    }
    if name == "llama":
        del kwargs["token_type_ids"]
    got, expected = model(**kwargs), one(**kwargs)
    assert (
        type(got) is type(expected)
        and got.keys() == expected.keys()
        and len(got.hidden_states) == (3 if name == "gpt2" else 2)
    )
    close(got.logits, expected.logits, "logits")
    close(got.hidden_states, expected.hidden_states, "hidden states")
    torch.testing.assert_close(got.loss, expected.loss)  # made in float32
    if name != "bert":
        assert type(got.past_key_values) is transformers.DynamicCache
        assert got.past_key_values.get_seq_length() == 8
        caches = [opened(output.past_key_values).opened_attributes for output in (got, expected)]
        ours, theirs = (cache["layers"][-1].opened_attributes for cache in caches)
        close(ours, theirs, "cache")
    got.loss.backward(), expected.loss.backward()
    for (parameter, ours), theirs in zip(net.named_parameters(), one.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7, msg=parameter)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_and_a_tuple(name: str) -> None:
    net = made(name, "eager")
    one = copy.deepcopy(net).eval()
    model = parallel(net, devices=8).eval()
    with torch.no_grad():
        got, expected = model(TOKENS, return_dict=False)[0], one(TOKENS, return_dict=False)[0]
    close(got, expected)
    assert not got.requires_grad


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_their_dropout_is_the_same_on_any_number_of_devices(name: str) -> None:
    settings = {
        "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3},
        "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3},
    }[name]

    def loss(devices: int, mode: str) -> Tensor:
        net = made(name, "sdpa", **settings).train()
        if mode == "semi_auto":
            MODELS[name][1](net, 2, 4)
        model = parallel(net, next_token, devices=devices, mode=mode)
        torch.manual_seed(3)
        return torch.stack([model(TOKENS, TOKENS), model(TOKENS, TOKENS)]).detach()

    one = loss(1, "stand_alone")
    assert one[0] != one[1]
    close(loss(8, "semi_auto"), one)
    close(loss(4, "data_parallel"), one)


def test_a_plan_of_theirs_can_be_verified() -> None:
    net = made("llama", "sdpa")
    mark_llama(net, 2, 4)
    report = sw.verify(net, (TOKENS,), devices=8, steps=2)
    assert report.ok and report.max_loss_difference < 1e-12


def test_attention_inside_of_their_modules_may_be_marked() -> None:
    """By the registry that transformers has for it: the function is an operator object."""
    attend = sw.shard(F.scaled_dot_product_attention, ((2, 4, 1, 1), (2, 4, 1, 1), (2, 4, 1, 1), (2, 1, 1, 1)))

    def marked(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
        out = attend(query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("marked", marked)
    transformers.AttentionMaskInterface.register(
        "marked", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    net = made("llama", "marked")
    mark_llama(net, 2, 4)
    model = assert_as_one_device(
        net, (TOKENS, TOKENS), loss_fn=next_token, kwargs={"attention_mask": PADDING}, devices=8
    )
    attention = [o for o in model.plan.operators if o.op == "scaled_dot_product_attention"]
    assert [o.cause for o in attention] == ["mark"] and attention[0].out_strategy == ((2, 4, 1, 1),)


def test_a_mark_on_a_whole_layer_says_what_may_be_marked() -> None:
    net = made("llama", "sdpa")
    sw.shard(net.model.layers[0].mlp, ((2, 1, 1),))
    with pytest.raises(sw.CaptureError) as raised:
        sw.plan(net, (TOKENS,), devices=8)
    text = str(raised.value)
    assert "this one holds 5: linear, silu, linear, mul, linear" in text
    assert "model.layers.0.mlp.up_proj (linear)" in text

"""Models of the transformers library: small configurations, random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from registry import (
    LENGTH,
    ROWS,
    VOCABULARY,
    Built,
    class_of,
    classes,
    draw,
    library,
    model,
    next_token,
    same_token,
    squares,
    tokens,
)
from torch import Tensor

# -- transformers ------------------------------------------------------------------------------------------------------


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
#: For models whose layers differ from one another, and for one whose layers are equal.
TWO_LAYERS = {"num_hidden_layers": 2}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "state_size": 4,
    "num_hidden_layers": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}


def causal(name: str, loss: Callable = next_token, **settings: Any) -> Built:
    """A language model of transformers, `name` as its classes have it."""
    hf = library("transformers")
    config = getattr(hf, f"{name}Config")(**settings)
    net = getattr(hf, f"{name}ForCausalLM")(config).double()
    return Built(net, (tokens(),), loss, tokens(seed=1))


@model("transformers")
def gpt2() -> Built:
    hf = library("transformers")
    net = hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    ).double()
    return Built(net, (tokens(),), next_token, tokens(seed=1))


@model("transformers")
def llama() -> Built:
    return causal("Llama", **DECODER | TWO_LAYERS)


@model("transformers")
def qwen2() -> Built:
    return causal("Qwen2", **DECODER)


@model("transformers")
def qwen3() -> Built:
    return causal("Qwen3", **DECODER, head_dim=8)


@model("transformers")
def mistral() -> Built:
    return causal("Mistral", **DECODER, sliding_window=4)


@model("transformers")
def gemma2() -> Built:
    return causal("Gemma2", **DECODER | TWO_LAYERS, head_dim=8, sliding_window=4)


@model("transformers")
def gemma3() -> Built:
    hf = library("transformers")
    config = hf.Gemma3TextConfig(
        **DECODER | TWO_LAYERS, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    return Built(hf.Gemma3ForCausalLM(config).double(), (tokens(),), next_token, tokens(seed=1))


@model("transformers")
def phi3() -> Built:
    return causal("Phi3", **DECODER)


@model("transformers")
def falcon() -> Built:
    return causal(
        "Falcon",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        new_decoder_architecture=True,
        num_kv_heads=2,
    )


@model("transformers")
def opt() -> Built:
    return causal(
        "OPT",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        ffn_dim=32,
        num_attention_heads=4,
        max_position_embeddings=32,
        dropout=0.0,
        word_embed_proj_dim=16,
        use_cache=False,
    )


@model("transformers")
def gpt_neox() -> Built:
    return causal("GPTNeoX", **{k: v for k, v in DECODER.items() if k != "num_key_value_heads"})


@model("transformers")
def olmo2() -> Built:
    return causal("Olmo2", **DECODER)


@model("transformers")
def granite() -> Built:
    return causal("Granite", **DECODER)


BATCHED = 'experts_implementation="batched_mm": each token\'s experts are gathered'
GROUPED = "experts in one grouped product, which takes float32 at most"


def mixture(name: str, experts: str, **settings: Any) -> Built:
    """A mixture of experts; the grouped product takes no float64."""
    built = causal(name, **DECODER | settings, experts_implementation=experts)
    return replace(built, net=built.net.float()) if experts == "grouped_mm" else built


def mixtral_settings() -> dict[str, Any]:
    return {"num_local_experts": 4, "num_experts_per_tok": 2}


def deepseek_settings() -> dict[str, Any]:
    return {
        "num_key_value_heads": 4,
        **EXPERTS,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        **TWO_LAYERS,
        "first_k_dense_replace": 1,  # the second layer has experts
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }


@model("transformers", GROUPED)
def mixtral() -> Built:
    return mixture("Mixtral", "grouped_mm", **mixtral_settings())


@model("transformers", GROUPED)
def olmoe() -> Built:
    return mixture("Olmoe", "grouped_mm", num_experts=4, num_experts_per_tok=2)


@model("transformers", GROUPED)
def qwen3_moe() -> Built:
    return mixture("Qwen3Moe", "grouped_mm", **EXPERTS, head_dim=8, num_experts=4)


@model("transformers", GROUPED)
def deepseek_v3() -> Built:
    return mixture("DeepseekV3", "grouped_mm", **deepseek_settings())


@model("transformers", BATCHED)
def mixtral_batched() -> Built:
    return mixture("Mixtral", "batched_mm", **mixtral_settings())


@model("transformers", BATCHED)
def qwen3_moe_batched() -> Built:
    return mixture("Qwen3Moe", "batched_mm", **EXPERTS, head_dim=8, num_experts=4)


@model("transformers", BATCHED)
def gpt_oss() -> Built:
    return mixture(
        "GptOss",
        "batched_mm",
        **TWO_LAYERS,  # the first one's attention slides
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        attn_implementation="eager",
    )


@model("transformers")
def mamba() -> Built:
    """A step of the scan is an operator each: four tokens."""
    built = causal("Mamba", **MAMBA, expand=2, conv_kernel=4)
    return replace(built, inputs=(tokens(ROWS, 4),), target=tokens(ROWS, 4, seed=1))


@model("transformers")
def mamba2() -> Built:
    return causal("Mamba2", **MAMBA, expand=2, num_heads=4, head_dim=8, n_groups=2, conv_kernel=4, chunk_size=4)


@model("transformers")
def t5() -> Built:
    hf = library("transformers")
    net = hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=4,
            d_ff=32,
            num_layers=2,  # the second layer takes the first one's relative positions
            num_decoder_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
            feed_forward_proj="gated-gelu",
        )
    ).double()
    return Built(net, (tokens(),), same_token, tokens(seed=1), {"decoder_input_ids": tokens(seed=2)})


@model("transformers")
def bart() -> Built:
    hf = library("transformers")
    net = hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=VOCABULARY,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=16,
            dropout=0.0,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
        )
    ).double()
    return Built(net, (tokens(),), same_token, tokens(seed=1), {"decoder_input_ids": tokens(seed=2)})


@model("transformers")
def bert() -> Built:
    hf = library("transformers")
    net = hf.BertForMaskedLM(
        hf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).double()
    mask = (torch.arange(LENGTH) < torch.tensor([8, 5, 8, 3, 8, 8, 6, 8])[:, None]).long()
    return Built(net, (tokens(),), same_token, tokens(seed=1), {"attention_mask": mask})


@model("transformers")
def distilbert() -> Built:
    hf = library("transformers")
    net = hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=16,
            hidden_dim=32,
            n_layers=1,
            n_heads=4,
            max_position_embeddings=16,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
            num_labels=4,
        )
    ).double()
    return Built(net, (tokens(),), class_of, classes(4))


@model("transformers")
def modernbert() -> Built:
    hf = library("transformers")
    net = hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            local_attention=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
            global_attn_every_n_layers=2,
        )
    ).double()
    return Built(net, (tokens(),), same_token, tokens(seed=1))


@model("transformers")
def deberta_v2() -> Built:
    hf = library("transformers")
    net = hf.DebertaV2ForMaskedLM(
        hf.DebertaV2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=4,
        )
    ).double()
    return Built(net, (tokens(),), same_token, tokens(seed=1))


@model("transformers")
def whisper() -> Built:
    hf = library("transformers")
    net = hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_source_positions=8,
            max_target_positions=16,
            dropout=0.0,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    ).double()
    return Built(net, (draw(ROWS, 8, 16),), same_token, tokens(seed=1), {"decoder_input_ids": tokens(seed=2)})


@model("transformers")
def wav2vec2() -> Built:
    hf = library("transformers")
    net = hf.Wav2Vec2Model(
        hf.Wav2Vec2Config(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=32,
            conv_dim=(8, 8),
            conv_stride=(4, 2),
            conv_kernel=(8, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            feat_proj_dropout=0.0,
            layerdrop=0.0,
            activation_dropout=0.0,
            mask_time_prob=0.0,
            mask_feature_prob=0.0,
        )
    ).double()
    return Built(net, (draw(ROWS, 136),), squares)


VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


@model("transformers")
def vit() -> Built:
    hf = library("transformers")
    net = hf.ViTForImageClassification(
        hf.ViTConfig(**VISION, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ).double()
    return Built(net, (draw(ROWS, 3, 16, 16),), class_of, classes(4))


@model("transformers")
def clip() -> Built:
    hf = library("transformers")
    text = {
        k: DECODER[k]
        for k in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "bos_token_id",
            "pad_token_id",
        )
    }
    net = hf.CLIPModel(
        hf.CLIPConfig(
            text_config=text | {"max_position_embeddings": 16, "eos_token_id": 2},
            vision_config=VISION,
            projection_dim=16,
        )
    ).double()
    words = tokens()
    words[:, -1] = 2

    def contrastive(output: Any, target: Tensor) -> Tensor:
        return (F.cross_entropy(output.logits_per_text, target) + F.cross_entropy(output.logits_per_image, target)) / 2

    return Built(net, (words, draw(ROWS, 3, 16, 16)), contrastive, torch.arange(ROWS))


@model("transformers")
def dinov2() -> Built:
    hf = library("transformers")
    net = hf.Dinov2ForImageClassification(
        hf.Dinov2Config(**{k: v for k, v in VISION.items() if k != "intermediate_size"}, mlp_ratio=2, num_labels=4)
    ).double()
    return Built(net, (draw(ROWS, 3, 16, 16),), class_of, classes(4))


@model("transformers")
def segformer() -> Built:
    hf = library("transformers")
    net = hf.SegformerForSemanticSegmentation(
        hf.SegformerConfig(
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            num_labels=4,
            drop_path_rate=0.0,
            classifier_dropout_prob=0.0,
        )
    ).double()
    return Built(net, (draw(ROWS, 3, 16, 16),), squares)

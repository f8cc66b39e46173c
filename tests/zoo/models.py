"""The zoo: models of several libraries as they are written, small and with random weights. Nothing is downloaded.

Each builder returns a model in float64, inputs, a target, and a loss of what the model returns.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

os.environ.setdefault("HF_HUB_OFFLINE", "1")

__all__ = ["MODELS", "Built", "Model"]

#: How many rows a batch has, and how many tokens a row.
ROWS, LENGTH, VOCABULARY = 8, 8, 32


@dataclass
class Built:
    """A model, one batch and its loss: ``loss(net(*inputs, **kwargs), target)``."""

    net: nn.Module
    inputs: tuple
    loss: Callable[[Any, Any], Tensor]
    target: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """An entry of the zoo.

    Attributes:
        name: of the model.
        library: whose it is.
        build: makes it.
        note: what the table says of it besides.
        slow: whether its tests are long ones.
    """

    name: str
    library: str
    build: Callable[[], Built]
    note: str = ""
    slow: bool = False


MODELS: dict[str, Model] = {}


def library(name: str) -> Any:
    """A library, imported where a model is built of it.

    Raises:
        ImportError: it is not installed.
    """
    return importlib.import_module(name)


def model(library: str, note: str = "", slow: bool = False) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Enter a builder by its name."""

    def enter(build: Callable[[], Built]) -> Callable[[], Built]:
        name = build.__name__.strip("_")
        assert name not in MODELS, name
        MODELS[name] = Model(name, library, build, note, slow)
        return build

    return enter


# -- batches and losses ------------------------------------------------------------------------------------------------


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, most: int = VOCABULARY, seed: int = 0) -> Tensor:
    return torch.randint(3, most, shape or (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def classes(count: int, rows: int = ROWS, seed: int = 1) -> Tensor:
    return torch.randint(0, count, (rows,), generator=torch.Generator().manual_seed(seed))


def next_token(output: Any, target: Tensor) -> Tensor:
    """Outside of the model, whose own loss is worked out in float32."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def same_token(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def class_of(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output if isinstance(output, Tensor) else output.logits, target)


def squares(output: Any, target: Any = None) -> Tensor:
    """Of everything that comes out, each element with a weight of its own."""
    leaves = [
        x
        for x in pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
        if isinstance(x, Tensor) and x.is_floating_point()
    ]
    return sum(((x + 0.1) ** 2).mean() * (i + 1) for i, x in enumerate(leaves))


# -- transformers ------------------------------------------------------------------------------------------------------


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "state_size": 4,
    "num_hidden_layers": 2,
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
    return causal("Llama", **DECODER)


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
    return causal("Gemma2", **DECODER, head_dim=8, sliding_window=4)


@model("transformers")
def gemma3() -> Built:
    hf = library("transformers")
    config = hf.Gemma3TextConfig(
        **DECODER, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
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
        num_hidden_layers=2,
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
        num_hidden_layers=2,
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
        "first_k_dense_replace": 1,
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
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        attn_implementation="eager",
    )


@model("transformers")
def mamba() -> Built:
    return causal("Mamba", **MAMBA, expand=2, conv_kernel=4)


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
            num_layers=2,
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
            num_hidden_layers=2,
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
            n_layers=2,
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
    "num_hidden_layers": 2,
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


# -- torchvision -------------------------------------------------------------------------------------------------------


def vision(net: nn.Module, size: int = 32, count: int = 4, rows: int = ROWS) -> Built:
    return Built(net.double(), (draw(rows, 3, size, size),), class_of, classes(count, rows))


@model("torchvision")
def resnet() -> Built:
    tv = library("torchvision")
    return vision(tv.models.resnet.ResNet(tv.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4))


@model("torchvision")
def convnext() -> Built:
    tv = library("torchvision")
    setting = tv.models.convnext.CNBlockConfig
    return vision(tv.models.ConvNeXt([setting(8, 16, 1), setting(16, None, 1)], num_classes=4))


@model("torchvision")
def efficientnet() -> Built:
    tv = library("torchvision")
    block = tv.models.efficientnet
    return vision(
        block.EfficientNet(
            [
                block.MBConvConfig(1, 3, 1, 8, 8, 1),
                block.FusedMBConvConfig(2, 3, 2, 8, 16, 1),
                block.MBConvConfig(2, 5, 2, 16, 16, 2),
            ],
            dropout=0.0,
            stochastic_depth_prob=0.0,
            num_classes=4,
            last_channel=32,
        )
    )


@model("torchvision")
def swin() -> Built:
    tv = library("torchvision")
    return vision(
        tv.models.SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=4, stochastic_depth_prob=0.0), size=16
    )


@model("torchvision")
def vision_transformer() -> Built:
    tv = library("torchvision")
    return vision(tv.models.VisionTransformer(16, 4, 2, 4, 16, 32, num_classes=4), size=16)


@model("torchvision")
def mobilenet_v3() -> Built:
    tv = library("torchvision")
    block = tv.models.mobilenetv3.InvertedResidualConfig
    return vision(
        tv.models.MobileNetV3(
            [block(8, 3, 16, 8, True, "RE", 2, 1, 1.0), block(8, 5, 32, 16, False, "HS", 1, 1, 1.0)],
            32,
            num_classes=4,
            dropout=0.0,
        )
    )


@model("torchvision")
def densenet() -> Built:
    tv = library("torchvision")
    return vision(tv.models.DenseNet(8, (2, 2), 16, num_classes=4))


@model("torchvision")
def shufflenet() -> Built:
    tv = library("torchvision")
    return vision(tv.models.ShuffleNetV2([2, 2, 2], [8, 16, 16, 32, 32], num_classes=4))


@model("torchvision")
def regnet() -> Built:
    tv = library("torchvision")
    params = tv.models.regnet.BlockParams.from_init_params(
        depth=4, w_0=8, w_a=4.0, w_m=2.0, group_width=8, se_ratio=0.25
    )
    return vision(tv.models.RegNet(params, num_classes=4, stem_width=8))


# -- timm --------------------------------------------------------------------------------------------------------------


def timm(name: str, size: int = 32, **settings: Any) -> Built:
    return vision(library("timm").create_model(name, num_classes=4, **settings), size)


@model("timm")
def timm_mixer() -> Built:
    mixer = library("timm").models.mlp_mixer
    return vision(mixer.MlpMixer(num_classes=4, img_size=16, patch_size=4, num_blocks=2, embed_dim=16), 16)


@model("timm")
def timm_gmlp() -> Built:
    mixer = library("timm").models.mlp_mixer
    return vision(
        mixer.MlpMixer(
            num_classes=4,
            img_size=16,
            patch_size=4,
            num_blocks=2,
            embed_dim=16,
            mlp_ratio=4,
            block_layer=mixer.SpatialGatingBlock,
            mlp_layer=library("timm").layers.GatedMlp,
        ),
        16,
    )


@model("timm")
def timm_poolformer() -> Built:
    return vision(library("timm").models.metaformer.MetaFormer(depths=(1, 1), dims=(8, 16), num_classes=4))


@model("timm", slow=True)
def timm_levit() -> Built:
    return timm("levit_128s", 32, img_size=32, embed_dim=(16, 16, 16), key_dim=4, num_heads=(2, 2, 2), depth=(1, 1, 1))


@model("timm")
def timm_vit() -> Built:
    return timm(
        "vit_tiny_patch16_224",
        16,
        img_size=16,
        patch_size=4,
        depth=2,
        embed_dim=16,
        num_heads=4,
        class_token=False,
        global_pool="avg",
        qk_norm=True,
    )


@model("timm")
def timm_ghostnet() -> Built:
    return vision(
        library("timm").models.ghostnet.GhostNet(
            cfgs=[[[3, 8, 8, 0, 1]], [[3, 16, 16, 0.25, 2]]], num_classes=4, drop_rate=0.0
        )
    )


@model("timm")
def timm_resnest() -> Built:
    models = library("timm").models
    return vision(
        models.resnet.ResNet(
            models.resnest.ResNestBottleneck,
            (1, 1, 1, 1),
            num_classes=4,
            stem_width=4,
            channels=(8, 8, 8, 8),
            cardinality=1,
            block_args={"radix": 2, "avd": True, "avd_first": False},
        )
    )


@model("timm")
def timm_xcit() -> Built:
    return vision(
        library("timm").models.xcit.Xcit(
            img_size=16, patch_size=8, num_classes=4, embed_dim=16, depth=1, num_heads=2, cls_attn_layers=1, eta=1.0
        ),
        16,
    )


@model("timm")
def timm_coatnet() -> Built:
    cfg = library("timm").models.maxxvit.MaxxVitCfg
    return vision(
        library("timm").models.maxxvit.MaxxVit(
            cfg((32, 32), (1, 1), ("C", "T"), stem_width=8, head_hidden_size=16), img_size=32, num_classes=4
        ),
        32,
    )


# -- diffusers ---------------------------------------------------------------------------------------------------------


@model("diffusers", slow=True)
def unet2d() -> Built:
    net = (
        library("diffusers")
        .UNet2DModel(
            sample_size=8,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        )
        .double()
    )
    return Built(net, (draw(ROWS, 3, 8, 8), torch.arange(ROWS)), noise, draw(ROWS, 3, 8, 8, seed=1))


def noise(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output.sample, target)


@model("diffusers", slow=True)
def unet2d_condition() -> Built:
    net = (
        library("diffusers")
        .UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
        )
        .double()
    )
    return Built(
        net, (draw(ROWS, 4, 8, 8), torch.arange(ROWS), draw(ROWS, 4, 16, seed=2)), noise, draw(ROWS, 4, 8, 8, seed=1)
    )


@model("diffusers")
def dit() -> Built:
    net = (
        library("diffusers")
        .DiTTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=4,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=8,
            dropout=0.0,
        )
        .double()
        .eval()
    )
    return Built(
        net,
        (draw(ROWS, 4, 8, 8),),
        noise,
        draw(ROWS, 4, 8, 8, seed=1),
        {"timestep": torch.arange(ROWS), "class_labels": classes(8)},
    )


@model("diffusers")
def vae() -> Built:
    net = (
        library("diffusers")
        .AutoencoderKL(
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=4,
            layers_per_block=1,
        )
        .double()
    )
    return Built(net, (draw(ROWS, 3, 8, 8),), noise, draw(ROWS, 3, 8, 8, seed=1))


# -- torch_geometric ---------------------------------------------------------------------------------------------------


def graph_of(nodes: int = 16, edges: int = 40, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return draw(nodes, width), torch.randint(0, nodes, (2, edges), generator=generator)


def gnn(name: str, **settings: Any) -> Built:
    nets = library("torch_geometric.nn")
    x, edges = graph_of()
    return Built(getattr(nets.models, name)(8, 16, 2, 4, **settings).double(), (x, edges), class_of, classes(4, 16))


@model("torch_geometric")
def gcn() -> Built:
    return gnn("GCN", cached=False, normalize=True, add_self_loops=False)


@model("torch_geometric")
def graph_sage() -> Built:
    return gnn("GraphSAGE")


@model("torch_geometric")
def gin() -> Built:
    return gnn("GIN")


@model("torch_geometric")
def gat() -> Built:
    return gnn("GAT", heads=2, add_self_loops=False)


# -- torch -------------------------------------------------------------------------------------------------------------


class DLRM(nn.Module):
    """Numbers through an MLP, categories through tables of embeddings, and the products of each two of them."""

    def __init__(self, tables: int = 3, width: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, width, mode="sum") for _ in range(tables))
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1])
        self.top = nn.Sequential(nn.Linear(width + len(pairs[0]), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        columns = torch.stack([dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (columns @ columns.mT).flatten(1)[:, self.pairs]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


@model("torch")
def dlrm() -> Built:
    clicks = classes(2).double()
    return Built(DLRM().double(), (draw(ROWS, 8), tokens(ROWS, 3, 2)), F.binary_cross_entropy_with_logits, clicks)


class Recurrent(nn.Module):
    """An embedding, a recurrent network over the tokens, a head."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.cells = kind(16, 16, 2, batch_first=True, **settings)
        self.head = nn.Linear(32 if settings.get("bidirectional") else 16, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.cells(self.table(words))[0])


def each_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@model("torch")
def lstm() -> Built:
    return Built(Recurrent(nn.LSTM).double(), (tokens(),), each_token, tokens(seed=1))


@model("torch")
def gru() -> Built:
    return Built(Recurrent(nn.GRU, bidirectional=True).double(), (tokens(),), each_token, tokens(seed=1))


@model("torch")
def transformer() -> Built:
    """torch's own, encoder and decoder."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, 16)
            self.body = nn.Transformer(16, 4, 1, 1, 32, 0.0, batch_first=True)
            self.head = nn.Linear(16, VOCABULARY)

        def forward(self, words: Tensor, following: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(following.shape[1])
            return self.head(self.body(self.table(words), self.table(following), tgt_mask=mask, tgt_is_causal=True))

    return Built(Net().double(), (tokens(), tokens(seed=2)), each_token, tokens(seed=1))


@model("torch")
def unet() -> Built:
    """A U-Net of plain layers: strides down, transposed convolutions up, what was before joined again."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
            self.down = nn.Sequential(nn.Conv2d(8, 16, 2, 2), nn.InstanceNorm2d(16, affine=True), nn.SiLU())
            self.up = nn.ConvTranspose2d(16, 8, 2, 2)
            self.last = nn.Conv2d(16, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(torch.cat([x, self.up(self.down(x))], 1))

    return Built(Net().double(), (draw(ROWS, 1, 8, 8),), F.mse_loss, draw(ROWS, 1, 8, 8, seed=1))

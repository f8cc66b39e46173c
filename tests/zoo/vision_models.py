"""Models of torchvision and timm: small, random weights."""

from __future__ import annotations

from typing import Any

from registry import ROWS, Built, class_of, classes, draw, library, model
from torch import nn

# -- torchvision -------------------------------------------------------------------------------------------------------


def vision(net: nn.Module, size: int = 32, count: int = 4, rows: int = ROWS) -> Built:
    return Built(net.double(), (draw(rows, 3, size, size),), class_of, classes(count, rows))


@model("torchvision")
def resnet() -> Built:
    module = library("torchvision").models.resnet

    class Narrow(module.ResNet):
        """An eighth of the channels in each stage, which the library fixes."""

        def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Module:
            return super()._make_layer(block, planes // 8, *args, **kwargs)

    net = Narrow(module.BasicBlock, [1, 1, 1, 1], num_classes=4)
    net.fc = nn.Linear(64, 4)
    return vision(net)


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
                block.MBConvConfig(2, 5, 2, 16, 16, 1),
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
        tv.models.SwinTransformer([2, 2], 16, [2, 1], [2, 4], [4, 4], num_classes=4, stochastic_depth_prob=0.0), size=16
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
    return vision(tv.models.ShuffleNetV2([2, 1, 1], [8, 16, 16, 32, 32], num_classes=4))


@model("torchvision")
def regnet() -> Built:
    tv = library("torchvision")
    params = tv.models.regnet.BlockParams.from_init_params(
        depth=3, w_0=8, w_a=4.0, w_m=2.0, group_width=8, se_ratio=0.25
    )
    return vision(tv.models.RegNet(params, num_classes=4, stem_width=8))


# -- timm --------------------------------------------------------------------------------------------------------------


def timm(name: str, size: int = 32, **settings: Any) -> Built:
    return vision(library("timm").create_model(name, num_classes=4, **settings), size)


@model("timm")
def timm_mixer() -> Built:
    mixer = library("timm").models.mlp_mixer
    return vision(mixer.MlpMixer(num_classes=4, img_size=16, patch_size=4, num_blocks=1, embed_dim=16), 16)


@model("timm")
def timm_gmlp() -> Built:
    mixer = library("timm").models.mlp_mixer
    return vision(
        mixer.MlpMixer(
            num_classes=4,
            img_size=16,
            patch_size=4,
            num_blocks=1,
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
    return timm("levit_128s", 32, img_size=32, embed_dim=(16, 16), key_dim=4, num_heads=(2, 2), depth=(1, 1))


@model("timm")
def timm_vit() -> Built:
    return timm(
        "vit_tiny_patch16_224",
        16,
        img_size=16,
        patch_size=4,
        depth=1,
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

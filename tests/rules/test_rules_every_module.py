"""Every activation, normalization, pooling, padding and upsampling of `torch.nn`, and what else has one input, on four
devices beside one; a class that torch adds fails here until a table has it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_device import assert_as_one_device, close, parallel, squares
from small_networks import D, draw
from test_loss import FREE, losses_of_torch
from torch import Tensor, nn

import shardwright as sw

pytestmark = pytest.mark.filterwarnings("ignore")

MODES: dict[str, dict[str, Any]] = {"semi_auto": {"dataset": "data_parallel"}, "dynamic_programming": {"cluster": FREE}}

#: Factories of modules, by the name of the class in `torch.nn`.
Factories = dict[str, list[Callable[[], nn.Module]]]


class Called(nn.Module):
    """A module that is called otherwise than with one input."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.module, x)


class Unpooled(nn.Module):
    """A pool and its inverse."""

    def __init__(self, pool: nn.Module, unpool: nn.Module) -> None:
        super().__init__()
        self.pool, self.unpool = pool, unpool

    def forward(self, x: Tensor) -> Tensor:
        return self.unpool(*self.pool(x))


def with_flipped(module: nn.Module) -> nn.Module:
    return Called(module, lambda m, x: m(x, x.flip(1)))


def plain(names: str) -> Factories:
    return {name: [getattr(nn, name)] for name in names.split()}


PLANAR = "ReLU Hardtanh ReLU6 Sigmoid Hardsigmoid Tanh SiLU Mish Hardswish ELU CELU SELU Hardshrink LeakyReLU"
ROWS: Factories = {
    **plain(f"{PLANAR} LogSigmoid Softplus Softshrink Softsign Tanhshrink Identity"),
    "GELU": [nn.GELU, lambda: nn.GELU("tanh")],
    "GLU": [nn.GLU],
    "Threshold": [lambda: nn.Threshold(0.1, 0.2)],
    "Softmin": [lambda: nn.Softmin(1)],
    "Softmax": [lambda: nn.Softmax(1), lambda: nn.Softmax(0)],
    "LogSoftmax": [lambda: nn.LogSoftmax(1)],
    "PReLU": [lambda: nn.PReLU(dtype=D), lambda: nn.PReLU(8, dtype=D)],
    "BatchNorm1d": [lambda: nn.BatchNorm1d(8, dtype=D)],
    "SyncBatchNorm": [lambda: nn.SyncBatchNorm(8, dtype=D)],
    "PairwiseDistance": [lambda: with_flipped(nn.PairwiseDistance())],
    "CosineSimilarity": [lambda: with_flipped(nn.CosineSimilarity())],
    "Bilinear": [lambda: with_flipped(nn.Bilinear(8, 8, 4, dtype=D))],
    "Linear": [lambda: nn.Linear(8, 4, dtype=D)],
    "Unflatten": [lambda: nn.Unflatten(1, (2, 4))],
}
SEQUENCES: Factories = {
    "LayerNorm": [lambda: nn.LayerNorm(8, dtype=D), lambda: nn.LayerNorm((4, 8), bias=False, dtype=D)],
    "RMSNorm": [lambda: nn.RMSNorm(8, dtype=D), lambda: nn.RMSNorm((4, 8), elementwise_affine=False)],
    "GroupNorm": [lambda: nn.GroupNorm(2, 4, dtype=D)],
    "LocalResponseNorm": [lambda: nn.LocalResponseNorm(3)],
    "GLU": [lambda: nn.GLU(1)],
    "Flatten": [nn.Flatten],
    "MultiheadAttention": [
        lambda: Called(nn.MultiheadAttention(8, 2, batch_first=True, dtype=D), lambda m, x: m(x, x, x))
    ],
    "TransformerDecoderLayer": [
        lambda: Called(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=D), lambda m, x: m(x, x))
    ],
}
PLANES: Factories = {
    "Softmax2d": [nn.Softmax2d],
    "CrossMapLRN2d": [lambda: nn.CrossMapLRN2d(3), lambda: nn.CrossMapLRN2d(2, 0.5, 0.6, 2.0)],
    "LocalResponseNorm": [lambda: nn.LocalResponseNorm(2)],
    "GroupNorm": [lambda: nn.GroupNorm(4, 4, affine=False)],
    "UpsamplingNearest2d": [lambda: nn.UpsamplingNearest2d(scale_factor=2)],
    "UpsamplingBilinear2d": [lambda: nn.UpsamplingBilinear2d(scale_factor=2), lambda: nn.UpsamplingBilinear2d((5, 7))],
    "PixelShuffle": [lambda: nn.PixelShuffle(2)],
    "PixelUnshuffle": [lambda: nn.PixelUnshuffle(2)],
    "ChannelShuffle": [lambda: nn.ChannelShuffle(2)],
    "Unfold": [lambda: nn.Unfold(2)],
    "Fold": [lambda: Called(nn.Fold((4, 3), 2), lambda m, x: m(x.reshape(x.shape[0], 8, -1)[:, :, :6]))],
}


def spatial(count: int) -> Factories:
    """The modules that exist for each number of spatial dims, here `count`, with 4 channels."""

    def of(name: str) -> Callable[..., nn.Module]:
        return getattr(nn, f"{name}{count}d")

    shift = (1, -1, *[0] * (2 * count - 2))
    made: dict[str, list[Callable[[], nn.Module]]] = {
        "BatchNorm": [
            lambda: of("BatchNorm")(4, dtype=D),
            lambda: of("BatchNorm")(4, affine=False, momentum=None, dtype=D),
            lambda: of("BatchNorm")(4, track_running_stats=False, dtype=D),
        ],
        "InstanceNorm": [
            lambda: of("InstanceNorm")(4),
            lambda: of("InstanceNorm")(4, affine=True, track_running_stats=True, dtype=D),
        ],
        "MaxPool": [
            lambda: of("MaxPool")(2),
            lambda: of("MaxPool")(3, 1, 1),
            lambda: of("MaxPool")(3, 2, 0, return_indices=True, ceil_mode=True),
        ],
        "MaxUnpool": [lambda: Unpooled(of("MaxPool")(2, return_indices=True), of("MaxUnpool")(2))],
        "AvgPool": [lambda: of("AvgPool")(2), lambda: of("AvgPool")(3, 2, 1, True, False)],
        "LPPool": [lambda: of("LPPool")(2, 2)],
        "AdaptiveMaxPool": [lambda: of("AdaptiveMaxPool")(2), lambda: of("AdaptiveMaxPool")(3, return_indices=True)],
        "AdaptiveAvgPool": [lambda: of("AdaptiveAvgPool")(1), lambda: of("AdaptiveAvgPool")(3)],
        "ConstantPad": [lambda: of("ConstantPad")(1, 2.5), lambda: of("ConstantPad")(shift, 2.5)],
        **{f"{name}Pad": [lambda name=name: of(f"{name}Pad")(1)] for name in ("Zero", "Circular", "Reflection")},
        "ReplicationPad": [lambda: of("ReplicationPad")(1)],
    }
    ways = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[count]
    upsample = [
        lambda way=way, more=more: nn.Upsample(mode=way, **more)
        for way in ("nearest", "nearest-exact", *ways)
        for more in ({"scale_factor": 2}, {"size": 5}, {"scale_factor": 1.5, "align_corners": True})
        if way in ways or "align_corners" not in more
    ]
    return {**{f"{name}{count}d": factories for name, factories in made.items()}, "Upsample": upsample}


#: Shape of the input and the modules that take it.
FAMILIES: dict[str, tuple[tuple[int, ...], Factories]] = {
    "rows": ((8, 8), ROWS),
    "sequences": ((8, 4, 8), SEQUENCES),
    "planes": ((8, 4, 4, 6), PLANES),
    "1d": ((8, 4, 8), spatial(1)),
    "2d": ((8, 4, 8, 6), spatial(2)),
    "3d": ((4, 4, 4, 4, 6), spatial(3)),
}
RANDOM: dict[str, tuple[tuple[int, ...], Factories]] = {
    "sequences": ((8, 4, 8), {"RReLU": [nn.RReLU], **plain("Dropout Dropout1d AlphaDropout FeatureAlphaDropout")}),
    "planes": (
        (8, 4, 6, 6),
        {
            "FractionalMaxPool2d": [
                lambda: nn.FractionalMaxPool2d(2, output_size=3),
                lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5, return_indices=True),
            ],
            **plain("Dropout2d FeatureAlphaDropout"),
        },
    ),
    "volumes": (
        (4, 4, 4, 4, 6),
        {"FractionalMaxPool3d": [lambda: nn.FractionalMaxPool3d(2, output_size=2)], **plain("Dropout3d")},
    ),
}
#: Classes that are not here: the reason, or the tests that have them.
ELSEWHERE = {
    "bases and containers, which compute nothing": "Module Container ModuleDict ModuleList ParameterDict ParameterList "
    "Sequential RNNBase RNNCellBase",
    "tests/parallel: a wrapper, which is refused": "DataParallel",
    "tests/rules/test_spatial_convolution.py": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d",
    "tests/rules/test_recurrent.py": "RNN LSTM GRU RNNCell LSTMCell GRUCell",
    "tests/rules/test_indexing_vocabulary.py, tests/zoo": "Embedding EmbeddingBag",
    "tests/parallel/test_parallel_transformer_models.py, tests/zoo": "Transformer TransformerEncoder "
    "TransformerEncoderLayer TransformerDecoder",
}


class Modules(nn.Module):
    """The modules of one family, of one product."""

    def __init__(self, shape: tuple[int, ...], factories: Factories) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(1 + 0.5 * draw(*shape[1:], seed=1))
        self.product = torch.mul
        self.names = [f"{name} {i}" for name, made in factories.items() for i, _ in enumerate(made)]
        self.parts = nn.ModuleList(make() for made in factories.values() for make in made)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.product(x, self.w)
        return {name: part(y) for name, part in zip(self.names, self.parts)}


def test_every_class_of_torch_is_in_a_table() -> None:
    kinds = {name: kind for name, kind in vars(nn).items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    lazy = {name for name in kinds if name.startswith("Lazy")}  # plain classes, once they have parameters
    here = {name for _, factories in (*FAMILIES.values(), *RANDOM.values()) for name in factories}
    there = {name for names in ELSEWHERE.values() for name in names.split()}
    assert not here & there
    assert not there - set(kinds)
    missing = set(kinds) - here - there - lazy - losses_of_torch()
    assert not missing, f"a table of this file, and rules in shardwright/rules if there are none: {sorted(missing)}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_are_as_on_one_device(family: str, mode: str) -> None:
    shape, factories = FAMILIES[family]
    model = assert_as_one_device(
        Modules(shape, factories),
        *((draw(*shape, seed=seed),) for seed in (4, 5)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-4),
        devices=4,
        mode=mode,
        **MODES[mode],
    )
    cut = [bool(d.assignment.used) for d in model.plan.decisions.values()]
    assert sum(cut) > 0.8 * len(cut)


@pytest.mark.parametrize("family", ["sequences", "planes"])
def test_modules_of_an_uneven_batch_are_as_on_one_device(family: str) -> None:
    """Seven rows on four devices: what cannot follow on padded rows gathers them."""
    shape, factories = FAMILIES[family]
    net = Modules((7, *shape[1:]), factories)
    net.product = sw.shard(torch.mul, ((4, *[1] * (len(shape) - 1)), (1,) * (len(shape) - 1)))
    batch = (draw(7, *shape[1:], seed=4),)
    assert_as_one_device(net, batch, devices=4, mode="dynamic_programming", cluster=FREE, uneven=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", RANDOM)
def test_random_modules_are_as_on_one_device(family: str, mode: str) -> None:
    """The random numbers of a program belong to the elements of whole tensors: one device has the same."""
    shape, factories = RANDOM[family]
    net = Modules(shape, factories)
    made = {}
    for devices, options in ((4, {"mode": mode, **MODES[mode]}), (1, {})):
        held = copy.deepcopy(net)
        model = parallel(held, devices=devices, **options)
        torch.manual_seed(5)
        outputs = model(draw(*shape, seed=4))
        squares(outputs).backward()
        made[devices] = outputs, held.w.grad
    close(*made.values(), "outputs and gradient")

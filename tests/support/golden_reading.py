"""Reading the goldens: layouts, calls in the original's names, and bytes that a rank must send."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paths import SHARED, WITHOUT_SHARED
from torch import nn

import shardwright as sw
from shardwright.layout import Digit

WORLD = "WORLD_GROUP"

if not (SHARED / "goldens").is_dir():
    pytest.skip(f"no goldens at {SHARED}: {WITHOUT_SHARED}", allow_module_level=True)


def layout_of(record: dict, shape: list[int] | None = None) -> sw.Layout:
    """The layout of a parameter record: per dim the index, from the right, of the device matrix's axes that cut it."""
    matrix, shape = record["device_matrix"], record["shape"]
    axes = list(record["tensor_map"])
    digits = []
    for size, local in zip(shape, record["slice_shape"]):
        mine: list[Digit] = []
        while True:
            axis = axes.pop(0)
            if axis >= 0:
                k = len(matrix) - 1 - axis
                mine.append(Digit(matrix[k], math.prod(matrix[k + 1 :])))
            if math.prod(d.size for d in mine) >= size // local:
                break
        digits.append(mine)
    assert not axes
    return sw.Layout.of(math.prod(matrix), digits)


def ranks_of(text: str, devices: int) -> tuple[int, ...]:
    return tuple(range(devices)) if text == WORLD else tuple(map(int, text.split("-")))


def sent_by_golden(collective: dict, devices: int, itemsize: int = 4) -> float:
    """Bytes a rank must send in one of the original's collectives."""
    taken_in, given = (math.prod(collective[k][0]) * itemsize for k in ("in", "out"))
    if collective["ranks"] is not None:
        n = len(ranks_of(collective["ranks"], devices))
    else:
        n = max(taken_in, given) // min(taken_in, given) if taken_in != given else devices
    share = (n - 1) / n
    return {
        "AllReduce": 2 * share * taken_in,
        "AllGather": share * given,
        "ReduceScatter": share * taken_in,
        "AlltoAll": share * taken_in,
    }[collective["op"]]


class Recorded:
    """``ops.MatMul(transpose_b=True).shard(((2, 2), (2, 2)))`` as data."""

    def __init__(self, name: str, args: tuple, kwargs: dict) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs
        self.in_strategy: Any = None
        self.out_strategy: Any = None

    def shard(self, in_strategy: Any, out_strategy: Any = None) -> Recorded:
        self.in_strategy, self.out_strategy = in_strategy, out_strategy
        return self


class _Ops:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Recorded(name, args, kwargs)


def read_call(text: str) -> Recorded:
    """A call in the original's names; `L()` is the tutorial's Layout."""
    return eval(text, {"ops": _Ops(), "Layout": sw.Layout, "L": lambda: sw.Layout((2, 2, 2), ("dp", "sp", "mp"))})


@dataclass
class Extra:
    args: tuple = ()
    dtypes: dict | None = None


def read_extra(text: str) -> Extra:
    if not text:
        return Extra()
    made = eval(f"make({text})", {"np": np, "make": lambda *a, doc=None: a})
    return Extra(made[0] if made else (), made[1] if len(made) > 1 else None)


def torch_operator(call: Recorded, extra: Extra) -> Any:
    """The PyTorch function that is the operator."""
    flags = call.kwargs
    if call.name in ("MatMul", "BatchMatMul"):
        if flags.get("transpose_a"):
            return lambda a, b: torch.einsum("km,kn->mn", a, b)
        return F.linear if flags.get("transpose_b") else torch.matmul
    if call.name in ("ReduceSum", "ReduceMax"):
        plain = torch.sum if call.name == "ReduceSum" else torch.amax
        dims = extra.args or None
        keep = flags.get("keep_dims", False)
        return lambda x: plain(x, dim=dims if dims else tuple(range(x.dim())), keepdim=keep)
    if call.name == "Transpose":
        return lambda x: torch.permute(x, extra.args[0])
    if call.name == "ExpandDims":
        return lambda x: torch.unsqueeze(x, extra.args[0])
    return {
        "ReLU": torch.relu,
        "Add": torch.add,
        "Mul": torch.mul,
        "BiasAdd": torch.add,
        "Softmax": lambda x: torch.softmax(x, *(call.args or (-1,))),
        "SoftmaxCrossEntropyWithLogits": lambda a, b: F.cross_entropy(a, b, reduction="none"),
        "Flatten": lambda x: torch.flatten(x, 1),
        "LayerNorm": lambda x, *affine: F.layer_norm(x, x.shape[call.args[0] :], *affine),
        "BatchNorm": lambda *operands: torch.ops.shardwright.batch_norm(*operands, None, 0.1, 1e-5, False)[0],
        "Gather": lambda table, index: F.embedding(index, table),
        "Concat": lambda *parts: torch.cat(parts, *call.args),
        "Conv2D": lambda x, w: F.conv2d(x, w, padding=flags["pad_mode"]),
        "MaxPool": lambda x: F.max_pool2d(x, *call.args[:2], ceil_mode=True),  # "same" pads on the right
    }[call.name]


class OnParameters(nn.Module):
    """One operator on parameters p0, p1, …"""

    def __init__(self, function: Any, shapes: list, call: Recorded, dtypes: dict | None = None) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            whole = i in (dtypes or {})
            made = torch.zeros(shape, dtype=torch.int32) if whole else torch.randn(shape)
            self.register_parameter(f"p{i}", nn.Parameter(made, requires_grad=not whole))
        self.operator = sw.Operator(function).shard(call.in_strategy, call.out_strategy)

    def forward(self) -> torch.Tensor:
        return self.operator(*self._parameters.values())

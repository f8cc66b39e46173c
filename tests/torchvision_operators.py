"""Imported before torchvision: declares the operators that its wheel lacks beside a build of torch for CPUs alone, so that it,
and what of transformers needs it, can be imported. None of them is called here."""

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

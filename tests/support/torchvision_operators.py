"""The names of torchvision's own operators, which its wheel has for the CUDA build of torch alone.

On a CPU build torchvision is imported (by transformers and timm too) only where the operators are known by name. None
of the models in the tests calls one.
"""

from __future__ import annotations

import torch

if torch.version.cuda is None:
    LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

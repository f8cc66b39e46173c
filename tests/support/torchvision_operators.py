"""The names of torchvision's own operators, where torchvision was built for another torch.

PyPI's torchvision is built for CUDA. Beside a CPU build of torch its library cannot be loaded, and `import torchvision`
fails (so do transformers, timm and others that import it) where nobody has defined these operators' names. This module
defines them when torchvision is imported for the first time. They are names alone: a call of one is an error of torch.

The tests import this module, and `make venv` puts it into an environment whose torchvision does not fit. `make venv`
and `shardwright doctor` say so.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType


class _BeforeTorchvision(MetaPathFinder):
    """Defines the names before torchvision's first line runs; finds no module itself."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            define()


def define() -> None:
    """Define the operators' names, unless torchvision's own library can be loaded."""
    import torch  # takes seconds, and not every process needs it

    spec = importlib.util.find_spec("torchvision")
    for file in Path(spec.origin or "").parent.glob("_C*.so") if spec is not None else ():
        try:
            torch.ops.load_library(str(file))
            return
        except OSError:  # built for another torch
            continue
    library = torch.library.Library("torchvision", "FRAGMENT")
    _KEPT.append(library)  # the names go with it
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_KEPT: list[object] = []

if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchvision())

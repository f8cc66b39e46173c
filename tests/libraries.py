"""Libraries of models that tests use, where a build of torch alone would not let them be imported."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

__all__ = ["declare_torchvision_operators", "library"]

#: What torchvision describes in Python of its compiled operators; its import fails where nothing declares them.
_OPERATORS = {name: "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")}

_DECLARED: list[torch.library.Library] = []


def declare_torchvision_operators() -> None:
    """Declare torchvision's operators, whose compiled part does not load on another build of torch than it was made for.

    Its models need none of them. Where its compiled part does load later, that declares them itself.
    """
    if _DECLARED or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
        return
    except (ImportError, RuntimeError):
        _forget("torchvision")
    declared = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _OPERATORS.items():
        declared.define(name + schema)
    _DECLARED.append(declared)


def _forget(package: str) -> None:
    """Drop what a failed import left of a package."""
    import sys
    for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
        del sys.modules[name]


def library(name: str) -> Any:
    """A library, imported.

    Raises:
        ImportError: it is not installed.
    """
    declare_torchvision_operators()  # transformers, timm and diffusers import torchvision where there is one
    return importlib.import_module(name)

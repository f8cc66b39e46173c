"""Optional libraries imported, each in a forked process of its own: one that does not fit may end its process.

1. A library that is not installed is left out.
2. An installed one is imported; its answer is "" where that succeeds, else the error at the root.
3. All imports together have `IMPORT_SECONDS`.

Example: where only timm and torchvision are installed, and torchvision was built for another torch, the answers are ""
for "timm" and the text of the error for "torchvision".
"""

from __future__ import annotations

import importlib
from functools import partial
from importlib import metadata

from ..errors import SettingError
from .forked_ranks import error_text, in_children

__all__ = ["IMPORTED", "library_imports"]

#: The module that is imported of each library in the pages' examples: libraries load their parts late.
IMPORTED = {
    "torchvision": "torchvision.models",
    "transformers": "transformers.models.llama.modeling_llama",
    "timm": "timm",
    "diffusers": "diffusers.models",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "peft": "peft",
    "torchao": "torchao",
    "safetensors": "safetensors.torch",
    "tensorboard": "torch.utils.tensorboard",
}

#: Seconds that all these imports together may take: on a busy machine some take a minute.
IMPORT_SECONDS = 180.0


def library_imports() -> dict[str, str]:
    """The libraries of `IMPORTED` that are installed: name -> the error of its import; "" where it can be imported."""
    installed = [name for name in IMPORTED if _installed(name)]
    calls = [partial(_imported, IMPORTED[name]) for name in installed]
    answers = in_children(calls, IMPORT_SECONDS, together=False)
    return {name: answer.error for name, answer in zip(installed, answers)}


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _imported(module: str) -> None:
    """Import a module; the error is that at the root, which others may have wrapped.

    Raises:
        SettingError: the module cannot be imported, or torchvision is there without its own operators.
    """
    try:
        importlib.import_module(module)
        if module.startswith("torchvision"):
            import torch  # noqa: PLC0415  takes seconds

            torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except Exception as error:  # whatever a library raises where it does not fit is the finding
        root: BaseException = error
        while (cause := root.__cause__ or root.__context__) is not None:
            root = cause
        raise SettingError(error_text(root)) from error

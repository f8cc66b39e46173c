"""The command line that the example scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

__all__ = ["arguments"]


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def arguments(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """`argv` (default: the command line) as ``epochs``, ``steps``, ``batch_size`` and ``dtype``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--steps", type=positive, default=None, help="steps in an epoch (default: all batches)")
    parser.add_argument("--batch_size", type=positive, default=32, help="images in a step, over all devices")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    args = parser.parse_args(argv)
    args.dtype = getattr(torch, args.dtype)
    return args

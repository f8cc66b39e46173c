"""Source lines of the user's code: which files are the user's, and the line and module of a node."""

from __future__ import annotations

import re
import sysconfig

import torch

from ..errors import PACKAGE_FOLDER

__all__ = ["is_users", "module_path", "source_of", "user_frame"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


#: Key of a node's metadata that holds its line.
_LINE = "shardwright_line"

_TORCH = torch.__file__.rsplit("/", 1)[0] + "/"


_PYTHON = sysconfig.get_path("stdlib") + "/"


def is_users(file: str) -> bool:
    """True where a file is not part of Shardwright, torch or Python; an installed package may be the user's model."""
    return not (
        file.startswith((PACKAGE_FOLDER, _TORCH, "<")) or (file.startswith(_PYTHON) and "-packages/" not in file)
    )


def user_frame(frames: list[tuple[str, int]]) -> str:
    """The innermost frame in a file of the user, as ``file.py:41``; "" where there is none."""
    return next((f"{file.rsplit('/', 1)[-1]}:{line}" for file, line in reversed(frames) if is_users(file)), "")


def source_of(node: torch.fx.Node) -> str:
    """``file.py:41``, the user's line of a node; read once a node."""
    line = node.meta.get(_LINE)
    if line is None:
        trace = node.meta.get("stack_trace") or ""
        line = node.meta[_LINE] = user_frame([(m["file"], int(m["line"])) for m in _FRAME.finditer(trace)])
    return line


def module_path(node: torch.fx.Node, prefix: str) -> str:
    """The path of the module that calls a node, without the path `prefix` of the user's model."""
    stack = node.meta.get("nn_module_stack")
    path = stack[next(reversed(stack))][0] if stack else ""
    return path.removeprefix(prefix).removeprefix(".") if path.startswith(prefix) else path

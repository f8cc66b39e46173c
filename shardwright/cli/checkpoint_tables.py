"""The contents of a checkpoint in a terminal, and as JSON: its files, its tensors and their layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from ..checkpoint.stored_checkpoint import StoredTensors
from ..errors import ShardwrightError
from ..planfile.encoding import read_layout
from ..report.format import size_text
from ..report.table_parts import UNLIMITED, table

__all__ = ["encoded", "show"]


def encoded(stored: StoredTensors) -> dict[str, Any]:
    """A checkpoint as JSON: the contents of its manifest, and the bytes of each tensor."""
    made = stored.manifest
    tensors: dict[str, dict[str, Any]] = {
        name: {"shape": list(e.shape), "dtype": e.dtype, "layout": e.layout, "bytes": e.bytes}
        for name, e in stored.entries.items()
    }
    head: dict[str, object] = {"path": str(stored.folder), "kind": "Hugging Face"}
    if made is not None:
        head |= {
            "kind": made.kind,
            "step": made.step,
            "id": made.id,
            "model": made.model,
            "plan": made.plan,
            "world": made.world,
            "files": {name: file.bytes for name, file in made.files.items()},
        }
        if made.places:
            head["places"] = {place: list(names) for place, names in made.places.items()}
    return head | {"bytes": sum(t["bytes"] for t in tensors.values()), "tensors": tensors}


def show(stored: StoredTensors, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print a checkpoint: its kind and origin, and a table of its tensors. Tensors of the optimizer share one line
    for each key.

    Args:
        stored: the checkpoint.
        file: the file to print to; None: standard output.
        width: the width of the text, in characters; None: the terminal's, or as needed where there is none.
    """
    info = encoded(stored)
    console = Console(file=file, width=width, highlight=False, soft_wrap=True)
    head = f"{info['path']}: {info['kind']}"
    if stored.manifest is not None:
        head = (
            f"{info['path']}: step {info['step']}, {info['kind']}, saved by {info['world']} "
            f"rank{'s' * (info['world'] != 1)}"
        )
        ids = f"model {info['model']}, plan {info['plan'] or 'none'}, save {info['id']}"
        head += f"\n{ids}\n{len(info['files'])} files, {size_text(sum(info['files'].values()))}"
        for place, names in info.get("places", {}).items():
            head += f"\n{len(names)} of them written to {place}"
    console.print(Text(head))
    shown = table("tensor", "shape", "dtype", "cut", "bytes", right=("bytes",))
    states: dict[str, list[int]] = {}
    for name, tensor in info["tensors"].items():
        if name.startswith("optimizer."):
            states.setdefault(name.rpartition(".")[2], []).append(tensor["bytes"])
            continue
        shown.add_row(
            name,
            "x".join(map(str, tensor["shape"])) or "scalar",
            tensor["dtype"],
            cut(tensor),
            size_text(tensor["bytes"]),
        )
    for key, sizes in states.items():
        shown.add_row(f"optimizer.*.{key}", f"{len(sizes)} tensors", "", "", size_text(sum(sizes)))
    shown.add_row("together", f"{len(info['tensors'])} tensors", "", "", size_text(info["bytes"]), style="bold")
    needed = console.measure(shown, options=console.options.update(max_width=UNLIMITED)).maximum
    if width is None and not console.is_terminal:
        console = Console(file=file, width=max(needed, 100), highlight=False)
    console.print(shown)


def cut(tensor: Mapping[str, Any]) -> str:
    """The cuts of a stored tensor: ``2x4 of 8``, with the first rank where that is not rank 0."""
    layout = tensor["layout"]
    if layout is None:
        return ""
    try:
        cuts = read_layout(layout["layout"], layout["devices"], tensor["shape"], True).cuts
    except (ShardwrightError, KeyError, TypeError):
        return "?"
    text = f"{'x'.join(map(str, cuts)) or 'whole'} of {layout['devices']}"
    return text + (f" from rank {layout['first']}" if layout.get("first") else "")

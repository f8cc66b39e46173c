"""The contents of a checkpoint in a terminal, and as JSON: its files, its tensors and their layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from ..checkpoint.tensor_reader import StoredTensors
from ..errors import ShardwrightError
from ..planfile.encoding import read_layout
from ..report.console_tables import console_of, saying, show as show_table, table
from ..report.format import size_text
from ..report.table_parts import folded_parameters

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
    """Print a checkpoint: its kind and origin, and a table of its tensors. Equal tensors of equal layers share one
    line, and tensors of the optimizer one for each key; the bytes are those of all of them.

    Args:
        stored: the checkpoint.
        file: the file to print to; None: standard output.
        width: the width of the text, in characters; None: the terminal's, or 100 where there is none.
    """
    info = encoded(stored)
    console = console_of(file, width)
    say = saying(console, width)
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
    for line in head.splitlines():
        say(line)
    shown = table("tensor", "shape", "dtype", "cut", "times", "bytes", right=("times", "bytes"))
    states: dict[str, list[int]] = {}
    cells: dict[str, tuple[str, str, str, int]] = {}
    for name, tensor in info["tensors"].items():
        if name.startswith("optimizer."):
            states.setdefault(name.rpartition(".")[2], []).append(tensor["bytes"])
            continue
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        cells[name] = shape, tensor["dtype"], cut(tensor), tensor["bytes"]
    for text, names in folded_parameters(cells):
        *texts, each = cells[names[0]]
        shown.add_row(text, *texts, str(len(names)), size_text(each * len(names)))
    for key, sizes in states.items():
        shown.add_row(f"optimizer.*.{key}", "", "", "", str(len(sizes)), size_text(sum(sizes)))
    shown.add_row("together", "", "", "", str(len(info["tensors"])), size_text(info["bytes"]), style="bold")
    show_table(console, shown)


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

"""``shardwright checkpoint``: inspect a checkpoint, verify it, merge it, or cut it for other devices.

1. ``info`` prints a checkpoint: its step, its files, its tensors and their layouts; with ``--json`` as JSON.
2. ``verify`` reads every byte and reports damaged files.
3. ``merge`` writes whole tensors; ``transform`` writes the shards of another plan.

The command is one process, without a process group or devices. Its memory never exceeds that of the largest tensor.

Example: ``shardwright checkpoint transform runs/4 runs/8 --to plan.json`` cuts the latest checkpoint of ``runs/4`` for
the devices of a plan. ``info`` shows a tensor cut 2 ways along dim 0 and 4 ways along dim 1 as ``2x4 of 8``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..errors import ShardwrightError
from ..json_files.json_reader import JsonObject
from .command_line import (
    Nothing,
    add_import_option,
    add_json_option,
    add_quiet_option,
    failed,
    import_modules,
    print_json,
    refused,
)

if TYPE_CHECKING:
    from ..checkpoint.stored_checkpoint import StoredTensors

__all__ = ["add_checkpoint_parser", "encoded", "info", "merge", "show", "transform", "verify"]

#: Exit codes. FAILED of ``verify``: the checkpoint is damaged. WRONG of every command: there is no checkpoint.
DONE, FAILED, WRONG = 0, 1, 2


#: The help of the folders that a command takes.
FOLDERS = {
    "PATH": "the folder of a checkpoint, or of a run",
    "SRC": "the folder to read: of a checkpoint, or of a run",
    "DST": "the folder to write, which is not there yet",
}


def add_checkpoint_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``checkpoint`` to the commands."""
    parser = subparsers.add_parser(
        "checkpoint",
        allow_abbrev=False,
        help="look at checkpoints, verify them, and cut them for other devices",
        description="Checkpoints without devices. A checkpoint is given by its folder, or by that of a run: then its "
        "latest is meant, or that of --step.",
        examples=(
            ("shardwright checkpoint info runs/4", "what the latest checkpoint of a run holds"),
            ("shardwright checkpoint transform runs/4 runs/8 --to plan.json", "cut it for the devices of a plan"),
        ),
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(
        name: str, function: Callable[[argparse.Namespace], int], *paths: str, **texts: Any
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, allow_abbrev=False, **texts)
        for path in paths:
            made.add_argument(path.lower(), completes="directory", type=Path, metavar=path, help=FOLDERS[path])
        made.add_argument("--step", type=int, metavar="N", help="which checkpoint of a run (default: the latest)")
        if name != "info":
            add_quiet_option(made)
        made.set_defaults(func=function, parser=made)
        return made

    made = command(
        "info",
        info,
        "PATH",
        help="what a checkpoint holds",
        description="What a checkpoint holds: step, kind, plan, files, tensors and how they lay. Exit code 0: "
        "there it is, 2: there is none, or its manifest is damaged.",
        examples=(
            ("shardwright checkpoint info runs/4", "step, files, tensors and how they are cut"),
            ("shardwright checkpoint info runs/4 --step 3 --json", "the checkpoint of step 3, as JSON"),
        ),
    )
    add_json_option(made)
    made = command(
        "verify",
        verify,
        "PATH",
        help="look for damage",
        description="Read every byte of a checkpoint, or of all of a run, and compare it with what was written. Exit "
        "code 0: sound, 1: damaged, with the files, 2: there is no checkpoint.",
        examples=(
            ("shardwright checkpoint verify runs/4", "every checkpoint of a run"),
            ("shardwright checkpoint verify runs/4 --step 3 --json", "that of step 3, as JSON"),
        ),
    )
    add_json_option(made)
    command(
        "merge",
        merge,
        "SRC",
        "DST",
        help="parts into whole files",
        description="Make a checkpoint of whole tensors, in the safetensors format, of one in parts. Exit code 0: "
        "done, 1: it cannot be done, and nothing is left of it.",
        examples=(
            ("shardwright checkpoint merge runs/4 whole", "the latest checkpoint as whole tensors"),
            ("shardwright checkpoint merge runs/4 whole3 --step 3", "that of step 3"),
        ),
    )
    made = command(
        "transform",
        transform,
        "SRC",
        "DST",
        help="cut a checkpoint for another plan or number of devices",
        description="Make a checkpoint in parts, as the ranks of another plan would have saved it, of any "
        "checkpoint or Hugging Face folder. Exit code 0: done, 1: it cannot be done, and nothing is "
        "left of it.",
        examples=(
            ("shardwright checkpoint transform runs/4 runs/8 --to plan.json", "for the devices of a plan"),
            ("shardwright checkpoint transform runs/4 runs/one --to 1", "for one device"),
        ),
    )
    made.add_argument(
        "--to",
        completes="file",
        required=True,
        metavar="PLAN|STRATEGIES|1",
        help="a plan that shardwright plan or Plan.save wrote, a file of save_param_strategy_file, or 1: one device",
    )
    add_import_option(made)


def info(arguments: argparse.Namespace) -> int:
    """Print a checkpoint and return the exit code."""
    from ..checkpoint.transform import opened  # noqa: PLC0415  needed only by this command

    try:
        with opened(arguments.path, arguments.step) as stored:
            if arguments.json:
                print_json(encoded(stored))
            else:
                show(stored)
    except ShardwrightError as error:
        return failed("checkpoint info", error, WRONG)
    return DONE


def encoded(stored: StoredTensors) -> JsonObject:
    """A checkpoint as JSON: the contents of its manifest, and the bytes of each tensor."""
    made = stored.manifest
    tensors: dict[str, JsonObject] = {
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
    from ..report.console_tables import console_of, saying, show as show_table, table  # noqa: PLC0415  imports rich
    from ..report.format import size_text  # noqa: PLC0415  imports torch
    from ..report.table_elements import folded_parameters  # noqa: PLC0415  imports torch

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


def cut(tensor: JsonObject) -> str:
    """The cuts of a stored tensor: ``2x4 of 8``, with the first rank where that is not rank 0."""
    from ..planfile.encoding import read_layout  # noqa: PLC0415  imports torch

    layout = tensor["layout"]
    if layout is None:
        return ""
    try:
        cuts = read_layout(layout["layout"], layout["devices"], tensor["shape"], True).cuts
    except (ShardwrightError, KeyError, TypeError):
        return "?"
    text = f"{'x'.join(map(str, cuts)) or 'whole'} of {layout['devices']}"
    return text + (f" from rank {layout['first']}" if layout.get("first") else "")


def verify(arguments: argparse.Namespace) -> int:
    """Look for damage, print the findings, and return the exit code."""
    from ..checkpoint.manifest import verify as problems_of  # noqa: PLC0415  needed only by this command
    from ..checkpoint.transform import to_verify  # noqa: PLC0415  needed only by this command
    from ..report.format import size_text  # noqa: PLC0415  imports torch

    try:
        folders = to_verify(arguments.path, arguments.step)
    except ShardwrightError as error:
        return failed("checkpoint verify", error, WRONG)
    checked: list[dict[str, object]] = []
    for folder in folders:
        problems = problems_of(folder)
        sizes = [file.stat().st_size for file in folder.iterdir()]
        checked.append(
            {"path": str(folder), "sound": not problems, "problems": problems, "files": len(sizes), "bytes": sum(sizes)}
        )
        if arguments.json:
            continue
        for problem in problems:
            print(f"{folder}/{problem}", flush=True)
        if not problems:
            print(f"{folder}: sound, {len(sizes)} files, {size_text(sum(sizes))}", flush=True)
    sound = all(each["sound"] for each in checked)
    if arguments.json:
        print_json({"sound": sound, "checkpoints": checked})
    return DONE if sound else FAILED


def merge(arguments: argparse.Namespace) -> int:
    """Write whole tensors from shards, and return the exit code."""
    from ..checkpoint.transform import merge as made  # noqa: PLC0415  needed only by this command

    return _made("merge", lambda: made(arguments.src, arguments.dst, step=arguments.step))


def transform(arguments: argparse.Namespace) -> int:
    """Cut a checkpoint for another plan, and return the exit code."""
    from ..checkpoint.transform import transform as made  # noqa: PLC0415  needed only by this command

    try:
        import_modules(arguments.imports)
    except Nothing as error:
        return refused(arguments, error)
    return _made("transform", lambda: made(arguments.src, arguments.dst, arguments.to, step=arguments.step))


def _made(command: str, make: Callable[[], Path]) -> int:
    """Make a checkpoint and return the exit code."""
    from ..checkpoint import manifest  # noqa: PLC0415  needed only by these commands
    from ..report.format import size_text  # noqa: PLC0415  imports torch

    try:
        folder = make()
        made = manifest.read(folder)
    except ShardwrightError as error:
        return failed(f"checkpoint {command}", error, FAILED)
    print(
        f"{folder}: step {made.step}, {made.kind}, {len(made.files)} files, "
        f"{size_text(sum(file.bytes for file in made.files.values()))}",
        flush=True,
    )
    return DONE

"""``shardwright checkpoint``: inspect a checkpoint, verify it, merge it, or cut it for other devices.

1. ``info`` prints a checkpoint: its step, its files, its tensors and their layouts (`words`, `show`).
2. ``verify`` reads every byte and reports damaged files.
3. ``merge`` writes whole tensors; ``transform`` writes the shards of another plan.

The command is one process, without a process group or devices. Its memory never exceeds that of the largest tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from ..checkpoint.tensor_reader import StoredTensors
from ..errors import ShardwrightError
from ..planfile.encoding import read_layout
from ..report.format import size_text
from ..report.table_parts import UNLIMITED, table

__all__ = ["add_checkpoint_parser", "info", "merge", "show", "transform", "verify", "words"]

#: Exit codes. FAILED of ``verify``: the checkpoint is damaged. WRONG of every command: there is no checkpoint.
DONE, FAILED, WRONG = 0, 1, 2


def add_checkpoint_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``checkpoint`` to the commands."""
    parser = subparsers.add_parser(
        "checkpoint",
        allow_abbrev=False,
        help="look at checkpoints, verify them, and cut them for other devices",
        description="Checkpoints without devices. A checkpoint is given by its folder, or by that of a run: then its "
        "latest is meant, or that of --step.",
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(
        name: str, function: Callable[[argparse.Namespace], int], *paths: str, **said: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, allow_abbrev=False, **said)
        for path in paths:
            made.add_argument(path.lower(), type=Path, metavar=path)
        made.add_argument("--step", type=int, metavar="N", help="which checkpoint of a run (default: the latest)")
        made.set_defaults(func=function, parser=made)
        return made

    made = command(
        "info",
        info,
        "PATH",
        help="what a checkpoint holds",
        description="What a checkpoint holds: step, kind, plan, files, tensors and how they lay. Exit code 0: "
        "there it is, 2: there is none, or its manifest is damaged.",
    )
    made.add_argument("--json", action="store_true", help="as JSON")
    command(
        "verify",
        verify,
        "PATH",
        help="look for damage",
        description="Read every byte of a checkpoint, or of all of a run, and compare it with what was written. Exit "
        "code 0: sound, 1: damaged, with the files, 2: there is no checkpoint.",
    )
    command(
        "merge",
        merge,
        "SRC",
        "DST",
        help="parts into whole files",
        description="Make a checkpoint of whole tensors, in the safetensors format, of one in parts. Exit code 0: "
        "done, 1: it cannot be done, and nothing is left of it.",
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
    )
    made.add_argument(
        "--to",
        required=True,
        metavar="PLAN|STRATEGIES|1",
        help="a plan that shardwright plan or Plan.save wrote, a file of save_param_strategy_file, or 1: one device",
    )
    made.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import a module first, which registers operators of yours (may be repeated)",
    )


def info(arguments: argparse.Namespace) -> int:
    """Print a checkpoint and return the exit code."""
    from ..checkpoint.transform import opened  # noqa: PLC0415  needed only by this command

    try:
        with opened(arguments.path, arguments.step) as stored:
            if arguments.json:
                print(json.dumps(words(stored), indent=1))
            else:
                show(stored)
    except ShardwrightError as error:
        return _said("info", error, WRONG)
    return DONE


def verify(arguments: argparse.Namespace) -> int:
    """Look for damage, print the findings, and return the exit code."""
    from ..checkpoint.manifest import verify as problems_of  # noqa: PLC0415  needed only by this command
    from ..checkpoint.transform import to_verify  # noqa: PLC0415  needed only by this command
    from ..report.format import size_text  # noqa: PLC0415  also imported at the top

    try:
        folders = to_verify(arguments.path, arguments.step)
    except ShardwrightError as error:
        return _said("verify", error, WRONG)
    damaged = False
    for folder in folders:
        problems = problems_of(folder)
        for problem in problems:
            print(f"{folder}/{problem}", flush=True)
        if not problems:
            sizes = [file.stat().st_size for file in folder.iterdir()]
            print(f"{folder}: sound, {len(sizes)} files, {size_text(sum(sizes))}", flush=True)
        damaged |= bool(problems)
    return FAILED if damaged else DONE


def merge(arguments: argparse.Namespace) -> int:
    """Write whole tensors from shards, and return the exit code."""
    from ..checkpoint.transform import merge as made  # noqa: PLC0415  needed only by this command

    return _made(
        "merge", arguments, lambda progress: made(arguments.src, arguments.dst, step=arguments.step, progress=progress)
    )


def transform(arguments: argparse.Namespace) -> int:
    """Cut a checkpoint for another plan, and return the exit code."""
    from ..checkpoint.transform import transform as made  # noqa: PLC0415  needed only by this command
    from .script import Nothing, import_modules  # noqa: PLC0415  needed only by this command

    try:
        import_modules(arguments.imports)
    except Nothing as error:
        arguments.parser.error(str(error))
    return _made(
        "transform",
        arguments,
        lambda progress: made(arguments.src, arguments.dst, arguments.to, step=arguments.step, progress=progress),
    )


def _made(command: str, arguments: argparse.Namespace, make: Callable[[Any], Path]) -> int:
    """Make a checkpoint, show the progress, and return the exit code."""
    from ..checkpoint import manifest  # noqa: PLC0415  needed only by these commands
    from ..report.format import size_text  # noqa: PLC0415  also imported at the top

    try:
        with _shown() as progress:
            folder = make(progress)
        made = manifest.read(folder)
    except ShardwrightError as error:
        return _said(command, error, FAILED)
    print(
        f"{folder}: step {made.step}, {made.kind}, {len(made.files)} files, "
        f"{size_text(sum(file.bytes for file in made.files.values()))}",
        flush=True,
    )
    return DONE


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar for each task on standard error; a line for each where that is no terminal."""
    from rich.console import Console  # noqa: PLC0415  also imported at the top

    # rich.progress: needed only to show progress
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    console = Console(stderr=True, highlight=False)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
                if not console.is_terminal:
                    print(f"{what} {total:,} bytes", file=sys.stderr, flush=True)
            bars.update(tasks[what], completed=done)

        yield progress


def _said(command: str, error: ShardwrightError, code: int) -> int:
    print(f"shardwright checkpoint {command}: error: {error}", file=sys.stderr)
    return code


# -- a checkpoint in a terminal ----------------------------------------------------------------------------------------


def words(stored: StoredTensors) -> dict[str, Any]:
    """A checkpoint as JSON: the contents of its manifest, and the bytes of each tensor."""
    made = stored.manifest
    tensors = {
        name: {"shape": list(e.shape), "dtype": e.dtype, "layout": e.layout, "bytes": e.bytes}
        for name, e in stored.entries.items()
    }
    head: dict[str, Any] = {"path": str(stored.folder), "kind": "Hugging Face"}
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
    return head | {"bytes": sum(t["bytes"] for t in tensors.values()), "tensors": tensors}


def show(stored: StoredTensors, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print a checkpoint: its kind and origin, and a table of its tensors. Tensors of the optimizer share one line
    for each key.

    Args:
        stored: the checkpoint.
        file: the file to print to; None: standard output.
        width: the width of the text, in characters; None: the terminal's, or as needed where there is none.
    """
    said = words(stored)
    console = Console(file=file, width=width, highlight=False, soft_wrap=True)
    head = f"{said['path']}: {said['kind']}"
    if stored.manifest is not None:
        head = (
            f"{said['path']}: step {said['step']}, {said['kind']}, saved by {said['world']} "
            f"rank{'s' * (said['world'] != 1)}"
        )
        ids = f"model {said['model']}, plan {said['plan'] or 'none'}, save {said['id']}"
        head += f"\n{ids}\n{len(said['files'])} files, {size_text(sum(said['files'].values()))}"
    console.print(Text(head))
    shown = table("tensor", "shape", "dtype", "cut", "bytes", right=("bytes",))
    states: dict[str, list[int]] = {}
    for name, tensor in said["tensors"].items():
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
    shown.add_row("together", f"{len(said['tensors'])} tensors", "", "", size_text(said["bytes"]), style="bold")
    needed = console.measure(shown, options=console.options.update(max_width=UNLIMITED)).maximum
    if width is None and not console.is_terminal:
        console = Console(file=file, width=max(needed, 100), highlight=False)
    console.print(shown)


def cut(tensor: Mapping[str, Any]) -> str:
    """The cuts of a stored tensor: ``2x4 of 8``, with the first rank where that is not rank 0."""
    said = tensor["layout"]
    if said is None:
        return ""
    try:
        cuts = read_layout(said["layout"], said["devices"], tensor["shape"], True).cuts
    except (ShardwrightError, KeyError, TypeError):
        return "?"
    text = f"{'x'.join(map(str, cuts)) or 'whole'} of {said['devices']}"
    return text + (f" from rank {said['first']}" if said.get("first") else "")

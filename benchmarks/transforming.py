"""A checkpoint cut for other devices without any: how much memory it takes, and how long.

    python benchmarks/transforming.py                     2 GiB: a GPT with Adam's state, 8 parts to 4, other strategies
    python benchmarks/transforming.py --quick             96 MiB
    python benchmarks/transforming.py --folder /scratch   where the files go (three times the size)

    whole -> 8     whole files to the parts of 8 ranks: data by 2, operators by 4, the rest cut over replicas
    8 -> 4         those to the parts of 4 ranks, whose matrices are cut in the other dim
    4 -> whole     those merged
    copy           the files of 8 ranks copied as they are, for comparison

Each runs in a process of its own, whose peak of resident memory is to stay under 3 x the largest tensor + 300 MiB. In
the end every tensor is compared with what it was, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt import GPT, mark
from race import machine

import shardwright as sw
from shardwright.checkpoint.checkpoint_folders import sealed
from shardwright.checkpoint.manifest import new_id
from shardwright.checkpoint.run_state import STATE
from shardwright.checkpoint.stored_checkpoint import StoredTensors
from shardwright.checkpoint.tensor_files import WholeFiles
from shardwright.planfile.parameter_file import ParameterStrategies, TensorStorage

MIB = 1 << 20

#: Vocabulary, width, layers: 178 million parameters, three tensors of each.
FULL, QUICK = (50304, 1024, 10), (20480, 256, 4)


class Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.cross_entropy(scores.flatten(0, 1), target.flatten())


def plan(size: tuple[int, int, int], devices: int, dp: int, mp: int, **settings: Any) -> sw.Plan:
    vocabulary, width, layers = size
    with torch.device("meta"):
        net, loss = GPT(vocabulary, 1024, layers, width, width // 64), Loss()
    mark(net, loss, dp, mp)
    tokens = torch.empty(8, 1024, dtype=torch.int64, device="meta")
    return sw.plan(net, (tokens,), loss, tokens, devices=devices, **settings)


def turned(strategies: ParameterStrategies) -> ParameterStrategies:
    """The same with matrices cut in the other dim."""

    def turn(held: TensorStorage) -> TensorStorage:
        if len(held.shape) != 2 or held.layout.is_replicated:
            return held
        return TensorStorage(held.shape, held.dtype, sw.Layout.of(held.layout.devices, reversed(held.layout.dims)))

    return ParameterStrategies(
        strategies.devices, {n: turn(h) for n, h in strategies.parameters.items()}, strategies.buffers
    )


def source(folder: Path, strategies: ParameterStrategies) -> None:
    """A checkpoint of whole files, of random numbers, written tensor by tensor."""
    tensors = {f"model.{name}": (held.shape, held.dtype, None) for name, held in strategies.parameters.items()}
    for name, held in strategies.parameters.items():
        tensors |= {f"optimizer.{name}.{key}": (held.shape, held.dtype, None) for key in ("exp_avg", "exp_avg_sq")}
        tensors[f"optimizer.{name}.step"] = ((), "float32", None)
    folder.mkdir()
    files = WholeFiles(tensors, mark_ := new_id(), 0)
    files.begin(folder)
    files.write(folder, ((name, (0,) * len(shape), torch.rand(shape)) for name, (shape, _, _) in tensors.items()))
    state = {
        "id": mark_,
        "step": 0,
        "extra": None,
        "schedulers": [],
        "modules": {},
        "tied": {},
        "random": None,
        "data": None,
    }
    (folder / STATE).write_text(json.dumps(state))
    sealed(folder, {}, files.entries, "integrated", 0, mark_, None, 1)


def run(*words: object) -> dict[str, float]:
    """The seconds and the peak memory of ``shardwright checkpoint``, in a process of its own."""
    # The kernel's own mark of the highest: getrusage would count what this process had when it made that one.
    child = (
        "import re, sys, time\nfrom shardwright import cli\nbegin = time.perf_counter()\n"
        "code = cli.main(sys.argv[1:])\nseconds = time.perf_counter() - begin\n"
        "print('\\n', seconds, re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", child, "checkpoint", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    seconds, peak = done.stdout.split()[-2:]
    return {"seconds": float(seconds), "peak MiB": float(peak) / 1024}


def copied(before: Path, after: Path) -> dict[str, float]:
    begin = time.perf_counter()
    shutil.copytree(before, after)
    os.sync()
    return {"seconds": time.perf_counter() - begin}


def equal(before: Path, after: Path) -> bool:
    with StoredTensors(before) as one, StoredTensors(after) as other:
        return set(one.names) == set(other.names) and all(torch.equal(one.read(n), other.read(n)) for n in one.names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="96 MiB")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path("transforming.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        plan(size, 8, 2, 4, hsdp={"threshold": 64}).save(folder / "eight.json")
        turned(ParameterStrategies.of(plan(size, 4, 1, 4))).save(folder / "four.json")
        eight, four = (ParameterStrategies.read(folder / f"{name}.json") for name in ("eight", "four"))
        source(folder / "whole", eight)
        rows = {"whole -> 8": run("transform", "--to", folder / "eight.json", folder / "whole", folder / "eight")}
        rows["copy"] = copied(folder / "eight", folder / "copy")
        shutil.rmtree(folder / "copy")
        rows["8 -> 4"] = run("transform", "--to", folder / "four.json", folder / "eight", folder / "four")
        same = equal(folder / "whole", folder / "four")
        shutil.rmtree(folder / "eight")
        rows["4 -> whole"] = run("merge", folder / "four", folder / "merged")
        same &= equal(folder / "whole", folder / "merged")
        with StoredTensors(folder / "whole") as stored:
            total, largest = (f(e.bytes for e in stored.entries.values()) for f in (sum, max))
    cut = sum(eight.parameters[n].layout.cuts != four.parameters[n].layout.cuts for n in eight.parameters)
    bound = 3 * largest / MIB + 300
    ok = same and all(row.get("peak MiB", 0) < bound for row in rows.values())
    table = Table(
        "",
        "seconds",
        "GiB/s",
        "peak MiB",
        box=box.SIMPLE,
        title_justify="left",
        title=f"{total / MIB / 1024:.2f} GiB, the largest tensor {largest / MIB:.0f} MiB, {cut} of "
        f"{len(eight.parameters)} parameters cut otherwise; at most {bound:.0f} MiB",
    )
    for what, row in rows.items():
        table.add_row(
            what, f"{row['seconds']:.2f}", f"{total / (1 << 30) / row['seconds']:.2f}", f"{row.get('peak MiB', 0):.0f}"
        )
    Console().print(table)
    print(f"every tensor as it was: {same}; {'ok' if ok else 'MISSED'}")
    figures = {
        "machine": machine(),
        "bytes": total,
        "largest": largest,
        "bound MiB": bound,
        "equal": same,
        "rows": rows,
        "ok": ok,
    }
    arguments.output.write_text(json.dumps(figures, indent=1))
    print(f"written to {arguments.output}")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())

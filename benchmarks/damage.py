"""Damage to files of checkpoints: none may go unnoticed.

    python benchmarks/damage.py                 1,000 damaged checkpoints
    python benchmarks/damage.py --count 100

A small model is trained and saved at two steps, in both formats, and another model besides. Each time one of these
checkpoints is copied and one of its files damaged: a bit flipped, bytes overwritten, cut short, lengthened, removed,
put in the place of another or taken from another step or model. Damage is noticed if `verify` names the file and if
`load_checkpoint` refuses, naming it too, and leaves model, optimizer and random state as they were.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import shardwright as sw
from shardwright.checkpoint.manifest import MANIFEST, verify

__all__ = ["KINDS", "Subjects", "damage"]

KINDS = ("bit", "bytes", "cut", "empty", "longer", "missing", "swapped", "other step", "other model")


def damage(folder: Path, kind: str, others: dict[str, Sequence[Path]], rng: random.Random) -> tuple[str, ...]:
    """Damage one file of a checkpoint, or two that are swapped.

    Args:
        kind: one of `KINDS`.
        others: "other step", "other model" -> checkpoints to take a file from.

    Returns:
        The files that are not what they were.
    """
    names = sorted(p.name for p in folder.iterdir())
    while True:
        file = folder / rng.choice(names)
        data = bytearray(file.read_bytes())
        if kind == "missing":
            file.unlink()
        elif kind == "cut":
            file.write_bytes(data[: rng.randrange(len(data))])
        elif kind == "empty":
            file.write_bytes(b"")
        elif kind == "longer":
            file.write_bytes(data + rng.randbytes(rng.randint(1, 100)))
        elif kind == "bit":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
        elif kind == "bytes":
            at, count = rng.randrange(len(data)), rng.randint(1, 64)
            new = data[:at] + rng.randbytes(min(count, len(data) - at)) + data[at + count :]
            if new == data:
                continue
            file.write_bytes(new)
        elif kind == "swapped":
            other = folder / rng.choice(names)
            theirs = other.read_bytes()
            if theirs == data:
                continue
            file.write_bytes(theirs), other.write_bytes(data)
            return file.name, other.name
        else:
            source = rng.choice(others[kind]) / file.name
            if not source.exists() or source.read_bytes() == data:
                continue
            shutil.copyfile(source, file)
        return (file.name,)


class Subjects:
    """Checkpoints to damage, and a model to load them into.

    Args:
        folder: to write them into.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sound: list[Path] = []
        self.others: dict[str, list[Path]] = {"other step": [], "other model": []}
        sw.init(devices=4)
        self.model, self.optimizer = self._made(8)
        for whole in (True, False):
            for width in (8, 12):
                model, optimizer = self._made(width)
                for step in (1, 2):
                    self._train(model, optimizer, width)
                    path = sw.save_checkpoint(
                        model, optimizer, folder / f"{whole}-{width}", step=step, integrated_save=whole
                    ).wait()
                    if width == 8 and step == 1:
                        self.sound.append(path)
                    else:
                        self.others["other step" if width == 8 else "other model"].append(path)
        self._train(self.model, self.optimizer, 8)
        self.before = self._state()

    @staticmethod
    def _made(width: int) -> tuple[sw.AutoParallel, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(width, 16), nn.Dropout(0.5), nn.Linear(16, 8))
        return sw.AutoParallel(net, nn.CrossEntropyLoss()), torch.optim.AdamW(net.parameters())

    @staticmethod
    def _train(model: sw.AutoParallel, optimizer: torch.optim.Optimizer, width: int) -> None:
        model(torch.randn(8, width), torch.randint(0, 8, (8,))).backward()
        optimizer.step(), optimizer.zero_grad()

    def _state(self) -> list[torch.Tensor]:
        held = [*self.model.state_dict().values(), *(t for s in self.optimizer.state.values() for t in s.values())]
        return [t.clone() for t in held] + [torch.get_rng_state()]

    def unnoticed(self, kind: str, rng: random.Random) -> str | None:
        """Damage a copy of a checkpoint; what is wrong with how that was taken, or None."""
        source = rng.choice(self.sound)
        copy = self.folder / "damaged" / source.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        names = damage(copy, kind, self.others, rng)
        what = f"{kind}: {', '.join(names)}"
        blamed = (*names, MANIFEST) if kind in ("swapped", "other step", "other model") and MANIFEST in names else names
        found = verify(copy)
        # Under the manifest of another save every file is another save's.
        if not found or (MANIFEST not in blamed and not any(p.startswith(f"{n}:") for n in blamed for p in found)):
            return f"{what}: verify says {found}"
        try:
            sw.load_checkpoint(self.model, self.optimizer, copy)
        except sw.CheckpointError as error:
            if MANIFEST not in blamed and not any(n in str(error) for n in blamed):
                return f"{what}: the error names another file: {error}"
        else:
            return f"{what}: it was loaded"
        if not all(torch.equal(a, b) for a, b in zip(self._state(), self.before, strict=True)):
            return f"{what}: something was changed"
        return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="damaged checkpoints (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--output", type=Path, default=Path("damage.json"), help="default: damage.json")
    args = parser.parse_args(argv)
    console, rng, done, wrong = Console(), random.Random(args.seed), Counter(), []
    with tempfile.TemporaryDirectory() as folder, console.status("damaging"):
        subjects = Subjects(Path(folder))
        for number in range(args.count):
            kind = KINDS[number % len(KINDS)]
            problem = subjects.unnoticed(kind, rng)
            done[kind] += 1
            if problem is not None:
                wrong.append(problem)
                console.print(problem)
    console.print(
        f"{args.count} damaged checkpoints, {len(wrong)} unnoticed: " + ", ".join(f"{n} {k}" for k, n in done.items())
    )
    args.output.write_text(json.dumps({"damaged": dict(done), "unnoticed": wrong}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

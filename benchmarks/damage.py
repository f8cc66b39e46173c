"""Damage to files of checkpoints: none may go unnoticed.

    python benchmarks/damage.py                 2,000 damaged checkpoints
    python benchmarks/damage.py --count 100

A model of some 30 MB with its state is trained and saved at two steps, in both formats, and another model besides.
Each time one of these checkpoints is copied and one of its files damaged, in one of 25 ways (`KINDS`): single bits,
words and runs; words, rows, sectors, pages and blocks of 4 MiB in the place of one another; pages and tails of another
step; files that are cut short, lengthened, removed, exchanged or taken from another step or model. Damage is noticed if
`verify` names the file and if `load_checkpoint` refuses, naming it too, and leaves model, optimizer and random state as
they were.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import shardwright as sw
from shardwright.checkpoint.manifest import MANIFEST, verify

__all__ = ["BYTES", "FILES", "KINDS", "Subjects", "damage"]

WORD, SECTOR, PAGE, BLOCK = 8, 512, 4 << 10, 4 << 20

#: A row of the digest of schema 1, which does not see rows in the place of one another.
ROW = 8 * 509


def flipped(data: bytes, rng: random.Random, bits: int) -> bytes:
    out = bytearray(data)
    for at in rng.sample(range(len(data)), min(bits, len(data))):
        out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


def overwritten(data: bytes, rng: random.Random, made: Callable[[int], bytes]) -> bytes:
    """Up to two pages of bytes that `made` gives."""
    at = rng.randrange(len(data))
    count = min(rng.choice((rng.randint(1, 64), rng.randint(1, 2 * PAGE))), len(data) - at)
    return data[:at] + made(count) + data[at + count :]


def exchanged(data: bytes, rng: random.Random, unit: int, apart: int = 0) -> bytes:
    """Two runs of `unit` bytes in the place of one another, on borders of the unit, or a multiple of `apart` apart."""
    if len(data) < 2 * unit:
        return data
    if apart:
        one = rng.randrange(len(data) - 2 * unit + 1)
        far = (len(data) - one - unit) // apart
        near = -(-unit // apart)
        if far < near:
            return data
        other = one + apart * rng.randint(near, far)
    else:
        one, other = (unit * i for i in sorted(rng.sample(range(len(data) // unit), 2)))
    ends = data[:one], data[one + unit : other], data[other + unit :]
    return ends[0] + data[other : other + unit] + ends[1] + data[one : one + unit] + ends[2]


def moved(data: bytes, rng: random.Random) -> bytes:
    """A page once more, a multiple of a row further on: the page that was there is lost."""
    if len(data) < PAGE + ROW:
        return data
    at = rng.randrange(len(data) - PAGE - ROW + 1)
    to = at + ROW * rng.randint(1, (len(data) - PAGE - at) // ROW)
    return data[:to] + data[at : at + PAGE] + data[to + PAGE :]


def repeated(data: bytes, rng: random.Random) -> bytes:
    """A page over the next one."""
    if len(data) < 2 * PAGE:
        return data
    at = PAGE * rng.randrange(len(data) // PAGE - 1)
    return data[: at + PAGE] + data[at : at + PAGE] + data[at + 2 * PAGE :]


def balanced(data: bytes, rng: random.Random) -> bytes:
    """One added to a word and taken from another, a multiple of a row apart: the sum stays."""
    if len(data) < ROW + WORD:
        return data
    at = rng.randrange(len(data) - ROW - WORD + 1)
    to = at + ROW * rng.randint(1, (len(data) - WORD - at) // ROW)
    out = bytearray(data)
    for place, step in ((at, 1), (to, -1)):
        word = int.from_bytes(out[place : place + WORD], "little") + step
        out[place : place + WORD] = (word % 2**64).to_bytes(WORD, "little")
    return bytes(out)


def turned(data: bytes, rng: random.Random, how: Callable[[bytes], bytes]) -> bytes:
    """A run of whole words, changed by `how`."""
    count = WORD * rng.randint(2, 2 * PAGE // WORD)
    at = WORD * rng.randrange(max(1, (len(data) - count) // WORD))
    return data[:at] + how(data[at : at + count]) + data[at + count :]


def byte_order(run: bytes) -> bytes:
    return b"".join(run[i : i + WORD][::-1] for i in range(0, len(run), WORD))


def shifted(data: bytes, rng: random.Random) -> bytes:
    """A byte too many, and the last one lost."""
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(1) + data[at:-1]


#: Kinds of damage inside a file: its bytes -> others.
BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bit": lambda data, rng: flipped(data, rng, 1),
    "two bits": lambda data, rng: flipped(data, rng, 2),
    "bytes": lambda data, rng: overwritten(data, rng, rng.randbytes),
    "filled": lambda data, rng: overwritten(data, rng, lambda count: rng.choice((b"\0", b"\xff")) * count),
    "balanced words": balanced,
    "words exchanged": lambda data, rng: exchanged(data, rng, WORD),
    "rows exchanged": lambda data, rng: exchanged(data, rng, ROW, ROW),
    "sectors exchanged": lambda data, rng: exchanged(data, rng, SECTOR),
    "pages exchanged": lambda data, rng: exchanged(data, rng, PAGE),
    "pages exchanged, rows apart": lambda data, rng: exchanged(data, rng, PAGE, ROW),
    "blocks exchanged": lambda data, rng: exchanged(data, rng, BLOCK),
    "page moved": moved,
    "page repeated": repeated,
    "words rotated": lambda data, rng: turned(data, rng, lambda run: run[WORD:] + run[:WORD]),
    "run reversed": lambda data, rng: turned(data, rng, lambda run: run[::-1]),
    "byte order": lambda data, rng: turned(data, rng, byte_order),
    "shifted": shifted,
    "cut": lambda data, rng: data[: rng.randrange(len(data))],
    "empty": lambda data, rng: b"",
    "longer": lambda data, rng: data + rng.randbytes(rng.randint(1, 100)),
}

#: Kinds that take something from elsewhere.
FILES = ("missing", "files exchanged", "torn", "other step", "other model")
KINDS = (*BYTES, *FILES)


def damage(folder: Path, kind: str, others: dict[str, Sequence[Path]], rng: random.Random) -> tuple[str, ...]:
    """Damage one file of a checkpoint, or two that are exchanged.

    Args:
        folder: the checkpoint; its files may be hard links, which are not written through.
        kind: one of `KINDS`.
        others: "other step", "other model" -> checkpoints to take a file from.

    Returns:
        The files that are not what they were.

    Raises:
        ValueError: no file has room for such damage.
    """
    names = sorted(p.name for p in folder.iterdir())
    for _ in range(1000):
        file = folder / rng.choice(names)
        data = file.read_bytes()
        if kind == "missing":
            file.unlink()
            return (file.name,)
        if kind == "files exchanged":
            other = folder / rng.choice(names)
            theirs = other.read_bytes()
            if theirs != data:
                _put(file, theirs), _put(other, data)
                return file.name, other.name
            continue
        if kind in BYTES:
            new = BYTES[kind](data, rng)
        else:
            source = rng.choice(others["other step" if kind == "torn" else kind]) / file.name
            if not source.exists():
                continue
            new = source.read_bytes()
            if kind == "torn":  # a write that a crash has cut: pages of the new content, then pages of the old one
                at = PAGE * rng.randint(0, len(data) // PAGE)
                new = data[:at] + new[at:] if rng.random() < 0.5 else new[:at] + data[at:]
        if new != data:
            _put(file, new)
            return (file.name,)
    raise ValueError(f"no file of {folder} has room for {kind}")


def _put(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


class Subjects:
    """Checkpoints to damage, and a model to load them into.

    Args:
        folder: to write them into.
        outputs: of the last layer, which has 16 weights for each.

    Attributes:
        kinds: the kinds of damage that the files have room for.
    """

    def __init__(self, folder: Path, outputs: int = 1000) -> None:
        self.folder, self.outputs = folder, outputs
        room = 4 * 16 * outputs >= 2 * BLOCK
        self.kinds = tuple(kind for kind in KINDS if room or kind != "blocks exchanged")
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

    def _made(self, width: int) -> tuple[sw.AutoParallel, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(width, 16), nn.Dropout(0.5), nn.Linear(16, self.outputs))
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
        shutil.copytree(source, copy, copy_function=os.link)
        names = damage(copy, kind, self.others, rng)
        what = f"{kind}: {', '.join(names)}"
        blamed = (*names, MANIFEST) if kind in FILES and MANIFEST in names else names
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
    parser.add_argument("--count", type=int, default=2000, help="damaged checkpoints (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--output", type=Path, default=Path("damage.json"), help="default: damage.json")
    args = parser.parse_args(argv)
    console, rng, done, wrong = Console(), random.Random(args.seed), Counter(), []
    with tempfile.TemporaryDirectory() as folder, console.status("damaging"):
        subjects = Subjects(Path(folder), 150_000)
        for number in range(args.count):
            kind = subjects.kinds[number % len(subjects.kinds)]
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

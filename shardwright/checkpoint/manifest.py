"""``manifest.json``: what a checkpoint holds, and how to tell that it still does.

    {"schema": 1, "kind": "integrated", "step": 100, "id": "5f…", "model": "9c…", "plan": null, "world": 4,
     "digest": {"name": "crc32 of column sums", "block": 4194304, "columns": 509},
     "files": {
       "model.safetensors": {"bytes": 6400, "digest": "0a1b2c3d"},
     "tensors": {
       "model.w1": {"shape": [8, 8], "dtype": "float32", "layout": {…}, "pieces": [["model.safetensors", 512, [0, 0], [8, 8]]]},
     "seal": "SHA-256 of all that stands above"}

A piece is a box of a tensor that lies in one file, its elements in row-major order: file, offset of the first byte, where
the box begins in each dim, its size in each. The pieces of a tensor fill it and do not overlap. The text is the only one for
what it says, so that not even a space can change unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .digests import ALGORITHM, blocks_of, digest, shares
from .words import dtype_of

__all__ = ["Entry", "File", "KINDS", "MANIFEST", "Manifest", "Piece", "SCHEMA", "check_files", "element_size",
           "model_fingerprint", "new_id", "read", "verify", "write"]

MANIFEST = "manifest.json"

#: The version of the form. It rises when a manifest of the old form can no longer be read as what it meant.
SCHEMA = 1

KINDS = ("integrated", "parts")


class Piece(NamedTuple):
    """A box of a tensor in a file.

    Attributes:
        offset: of its first byte in the file.
        starts, sizes: where it begins in each dim of the tensor, and how long it is there, in elements.
    """

    file: str
    offset: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor.

    Attributes:
        shape: of the whole.
        dtype: as torch calls it: "float32".
        layout: how it lay when it was saved: ``{"devices": 4, "first": 0, "layout": …}``, of `devices` ranks from rank
            `first` on, in the words of `plan.spelling`; with ``"own": true`` a `layerwise_parallel` parameter, whose dim 0
            is the ranks'. None: on one device.
        pieces: where its bytes are.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: dict[str, Any] | None
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * element_size(self.dtype)


class File(NamedTuple):
    """A file: how long it is, and its `digests.digest`."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        kind: "integrated": whole tensors in ``*.safetensors``; "parts": each rank's in ``__R_0.distcp``.
        step: of the run.
        id: of this save; every data file carries it.
        model: `model_fingerprint`.
        plan: the fingerprint of the plan, if there was one.
        world: by how many ranks it was saved.
        files: by name, all files of the folder but this one.
        tensors: by name: ``model.<name>``, ``loss_fn.<name>``, ``optimizer.<parameter>.<key of its state>``.
    """

    kind: str
    step: int
    id: str
    model: str
    plan: str | None
    world: int
    files: Mapping[str, File] = field(default_factory=dict)
    tensors: Mapping[str, Entry] = field(default_factory=dict)

    def text(self) -> str:
        """What `read` reads."""
        head = {"schema": SCHEMA, "kind": self.kind, "step": self.step, "id": self.id, "model": self.model, "plan": self.plan,
                "world": self.world, "digest": ALGORITHM}
        parts = [f" {_json(key)}: {_json(value)}" for key, value in head.items()]
        parts.append(_section("files", {n: {"bytes": f.bytes, "digest": f.digest} for n, f in self.files.items()}))
        parts.append(_section("tensors", {n: {"shape": e.shape, "dtype": e.dtype, "layout": e.layout, "pieces": e.pieces}
                                          for n, e in self.tensors.items()}))
        body = "{\n" + ",\n".join(parts)
        return f'{body},\n "seal": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def _json(x: Any) -> str:
    return json.dumps(x, ensure_ascii=False)


def _section(name: str, lines: Mapping[str, Any]) -> str:
    body = ",\n".join(f"  {_json(key)}: {_json(value)}" for key, value in lines.items())
    return f' "{name}": {{\n{body}\n }}' if body else f' "{name}": {{}}'


def new_id() -> str:
    """An id for a save, unlike all others."""
    return secrets.token_hex(16)


def element_size(word: str) -> int:
    """The bytes of an element."""
    return dtype_of(word).itemsize


def model_fingerprint(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """What tells one model's names, whole shapes and dtypes from another's.

    Args:
        tensors: (name, shape, dtype) of each, in any order.
    """
    said = sorted([name, list(shape), dtype] for name, shape, dtype in tensors)
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


# -- reading -----------------------------------------------------------------------------------------------------------


def read(folder: str | Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, or of a newer schema.
    """
    path = Path(folder) / MANIFEST
    try:
        text = path.read_bytes().decode()
        words = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"the checkpoint has no manifest that can be read: {error.strerror}", source=str(path),
                              legal="a folder that save_checkpoint wrote") from None
    except ValueError:
        raise _damaged(path, "it is cut short or altered") from None
    schema = words.get("schema") if isinstance(words, dict) else None
    if isinstance(schema, int) and not isinstance(schema, bool) and schema > SCHEMA:
        raise CheckpointError(f"a checkpoint of schema {schema}: a newer version of Shardwright wrote it", source=str(path),
                              legal=f"schema {SCHEMA}, or that version")
    try:
        if schema != SCHEMA or words["digest"] != ALGORITHM or words["kind"] not in KINDS:
            raise ValueError
        made = Manifest(words["kind"], words["step"], words["id"], words["model"], words["plan"], words["world"],
                        {name: File(f["bytes"], f["digest"]) for name, f in words["files"].items()},
                        {name: Entry(tuple(e["shape"]), e["dtype"], e["layout"],
                                     tuple(Piece(p[0], p[1], tuple(p[2]), tuple(p[3])) for p in e["pieces"]))
                         for name, e in words["tensors"].items()})
        if made.text() != text:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise _damaged(path, "it is not what was written") from None
    return made


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the manifest is damaged: {what}", source=str(path), legal="an earlier checkpoint of the run")


def write(folder: str | Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, the last of its files.

    Raises:
        OSError: it cannot be written.
    """
    from .folders import write_file  # which reads manifests to tell what a folder is
    write_file(Path(folder) / MANIFEST, manifest.text().encode())


# -- looking for damage ------------------------------------------------------------------------------------------------


def check_files(folder: str | Path, manifest: Manifest, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, each with the name of the file: missing, cut short, of another save,
    altered.

    Args:
        part, parts: of what each byte has to be read for, only this one of so many shares is looked at.
    """
    from .marking import mark_of  # which says how a file carries the id of its save
    folder, problems, sound = Path(folder), [], {}
    for name, file in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            problems.append(f"{name}: {'it is missing' if isinstance(error, FileNotFoundError) else error.strerror}")
            continue
        try:
            mark = mark_of(folder / name)
        except (OSError, ValueError):
            mark = None
        if mark is not None and mark != manifest.id:
            problems.append(f"{name}: it belongs to another save, {mark}, and not to this one, {manifest.id}")
        elif size != file.bytes:
            problems.append(f"{name}: it has {size:,} bytes instead of {file.bytes:,}")
        elif len(file.digest) != 8 * blocks_of(size):
            problems.append(f"{name}: the manifest has no digest of it")
        else:
            sound[name] = size
    for name, first, last in shares(sound, part, parts):
        want = manifest.files[name].digest[8 * first:8 * last]
        try:
            got = digest(folder / name, first, last)
        except OSError as error:
            problems.append(f"{name}: it cannot be read: {error.strerror}")
            continue
        if got != want:
            wrong = next((i for i in range(last - first) if got[8 * i:8 * i + 8] != want[8 * i:8 * i + 8]), last - first)
            at = (first + wrong) * ALGORITHM["block"]
            problems.append(f"{name}: it was altered within bytes {at:,} to "
                            f"{min(at + ALGORITHM['block'], sound[name]) - 1:,}")
    return problems


def verify(folder: str | Path) -> list[str]:
    """What is wrong with a checkpoint, each with the name of the file; every byte is looked at. Nothing: it is sound."""
    try:
        manifest = read(folder)
    except CheckpointError as error:
        return [f"{MANIFEST}: {error.message}"]
    return check_files(folder, manifest)

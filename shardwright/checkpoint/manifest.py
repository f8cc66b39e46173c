"""``manifest.json``: the content of a checkpoint, and the digests that show damage.

1. The manifest (`Manifest`, `read`, `write`).

       {"schema": 2, "kind": "integrated", "step": 100, "id": "5f…", "model": "9c…", "plan": null, "world": 4,
        "digest": {"name": "xxh3_64", "block": 4194304},
        "files": {
          "model.safetensors": {"bytes": 6400, "digest": "0a1b2c3d4e5f6071"},
        "tensors": {
          "model.w1": {"shape": [8, 8], "dtype": "float32", "layout": {…}, "pieces": [["model.safetensors", 512,
          [0, 0], [8, 8]]]},
        "seal": "SHA-256 of all that stands above"}

   A piece is a box of a tensor that lies in one file, its elements in row-major order: file, offset of the first
   byte, start of the box in each dim, size in each dim. The pieces of a tensor fill it and do not overlap. A manifest
   has exactly one valid text, so that not even a space can change unnoticed.

2. Damage (`check_files`, `verify`), found by the `digests` of the files.

3. The save's id in each data file (`trailer`, `mark_of`): a file of another save is recognised at once.

       *.safetensors      the entry ``shardwright_id`` of its header's metadata
       *.distcp           its last 64 bytes, outside of any tensor: "shardwright ", the id, the rank that wrote it
       *.json             the member "id", the first of the object
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..json_values import dtype_named
from .digests import ALGORITHMS, BLOCK, Algorithm, blocks_of, digest, shares

__all__ = [
    "ID_KEY",
    "KINDS",
    "MANIFEST",
    "SCHEMA",
    "TRAILER",
    "CheckpointFile",
    "Manifest",
    "Piece",
    "TensorEntry",
    "check_files",
    "element_size",
    "mark_of",
    "model_fingerprint",
    "new_id",
    "read",
    "sync_folder",
    "trailer",
    "verify",
    "write",
    "write_file",
]


MANIFEST = "manifest.json"

#: The version of the format that is written. Older ones are read: each has its digest in `digests.ALGORITHMS`.
SCHEMA = 2

KINDS = ("integrated", "parts")


class Piece(NamedTuple):
    """A box of a tensor in a file.

    Attributes:
        file: the file's name.
        offset: the offset of its first byte in the file.
        starts, sizes: its start and its length in each dim of the tensor, in elements.
    """

    file: str
    offset: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A stored tensor.

    Attributes:
        shape: the shape of the whole tensor.
        dtype: the dtype's name in torch: "float32".
        layout: the layout at the save, ``{"devices": 4, "first": 0, "layout": …}``: over `devices` ranks from rank
            `first` on, spelt as in `planfile.encoding.spell_layout`; with ``"own": true`` for a `layerwise_parallel`
            parameter, whose dim 0 counts the ranks. None: unknown, or on one device.
        pieces: the locations of its bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: dict[str, Any] | None
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * element_size(self.dtype)


class CheckpointFile(NamedTuple):
    """A file: its size in bytes, and its `digest`."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        kind: "integrated": whole tensors in ``*.safetensors``; "parts": each rank's in ``__R_0.distcp``.
        step: the step of the run.
        id: the id of this save; every data file carries it.
        model: the model's `model_fingerprint`.
        plan: the fingerprint of the plan, if there was one.
        world: the number of ranks that saved it.
        files: all files of the folder but this one, by name.
        tensors: by name: ``model.<name>``, ``loss_fn.<name>``, ``optimizer.<parameter>.<key of its state>``.
        schema: the version of its format.
    """

    kind: str
    step: int
    id: str
    model: str
    plan: str | None
    world: int
    files: Mapping[str, CheckpointFile] = field(default_factory=dict)
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the files' digests."""
        return ALGORITHMS[self.schema]

    def text(self) -> str:
        """The text of ``manifest.json``, as `read` takes it."""
        head = {
            "schema": self.schema,
            "kind": self.kind,
            "step": self.step,
            "id": self.id,
            "model": self.model,
            "plan": self.plan,
            "world": self.world,
            "digest": self.algorithm.words,
        }
        parts = [f" {_json(key)}: {_json(value)}" for key, value in head.items()]
        parts.append(_section("files", {n: {"bytes": f.bytes, "digest": f.digest} for n, f in self.files.items()}))
        parts.append(
            _section(
                "tensors",
                {
                    n: {"shape": e.shape, "dtype": e.dtype, "layout": e.layout, "pieces": e.pieces}
                    for n, e in self.tensors.items()
                },
            )
        )
        body = "{\n" + ",\n".join(parts)
        return f'{body},\n "seal": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def _json(x: Any) -> str:
    return json.dumps(x, ensure_ascii=False)


def _section(name: str, lines: Mapping[str, Any]) -> str:
    body = ",\n".join(f"  {_json(key)}: {_json(value)}" for key, value in lines.items())
    return f' "{name}": {{\n{body}\n }}' if body else f' "{name}": {{}}'


def new_id() -> str:
    """A new, unique id for a save."""
    return secrets.token_hex(16)


def element_size(word: str) -> int:
    """The bytes of an element of a dtype, such as 4 for "float32"."""
    return dtype_named(word).itemsize


def model_fingerprint(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """A hash of a model's names, whole shapes and dtypes.

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
        raise CheckpointError(
            f"the checkpoint has no manifest that can be read: {error.strerror}",
            source=str(path),
            legal="a folder that save_checkpoint wrote",
        ) from None
    except ValueError:
        raise _damaged(path, "it is cut short or altered") from None
    schema = words.get("schema") if isinstance(words, dict) else None
    if isinstance(schema, int) and not isinstance(schema, bool) and schema > SCHEMA:
        raise CheckpointError(
            f"a checkpoint of schema {schema}: a newer version of Shardwright wrote it",
            source=str(path),
            legal=f"schema {' or '.join(map(str, ALGORITHMS))}, or that version",
        )
    try:
        if type(schema) is not int or words["digest"] != ALGORITHMS[schema].words or words["kind"] not in KINDS:
            raise ValueError
        made = Manifest(
            words["kind"],
            words["step"],
            words["id"],
            words["model"],
            words["plan"],
            words["world"],
            {name: CheckpointFile(f["bytes"], f["digest"]) for name, f in words["files"].items()},
            {
                name: TensorEntry(
                    tuple(e["shape"]),
                    e["dtype"],
                    e["layout"],
                    tuple(Piece(p[0], p[1], tuple(p[2]), tuple(p[3])) for p in e["pieces"]),
                )
                for name, e in words["tensors"].items()
            },
            schema,
        )
        if made.text() != text:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise _damaged(path, "it is not what was written") from None
    return made


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the manifest is damaged: {what}", source=str(path), legal="an earlier checkpoint of the run"
    )


def write(folder: str | Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, the last of its files.

    Raises:
        OSError: it cannot be written.
    """
    write_file(Path(folder) / MANIFEST, manifest.text().encode())


# -- looking for damage ------------------------------------------------------------------------------------------------


def check_files(folder: str | Path, manifest: Manifest, part: int = 0, parts: int = 1) -> list[str]:
    """The problems of a checkpoint's files, each with the file's name: missing, cut short, of another save, altered.

    Args:
        folder: the folder of the checkpoint.
        manifest: its manifest.
        part, parts: of the bytes to be read for the digests, check share `part` of `parts` only.
    """
    folder, problems, sound, digits = Path(folder), [], {}, manifest.algorithm.digits
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
        elif len(file.digest) != digits * blocks_of(size):
            problems.append(f"{name}: the manifest has no digest of it")
        else:
            sound[name] = size
    for name, first, last in shares(sound, part, parts):
        want = manifest.files[name].digest[digits * first : digits * last]
        try:
            got = digest(folder / name, first, last, manifest.algorithm)
        except OSError as error:
            problems.append(f"{name}: it cannot be read: {error.strerror}")
            continue
        if got != want:
            wrong = next(i for i in range(last - first) if got[digits * i :][:digits] != want[digits * i :][:digits])
            at = (first + wrong) * BLOCK
            problems.append(f"{name}: it was altered within bytes {at:,} to {min(at + BLOCK, sound[name]) - 1:,}")
    return problems


def verify(folder: str | Path) -> list[str]:
    """The problems of a checkpoint, each with the file's name; empty where it is sound. Every byte is read."""
    try:
        manifest = read(folder)
    except CheckpointError as error:
        return [f"{MANIFEST}: {error.message}"]
    return check_files(folder, manifest)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_file(path: Path, content: bytes) -> None:
    """Write a file and sync it to the disk.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            os.fsync(handle)
    finally:
        os.close(handle)


# -- the save's id in each data file -----------------------------------------------------------------------------------

ID_KEY = "shardwright_id"

#: Length of the trailer of a rank's part, in bytes.
TRAILER = 64

#: The longest header that the safetensors format allows, in bytes.
_LONGEST = 100 << 20


def trailer(save_id: str, rank: int) -> bytes:
    """The last `TRAILER` bytes of a rank's part."""
    return f"shardwright {save_id} {rank}".encode().ljust(TRAILER - 1) + b"\n"


def mark_of(path: Path) -> str | None:
    """The id that a file carries, or None.

    Raises:
        OSError, ValueError: the file cannot be read or parsed.
    """
    with open(path, "rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _LONGEST else {}
            return header.get("__metadata__", {}).get(ID_KEY) if isinstance(header, dict) else None
        if path.suffix == ".distcp":
            file.seek(max(0, os.fstat(file.fileno()).st_size - TRAILER))
            found = re.match(rb"shardwright ([0-9a-f]+) ", file.read())
        elif path.suffix == ".json":
            found = re.match(rb'\{\s*"id": "([0-9a-f]+)"', file.read(64))
        else:
            return None
        return found[1].decode() if found else None

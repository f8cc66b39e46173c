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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..cluster import MOST_DEVICES
from ..errors import CheckpointError, shown
from ..json_files.json_reader import MIB, JsonObject, kind_of, read_object, step
from ..json_files.json_values import dtype_named, is_shape
from ..launch.progress import Work
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
    "check_all",
    "check_files",
    "element_size",
    "is_plain_name",
    "mark_of",
    "model_fingerprint",
    "new_id",
    "parsed",
    "read",
    "sync_folder",
    "trailer",
    "untiled",
    "verify",
    "write",
    "write_file",
]


MANIFEST = "manifest.json"

#: The version of the format that is written. Older ones are read: each has its digest in `digests.ALGORITHMS`.
SCHEMA = 2

KINDS = ("integrated", "parts")

#: Bytes of a share of `check_all`, of which there are at most 64.
_SHARE = 256 << 20


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
    layout: dict[str, object] | None
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
        places: where the ranks' folders are not one, each folder (``host:path``) with the files that it alone has.
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
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the files' digests."""
        return ALGORITHMS[self.schema]

    def written_to(self, name: str) -> str:
        """The folder that a file was written to, as the end of a message; empty where all files were in one folder."""
        place = next((place for place, names in self.places.items() if name in names), None)
        return "" if place is None else f": it was written to {place} (copy the folders of all hosts together)"

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
            "digest": self.algorithm.encoded,
        }
        if self.places:
            head["places"] = {place: list(names) for place, names in self.places.items()}
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


def _json(x: object) -> str:
    return json.dumps(x, ensure_ascii=False)


def _section(name: str, lines: Mapping[str, object]) -> str:
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
    rows = sorted([name, list(shape), dtype] for name, shape, dtype in tensors)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


# -- reading -----------------------------------------------------------------------------------------------------------

_LEGAL = "a checkpoint that is whole, such as an earlier one of the run"

#: Bytes of a manifest, at most: that of 1,000 ranks with 3,000 tensors in parts has 200 MB.
_LARGEST = 1024 * MIB

_HEX = re.compile(r"[0-9a-f]*")


def read(folder: str | Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none; it is damaged, or of a newer schema; a file's name leads out of the folder; the
            pieces of a tensor do not fill it, overlap, or lie outside of their files.
    """
    path = Path(folder) / MANIFEST
    return parsed(*read_object(path, CheckpointError, "the checkpoint's manifest", _LEGAL, _LARGEST), str(path))


def parsed(text: str, encoded: dict[str, object], source: str) -> Manifest:
    """The manifest of a text, and of the object in it.

    Raises:
        CheckpointError: see `read`; `source` names the file.
    """
    schema = encoded.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise CheckpointError(
            f"a checkpoint of schema {schema}: a newer version of Shardwright wrote it",
            source=source,
            legal=f"schema {' or '.join(map(str, ALGORITHMS))}, or that version",
        )
    body, _, seal = text.rpartition(',\n "seal": "')
    if seal != f'{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n':
        raise _damaged(source, "it is not what was written")
    return _Reading(source).manifest(encoded)


def _damaged(source: str, what: str) -> CheckpointError:
    return CheckpointError(f"the manifest is damaged: {what}", source=source, legal=_LEGAL)


def is_plain_name(name: object) -> bool:
    """True for the name of a file in a folder, which leads to no other folder."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode()) <= 255
        and name not in (".", "..", MANIFEST)
        and "/" not in name
        and name.isprintable()
    )


class _Reading:
    """One pass over the object of a manifest; every fault is raised with its place.

    Args:
        source: the file, as errors name it.
    """

    def __init__(self, source: str) -> None:
        self._source = source

    def _fault(self, place: Sequence[str | int], what: str) -> NoReturn:
        raise _damaged(self._source, f"{''.join(map(step, place)).removeprefix('.')}: {what}")

    def _whole(self, place: Sequence[str | int], value: object, low: int = 0, high: int = (1 << 63) - 1) -> int:
        if type(value) is not int or not low <= value <= high:
            self._fault(place, f"{shown(value)} is no whole number from {low} to {high:,}")
        return value

    def _hex(self, place: Sequence[str | int], value: object, digits: int | None = None) -> str:
        if not isinstance(value, str) or not _HEX.fullmatch(value) or (digits is not None and len(value) != digits):
            count = "a number of" if digits is None else digits
            self._fault(place, f"{shown(value)} is not {count} hexadecimal digits")
        return value

    def _fields(self, place: Sequence[str | int], value: object, names: Iterable[str]) -> dict[str, object]:
        if not isinstance(value, dict) or set(value) != set(names):
            self._fault(place, f"{shown(value)} is no object with {', '.join(names)}")
        return value

    def manifest(self, encoded: JsonObject) -> Manifest:
        optional = [name for name in ("places",) if name in encoded]
        names = ["schema", "kind", "step", "id", "model", "plan", "world", "digest", "files", "tensors", "seal"]
        self._fields((), encoded, names + optional)
        schema = self._whole(["schema"], encoded["schema"], 1, SCHEMA)
        if encoded["digest"] != ALGORITHMS[schema].encoded:
            self._fault(["digest"], f"{shown(encoded['digest'])} is not that of schema {schema}")
        if encoded["kind"] not in KINDS:
            self._fault(["kind"], f"{shown(encoded['kind'])} is none of {', '.join(KINDS)}")
        for section in ("files", "tensors"):
            if not isinstance(encoded[section], dict):
                self._fault([section], f"it is {kind_of(encoded[section])}, and no object")
        files = {name: self._file(schema, name, entry) for name, entry in encoded["files"].items()}
        return Manifest(
            encoded["kind"],
            self._whole(["step"], encoded["step"]),
            self._hex(["id"], encoded["id"], 32),
            self._hex(["model"], encoded["model"]),
            None if encoded["plan"] is None else self._hex(["plan"], encoded["plan"]),
            self._whole(["world"], encoded["world"], 1, MOST_DEVICES),
            files,
            {name: self._tensor(files, name, entry) for name, entry in encoded["tensors"].items()},
            schema,
            self._places(files, encoded.get("places", {})),
        )

    def _file(self, schema: int, name: str, entry: Any) -> CheckpointFile:
        place = ["files", name]
        if not is_plain_name(name):
            self._fault(place, "it is no name of a file in the checkpoint's folder")
        self._fields(place, entry, ["bytes", "digest"])
        size = self._whole([*place, "bytes"], entry["bytes"])
        return CheckpointFile(
            size, self._hex([*place, "digest"], entry["digest"], ALGORITHMS[schema].digits * blocks_of(size))
        )

    def _places(self, files: Mapping[str, CheckpointFile], entry: object) -> dict[str, tuple[str, ...]]:
        if not isinstance(entry, dict):
            self._fault(["places"], f"it is {kind_of(entry)}, and no object")
        for place, names in entry.items():
            if (
                not place.isprintable()
                or not isinstance(names, list)
                or not all(isinstance(name, str) and name in files for name in names)
            ):
                self._fault(["places", place], f"{shown(names)} is no list of files of the checkpoint")
        return {place: tuple(names) for place, names in entry.items()}

    def _tensor(self, files: Mapping[str, CheckpointFile], name: str, entry: Any) -> TensorEntry:
        place = ["tensors", name]
        if not name.isprintable():
            self._fault(place, "its name moves the cursor")
        self._fields(place, entry, ["shape", "dtype", "layout", "pieces"])
        shape, layout = entry["shape"], entry["layout"]
        if not is_shape(shape):
            self._fault([*place, "shape"], f"{shown(shape)} is no shape")
        try:
            size = element_size(entry["dtype"])
        except ValueError as error:
            self._fault([*place, "dtype"], str(error))
        if layout is not None:
            self._layout([*place, "layout"], layout)
        if not isinstance(entry["pieces"], list):
            self._fault([*place, "pieces"], f"it is {kind_of(entry['pieces'])}, and no list")
        pieces = tuple(
            self._piece([*place, "pieces", number], files, len(shape), size, piece)
            for number, piece in enumerate(entry["pieces"])
        )
        wrong = untiled(tuple(shape), tuple((piece.starts, piece.sizes) for piece in pieces))
        if wrong is not None:
            self._fault([*place, "pieces"], wrong)
        return TensorEntry(tuple(shape), entry["dtype"], layout, pieces)

    def _layout(self, place: Sequence[str | int], entry: Any) -> None:
        per_rank = isinstance(entry, dict) and "own" in entry
        self._fields(place, entry, ["devices", "first", "layout", *["own"] * per_rank])
        self._whole([*place, "devices"], entry["devices"], 1, MOST_DEVICES)
        self._whole([*place, "first"], entry["first"], 0, MOST_DEVICES)
        if not isinstance(entry["layout"], (list, dict)) or (per_rank and entry["own"] is not True):
            self._fault(place, f"{shown(entry)} is no layout")

    def _piece(
        self, place: Sequence[str | int], files: Mapping[str, CheckpointFile], dims: int, size: int, entry: object
    ) -> Piece:
        if not isinstance(entry, list) or len(entry) != 4:
            self._fault(place, f"{shown(entry)} is no [file, offset, starts, sizes]")
        file, offset, starts, sizes = entry
        if not isinstance(file, str) or file not in files:
            self._fault(place, f"{shown(file)} is no file of the checkpoint")
        for numbers in (starts, sizes):
            if not is_shape(numbers) or len(numbers) != dims:
                self._fault(place, f"{shown(numbers)} is no whole number from 0 for each of {dims} dims")
        end = self._whole([*place, 1], offset) + math.prod(sizes) * size
        if end > files[file].bytes:
            self._fault(place, f"it ends at byte {end:,} of {file}, which has {files[file].bytes:,}")
        return Piece(file, offset, tuple(starts), tuple(sizes))


@lru_cache(maxsize=4096)
def untiled(shape: tuple[int, ...], boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> str | None:
    """The fault of boxes that do not fill a tensor exactly once; None where they do.

    Boxes within the tensor, with as many elements together, fill it exactly if no two overlap. Sorted by their start
    in one dim, a box can overlap only those before it that have not ended there. Cached: parameters and the state of
    an optimizer are stored in few different ways.

    Args:
        shape: the shape of the tensor.
        boxes: start and size in each dim of every box.
    """
    for starts, sizes in boxes:
        if any(a + n > dim for a, n, dim in zip(starts, sizes, shape)):
            return f"the piece at {list(starts)} of {list(sizes)} is not within {list(shape)}"
    count = sum(math.prod(sizes) for _, sizes in boxes)
    if count != math.prod(shape):
        return f"they have {count:,} elements, the tensor has {math.prod(shape):,}"
    if len(boxes) < 2 or not count:
        return None
    dim = max(range(len(shape)), key=lambda d: len({starts[d] for starts, _ in boxes}))
    open_ones: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for starts, sizes in sorted((box for box in boxes if math.prod(box[1])), key=lambda box: box[0][dim]):
        open_ones = [one for one in open_ones if one[0][dim] + one[1][dim] > starts[dim]]
        for other, lengths in open_ones:
            if all(a < b + m and b < a + n for a, n, b, m in zip(starts, sizes, other, lengths)):
                return f"the pieces at {list(other)} of {list(lengths)} and at {list(starts)} of {list(sizes)} overlap"
        open_ones.append((starts, sizes))
    return None


def write(folder: str | Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, the last of its files.

    Raises:
        OSError: it cannot be written.
    """
    write_file(Path(folder) / MANIFEST, manifest.text().encode())


# -- looking for damage ------------------------------------------------------------------------------------------------


def check_files(
    folder: str | Path, manifest: Manifest, part: int = 0, parts: int = 1, paths: Mapping[str, Path] | None = None
) -> list[str]:
    """The problems of a checkpoint's files, each with the file's name: missing, cut short, of another save, altered.

    Args:
        folder: the folder of the checkpoint.
        manifest: its manifest.
        part, parts: of the bytes to be read for the digests, check share `part` of `parts` only.
        paths: the files to check, where they are not all in the folder; None: all.
    """
    problems, sound, digits = [], {}, manifest.algorithm.digits
    paths = {name: Path(folder) / name for name in manifest.files} if paths is None else paths
    for name, file in manifest.files.items():
        if name not in paths:
            continue
        try:
            size = paths[name].stat().st_size
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            problems.append(f"{name}: {f'it is missing{manifest.written_to(name)}' if missing else error.strerror}")
            continue
        try:
            mark = mark_of(paths[name])
        except OSError:
            mark = None
        if mark is not None and mark != manifest.id:
            problems.append(f"{name}: it belongs to another save, {mark}, and not to this one, {manifest.id}")
        elif size != file.bytes:
            problems.append(f"{name}: it has {size:,} bytes instead of {file.bytes:,}")
        else:
            sound[name] = size
    for name, first, last in shares(sound, part, parts):
        want = manifest.files[name].digest[digits * first : digits * last]
        try:
            got = digest(paths[name], first, last, manifest.algorithm)
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
    return check_all(folder, manifest)


def check_all(folder: str | Path, manifest: Manifest, tell: Callable[[int, int], None] | None = None) -> list[str]:
    """`check_files`, in shares of a few hundred megabytes.

    Args:
        tell: called with the bytes done and all bytes; None: the check is a phase of its own.
    """
    total, problems = sum(file.bytes for file in manifest.files.values()), list[str]()
    shares = min(-(-total // _SHARE), 64) or 1
    with Work("check for damage", total, "bytes") as work:
        for share in range(shares):
            work.done = total * share // shares
            if tell is not None:
                tell(work.done, total)
            problems += [p for p in check_files(folder, manifest, share, shares) if p not in problems]
    if tell is not None:
        tell(total, total)
    return problems


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

_MARK = re.compile(rf'"{ID_KEY}"\s*:\s*"([0-9a-f]+)"'.encode())


def trailer(save_id: str, rank: int) -> bytes:
    """The last `TRAILER` bytes of a rank's part."""
    return f"shardwright {save_id} {rank}".encode().ljust(TRAILER - 1) + b"\n"


def mark_of(path: Path) -> str | None:
    """The id that a file carries, or None.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            found = _MARK.search(file.read(length)) if length <= _LONGEST else None
        elif path.suffix == ".distcp":
            file.seek(max(0, os.fstat(file.fileno()).st_size - TRAILER))
            found = re.match(rb"shardwright ([0-9a-f]+) ", file.read())
        elif path.suffix == ".json":
            found = re.match(rb'\{\s*"id": "([0-9a-f]+)"', file.read(64))
        else:
            return None
        return found[1].decode() if found else None

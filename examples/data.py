"""Handwritten digits for the examples, in the same order on every process.

MNIST, read from its idx files, if the environment variable DATA_PATH names a folder that holds them; otherwise the
1,797 real digits of 8 by 8 pixels that scikit-learn ships, scaled up to 28 by 28.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

__all__ = ["digits", "read_idx"]

SIDE = 28
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels, scaled to 0..1
FOLDERS = (".", "train", "test", "MNIST/raw")


def digits(
    batch_size: int,
    *,
    shuffle_seed: int | None = 0,
    dtype: torch.dtype = torch.float32,
    path: str | os.PathLike[str] | None = None,
    train: bool = True,
    limit: int | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of an image [batch_size, 1, 28, 28] and a label [batch_size] (int64); an incomplete last one is dropped.

    Args:
        shuffle_seed: the order of the images, a function of this seed alone; None keeps the order of the files.
        path: the folder of the idx files; default: that of DATA_PATH.
        train: the training images, or the test images (which scikit-learn's digits do not have).
        limit: the most batches to give.
    """
    images, labels, peak = load(path, train)
    if not 1 <= batch_size <= len(images):
        raise ValueError(f"batch_size is {batch_size}: there are {len(images)} images, so it may be 1 to {len(images)}")
    if limit is not None and limit < 0:
        raise ValueError(f"limit is {limit}: a number of batches is 0 or more")
    return batches(images, labels, peak, batch_size, shuffle_seed, dtype, limit)


def batches(
    images: torch.Tensor,
    labels: torch.Tensor,
    peak: int,
    batch_size: int,
    shuffle_seed: int | None,
    dtype: torch.dtype,
    limit: int | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    order = torch.arange(len(images), device="cpu")
    if shuffle_seed is not None:  # a generator of its own: the seed of the user's program is left alone
        generator = torch.Generator("cpu").manual_seed(shuffle_seed)
        order = torch.randperm(len(images), generator=generator, device="cpu")
    count = len(images) // batch_size
    for i in range(count if limit is None else min(limit, count)):
        chosen = order[i * batch_size : (i + 1) * batch_size]
        image = images[chosen].unsqueeze(1).to(dtype) / peak
        if image.shape[2:] != (SIDE, SIDE):
            image = F.interpolate(image, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        yield (image - MEAN) / DEVIATION, labels[chosen]


def load(path: str | os.PathLike[str] | None, train: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """All images [N, h, w] (uint8), all labels [N] (int64), and the value of a full pixel."""
    folder = path if path is not None else os.environ.get("DATA_PATH")
    if folder:
        files = find_idx(Path(folder), "train" if train else "t10k")
        if files:
            return *load_idx(*files), 255
        problem = (
            f"{folder} holds no {'train' if train else 't10k'}-images-idx3-ubyte or .gz (nor do its subfolders "
            f"{', '.join(FOLDERS[1:])})"
        )
        if path is not None:
            raise FileNotFoundError(problem)
        warnings.warn(f"DATA_PATH: {problem}; taking scikit-learn's digits", stacklevel=3)
    return *load_bundled(train), 16


def load_bundled(train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The digits that lie in scikit-learn's package, as a table of 64 pixels (0 to 16) and the label a row; read from
    there, for importing the package takes longer than a short run."""
    package = importlib.util.find_spec("sklearn")
    table = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz") if package else None
    if table is None or not table.is_file():
        raise ModuleNotFoundError(
            "no digits to train on: install scikit-learn (pip install scikit-learn), or set "
            "DATA_PATH to a folder that holds the MNIST idx files"
        )
    if not train:
        raise ValueError(
            "scikit-learn's digits have no test part: set DATA_PATH to a folder that holds "
            "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"
        )
    rows = np.loadtxt(gzip.decompress(table.read_bytes()).decode().splitlines(), delimiter=",", dtype=np.uint8)
    return torch.from_numpy(rows[:, :64].reshape(-1, 8, 8)), torch.from_numpy(rows[:, 64].astype(np.int64))


def find_idx(folder: Path, part: str) -> tuple[Path, Path] | None:
    """The image and the label file of a part; None without images."""

    def find(name: str) -> Path | None:
        places = (folder / sub / (name + ending) for sub in FOLDERS for ending in ("", ".gz"))
        return next((place for place in places if place.is_file()), None)

    images, labels = find(f"{part}-images-idx3-ubyte"), find(f"{part}-labels-idx1-ubyte")
    if images is None:
        return None
    if labels is None:
        raise FileNotFoundError(f"{images} has no labels beside it: {part}-labels-idx1-ubyte or .gz is missing")
    return images, labels


def load_idx(image_file: Path, label_file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(images) != len(labels):
        raise ValueError(f"{image_file} holds {len(images)} images, {label_file} holds {len(labels)} labels")
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


def read_idx(path: str | os.PathLike[str], dims: int) -> np.ndarray:
    """An idx file of unsigned bytes, plain or ending in ``.gz``, as an array of `dims` dims.

    The file is a magic number (0, 0, 8 for unsigned bytes, the number of dims), the size of each dim as a big-endian
    32-bit number, then the elements, last dim fastest.
    """
    path = Path(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: cut off or damaged gzip file ({error})") from error
    magic, header = bytes((0, 0, 8, dims)), 4 + 4 * dims
    if len(data) >= 4 and data[:4] != magic:
        raise ValueError(
            f"{path}: the magic number is 0x{data[:4].hex()}, not 0x{magic.hex()} "
            f"(unsigned bytes in {dims} dim{'s' if dims > 1 else ''})"
        )
    if len(data) < header:
        raise ValueError(f"{path}: cut off in the header: {len(data)} bytes of {header}")
    shape = struct.unpack(f">{dims}I", data[4:header])
    if len(data) - header != math.prod(shape):
        what = "cut off" if len(data) - header < math.prod(shape) else "too long"
        raise ValueError(
            f"{path}: {what}: the header says {' x '.join(map(str, shape))} = {math.prod(shape)} bytes, "
            f"the file holds {len(data) - header} after it"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape).copy()

"""Small colour images for the examples, in CIFAR-10's binary format, in the same order on every process.

CIFAR-10 itself, if the environment variable DATA_PATH names the folder ``cifar-10-batches-bin`` or the one that it lies
in; otherwise a small set in that very format, made of the two photographs that scikit-learn ships: pieces of 32 by 32
pixels, labelled by the fifth of the picture that they were cut from.

A file is one record after the other: a byte for the label, then 3 x 32 x 32 bytes, red, green, blue, row by row.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

__all__ = ["images", "read_cifar", "write_cifar"]

SIDE, CLASSES = 32, 10
RECORD = 1 + 3 * SIDE * SIDE
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training pixels, scaled to 0..1
FOLDER = "cifar-10-batches-bin"
TRAIN, TEST = tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)
PICTURES = ("china.jpg", "flower.jpg")
PIECES, TEST_PIECES = 1000, 200  # cut from the pictures


def images(
    batch_size: int,
    *,
    shuffle_seed: int | None = 0,
    dtype: torch.dtype = torch.float32,
    path: str | os.PathLike[str] | None = None,
    train: bool = True,
    limit: int | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of an image [batch_size, 3, 32, 32] and a label [batch_size] (int64); an incomplete last one is dropped.

    Args:
        shuffle_seed: the order of the images, a function of this seed alone; None keeps the order of the files.
        path: the folder of the files; default: that of DATA_PATH.
        train: the training images, or the test images.
        limit: the most batches to give.
    """
    pixels, labels = load(path, train)
    if not 1 <= batch_size <= len(pixels):
        raise ValueError(f"batch_size is {batch_size}: there are {len(pixels)} images, so it may be 1 to {len(pixels)}")
    if limit is not None and limit < 0:
        raise ValueError(f"limit is {limit}: a number of batches is 0 or more")
    return batches(pixels, labels, batch_size, shuffle_seed, dtype, limit)


def batches(
    pixels: torch.Tensor,
    labels: torch.Tensor,
    batch_size: int,
    shuffle_seed: int | None,
    dtype: torch.dtype,
    limit: int | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    order = torch.arange(len(pixels), device="cpu")
    if shuffle_seed is not None:  # a generator of its own: the seed of the user's program is left alone
        generator = torch.Generator("cpu").manual_seed(shuffle_seed)
        order = torch.randperm(len(pixels), generator=generator, device="cpu")
    mean, deviation = (torch.tensor(v, dtype=dtype).reshape(3, 1, 1) for v in (MEAN, DEVIATION))
    count = len(pixels) // batch_size
    for i in range(count if limit is None else min(limit, count)):
        chosen = order[i * batch_size : (i + 1) * batch_size]
        yield (pixels[chosen].to(dtype) / 255 - mean) / deviation, labels[chosen]


def load(path: str | os.PathLike[str] | None, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """All images [N, 3, 32, 32] (uint8) and all labels [N] (int64)."""
    names = TRAIN if train else TEST
    folder = path if path is not None else os.environ.get("DATA_PATH")
    if folder:
        for place in (Path(folder) / FOLDER, Path(folder)):
            if (place / names[0]).is_file():
                return joined(place, [name for name in names if (place / name).is_file()])
        problem = f"{folder} holds no {names[0]} (nor does its subfolder {FOLDER})"
        if path is not None:
            raise FileNotFoundError(problem)
        warnings.warn(f"DATA_PATH: {problem}; taking pieces of scikit-learn's photographs", stacklevel=3)
    with tempfile.TemporaryDirectory() as made:
        place = Path(made, FOLDER)
        write_pieces(place)
        return joined(place, names[:1])


def joined(folder: Path, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [read_cifar(folder / name) for name in names]
    pixels, labels = (np.concatenate(side) for side in zip(*parts))
    return torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64))


def read_cifar(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """A file's images [N, 3, 32, 32] and labels [N], both uint8."""
    data = Path(path).read_bytes()
    if len(data) % RECORD or not data:
        raise ValueError(f"{path}: cut off or no such file: {len(data)} bytes are not a number of records of {RECORD}")
    records = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
    labels = records[:, 0].copy()
    if labels.max() >= CLASSES:
        raise ValueError(f"{path}: record {labels.argmax()} has label {labels.max()}, not one of 0 to {CLASSES - 1}")
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE).copy(), labels


def write_cifar(path: str | os.PathLike[str], pixels: np.ndarray, labels: np.ndarray) -> None:
    """Write images [N, 3, 32, 32] and labels [N], both uint8, as such a file."""
    records = np.concatenate([labels.reshape(-1, 1), pixels.reshape(len(labels), -1)], axis=1, dtype=np.uint8)
    Path(path).write_bytes(records.tobytes())


def write_pieces(folder: Path) -> None:
    """A training and a test file of pieces of the two photographs: five upright strips of each are the ten labels."""
    folder.mkdir(parents=True)
    photographs = [picture(name) for name in PICTURES]
    random = np.random.default_rng(0)
    for name, count in ((TRAIN[0], PIECES), (TEST[0], TEST_PIECES)):
        labels = (np.arange(count) % CLASSES).astype(np.uint8)
        pixels = []
        for label in labels.tolist():
            photograph = photographs[label // 5]
            height, width = photograph.shape[0], photograph.shape[1] // 5
            top, left = random.integers(height - SIDE + 1), random.integers(width - SIDE + 1) + label % 5 * width
            pixels.append(photograph[top : top + SIDE, left : left + SIDE].transpose(2, 0, 1))
        write_cifar(folder / name, np.stack(pixels), labels)


def picture(name: str) -> np.ndarray:
    """A photograph [height, width, 3] that lies in scikit-learn's package; read from there, for importing the package
    takes longer than a short run."""
    package = importlib.util.find_spec("sklearn")
    file = Path(package.submodule_search_locations[0], "datasets", "images", name) if package else None
    if file is None or not file.is_file() or importlib.util.find_spec("PIL") is None:
        raise ModuleNotFoundError(
            "no images to train on: install scikit-learn and pillow (pip install scikit-learn "
            f"pillow), or set DATA_PATH to the folder {FOLDER}"
        )
    from PIL import Image

    return np.asarray(Image.open(file).convert("RGB"))

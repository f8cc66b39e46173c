"""examples/cifar.py: CIFAR-10's binary files, and the pieces of photographs that stand in for them."""

import cifar
import numpy as np
import pytest
import torch
from cifar import FOLDER, RECORD, images, read_cifar, write_cifar


@pytest.fixture(autouse=True)
def no_data_path(monkeypatch):
    monkeypatch.delenv("DATA_PATH", raising=False)


def numbered(count: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images whose every pixel is the image's number, red, and one more in green and in blue; labels its last digit."""
    number = np.arange(first, first + count, dtype=np.uint8)
    pixels = number[:, None, None, None] + np.arange(3, dtype=np.uint8)[:, None, None] + np.zeros((32, 32), np.uint8)
    return pixels, number % 10


def test_the_bytes_of_a_record(tmp_path):
    pixels = np.arange(3 * 32 * 32, dtype=np.int64).reshape(1, 3, 32, 32)
    write_cifar(tmp_path / "one", (pixels // 32 % 256).astype(np.uint8), np.array([7], np.uint8))
    data = (tmp_path / "one").read_bytes()
    assert len(data) == RECORD == 3073
    assert data[0] == 7 and data[1:33] == bytes(32) and data[33:65] == bytes([1] * 32)  # row after row
    assert data[1 + 1024] == 32 and data[1 + 2048] == 64  # red, green, blue


def test_what_is_written_is_read(tmp_path):
    pixels, labels = numbered(5)
    write_cifar(tmp_path / "some", pixels, labels)
    got = read_cifar(tmp_path / "some")
    assert (got[0] == pixels).all() and (got[1] == labels).all() and got[0].dtype == got[1].dtype == np.uint8


@pytest.mark.parametrize("data", [b"", bytes(3072), bytes(3073 + 1)])
def test_a_cut_off_file_is_an_error_that_names_it(tmp_path, data):
    (tmp_path / "data_batch_1.bin").write_bytes(data)
    with pytest.raises(ValueError, match=f"data_batch_1.bin: cut off or no such file: {len(data)} bytes"):
        read_cifar(tmp_path / "data_batch_1.bin")


def test_a_label_that_is_none_is_an_error(tmp_path):
    write_cifar(tmp_path / "some", *numbered(2))
    (tmp_path / "other").write_bytes((tmp_path / "some").read_bytes()[:3073] + bytes([10]) + bytes(3072))
    with pytest.raises(ValueError, match="record 1 has label 10"):
        read_cifar(tmp_path / "other")


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_files_of_a_folder_are_joined_in_order(tmp_path, monkeypatch, inside, by):
    place = tmp_path / FOLDER if inside else tmp_path
    place.mkdir(exist_ok=True)
    for i in range(2):
        write_cifar(place / f"data_batch_{i + 1}.bin", *numbered(4, 4 * i))
    write_cifar(place / "test_batch.bin", *numbered(3, 20))
    if by == "environment":
        monkeypatch.setenv("DATA_PATH", str(tmp_path))
    path = tmp_path if by == "argument" else None
    (image, label), (_, later) = images(3, shuffle_seed=None, path=path, dtype=torch.float64)
    assert label.tolist() == [0, 1, 2] and later.tolist() == [3, 4, 5] and label.dtype == torch.int64
    mean, deviation = (torch.tensor(v, dtype=torch.float64).reshape(3, 1, 1) for v in (cifar.MEAN, cifar.DEVIATION))
    torch.testing.assert_close((image * deviation + mean) * 255, torch.tensor(numbered(3)[0], dtype=torch.float64))
    ((_, label),) = images(3, shuffle_seed=None, path=path, train=False)
    assert label.tolist() == [0, 1, 2]


def test_a_folder_without_the_files(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="holds no data_batch_1.bin"):
        images(4, path=tmp_path)
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    with pytest.warns(UserWarning, match="photographs"):
        assert len(list(images(4, limit=2))) == 2


def test_pieces_of_photographs():
    """Ten labels, equally many of each, of two pictures that look unlike; every call gives the seed's order."""
    batches = list(images(100))
    assert len(batches) == 10 and batches[0][0].shape == (100, 3, 32, 32)
    labels = torch.cat([label for _, label in batches])
    assert torch.bincount(labels).tolist() == [100] * 10
    again, other = list(images(100)), list(images(100, shuffle_seed=1))
    assert all(torch.equal(a, b) for one, two in zip(batches, again) for a, b in zip(one, two))
    assert not torch.equal(other[0][1], batches[0][1])
    pixels, labels = cifar.load(None, True)
    tested, _ = cifar.load(None, False)
    assert len(pixels) == 1000 and len(tested) == 200 and pixels.float().std() > 30
    sky, flower = pixels[labels == 2].float().mean((0, 2, 3)), pixels[labels == 7].float().mean((0, 2, 3))
    assert (sky - flower).abs().max() > 20


@pytest.mark.parametrize(
    ("size", "limit", "text"), [(0, None, "batch_size is 0"), (1001, None, "1 to 1000"), (4, -1, "limit is -1")]
)
def test_sizes_that_do_not_fit(size, limit, text):
    with pytest.raises(ValueError, match=text):
        images(size, limit=limit)


def test_the_users_seed_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    list(images(100, limit=1))
    assert torch.equal(torch.rand(1), expected)

"""examples/data.py: idx files, the digits that scikit-learn ships, order and scale."""

import gzip
import hashlib
import struct
import sys
from pathlib import Path

import data
import forked_python
import numpy as np
import pytest
import torch
from data import digits, read_idx
from hypothesis import given, strategies as st

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(array, magic=None):
    """The bytes of an idx file of `array`."""
    head = magic if magic is not None else 0x0800 + array.ndim
    return struct.pack(f">I{array.ndim}I", head, *array.shape) + array.astype(np.uint8).tobytes()


def numbered(count, side=28):
    """`count` images whose every pixel is the image's number, and labels that are its last digit."""
    return np.broadcast_to(np.arange(count)[:, None, None], (count, side, side)), np.arange(count) % 10


def write(folder, count=10, *, part="train", ending="", labels=None):
    images, own = numbered(count)
    folder.mkdir(parents=True, exist_ok=True)
    labels = own if labels is None else labels
    for name, content in (("images-idx3", idx(images)), ("labels-idx1", idx(labels))):
        content = gzip.compress(content) if ending == ".gz" else content
        (folder / f"{part}-{name}-ubyte{ending}").write_bytes(content)
    return folder


def pixel_numbers(batch):
    """The numbers of the `numbered` images in a batch."""
    return (batch.double().mean((1, 2, 3)) * 0.3081 + 0.1307).mul(255).round().long().tolist()


@pytest.fixture(autouse=True)
def no_data_path(monkeypatch):
    monkeypatch.delenv("DATA_PATH", raising=False)


# ------------------------------------------------------------------------------------------------- the idx reader


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("shape", [(5,), (3, 4, 6), (0,)])
def test_read_idx_gives_the_array_back(tmp_path, shape, ending):
    array = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    file = tmp_path / f"some{ending}"
    file.write_bytes(gzip.compress(idx(array)) if ending else idx(array))
    got = read_idx(file, len(shape))
    assert got.dtype == np.uint8 and got.shape == shape and (got == array).all()


def test_read_idx_reads_sizes_as_big_endian(tmp_path):
    file = tmp_path / "labels"
    file.write_bytes(bytes.fromhex("00000801 00000102") + bytes(range(256)) + b"\x01\x02")
    assert len(read_idx(file, 1)) == 0x102


@given(cut=st.integers(0, 16 + 3 * 4 * 5 - 1))
def test_a_file_cut_off_anywhere_is_an_error_that_names_it(tmp_path_factory, cut):
    file = tmp_path_factory.mktemp("cut") / IMAGES
    file.write_bytes(idx(np.zeros((3, 4, 5)))[:cut])
    with pytest.raises(ValueError, match=f"{IMAGES}: cut off"):
        read_idx(file, 3)


def test_a_cut_off_file_says_what_is_missing(tmp_path):
    (tmp_path / "images").write_bytes(idx(np.zeros((3, 4, 5)))[:-7])
    with pytest.raises(ValueError, match="the header says 3 x 4 x 5 = 60 bytes, the file holds 53 after it"):
        read_idx(tmp_path / "images", 3)


def test_a_file_longer_than_its_header_says_is_an_error(tmp_path):
    (tmp_path / "labels").write_bytes(idx(np.zeros(4)) + b"x")
    with pytest.raises(ValueError, match="labels: too long: the header says 4 = 4 bytes, the file holds 5"):
        read_idx(tmp_path / "labels", 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[: len(packed) // 2],  # cut off
        lambda packed: b"not gzip" + packed,  # something else under that name
        lambda packed: packed[:12] + b"\xff" * 8 + packed[20:],  # a stream that cannot be unpacked
        lambda packed: packed[:-8] + bytes(8),  # a checksum that does not hold
    ],
)
def test_a_damaged_gzip_file_is_an_error_that_names_it(tmp_path, damage):
    file = tmp_path / "labels.gz"
    file.write_bytes(damage(gzip.compress(idx(np.arange(200)))))
    with pytest.raises(ValueError, match="labels.gz: cut off or damaged gzip file"):
        read_idx(file, 1)


@pytest.mark.parametrize(
    "content, dims, message",
    [
        (idx(np.zeros(4)), 3, "the magic number is 0x00000801, not 0x00000803"),  # labels for images
        (idx(np.zeros((2, 3, 3))), 1, "the magic number is 0x00000803, not 0x00000801"),  # images for labels
        (idx(np.zeros(4), magic=0x0D01), 1, "the magic number is 0x00000d01, not 0x00000801"),  # floats
        (gzip.compress(idx(np.zeros(4)), mtime=0), 1, "the magic number is 0x1f8b"),  # gzip without .gz
    ],
)
def test_a_wrong_magic_number_is_an_error(tmp_path, content, dims, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=f"file: {message}"):
        read_idx(tmp_path / "file", dims)


# ------------------------------------------------------------------------------------------------- MNIST in a folder


@pytest.mark.parametrize("sub", [".", "train", "test", "MNIST/raw"])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_data_path_is_searched_with_its_subfolders(tmp_path, monkeypatch, sub, ending):
    write(tmp_path / sub, ending=ending)
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    ((image, label),) = digits(10, shuffle_seed=None)
    assert image.shape == (10, 1, 28, 28) and label.dtype == torch.int64
    assert pixel_numbers(image) == label.tolist() == list(range(10))


def test_train_and_test_are_different_files(tmp_path):
    write(tmp_path, 10)
    write(tmp_path, 20, part="t10k")
    assert len(list(digits(1, path=tmp_path))) == 10
    assert len(list(digits(1, path=tmp_path, train=False))) == 20


def test_images_and_labels_stay_together_when_shuffled(tmp_path):
    write(tmp_path, 200)
    for image, label in digits(8, path=tmp_path):
        assert [number % 10 for number in pixel_numbers(image)] == label.tolist()


def test_images_without_as_many_labels_are_an_error(tmp_path):
    write(tmp_path, 10, labels=np.arange(9))
    with pytest.raises(ValueError, match=rf"{IMAGES} holds 10 images, .*{LABELS} holds 9 labels"):
        digits(2, path=tmp_path)


def test_images_without_a_label_file_are_an_error(tmp_path):
    (write(tmp_path) / LABELS).unlink()
    with pytest.raises(FileNotFoundError, match=f"{LABELS} or .gz is missing"):
        digits(2, path=tmp_path)


def test_a_damaged_file_is_an_error_and_not_a_reason_to_take_other_digits(tmp_path, monkeypatch):
    file = write(tmp_path) / IMAGES
    file.write_bytes(file.read_bytes()[:100])
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    with pytest.raises(ValueError, match=f"{IMAGES}: cut off"):
        digits(2)


def test_a_path_argument_without_the_files_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"holds no {IMAGES}"):
        digits(2, path=tmp_path)


def test_a_data_path_without_the_files_is_said_and_the_bundled_digits_are_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_PATH", str(tmp_path / "nowhere"))
    with pytest.warns(UserWarning, match=f"nowhere holds no {IMAGES}.*scikit-learn"):
        assert len(list(digits(32))) == 56


# ---------------------------------------------------------------------------------------------- scikit-learn's digits


def test_the_bundled_digits_are_all_there_once():
    from sklearn.datasets import load_digits

    batches = list(digits(32))
    assert len(batches) == 1797 // 32
    assert all(image.shape == (32, 1, 28, 28) and label.shape == (32,) for image, label in batches)
    every = torch.cat([label for _, label in digits(1)])
    assert torch.equal(every.bincount(), torch.from_numpy(load_digits().target).bincount())


def test_the_bundled_digits_are_scaled_up_and_normalised():
    from sklearn.datasets import load_digits

    image, label = next(digits(4, shuffle_seed=None, dtype=torch.float64))
    pixels = torch.from_numpy(load_digits().images[:4]).unsqueeze(1) / 16
    expected = torch.nn.functional.interpolate(pixels, size=(28, 28), mode="bilinear")
    assert torch.allclose(image, (expected - 0.1307) / 0.3081, rtol=0, atol=1e-12)
    assert label.tolist() == load_digits().target[:4].tolist()


def test_black_and_white_lie_where_the_mean_and_deviation_put_them(tmp_path):
    images = np.stack([np.zeros((28, 28)), np.full((28, 28), 255)])
    (tmp_path / IMAGES).write_bytes(idx(images))
    (tmp_path / LABELS).write_bytes(idx(np.array([0, 1])))
    image, _ = next(digits(2, shuffle_seed=None, path=tmp_path, dtype=torch.float64))
    assert image[0].unique().tolist() == pytest.approx([-0.1307 / 0.3081])
    assert image[1].unique().tolist() == pytest.approx([(1 - 0.1307) / 0.3081])


def test_the_bundled_digits_have_no_test_part():
    with pytest.raises(ValueError, match="no test part"):
        digits(32, train=False)


def test_without_any_digits_the_error_says_what_to_install_or_set(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="install scikit-learn .* or set DATA_PATH"):
        digits(32)


# ------------------------------------------------------------------------------------------------- order and batches


def digest(seed=0):
    content = hashlib.sha256()
    for image, label in digits(32, shuffle_seed=seed, limit=5):
        content.update(image.numpy().tobytes() + label.numpy().tobytes())
    return content.hexdigest()


def test_the_order_is_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    first = digest()
    torch.manual_seed(2)
    assert digest() == first != digest(seed=1)


def test_another_process_gets_the_same_batches():
    program = "import sys; sys.path[:0] = sys.argv[1:]; from test_examples_data import digest; print(digest())"
    folders = [str(Path(file).parent) for file in (__file__, data.__file__, forked_python.__file__)]
    other = forked_python.run([sys.executable, "-c", program, *folders])
    assert other.stdout.strip() == digest(), other.stderr


def test_drawing_batches_leaves_the_users_seed_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(digits(32, limit=2))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_have_the_dtype_asked_for(dtype):
    image, label = next(digits(2, dtype=dtype))
    assert image.dtype == dtype and label.dtype == torch.int64


@pytest.mark.parametrize("limit, count", [(0, 0), (3, 3), (1000, 56), (None, 56)])
def test_limit_counts_batches(limit, count):
    assert len(list(digits(32, limit=limit))) == count


@pytest.mark.parametrize("setting", [{"batch_size": 0}, {"batch_size": 1798}, {"batch_size": 32, "limit": -1}])
def test_a_setting_that_gives_no_batches_is_an_error_at_once(setting):
    with pytest.raises(ValueError, match=f"{list(setting)[-1]} is"):
        digits(**setting)

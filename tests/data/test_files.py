"""Planted files come back bit for bit, and hostile ones are refused."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from fedprism.data import load, load_folder
from fedprism.data import source as source_module
from fedprism.data.safepickle import read_pickle
from fedprism.errors import BadInput
from planted_pictures import noise, png, same

# --- arrays on disk ---------------------------------------------------------------------------------------------


def test_npz_both_splits(tmp_path: Path) -> None:
    train, test = noise(4, 28, 28), noise(3, 28, 28)
    np.savez(tmp_path / "mnist.npz", x_train=train, y_train=np.uint8([1, 2, 3, 4]), x_test=test, y_test=[7, 8, 9])
    assert same(load("mnist", data_dir=tmp_path), test, [7, 8, 9])
    found = load("mnist", data_dir=tmp_path, split="train")
    assert same(found, train, [1, 2, 3, 4])
    assert found.class_names == tuple("0123456789")
    assert load("mnist", data_dir=tmp_path, size=32).images.shape == (3, 1, 32, 32)


def test_npz_colour_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = noise(2, 32, 32, 3)
    np.savez(tmp_path / "cifar100_part.npz", x_test=images, y_test=[1, 0], class_names=["pear", "plum"])
    np.savez(tmp_path / "cifar10_part.npz", x_test=images[..., :1], y_test=[9, 0])
    monkeypatch.setenv("FEDPRISM_DATA", str(tmp_path))
    assert same(load("cifar100"), images, [1, 0])
    assert load("cifar100").class_names == ("pear", "plum")
    assert same(load("cifar10"), images[..., 0], [9, 0])
    assert load("cifar10").class_names[9] == "truck"


def write_idx(path: Path, array: np.ndarray, zipped: bool = False) -> None:
    content = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content) if not zipped else path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx(tmp_path: Path, name: str, folder: str, zipped: bool) -> None:
    images = noise(3, 28, 28)
    for prefix, rows in (("train", slice(2)), ("t10k", slice(2, 3))):
        write_idx(tmp_path / folder / "raw" / f"{prefix}-images-idx3-ubyte", images[rows], zipped)
        write_idx(tmp_path / folder / "raw" / f"{prefix}-labels-idx1-ubyte", np.uint8([5, 0, 9])[rows], zipped)
    assert same(load(name, data_dir=tmp_path, split="train"), images[:2], [5, 0])
    assert same(load(name, data_dir=tmp_path), images[2:], [9])


def test_cifar_binary(tmp_path: Path) -> None:
    images = noise(4, 32, 32, 3)
    rows = np.moveaxis(images, 3, 1).reshape(4, -1)
    ten, hundred = tmp_path / "cifar-10-batches-bin", tmp_path / "cifar-100-binary"
    ten.mkdir()
    hundred.mkdir()
    for file, label, row in zip(("data_batch_1", "data_batch_2", "test_batch"), (3, 9, 0), rows, strict=False):
        (ten / f"{file}.bin").write_bytes(bytes([label]) + row.tobytes())
    (hundred / "test.bin").write_bytes(bytes([7, 99]) + rows[3].tobytes())
    (hundred / "fine_label_names.txt").write_text("\n".join(f"name{n}" for n in range(100)))
    assert same(load("cifar10", data_dir=tmp_path, split="train"), images[:2], [3, 9])
    assert same(load("cifar10", data_dir=tmp_path), images[2:3], [0])
    found = load("cifar100", data_dir=tmp_path)
    assert same(found, images[3:], [99])
    assert found.class_names[99] == "name99"


class Python2Pickler(pickle._Pickler):
    """Writes bytes as the str of Python 2, as the published CIFAR files do."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_python2(self, text: bytes) -> None:
        self.write(b"T" + struct.pack("<I", len(text)) + text)
        self.memoize(text)

    dispatch[bytes] = save_python2


def python2(content: Any) -> bytes:
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.mark.parametrize("dump", [python2, lambda content: pickle.dumps(content, 2), pickle.dumps])
def test_cifar_pickles(tmp_path: Path, dump: Callable[[Any], bytes]) -> None:
    images = noise(3, 32, 32, 3)
    rows = np.moveaxis(images, 3, 1).reshape(3, -1).copy()
    ten, hundred = tmp_path / "cifar-10-batches-py", tmp_path / "cifar-100-python"
    ten.mkdir()
    hundred.mkdir()
    (ten / "data_batch_1").write_bytes(dump({"data": rows[:2], "labels": [4, 1], "filenames": ["a", "b"]}))
    (ten / "test_batch").write_bytes(dump({"data": rows[2:], "labels": [9]}))
    (ten / "batches.meta").write_bytes(dump({"label_names": [f"thing{n}" for n in range(10)]}))
    (hundred / "train").write_bytes(
        dump({"data": np.asfortranarray(rows), "fine_labels": [99, 0, 1], "coarse_labels": [0, 0, 0]})
    )
    found = load("cifar10", data_dir=tmp_path, split="train")
    assert same(found, images[:2], [4, 1])
    assert found.class_names[4] == "thing4"
    assert same(load("cifar10", data_dir=tmp_path), images[2:], [9])
    assert same(load("cifar100", data_dir=tmp_path, split="train"), images, [99, 0, 1])


class Malicious:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "written"
    for number, attack in enumerate(
        [
            Malicious(os.system, f"touch {target}"),
            Malicious(eval, f"open({str(target)!r}, 'w')"),
            Malicious(getattr, dict, "update"),
            Malicious(np.memmap, str(target), "uint8", "w+", 0, (9,)),
        ]
    ):
        file = tmp_path / f"attack{number}"
        file.write_bytes(pickle.dumps({"data": attack}, protocol))
        with pytest.raises(BadInput, match=r"a reference to .*Nothing in it was run"):
            read_pickle(file)
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps([1]),
        pickle.dumps({"data": np.zeros((1, 3072))}, 2),
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}, 2)[:-200],
        b"\x80\x02cnumpy\nndarray\n}X\x01\x00\x00\x00ak\x01sb.",  # assigns to an attribute of the class itself
    ],
)
def test_damaged_pickles_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BadInput, match="CIFAR pickle"):
        read_pickle(tmp_path / "file")


def test_array_damage_is_one_sentence(tmp_path: Path) -> None:
    def refused(name: str, match: str) -> None:
        with pytest.raises(BadInput, match=match) as refusal:
            load(name, data_dir=tmp_path)
        assert "\n" not in str(refusal.value)

    file = tmp_path / "mnist.npz"
    file.write_bytes(b"no archive")
    refused("mnist", "mnist.npz")
    np.savez(file, x_test=np.array([{}]), y_test=[0])
    refused("mnist", "mnist.npz")
    np.savez(file, x_test=noise(2, 4, 4))
    refused("mnist", "y_test")
    np.savez(file, x_test=noise(2, 4, 4).astype(float), y_test=[0, 1])
    refused("mnist", "float64")
    np.savez(file, x_test=noise(2, 4, 4), y_test=[0])
    refused("mnist", "one whole label per image")
    np.savez(file, x_test=noise(2, 4, 4), y_test=[0, 10])
    refused("mnist", "labels from 0 to 10")
    np.savez(file, x_test=noise(0, 4, 4), y_test=np.zeros(0, int))
    refused("mnist", "no image")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x_test.npy", b"raw bytes")
        archive.writestr("y_test.npy", b"raw bytes")
    refused("mnist", "uint8 images")
    file.unlink()
    write_idx(tmp_path / "MNIST/raw/t10k-images-idx3-ubyte", noise(2, 4, 4))
    refused("mnist", "labels-idx1")
    (tmp_path / "MNIST/raw/t10k-images-idx3-ubyte").write_bytes(bytes((0, 0, 8, 3)) + b"\xff" * 12)
    refused("mnist", "images-idx3")
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin/test_batch.bin").write_bytes(b"\0" * 3072)
    refused("cifar10", "not a multiple of 3073")


def test_archive_bombs_are_refused_before_unpacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "mnist.npz", x_test=np.zeros((100, 28, 28), np.uint8), y_test=[0] * 100)
    monkeypatch.setattr("fedprism.data.arrays.MOST_BYTES", 10_000)
    monkeypatch.setattr(np, "load", None)
    with pytest.raises(BadInput, match="at most 10000 bytes"):
        load("mnist", data_dir=tmp_path)


# --- image files ------------------------------------------------------------------------------------------------


def write_zip(path: Path, table: str, **images: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("labels.csv", table)
        for name, content in images.items():
            archive.writestr(f"images/{name}", content)


def test_zip_of_images(tmp_path: Path) -> None:
    images = noise(3, 8, 8, 3)
    images[2] = images[2, :, :, :1]
    table = 'file,label,wnid,words\na,2,n1,"pear, fruit"\nb,0,n0,plum\nc,2,n1,"pear, fruit"\n'
    write_zip(tmp_path / "tiny_imagenet_x.zip", table, a=png(images[0]), b=png(images[1]), c=png(images[2, :, :, 0]))
    found = load("tiny-imagenet", data_dir=tmp_path)
    assert same(found, images, [2, 0, 2])
    assert found.class_names == ("plum", "1", "pear, fruit")
    assert same(load("tiny-imagenet", data_dir=tmp_path, limit=2), images[:2], [2, 0])
    with pytest.raises(BadInput, match="train images of tiny-imagenet"):
        load("tiny-imagenet", data_dir=tmp_path, split="train")


def test_imagenet_zip_is_square_224_unless_asked(tmp_path: Path) -> None:
    write_zip(tmp_path / "imagenet.zip", "file,label\na,0\n", a=png(noise(40, 60, 3), "JPEG"))
    assert load("imagenet", data_dir=tmp_path).images.shape == (1, 3, 224, 224)
    assert load("imagenet", data_dir=tmp_path, size=16).images.shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    "table",
    [
        "file,name\na,0\n",
        "file,label\na,x\n",
        "file,label\nb,0\n",
        "file,label\na,-1\n",
        f"file,label\na,{10**30}\n",
        "",
    ],
)
def test_damaged_zip_is_refused(tmp_path: Path, table: str) -> None:
    write_zip(tmp_path / "lfw.zip", table, a=png(noise(4, 4, 3)))
    with pytest.raises(BadInput, match=r"Fetch the|each label must|lfw needs images"):
        load("lfw", data_dir=tmp_path)


def test_zip_member_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zip(tmp_path / "lfw.zip", "file,label\na,0\n", a=png(noise(40, 40, 3)))
    monkeypatch.setattr("fedprism.data.files.MOST_MEMBER_BYTES", 1000)
    with pytest.raises(BadInput, match=r"images/a of .* bytes"):
        load("lfw", data_dir=tmp_path)


def test_pixel_bombs_and_false_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(png(noise(8, 8, 3)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    with pytest.raises(BadInput, match="more than 50 pixels"):
        load_folder(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(BadInput, match="more than 10 pixels"):
        load_folder(tmp_path)
    monkeypatch.undo()
    for content in (b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n", png(noise(8, 8, 3))[:60]):
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(BadInput, match=r"a\.png.*not a readable"):
            load_folder(tmp_path)


def test_too_many_pixels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(png(noise(8, 8, 3)))
    monkeypatch.setattr(source_module, "MOST_BYTES", 100)
    with pytest.raises(BadInput, match="more than 100 bytes of pixels"):
        load_folder(tmp_path)


def plant(root: Path, *places: str) -> np.ndarray:
    """Write a random picture at every place and return them all."""
    images = noise(len(places), 6, 6, 3)
    for place, image in zip(places, images, strict=True):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(png(image))
    return images


def test_flat_folder(tmp_path: Path) -> None:
    images = plant(tmp_path / "mine", "a.png", "b.PNG", "c.jpg")
    (tmp_path / "mine" / "notes.txt").write_text("no image")
    (tmp_path / "mine" / "._a.png").write_text("no image")
    (tmp_path / "mine" / "empty").mkdir()
    found = load_folder(tmp_path / "mine")
    assert same(found, images, [0, 0, 0])
    assert found.class_names == ("mine",)
    assert found.name == "folder:mine"
    assert same(load(f"folder:{tmp_path / 'mine'}"), images, [0, 0, 0])
    assert same(load(str(tmp_path / "mine"), limit=2), images[:2], [0, 0])
    assert load_folder(tmp_path / "mine", channels=1, size=4).images.shape == (3, 1, 4, 4)


def test_class_folders(tmp_path: Path) -> None:
    images = plant(tmp_path, "ape/1.png", "ape/2.png", "bee/1.png", "cow/deep/1.png")
    found = load_folder(tmp_path)
    assert same(found, images, [0, 0, 1, 2])
    assert found.class_names == ("ape", "bee", "cow")
    assert same(load_folder(tmp_path, limit=3), images[[0, 2, 3]], [0, 1, 2])


def test_folders_that_make_no_set(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no"):
        load_folder(tmp_path)
    with pytest.raises(BadInput, match="no such folder"):
        load_folder(tmp_path / "missing")
    with pytest.raises(BadInput, match="no such folder"):
        load("folder:" + "x" * 5000)
    plant(tmp_path, "a.png", "ape/b.png")
    with pytest.raises(BadInput, match="holds both"):
        load_folder(tmp_path)
    (tmp_path / "a.png").unlink()
    (tmp_path / "ape" / "c.png").write_bytes(png(noise(5, 6, 3)))
    with pytest.raises(BadInput, match="different sizes"):
        load_folder(tmp_path)
    assert load_folder(tmp_path, size=5).images.shape == (2, 3, 5, 5)


def test_resizing_takes_the_central_square(tmp_path: Path) -> None:
    stripes = np.zeros((10, 30, 3), np.uint8)
    stripes[:, 10:20] = 200
    (tmp_path / "a.png").write_bytes(png(stripes))
    assert load_folder(tmp_path, size=5).images.unique().tolist() == [200]


def test_torchvision_folders(tmp_path: Path) -> None:
    lfw = plant(tmp_path, "lfw-py/lfw_funneled/Ann_Ab/Ann_Ab_0001.png", "lfw-py/lfw_funneled/Bo_Cd/Bo_Cd_0001.png")
    (tmp_path / "lfw-py/lfw_funneled/pairs_01.txt").write_text("")
    assert same(load("lfw", data_dir=tmp_path), lfw, [0, 1])
    train = plant(tmp_path, "tiny-imagenet-200/train/n00000001/images/a.png", "tiny-imagenet-200/train/n00000002/b.png")
    val = plant(tmp_path, "tiny-imagenet-200/val/images/v0.png", "tiny-imagenet-200/val/images/v1.png")
    (tmp_path / "tiny-imagenet-200/wnids.txt").write_text("n00000003\nn00000002\nn00000001\n")
    (tmp_path / "tiny-imagenet-200/val/val_annotations.txt").write_text("v1.png\tn00000003\t0\nv0.png\tn00000001\t0\n")
    assert same(load("tiny-imagenet", data_dir=tmp_path, split="train"), train, [0, 1])
    found = load("tiny-imagenet", data_dir=tmp_path)
    assert same(found, val[[1, 0]], [2, 0])
    assert found.class_names == ("n00000001", "n00000002", "n00000003")


@pytest.mark.parametrize("below", ["", "imagenet/"])
def test_imagenet_class_folders(tmp_path: Path, below: str) -> None:
    images = plant(tmp_path, f"{below}val/n00000007/a.png", f"{below}val/n00000008/b.png")
    assert same(load("imagenet", data_dir=tmp_path, size=6), images, [0, 1])
    plant(tmp_path, f"{below}val/holiday/a.png")
    with pytest.raises(BadInput, match="imagenet"):
        load("imagenet", data_dir=tmp_path)

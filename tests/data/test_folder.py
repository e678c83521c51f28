from __future__ import annotations

import errno
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipetrain.data.folder import load
from pipetrain.data.splits import Draw
from pipetrain.errors import ConfigError

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
FILES = {
    "train/ant/4.PNG": (20, 20),
    "train/ant/more/3.png": (40, 90),
    "train/cat/1.jpg": (60, 40),
    "train/cat/2.png": (40, 40),
    "test/ant/6.bmp": (40, 40),
    "test/cat/5.png": (40, 40),
}


def picture(path: Path, width: int, height: int, mode: str = "RGB") -> None:
    """Red grows to the right and green downwards, up to 1; blue is 0."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.stack([red, green, 0 * red], -1).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def root(tmp_path):
    for name, size in reversed(FILES.items()):
        picture(tmp_path / name, *size)
    (tmp_path / "train/cat/notes.txt").write_text("not an image")
    (tmp_path / "train/.cache").mkdir()
    return tmp_path


def test_classes_and_files_are_those_of_the_folders_sorted_by_name(root):
    data = load(str(root))
    assert (data.name, data.classes, len(data.train), len(data.test)) == ("images", 2, 4, 2)
    assert [*data.train.files, *data.test.files] == [*FILES]
    assert data.train.targets(torch.arange(4), None).tolist() == [0, 0, 1, 1]
    (root / "test").rename(root / "val")
    assert load(str(root)).test.files == ("val/ant/6.bmp", "val/cat/5.png")
    cut = pickle.loads(pickle.dumps(load(str(root)).train.first(3)))
    assert (len(cut), cut.targets(torch.tensor([2]), None).tolist()) == (3, [1])


def test_an_evaluation_sees_the_middle(root):
    """7/8 of the shorter side: 35 of 40 pixels, from 2.5 to 37.5, and 1.0 is white."""
    image = load(str(root), size=35, **PLAIN).train.inputs(torch.tensor([1]), None)[0]  # 40 x 90
    assert image[0, 0, [0, -1]].tolist() == pytest.approx([2.5 / 39, 36.5 / 39], abs=0.01)
    assert image[1, [0, -1], 0].tolist() == pytest.approx([27.5 / 89, 61.5 / 89], abs=0.01)
    assert not image[2].any()
    imagenet = load(str(root), size=35).train.inputs(torch.tensor([1]), None)[0]
    torch.testing.assert_close(imagenet[0], (image[0] - 0.485) / 0.229)


def test_training_crops_and_mirrors_by_the_sample_s_own_draw(root):
    train = load(str(root), size=32, **PLAIN).train
    ids = torch.arange(4)
    drawn = torch.stack([train.inputs(ids, Draw(0, epoch)) for epoch in range(40)])
    assert torch.equal(drawn[3][[2]], train.inputs(torch.tensor([2]), Draw(0, 3)))
    assert not torch.equal(drawn[3], train.inputs(ids, Draw(1, 3)))
    mirrored = drawn[:, :, 0, 16, 0] > drawn[:, :, 0, 16, -1]
    assert 60 < mirrored.sum() < 100  # of 160
    lefts = drawn[:, 3, 0, 16].amin(1)  # of a square of 40 pixels, of which 35 are seen
    assert lefts.min() < 0.02
    assert 0.11 < lefts.max() < 0.14
    kept = load(str(root), size=32, flip=False).train.inputs(ids, Draw(0, 5))[:, 0, 16]
    assert (kept[:, 0] < kept[:, -1]).all()


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK"])
def test_every_image_of_any_size_and_shape_becomes_a_square_of_rgb(root, mode):
    picture(root / f"train/ant/0.{'jpg' if mode == 'CMYK' else 'png'}", 40, 40, mode)
    for draw in (None, Draw(0, 1)):
        images = load(str(root), size=48).train.inputs(torch.arange(5), draw)
        assert (images.shape, images.dtype) == ((5, 3, 48, 48), torch.float32)
        assert images.is_contiguous()


def test_the_checksum_tells_files_and_sizes_apart_and_not_places(root, tmp_path_factory):
    moved = tmp_path_factory.mktemp("elsewhere") / "images"
    shutil.copytree(root, moved)
    before = load(str(root)).train.checksum()
    assert load(str(moved)).train.checksum() == before
    others = [load(str(root), size=32).train.checksum(), load(str(root)).train.first(3).checksum()]
    picture(moved / "train/cat/2.png", 41, 41)
    others.append(load(str(moved)).train.checksum())
    (root / "train/cat/2.png").rename(root / "train/cat/7.png")
    others.append(load(str(root)).train.checksum())
    assert len({before, *others}) == 5


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        (lambda root: shutil.rmtree(root / "train"), {}, "train has no images (.jpg .jpeg .png"),
        (lambda root: shutil.rmtree(root / "test/ant"), {}, "has ant in only one of its folders train and"),
        (lambda root: (root / "train/dog").mkdir(), {}, "train/dog has no images (.jpg .jpeg .png"),
        (lambda root: None, {"size": 0}, "data.size=0 must be a whole number of at least 1"),
        (
            lambda root: (root / "train/cat/1.jpg").write_bytes(b"no"),
            {},
            "1.jpg cannot be read as an image: ",
        ),
    ],
)
def test_what_is_no_folder_of_images_is_refused_in_one_sentence(root, change, options, says):
    change(root)
    with pytest.raises(ConfigError) as refusal:
        load(str(root), **options).train.inputs(torch.tensor([2]), None)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_that_cannot_be_listed_is_said_and_its_images_are_not_left_out(root, monkeypatch):
    listed = os.scandir

    def scandir(path):
        if str(path).endswith("more"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ConfigError, match=r"train cannot be listed: PermissionError: .*train/ant/more"):
        load(str(root))

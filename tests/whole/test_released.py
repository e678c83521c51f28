"""A checkpoint of any released format is read; one from anybody is used, or refused in a sentence.

For a new format: `python -m tests.whole.test_released FOLDER`, and keep those that are there.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipetrain import ConfigError, Pipeline
from pipetrain.checkpoint.files import VERSION, stage_file, write_part
from pipetrain.checkpoint.tensor_reader import read_files
from tests.support.run_files import forge, put

KEPT = Path(__file__).parents[1] / "golden" / "checkpoints"
INPUTS, TARGETS = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([[0.5], [-1.0]])


def training() -> Pipeline:
    """Two layers that begin with ones, an optimizer with a state, and a moving average."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    sgd = partial(torch.optim.SGD, lr=0.125, momentum=0.5)
    return Pipeline(model, mse_loss, sgd, microbatches=1, seed=3, ema=0.5, device="cpu", threads=1)


def copied(version: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(KEPT / version, tmp_path / "checkpoints" / "update-00000001"))


@pytest.mark.parametrize("version", sorted(path.name for path in KEPT.iterdir()))
def test_a_training_goes_on_from_a_checkpoint_of_each_released_format(version, tmp_path):
    with training() as whole:
        for _ in range(2):
            whole.step(INPUTS, TARGETS)
        wanted = [whole.state_dict(), whole.state_dict(ema=True)]
    copied(version, tmp_path)
    with training() as pipe:
        go_on(pipe, tmp_path)
        torch.testing.assert_close([pipe.state_dict(), pipe.state_dict(ema=True)], wanted)


def test_the_present_format_is_kept():
    assert (KEPT / str(VERSION)).exists()


def put_tensor(name: str, tensor: Tensor | None) -> Callable[[Path], None]:
    """Let a stage's file have another tensor, or none, with the right sums."""

    def harm(folder: Path) -> None:
        tensors = {key: t.clone() for key, t in read_files(folder, [stage_file(0)]).items() if key != name}
        (folder / stage_file(0)).unlink()
        part = write_part(folder, stage_file(0), tensors if tensor is None else {**tensors, name: tensor})
        forge(folder, put("parts", stage_file(0), to=asdict(part)))

    return harm


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda f: forge(f, put("conditions", to={})), "its tensors must be of type dict, and is None"),
        (lambda f: forge(f, put("conditions", "tensors", to=[1])), "its tensors must be of type dict"),
        (lambda f: forge(f, put("conditions", "tensors", "0.bias", to=[])), "a state that cannot be used: "),
        (lambda f: forge(f, put("conditions", "state_dict", to=3)), "its state_dict must be of type dict"),
        (lambda f: forge(f, put("pipeline", to={"cuts": [1]})), "has no pipeline and position of ours"),
        (lambda f: forge(f, put("position", "batch", to=-1)), "has no pipeline and position of ours"),
        (lambda f: forge(f, put("position", "batch", to=10**30)), "has no pipeline and position of ours"),
        (put_tensor("model/0.weight", None), r"0\.weight is \['float32', 2, 2\], and its file has \[\]"),
        (put_tensor("model/0.weight", torch.ones(1)), r"and its file has \['float32', 1\]"),
        (put_tensor("model/0.bias", torch.ones(2, dtype=torch.int32)), r"its file has \['int32', 2\]"),
        (put_tensor("random/0/cpu", torch.ones(3)), "holds a state that cannot be used: "),
        (put_tensor("optimizer/0.bias/0", torch.ones(9)), "holds a state that cannot be used: "),
        (put_tensor("ema/0.bias", torch.ones(9)), "holds a state that cannot be used: "),
    ],
)
def test_what_anybody_has_written_with_the_right_sums_ends_in_a_sentence(harm, says, tmp_path):
    folder = copied(str(VERSION), tmp_path)
    harm(folder)
    with pytest.raises(ConfigError, match=says) as refused, training() as pipe:
        go_on(pipe, folder)
    assert "\n" not in str(refused.value)


def go_on(pipe: Pipeline, folder: Path) -> None:
    pipe.load(folder)
    pipe.step(INPUTS, TARGETS)


if __name__ == "__main__":
    with training() as pipe:
        pipe.step(INPUTS, TARGETS)
        print(pipe.save(sys.argv[1]))

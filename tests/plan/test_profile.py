"""A profile's file: read as it was written, and refused where it is another's or nobody's."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan.estimate import Layer
from pipetrain.plan.profile import Profile, average, read_profile, refuse_other_layers
from tests.support.profiles import layer, profile
from tests.support.refusals import refusal

TWO = profile([layer("a", output_bytes=40), layer("b", output_bytes=8, forward_s=0.1)], 1e-5, 1e-9)
CONDITIONS = {"model": "fake"}
SECONDS = st.floats(0, 1e6)


def written(tmp_path, data: object) -> str:
    file = tmp_path / "profile.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(file)


def changed(key: str, value: object, where: int | None = None) -> dict:
    """The JSON of TWO with another value: of the profile, or of one of its layers."""
    data = TWO.to_json()
    (data if where is None else data["layers"][where])[key] = value
    return data


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS, st.integers(0, 2**50)), max_size=5), SECONDS)
def test_what_is_written_is_read_to_the_last_bit(layers, latency_s):
    made = profile([layer("x", f, b, output_bytes=n) for f, b, n in layers], latency_s)
    assert Profile.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_a_file_is_read_also_one_of_another_machine(tmp_path):
    assert read_profile(written(tmp_path, TWO.to_json()), CONDITIONS) == TWO
    data = changed("machine", {"device": "another", "threads": 7})
    assert read_profile(written(tmp_path, data), CONDITIONS).machine["threads"] == 7


BF16 = {**CONDITIONS, "precision": "bf16"}
COMPILED = changed("conditions", {**CONDITIONS, "compile": 1})


@pytest.mark.parametrize(
    ("data", "conditions", "says"),
    [
        ("{", CONDITIONS, "holds no profile: Expecting property name"),
        ([], CONDITIONS, "holds no profile: it is no profile of version 3"),
        (changed("pipetrain_profile", 1), CONDITIONS, "holds no profile: it is no profile of version 3"),
        (
            changed("latency_s", math.nan),
            CONDITIONS,
            "holds no profile: it has a time that is negative or not",
        ),
        (changed("step_s", -0.5, 1), CONDITIONS, "holds no profile: it has a time that is negative or not"),
        (
            changed("step_s", "1", 1),
            CONDITIONS,
            "holds no profile: its content: layers: 1: step_s must be of",
        ),
        (
            changed("colour", "red"),
            CONDITIONS,
            "holds no profile: its content must be an object of conditions",
        ),
        # One that either knows nothing of is another condition too.
        (
            TWO.to_json(),
            {"model": "vgg16"},
            "was taken with model=fake, and this run has model=vgg16; make one",
        ),
        (TWO.to_json(), BF16, "was taken with precision=None, and this run has precision=bf16"),
        (COMPILED, CONDITIONS, "was taken with compile=1, and this run has compile=None"),
    ],
)
def test_what_is_no_profile_or_was_taken_otherwise_is_refused(tmp_path, data, conditions, says):
    path = written(tmp_path, data)
    said = refusal(lambda: read_profile(path, conditions))
    assert said.startswith(f"partition.profile={path} {says}")
    assert said.endswith("make one with partition=profile")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        said = refusal(lambda path=path: read_profile(str(path), CONDITIONS))
        assert "cannot be read: " in said


def estimated(*outputs: tuple[str, int]) -> list[Layer]:
    return [
        Layer(name, 1, 1, ValueSpec((TensorSpec((nbytes // 4,), torch.float32),))) for name, nbytes in outputs
    ]


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([("a", 40), ("c", 8)], "1 is b and returns 8 bytes, and the model's is c and returns 8 bytes"),
        ([("a", 80), ("b", 8)], "0 is a and returns 40 bytes, and the model's is a and returns 80 bytes"),
        ([("a", 40)], "1 is b and returns 8 bytes, and the model's is missing"),
    ],
)
def test_layers_must_have_the_names_and_outputs_of_the_model_s(layers, says):
    refuse_other_layers(TWO, estimated(("a", 40), ("b", 8)))
    said = refusal(lambda: refuse_other_layers(TWO, estimated(*layers)))
    assert said.startswith(f"the profile is of another model: its layer {says}; make one with")


def test_ranks_are_averaged_by_the_median_of_each_time():
    slow, middle, fast = layer("a", 9, 1, step_s=5), layer("a", 2, 3, step_s=6), layer("a", 1, 2, step_s=1)
    slow = replace(slow, input_s=2, weight_s=0.5)
    median = replace(layer("a", 2, 2, step_s=5), input_s=1.5, weight_s=1)
    assert average([[slow], [middle], [fast]]) == [median]

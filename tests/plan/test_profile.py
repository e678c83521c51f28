"""A profile's file: read as it was written, and refused where it is another's or nobody's."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.errors import ConfigError
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan.estimate import Layer
from pipetrain.plan.profile import Profile, average, read_profile, refuse_other_layers
from tests.support.profiles import layer, profile

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


def refusal(tmp_path, data: object, conditions: dict | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        read_profile(written(tmp_path, data), conditions or CONDITIONS)
    said = str(error.value)
    assert "\n" not in said
    assert "partition=profile" in said  # what to do
    return said.removeprefix(f"partition.profile={tmp_path}/profile.json ")


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS, st.integers(0, 2**50)), max_size=5), SECONDS)
def test_what_is_written_is_read_to_the_last_bit(layers, latency_s):
    made = profile([layer("x", f, b, output_bytes=n) for f, b, n in layers], latency_s)
    assert Profile.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_a_file_is_read(tmp_path):
    assert read_profile(written(tmp_path, TWO.to_json()), CONDITIONS) == TWO


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ([], "it is no profile of version 3"),
        ({}, "it is no profile of version 3"),
        (changed("pipetrain_profile", 1), "it is no profile of version 3"),
        (changed("latency_s", math.nan), "it has latency_s=nan"),
        (changed("latency_s", -1.0), "it has latency_s=-1.0"),
        (changed("layers", {"a": 1}), "its content: layers must be of type list, and is {'a': 1}"),
        (changed("layers", [3]), "its content: layers: 0 must be an object of name, output_bytes"),
        (changed("conditions", []), "its content: conditions must be of type Mapping"),
        (changed("colour", "red"), "its content must be an object of conditions, machine"),
        (changed("step_s", "1", 1), "its content: layers: 1: step_s must be of type float, and is '1'"),
        (changed("step_s", -0.5, 1), "b has step_s=-0.5"),
        (changed("output_bytes", 1.5, 0), "its content: layers: 0: output_bytes must be of type int"),
        (changed("output_bytes", True, 0), "its content: layers: 0: output_bytes must be of type int"),
        (changed("name", None, 0), "its content: layers: 0: name must be of type str, and is None"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, data, says):
    assert refusal(tmp_path, data).startswith(f"holds no profile: {says}")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"cannot be read: .*; name the profile.json of a run"):
            read_profile(str(path), CONDITIONS)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="holds no profile"):
        read_profile(str(tmp_path / "bytes"), CONDITIONS)


def test_other_conditions_are_refused_and_both_are_named(tmp_path):
    said = refusal(tmp_path, TWO.to_json(), {"model": "vgg16"})
    assert said.startswith("was taken with model=fake, and this run has model=vgg16; make one")
    # One that either knows nothing of is another condition too.
    assert "precision=None, and this run has precision=bf16" in refusal(
        tmp_path, TWO.to_json(), {**CONDITIONS, "precision": "bf16"}
    )
    assert "compile=1, and this run has compile=None" in refusal(
        tmp_path, changed("conditions", {**CONDITIONS, "compile": 1})
    )


def test_another_machine_is_no_hindrance(tmp_path):
    data = changed("machine", {"device": "another", "threads": 7})
    assert read_profile(written(tmp_path, data), CONDITIONS).machine["threads"] == 7


def estimated(*outputs: tuple[str, int]) -> list[Layer]:
    def boundary(nbytes: int) -> ValueSpec:
        return ValueSpec((TensorSpec((nbytes // 4,), torch.float32),))

    return [Layer(name, 1, 1, boundary(nbytes), False, False) for name, nbytes in outputs]


def test_layers_must_have_the_names_and_outputs_of_the_model_s():
    refuse_other_layers(TWO, estimated(("a", 40), ("b", 8)))
    for layers, says in (
        (
            [("a", 40), ("c", 8)],
            "its layer 1 is b and returns 8 bytes, and the model's is c and returns 8 bytes",
        ),
        (
            [("a", 80), ("b", 8)],
            "its layer 0 is a and returns 40 bytes, and the model's is a and returns 80 bytes",
        ),
        ([("a", 40)], "its layer 1 is b and returns 8 bytes, and the model's is missing"),
    ):
        with pytest.raises(ConfigError) as error:
            refuse_other_layers(TWO, estimated(*layers))
        assert f"the profile is of another model: {says}; make one with" in str(error.value)


def test_ranks_are_averaged_by_the_median_of_each_time():
    slow, middle, fast = layer("a", 9, 1, step_s=5), layer("a", 2, 3, step_s=6), layer("a", 1, 2, step_s=1)
    slow = replace(slow, input_s=2, weight_s=0.5)
    median = replace(layer("a", 2, 2, step_s=5), input_s=1.5, weight_s=1)
    assert average([[slow], [middle], [fast]]) == [median]
    other = replace(middle, forward_s=4, recorded_s=8)
    assert average([[middle], [other]]) == [replace(middle, forward_s=3, recorded_s=5)]

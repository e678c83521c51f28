"""The record of OneFlow's SSP: what it says of results as they may come."""

from __future__ import annotations

from typing import Any

import pytest

from published.experiments import ssp
from published.oneflow_ssp import epochs_and_peak, rows
from published.record import Findings


@pytest.mark.parametrize("came", [True, False])
def test_its_verdict_can_fail(came: bool) -> None:
    ways: dict[str, Any] = {}
    for images in ssp.SIZES["vgg16"].images:
        seconds = {way: dict.fromkeys(map(str, ssp.SPEEDS), of) for way, of in (("ssp", 2.0), ("dp", 3.0))}
        ways[f"{ssp.SSP}, {images}"] = {"seconds": seconds["ssp"], "peaks": [3, 2]}
        other = "dp" if came else "ssp"
        ways[f"{ssp.PARALLEL}, {images}"] = {"seconds": seconds[other], "peaks": [4 if came else 2]}
        if not came:
            ways[f"{ssp.SSP}, {images}"]["seconds"] = seconds["dp"]
    held, race = dict[str, Any](), dict[str, Any]()
    for images in ssp.IMAGES:
        held[f"held vgg16, ssp, {images}"] = [(0, 2, 0), (1, 3, 0), (0, 1, 0)]
        held[f"held vgg16, data parallelism, {images}"] = [(0, 4 if came else 2, 0)]
        for way in (ssp.SSP, ssp.PARALLEL):
            race[f"vgg16, {way}, {images}"] = {"seconds": [1.0], "of bound": None, "failure": ""}
    ring = ssp.versions(4 if came else 3, 7)
    results = {"versions": ring, "plan vgg16": ways, "race 2": race, **held}
    findings = Findings.of(ssp.show(results))
    assert [check.came_back for check in findings.checks] == [came] * 6 + [None]
    peaks = [check.published for check in findings.checks if check.what.endswith("peak of a device")]
    assert peaks == ["0.71, static 1.42", *["-"] * 3]  # the record has no small microbatches
    gains = [series.here for series in findings.series if series.of == "vgg16, 8 images"]
    assert gains == [{2: 0.5}]  # a batch of one device beside one of two, in the same time


def test_both_ways_have_microbatches_of_as_many_images() -> None:
    for model in ssp.SIZES:
        for ranks in ssp.RANKS:
            for name, (_, *words) in ssp.ways(model, 8, ranks).items():
                images = int(name.rpartition(", ")[2])
                options = dict(word.split("=", 1) for word in words)
                assert int(options["batch_size"]) == images * int(options["microbatches"])


def test_a_way_of_few_processes_has_the_record_s_stages() -> None:
    def placement(model: str, ranks: int) -> str:
        return next(word for word in ssp.ways(model, 8, ranks)["ssp, 8"] if word.startswith("placement"))

    assert [placement("vgg16", n) for n in (2, 4)] == ["placement=0.1", "placement=0-2.3"]
    assert placement("resnet50", 2) == "placement=0-1.0-1"


def test_times_and_memory_are_of_one_version_of_the_document() -> None:
    every = rows()
    assert len({row["oneflow"] for (document, *_), row in every.items() if document == "8"}) == 1
    assert epochs_and_peak("VGG16 11:7", "off") == {"seconds": 1175.84, "peak": 4631}
    assert epochs_and_peak("VGG16, data parallelism") == {"seconds": 1644.25, "peak": 6485}
    assert epochs_and_peak("ResNet50 1:27", "off") is None

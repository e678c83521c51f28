"""The reference of the Python API: every public name, with a docstring."""

from __future__ import annotations

import inspect
import re

import pytest

import api_docs
import pipetrain


@pytest.mark.slow
def test_it_has_every_public_name(tmp_path):
    api_docs.main(tmp_path)
    page = (tmp_path / "pipetrain.html").read_text()
    found = set(re.findall(r'id="([^"]+)"', page))
    assert {*pipetrain.__all__, "Pipeline.train", "Task.weight", "Metric.sums"} <= found
    assert {link[1:] for link in re.findall(r'href="(#[^"]+)"', page)} <= found


@pytest.mark.parametrize("name", pipetrain.__all__)
def test_every_public_name_and_method_has_a_docstring(name):
    value = getattr(pipetrain, name)
    methods = [key for key in vars(value) if not key.startswith("_")] if isinstance(value, type) else []
    for documented in (value, *(getattr(value, key) for key in methods if callable(getattr(value, key)))):
        assert inspect.getdoc(documented), documented

"""What ranks compare, and what they take from rank 0: the mesh says what rank 1 would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipetrain.errors import ConfigError
from pipetrain.runtime.together import conditions, level, prove_same
from pipetrain.schedule.programs import gpipe, one_f_one_b
from pipetrain.settings import Settings


class Mesh:
    """Rank 0's mesh; rank 1 says one word after the other."""

    def __init__(self, *says: Any) -> None:
        self.says = [*says]
        self.copied: list[str] = []

    def gather(self, what: str, item: Any) -> list[Any]:
        return [item, self.says.pop(0)]

    def copy_from_first(self, what: str, tensor: torch.Tensor) -> None:
        self.copied.append(what)


def test_what_differs_is_named_with_both_values():
    texts = {"partition": "[4]", "timeout": "3"}
    with pytest.raises(ConfigError, match=r"^rank 1 has partition=\[4\], and rank 0 has \[2\]: give"):
        prove_same(Mesh(texts), "the settings", {"partition": [2], "timeout": 3})
    with pytest.raises(ConfigError, match=r"^rank 1 has timeout=nothing, and rank 0 has 3: "):
        prove_same(Mesh({"partition": "[2]"}), "the settings", {"partition": [2], "timeout": 3})


def test_threads_and_patience_are_a_process_s_own_and_all_else_is_compared():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)

    def said(program: Any = None, **values: Any) -> dict[str, Any]:
        return conditions(Settings.read(values), optimizer, program or gpipe(2, 1, 4), lambda update: 1.0)

    assert said(threads=2, timeout=9) == said()
    assert said(codec_forward="half") != said() != said(dtype="float64")
    assert said(one_f_one_b(2, 1, 4))["program"] != said()["program"]
    assert said()["optimizer.lr"] == 0.5


def test_only_tensors_that_differ_travel():
    tensors = {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.zeros(3, device="meta")}
    forms = Mesh()
    seen: list[Any] = []
    forms.gather = lambda what, item: seen.append(item) or [item, item]
    level(forms, "the model", tensors)
    checksums = [seen[-1][0], 1]  # rank 1 has other numbers in b
    mesh = Mesh(seen[0], checksums)
    level(mesh, "the model", tensors)
    assert mesh.copied == ["the model"]

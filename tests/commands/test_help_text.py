"""`--help`: a line for each option, from the file that sets it."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
from omegaconf import OmegaConf

from pipetrain.commands.help_text import completion, usage
from pipetrain.config.choices import conf_dir


def helped(name: str = "config", *words: str) -> dict[str, tuple[str, str]]:
    """The lines of options: key -> (value, what is said of it)."""
    text = usage(name, words)
    assert all(len(line) <= 100 for line in text.splitlines())
    lines = re.sub("\n {37}", " ", text).splitlines()
    found = [re.fullmatch(r"  ([\w.]+)=(\S*) *(.*)", line) for line in lines]
    keys = [match[1] for match in found if match]
    assert len(keys) == len(set(keys))
    return {match[1]: (match[2], match[3]) for match in found if match}


def leaves(content: dict[str, Any], prefix: str = "") -> list[str]:
    return [
        leaf
        for key, value in content.items()
        for leaf in (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]


@pytest.mark.parametrize("name", ["config", "plan"])
def test_each_option_of_a_command_has_one_line_that_says_what_it_is(name):
    told = helped(name)
    for file in {"config", name}:
        content = OmegaConf.to_container(OmegaConf.load(conf_dir() / f"{file}.yaml"))
        expected = [key for key in leaves(content) if not key.startswith(("hydra.", "defaults"))]
        assert [
            key for key in expected if not all(told.get(key, ("", "")))
        ] == []  # its default and what it is


def test_each_choice_is_named_and_each_of_its_options_says_what_it_is():
    for group in (path.name for path in conf_dir().iterdir() if any(path.glob("*.yaml"))):
        key = "codec.forward" if group == "codec" else group
        names = sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
        assert helped()[key][1].endswith(f": {' '.join(names)}")
        for choice in names:
            options = helped("config", f"{key}={choice}")
            silent = [name for name, (_, says) in options.items() if name.startswith(f"{key}.") and not says]
            assert silent == [], choice


def test_the_options_are_those_of_what_is_chosen():
    plain, other = helped(), helped("config", "data=text", "optim=adamw", "schedule=fbp")
    assert [told[key][0] for told in (plain, other) for key in ("epochs", "optim.lr")] == [
        "150",
        "0.05",
        "2",
        "0.001",
    ]
    assert plain["run_dir"][0] == "runs/cifar10-..."
    assert "data.augment.crop" in plain
    assert plain["window"][0] == "1"
    assert "data.block" in other
    assert other["window"][0] == "null"
    assert other["schedule.in_flight"] == ("8", "microbatches that a stage holds open; bounds staleness too")
    assert {"data.augment.crop", "optim.momentum"} & set(other) == set()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("mod", ["model="]),
        ("epochs=2 model=vgg1", ["vgg11", "vgg13", "vgg16", "vgg19"]),
        ("codec.forward=t", ["threshold", "topk", "topk_int8"]),
        ("optim.m", ["optim.momentum="]),
        ("--comp", ["--completion"]),
        ("resume=runs/", []),  # by bash, from the files
    ],
)
def test_bash_completes_the_command_s_options_and_choices(typed, offered):
    line = f"pipetrain {typed}"
    asks = f"COMP_LINE='{line}' COMP_POINT={len(line)}; _pipetrain; echo ${{COMPREPLY[@]}}"
    script = [completion(), asks, "complete -p pipetrain"]
    told = subprocess.run(["bash", "-c", "\n".join(script)], capture_output=True, text=True, timeout=60)
    words, bound = told.stdout.splitlines()
    assert (words.split(), told.stderr) == (offered, "")
    assert bound.endswith(" -F _pipetrain pipetrain")

"""What `--help` says: a line for each option, from the comments of the configuration's own files.

An option's comment stands in its own line of the YAML file, so that there is one text for both readers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_OPTION = re.compile(r"(?P<indent> *)(?P<key>\w+): *(?P<value>[^#]*?)(?: *# *(?P<says>.*))?")
_CHOICE = re.compile(r"  - (?:codec@)?(?P<key>[\w.]+): *(?P<value>[\w.]+)(?: *# *(?P<says>.*))?")
_NO_OPTION = re.compile(r"_\w+_|name|recipe")  # recipe: what the data set gives the options of the training
_COLUMN = 34
_FLAGS = {
    "--cfg job": "print the whole configuration, and run nothing",
    "--config-dir=FOLDER": "look for choices of your own in FOLDER too, as schedule/NAME.yaml",
    "--multirun": "run a sweep, such as seed=0,1,2",
    "--hydra-help": "the other flags of Hydra, which reads this command line",
}
_COMMANDS = {"config": "pipetrain", "plan": "python -m pipetrain.plan"}


def usage(conf: Path, name: str, words: Sequence[str]) -> str:
    """Return the help of the command whose file is `name`.yaml, with the options of the chosen groups."""
    chosen = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    config = (conf / "config.yaml").read_text()
    lines = [f"{_COMMANDS[name]} [OPTION=VALUE ...]", "", "# Choices"]
    groups = []
    for match in filter(None, map(_CHOICE.fullmatch, config.splitlines())):
        groups.append(group := match["key"])
        chosen.setdefault(group, match["value"])
        names = " ".join(sorted(path.stem for path in (conf / group.partition(".")[0]).glob("*.yaml")))
        lines.append(_line(f"{group}={match['value']}", f"{match['says']}: {names}"))
    if name != "config":
        lines += _options((conf / f"{name}.yaml").read_text())
    schedule = _texts(conf, "schedule", chosen["schedule"])  # sets options of the first level too
    lines += _options(config, given=dict(re.findall(r"^(\w+): *(\w+)", schedule, re.MULTILINE)))
    for group in groups:
        text, prefix = (schedule, "") if group == "schedule" else (_texts(conf, group, chosen[group]), group)
        options = [line for line in _options(text, prefix) if line.startswith(f"  {group}.")]
        lines += ["", f"# {group}={chosen[group]}", *options] if options and group != "experiment" else []
    return "\n".join([*lines, "", "# Flags", *(_line(*flag) for flag in _FLAGS.items())]) + "\n"


def _texts(conf: Path, group: str, choice: str) -> str:
    """Return what the files of a choice say; there may be several, as in [tensorboard,wandb]."""
    files = [conf / group.partition(".")[0] / f"{one}.yaml" for one in choice.strip("[]").split(",")]
    return "\n".join(file.read_text() for file in files if file.is_file())


def _options(text: str, prefix: str = "", given: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield a line for each option of a YAML file, and its headings. `given`: other values of some."""
    above: list[tuple[int, str]] = []
    heading, blank = "", True
    for line in text.partition("\nhydra:")[0].splitlines():
        if blank and line.startswith("# "):
            heading = line
        blank = not line
        if (match := _OPTION.fullmatch(line)) is None or match["key"] == "defaults":
            continue
        depth, value = len(match["indent"]), match["value"]
        above = [one for one in above if one[0] < depth] + [(depth, match["key"])]
        if not value or value == "{}" or any(_NO_OPTION.fullmatch(key) for _, key in above):
            continue
        key = ".".join(filter(None, (prefix, *(key for _, key in above))))
        value = (given or {}).get(key, value)
        if ("${" in value and not match["says"]) or value.startswith("{"):
            continue
        if heading:
            yield from ("", heading)
            heading = ""
        yield _line(f"{key}={'' if '${' in value else value}", match["says"] or "")


def _line(option: str, says: str) -> str:
    return f"  {option.ljust(_COLUMN)} {says}".rstrip()

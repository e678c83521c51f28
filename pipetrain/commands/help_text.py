"""What `--help` says: a line for each option, from the comments of the configuration's own files.

An option's comment stands in its own line of the YAML file, so that there is one text for both readers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from omegaconf import OmegaConf

from pipetrain.config.choices import conf_dir, names_of

_OPTION = re.compile(r"(?P<indent> *)(?P<key>\w+): *(?P<value>[^#]*?)(?: *# *(?P<says>.*))?")
_CHOICE = re.compile(r"  - (?:codec@)?(?P<key>[\w.]+): *(?P<value>[\w.]+)(?: *# *(?P<says>.*))?")
_NO_OPTION = re.compile(r"_\w+_|name|recipe")  # recipe: what the data set gives the options of the training
_OF_DATA = re.compile(r"\$\{data\.([\w.]+)\}")
_COLUMN, _WIDTH = 34, 100
_FLAGS = {
    "--cfg job": "print the whole configuration, and run nothing",
    "--config-dir=FOLDER": "look for choices of your own in FOLDER too, as schedule/NAME.yaml",
    "--multirun": "run a sweep, such as seed=0,1,2",
    "--completion": 'print what completes the command in bash and zsh: eval "$(pipetrain --completion)"',
    "--hydra-help": "the other flags of Hydra, which reads this command line",
}
_COMMANDS = {"config": "pipetrain", "plan": "python -m pipetrain.plan"}
_COMPLETION = """\
[ -z "$ZSH_VERSION" ] || { autoload -U +X bashcompinit && bashcompinit; }
_pipetrain() {
  local word="${COMP_LINE:0:$COMP_POINT}" words="%s"
  word="${word##* }"
  case "$word" in *=*) words="%s";; esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  # bash itself completes what follows "="
  if [ -z "$ZSH_VERSION" ] && [ "$word" != "${word#*=}" ]; then COMPREPLY=("${COMPREPLY[@]#*=}"); fi
}
complete -o nospace -o default -F _pipetrain pipetrain launch.sh
"""


def usage(name: str, words: Sequence[str]) -> str:
    """Return the help of the command whose file is `name`.yaml, with the options of the chosen groups."""
    chosen = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    lines = [f"{_COMMANDS[name]} [OPTION=VALUE ...]", "", "# Choices"]
    groups = _choices()
    for group, (value, says, names) in groups.items():
        chosen.setdefault(group, value)
        lines.append(_line(f"{group}={value}", f"{says}: {' '.join(names)}"))
    data = OmegaConf.create(_texts("data", chosen["data"]))
    if name != "config":
        lines += _options(_texts("", name), data)
    schedule = _texts("schedule", chosen["schedule"])  # sets options of the first level too
    lines += _options(
        _texts("", "config"), data, values=dict(re.findall(r"^(\w+): *(\w+)", schedule, re.MULTILINE))
    )
    for group in groups:
        text, prefix = (schedule, "") if group == "schedule" else (_texts(group, chosen[group]), group)
        options = [line for line in _options(text, data, prefix) if line.startswith(f"  {group}.")]
        lines += ["", f"# {group}={chosen[group]}", *options] if options and group != "experiment" else []
    return "\n".join([*lines, "", "# Flags", *(_line(*flag) for flag in _FLAGS.items())]) + "\n"


def completion() -> str:
    """Return what lets a shell complete options and choices; no Python runs at a Tab."""
    options = re.findall(r"^  (?:([\w.]+=)|(--\S+))", usage("config", []), re.MULTILINE)
    choices = [f"{group}={name}" for group, (_, _, names) in _choices().items() for name in names]
    return _COMPLETION % (" ".join(map("".join, options)), " ".join(choices))


def _choices() -> dict[str, tuple[str, str, list[str]]]:
    """Return each group's choice, what is said of it, and the names to choose from."""
    choices = filter(None, map(_CHOICE.fullmatch, _texts("", "config").splitlines()))
    return {
        choice["key"]: (choice["value"], choice["says"], names_of(choice["key"].partition(".")[0]))
        for choice in choices
    }


def _texts(group: str, choice: str) -> str:
    """Return what the files of a choice say; there may be several, as in [tensorboard,wandb]."""
    files = [conf_dir() / group.partition(".")[0] / f"{name}.yaml" for name in choice.strip("[]").split(",")]
    return "\n".join(file.read_text() for file in files if file.is_file())


def _options(
    text: str, data: Any, prefix: str = "", values: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield what is said of each option of a YAML file, and its headings.

    `data`: of the data set, which has the values of some; `values`: those of other options.
    """
    above: list[tuple[int, str]] = []
    heading, blank = "", True
    for line in text.partition("\nhydra:")[0].splitlines():
        if blank and line.startswith("# "):
            heading = line
        blank = not line
        if (match := _OPTION.fullmatch(line)) is None or match["key"] == "defaults":
            continue
        depth, value = len(match["indent"]), match["value"]
        above = [parent for parent in above if parent[0] < depth] + [(depth, match["key"])]
        if not value or value == "{}" or any(_NO_OPTION.fullmatch(key) for _, key in above):
            continue
        key = ".".join(filter(None, (prefix, *(key for _, key in above))))
        value = (values or {}).get(key, value)
        if ("${" in value and not match["says"]) or value.startswith("{"):
            continue
        if heading:
            yield from ("", heading)
            heading = ""
        value = _OF_DATA.sub(lambda key: str(OmegaConf.select(data, key[1], default="...")), value)
        yield _line(f"{key}={value.partition('${')[0]}{'...' * ('${' in value)}", match["says"] or "")


def _line(option: str, says: str) -> str:
    lines = wrap(says, _WIDTH - _COLUMN - 3, break_long_words=False, break_on_hyphens=False)
    beside = "" if len(option) > _COLUMN or not lines else lines.pop(0)
    return f"\n{' ' * (_COLUMN + 3)}".join([f"  {option.ljust(_COLUMN)} {beside}".rstrip(), *lines])

"""How the ranks of the command line start: together, or not at all, and with one sentence."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from pipetrain.commands import start as module
from pipetrain.commands.start import Start, as_json, from_json, refuse_few_layers, refuse_unnamed
from pipetrain.errors import ChannelError, ConfigError, Refused
from pipetrain.runtime.comm.collectives import World
from pipetrain.signals import Signals
from tests.support.cases import options_of
from tests.support.processes import DEADLINE_S, SMALL, ended, lines_of, running

# Alone


@pytest.fixture
def alone() -> Start:
    return Start(World(), ["seed=0"], Signals(0))


def test_alone_there_is_nobody_to_tell(alone):
    alone.attempt.send_delay(3.0)
    assert alone.exchange({"run": "a"}, 3.0) == {"run": "a"}
    alone.synchronize("get ready", {"data": "a"})
    alone.end()
    assert alone.run_dir is None
    with pytest.raises(ConfigError, match="too small") as refusal:
        alone.refuse(ConfigError("too small"))
    assert not isinstance(refusal.value, Refused)


def test_torchrun_starts_a_run_again_in_its_folder_which_nobody_else_can_name(tmp_path, monkeypatch):
    """Its own folder is this user's alone; to its store anybody may write who reaches its port."""
    folder, found = Path("runs", os.fsdecode(b"gr\xc3\xb6\xdfe")), []
    for attempt in range(2):
        (tmp_path / f"attempt_{attempt}" / "0").mkdir(parents=True)
        monkeypatch.setenv(
            "TORCHELASTIC_ERROR_FILE", str(tmp_path / f"attempt_{attempt}" / "0" / "error.json")
        )
        start = Start(World(), ["seed=0"], Signals(0))
        found.append(start.run_dir)
        start.remember(folder)
    assert found == [None, str(folder)]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")  # as with --log-dir=/dev/null
    start.remember(folder)
    assert start.run_dir is None


def test_what_takes_long_is_said_until_the_training_begins(alone, monkeypatch, caplog):
    monkeypatch.setattr(module, "SILENCE_S", 0.05)
    caplog.set_level(logging.INFO, logger="pipetrain")
    alone.doing = "read the data set"
    reminding = Thread(target=alone.remind, daemon=True)
    reminding.start()
    time.sleep(0.2)
    alone.trains.set()
    reminding.join(DEADLINE_S)
    assert not reminding.is_alive()
    said = {record.getMessage() for record in caplog.records}
    assert said == {"pipetrain: it takes time to read the data set"}


def test_a_refusing_rank_is_deaf_to_torchrun_before_the_others_may_leave(monkeypatch):
    """With twelve ranks on two cores the first that left had rank 0 ended before it said why."""
    monkeypatch.setattr(module, "this_attempt", lambda world: None)
    start, waited = Start(World(0, 2), [], Signals(0)), []
    start._ranks = SimpleNamespace(
        barrier_or_raise=lambda *_, **__: waited.append(start.signals.drained.is_set()),
        broadcast=lambda what, item: item,
    )
    with pytest.raises(Refused, match="too small"):
        start.refuse(Refused("too small"))
    assert waited == [True]


def test_a_refusal_is_heard_by_all_ranks_until_they_train(monkeypatch):
    def barrier_or_raise(doing: str, refusal: str, limit_s: float) -> None:
        raise {"too small": Refused, "too late": ChannelError}[refusal](f"rank 1: {refusal}")

    monkeypatch.setattr(module, "this_attempt", lambda world: None)
    start = Start(World(0, 2), [], Signals(0))
    start._ranks = SimpleNamespace(barrier_or_raise=barrier_or_raise)
    heard, alone = (start.as_refused(ConfigError(why), 1) for why in ("too small", "too late"))
    assert (type(heard), str(heard)) == (Refused, "rank 1: too small")
    assert (type(alone), str(alone)) == (ConfigError, "too late")
    start.trains.set()
    assert not isinstance(start.as_refused(ConfigError("too small"), 1), Refused)


def test_more_stages_than_layers_are_refused_by_the_configuration_alone():
    cfg = {"model": {"_target_": "pipetrain.models.mlp"}}
    refuse_few_layers(cfg, 6)
    with pytest.raises(ConfigError, match=r"stages=7 needs .*, but the model has 6: 0 hidden1"):
        refuse_few_layers(cfg, 7)
    refuse_few_layers({"model": {"_target_": "elsewhere.made"}}, 7)  # dear to build


# The options that rank 0 sends


def test_options_travel_as_json_with_any_keys():
    words = ["experiment=gpt", "+model.by={2: a, true: [{2.5: inf}], x: {}}", "warmup=0.25", "run_dir=here"]
    options = options_of(words)
    assert from_json(json.loads(json.dumps(as_json(options)))) == options
    assert json.loads(json.dumps(options["data"])) == options["data"]


def test_a_rank_calls_only_what_its_own_command_line_or_files_name(tmp_path):
    """Whoever reaches the ports of a run could send it options."""
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("_target_: mine.optim.Lion  # of my own\n")
    options = {"model": {"_target_": "my.Net"}, "optim": [{"inner": {"_target_": "mine.optim.Lion"}}]}
    for words in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"]):
        refuse_unnamed(options, ["model={_target_: my.Net}", *words])
        with pytest.raises(ConfigError, match=r"^rank 0 has my\.Net as a _target_, which neither the"):
            refuse_unnamed(options, ["model._target_=my.Net2", *words])
    refuse_unnamed(options_of(["experiment=unet", "optim=adamw", "codec.forward=int8"]), [])


# Ranks that are started one by one, as other launchers do


def start(
    folder: Path, *commands: Sequence[str], module: Sequence[str] = ("-m", "pipetrain")
) -> list[tuple[int, str]]:
    """Start a rank for each list of words; return (status, what was said) of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    with ExitStack() as left:
        for rank, words in enumerate(commands):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            world["TORCHELASTIC_RESTART_COUNT"] = 3 - rank  # each agent has its own
            variables = {name: str(value) for name, value in world.items()} | meeting
            command = [*module, *SMALL, "epochs=1", *words]
            processes.append(left.enter_context(running(folder, command, variables)))
        return [(process.wait() or 0, out) for process in processes for out in [ended(process)]]


SAME = "give all ranks the same arguments, code and files"


@pytest.mark.processes
def test_a_rank_with_another_command_line_is_named_once_and_all_end_alike(tmp_path):
    (status, said), other = start(tmp_path, ["seed=0"], ["seed=1"])
    (line,) = lines_of(said)
    assert re.fullmatch(r"pipetrain: rank 1 has command line=\[.*seed=1.\], and rank 0 has .*seed=0.*", line)
    assert line.endswith(f": {SAME}")
    assert (status, other) == (2, (2, ""))
    assert list(tmp_path.iterdir()) == []


OTHERWISE = """
import os, sys
from pipetrain import data
from pipetrain.commands import job, train
from pipetrain.errors import ConfigError

def cannot(*_):
    raise ConfigError("its disk is gone")

if os.environ["RANK"] == "1":
    {change}
train.main()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("job.load_data = cannot", "rank 1: its disk is gone"),
        ("data.Data.fingerprint = 'other'", 'rank 1 has data set="other", and rank 0 has "digits '),
    ],
)
def test_what_one_rank_alone_refuses_or_has_otherwise_is_said_by_rank_0(tmp_path, change, said):
    (status, out), other = start(tmp_path, [], [], module=("-c", OTHERWISE.format(change=change)))
    assert [line[: len("pipetrain: ") + len(said)] for line in lines_of(out)] == [f"pipetrain: {said}"]
    assert (status, other) == (2, (2, ""))
    assert list(tmp_path.iterdir()) == []


WITHOUT_HYDRA = """
import os, sys
if os.environ["RANK"] == "1":
    sys.modules["hydra"] = sys.modules["omegaconf"] = None
    os.environ["EPOCHS"] = "7"
from pipetrain.commands import train
train.main()
"""


@pytest.mark.processes
def test_rank_0_reads_the_command_line_for_all_the_data_set_that_it_falls_back_on_too(tmp_path, monkeypatch):
    """The other rank cannot import Hydra, and its environment is another."""
    monkeypatch.setenv("EPOCHS", "2")
    words = [
        "data=cifar10",
        "data.root=none",
        "data.source.url=http://127.0.0.1:9/",
        "epochs=${oc.env:EPOCHS}",
    ]
    words += ["+model.names={1: a}", "model._target_=tests.support.models.keyed", "run_dir=run"]
    (status, said), other = start(tmp_path, words, words, module=("-c", WITHOUT_HYDRA))
    assert (status, other) == (0, (0, "")), said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["data"], summary["epochs"], summary["updates"]) == ("digits", 2, 12)

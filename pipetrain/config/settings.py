"""The settings of a run: every option once, with its type, its default and the rule for its value.

`Settings.read` reads the keyword options of a program, `Settings.composed` the configuration of a command
line. Both refuse a wrong value by the same rule, in one sentence. (A library would not make this shorter: the
sentences are ours, and most rules are no types, such as "a strategy's name or a list of layers".)

What an option is for is said by the comment in its line of conf/, which `--help` shows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from pipetrain.codec import Codec, Codecs, Identity
from pipetrain.config.build import build_function, make_codec, make_correction
from pipetrain.config.placement import PLACEMENT, REPLICAS, places_of, processes
from pipetrain.config.rate import SHAPES, Rate, learning_rate
from pipetrain.correction import Correction
from pipetrain.errors import ConfigError
from pipetrain.model.specs import Size
from pipetrain.rules import (
    BOOL,
    BUFFERS,
    COUNT,
    LENGTHS,
    PATH,
    POSITIVE,
    SHARE,
    Rule,
    decoded,
    index_of,
    kept,
    number,
    one_of,
    whole,
)
from pipetrain.schedule.actions import BothWays, Placement, both_ways

MONTH_S = 30 * 24 * 3600
STRATEGIES = ("even", "params", "flops")
PROFILE = "profile"  # the strategy that measures
AUTO = "auto"
EXCEPT_LAST_STAGE = "except_last_stage"
RECOMPUTE = (AUTO, "never", EXCEPT_LAST_STAGE, "except_first_microbatch", "always", "selective")
"""The values of recompute=, beside a list of the modes of all stages."""


class Mode(StrEnum):
    """What a stage holds of a microbatch between its forward and its backward.

    NEVER: all that the backward needs. SELECTIVE: its inputs, and what is dear to make again. ALWAYS: its
    inputs alone. EXCEPT_FIRST_MICROBATCH: as ALWAYS, and of the first microbatch of each batch, whose
    backward comes first, as NEVER; torchgpipe's backwards come in the other order, so this is its
    `except_last`. A checkpoint has their numbers in this order.
    """

    NEVER = "never"
    SELECTIVE = "selective"
    ALWAYS = "always"
    EXCEPT_FIRST_MICROBATCH = "except_first_microbatch"


def modes_of(recompute: str | Sequence[str], stages: int) -> list[Mode]:
    """Return the mode of each stage for a value of recompute=; auto is never. Raises ConfigError."""
    if not isinstance(recompute, str):
        if len(recompute) != stages:
            raise ConfigError(
                f"recompute=[{','.join(recompute)}] has modes of {len(recompute)} stages, and there are "
                f"{stages}: give one for each, or one of {', '.join(RECOMPUTE)}"
            )
        return [Mode(mode) for mode in recompute]
    if recompute == EXCEPT_LAST_STAGE:
        return [Mode.ALWAYS] * (stages - 1) + [Mode.NEVER]
    return [Mode.NEVER if recompute == AUTO else Mode(recompute)] * stages


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(local_size: int) -> int:
    """Return how many threads each of the `local_size` processes of this machine should use."""
    return max(1, cores() // local_size)


def _path(key: str, value: Any) -> str:
    return str(PATH.convert(key, value))


def _dtype(key: str, value: Any) -> Any:
    name = str(value).removeprefix("torch.")
    return getattr(torch, kept(name, name in DTYPES))


def _partition(key: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [index_of(layer) for layer in value]
    if isinstance(value, Mapping):
        file = kept(value, list(value) == [PROFILE])[PROFILE]
        return kept(PROFILE, isinstance(file, str) and file != "")
    return kept(value, value in (*STRATEGIES, PROFILE))


def _recompute(key: str, value: Any) -> Any:
    if (
        value == "except_last"
    ):  # in 0.2 the last stage, in torchgpipe the microbatch whose backward comes first
        raise ConfigError(
            f"{key}=except_last has two meanings: choose {EXCEPT_LAST_STAGE}, by which the last stage saves "
            f"all, or {Mode.EXCEPT_FIRST_MICROBATCH}, torchgpipe's, by which all save all of the microbatch "
            "whose backward comes first"
        )
    if isinstance(value, str):
        return kept(value, value in RECOMPUTE)
    return [kept(mode, mode in [*Mode]) for mode in value]


def _trace(key: str, value: Any) -> Any:
    """Return of how many windows a trace is."""
    if isinstance(value, Mapping):
        return COUNT.convert(key, kept(value, list(value) == ["windows"])["windows"])
    return sys.maxsize if kept(value, isinstance(value, bool)) else 0


def _lr_schedule(key: str, value: Any) -> Any:
    """Return a shape's name, or the function of a mapping with `_target_`."""
    if isinstance(value, str):
        return kept(value, value in SHAPES)
    return build_function(key, kept(value, isinstance(value, Mapping) and "_target_" in value))


SEED = whole(0, 2**63 - 1)
SECONDS = number(f"a number of seconds above 0 and at most {MONTH_S}", lambda value: 0 < value <= MONTH_S)
DTYPES = ("float32", "float64")
DTYPE = Rule(f"one of {', '.join(DTYPES)}", _dtype)
SOURCE = Rule("auto, the folder of a checkpoint or of a run,", _path)
PARTITION = Rule(
    f"one of {', '.join((*STRATEGIES, PROFILE))}, the first layers of all stages but the first, such as [8], "
    f"or partition.profile=FILE of an earlier run",
    _partition,
)
FILE = Rule("", lambda key, value: value[PROFILE] if isinstance(value, Mapping) else None)  # of PARTITION
RECOMPUTED = Rule(
    f"one of {', '.join(RECOMPUTE)}, or the mode of each stage, such as [always,selective,never]", _recompute
)
LR_SCHEDULE = Rule(f"one of {', '.join(SHAPES)}, or lr_schedule._target_=FUNCTION", _lr_schedule)
TRACE = Rule("true or false; trace.windows=4 traces the first 4 windows", _trace)
GRAPHS = Rule("auto, true or false", lambda key, value: kept(value, value in (AUTO, True, False)))
UNLIKE_GRAPHS = "needs other passes than CUDA graphs have captured"
CODEC = Rule("a codec's name", make_codec)
CORRECTION = Rule("a correction's name, or several", make_correction)
_WRITTEN = ("dtype", "codec_forward", "codec_backward", "correction")  # their texts say all
MOST_THREADS = max(64, 8 * cores())  # more are probably a mistake


class Option(NamedTuple):
    """The rule for an option's value, its key in the configuration, and whether Pipeline takes it."""

    rule: Rule
    key: str  # "": its name
    null: bool
    pipeline: bool


def option(default: Any, rule: Rule, key: str = "", null: bool = False, pipeline: bool = True) -> Any:
    """Return the field of an option; it may be null where its default is, or with `null`."""
    return field(default=default, metadata={"option": Option(rule, key, null or default is None, pipeline)})


of_run = partial(option, pipeline=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one run, validated."""

    model: str = "model"  # its name, and that of the schedule
    schedule: str = "1f1b"
    ranks: int = 2
    lengths: tuple[int, ...] = ()  # the largest, once the first batch has come; where none differs, none
    mean_lengths: tuple[int, ...] = ()  # those of known batches that are nearest to the mean
    casts_weights: bool = True  # to dtype, and floating-point data; else they keep the dtypes that they have
    casts_data: bool = True

    stages: int | None = option(None, COUNT)
    replicas: int | str | list[int] | None = option(None, REPLICAS)  # auto: chosen with the plan
    placement: Placement | None = option(None, PLACEMENT)
    partition: str | list[int] = option("flops", PARTITION)
    profile: str | None = of_run(None, FILE, key="partition")  # for partition=profile; None: measure
    memory_limit: float | None = option(None, POSITIVE)  # GiB: of a stage if partition=profile, else a rank
    recompute: str | list[str] = option("auto", RECOMPUTED)  # a list: of the modes of all stages
    microbatches: int = option(4, COUNT)
    max_length: list[int] | None = option(None, LENGTHS)  # of the dimensions that differ between batches
    window: int | None = option(None, COUNT)
    buffer_size: int | list[int] = option(2, BUFFERS)  # a list: of activations, and of gradients
    timeout: float = option(300.0, SECONDS)
    codec_forward: Codec = option(Identity(), CODEC, key="codec.forward")
    codec_backward: Codec = option(Identity(), CODEC, key="codec.backward")
    correction: Correction = option(Correction(), CORRECTION)

    samples: int | None = of_run(64, COUNT, key="batch_size")  # None until the first batch has come
    epochs: int = of_run(1, COUNT)
    max_updates: int | None = of_run(None, COUNT)
    lr_schedule: str | Rate = of_run("constant", LR_SCHEDULE)
    warmup: float = of_run(0.0, SHARE)  # of all updates
    label_smoothing: float = of_run(0.0, SHARE)
    clip_grad_norm: float | None = option(None, POSITIVE)
    clip_grad_norm_over: str = option("auto", one_of("auto", "model", "stage"))
    batchnorm: str = option("microbatch", one_of("microbatch", "batch"))
    ema: float | None = option(None, SHARE)  # decay
    seed: int = option(0, SEED)
    weights: str | None = of_run(None, Rule(PATH.words, _path))
    build: str = of_run("whole", one_of("whole", "stages"))
    on_nan: str = option("stop", one_of("stop", "skip"))

    device: str = option("auto", one_of("auto", "cpu", "cuda"))
    dtype: torch.dtype = option(torch.float32, DTYPE)
    precision: str = option("fp32", one_of("fp32", "bf16"))
    memory_format: str = option("auto", one_of("auto", "contiguous", "channels_last"))
    cuda_graphs: bool | str = option(AUTO, GRAPHS)
    compile: bool = option(False, BOOL)
    threads: int | None = option(None, whole(1, MOST_THREADS))
    workers: int = of_run(0, whole(0, MOST_THREADS), key="data.workers")
    drop_last: bool = of_run(False, BOOL, key="data.drop_last")

    log_level: str = of_run("info", one_of("info", "warning", "error"))
    log_every: int = of_run(10, COUNT)
    trace: int = of_run(0, TRACE)  # windows to trace
    checkpoint_every: int | None = of_run(1, COUNT, key="checkpoint.every", null=True)
    checkpoint_unit: str = of_run("epochs", one_of("epochs", "updates"), key="checkpoint.unit")
    checkpoint_keep: int = of_run(2, COUNT, key="checkpoint.keep")
    resume: str | None = of_run(None, SOURCE)

    @classmethod
    def read(cls, values: Mapping[str, Any], ranks: int | None = None, **known: Any) -> Settings:
        """Return the settings of values by their names or keys; others have their defaults.

        `ranks`: the processes, None if not started. `known`: fields that are no options. Raises ConfigError.
        """
        settings = cls(**known).changed(values)
        return replace(
            settings, ranks=processes(settings.stages, settings.replicas, settings.placement, ranks)
        )

    @classmethod
    def composed(cls, cfg: Mapping[str, Any], schedule: str, ranks: int | None) -> Settings:
        """Return the settings of a configuration, read as `read` does. Raises ConfigError."""
        values = {option.key: value_at(cfg, option.key) for option in options().values()}
        model = str(value_at(cfg, "model._target_") or "model").rpartition(".")[2]
        return cls.read(values, ranks, model=model, schedule=schedule)

    def changed(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings with other values, by their names or keys. Raises ConfigError."""
        read = {}
        for name, option in options().items():
            if (key := option.key if option.key in values else name) in values:
                read[name] = option.rule.read(key, values[key], option.null)
        settings = replace(self, **read)
        for contradiction in _contradictions(settings):
            raise ConfigError(contradiction)
        return settings

    def shared(self) -> dict[str, Any]:
        """Return what is the same on all ranks: each may have its own threads, and its own patience."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        named |= {name: repr(named[name]) for name in _WRITTEN}
        return {name: value for name, value in named.items() if name not in ("threads", "timeout")}

    @property
    def places(self) -> Placement:
        """The ranks of each place in the schedule's program: one, or its replicas."""
        replicas = self.ranks if isinstance(self.replicas, str) else self.replicas  # auto: at least one place
        return self.placement or places_of(replicas or 1, self.ranks)

    @property
    def buffer_sizes(self) -> BothWays:
        """The buffer_size of activations, and that of gradients."""
        return both_ways(self.buffer_size)

    @property
    def codecs(self) -> Codecs:
        return Codecs(self.codec_forward, self.codec_backward)

    @property
    def data_dtype(self) -> torch.dtype | None:
        """What floating-point data become; None: they stay as they are."""
        return self.dtype if self.casts_data else None

    @property
    def weights_dtype(self) -> torch.dtype | None:
        """What weights and buffers become; None: they stay as they are."""
        return self.dtype if self.casts_weights else None

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu" and torch.cuda.is_available()

    @property
    def unlike_graphs(self) -> list[str]:
        """The options that need other passes than CUDA graphs capture."""
        chosen = {
            "compile": self.compile,
            "correction": self.correction.weighs,
            "batchnorm": self.batchnorm == "batch",
            "recompute": self.recompute not in (AUTO, "never"),
            "memory_limit": self.memory_limit is not None,
        }
        return [name for name, needs in chosen.items() if needs]

    @property
    def batch_size(self) -> int:
        assert self.samples is not None, "the size of a batch is known with the first one"
        return self.samples

    @property
    def full(self) -> Size:
        """The size of a full microbatch; some have 1 less if `microbatches` do not divide a batch."""
        return Size(self.batch_size, self.lengths).pieces(self.microbatches)[0]

    @property
    def timed(self) -> Size:
        """The size of a microbatch whose times are planned with: a full one of the mean lengths."""
        return replace(self.full, lengths=self.mean_lengths or self.lengths)

    def fitted_to(self, first: Size, mean_lengths: tuple[int, ...] = ()) -> Settings:
        """Return those for a loader whose first batch is of this size, rounded to even microbatches.

        `first`: with the largest lengths.
        """
        m = self.microbatches
        samples = max(m, first.samples // m * m)
        return replace(self, samples=samples, lengths=first.lengths, mean_lengths=mean_lengths)

    def updates(self, batches: int) -> int:
        """Return the number of updates of the whole training, of epochs of `batches` batches each."""
        return min(self.epochs * batches, self.max_updates or sys.maxsize)

    def rate(self, updates: int) -> Rate:
        """Return the learning rate as a fraction of its peak. Raises ConfigError for a wrong function."""
        return learning_rate(self.lr_schedule, self.warmup, updates)


@cache
def options() -> dict[str, Option]:
    """Return the options by the names of their fields."""
    by_name = {field.name: field.metadata["option"] for field in fields(Settings) if field.metadata}
    return {name: option._replace(key=option.key or name) for name, option in by_name.items()}


PIPELINE_OPTIONS = [name for name, option in options().items() if option.pipeline]
"""The names of the options that are keywords of Pipeline."""


def value_at(cfg: Any, key: str) -> Any:
    """Return the value of a key with dots; None where what should have parts has none."""
    for part in key.split("."):
        cfg = cfg.get(part) if isinstance(cfg, Mapping) else None
    return decoded(cfg)


def _contradictions(settings: Settings) -> Iterator[str]:
    """Yield what is wrong with values that are right each for itself."""
    if settings.samples is not None and settings.samples < settings.microbatches:
        yield (
            f"batch_size={settings.batch_size} cannot be cut into microbatches={settings.microbatches}: "
            f"choose fewer, or a larger batch_size"
        )
    if settings.precision == "bf16" and (not settings.casts_data or settings.dtype != torch.float32):
        yield "precision=bf16 needs weights of float32: give dtype=float32"
    if settings.cuda_graphs is True and not settings.on_gpu:
        yield "cuda_graphs needs a GPU: leave it out"
    joined = ["recompute"] * ("selective" in settings.recompute)
    joined += ["batchnorm"] * (settings.batchnorm == "batch")
    for option, why, others in (
        ("compile", "looks at single operations, which torch.compile joins", joined),
        ("cuda_graphs", UNLIKE_GRAPHS, settings.unlike_graphs),
    ):
        for other in others if getattr(settings, option) is True else ():
            yield f"{other}={getattr(settings, other)} {why}: leave {other} out, or {option}"
    if settings.replicas == AUTO and settings.partition != PROFILE:
        yield (
            f"replicas=auto weighs computing against messages and sums of gradients, which partition="
            f"{settings.partition} does not measure: set partition={PROFILE}, or give replicas a number"
        )
    if settings.build == "stages" and settings.partition == PROFILE and settings.profile is None:
        yield (
            f"partition={PROFILE} measures the whole model in each process, which build=stages does not "
            f"make: choose partition=flops, or give partition.profile=, a file measured where it fits"
        )
    if settings.weights is not None and settings.resume not in (None, "auto"):
        yield (
            f"resume={settings.resume} begins with the weights of that checkpoint, and weights="
            f"{settings.weights} with others: leave one of them out"
        )

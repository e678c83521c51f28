"""The settings of a run, and the rules for their values.

Each field of `Settings` is declared with a rule for its value. Values are checked here, once; an invalid one
is refused in one sentence.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from pipetrain.building import build, make_codec
from pipetrain.codec import Codecs
from pipetrain.errors import ConfigError
from pipetrain.plan.profile import PROFILE
from pipetrain.plan.recompute import RECOMPUTE, Mode
from pipetrain.rate import SHAPES, Rate, learning_rate

MONTH_S = 30 * 24 * 3600


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(local_size: int) -> int:
    """Return how many threads each of the `local_size` processes of this machine should use."""
    return max(1, cores() // local_size)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule for a value: in words, as a test, and a conversion of valid values."""

    words: str
    holds: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value


def _whole(low: int, most: float = math.inf) -> _Rule:
    words = f"a whole number of at least {low}" + (f" and at most {most}" if most < math.inf else "")
    return _Rule(words, lambda value: type(value) is int and low <= value <= most)


def _number(words: str, holds: Callable[[float], bool]) -> _Rule:
    """Rule a number; in words too, as ${oc.env:NAME} gives it."""

    def is_one(value: Any) -> bool:
        try:
            return type(value) in (int, float, str) and holds(float(value))
        except ValueError:
            return False

    return _Rule(words, is_one, float)


def _one_of(*names: str) -> _Rule:
    return _Rule(f"one of {', '.join(names)}", lambda value: value in names)


def _is_partition(value: Any) -> bool:
    if isinstance(value, dict):
        return list(value) == [PROFILE] and isinstance(value[PROFILE], str) and value[PROFILE] != ""
    return isinstance(value, str) or (isinstance(value, list) and all(type(cut) is int for cut in value))


def _is_recompute(value: Any) -> bool:
    if isinstance(value, str):
        return value in RECOMPUTE
    return isinstance(value, list) and all(mode in [*Mode] for mode in value)


def _is_trace(value: Any) -> bool:
    if isinstance(value, dict):
        return list(value) == ["windows"] and COUNT.holds(value["windows"])
    return isinstance(value, bool)


def _traced_windows(value: Any) -> int:
    if isinstance(value, dict):
        return int(value["windows"])
    return sys.maxsize if value else 0


def _is_lr_schedule(value: Any) -> bool:
    return value in SHAPES if isinstance(value, str) else isinstance(value, dict) and "_target_" in value


def _lr_schedule(value: Any) -> str | Rate:
    """Return a shape's name, or the function of a mapping with `_target_`. Raises ConfigError."""
    if isinstance(value, str):
        return value
    function: Rate = build(OmegaConf.create({"lr_schedule": {"_partial_": True, **value}}), "lr_schedule")
    if not callable(function):
        raise ConfigError(f"lr_schedule {value['_target_']} must be a function of the update number")
    return function


COUNT = _whole(1)
POSITIVE = _number("a finite number above 0", lambda value: 0 < value < math.inf)
SHARE = _number("a number from 0 to below 1", lambda value: 0 <= value < 1)
SECONDS = _number(f"a number of seconds above 0 and at most {MONTH_S}", lambda value: 0 < value <= MONTH_S)
BOOL = _Rule("true or false", lambda value: isinstance(value, bool))
DTYPE = replace(_one_of("float32", "float64"), read=lambda name: getattr(torch, name))
SOURCE = _Rule(
    "auto, the folder of a checkpoint or of a run,", lambda value: isinstance(value, str) and value != ""
)
WEIGHTS = _Rule("the path of a file or a folder", lambda value: isinstance(value, str) and value != "")
PARTITION = _Rule(
    "a strategy's name, a list of layer numbers such as [8], or partition.profile=FILE of an earlier run",
    _is_partition,
    lambda value: PROFILE if isinstance(value, dict) else value,
)
PROFILE_FILE = replace(PARTITION, read=lambda value: value[PROFILE] if isinstance(value, dict) else None)
RECOMPUTED = _Rule(
    f"one of {', '.join(RECOMPUTE)}, or the mode of each stage, such as [always,selective,never]",
    _is_recompute,
)
LR_SCHEDULE = _Rule(
    f"one of {', '.join(SHAPES)}, or lr_schedule._target_=FUNCTION", _is_lr_schedule, _lr_schedule
)
TRACE = _Rule("true or false; trace.windows=4 traces the first 4 windows", _is_trace, _traced_windows)
MOST_THREADS = max(64, 8 * cores())  # more are probably a mistake


@dataclass(frozen=True, slots=True)
class Settings:
    """The scalar settings of one run, validated.

    The value of an Annotated field obeys its rule. It is read from the key with the field's name, or the key
    after the rule, and may be null if the type includes None.
    """

    model: str
    schedule: str
    ranks: int
    codecs: Codecs
    partition: Annotated[str | list[int], PARTITION]
    profile: Annotated[str | None, PROFILE_FILE, "partition"]  # for partition=profile; None: measure
    memory_limit: Annotated[float | None, POSITIVE]  # GiB: of a stage if partition=profile, else of a rank
    recompute: Annotated[str | list[str], RECOMPUTED]  # a list: of the modes of all stages
    microbatches: Annotated[int, COUNT]
    window: Annotated[int | None, COUNT]
    buffer_size: Annotated[int, COUNT]
    timeout: Annotated[float, SECONDS]
    batch_size: Annotated[int, COUNT]
    epochs: Annotated[int, COUNT]
    lr_schedule: Annotated[str | Rate, LR_SCHEDULE]
    lr: Annotated[float, POSITIVE, "optim.lr"]
    warmup: Annotated[float, SHARE]  # of all updates
    label_smoothing: Annotated[float, SHARE]
    clip_grad_norm: Annotated[float | None, POSITIVE]
    clip_grad_norm_over: Annotated[str, _one_of("auto", "model", "stage")]
    batchnorm: Annotated[str, _one_of("microbatch", "batch")]
    ema: Annotated[float | None, SHARE]  # decay
    seed: Annotated[int, _whole(0, 2**63 - 1)]
    weights: Annotated[str | None, WEIGHTS]
    build: Annotated[str, _one_of("whole", "stages")]
    device: Annotated[str, _one_of("auto", "cpu", "cuda")]
    dtype: Annotated[torch.dtype, DTYPE]
    precision: Annotated[str, _one_of("fp32", "bf16")]
    memory_format: Annotated[str, _one_of("auto", "contiguous", "channels_last")]
    compile: Annotated[bool, BOOL]
    cuda_graphs: Annotated[bool, BOOL]
    threads: Annotated[int | None, _whole(1, MOST_THREADS)]
    workers: Annotated[int, _whole(0, MOST_THREADS), "data.workers"]
    drop_last: Annotated[bool, BOOL, "data.drop_last"]
    log_every: Annotated[int, COUNT]
    trace: Annotated[int, TRACE]  # windows to trace; 0 = none
    on_nan: Annotated[str, _one_of("stop", "skip")]
    checkpoint_every: Annotated[int | None, COUNT, "checkpoint.every"]
    checkpoint_unit: Annotated[str, _one_of("epochs", "updates"), "checkpoint.unit"]
    checkpoint_keep: Annotated[int, COUNT, "checkpoint.keep"]
    resume: Annotated[str | None, SOURCE]
    as_given: bool = False  # weights and data keep the dtypes that they have, from Python

    @property
    def data_dtype(self) -> torch.dtype | None:
        """What floating-point data become; None: they stay as they are."""
        return None if self.as_given else self.dtype

    @property
    def full(self) -> int:
        """The samples of a full microbatch; some have 1 less if `microbatches` do not divide a batch."""
        return -(-self.batch_size // self.microbatches)

    def rate(self, updates: int) -> Rate:
        """Return the learning rate as a fraction of `lr`. Raises ConfigError for a wrong function."""
        return learning_rate(self.lr_schedule, self.warmup, updates)


def read_settings(cfg: DictConfig, schedule: str, ranks: int | None) -> Settings:
    """Read and validate the settings; `ranks`: the processes, None if not started. Raises ConfigError."""
    stages = _read(cfg, "stages", COUNT, null=True)
    if ranks is not None and stages not in (None, ranks):
        raise ConfigError(
            f"stages={stages} needs {stages} processes and there are {ranks}; start torchrun with "
            f"--nproc_per_node={stages} (or NPROC={stages} ./launch.sh), or leave stages out"
        )
    values = {}
    for name, kind in get_type_hints(Settings, include_extras=True).items():
        if get_origin(kind) is Annotated:
            plain, rule, *keys = get_args(kind)
            values[name] = _read(cfg, keys[0] if keys else name, rule, type(None) in get_args(plain))
    settings = Settings(
        model=str(cfg.model.get("_target_", "model")).rpartition(".")[2],
        schedule=schedule,
        ranks=ranks or stages or 2,
        codecs=Codecs(make_codec(cfg, "forward"), make_codec(cfg, "backward")),
        **values,
    )
    if settings.batch_size < settings.microbatches:
        raise ConfigError(
            f"batch_size={settings.batch_size} cannot be cut into microbatches={settings.microbatches}: "
            f"choose fewer, or a larger batch_size"
        )
    if settings.precision == "bf16" and settings.dtype != torch.float32:
        raise ConfigError(f"precision=bf16 needs dtype=float32, for its weights; got dtype={cfg.dtype}")
    if settings.compile and "selective" in settings.recompute:
        raise ConfigError(
            "recompute=selective looks at each operation, and torch.compile joins them: choose "
            "recompute=always with compile=true, or compile=false"
        )
    if settings.compile and settings.batchnorm == "batch":
        raise ConfigError(
            "batchnorm=batch looks at each BatchNorm, which torch.compile joins with others: choose "
            "batchnorm=microbatch with compile=true, or compile=false"
        )
    if settings.cuda_graphs:
        _refuse_graphs(settings)
    if settings.build == "stages" and settings.partition == PROFILE and settings.profile is None:
        raise ConfigError(
            f"partition={PROFILE} measures the whole model in each process, which build=stages does not "
            f"make: choose partition=flops, or give partition.profile=, a file measured where it fits"
        )
    if settings.weights is not None and settings.resume not in (None, "auto"):
        raise ConfigError(
            f"resume={settings.resume} begins with the weights of that checkpoint, and weights="
            f"{settings.weights} with others: leave one of them out"
        )
    return settings


def as_given(settings: Settings) -> Settings:
    """Return settings by which weights and data keep their dtypes. Raises ConfigError for precision=bf16."""
    if settings.precision == "bf16":
        raise ConfigError(
            "precision=bf16 needs float32 weights, and the parameters of the model have other dtypes: give "
            "dtype=torch.float32"
        )
    return replace(settings, as_given=True)


def _refuse_graphs(settings: Settings) -> None:
    """Refuse options that look at numbers, or run other passes than were captured. Raises ConfigError."""
    if settings.device == "cpu" or not torch.cuda.is_available():
        raise ConfigError("cuda_graphs=true needs a GPU: set cuda_graphs=false")
    for option, other, way in (
        ("compile", settings.compile, "false"),
        ("on_nan", settings.on_nan == "skip", "stop"),
        ("batchnorm", settings.batchnorm == "batch", "microbatch"),
        ("recompute", settings.recompute not in ("auto", "never"), "never"),
        ("memory_limit", settings.memory_limit is not None, "null"),
    ):
        if other:
            raise ConfigError(
                f"cuda_graphs=true captures each pass once, and {option}={getattr(settings, option)} would "
                f"have others: set {option}={way}, or cuda_graphs=false"
            )


def whole_number(cfg: DictConfig, key: str, low: int, optional: bool = False) -> int | None:
    """Return an integer of at least `low`, or None where `optional`. Raises ConfigError."""
    number: int | None = _read(cfg, key, _whole(low), null=optional)
    return number


def _read(cfg: DictConfig, key: str, rule: _Rule, null: bool) -> Any:
    """Return a key's value if it obeys a rule, or None where `null`. Raises ConfigError."""
    value = OmegaConf.select(cfg, key)
    if value is None and null:
        return None
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value, resolve=True)
    if not rule.holds(value):
        if isinstance(value, list):
            value = f"[{','.join(map(str, value))}]"
        raise ConfigError(f"{key}={value} must be {rule.words}{' or null' if null else ''}")
    return rule.read(value)

"""The configuration as the program reads it: where it lies, what it may say, and who refuses what it may not.

Validated here, at the edge, in one sentence a mistake; trusted everywhere else.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from pipetrain.building import make_codec
from pipetrain.codec import Codecs
from pipetrain.errors import ConfigError
from pipetrain.partition.profile import PROFILE
from pipetrain.rate import Rate, learning_rate

DTYPES = {"float32": torch.float32, "float64": torch.float64}
PRECISIONS = ("fp32", "bf16")
CHECKPOINT_UNITS = ("epochs", "updates")
MEMORY_FORMATS = ("auto", "contiguous", "channels_last")
MONTH_S = 30 * 24 * 3600
DEVICES = ("auto", "cpu", "cuda")


def _name_of(target: str) -> str:
    """Return the last part of a dotted name: what `_target_` is called."""
    return str(target).rsplit(".", 1)[-1]


OmegaConf.register_new_resolver("name_of", _name_of, replace=True)


def conf_dir() -> Path:
    """Return the folder of the YAML files: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


@dataclass(frozen=True, slots=True)
class Settings:
    """The scalar settings of one run, validated."""

    model: str
    schedule: str
    ranks: int
    partition: str | list[int]
    profile: str | None  # the file for partition=profile; None: measure
    memory_limit: float | None  # GiB a stage, for partition=profile
    microbatches: int
    window: int | None
    buffer_size: int
    timeout: float
    batch_size: int
    epochs: int
    lr_schedule: str
    lr: float
    warmup: float
    label_smoothing: float
    seed: int
    device: str
    dtype: torch.dtype
    precision: str
    memory_format: str
    compile: bool
    threads: int | None
    workers: int
    drop_last: bool
    trace: int  # windows to trace; 0 = none
    on_nan: str
    checkpoint_every: int | None
    checkpoint_unit: str
    checkpoint_keep: int
    resume: str | None
    codecs: Codecs

    def rate(self, updates: int) -> Rate:
        """Return the learning rate over a run of so many updates."""
        return learning_rate(self.lr_schedule, self.lr, self.warmup, updates)


def read_settings(cfg: DictConfig, schedule: str, ranks: int | None) -> Settings:
    """Read and validate the scalars. `ranks`: how many processes there are, None where none are started.

    Raises ConfigError for the first value that cannot be.
    """
    stages = whole_number(cfg, "stages", 1, optional=True)
    if ranks is not None and stages not in (None, ranks):
        raise ConfigError(
            f"stages={stages} needs {stages} processes and there are {ranks}; start torchrun with "
            f"--nproc_per_node={stages} (or NPROC={stages} ./launch.sh), or leave stages out"
        )
    partition, profile = _partition(cfg)
    settings = Settings(
        model=_name_of(str(cfg.model.get("_target_", "model"))),
        schedule=schedule,
        ranks=ranks or stages or 2,
        partition=partition,
        profile=profile,
        memory_limit=None if cfg.memory_limit is None else _number(cfg, "memory_limit", above=0),
        microbatches=_at_least(cfg, "microbatches", 1),
        window=whole_number(cfg, "window", 1, optional=True),
        buffer_size=_at_least(cfg, "buffer_size", 1),
        timeout=_number(cfg, "timeout", above=0, most=MONTH_S),
        batch_size=_at_least(cfg, "batch_size", 1),
        epochs=_at_least(cfg, "epochs", 1),
        lr_schedule=str(cfg.lr_schedule),
        lr=_number(cfg, "optim.lr", above=0),
        warmup=_number(cfg, "warmup"),
        label_smoothing=_number(cfg, "label_smoothing"),
        seed=_at_least(cfg, "seed", 0, most=2**63 - 1),
        device=_one_of(cfg, "device", DEVICES),
        dtype=DTYPES[_one_of(cfg, "dtype", tuple(DTYPES))],
        precision=_one_of(cfg, "precision", PRECISIONS),
        memory_format=_one_of(cfg, "memory_format", MEMORY_FORMATS),
        compile=_yes_or_no(cfg, "compile"),
        threads=whole_number(cfg, "threads", 1, optional=True, most=_most_threads()),
        workers=_at_least(cfg, "data.workers", 0, most=_most_threads()),
        drop_last=_yes_or_no(cfg, "data.drop_last"),
        trace=_trace(cfg),
        on_nan=_one_of(cfg, "on_nan", ("stop", "skip")),
        checkpoint_every=whole_number(cfg, "checkpoint.every", 1, optional=True),
        checkpoint_unit=_one_of(cfg, "checkpoint.unit", CHECKPOINT_UNITS),
        checkpoint_keep=_at_least(cfg, "checkpoint.keep", 1),
        resume=_resume(cfg),
        codecs=Codecs(make_codec(cfg, "forward"), make_codec(cfg, "backward")),
    )
    if settings.batch_size % settings.microbatches:
        raise ConfigError(
            f"microbatches={settings.microbatches} does not divide batch_size={settings.batch_size}; "
            f"choose a divisor of it, or another batch_size"
        )
    if settings.precision == "bf16" and settings.dtype != torch.float32:
        raise ConfigError(f"precision=bf16 needs dtype=float32, for its weights; got dtype={cfg.dtype}")
    if settings.memory_limit is not None and settings.partition != PROFILE:
        raise ConfigError(
            f"memory_limit={settings.memory_limit:g} needs to know what a stage holds: choose "
            f"partition={PROFILE} with it, or leave it out"
        )
    if not 0 <= settings.label_smoothing < 1:
        raise ConfigError(f"label_smoothing={settings.label_smoothing:g} must be from 0 to below 1")
    settings.rate(1)
    return settings


def whole_number(
    cfg: DictConfig, key: str, low: int, optional: bool = False, most: float = float("inf")
) -> int | None:
    """Return a whole number from `low` to `most`, or null where `optional`; or raise ConfigError."""
    value = OmegaConf.select(cfg, key)
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        also = " or null" if optional else ""
        raise ConfigError(f"{key}={value} must be a whole number of at least {low}{also}")
    if value > most:
        raise ConfigError(f"{key}={value} must be at most {most}")
    return value


def _at_least(cfg: DictConfig, key: str, low: int, most: float = float("inf")) -> int:
    value = whole_number(cfg, key, low, most=most)
    assert value is not None
    return value


def _number(
    cfg: DictConfig, key: str, above: float = float("-inf"), most: float = sys.float_info.max
) -> float:
    value = OmegaConf.select(cfg, key)
    try:
        number = float("" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key}={value} must be a number") from None
    if not above < number <= most:
        raise ConfigError(f"{key}={value} must be a finite number above {above:g}, and at most {most:g}")
    return number


def _one_of(cfg: DictConfig, key: str, choices: tuple[str, ...]) -> str:
    value = str(OmegaConf.select(cfg, key))
    if value not in choices:
        raise ConfigError(f"{key}={value} is unknown; choose one of {', '.join(choices)}")
    return value


def _yes_or_no(cfg: DictConfig, key: str) -> bool:
    value = OmegaConf.select(cfg, key)
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value} must be true or false")
    return value


def _resume(cfg: DictConfig) -> str | None:
    if cfg.resume is None or (isinstance(cfg.resume, str) and cfg.resume):
        return cfg.resume
    raise ConfigError(f"resume={cfg.resume} must be auto or the folder of a checkpoint or a run")


def _partition(cfg: DictConfig) -> tuple[str | list[int], str | None]:
    """Return the strategy or the cuts, and the file of `partition.profile=`."""
    value = cfg.partition
    if isinstance(value, str):
        return value, None
    if isinstance(value, ListConfig) and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return list(value), None
    if isinstance(value, DictConfig) and list(value) == [PROFILE]:
        if not isinstance(value[PROFILE], str) or not value[PROFILE]:
            raise ConfigError(f"partition.profile={value[PROFILE]} must name the profile.json of a run")
        return PROFILE, value[PROFILE]
    raise ConfigError(f"partition={value} must be a strategy's name or a list of layer numbers such as [8]")


def _trace(cfg: DictConfig) -> int:
    """Return how many windows to trace; all is more than there ever are."""
    value = cfg.trace
    if isinstance(value, bool):
        return sys.maxsize if value else 0
    if isinstance(value, DictConfig) and list(value) == ["windows"]:
        return _at_least(cfg, "trace.windows", 1)
    raise ConfigError(f"trace={value} must be true or false; trace.windows=4 traces the first 4 windows")


def share_of_cores(local_size: int) -> int:
    """Return how many threads each of the processes of this machine should use."""
    return max(1, cores() // local_size)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _most_threads() -> int:
    """Return how many threads, or processes, are still likely to be meant."""
    return max(64, 8 * cores())

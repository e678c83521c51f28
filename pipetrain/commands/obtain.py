"""The data set of a command line, or the one that it falls back on."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from omegaconf import DictConfig, OmegaConf

from pipetrain.commands.cli import values_of
from pipetrain.config.choices import chosen, conf_dir
from pipetrain.data import Data, DataMissing, load_data

CARRIED_OVER = ("workers", "drop_last", "train_limit", "test_limit")  # options kept for a fallback data set
log = logging.getLogger("pipetrain")


def obtain_data(cfg: DictConfig, dtype: torch.dtype) -> tuple[DictConfig, Data]:
    """Load the data set, or the one of `data.fallback` if it is not available. Raises ConfigError.

    Returns the configuration with the data set used, whose recipe replaces values not set by hand, and the
    data.
    """
    fallback = cfg.data.get("fallback")
    if fallback is not None:
        chosen("data.fallback", "data", fallback)  # refuses another name
    try:
        return cfg, load_data(values_of(cfg.data), dtype)
    except DataMissing as error:
        if fallback in (None, cfg.data.name):
            raise
        note = f"{error}; using {fallback} instead"
    log.warning("pipetrain: %s", note)
    cfg = with_fallback(cfg)
    return cfg, replace(load_data(values_of(cfg.data), dtype), note=note)


def with_fallback(cfg: DictConfig) -> DictConfig:
    """Return the configuration with the data set of its `data.fallback`."""
    cfg = cfg.copy()
    taken = OmegaConf.load(conf_dir() / "data" / f"{cfg.data.fallback}.yaml")
    for key in CARRIED_OVER:
        OmegaConf.update(taken, key, cfg.data[key])
    cfg.data = taken
    return cfg

"""What a name may mean that is none of ours: as it is spelt, by its words, or by those of other tools."""

from __future__ import annotations

import pytest

from pipetrain.config.choices import nearest

NAMES = [
    "batch_size",
    "batchnorm",
    "epochs",
    "max_updates",
    "microbatches",
    "stages",
    "device",
    "precision",
    "log_every",
]
NAMES += [
    "optim",
    "optim.lr",
    "optim.weight_decay",
    "lr_schedule",
    "data",
    "data.workers",
    "run_dir",
    "warmup",
    "seed",
]
NAMES += ["clip_grad_norm", "clip_grad_norm_over", "checkpoint.every", "checkpoint.keep", "log_level"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("batchsize", "batch_size"),  # as it is spelt
        ("epoch", "epochs"),
        ("precison", "precision"),
        ("log_evry", "log_every"),
        ("num-epochs", "epochs"),  # by its words
        ("lr", "optim.lr"),
        ("per_device_train_batch_size", "batch_size"),
        ("weight-decay", "optim.weight_decay"),
        ("num_workers", "data.workers"),
        ("warmup_steps", "warmup"),
        ("random_seed", "seed"),
        ("learning_rate", "optim.lr"),  # by those of other tools
        ("lr_scheduler_type", "lr_schedule"),
        ("gradient_accumulation_steps", "microbatches"),
        ("max_steps", "max_updates"),
        ("gradient_clip_val", "clip_grad_norm"),
        ("gpus", "stages"),
        ("world_size", "stages"),
        ("accelerator", "device"),
        ("fp16", "precision"),
        ("output_dir", "run_dir"),
        ("optimizer", "optim"),
        ("dataset", "data"),
        ("save_every", "checkpoint.every"),
        ("logging_steps", "log_every log_level max_updates"),
        ("patience", ""),
    ],
)
def test_a_name_means_that_which_has_its_words(typed, meant):
    assert " ".join(nearest(typed, NAMES)) == meant


def test_what_is_given_may_be_a_name_in_one_s_own_words():
    assert nearest("optim", ["loss", "optimizer"]) == ["optimizer"]
    assert nearest("criterion", ["loss", "optimizer"]) == ["loss"]

"""Tasks: the loss, the weights of its targets, and the metrics; tried before the start.

A task of your own is a subclass of Task, or a loss function with metrics; see conf/task/.
"""

from pipetrain.tasks.metrics import Accuracy, Mean, MeanIoU, Metric, Perplexity, SquaredError
from pipetrain.tasks.task import (
    IGNORED,
    Classification,
    LanguageModelling,
    LossFunction,
    ModelLoss,
    Regression,
    Segmentation,
    Task,
    WeightFunction,
    counted_for,
)

__all__ = [
    "IGNORED",
    "Accuracy",
    "Classification",
    "LanguageModelling",
    "LossFunction",
    "Mean",
    "MeanIoU",
    "Metric",
    "ModelLoss",
    "Perplexity",
    "Regression",
    "Segmentation",
    "SquaredError",
    "Task",
    "WeightFunction",
    "counted_for",
]

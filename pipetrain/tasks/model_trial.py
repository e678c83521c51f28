"""Tries the loss of a model that computes it itself, by its last layer with made-up inputs.

What its labels count for cannot be read from the model: a causal language model leaves out the first of each
sequence, others do not. Wrong weights would train otherwise than one process does, so the loss of a batch,
and its gradients, must be those of its parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipetrain.errors import ConfigError, TrainingStopped, one_line
from pipetrain.network.network import INPUT, Made, Part, evaluating
from pipetrain.network.values import Value, ValueSpec, as_tuple
from pipetrain.tasks.task import IGNORED, ModelLoss
from pipetrain.tasks.trial import few, part_of, prove_sum


class ModelTrial:
    """Tries a task on the rank of the last stage. `part`: its layers.

    `example`: of the model's inputs; `outputs`: what it returns; `microbatches`: of a batch.
    """

    def __init__(
        self,
        task: ModelLoss,
        example: ValueSpec,
        outputs: ValueSpec,
        microbatches: int,
        part: Part,
        device: torch.device,
    ) -> None:
        layer = part.last_layer()
        if layer is None:
            raise ConfigError(
                "an nn.Sequential takes no labels beside its inputs: give a loss= of outputs and targets, or "
                "a model of another class that takes them by name"
            )
        names = example.names or ()
        for label in task.labels:
            if label not in names:
                raise ConfigError(
                    f"the model's inputs are {', '.join(names) or 'without names'}, and {label} is not among "
                    f"them: name the labels, by targets= or on the command line task.labels="
                )
        self._task = task
        self._outputs = outputs
        self._microbatches = microbatches
        self._part = part
        self._device = device
        self._layer = layer
        numbers = [names.index(label) for label in task.labels]
        self._labels = {Made(INPUT, number): example.specs[number] for number in numbers}
        self._filled = 0  # with what whole numbers are made up

    def settle(self) -> None:
        """Find what the labels of sequences count for. Raises ConfigError if none of the weights is right."""
        first, *others = (torch.zeros((2, *spec.shape), dtype=spec.dtype) for spec in self._labels.values())
        if len(self._task.weights) == 1 or first.is_floating_point() or first.dim() < 2 or first.shape[1] < 2:
            return
        first[:, 2:] = first[1, 0] = IGNORED  # the first label of the first sequence counts, or does not
        wanted = (first, *others) if others else first
        refused: Exception
        for filled in (0, 1):
            self._filled = filled
            for weight in self._task.weights:
                try:
                    if self._loss(self._made_up(2), wanted).isfinite():
                        prove_sum("the model", self._loss, weight, self._made_up(2), wanted, self._device)
                        self._task.weights = [weight]
                        return
                    refused = ValueError("it is not finite")
                except Exception as error:  # the model's code may raise anything
                    refused = error
        if self._microbatches == 1:  # nothing is added up
            return
        raise ConfigError(
            f"the loss that the model computes is no mean over labels that are not {IGNORED}, nor over those "
            f"after the first of each sequence: give weight=, a function of the labels that says what they "
            f"count for ({one_line(refused)})"
        )

    def prove(self, targets: Value) -> None:
        """Try a batch's targets, in host memory. Raises TrainingStopped."""
        n = few(self._outputs, targets)
        wanted = part_of(targets, 0, n)
        try:
            prove_sum("the model", self._loss, self._task.weight, self._made_up(n), wanted, self._device)
        except ConfigError as error:
            raise TrainingStopped(str(error)) from error

    def _made_up(self, samples: int) -> tuple[Tensor, ...]:
        """Return made-up values of what the layer takes beside labels, as far as it is by the sample."""
        others = (value for value in self._layer.takes if value not in self._labels)
        made = tuple(self._tensor(value, samples) for value in others if self._is_varied(value))
        return made or (torch.zeros(samples),)

    def _is_varied(self, value: Made) -> bool:
        one, two = (self._layer.spec(value, samples).shape for samples in (2, 3))
        return one != two

    def _tensor(self, value: Made, samples: int) -> Tensor:
        spec = self._layer.spec(value, samples)
        if spec.dtype.is_floating_point:
            generator = torch.Generator().manual_seed(value.layer * 1000 + value.number + 2000)
            return torch.rand(spec.shape, generator=generator).to(self._device, spec.dtype)
        return torch.full(spec.shape, self._filled, dtype=spec.dtype, device=self._device)

    def _loss(self, given: Value, wanted: Value) -> Tensor:
        labels, varied = dict(zip(self._labels, as_tuple(wanted), strict=True)), iter(as_tuple(given))
        tensors = []
        for value in self._layer.takes:
            if value in labels:
                tensors.append(labels[value].to(self._device))
            elif self._is_varied(value):
                tensors.append(next(varied))
            else:
                tensors.append(self._tensor(value, 1))
        with evaluating(self._part), torch.enable_grad():
            return self._task.loss(self._layer.run(tensors), wanted)

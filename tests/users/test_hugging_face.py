"""Hugging Face as it is used: a dict a batch with the labels in it, and the loss from the model.

The losses of transformers' language models are float32, whatever the model is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from pipetrain import Pipeline
from pipetrain.data import Data
from pipetrain.data.user_data import as_split
from pipetrain.tasks import Accuracy
from tests.support import model_zoo
from tests.support.cases import Case, options_of, prepare
from tests.support.parity import evaluated, plainly
from tests.support.thread_ranks import run_in_threads
from tests.users import programs

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

IGNORED = -100
STILL: dict[str, dict[str, float]] = {
    "gpt2": {"n_layer": 1, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "bert": {"num_hidden_layers": 1, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
}
TOLERANCE = {"gpt2": 1e-6, "bert": 1e-12}


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = getattr(model_zoo, f"tiny_{name}")(transformers, **STILL[name])
    return made.double().train()


def rows(n: int, classes: bool) -> list[dict[str, Any]]:
    """Texts of 2 to 8 tokens, as a Trainer's data set gives them; in the first two no label counts."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, ids in enumerate(torch.randint(1, 50, (n, 8), generator=generator).tolist()):
        known = 0 if number < 2 else 2 + 3 * number % 7
        mask = [int(place < max(2, known)) for place in range(8)]
        labels = [token if place < known else IGNORED for place, token in enumerate(ids)]
        row = {"input_ids": ids, "attention_mask": mask}
        made.append(row | ({"label": number % 2} if classes else {"labels": labels}))
    return made


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{number}": number for number in range(1, 50)} | {"[PAD]": 0, "[UNK]": 50}
    plain = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]")


def batches(name: str) -> list[Any]:
    """What both collators return; that for language models pads to a batch's longest text, and masks that."""
    collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    texts = [{"input_ids": row["input_ids"][: 2 + 3 * n % 7]} for n, row in enumerate(rows(8, True))]
    ways = [(rows(16, name == "bert"), transformers.default_data_collator), (texts, collate)]
    loaders = [
        DataLoader(datasets.Dataset.from_list(data), batch_size=len(data) // 2, collate_fn=way)
        for data, way in (ways[:1] if name == "bert" else ways)
    ]
    return [batch for loader in loaders for batch in loader]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch)["loss"]


def plain(chosen: nn.Module, batches: Any) -> list[float]:
    return plainly(chosen, sgd(chosen.parameters()), loss_of, batches)


def mean(losses: list[float], labels: list[Tensor]) -> float:
    weights = [int((each != IGNORED).sum()) for each in labels]
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)


def trained(name: str, schedule: str) -> tuple[list[float], dict[str, float], dict[str, float]]:
    metrics = [Accuracy()] if name == "bert" else ()
    options: dict[str, Any] = {"microbatches": 4, "metrics": metrics, "max_length": 8}
    with Pipeline(model(name), "model", sgd, schedule, **options) as pipe:
        mine = batches(name) if not pipe.rank else None
        losses = list(pipe.train(mine))
        losses.append(pipe.step(mine[0] if mine else None))
        sums = {name: float(t.double().sum()) for name, t in pipe.state_dict().items()}
        return losses, pipe.evaluate(mine), sums


@pytest.mark.parametrize(("name", "schedule"), [("gpt2", "zb_h1"), ("bert", "1f1b")])
def test_a_model_that_computes_its_loss_trains_as_in_one_process(ranks, name, schedule):
    chosen, given, near = model(name), batches(name), TOLERANCE[name]
    wanted = plain(chosen, [*given, given[0]])
    labels = [batch["labels"] if name == "bert" else batch["labels"][:, 1:] for batch in given]
    wanted_loss = mean(evaluated(chosen, loss_of, given), labels)
    told = ranks(trained, name, schedule)
    for losses, test, _ in told:
        assert losses == pytest.approx(wanted, abs=near)
        assert test["loss"] == pytest.approx(wanted_loss, abs=near)
    if name == "bert":
        with torch.no_grad():
            right = [chosen.eval()(**b).logits.argmax(-1) == b["labels"] for b in given]
        assert told[0][1]["acc"] == pytest.approx(torch.cat(right).double().mean().item())
    sums = {key: float(t.double().sum()) for key, t in chosen.state_dict().items()}
    assert told[0][2] == pytest.approx(sums, abs=10 * near)


class Summing(nn.Module):
    """Computes a loss, which may be none, or no mean over its labels."""

    def __init__(self, kind: str = "mean") -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        if self.kind == "none":
            return {"logits": logits}
        loss = functional.cross_entropy(  # of float32 under autocast, as in transformers
            logits.to(self.embed.weight.dtype).flatten(0, 1),
            labels.flatten(),
            ignore_index=0 if self.kind == "zero" else IGNORED,
            reduction="sum" if self.kind == "sum" else "mean",
        )
        return {"loss": loss, "logits": logits}


def summing(kind: str = "mean") -> Summing:
    torch.manual_seed(0)
    return Summing(kind)


REFUSED = {
    "none": "the model returns no loss, one number as `loss` or first of its outputs",
    "sum": "of 4 samples of the first batch the loss differs by 56, of 112, between the batch and its micro",
    "without": "batch 0 has no labels: targets= can name input_ids",
}


def test_a_loss_that_microbatches_do_not_add_up_to_is_refused_on_both_ranks(ranks):
    for kind, says in REFUSED.items():
        names = ["input_ids"] if kind == "without" else ["input_ids", "labels"]
        batch = dict.fromkeys(names, torch.ones(4, 6, dtype=torch.int64))
        for _, error in ranks(partial(programs.trained, microbatches=2), summing(kind), "model", [batch]):
            assert says in error


def not_zero(labels: Tensor) -> Tensor:
    return (labels != 0).sum()


def zeros() -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    made = []
    for _ in range(3):
        x = torch.randint(1, 50, (8, 6))
        y = torch.where(torch.rand(8, 6) < torch.linspace(0, 0.8, 8)[:, None], 0, x)
        made.append({"input_ids": x, "labels": y})
    return made


def test_labels_that_the_model_s_cross_entropy_ignores_do_not_count_and_a_weight_may_say_so_too(ranks):
    wanted = plainly(chosen := summing("zero").double(), programs.sgd(chosen.parameters()), loss_of, zeros())
    for precision, weight, model, near in [
        ("fp32", None, summing("zero").double(), 1e-12),
        ("fp32", not_zero, summing("zero").double(), 1e-12),
        ("bf16", None, summing("zero"), 1e-2),
    ]:
        weighted = partial(programs.trained, microbatches=4, weight=weight, precision=precision)
        told = ranks(weighted, model, "model", zeros())
        assert told == [(pytest.approx(wanted, abs=near), "")] * 2


def test_the_command_line_trains_it_on_columns_of_a_data_set():
    columns: Any = {"inputs": {name: name for name in ("input_ids", "labels")}, "targets": "labels"}
    made = as_split(datasets.Dataset.from_list(rows(24, False)), "data.train", columns)
    data = Data("custom", made, made.first(8))
    words = [
        "data=custom", "task=model", f"model._target_={__name__}.summing", "optim=sgd", "optim.lr=0.1",
        "optim.momentum=0", "optim.weight_decay=0", "lr_schedule=constant", "batch_size=8", "microbatches=4",
        "epochs=1", "dtype=float64", "device=cpu",
    ]  # fmt: skip
    runs = [prepare(options_of(words), "1f1b", 2, data) for _ in range(2)]
    state, (figures,) = run_in_threads(Case("1f1b", 2), runs=runs)
    chosen = summing().double()
    given = [made.inputs(torch.cat(batch), None) for batch in runs[0].sampler.epoch(0)]
    losses = plain(chosen, given)
    assert figures.trained["loss"] == pytest.approx(mean(losses, [batch["labels"] for batch in given]))
    for name, tensor in chosen.named_parameters():
        torch.testing.assert_close(state[name], tensor.detach(), rtol=0, atol=1e-12)

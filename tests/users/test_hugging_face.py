"""Hugging Face as it is used: a dict a batch with the labels in it, and the loss from the model.

The losses of transformers' language models are float32, whatever the model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from pipetrain import Pipeline
from pipetrain.data import Data
from pipetrain.data.dataset import as_split
from pipetrain.tasks import Accuracy
from tests.support import hugging_face
from tests.support.cases import Case, config, run_in_threads
from tests.support.plain import plainly
from tests.support.runs import prepare

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

LENGTH, IGNORED = 8, -100
STILL: dict[str, dict[str, float]] = {
    "gpt2": {"n_layer": 1, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "llama": {"num_hidden_layers": 1},
    "bert": {"num_hidden_layers": 1, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
}
TOLERANCE = {"gpt2": 1e-6, "llama": 1e-6, "bert": 1e-12}


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = getattr(hugging_face, name)(transformers, **STILL[name])
    return made.double().train()


def rows(n: int, classes: bool) -> list[dict[str, Any]]:
    """Texts of 2 to 8 tokens, as a Trainer's data set gives them; in the first two no label counts."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, ids in enumerate(torch.randint(1, 50, (n, LENGTH), generator=generator).tolist()):
        known = 0 if number < 2 else 2 + 3 * number % 7
        mask = [int(place < max(2, known)) for place in range(LENGTH)]
        labels = [token if place < known else IGNORED for place, token in enumerate(ids)]
        row = {"input_ids": ids, "attention_mask": mask}
        made.append(row | ({"label": number % 2} if classes else {"labels": labels}))
    return made


def loader(name: str) -> DataLoader[Any]:
    data = datasets.Dataset.from_list(rows(24, name == "bert"))
    return DataLoader(data, batch_size=8, collate_fn=transformers.default_data_collator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def plain(chosen: nn.Module, batches: Any) -> list[float]:
    return plainly(chosen, sgd(chosen.parameters()), lambda model, batch: model(**batch).loss, batches)


def counted(name: str, labels: Tensor) -> int:
    return int(((labels if name == "bert" else labels[:, 1:]) != IGNORED).sum())


def trained(name: str, schedule: str) -> tuple[list[float], dict[str, float], dict[str, float]]:
    metrics = [Accuracy()] if name == "bert" else ()
    options: dict[str, Any] = {"microbatches": 4, "metrics": metrics}
    with Pipeline(model(name), "model", sgd, schedule, **options) as pipe:
        batches = loader(name) if not pipe.rank else None
        losses = list(pipe.train(batches))
        losses.append(pipe.step(next(iter(batches)) if batches else None))
        sums = {name: float(t.double().sum()) for name, t in pipe.state_dict().items()}
        return losses, pipe.evaluate(batches), sums


@pytest.mark.parametrize(("name", "schedule"), [("gpt2", "1f1b"), ("llama", "zb_h1"), ("bert", "1f1b")])
def test_a_model_that_computes_its_loss_trains_as_in_one_process(ranks, name, schedule):
    chosen, batches = model(name), list(loader(name))
    wanted = plain(chosen, [*batches, batches[0]])
    chosen.eval()
    with torch.no_grad():
        outputs = [chosen(**batch) for batch in batches]
    weights = [counted(name, batch["labels"]) for batch in batches]
    mean = sum(o.loss.item() * w for o, w in zip(outputs, weights, strict=True)) / sum(weights)
    told = ranks(trained, name, schedule)
    for losses, evaluated, _ in told:
        assert losses == pytest.approx(wanted, abs=TOLERANCE[name])
        assert evaluated["loss"] == pytest.approx(mean, abs=TOLERANCE[name])
        if name == "bert":
            right = [o.logits.argmax(-1) == b["labels"] for o, b in zip(outputs, batches, strict=True)]
            assert evaluated["acc"] == pytest.approx(torch.cat(right).double().mean().item())
    sums = {key: float(t.double().sum()) for key, t in chosen.state_dict().items()}
    assert told[0][2] == pytest.approx(sums, abs=10 * TOLERANCE[name])


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{number}": number for number in range(1, 50)} | {"[PAD]": 0, "[UNK]": 50}
    plain = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]")


def collated() -> list[Any]:
    """Batches of the collator for language models, which masks the padding of texts, as it returns them."""
    texts = [{"input_ids": row["input_ids"][: 2 + 3 * n % 7]} for n, row in enumerate(rows(16, True))]
    data = datasets.Dataset.from_list(texts)
    collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False, pad_to_multiple_of=8)
    return list(DataLoader(data, batch_size=8, collate_fn=collate))


def of_a_collator() -> list[float]:
    with Pipeline(model("gpt2"), "model", sgd, microbatches=4) as pipe:
        return list(pipe.train(collated()))


def test_what_the_collator_for_language_models_returns_is_a_batch(ranks):
    batches = collated()
    assert isinstance(batches[0], Mapping)
    wanted = plain(model("gpt2"), batches)
    assert all(losses == pytest.approx(wanted, abs=1e-6) for losses in ranks(of_a_collator))


class Summing(nn.Module):
    """Computes a loss that is no mean over its labels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        if self.kind == "none":
            return {"logits": logits}
        ignored, reduction = 0 if self.kind == "zero" else IGNORED, "sum" if self.kind == "sum" else "mean"
        loss = functional.cross_entropy(  # of float32 under autocast, as in transformers
            logits.to(self.embed.weight.dtype).flatten(0, 1),
            labels.flatten(),
            ignore_index=ignored,
            reduction=reduction,
        )
        return {"loss": loss, "logits": logits}


def refused(kind: str) -> str:
    torch.manual_seed(0)
    batch = {"input_ids": torch.ones(4, 6, dtype=torch.int64), "labels": torch.ones(4, 6, dtype=torch.int64)}
    if kind == "without":
        del batch["labels"]
    try:
        with Pipeline(Summing(kind), "model", sgd, microbatches=2) as pipe:
            pipe.step(batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("none", "the model returns no loss, one number as `loss` or first of its outputs"),
        ("sum", "the loss that the model computes is no mean over labels that are not -100, nor over those"),
        ("zero", "give weight=, a function of the labels that says what they count for"),
        ("without", "batch 0 has no labels: targets= can name input_ids"),
    ],
)
def test_a_loss_that_microbatches_do_not_add_up_to_is_refused_on_both_ranks(ranks, kind, says):
    for error in ranks(refused, kind):
        assert says in error


def weighted(**options: Any) -> list[float]:
    torch.manual_seed(0)
    model = Summing("zero") if options else Summing("zero").double()
    with Pipeline(model, "model", sgd, microbatches=4, weight=not_zero, **options) as pipe:
        return list(pipe.train([{"input_ids": x, "labels": y} for x, y in zeros()]))


def not_zero(labels: Tensor) -> Tensor:
    return (labels != 0).sum()


def zeros() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    made = []
    for _ in range(3):
        x = torch.randint(1, 50, (8, 6))
        made.append((x, torch.where(torch.rand(8, 6) < torch.linspace(0, 0.8, 8)[:, None], 0, x)))
    return made


def test_what_other_labels_count_for_is_given_as_a_weight(ranks):
    torch.manual_seed(0)
    chosen = Summing("zero").double()
    wanted = plainly(chosen, sgd(chosen.parameters()), lambda model, pair: model(*pair)["loss"], zeros())
    assert all(losses == pytest.approx(wanted, abs=1e-12) for losses in ranks(weighted))
    in_bf16 = ranks(partial(weighted, precision="bf16"))
    assert all(losses == pytest.approx(wanted, abs=1e-2) for losses in in_bf16)


def gpt2() -> nn.Module:
    return model("gpt2")


def test_the_command_line_trains_it_on_columns_of_a_data_set():
    names = ("input_ids", "attention_mask", "labels")
    columns: Any = {"inputs": {name: name for name in names}, "targets": "labels"}
    made = as_split(datasets.Dataset.from_list(rows(24, False)), "data.train", columns)
    data = Data("custom", made, made.first(8))
    words = [
        "data=custom", "task=model", f"model._target_={__name__}.gpt2", "optim=sgd", "optim.lr=0.1",
        "optim.momentum=0", "optim.weight_decay=0", "lr_schedule=constant", "batch_size=8", "microbatches=4",
        "epochs=1", "dtype=float64", "device=cpu",
    ]  # fmt: skip
    cfg = config(words)
    runs = [prepare(cfg, "1f1b", 2, data.facts, data) for _ in range(2)]
    state, (figures,) = run_in_threads(Case("1f1b", 2), runs=runs)
    chosen = gpt2()
    batches = [made.inputs(torch.cat(batch), None) for batch in runs[0].sampler.epoch(0)]
    wanted = plain(chosen, batches)
    weights = [counted("gpt2", batch["labels"]) for batch in batches]
    mean = sum(loss * weight for loss, weight in zip(wanted, weights, strict=True)) / sum(weights)
    assert figures.trained["loss"] == pytest.approx(mean, abs=1e-6)
    for name, tensor in chosen.named_parameters():
        torch.testing.assert_close(state[name], tensor.detach(), rtol=0, atol=1e-6)

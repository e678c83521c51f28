"""Batches of several lengths, trained through Pipeline, against one process of plain PyTorch in float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from pipetrain import Pipeline, Pop, Stash
from pipetrain.codec import TopK
from pipetrain.data import Data, load_data, text
from pipetrain.data.batch import BadBatch
from pipetrain.data.sampling import Sampled, Sampler, even
from pipetrain.data.text import BYTES
from pipetrain.errors import ActionFailed, ConfigError
from pipetrain.plan.text import describe
from pipetrain.runtime.stage.stage import Stage
from pipetrain.tasks import Classification, LanguageModelling
from pipetrain.trainer.window_loop import Pass
from tests.support import parity
from tests.support.parity import Subject, Way
from tests.support.reference import DELAYS

pytestmark = [pytest.mark.slow, pytest.mark.processes]

VOCABULARY, WIDTH, MOST = 20, 8, 12
SIZES = ((7, 5), (6, 12), (7, 3))  # samples and length of each batch
DOUBLE = torch.float64


class Embedding(nn.Module):
    """Tokens [n, length] and their positions."""

    def __init__(self, tokens: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, WIDTH), nn.Embedding(MOST, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return embedded


class Block(nn.Module):
    """Causal attention."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm, self.mix, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        added: Tensor = x + self.drop(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return added


class Joined(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] + both[1]


class Tied(nn.Module):
    """A model that is traced; its head is the embedding, its mask of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = Embedding(), nn.ModuleList(Block(0.0) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.tokens.weight

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h) * mask[..., None]
        logits: Tensor = self.head(h)
        return logits


Sizes = Sequence[tuple[int, int]]


def texts(masked: bool = False, sizes: Sizes = SIZES) -> list[Any]:
    """Batches of tokens, of which the last ones of each sample are padding, and the next ones."""
    batches: list[Any] = []
    for n, length in sizes:
        x, y = torch.randint(VOCABULARY, (2, n, length))
        mask = torch.arange(length) < torch.randint(1, length + 1, (n, 1))
        inputs = (x, mask.to(DOUBLE)) if masked else x
        batches.append((inputs, torch.where(mask, y, -100)))
    return batches


def chain(sizes: Sizes = SIZES) -> Subject:
    stash = Stash()
    layers = [
        Embedding(),
        Block(),
        stash,
        Block(),
        Block(),
        Pop(stash, Joined()),
        nn.Linear(WIDTH, VOCABULARY),
    ]
    return Subject(nn.Sequential(*layers).to(DOUBLE), texts(sizes=sizes), LanguageModelling())


def tied(sizes: Sizes = SIZES) -> Subject:
    return Subject(Tied().to(DOUBLE), texts(True, sizes), LanguageModelling())


class Convolutions(nn.Module):
    """A model that is traced."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        return made


def images(sizes: Sizes = SIZES, traced: bool = False) -> Subject:
    """Images of several heights and widths, whose outputs' sizes are rounded down."""
    convolutions = [nn.Conv2d(2, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 2, stride=2)]
    layers = [*convolutions, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)]
    batches = [
        (torch.randn(n, 2, 8 + more, 20 - more, dtype=DOUBLE), torch.randint(4, (n,))) for n, more in sizes
    ]
    model = (Convolutions if traced else nn.Sequential)(*layers)
    return Subject(model.to(DOUBLE), batches, Classification())


SUBJECTS: dict[str, Callable[..., Subject]] = {
    "chain": chain,
    "tied": tied,
    "images": images,
    "traced images": partial(images, traced=True),
}
RECOMPUTED = {"recompute": "always", "clip_grad_norm": 0.05, "ema": 0.6}
WAYS: dict[str, tuple[Way, ...]] = {
    "chain": (
        *(Way("1f1b"), Way("pipedream"), Way("pipedream_2bw", 2, window=3, options={"max_length": MOST})),
        *(Way("interleaved_1f1b", window=3, options=RECOMPUTED),),
        Way("1f1b", options={"replicas": [2, 1]}, ranks=3),
    ),
    "tied": (
        Way("pipedream", ranks=3),
        Way("zb_h1", options=RECOMPUTED | {"max_length": MOST}),
    ),
    "images": (Way("zb_h1", ranks=3, options=RECOMPUTED),),
    "traced images": (Way("pipedream"),),
}


def made(name: str, *sizes: Sizes) -> Subject:
    torch.manual_seed(0)
    return SUBJECTS[name](*sizes)


def trained(name: str, way: Way, *sizes: Sizes) -> dict[str, Any]:
    return parity.train(made(name, *sizes), way)


@pytest.mark.parametrize("name", SUBJECTS)
def test_trains_as_one_process(ranks, three, name):
    for way in WAYS[name]:
        first, *others = {2: ranks, 3: three}[way.ranks](trained, name, way)
        assert all(other == first for other in others)
        assert first["updates"] == 3


OPEN: dict[str, Any] = {"chain": MOST, "tied": MOST, "images": [8 + MOST, 20]}  # their largest lengths
SOME: list[dict[str, Any]] = [{}, {"recompute": "always"}, {"clip_grad_norm": 0.05}, {"ema": 0.6}]


@settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "8")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.sampled_from(["chain", "tied", "images"]),
    st.sampled_from(sorted(DELAYS)),
    st.sampled_from([2, 4]),
    st.sampled_from(SOME),
    st.lists(st.tuples(st.integers(4, 9), st.integers(1, MOST)), min_size=2, max_size=4),
)
def test_any_lengths_train_as_one_process(ranks, name, schedule, microbatches, options, sizes):
    late = {"correction": "gap_aware"} if DELAYS[schedule] is not DELAYS["1f1b"] else {}
    way = Way(schedule, microbatches, options={"max_length": OPEN[name]} | options | late)
    first, second = ranks(trained, name, way, sizes)
    assert first == second


def begun(folder: str) -> list[float]:
    """Train two of the three batches, and save in the middle of the pass."""
    subject = made("chain")
    with Pipeline(subject.model, subject.task, parity.MOMENTUM, "zb_h1", **CODED) as pipe:
        losses = list(pipe.train(subject.batches[:2]))
        pipe.save(folder)
        return losses


def ended(folder: str) -> tuple[list[float], Any]:
    """Train two and the first one again, or that one after a checkpoint; predict all three."""
    subject = made("chain")
    with Pipeline(subject.model, subject.task, parity.MOMENTUM, "zb_h1", **CODED) as pipe:
        if folder:
            pipe.load(folder)
        again = subject.batches[:1]
        losses = list(pipe.train(again if folder else [*subject.batches[:2], *again]))
        outputs = [of for of in pipe.predict([x for x, _ in subject.batches]) if of is not None]
        return losses, [[tuple(of.shape), of.sum().item()] for of in outputs]


def words(samples: int) -> list[list[int]]:
    """Return lists of tokens."""
    return [[97 + (n * k) % 17 for k in range(n % MOST + 2)] for n in range(samples)]


def next_tokens(samples: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Make a batch, as a collate function of a loader does."""
    rows = [
        functional.pad(torch.tensor(of), (0, max(map(len, samples)) - len(of)), value=-1) for of in samples
    ]
    tokens = torch.stack(rows)
    return tokens[:, :-1].clamp(min=0), tokens[:, 1:].where(tokens[:, 1:] >= 0, -100)


def data_of(folder: str) -> Data:
    """Return lines of a text; without a folder, a data set of one's own with a collate function."""
    if folder:
        return text.load(f"{folder}/lines.txt", block=MOST, lines=True)
    splits = {
        name: {"_target_": f"{__name__}.words", "samples": n} for name, n in (("train", 32), ("test", 8))
    }
    return load_data({"name": "words", "collate": {"_target_": f"{__name__}.next_tokens"}, **splits})


def by_number(folder: str, schedule: str, options: dict[str, Any]) -> list[Any]:
    """Train and evaluate lines as the command line does, then as a loader's; return losses and weights."""
    data, results = data_of(folder), []
    for own in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Embedding(BYTES), Block(), Block(), nn.Linear(WIDTH, BYTES)).to(DOUBLE)
        sampler = Sampler(len(data.train), 6, 2, seed=3)
        orders = sampler, None
        sizes = sampler.batch_sizes, even(len(data.test), 6)
        splits = zip((data.train, data.test), sizes, orders, strict=True)
        train, test = (Sampled(*of, seed=3, workers=0, timeout=60.0, classes=BYTES) for of in splits)
        with Pipeline(
            model, LanguageModelling(), parity.MOMENTUM, schedule, seed=0, **OPTIONS, **options
        ) as pipe:
            if own:
                training = pipe._training
                training.begin_by_number(train, test)
                made = [training.batches(train, trains=True), training.batches(test)]
                passes = [Pass("training", "a pass", made[0], pipe._training.settings.window)]
                passes.append(Pass("evaluation", "one", made[1], None, reads_ahead=True, look_every=1))
                losses, _ = ([loss for done in pipe._run(of) for loss in done.losses] for of in passes)
                loss = training.values("the evaluation", Stage.take_evaluated)["loss"]
            else:
                batches, tests = ([read(of, torch.cat(ids)) for ids in of.epoch(0)] for of in (train, test))
                losses, loss = [*pipe.train(batches)], pipe.evaluate(tests)["loss"]
                assert len({x.shape[1] for x, _ in batches}) > 1
            results.append((losses, loss, {name: t.tolist() for name, t in pipe.state_dict().items()}))
    return results


def read(samples: Sampled, ids: Tensor) -> tuple[Tensor, Tensor]:
    split = samples.at(samples.size([ids]))
    return split.inputs(ids, None), split.targets(ids, None)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("zb_h1", {}), ("pipedream", {"window": 3}), ("1f1b", {"replicas": [2, 1]})],
)
@pytest.mark.parametrize("source", ["lines", "collated"])
def test_samples_by_number_train_as_those_of_a_loader(ranks, three, tmp_path, source, schedule, options):
    """The last batch has fewer samples; which lengths come is known to all ranks that read."""
    lines = ["".join(chr(97 + (n * k) % 17) for k in range(n % MOST + 1)) for n in range(40)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    for first, second in (three if "replicas" in options else ranks)(
        by_number, str(tmp_path) if source == "lines" else "", schedule, options
    ):
        assert first == second
        assert len(first[0]) == 6


OPTIONS = {"microbatches": 2, "device": "cpu", "threads": 1, "max_length": MOST}
CODED = OPTIONS | {"codec_backward": TopK(0.5)}  # what an update owes to a length is saved too


def test_it_goes_on_from_a_checkpoint_and_predicts_as_without(ranks, tmp_path):
    losses, *_ = ranks(begun, str(tmp_path))
    whole, *_ = ranks(ended, "")
    resumed, *_ = ranks(ended, str(tmp_path))
    assert (losses + resumed[0], resumed[1]) == (whole[0], whole[1])
    assert [shape for shape, _ in whole[1]] == [(n, length, VOCABULARY) for n, length in SIZES]


# In one process


def test_a_compiled_stage_takes_any_length(monkeypatch):
    # All of torch.compile but the last step, the generated C++, which takes a minute.
    compiled = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiled)
    torch._dynamo.reset()
    assert trained("chain", Way("1f1b", options={"compile": True}))["updates"] == 3


def test_a_profile_is_of_the_mean_length_and_memory_of_the_largest(caplog):
    subject = made("chain", ((6, 3), (6, 6), (6, 9)))
    options = OPTIONS | {"partition": "profile", "schedule": "interleaved_1f1b"}
    with (
        caplog.at_level("INFO", "pipetrain"),
        Pipeline(subject.model, subject.task, parity.MOMENTUM, **options) as pipe,
    ):
        list(pipe.train(subject.batches))
        text = str(pipe.plan.settings.timed), str(pipe.plan.settings.full), describe(pipe.plan)
    assert "pipetrain: profiling 7 layers, 3 samples of length 6 at a time" in caplog.messages
    assert text[:2] == ("3 samples of length 6", f"3 samples of length {MOST}")
    assert f"times are of microbatches of {text[0]}, bytes of {text[1]}\n" in text[2]


class Halved(nn.Module):
    """Takes lengths that 4 divides."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x.unflatten(1, (-1, 4)).flatten(1, 2)
        return made


@pytest.mark.parametrize("partition", ["even", "profile"])
def test_a_model_may_take_some_lengths_alone(partition):
    layers = Embedding(), Halved(), nn.Linear(WIDTH, VOCABULARY)
    options = OPTIONS | {"partition": partition, "schedule": "interleaved_1f1b"}
    with Pipeline(nn.Sequential(*layers), LanguageModelling(), parity.MOMENTUM, **options) as pipe:
        assert len([*pipe.train(of_length(4, 8, 12))]) == 3


# What is refused


def refused(batches: list[Any], model: nn.Module | None = None, task: Any = None, **options: Any) -> str:
    model = model or nn.Sequential(Embedding(), nn.Linear(WIDTH, VOCABULARY))
    subject = model, task or LanguageModelling(), parity.MOMENTUM
    with Pipeline(*subject, microbatches=2, device="cpu", threads=1, **options) as pipe:
        with pytest.raises((BadBatch, ConfigError)) as error:
            list(pipe.train(batches))
        return str(error.value)


def of_length(*lengths: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(4, n, dtype=torch.int64), torch.ones(4, n, dtype=torch.int64)) for n in lengths]


def test_a_length_above_the_largest_and_one_of_0_are_refused():
    assert refused(of_length(5, 6, 9), max_length=8) == (
        "batch 2 has 4 samples of length 9, and max_length=8: cut what is longer, or give a larger one"
    )
    assert (
        refused(of_length(5, 0)) == "batch 1 has 4 samples of length 0: leave it out, or pad it to 1 at least"
    )


def test_other_lengths_than_those_of_the_first_batches_need_max_length():
    """A loader that is no list and no DataLoader may wait for what the first batch trains."""
    said = "one shape, or give max_length=, the largest of each dimension that differs"
    assert refused(of_length(5, 5, 6)).endswith(said)
    assert refused(of for of in of_length(5, 6)).endswith(said)


class Scored(nn.Module):
    """Computes its loss, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Embedding(), Block(0.0), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(tokens)
        return {"loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


@pytest.mark.parametrize("labelled", [True, False])
def test_a_model_that_computes_its_loss_predicts_any_length(labelled):
    model, batches = Scored(), [{"tokens": x, "labels": y} for x, y in of_length(5, 9)]
    options = OPTIONS | {"targets": "labels", "schedule": "interleaved_1f1b"}
    with Pipeline(model, "model", parity.MOMENTUM, **options) as pipe:
        [*pipe.train(batches)]
        given = batches if labelled else [{"tokens": batch["tokens"]} for batch in batches]
        outputs = [output["scores"] for output in pipe.predict(given)]
        for output, batch in zip(outputs, batches, strict=True):
            torch.testing.assert_close(output, pipe.collect()(**batch)["scores"])


def of_images(*sizes: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(4, 2, *size), torch.zeros(4, dtype=torch.int64)) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "max_length", "said"),
    [
        (
            [(9, 9), (9, 8)],
            [9, 9, 9, 9],
            "the first input, float32[2, 9, 9]: give fewer, or let",
        ),
        (
            [(9, 9), (8, 7), (9, 10)],
            [9, 9],
            "batch 2 has 4 samples of length 9 x 10, and max_length=[9, 9]: cut",
        ),
        (
            [(9, 9), (9, 9), (10, 9)],
            [9, 9],
            "batch 2 has 4 samples of length 10 x 9, and max_length=[9, 9]: cut",
        ),
        (
            [(9, 9), (8, 9), (9, 8)],
            9,
            "float32[2, length A, 9]: let",
        ),
    ],
)
def test_a_number_for_each_dimension_that_differs_or_one_for_all(sizes, max_length, said):
    """Where the first two batches do not show them, two numbers are of the last two dimensions."""
    layers = [nn.Conv2d(2, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)]
    model = nn.Sequential(*layers)
    assert said in refused(of_images(*sizes), model, Classification(), max_length=max_length)


def test_too_few_numbers_are_refused():
    batches = [(torch.zeros(4, *of), torch.zeros(4, dtype=torch.int64)) for of in ((2, 9, 9), (3, 8, 7))]
    assert refused(batches, max_length=[9, 9]) == (
        "max_length has 2 numbers, and the first two batches differ in 3 dimensions: give one number for "
        "all, or 3"
    )


def test_a_layer_that_cannot_take_the_largest_length_is_named():
    assert refused(of_length(5, 6), max_length=MOST + 1).startswith("layer 0 (0) of the model cannot take ")


class Reshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, VOCABULARY)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.tokens(x).reshape(-1, 6, WIDTH))
        return out


def test_a_layer_that_fails_at_a_length_is_named_with_it():
    """Without max_length nothing is known of lengths above those of the first two batches."""
    with pytest.raises(ActionFailed, match=r"action 0F0@0 of 2 samples of length 13: IndexError: "):
        refused(of_length(5, 6, MOST + 1), nn.Sequential(Table(), nn.Linear(WIDTH, VOCABULARY)))


class Table(nn.Module):
    """Embeds tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MOST, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return embedded


def test_a_traced_model_with_a_number_for_a_length_is_refused():
    assert "Reshaped" in refused(of_length(6, 5), Reshaped(), max_length=6)


def test_a_traced_model_says_which_lengths_it_takes():
    """Its positions are a table."""
    batches = [((x, torch.ones(x.shape)), y) for x, y in of_length(5, 6, MOST + 1)]
    assert refused(batches, Tied()) == (
        f"batch 2 has 4 samples of length {MOST + 1}, and the model takes 1 to {MOST}: cut or pad it"
    )
    assert "Tied cannot be traced" in refused(batches, Tied(), max_length=MOST + 1)

"""What code for a GPU does, on a pretended one: it equals the CPU, no host waits in a window, nothing hangs.

Ranks are threads over a pretended NCCL, on devices whose kernels wait for all transfers that their rank has
posted; `support/pretended_gpu` says how. The faults at the end are such that it has to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipetrain import Pipeline, TrainingStopped, fit
from pipetrain.data.reader import Reader
from pipetrain.model.specs import Size
from pipetrain.runtime.comm import gradient_buckets as buckets
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.loader_feed import LoaderBatches
from pipetrain.runtime.microbatch_feed import FeedSettings, WindowPart
from pipetrain.runtime.stage import cuda_graphs
from pipetrain.runtime.stage.buffers import Buffers
from pipetrain.runtime.stage.cuda_graphs import GraphedStage
from pipetrain.schedule.actions import UPDATE
from pipetrain.tasks import Regression
from tests.support.cases import SCHEDULES, Case, Ran, compare, make_run
from tests.support.models import flat
from tests.support.pretended_gpu.tensors import is_tagged
from tests.support.pretended_gpu.world import Trained, alone, on_gpus
from tests.support.thread_ranks import run_in_threads

pytestmark = pytest.mark.slow

SHORT = ("epochs=1", "microbatches=4", "cuda_graphs=false")
EVEN = (*SHORT, "partition=even")
FLOATS = (*EVEN, "dtype=float32")
CLIPPED = ("clip_grad_norm=0.1", "clip_grad_norm_over=model")
HALF = ("codec.forward=half", "codec.backward=half")
TIED = "model._target_=tests.support.models.tied"


def shared() -> nn.Sequential:
    """A layer with weights, two that share theirs, and a last one."""
    first, second = nn.Linear(12, 12), nn.Linear(12, 12)
    second.weight = first.weight
    return nn.Sequential(*flat(), first, second, nn.Linear(12, 10))


def case(schedule: str, *words: str, samples: int = 24) -> Case:
    """Two batches, or so many samples: 24 are two."""
    return Case(schedule, 2, words, samples)


# Rank 0 tells its share of the weight and then has backwards of its other stage to do.
SHARED = case(
    "interleaved_1f1b",
    *SHORT,
    "model._target_=tests.gpu.test_pretended.shared",
    "partition=[1,2,3]",
    "window=2",
)


_on_a_cpu = cache(run_in_threads)  # once for all tests that have a case


def on_a_cpu(one: Case) -> tuple[dict[str, Tensor], Ran]:
    words = tuple(word for word in one.overrides if not word.startswith("cuda_graphs="))
    return _on_a_cpu(replace(one, overrides=words))


def equal_the_cpu(one: Case, waits: int = 0) -> Trained:
    """Hold a case against the CPU, to the last bit, and let no host wait in its windows, or so many times."""
    plain, figures = on_a_cpu(one)
    trained = on_gpus(one, exclusive=True)
    assert plain.keys() == trained.state.keys()
    assert [name for name, tensor in plain.items() if not torch.equal(tensor, trained.state[name])] == []
    numbers = [[(f.trained, f.evaluated, f.score) for f in some] for some in (figures, trained.figures)]
    assert numbers[0] == numbers[1]
    assert sum(trained.waits.values()) == waits, trained.waits
    return trained


def of_passes(trained: Trained) -> int:
    """Return how many kernels ran in windows of training, those of updates not counted."""
    return sum(n for (_, op, _), n in trained.kernels.items() if op and op not in UPDATE)


@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule != "fbp"])
def test_every_schedule_trains_as_on_a_cpu(schedule):
    equal_the_cpu(case(schedule, *EVEN))


def test_an_order_that_is_found_while_it_runs_equals_its_reference():
    """Its messages go through host memory."""
    trained = on_gpus(one := case("fbp", *EVEN), staged=True)
    compare(one, trained.state, trained.figures)


@pytest.mark.parametrize(
    "one",
    [
        case("1f1b", *EVEN, *CLIPPED, "recompute=always", "optim=adamw", samples=32),  # one batch of 8
        case("pipedream", *FLOATS, "precision=bf16", "recompute=selective", "ema=0.6", "window=2"),
        case("zbv", *SHORT, *CLIPPED, TIED, "partition=[2,3,4]", "batchnorm=batch"),
        SHARED,
        case("1f1b", *SHORT, "model._target_=tests.support.models.skipping", "partition=[7]"),
        case("1f1b", *FLOATS, "codec.forward=int8", "codec.backward=threshold"),
        case(
            "pipedream", *FLOATS, "codec.forward=half", "codec.backward=half", "memory_format=channels_last"
        ),
        case("zb_h1", *EVEN, "model._target_=tests.support.models.dropping"),
        case("pipedream", *EVEN, "correction=[hybrid,gap_aware,msnag]", "optim.momentum=0.9", samples=44),
        case("pipedream", *FLOATS[:2], *FLOATS[3:], "correction=msnag", "cuda_graphs=true"),
        case("1f1b", *SHORT, *CLIPPED, "model._target_=tests.gpu.test_pretended.idle", "partition=[2]"),
        case("zbv", *SHORT, "model._target_=tests.gpu.test_pretended.odd", "partition=[2,3,4]"),
    ],
    ids=str,
)
def test_every_option_that_touches_the_device_trains_as_on_a_cpu(one):
    equal_the_cpu(one)


@pytest.mark.parametrize("more", [(), ("cuda_graphs=true",)])
@pytest.mark.parametrize("words", [("1f1b", "optim.momentum=0.9"), ("pipedream", "window=3", "optim=adamw")])
def test_a_gpu_leaves_updates_out_by_itself_once_its_weights_have_their_state(words, more):
    """The host of each stage waits for the first update alone; later ones are left out, with statistics."""
    model = ("model._target_=tests.gpu.test_pretended.striking", "partition=[2]", "on_nan=skip")
    trained = equal_the_cpu(case(words[0], *SHORT, *model, *words[1:], *more, samples=60), waits=2)
    assert 0 < sum(of.skipped for of in trained.figures[0].stages.values()) < 10


class Strike(nn.Module):
    """Its input times infinity, where the first number of that is large in training."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[0, 0, 0, 0] > 1.5, x * math.inf, x) if self.training else x


def striking() -> nn.Sequential:
    return nn.Sequential(Strike(), *flat(nn.BatchNorm1d(12)), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 10))


class Coded(nn.Module):
    """x -> also signs of it in dtypes that NCCL does not have."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        signs = x.detach().sign()
        return x, signs.short(), (signs + 1).to(torch.uint16)


class Phased(nn.Linear):
    """Computes with a complex weight and a buffer that holds codes."""

    def __init__(self) -> None:
        super().__init__(7, 7)
        self.phases = nn.Parameter(torch.ones(7, dtype=torch.complex128))
        self.register_buffer("codes", torch.arange(7).to(torch.uint16))

    def forward(self, x: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        gain = super().forward(self.codes.to(self.weight.dtype)) * self.phases
        return torch.fft.irfft(torch.fft.rfft(x[0]) * gain), *x[1:]


class Decoded(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return x[0] * (1 + x[1] * x[2].to(x[1].dtype))


def odd() -> nn.Sequential:
    """Messages in int16 and uint16, a complex weight and a uint16 buffer."""
    return nn.Sequential(*flat(), Coded(), Phased(), Decoded(), nn.Linear(12, 10))


def idle() -> nn.Sequential:
    """Its last layers have no weights."""
    return nn.Sequential(*flat(), nn.Linear(12, 10), nn.Tanh(), nn.Tanh())


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "zbv"])
def test_cuda_graphs_replay_what_single_launches_do(schedule):
    words = (*FLOATS, "window=2", "clip_grad_norm=0.1")
    single, graphs = (equal_the_cpu(case(schedule, *words, *more)) for more in ((), ("cuda_graphs=true",)))
    assert of_passes(graphs) < of_passes(single) / 2  # a replay is none


@pytest.mark.parametrize("schedule", ["pipedream", "zb_h1"])
def test_cuda_graphs_of_two_sizes_share_the_memory_of_slots_and_weight_versions(schedule, monkeypatch):
    captured, capture = set[Any](), GraphedStage._capture

    def capturing(self: GraphedStage, shape: Any, *more: Any) -> str:
        if not (why := capture(self, shape, *more)):
            captured.add((self.index, shape))
        return why

    monkeypatch.setattr(cuda_graphs, "OFTEN", 1)
    monkeypatch.setattr(GraphedStage, "_capture", capturing)
    words = (*FLOATS[1:], "epochs=3", "window=2", "cuda_graphs=true")
    equal_the_cpu(case(schedule, *words, samples=44))
    assert len(captured) == 4  # of two stages


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_cuda_graphs_of_a_stage_without_weights_have_no_gradient_to_take(schedule):
    equal_the_cpu(case(schedule, *FLOATS[:2], "dtype=float32", "partition=[1]", "cuda_graphs=true"))


def test_a_buffer_of_unsigned_numbers_is_put_back():
    with alone():
        module = nn.Module()
        module.register_buffer("codes", torch.arange(3, device="cuda").to(torch.uint16))
        buffers = Buffers(module)
        before = buffers.copies()
        module.codes.fill_(7)
        later = buffers.copies()
        module.codes.fill_(9)
        for spoilt, after in ((0.0, [9, 9, 9]), (1.0, [2, 3, 4])):
            buffers.restore_if(torch.full((), spoilt, device="cuda"), before, [later])
            assert module.codes.tolist() == after
        assert later[0][1].tolist() == [0, 1, 2]


# Replicas, most of whose matrices are a bucket each

NORM, PLAIN = (f"model._target_=tests.support.models.with{end}_norm" for end in ("", "out"))

FROZEN = ("model._target_=tests.support.edge_case_models.norms", "+model.frozen=4", "partition=[4]")


def spread(schedule: str, ranks: int, *words: str) -> Case:
    return Case(schedule, ranks, ("epochs=1", "cuda_graphs=false", *words), 20)  # batches of 12 and 8


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", 1000)


@pytest.mark.parametrize(
    "one",
    [
        spread("1f1b", 3, "replicas=[1,2]", PLAIN, "microbatches=3", "clip_grad_norm=0.1"),
        spread("1f1b", 4, "replicas=2", TIED, "partition=[2]", "microbatches=4", *CLIPPED),
        spread("1f1b", 2, "placement=0-1.0-1", NORM, "microbatches=4", "batchnorm=batch"),
        spread("pipedream", 3, "replicas=[2,1]", *FROZEN, "microbatches=4", "batchnorm=batch"),
        spread("pipedream", 3, "replicas=[2,1]", NORM, "microbatches=1"),
        spread("pipedream", 4, "replicas=2", PLAIN, "microbatches=2", "window=2"),
        spread("zb_h1", 4, "replicas=2", NORM, "microbatches=4"),
        spread("pipedream", 2, "placement=0-1.0-1", PLAIN, "microbatches=3", "clip_grad_norm=0.1"),
        spread("1f1b", 3, "replicas=[2,1]", PLAIN, "microbatches=4", "dtype=float32", "cuda_graphs=true"),
        spread("zb_h1", 4, "replicas=2", PLAIN, "microbatches=4", "dtype=float32", "cuda_graphs=true"),
    ],
    ids=str,
)
def test_replicas_train_as_on_a_cpu(one, small_buckets):
    """Where a replica has no microbatch of a batch, its host sees which gradients there are."""
    equal_the_cpu(one, waits=4 if "microbatches=1" in one.overrides else 0)


# What a microbatch costs beside its model


def kernels_beside(model: str, *words: str) -> float:
    """Return how many kernels a stage runs for a microbatch beside those of plain PyTorch."""
    one = case("1f1b", *SHORT, "dtype=float32", f"model._target_={model}", *words)
    ours = of_passes(on_gpus(one))
    run = make_run(one)
    network = run.take_network().model
    with alone() as gpu:
        network, x = network.to("cuda"), torch.randn(3, 3, 32, 32, device="cuda")
        before = sum(gpu.kernels.values())
        nn.functional.cross_entropy(network(x), torch.zeros(3, dtype=torch.long, device="cuda")).backward()
        plain = sum(gpu.kernels.values()) - before
    return (ours / (4 * len(run.sampler.batch_sizes)) - plain) / run.plan.stages


VGG = ("pipetrain.models.vgg11", "+model.width=4", "partition=flops")
SMALL = ("tests.support.models.with_norm", "partition=even")


@pytest.mark.parametrize(
    ("words", "most"), [(VGG, 4), ((*VGG, *CLIPPED, "ema=0.9"), 4), (SMALL, 6), ((*SMALL, "on_nan=skip"), 8)]
)
def test_a_microbatch_costs_few_kernels_beside_its_model_s(words, most):
    assert kernels_beside(*words) <= most


# What a program calls


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def batches(n: int, classes: bool) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    labels = partial(torch.randint, 4, (8,)) if classes else partial(torch.randn, 8, 4)
    return [(torch.randn(8, 6, generator=generator), labels(generator=generator)) for _ in range(n)]


def pipeline(device: str, loss: Any = nn.functional.cross_entropy, **options: Any) -> Pipeline:
    options = {"schedule": "interleaved_1f1b", "microbatches": 2, **options}
    return Pipeline(mlp(), loss, partial(torch.optim.AdamW, lr=0.01), device=device, **options)


def called(device: str, folder: Path, classes: bool = True, **options: Any) -> list[Any]:
    """Train, evaluate, predict, save, load and go on; return every number."""
    data = batches(5, classes)
    with pipeline(device, **options) as pipe:
        seen = [list(pipe.train(data[:3])), list(pipe.train(data[:3], window=3)), pipe.step(*data[3])]
        seen += [pipe.evaluate(data[3:]), list(pipe.predict([x for x, _ in data]))]
        pipe.save(folder / device)
        dcp.save(pipe.dcp(), checkpoint_id=folder / f"{device}.dcp")
        seen += [list(pipe.train(data)), pipe.state_dict(), list(pipe.collect().parameters())]
    with pipeline(device, **options) as pipe:
        pipe.load(folder / device)
        seen.append(list(pipe.train(data)))
    with pipeline(device, sample=data[0], **options) as pipe:
        dcp.load(pipe.dcp(), checkpoint_id=folder / f"{device}.dcp")
        seen.append(list(pipe.train(data)))
    return seen


def narrowed(device: str, folder: Path, classes: bool = True, **options: Any) -> list[Any]:
    """Train weights in bf16."""
    data = [(x.bfloat16(), y) for x, y in batches(5, classes)]
    model = nn.Sequential(nn.BatchNorm1d(6), *mlp()).bfloat16()
    loss, optimizer = nn.functional.cross_entropy, partial(torch.optim.AdamW, lr=0.01)
    with Pipeline(model, loss, optimizer, device=device, microbatches=2, **options) as pipe:
        return [list(pipe.train(data, window=2)), pipe.evaluate(data), pipe.state_dict()]


def of_lengths(device: str, folder: Path, classes: bool = True, **options: Any) -> list[Any]:
    """Train on batches of several lengths, each rehearsed, of which some come again."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(8, length) for length in (3, 5, 3, 2, 5)]
    data = [tuple(torch.randn(*shape, n, generator=generator) for n in (6, 4)) for shape in shapes]
    with pipeline(device, loss=squares, **options) as pipe:
        return [
            list(pipe.train(data, window=5)),
            list(pipe.train(data)),
            pipe.evaluate(data),
            pipe.state_dict(),
        ]


def fitted(device: str, folder: Path, classes: bool = True, **options: Any) -> list[Any]:
    with pipeline(device, **options) as pipe:
        rows = fit(pipe, batches(3, classes), batches(2, classes), epochs=2, run_dir=folder / f"{device}.run")
        return [[(row["train_loss"], row["val_loss"]) for row in rows], pipe.state_dict()]


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


@pytest.mark.parametrize(
    ("program", "options"),
    [
        (called, {"schedule": "zbv", "clip_grad_norm": 0.1, "ema": 0.9}),
        (called, {"loss": Regression(), "classes": False, "cuda_graphs": False}),
        (called, {"loss": squares, "classes": False, "recompute": "always", "metrics": {"error": squares}}),
        (fitted, {"schedule": "1f1b", "batchnorm": "batch"}),
        (narrowed, {"schedule": "zbv", "clip_grad_norm": 0.1, "ema": 0.9}),
        (narrowed, {"schedule": "interleaved_1f1b", "recompute": "always"}),
        (of_lengths, {"schedule": "zbv", "max_length": 5}),
        (of_lengths, {"schedule": "1f1b", "recompute": "always"}),
    ],
)
def test_a_program_gets_the_same_numbers_from_a_gpu_and_in_host_memory(program, options, tmp_path):
    plain = program("cpu", tmp_path, **options)
    with alone() as gpu:
        seen = program("cuda", tmp_path, **options)
        assert not any(is_tagged(t) for t in tree_leaves(seen) if isinstance(t, Tensor))
    torch.testing.assert_close(seen, plain, rtol=0, atol=0)
    assert gpu.waits == {}


def often(device: str, schedule: str) -> tuple[list[Any], list[int]]:
    """Train on three lengths, one of which comes once; return the numbers and how many are captured."""
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 5, 3, 5, 7, 5, 3, 5, 3]
    data = [tuple(torch.randn(8, of, n, generator=generator) for n in (6, 4)) for of in lengths]
    with pipeline(device, loss=squares, schedule=schedule, max_length=7, clip_grad_norm=0.1) as pipe:
        numbers = [list(pipe.train(data[:4], window=2))]
        with torch.no_grad():  # in which nothing is to be captured
            numbers.append(pipe.evaluate(data))
        numbers += [list(pipe.train(data, window=2)), pipe.evaluate(data), pipe.state_dict()]
        return numbers, [stage.shapes_captured for stage in pipe._training.session.stages.values()]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "pipedream"])
@pytest.mark.parametrize("most", [8, 1])
def test_lengths_that_come_often_are_captured_up_to_a_bound(schedule, most, monkeypatch, caplog):
    monkeypatch.setattr(cuda_graphs, "OFTEN", 3)
    monkeypatch.setattr(cuda_graphs, "MAX_SHAPES", most)
    plain, _ = often("cpu", schedule)
    with alone() as gpu, caplog.at_level("INFO", "pipetrain"):
        numbers, shapes = often("cuda", schedule)
    torch.testing.assert_close(numbers, plain, rtol=0, atol=0)
    assert gpu.waits == {}
    assert set(shapes) == {min(2, most)}
    lines = [message for message in caplog.messages if "more than 1 shapes" in message]
    assert len(lines) == (most == 1)


def masked(outputs: Tensor, targets: Any) -> Tensor:
    losses = nn.functional.cross_entropy(outputs, targets[0], reduction="none")
    return (losses * targets[1]).sum() / targets[1].sum()


def test_the_loss_of_a_batch_is_compared_with_its_microbatches_and_no_host_waits():
    """With CUDA graphs too, which a batch that is compared does without."""
    data = [
        (x, (y, torch.ones(8) if k < 2 else torch.arange(8) + 1.0))
        for k, (x, y) in enumerate(batches(5, True))
    ]
    with alone() as gpu, pipeline("cuda", loss=masked, schedule="1f1b") as pipe:
        with pytest.raises(TrainingStopped, match="the loss of the batch of update 3 is"):
            list(pipe.train(data, window=5))
        assert not gpu.waits


def test_inputs_that_a_loader_has_on_the_gpu_stay_there():
    """Targets come to the host, which sees whether they count."""
    with pipeline("cpu") as pipe:
        plain = list(pipe.train(batches(3, True), window=3))
    with alone() as gpu, pipeline("cuda") as pipe:
        there = [(x.cuda(), y.cuda()) for x, y in batches(3, True)]
        assert list(pipe.train(there, window=3)) == plain
        assert {what.split(", data/")[0] for what in gpu.waits} <= {"a copy from the device of [8]"}


def test_inputs_that_a_loader_has_on_the_gpu_go_to_other_ranks_through_host_memory():
    posted: list[tuple[str, list[int]]] = []

    def post(what: str, tensor: Tensor, rank: int, stream: int) -> Callable[[], None]:
        posted.append((tensor.device.type, [*tensor.shape]))
        return lambda: None

    with alone():
        reader = Reader([(torch.ones(4, 3, device="cuda"), torch.zeros(4).long().cuda())], "batch")
        reader.window(1)
        groups: Any = SimpleNamespace(world=World(0, 3), post_tensor=post)
        part = WindowPart([Size(4)], 2, [0, 1], [2, 2], FeedSettings(0, len, torch.device("cuda")))
        feed = LoaderBatches(groups, reader, reader.form, lambda of: None).open(part)
        assert [is_tagged(x) for x in feed.input(0)] == [True]
    assert posted == [("cpu", [2, 3]), ("cpu", [4])]


def test_a_program_whose_default_dtype_is_float64_trains_on_a_gpu():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with alone(), pipeline("cuda") as pipe:
            assert len(list(pipe.train(batches(2, True)))) == 2
    finally:
        torch.set_default_dtype(before)


# Faults that it has to see

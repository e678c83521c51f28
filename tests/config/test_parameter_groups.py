"""Groups of parameters with an optimizer of their own; groups with options: runtime/test_optimizer.py."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from pipetrain import Pipeline
from pipetrain.config.build import Optim, make_optimizer
from pipetrain.config.parameter_groups import ChainedOptimizer, title
from pipetrain.model.specs import TensorSpec
from pipetrain.muon import Muon
from pipetrain.plan.memory_fit import optimizer_state
from pipetrain.plan.paper_plan import state_of
from pipetrain.runtime.stage.optimizer_trial import try_optimizer
from pipetrain.trainer.arguments import read_optimizer
from tests.support.cases import Case, compare, options_of
from tests.support.refusals import refusal
from tests.support.thread_ranks import run_in_threads

PLAIN = "model._target_=tests.support.models.without_norm"


class Net(nn.Module):
    """An embedding that is the head's weight too, a kernel, two matrices and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(5, 4), nn.Parameter(torch.ones(1, 3, 4))
        self.mix, self.up, self.down = nn.Conv1d(4, 4, 3), nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight


def muon(*words: str) -> Optim:
    return make_optimizer(options_of(["data=digits", "optim=muon", *words]))


def parts_of(optim: Optim, model: nn.Module) -> dict[str, set[str]]:
    """The parameters of each part."""
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = try_optimizer(optim, model, 2)([*model.named_parameters()])
    assert isinstance(optimizer, ChainedOptimizer)
    return {
        type(part).__name__: {names[id(p)] for group in part.param_groups for p in group["params"]}
        for part in optimizer.parts
    }


def test_muon_has_hidden_matrices_and_kernels_and_adamw_what_else_there_is_or_a_user_names():
    hidden = {"mix.weight", "up.weight", "down.weight"}
    assert parts_of(muon(), Net())["Muon"] == hidden
    assert parts_of(muon(r"optim.groups.all_but_hidden.params='up\..*'"), Net())["Muon"] == hidden - {
        "up.weight"
    }
    image = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2))
    assert parts_of(muon(), image)["Muon"] == {"0.weight", "2.weight"}  # the last matrix is the head


def test_a_program_gives_a_group_an_optimizer_by_its_name():
    groups = {"all_but_hidden": {"_target_": "torch.optim.AdamW", "lr": 0.25}}
    groups |= {"slow": {"params": "up.weight", "lr": 0.125}}
    factory = try_optimizer(read_optimizer(lambda p: Muon(p, lr=0.5), groups), Net(), 2)
    optimizer = factory([*Net().named_parameters()])
    assert title(optimizer) == "Muon + AdamW"
    assert sorted((group["lr"], len(group["params"])) for group in optimizer.param_groups) == [
        (0.125, 1),
        (0.25, 7),
        (0.5, 2),
    ]


def test_a_step_is_that_of_each_part_and_the_state_is_one():
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    optimizer = try_optimizer(muon("optim.lr=0.5"), model, 2)([*model.named_parameters()])
    hidden = {twin.mix.weight, twin.up.weight, twin.down.weight}
    others = torch.optim.AdamW([p for p in twin.parameters() if p not in hidden], 0.001, weight_decay=0.01)
    plain = [Muon([*hidden], lr=0.5, weight_decay=0.01), others]
    for net, some in ((model, [optimizer]), (twin, plain)):
        for update in range(3):
            for p in net.parameters():
                p.grad = p.detach().sin() + update
            for one in some:
                one.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert optimizer.state[model.up.weight].keys() == {"momentum_buffer"}
    assert optimizer.state[model.up.bias].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_paper_knows_the_state_of_each_part():
    spec = TensorSpec((30, 20), torch.float32)
    cfg, factory = options_of(["data=digits", "optim=muon"]), try_optimizer(muon(), Net(), 2)
    for state in (state_of(cfg, Net()), optimizer_state(factory)):
        assert [state(name, spec) / spec.nbytes for name in ("up.weight", "words.weight")] == [1, 2]


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(schedule, ranks, (PLAIN, f"microbatches={m}", "optim=muon", "optim.lr=0.02"))
            for schedule, m in (("1f1b", 4), ("pipedream", 1), ("pipedream_2bw", 4))
            for ranks in (2, 4)
        ),
        Case(
            "pipedream_2bw",
            4,
            (PLAIN, "replicas=[3,1]", "microbatches=3", "clip_grad_norm=0.1", "optim=muon"),
        ),
        Case("pipedream", 2, (PLAIN, "optim=muon", "memory_format=channels_last", "epochs=1", "on_nan=skip")),
        Case("pipedream", 2, (PLAIN, "optim=nadam", "optim.lr=0.01")),
    ],
    ids=str,
)
def test_equals_the_reference(case):
    compare(case, *run_in_threads(case))


def test_one_stage_of_a_program_is_torch_s_own_loop():
    """To the last bits, as of AdamW alone."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)]
    model = nn.Sequential(*layers).double()
    twin = deepcopy(model)
    batches = [(torch.randn(6, 1, 4, 4).double(), torch.randint(3, (6,))) for _ in range(4)]
    groups = {"all_but_hidden": {"_target_": "torch.optim.AdamW", "lr": 0.01}}
    with Pipeline(
        model, nn.functional.cross_entropy, lambda p: Muon(p, lr=0.02), param_groups=groups
    ) as pipe:
        for _ in pipe.train(batches):
            pass
    hidden = [twin[0].weight, twin[3].weight]
    others = [twin[0].bias, twin[3].bias, *twin[4].parameters()]
    optimizers = [Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    for x, y in batches:
        nn.functional.cross_entropy(twin(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-14, atol=1e-15)


OTHERS = "optim.groups.all_but_hidden"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optim.lr=-1"], "optim.lr=-1 must be a finite number above 0"),
        ([f"{OTHERS}.lr=-1"], f"{OTHERS}.lr=-1 must be a finite number above 0"),
        (
            [f"{OTHERS}.params=tail"],
            f"{OTHERS} has no parameter: none that is left by the groups before it is ma",
        ),
        (
            [f"{OTHERS}.betaz=3"],
            f"{OTHERS} cannot be built: torch.optim.AdamW takes no betaz; did you mean beta",
        ),
        (["~optim.groups"], "optim cannot be built by pipetrain.muon.Muon: Muon takes matrices and kernels"),
        (
            ["optim.momentun=1"],
            "optim cannot be built by pipetrain.muon.Muon: Muon.__init__() got an unexpected",
        ),
    ],
)
def test_what_cannot_be_is_refused(words, says):
    assert refusal(lambda: try_optimizer(muon(*words), Net(), 2)).startswith(says)

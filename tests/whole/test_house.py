"""The house: its floors, which test file shows a module, what a wheel holds, and what scripts leave alone.

Tests mirror the package: `model/chain.py` has `model/test_chain.py`, and a package may have one file for
all that is in it. `python -m tests.whole.test_house` prints the table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "pipetrain", ROOT / "tests"
APART = {"benchmark", "comparison", "docs", "gpu", "published", "support", "users", "whole"}
"""Folders whose tests are of no one module."""
SEEN_IN = {
    "__init__": "docs/test_api_docs",
    "checkpoint/rank_state": "checkpoint/test_dcp",
    "commands/job": "commands/test_train",
    "errors": "test_exit",
    "trainer/fit": "users/test_fitting",
    "models/layers": "models/test_vision",
    "model/network": "model/test_chain",
    "model/materialise": "model/test_deferred_init",
    "model/matrix_products": "runtime/stage/test_split_backward",
    "model/trial_tensors": "plan/test_cost_estimate",
    "model/specs": "model/test_chain",
    "plan/paper_plan": "plan/test_csv_tables",
    "plan/verification": "plan/test_plan",
    "plan/operation_costs": "plan/test_cost_estimate",
    "records/tensorboard": "records/test_recorder",
    "runtime/stage/buffers": "runtime/stage/test_recompute",
    "runtime/mailbox": "whole/test_routes",
    "runtime/stage/microbatch": "runtime/stage/test_stage",
    "runtime/stage/observer": "runtime/stage/test_batchnorm",
    "runtime/stage/parameter_store": "runtime/stage/test_weight_versions",
    "runtime/stage/objective": "runtime/stage/test_stage",
    "runtime/session": "whole/test_equivalence",
    "runtime/stage/stage_factory": "runtime/stage/test_stage",
    "runtime/stage/stage_options": "runtime/stage/test_stage",
    "runtime/window_record": "trainer/test_window_loop",
    "runtime/whole_model": "whole/test_any_module",
    "schedule/plot": "schedule/test_text",
    "schedule/fixed_program": "schedule/test_programs",
    "schedule/list_scheduler": "schedule/test_automatic",
    "schedule/timeline": "schedule/test_simulate",
    "schedule/waits": "schedule/test_simulate",
    "signals": "whole/test_stops",
    "trainer/listeners": "trainer/test_run",
    "trainer/progress": "trainer/test_window_loop",
    "trainer/planning": "trainer/test_pipeline",
    "trainer/training_setup": "trainer/test_pipeline",
}
"""Modules without a test file of their own: what shows them."""


def has_code(path: Path) -> bool:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) for node in ast.parse(path.read_text()).body)


def names(paths: Iterable[Path], folder: Path) -> set[str]:
    return {str(path.relative_to(folder).with_suffix("")).removesuffix("/__init__") for path in paths}


MODULES = names((path for path in PACKAGE.rglob("*.py") if has_code(path)), PACKAGE)
FILES = names(TESTS.rglob("test_*.py"), TESTS)


def shown_in(module: str) -> str | None:
    """The test file of a module: its own, or that of a package around it that has no code itself."""
    package, _, name = module.rpartition("/")
    own = f"{package}/test_{name.strip('_')}".lstrip("/")
    if own in FILES:
        return own
    return shown_in(package) if package and package not in MODULES else None


def table() -> dict[str, str | None]:
    return {module: shown_in(module) or SEEN_IN.get(module) for module in sorted(MODULES)}


def test_every_module_has_a_test_file_and_every_test_file_a_module():
    shown = table()
    assert [module for module, file in shown.items() if file not in FILES] == []
    mirrored = {file for file in FILES if file.partition("/")[0] not in APART}
    assert mirrored - set(shown.values()) == set()
    assert [module for module in SEEN_IN if module not in MODULES or shown_in(module)] == []


def test_the_page_of_the_house_draws_the_floors_that_are_held():
    config = ConfigParser()
    config.read(ROOT / ".importlinter")
    layers = config["importlinter:contract:floors"]["layers"].split("\n")
    floors = {
        name: number for number, names in enumerate(reversed(layers)) for name in names.split(" : ") if name
    }
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tree = page.partition("\npipetrain/\n")[2].partition("\nconf/")[0]
    drawn = [name.removesuffix(".py") for name in re.findall(r"^  (\w+)(?:\.py|/)\s", tree, re.MULTILINE)]
    assert sorted([*drawn, "__main__"]) == sorted(floors)
    assert sorted(drawn, key=lambda name: floors[name]) == drawn
    groups = [re.findall(r"^  (\w+)(?:\.py|/)\s", group, re.MULTILINE) for group in tree.split("\n\n")]
    assert [len({floors[name] for name in group}) for group in groups] == [1] * len(groups)


def test_a_wheel_holds_every_package():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split()) - {"pipetrain.conf"}
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")}
    assert listed == there


def test_scripts_import_no_tests():
    """The packages among them are held by import-linter; the programs are no packages."""
    for path in (ROOT / "scripts").glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        assert [name for name in names if name.split(".")[0] == "tests"] == [], path.name


if __name__ == "__main__":
    print("\n".join(f"{module:32} {file}" for module, file in table().items()))

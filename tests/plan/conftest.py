from __future__ import annotations

import pytest
from hydra.core.global_hydra import GlobalHydra

from pipetrain.plan import __main__ as command


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Give a function that runs the command in this process: (status, out, err)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["pipetrain.plan", *words])
        with pytest.raises(SystemExit) as end:
            command.main()
        return int(end.value.code or 0), *capsys.readouterr()

    yield call
    GlobalHydra.instance().clear()

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pipetrain.schedule

MODULES = [module.name for module in pkgutil.iter_modules(pipetrain.schedule.__path__, "pipetrain.schedule.")]


def test_importing_the_schedules_never_imports_torch() -> None:
    assert "pipetrain.schedule.simulate" in MODULES
    code = f"import sys, {', '.join(MODULES)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

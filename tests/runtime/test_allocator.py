"""glibc keeps what is freed, unless somebody has said otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipetrain.runtime import allocator

FAULTS = """
import resource, torch
from pipetrain.runtime.allocator import keep_freed_memory
torch.set_num_threads(1)
print(keep_freed_memory())
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(4 * 2**20)  # 16 MiB, given back at once
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    for name in allocator._VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.processes
def test_a_block_that_comes_again_is_not_faulted_in_again():
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    said, *faults = done.stdout.splitlines()
    if said == "the system's allocator":
        return  # not glibc: nothing was promised
    assert said == "glibc's allocator keeps freed blocks of up to 32 MiB"
    assert int(faults[-1]) < 16 * 2**20 / 4096 / 10


def test_what_the_environment_says_and_another_c_library_are_left_alone(monkeypatch):
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert allocator.keep_freed_memory() == "the system's allocator"
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert allocator.keep_freed_memory() == "allocator as MALLOC_TRIM_THRESHOLD_ says"

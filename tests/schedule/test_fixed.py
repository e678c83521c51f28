"""The program of a file, for windows of other lengths."""

from __future__ import annotations

import pytest

from pipetrain.schedule.actions import ScheduleError
from pipetrain.schedule.fixed import FixedProgram
from pipetrain.schedule.programs import one_f_one_b


def test_a_program_of_one_batch_serves_any_number_of_them():
    one, three = one_f_one_b(2, 1, 4), one_f_one_b(2, 3, 4)
    assert FixedProgram("mine.txt", one)(2, 1, 4) == one
    repeated = FixedProgram("mine.txt", one)(2, 3, 4)
    assert [sorted(map(str, actions)) for actions in repeated] == [sorted(map(str, a)) for a in three]
    assert FixedProgram("mine.txt", three)(2, 3, 4) == three


def test_a_program_of_another_size_is_refused():
    for size in [(3, 3, 4), (2, 2, 4), (2, 6, 4), (2, 3, 2)]:
        with pytest.raises(ScheduleError, match=r"mine.txt is of 2 ranks, 3 batches and 12 .*=4"):
            FixedProgram("mine.txt", one_f_one_b(2, 3, 4))(*size)

"""The pretended device itself: what it sees of streams, pinned memory, graphs and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.support.pretended_gpu.device import on_device, pretended
from tests.support.pretended_gpu.streams import Gpu, Refused
from tests.support.pretended_gpu.tensors import written


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with pretended() as gpu, on_device(gpu):
        yield gpu


def ones() -> Tensor:
    return torch.ones(3, device="cuda")


def captured(run: Callable[[], None], pool: object = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph


def test_a_stream_waits_for_another_one_before_it_reads_or_overwrites(gpu):
    one, side = ones(), torch.cuda.Stream()
    one += 1
    with torch.cuda.stream(side), pytest.raises(Refused, match="a tensor of another one"):
        one.sum()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        one.sum()
        event = side.record_event()
        one.sum()
    torch.cuda.current_stream().wait_event(event)
    with pytest.raises(Refused, match="a tensor of another one"):
        one.zero_()  # the second sum may still read it
    one.sum()
    torch.cuda.synchronize()
    one.zero_()


def test_pinned_memory_is_the_device_s_until_an_event_behind_its_copy_has_passed(gpu):
    host, event = torch.zeros(3, pin_memory=True), torch.cuda.Event()
    host.copy_(ones(), non_blocking=True)
    with pytest.raises(Refused, match="pinned memory"):
        host.tolist()
    event.record(torch.cuda.Stream())
    event.synchronize()
    with pytest.raises(Refused, match="pinned memory"):
        host + 1
    event.record()
    event.synchronize()
    assert host.tolist() == [1, 1, 1]
    host.to("cuda", non_blocking=True)
    host + 1
    with pytest.raises(Refused, match="pinned memory"):
        host.zero_()


def test_what_out_names_is_written():
    one, other = torch.ones(3), torch.zeros(3)
    assert [id(t) for t in written(torch.ops.aten.where.self_out, (one > 0, one, other), {"out": one})] == [
        id(one)
    ]


def test_attention_of_torch_runs(gpu):
    attention = nn.MultiheadAttention(4, 2, device="cuda").train()
    x = torch.ones(3, 2, 4, device="cuda")
    assert attention(x, x, x)[0].is_cuda


def test_a_graph_keeps_addresses_and_nothing_has_run_after_its_capture(gpu):
    one, made = ones(), list[Tensor]()
    graph = captured(lambda: made.append(one.add_(1) * 2))
    assert (one.tolist(), made[0].isnan().all().item()) == ([1, 1, 1], True)
    graph.replay()
    assert (one.tolist(), made[0].tolist()) == ([2, 2, 2], [4, 4, 4])
    old, one.data = one.data, ones()
    graph.replay()
    assert (one.tolist(), old.tolist(), made[0].tolist()) == ([1, 1, 1], [3, 3, 3], [6, 6, 6])
    del old
    with pytest.raises(Refused, match="memory that was freed"):
        graph.replay()


def test_a_graph_overwrites_what_earlier_ones_of_its_pool_no_longer_hold(gpu):
    one, made = ones(), list[Tensor]()
    for pool in (torch.cuda.graph_pool_handle(), None):
        first = captured(lambda: made.append((one + 1) * 2), pool)
        kept = made.pop().detach()
        saved = first.allocated  # type: ignore[attr-defined]
        second = captured(lambda: made.append(one * 3), pool)
        first.replay()
        second.replay()
        assert kept.tolist() == [4, 4, 4]
        lost = [t.isnan().all().item() for t in saved.values()]
        assert sorted(lost) == [False, pool is not None]


@pytest.mark.parametrize("debug", [True, False])
def test_a_capture_that_fails_is_undone_and_may_leave_its_stream_current(gpu, debug):
    one, home = ones(), torch.cuda.current_stream()

    def run() -> None:
        one.add_(1)
        torch.cuda.set_sync_debug_mode("error" if debug else "default")
        try:
            one.sum().item()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with pytest.raises(Refused, match="synchronizing" if debug else "a previous error during capture"):
        captured(run)
    assert (torch.cuda.current_stream() is home) == debug
    torch.cuda.set_stream(home)
    assert one.tolist() == [1, 1, 1]


def test_a_capture_of_the_global_mode_is_spoilt_by_another_thread(gpu):
    one = ones()
    with pytest.raises(Refused, match="a previous error"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        one.add_(1)
    torch.cuda.set_stream(torch.cuda.default_stream())
    captured(lambda: one.add_(1)).replay()
    assert one.tolist() == [2, 2, 2]

"""Every way to get one action of a program wrong, or the order of an edge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipetrain.schedule.actions import COMMUNICATION, NO_PEER, Action, Program


def mutants(program: Program, reach: int) -> Iterator[tuple[str, Program]]:
    """Yield what was done and the program: dropped, doubled, changed, swapped at most `reach` apart."""
    for rank, actions in enumerate(program):
        for what, mutant in _of_list(actions, reach):
            yield f"rank {rank}: {what}", [*program[:rank], mutant, *program[rank + 1 :]]


def of_messages(program: Program, stages: int) -> Iterator[tuple[str, Program]]:
    """Yield what was done and the program: every way to misdirect a message, or to change an edge's order."""
    for rank, actions in enumerate(program):
        for i, action in enumerate(actions):
            if action.op in COMMUNICATION:
                for what, mutant in _of_message(actions, i, stages):
                    yield f"rank {rank}: {what}", [*program[:rank], mutant, *program[rank + 1 :]]


def _of_message(actions: list[Action], i: int, stages: int) -> Iterator[tuple[str, list[Action]]]:
    message = actions[i]
    for peer in set(range(stages)) - {message.peer}:
        changed = replace(message, peer=peer)
        yield f"{message} [{i}] becomes {changed}", [*actions[:i], changed, *actions[i + 1 :]]
    for j in range(i + 1, len(actions)):
        if (actions[j].op, actions[j].stage, actions[j].peer) == (message.op, message.stage, message.peer):
            swapped = list(actions)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            yield f"swap {message} [{i}] and {actions[j]} [{j}]", swapped
            return


def _of_list(actions: list[Action], reach: int) -> Iterator[tuple[str, list[Action]]]:
    for i, action in enumerate(actions):
        before, after = actions[:i], actions[i + 1 :]
        yield f"drop {action} [{i}]", before + after
        yield f"double {action} [{i}]", [*before, action, action, *after]
        for step in (-1, 1):
            for changed in (
                replace(action, version=action.version + step),
                replace(action, mb=action.mb + step),
            ):
                yield f"{action} [{i}] becomes {changed!r}", [*before, changed, *after]
        if action.op in COMMUNICATION:
            for peer in {action.peer - 1, action.peer + 1} - {NO_PEER}:
                yield f"{action} [{i}] with {peer}", [*before, replace(action, peer=peer), *after]
        for j in range(i + 1, min(i + 1 + reach, len(actions))):
            swapped = list(actions)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            yield f"swap {action} [{i}] and {actions[j]} [{j}]", swapped

"""Every way to get one action of a program wrong, or the order of an edge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipetrain.schedule.actions import COMMUNICATION, Action, Program, ranks_of


def mutants(program: Program, reach: int) -> Iterator[tuple[str, Program]]:
    """Yield what was done and the program: dropped, doubled, changed, swapped at most `reach` apart.

    A message also goes to any other stage, and changes places with the next one of its edge.
    """
    stages = range(len(ranks_of(program)))
    for rank, actions in enumerate(program):
        for what, mutant in _of_list(actions, reach, stages):
            yield f"rank {rank}: {what}", [*program[:rank], mutant, *program[rank + 1 :]]


def _of_list(actions: list[Action], reach: int, stages: range) -> Iterator[tuple[str, list[Action]]]:
    for i, action in enumerate(actions):
        before, after = actions[:i], actions[i + 1 :]
        yield f"drop {action} [{i}]", before + after
        yield f"double {action} [{i}]", [*before, action, action, *after]
        changed = [replace(action, version=action.version + step) for step in (-1, 1)]
        changed += [replace(action, mb=action.mb + step) for step in (-1, 1)]
        others = list(range(i + 1, min(i + 1 + reach, len(actions))))
        if action.op in COMMUNICATION:
            changed += [replace(action, peer=peer) for peer in {*stages, len(stages)} - {action.peer}]
            edge = [j for j in range(i + 1, len(actions)) if _edge(actions[j]) == _edge(action)]
            others += [j for j in edge[:1] if j not in others]
        for other in changed:
            yield f"{action} [{i}] becomes {other!r}", [*before, other, *after]
        for j in others:
            swapped = list(actions)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            yield f"swap {action} [{i}] and {actions[j]} [{j}]", swapped


def _edge(message: Action) -> tuple[object, ...]:
    return message.op, message.stage, message.peer

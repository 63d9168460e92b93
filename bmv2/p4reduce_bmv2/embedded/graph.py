# SPDX-License-Identifier: Apache-2.0
"""Control-flow graphs: topological order and immediate post-dominators. None stands for the exit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Successors = Callable[[str], Sequence[str | None]]


def topological(first: str | None, successors: Successors) -> list[str] | None:
    """Nodes reachable from `first`, each before its successors; None when the graph has a cycle."""
    if first is None:
        return []
    order: list[str] = []
    state: dict[str, int] = {}
    stack: list[tuple[str, int]] = [(first, 0)]
    while stack:
        node, position = stack.pop()
        if position == 0:
            if state.get(node) == 2:
                continue
            state[node] = 1
        following = successors(node)
        if position < len(following):
            stack.append((node, position + 1))
            target = following[position]
            if target is not None and state.get(target) == 1:
                return None
            if target is not None and state.get(target) != 2:
                stack.append((target, 0))
        else:
            state[node] = 2
            order.append(node)
    order.reverse()
    return order


def joins(order: Sequence[str], successors: Successors) -> dict[str, str | None]:
    """For every node of an acyclic graph, the nearest node that all its paths pass through."""
    depth: dict[str | None, int] = {None: 0}
    parent: dict[str | None, str | None] = {}
    for node in reversed(order):
        meeting: str | None = None
        for position, target in enumerate(successors(node)):
            meeting = target if position == 0 else _meet(meeting, target, parent, depth)
        parent[node] = meeting
        depth[node] = depth[meeting] + 1
    return {node: parent[node] for node in order}


def _meet(
    a: str | None, b: str | None, parent: dict[str | None, str | None], depth: dict[str | None, int]
) -> str | None:
    while a != b:
        if depth[a] >= depth[b]:
            a = parent[a]
        else:
            b = parent[b]
    return a

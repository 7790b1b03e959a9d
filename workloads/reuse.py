"""What a prefix cache without limits could reuse of a schedule's prompts."""

from __future__ import annotations

from workloads.columns import Segments


def reusable_share(prompts: Segments) -> float:
    """Share of the prompt tokens whose whole prefix an earlier request had: segment by segment, the last
    one in part, since a longer segment begins with a shorter one of its name."""
    longest: dict[tuple[int, int, int], int] = {}  # by (node of the prefix tree, code, number)
    nodes: dict[tuple[int, int, int, int], int] = {}
    hits = 0
    start, code, number, tokens = (
        column.tolist() for column in (prompts.start, prompts.code, prompts.number, prompts.tokens)
    )
    for i in range(len(prompts)):
        node, shares = 0, True
        for k in range(start[i], start[i + 1]):
            step = (node, code[k], number[k])
            known = longest.get(step, 0)
            if shares:
                hits += min(known, tokens[k])
                shares = known >= tokens[k]
            longest[step] = max(known, tokens[k])
            node = nodes.setdefault((*step, tokens[k]), len(nodes) + 1)
    total = int(prompts.tokens.sum())
    return hits / total if total else 0.0

"""What a prefix cache without limits could reuse of a schedule's prompts."""

from __future__ import annotations

import numpy as np

from workloads.columns import Segments


def reusable_share(prompts: Segments) -> float:
    """Share of the prompt tokens whose whole prefix an earlier request had."""
    total = int(prompts.tokens.sum())
    return int(reused_tokens(prompts).sum()) / total if total else 0.0


def reused_tokens(prompts: Segments) -> np.ndarray:
    """Of each prompt, the tokens whose whole prefix an earlier request had, int64 [n]: segment by segment,
    the last one in part, since a longer segment begins with a shorter one of its name."""
    longest: dict[tuple[int, int, int], int] = {}  # by (node of the prefix tree, code, number)
    nodes: dict[tuple[int, int, int, int], int] = {}
    found = np.zeros(len(prompts), dtype=np.int64)
    start, code, number, tokens = (
        column.tolist() for column in (prompts.start, prompts.code, prompts.number, prompts.tokens)
    )
    for i in range(len(prompts)):
        node, shares, hits = 0, True, 0
        for k in range(start[i], start[i + 1]):
            step = (node, code[k], number[k])
            known = longest.get(step, 0)
            if shares:
                hits += min(known, tokens[k])
                shares = known >= tokens[k]
            longest[step] = max(known, tokens[k])
            node = nodes.setdefault((*step, tokens[k]), len(nodes) + 1)
        found[i] = hits
    return found

"""From logits to token ids. A token depends on its own row's logits and its (seed, step), on nothing else."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engines.batch import Sampling

_CANDIDATES = 512


def sample(logits: torch.Tensor, sampling: Sampling | None) -> NDArray[np.int64]:
    """logits [R, vocab] -> ids [R]. Greedy rows take the largest logit, ties the lowest id; only rows with a
    temperature above 0 pay for drawing."""
    ids = torch.argmax(logits, dim=-1).cpu().numpy()
    return ids if sampling is None or not logits.shape[0] else draw(ids, logits, sampling)


def draw(ids: NDArray[np.int64], logits: torch.Tensor, sampling: Sampling) -> NDArray[np.int64]:
    """The greedy ids, with those of the rows that have a temperature drawn in their place."""
    rows = np.flatnonzero(sampling.temperature > 0)
    for row in rows:
        ids[row] = _draw(
            logits[int(row)].float().cpu().numpy(),
            float(sampling.temperature[row]),
            float(sampling.top_p[row]),
            uniform(int(sampling.seed[row]), int(sampling.step[row])),
        )
    return ids


def uniform(seed: int, step: int) -> float:
    """The number in [0, 1) at (seed, step) of a counter-based stream (Philox, Salmon et al. 2011): no state,
    so a preempted sequence draws the same tokens again."""
    mask = (1 << 64) - 1
    key = np.array([seed & mask, 0], np.uint64)
    counter = np.array([step & mask, 0, 0, 0], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw()
    return int(bits >> 11) * 2.0**-53


def _draw(logits: NDArray[np.float32], temperature: float, top_p: float, u: float) -> int:
    """Invert the cumulative distribution at u, over the smallest set of likeliest tokens that holds top_p
    (nucleus sampling, Holtzman et al. 2020). Float64 throughout."""
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        weights = np.exp((wide - wide.max()) / temperature)
    if top_p >= 1.0:
        return _invert(np.cumsum(weights), u)
    nucleus = _likeliest(weights, top_p * float(weights.sum()))
    return int(nucleus[_invert(np.cumsum(weights[nucleus]), u)])


def _likeliest(weights: NDArray[np.float64], mass: float) -> NDArray[np.intp]:
    """The ids of the fewest tokens whose weights reach `mass`, likeliest first, ties by id. Sorts a short
    list of candidates when it holds them all, which is the usual case and 10 times quicker than the whole
    vocabulary."""
    for size in (_CANDIDATES, weights.size):
        if size < weights.size:
            bound = np.partition(weights, -size)[-size]
            candidates = np.flatnonzero(weights >= bound)  # with every tie of the last one
        else:
            candidates = np.arange(weights.size)
        order = candidates[np.argsort(-weights[candidates], kind="stable")]
        cumulative = np.cumsum(weights[order])
        if cumulative[-1] >= mass:
            break
    return order[: int(np.searchsorted(cumulative, mass, side="left")) + 1]


def _invert(cumulative: NDArray[np.float64], u: float) -> int:
    """The index whose share of the total holds u. A token of weight 0 is never drawn."""
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, cumulative.size - 1)  # rounding

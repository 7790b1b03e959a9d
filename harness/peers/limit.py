"""The limit of the machine: how fast any system could answer these requests, computed from what this machine
reads and multiplies.

Every pass takes at least as long as its products need at the measured matrix rate, and at least as long as
its weights and KV need to be read once at the measured bandwidth (the roofline; Williams et al. 2009). The
passes are those of continuous batching over `streams` seats: whole prompts enter as seats become free, in
the pass of everyone's decodes, and only rows that give a token pay for the head."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.peers.traffic import Ask


@dataclass(frozen=True, slots=True)
class Decoder:
    """Of a Llama-shaped decoder, counts of weights: all layers' products, the head; per token, what attention
    reads and computes for every token that is seen."""

    layer_weights: int
    head_weights: int
    kv_values: int  # keys and values of one token, all layers
    attention_flops: int  # of one query over one key, all layers


def decoder_of(config: Mapping[str, Any]) -> Decoder:
    """From a config.json in Hugging Face's words."""
    hidden, layers, ffn = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    return Decoder(
        layer_weights=layers * hidden * (2 * heads * dim + 2 * kv_heads * dim + 3 * ffn),
        head_weights=config["vocab_size"] * hidden,
        kv_values=layers * 2 * kv_heads * dim,
        attention_flops=layers * 4 * heads * dim,
    )


def limit_seconds(
    asks: Sequence[Ask], streams: int, decoder: Decoder, machine: Mapping[str, Any], itemsize: int
) -> float:
    """The shortest time for all of them. machine: read_gb_s and gflop_s, as `kernels.bench --machine` says.
    itemsize: bytes of a weight and of a value of KV."""
    waiting, running = deque(asks), list[list[int]]()  # [context, tokens left]
    total = 0.0
    while waiting or running:
        queries, seen, read = len(running), sum(context for context, _ in running), 0
        read = seen
        while waiting and len(running) < streams:
            ask = waiting.popleft()
            n = len(ask.prompt)
            queries, seen, read = queries + n, seen + n * (n + 1) // 2, read + n
            running.append([n, ask.output])
        flops = 2 * (queries * decoder.layer_weights + len(running) * decoder.head_weights)
        flops += seen * decoder.attention_flops
        values = decoder.layer_weights + decoder.head_weights + read * decoder.kv_values
        total += max(flops / machine["gflop_s"], values * itemsize / machine["read_gb_s"]) / 1e9
        running = [[context + 1, left - 1] for context, left in running if left > 1]
    return total

"""One colour for each thing that time, tokens and seats are spent on, the same in every picture.

What a request wants to spend its time on is green and blue; what others cost it is warm. Neighbours differ in
lightness as well, and what is computed for nobody is hatched. None is the colour of static, continuous or
chunked, whose seats they fill."""

from __future__ import annotations

PREFILL, DECODE, RECOMPUTED, ENDED = "#91CAA8", "#7C90DE", "#CC79A7", "#8A6FDF"
LEFT_OUT, PAD, BACKEND_PAD, CACHED, FREE = "#F0A78A", "#999999", "#5A6472", "#56B4E9", "#C4C9CF"

SEAT_COLOURS = (PREFILL, DECODE, RECOMPUTED, ENDED, LEFT_OUT, ENDED)
"""Of harness.dashboard.seats.KINDS."""
SEAT_PATTERNS = ("", "", "x", "/", "", "\\")

PARTS = {
    "client and network": (FREE, ("client_wait", "transport_in", "transport_out")),
    "queue: seat": ("#E69F00", ("queue_seat",)),
    "queue: KV": ("#7A4B00", ("queue_kv",)),
    "queue: batch": ("#F5CF73", ("queue_batch",)),
    "queue: other": ("#AC9A53", ("queue_budget", "queue_order", "queue_iteration", "queue_unknown")),
    "own prefill": (PREFILL, ("prefill",)),
    "decode": (DECODE, ("decode",)),
    "stalled by others' prefill": ("#BD0F55", ("stalled",)),
    "not its turn": (LEFT_OUT, ("skipped",)),
    "preempted, recomputed": (RECOMPUTED, ("preempted", "recompute")),
    "held by its batch": (ENDED, ("held",)),
    "between passes": (BACKEND_PAD, ("host",)),
}
"""Of a request's E2E, in the order of its life: colour, and parts of harness.metrics.attribution."""

"""GET /metrics: Prometheus text under vLLM's names, so that existing dashboards work.

Names and buckets are those of vLLM 0.32 (`v1/metrics/loggers.py`), with finer buckets below its 10 ms floor
for the gaps between tokens; what has no name there is `batchmark:*`. Everything here is fed on the event
loop, a few additions a token, and turned into text only when somebody asks: that too stands in the way of
tokens, so the text is written here and takes a tenth of a millisecond. Quantiles to publish come from the
records, never from buckets.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from engines.server.breakdown import Breakdown, Speeds
from engines.server.engine_client import EngineClient, Stream
from engines.server.exposition import Page, head
from engines.server.wire import Report

TTFT_S = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
TTFT_S += [20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]
GAP_S = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0]
GAP_S += [2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0]
REQUEST_S = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0]
REQUEST_S += [480.0, 960.0, 1920.0, 7680.0]
STEP_TOKENS = [1.0, *(8.0 * 2**power for power in range(12))]  # 1, 8, 16, ... 16384


def token_buckets(most: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    series = (float(step * 10**power) for power in range(9) for step in (1, 2, 5))
    return [value for value in series if value <= most]


class Histogram:
    """Counts per bucket, a sum, and its name."""

    def __init__(self, name: str, text: str, borders: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.borders = borders
        self._les = [*map(str, borders), "+Inf"]
        self.counts = [0] * (len(borders) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.borders, value)] += 1
        self.sum += value

    def lines(self, labels: str) -> Iterable[str]:
        """Buckets are cumulative in the text format."""
        yield head(self.name, self.text, "histogram")
        total = 0
        for border, count in zip(self._les, self.counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{{labels},le="{border}"}} {total}.0'
        yield f"{self.name}_count{{{labels}}} {total}.0"
        yield f"{self.name}_sum{{{labels}}} {self.sum}"


class Metrics:
    """The server's figures. received = finished (stop, length, error) + aborted + refused, once nothing is
    open."""

    def __init__(
        self,
        engine: EngineClient,
        model_name: str,
        engine_name: str,
        max_model_len: int,
        routes: Sequence[str] = ("default",),
        tenants: int = 20,
    ) -> None:
        self._engine = engine
        self._page = Page(model_name=model_name, engine=engine_name)
        self.breakdown = Breakdown(engine, self._page, routes, tenants)
        self._speeds = Speeds()
        self.received = 0
        self.timeout_warnings = 0
        self.idle_streams = 0
        self.invalid: Counter[int] = Counter()  # answers that never reached the engine, by HTTP status
        self.refused: Counter[str] = Counter()
        self.ended: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.prompt_tokens = 0
        self.generated_tokens = 0
        sizes = token_buckets(max_model_len)
        self.ttft = Histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_S)
        self.itl = Histogram("vllm:inter_token_latency_seconds", "Gap between outputs of a request.", GAP_S)
        self.tpot = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "(last - first) / tokens after the first output.",
            GAP_S,
        )
        self.e2e = Histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", REQUEST_S)
        self.prompt_size = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", sizes)
        self.answer_size = Histogram("vllm:request_generation_tokens", "Tokens of an answer.", sizes)
        self.declared = Histogram("vllm:request_params_max_tokens", "max_tokens of a request.", sizes)
        text = "Tokens computed in an iteration."
        self.step_tokens = Histogram("vllm:iteration_tokens_total", text, STEP_TOKENS)
        self.step_time = Histogram("batchmark:step_seconds", "Time of a forward pass.", GAP_S)
        self.host_gap = Histogram("batchmark:host_gap_seconds", "Time between two passes.", GAP_S)
        self.queue = Histogram("vllm:request_queue_time_seconds", "Arrival to first schedule.", REQUEST_S)
        text = "First schedule to first token."
        self.prefill = Histogram("vllm:request_prefill_time_seconds", text, REQUEST_S)
        self.decode = Histogram("vllm:request_decode_time_seconds", "First token to the end.", REQUEST_S)
        text = "First schedule to the end."
        self.inference = Histogram("vllm:request_inference_time_seconds", text, REQUEST_S)

    def on_received(self, stream: Stream) -> None:
        """A valid request goes to the engine."""
        self.received += 1
        self.declared.observe(stream.request.max_tokens)

    def on_report(self, report: Report) -> None:
        """What only the engine knows."""
        self._speeds.note(report.stats, report.at_ns / 1e9)
        for step in report.passes:
            self.step_tokens.observe(step.tokens)
            self.step_time.observe(step.duration_ns / 1e9)
            if step.host_gap_ns is not None:
                self.host_gap.observe(step.host_gap_ns / 1e9)
        for left in report.left:
            self.queue.observe(left.queued_ns / 1e9)
            if left.prefill_ns is not None:
                self.prefill.observe(left.prefill_ns / 1e9)
            if left.decode_ns is not None:
                self.decode.observe(left.decode_ns / 1e9)
            if left.prefill_ns is not None and left.decode_ns is not None:
                self.inference.observe((left.prefill_ns + left.decode_ns) / 1e9)

    def on_output(self, stream: Stream, tokens: int, now_ns: int) -> None:
        """The engine produced tokens for a request; called before the stream's own stamps move on."""
        self.generated_tokens += tokens
        if stream.last_token_ns is None:
            self.prompt_tokens += len(stream.request.prompt_token_ids)
            self.ttft.observe((now_ns - stream.arrival_ns) / 1e9)
        else:
            self.itl.observe((now_ns - stream.last_token_ns) / 1e9)

    def on_ended(self, stream: Stream, reason: str) -> None:
        """A request left: stop | length | abort | error, or "refused " and why."""
        self.breakdown.on_ended(stream, reason)
        if reason.startswith("refused "):
            self.refused[reason.removeprefix("refused ")] += 1
            return
        self.ended[reason] += 1
        self.prompt_size.observe(len(stream.request.prompt_token_ids))
        self.answer_size.observe(stream.output_tokens)
        if stream.first_token_ns is not None and stream.last_token_ns is not None and reason != "abort":
            self.e2e.observe((stream.last_token_ns - stream.arrival_ns) / 1e9)
            later = stream.output_tokens - stream.first_tokens
            if later > 0:
                self.tpot.observe((stream.last_token_ns - stream.first_token_ns) / 1e9 / later)

    def text(self) -> bytes:
        """The Prometheus text format, 0.0.4."""
        return "\n".join([*self._lines(), ""]).encode()

    def _lines(self) -> Iterable[str]:
        stats, page = self._engine.stats, self._page
        yield page.gauge("vllm:num_requests_running", "Requests in the batch.", stats.running)
        yield page.gauge("vllm:num_requests_waiting", "Requests in the queue.", stats.waiting)
        usable = max(1, stats.kv_live + stats.kv_cached + stats.kv_free)
        yield page.gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", stats.kv_live / usable)
        for state, blocks in (("live", stats.kv_live), ("cached", stats.kv_cached), ("free", stats.kv_free)):
            yield page.gauge("batchmark:kv_blocks_" + state, f"KV blocks that are {state}.", blocks)
        yield from page.by(
            "vllm:num_requests_waiting_by_reason",
            "Requests in the queue; none is ever deferred here.",
            "reason",
            {"capacity": stats.waiting, "deferred": 0},
            kind="gauge",
        )
        for name, speed in self._speeds.per_s(stats, time.monotonic()).items():
            text = f"{name.replace('_', ' ')} per second, over the last 10 seconds.".capitalize()
            yield page.gauge(f"batchmark:{name}_per_second", text, speed)
        yield page.counter("batchmark:prefill_tokens", "Prompt tokens computed.", stats.prefill_tokens)
        yield page.counter("batchmark:decode_tokens", "Answer tokens computed.", stats.decode_tokens)
        yield page.counter("batchmark:kv_blocks_released", "KV blocks let go.", stats.released_blocks)
        text = "Iterations in which a sequence lost its KV since none was left."
        yield page.counter("batchmark:kv_exhausted", text, stats.kv_exhausted)
        text = "Passes that failed for want of memory."
        yield page.counter("batchmark:out_of_memory", text, stats.out_of_memory)
        text = "Requests that had to queue, by what was missing at their arrival."
        yield from page.by("batchmark:admission_waits", text, "reason", stats.waits)
        text = "Requests whose client left, by where they were."
        yield from page.by("batchmark:cancellations", text, "state", stats.aborted)
        timeouts = {"queue": self.refused["queue_timeout"], "stream_idle": self.idle_streams}
        yield from page.by("batchmark:timeouts", "Requests that the server gave up.", "kind", timeouts)
        text = "Clients whose declared timeout is shorter than what the server may take."
        yield page.counter("batchmark:client_timeout_warnings", text, self.timeout_warnings)
        text = "Prompt tokens looked up in the prefix cache."
        yield page.counter("vllm:prefix_cache_queries", text, stats.prefix_cache_queries)
        text = "Prompt tokens that the prefix cache had."
        yield page.counter("vllm:prefix_cache_hits", text, stats.prefix_cache_hits)
        for name, blocks in (("out", stats.swapped_out), ("in", stats.swapped_in)):
            text = f"KV blocks copied {name}, of preempted sequences."
            yield page.counter(f"batchmark:swapped_{name}_blocks", text, blocks)
        yield page.counter("vllm:num_preemptions", "Sequences put back.", stats.preemptions)
        yield page.counter("vllm:prompt_tokens", "Prompt tokens prefilled.", self.prompt_tokens)
        yield page.counter("vllm:generation_tokens", "Tokens generated.", self.generated_tokens)
        yield page.counter("batchmark:recomputed_tokens", "Tokens computed again.", stats.recomputed_tokens)
        yield page.counter("batchmark:steps", "Iterations of the engine.", stats.steps)
        yield page.counter("batchmark:requests_received", "Valid requests.", self.received)
        yield from page.by("vllm:request_success", "Requests that left.", "finished_reason", self.ended)
        yield from page.by("vllm:admission_rejections", "Requests refused.", "reason", self.refused)
        yield from page.by(
            "batchmark:requests_invalid", "Requests answered before the engine.", "status", self.invalid
        )
        clients = (self.ttft, self.itl, self.tpot, self.e2e)
        sizes = (self.prompt_size, self.answer_size, self.declared)
        engines = (self.step_tokens, self.step_time, self.host_gap)
        states = (self.queue, self.prefill, self.decode, self.inference)
        for histogram in (*clients, *sizes, *engines, *states):
            yield from histogram.lines(page.labels)
        yield from self.breakdown.lines()

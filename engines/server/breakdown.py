"""Figures of /metrics by route, tenant, class, model and endpoint, and speeds of the last seconds. Every
label that a client chooses is bounded: the first names keep theirs, all later ones are `other`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from engines.server.engine_client import EngineClient, Stream
from engines.stats import Stats
from engines.tenants import Labels

MOST_CLASSES = 20
WINDOW_S = 10.0
EVERY_S = 0.5
OUTCOMES = ("stop", "length", "abort", "error", "refused")


class Speeds:
    """Of counters that only the engine knows, over the last WINDOW_S seconds."""

    COUNTERS = ("prefill_tokens", "decode_tokens", "released_blocks")

    def __init__(self) -> None:
        self._seen: deque[tuple[float, tuple[int, ...]]] = deque()

    def note(self, stats: Stats, now_s: float) -> None:
        """A sample every EVERY_S."""
        if not self._seen or now_s - self._seen[-1][0] >= EVERY_S:
            self._seen.append((now_s, self._values(stats)))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    def per_s(self, stats: Stats, now_s: float) -> dict[str, float]:
        self.note(stats, now_s)
        then, values = self._seen[0]
        span = max(now_s - then, EVERY_S)
        changes = (new - old for new, old in zip(self._values(stats), values, strict=True))
        return {name: change / span for name, change in zip(self.COUNTERS, changes, strict=True)}

    def _values(self, stats: Stats) -> tuple[int, ...]:
        return tuple(getattr(stats, name) for name in self.COUNTERS)


class Breakdown:
    """Counts of ended requests and of their tokens along each axis, one axis at a time: their product would
    not be bounded by much."""

    def __init__(self, engine: EngineClient, routes: Sequence[str], tenants: int) -> None:
        self._engine = engine
        self._routes = list(routes)
        self._labels: Mapping[str, Labels] = {
            "tenant": Labels(tenants),
            "request_class": Labels(MOST_CLASSES),
            "route": Labels(len(routes) + 1),
            "model_name": Labels(MOST_CLASSES),
            "endpoint": Labels(MOST_CLASSES),
        }
        self._requests: Counter[tuple[str, str, str]] = Counter()  # axis, label, outcome
        self._tokens: Counter[tuple[str, str, str]] = Counter()  # axis, label, prompt | generation
        self._ttft: dict[tuple[str, str], tuple[int, float]] = {}  # axis, label: count, sum in seconds

    def on_ended(self, stream: Stream, reason: str) -> None:
        outcome = "refused" if reason.startswith("refused ") else reason
        for axis, label in self._of(stream):
            self._requests[axis, label, outcome] += 1
            if outcome == "refused":
                continue
            self._tokens[axis, label, "prompt"] += len(stream.request.prompt_token_ids)
            self._tokens[axis, label, "generation"] += stream.output_tokens
            if stream.first_token_ns is not None:
                count, seconds = self._ttft.get((axis, label), (0, 0.0))
                seconds += (stream.first_token_ns - stream.arrival_ns) / 1e9
                self._ttft[axis, label] = count + 1, seconds

    def _of(self, stream: Stream) -> Iterator[tuple[str, str]]:
        names = {
            "tenant": stream.request.tenant,
            "request_class": stream.request.request_class,
            "route": self._routes[stream.tags.route],
            "model_name": stream.tags.model,
            "endpoint": stream.tags.path,
        }
        return ((axis, self._labels[axis].of(name)) for axis, name in names.items())

    def text(self) -> str:
        """The Prometheus text format, 0.0.4."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> Iterator[Metric]:
        for axis in self._labels:
            requests = CounterMetricFamily(
                f"batchmark:requests_by_{axis}", f"Requests that left, by {axis}.", labels=[axis, "outcome"]
            )
            for (of, label, outcome), count in self._requests.items():
                if of == axis:
                    requests.add_metric([label, outcome], count)
            yield requests
            tokens = CounterMetricFamily(
                f"batchmark:tokens_by_{axis}", f"Their tokens, by {axis}.", labels=[axis, "kind"]
            )
            for (of, label, kind), count in self._tokens.items():
                if of == axis:
                    tokens.add_metric([label, kind], count)
            yield tokens
            ttft = SummaryMetricFamily(
                f"batchmark:time_to_first_token_seconds_by_{axis}",
                f"Arrival to first token, by {axis}.",
                labels=[axis],
            )
            for (of, label), (count, seconds) in self._ttft.items():
                if of == axis:
                    ttft.add_metric([label], count_value=count, sum_value=seconds)
            yield ttft
        yield from self._queues()

    def _queues(self) -> Iterator[Metric]:
        """As the engine last told, at most EVERY_S ago while it works."""
        shown = {
            "running": ("Sequences with a seat.", "running"),
            "waiting": ("Requests in the queue.", "waiting"),
            "waiting_tokens": ("Tokens of requests in the queue.", "waiting_tokens"),
            "kv_live_blocks": ("KV blocks in use.", "kv_live"),
            "kv_usable_blocks": ("KV blocks of the pool.", "kv_usable"),
            "admissible_requests": ("How many more requests could get a seat now.", "admissible"),
            "estimated_wait_seconds": ("Until what waits has a seat, by recent throughput.", "wait_s"),
        }
        queues = list(zip(self._routes, self._engine.queues, strict=False))
        for name, (text, attribute) in shown.items():
            family = GaugeMetricFamily(f"batchmark:queue_{name}", text, labels=["route"])
            for route, queue in queues:
                value = getattr(queue, attribute)
                if value is not None:
                    family.add_metric([route], value)
            yield family
        for axis, attribute in (("request_class", "by_class"), ("tenant", "by_tenant")):
            family = GaugeMetricFamily(
                f"batchmark:queue_waiting_by_{axis}",
                f"Requests in the queue, by {axis}.",
                labels=["route", axis],
            )
            for route, queue in queues:
                counts: Counter[str] = Counter()
                for label, count in getattr(queue, attribute).items():
                    counts[self._labels[axis].of(label)] += count
                for label, count in counts.items():
                    family.add_metric([route, label], count)
            yield family

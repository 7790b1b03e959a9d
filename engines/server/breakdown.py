"""Figures of /metrics by route, tenant, class, model and endpoint, and speeds of the last seconds. Every
label that a client chooses is bounded: the first names keep theirs, all later ones are `other`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from engines.server.engine_client import EngineClient, Stream
from engines.server.exposition import Page
from engines.stats import Stats
from engines.tenants import Labels

MOST_CLASSES = 20
WINDOW_S = 10.0
EVERY_S = 0.5
_QUEUE = (  # name, attribute of QueueState, text
    ("running", "running", "Sequences with a seat."),
    ("waiting", "waiting", "Requests in the queue."),
    ("waiting_tokens", "waiting_tokens", "Tokens of requests in the queue."),
    ("kv_live_blocks", "kv_live", "KV blocks in use."),
    ("kv_usable_blocks", "kv_usable", "KV blocks of the pool."),
    ("admissible_requests", "admissible", "How many more requests could get a seat now."),
    ("estimated_wait_seconds", "wait_s", "Until what waits has a seat, by recent throughput."),
)


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
        # Counters begin anew with every run of a server that is measured several times.
        changes = (max(0, new - old) for new, old in zip(self._values(stats), values, strict=True))
        return {name: change / span for name, change in zip(self.COUNTERS, changes, strict=True)}

    def _values(self, stats: Stats) -> tuple[int, ...]:
        return tuple(getattr(stats, name) for name in self.COUNTERS)


class Breakdown:
    """Counts of ended requests and of their tokens along each axis, one axis at a time: their product would
    not be bounded by much."""

    def __init__(self, engine: EngineClient, page: Page, routes: Sequence[str], tenants: int) -> None:
        self._engine = engine
        self._page = page
        self._routes = list(routes)
        self._labels: Mapping[str, Labels] = {
            "tenant": Labels(tenants),
            "request_class": Labels(MOST_CLASSES),
            "route": Labels(len(routes) + 1),
            "model": Labels(MOST_CLASSES),
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
            "model": stream.tags.model,
            "endpoint": stream.tags.path,
        }
        return ((axis, self._labels[axis].of(name)) for axis, name in names.items())

    def lines(self) -> Iterator[str]:
        page = self._page
        for axis in self._labels:
            for name, text, second, counts in (
                ("requests", "Requests that left", "outcome", self._requests),
                ("tokens", "Their tokens", "kind", self._tokens),
            ):
                yield from page.rows(
                    f"batchmark:{name}_by_{axis}",
                    f"{text}, by {axis}.",
                    "counter",
                    [({axis: key[1], second: key[2]}, n) for key, n in counts.items() if key[0] == axis],
                )
            yield from page.summaries(
                f"batchmark:time_to_first_token_seconds_by_{axis}",
                f"Arrival to first token, by {axis}.",
                [({axis: label}, *value) for (of, label), value in self._ttft.items() if of == axis],
            )
        yield from self._queues()

    def _queues(self) -> Iterator[str]:
        """As the engine last told, at most EVERY_S ago while it works."""
        page, queues = self._page, list(zip(self._routes, self._engine.queues, strict=False))
        for name, attribute, text in _QUEUE:
            values = [({"route": route}, getattr(queue, attribute)) for route, queue in queues]
            known = [row for row in values if row[1] is not None]
            yield from page.rows(f"batchmark:queue_{name}", text, "gauge", known)
        for axis, attribute in (("request_class", "by_class"), ("tenant", "by_tenant")):
            counts: Counter[tuple[str, str]] = Counter()
            for route, queue in queues:
                for label, count in getattr(queue, attribute).items():
                    counts[route, self._labels[axis].of(label)] += count
            rows = [({"route": route, axis: label}, count) for (route, label), count in counts.items()]
            name = f"batchmark:queue_waiting_by_{axis}"
            yield from page.rows(name, f"Requests in the queue, by {axis}.", "gauge", rows)

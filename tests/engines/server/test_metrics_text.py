"""The text of /metrics, read back by Prometheus' own parser."""

from __future__ import annotations

import math
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from engines.server.metrics import Metrics
from engines.stats import Stats
from harness.prometheus import FIGURES, parse

MODEL = 'a "model" \\ of\ntwo lines'


def server_metrics() -> Metrics:
    stats = Stats(running=3, waiting=2, kv_live=10, kv_cached=5, kv_free=5, preemptions=4, steps=7)
    metrics = Metrics(SimpleNamespace(stats=stats, queues=[]), MODEL, "chunked", 100)  # type: ignore[arg-type]
    metrics.prompt_tokens, metrics.generated_tokens = 120, 34
    for value in (0.0005, 0.001, 0.0011, 5000.0):
        metrics.ttft.observe(value)
    metrics.queue.observe(0.25)
    metrics.ended["stop"] += 5
    metrics.refused["queue_full"] += 2
    metrics.invalid[404] += 1
    return metrics


def test_every_sample_reads_back_with_its_labels() -> None:
    families = {f.name: f for f in text_string_to_metric_families(server_metrics().text().decode())}
    for family in families.values():
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            assert sample.labels["engine"] == "chunked"
    kinds = {name: family.type for name, family in families.items()}
    assert kinds["vllm:num_requests_running"] == "gauge"
    assert kinds["vllm:generation_tokens"] == "counter"
    assert kinds["vllm:time_to_first_token_seconds"] == "histogram"
    by_reason = {s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples}
    assert by_reason == {"stop": 5, "length": 0, "abort": 0, "error": 0}
    assert [s.labels["reason"] for s in families["vllm:admission_rejections"].samples] == ["queue_full"]
    assert [s.labels["status"] for s in families["batchmark:requests_invalid"].samples] == ["404"]


def test_buckets_are_cumulative_and_end_with_the_count() -> None:
    families = {f.name: f for f in text_string_to_metric_families(server_metrics().text().decode())}
    samples = families["vllm:time_to_first_token_seconds"].samples
    buckets = {float(s.labels["le"]): s.value for s in samples if s.name.endswith("_bucket")}
    assert (buckets[0.001], buckets[0.005], buckets[2560.0], buckets[math.inf]) == (2, 3, 3, 4)
    rest = {s.name.rpartition("_")[2]: s.value for s in samples if not s.name.endswith("_bucket")}
    assert rest == {"count": 4, "sum": 0.0005 + 0.001 + 0.0011 + 5000.0}


def test_the_names_are_those_that_vllm_has() -> None:
    """A reader of vLLM's names finds all that this server has; the prefix cache is off."""
    reading = parse(server_metrics().text())
    assert reading.dialect == "batchmark"
    expected = dict.fromkeys(FIGURES) | {
        "running": 3,
        "waiting": 2,
        "kv_usage": 0.5,
        "preemptions_total": 4,
        "prompt_tokens_total": 120,
        "generation_tokens_total": 34,
        "queue_time_s_sum": 0.25,
        "queue_time_s_count": 1,
        "ttft_s_sum": 0.0005 + 0.001 + 0.0011 + 5000.0,
        "ttft_s_count": 4,
        "prefix_cache_queries_total": 0,
        "prefix_cache_hits_total": 0,
    }
    assert reading.values == expected
    assert not reading.reasons

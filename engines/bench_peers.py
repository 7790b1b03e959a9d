"""Our scheduler beside the one of another system, in one process and on the same requests: what
`python -m engines.bench_scheduler --peer vllm transformers` runs.

The sides take turns, an iteration each. Every side has `running` seats, KV for all of them, one token budget,
no prefix cache, and gets the same requests in the same order; after each iteration its batch is compared with
ours, so the figures are of the same work (`same`: the share of iterations with as many tokens as ours).
The peers' own scheduler and KV manager are driven as their engines drive them, without a model.

    side           schedule                        update: tokens appended, ends seen, seats and KV given back
    ours           Scheduler.schedule              _publish, published, _dismiss; an Output a token
    vllm           v1 Scheduler.schedule, with     update_from_output; an EngineCoreOutput a token, without
                   the message to the workers      statistics
    transformers   FIFOScheduler.schedule_batch    ContinuousBatchProcessor.update_batch; a GenerationOutput
                                                   a token (streaming)

In none of them: how a request gets in, and how the plan becomes the arrays of the pass (our `assemble`,
vLLM's model runner, transformers' prepare_batch_tensors). vLLM runs with async_scheduling=False, since
overlapping the pass hides this cost and does not make it smaller."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import random
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.busy import ANSWER, BLOCK, PROMPT, Stopwatch, busy_engine, num_kv_blocks, token_budget, top_up
from engines.model.transformers_import import import_transformers


class Side(ABC):
    """One of those that take turns."""

    name: str
    schedule_s: float  # CPU seconds of the last iteration
    update_s: float
    tokens: int  # that it planned

    @abstractmethod
    def top_up(self, waiting: int) -> None:
        """New requests, until so many wait."""

    @abstractmethod
    def step(self) -> None:
        """One iteration."""


class Ours(Side):
    def __init__(self, preset: str, running: int, waiting: int) -> None:
        self.name = preset
        self._lengths = random.Random(7)
        self._engine = busy_engine(preset, running, waiting, lengths=self._lengths)
        self._watch = Stopwatch(self._engine)

    def top_up(self, waiting: int) -> None:
        top_up(self._engine, waiting, self._lengths)

    def step(self) -> None:
        self._watch.spent.clear()
        before = self._computed()
        self._engine.step()
        self.schedule_s, self.update_s = self._watch.spent["schedule"], self._watch.spent["publish"]
        self.tokens = self._computed() - before

    def _computed(self) -> int:
        counters = self._engine.counters
        return counters.prefill_tokens + counters.decode_tokens

    def stop(self) -> None:
        self._watch.stop()


class Peer(Side):
    """Another system's scheduler. It has taken its first iteration, as `busy_engine` has."""

    def __init__(self, running: int, waiting: int) -> None:
        self._added = 0
        self._lengths = random.Random(7)
        self.prepare(running)
        self.top_up(running + waiting)
        self.step()

    def top_up(self, waiting: int) -> None:
        while self.num_waiting() < waiting:
            self._added += 1
            self.add(str(self._added), [1] * PROMPT, self._lengths.randint(1, ANSWER))

    @abstractmethod
    def prepare(self, running: int) -> None: ...

    @abstractmethod
    def num_waiting(self) -> int: ...

    @abstractmethod
    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None: ...


class Vllm(Peer):
    name = "vllm"

    def prepare(self, running: int) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import_transformers()
        torch: Any = importlib.import_module("torch")
        config: Any = importlib.import_module("vllm.config")
        kv: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        structured: Any = importlib.import_module("vllm.v1.structured_output")
        self._scheduler_module: Any = importlib.import_module("vllm.v1.core.sched.scheduler")
        self._request: Any = importlib.import_module("vllm.v1.request").Request
        self._sampling: Any = importlib.import_module("vllm.sampling_params").SamplingParams
        self._result: Any = importlib.import_module("vllm.v1.outputs").ModelRunnerOutput

        blocks = num_kv_blocks(running)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(_TINY))
            model = config.ModelConfig(
                model=folder,
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=PROMPT + ANSWER,
                enforce_eager=True,
            )
        cache = config.CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
        vllm_config = config.VllmConfig(
            model_config=model,
            cache_config=cache,
            scheduler_config=config.SchedulerConfig(
                max_num_seqs=running,
                max_num_batched_tokens=token_budget(running),
                max_model_len=PROMPT + ANSWER,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            device_config=config.DeviceConfig(device="cpu"),
        )
        cache.num_gpu_blocks = blocks
        layer = kv.FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self._scheduler = self._scheduler_module.Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=kv.KVCacheConfig(blocks, [], [kv.KVCacheGroupSpec(["layer"], layer)]),
            structured_output_manager=structured.StructuredOutputManager(vllm_config),
            block_size=BLOCK,
            log_stats=False,
        )

    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = self._sampling(max_tokens=max_tokens, ignore_eos=True)
        self._scheduler.add_request(self._request(request_id, prompt, sampling, None))

    def step(self) -> None:
        begin = time.thread_time()
        plan = self._scheduler.schedule()
        self.schedule_s = time.thread_time() - begin
        self.tokens = plan.total_num_scheduled_tokens
        ids = list(plan.num_scheduled_tokens)
        requests = [self._scheduler.requests[request_id] for request_id in ids]
        result = self._result(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[0] if r.num_computed_tokens >= r.num_tokens else [] for r in requests],
        )
        begin = time.thread_time()
        self._scheduler.update_from_output(plan, result)
        self.update_s = time.thread_time() - begin


class Transformers(Peer):
    name = "transformers"

    def prepare(self, running: int) -> None:
        transformers: Any = import_transformers()
        torch: Any = importlib.import_module("torch")
        package = "transformers.generation.continuous_batching"
        api: Any = importlib.import_module(f"{package}.continuous_api")
        cache: Any = importlib.import_module(f"{package}.cache")
        schedulers: Any = importlib.import_module(f"{package}.scheduler")
        processors: Any = importlib.import_module(f"{package}.cb_logits_processors")
        distributed: Any = importlib.import_module(f"{package}.distributed")
        self._request: Any = importlib.import_module(f"{package}.requests").RequestState

        cpu, alone = torch.device("cpu"), distributed.DistributedHelper(None, None)
        config = transformers.LlamaConfig(**_TINY, attn_implementation="paged|flash_attention_2")  # no masks
        settings = transformers.ContinuousBatchingConfig(
            page_size=BLOCK,
            num_blocks=num_kv_blocks(running),
            max_batch_tokens=token_budget(running),
            max_requests_per_batch=running,
            max_blocks_per_request=0,
            max_memory_percent=0.9,
            allow_block_sharing=False,
            use_async_batching=False,
            use_cuda_graph=False,
        )
        self._cache = cache.PagedAttentionCache(config, settings, cpu, alone, dtype=torch.float32)
        self._scheduler = schedulers.FIFOScheduler(self._cache, 0.0, running)
        self._logits = processors.ContinuousBatchingLogitsProcessorList(transformers.LogitsProcessorList())
        self._router = api.OutputRouter()
        self._processor = api.ContinuousBatchProcessor(
            cache=self._cache,
            config=config,
            generation_config=transformers.GenerationConfig(do_sample=False),
            continuous_batching_config=settings,
            logit_processor=self._logits,
            input_queue=queue.Queue(),
            cancel_queue=queue.Queue(),
            output_router=self._router,
            background_thread_status=api.BackgroundThreadStatus(),
            model_device=cpu,
            model_dtype=torch.float32,
            scheduler=self._scheduler,
            distributed_helper=alone,
        )
        self._processor.inputs_and_outputs.output_ids.zero_()

    def num_waiting(self) -> int:
        return len(self._scheduler.waiting_requests)

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        state = self._request(request_id, prompt, max_new_tokens=max_tokens, streaming=True)
        self._scheduler.add_waiting_request(state)

    def step(self) -> None:
        begin = time.thread_time()
        batch, fast_path, self.tokens, kv_read = self._scheduler.schedule_batch(
            self._cache.max_batch_tokens, self._cache.max_tokens_read
        )
        self.schedule_s = time.thread_time() - begin
        inputs = self._processor.inputs_and_outputs
        inputs.prepare_batch_tensors(batch, self._logits, fast_path, self.tokens, kv_read, False)
        begin = time.thread_time()
        self._processor.update_batch()
        self.update_s = time.thread_time() - begin
        self._router.output_queue.queue.clear()


_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 8,
    "max_position_embeddings": PROMPT + ANSWER,
}
"""The model that nobody computes: schedulers ask how large its KV is."""

PEERS: dict[str, type[Peer]] = {"vllm": Vllm, "transformers": Transformers}


def version(name: str) -> str | None:
    """None: it is not installed here."""
    if importlib.util.find_spec(name) is None:
        return None
    return importlib.metadata.version(name)


def compare(
    preset: str, peers: Sequence[str], running: int, waiting: int, steps: int
) -> list[dict[str, Any]]:
    """A row a side, ours first: CPU microseconds an iteration, mean of `steps` after as many for warming
    up."""
    ours = Ours(preset, running, waiting)
    sides: list[Side] = [ours, *(PEERS[name](running, waiting) for name in peers)]
    spent: list[list[tuple[float, float]]] = [[] for _ in sides]
    same = [0] * len(sides)
    gc.collect()
    gc.disable()  # a pass over all objects now and then would be somebody's bad luck
    try:
        for i in range(2 * steps):
            for side in sides[i % len(sides) :] + sides[: i % len(sides)]:  # nobody always goes first
                side.top_up(waiting)
                side.step()
            if i >= steps:
                for k, side in enumerate(sides):
                    spent[k].append((side.schedule_s, side.update_s))
                    same[k] += side.tokens == ours.tokens
    finally:
        gc.enable()
        ours.stop()
    rows: list[dict[str, Any]] = []
    for side, times, equal in zip(sides, spent, same, strict=True):
        schedule, update = (statistics.fmean(part) * 1e6 for part in zip(*times, strict=True))
        rows.append(
            {
                "side": side.name,
                "running": running,
                "schedule": round(schedule, 1),
                "update": round(update, 1),
                "sum": round(schedule + update, 1),
                "same": round(equal / steps, 3),
            }
        )
    for row in rows:
        row["times_ours"] = round(row["sum"] / rows[0]["sum"], 2)
    return rows

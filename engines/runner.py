"""One forward pass over a ragged batch. The runner knows no request, only arrays: `run(RaggedBatch) ->
StepResult`.

On the CPU in float32 every row's bits are independent of the batch it is in (see `info()["determinism"]`):
the rows are padded to the multiple that the self-check at the start found, the attention kernel and the fused
operations work row by row, and sampling reads nothing but its row. So the same request gives the same tokens
whole or in chunks, alone or in a batch, and again after preemption.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def prepare_torch() -> None:
    """What its libraries read once, when torch is loaded: this runs before. A value that the user has set
    stays.

    OpenMP threads that wait spin for a moment (50,000 pauses are 1 to 3 ms), then they sleep. A pass has
    hundreds of parallel regions, and waking a thread for each of them costs up to a third of it; a thread
    that spins for longer, between passes, takes the client's core. The two caches of oneDNN's compiled
    products hold 1024 entries each by default, one for every weight shape and row count, half a megabyte
    together: prompts of ever new lengths would fill gigabytes. These sizes hold the decode batches of 25 row
    counts over five shapes of weights; a row count that is new costs the same."""
    for name, value in (
        ("OMP_WAIT_POLICY", "PASSIVE"),
        ("GOMP_SPINCOUNT", "50000"),  # GNU's, in pauses
        ("KMP_BLOCKTIME", "1"),  # Intel's and LLVM's, in ms
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256"),
        ("LRU_CACHE_CAPACITY", "128"),
    ):
        os.environ.setdefault(name, value)


prepare_torch()

import torch  # noqa: E402

from engines.batch import NULL_BLOCK, Copies, RaggedBatch, StepResult  # noqa: E402
from engines.compiled import compile_model  # noqa: E402
from engines.config import ConfigError, EngineConfig, thread_count  # noqa: E402
from engines.device_pass import DevicePass, Readback, Span  # noqa: E402
from engines.graph_sizes import Shape, ladder  # noqa: E402
from engines.graphs import DecodeGraphs, cuda_recorder, why_no_graphs  # noqa: E402
from engines.model.base import ForwardContext  # noqa: E402
from engines.model.dtype_choice import fastest_dtype  # noqa: E402
from engines.model.invariance import BITWISE, RowGuarantee, find_row_guarantee  # noqa: E402
from engines.model.loader import LoadedModel, load_model, model_shape  # noqa: E402
from engines.staging import Carried, Inputs, Staging  # noqa: E402
from kernels import allocate_kv, fused, get_backend  # noqa: E402
from kernels.cpu.isa import candidates  # noqa: E402
from kernels.memory import available_memory  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_runner(
    model_cfg: Mapping[str, Any],
    engine: EngineConfig,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    attention: str = "auto",
) -> ModelRunner:
    """Everything that a pass needs, checked and allocated. Raises ConfigError, one line, for what cannot
    work."""
    torch_device = resolve_device(device)
    if torch_device.type == "cpu":
        try:
            candidates()
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if engine.cpu_affinity is not None:  # OpenMP's threads start later, and take it over
        os.sched_setaffinity(0, engine.cpu_affinity)
    torch.set_num_threads(thread_count(engine.threads, engine.cpu_affinity))
    measured = None
    if dtype == "fastest":
        dtype = "auto"
        if torch_device.type == "cpu":
            measured = fastest_dtype(model_shape(model_cfg), torch.get_num_threads())
            dtype = measured["dtype"]
    torch_dtype = resolve_dtype(dtype, torch_device)
    with torch.inference_mode():
        loaded = load_model(model_cfg, torch_device, torch_dtype, seed)
        try:
            runner = ModelRunner(loaded, engine, torch_device, torch_dtype, attention)
        except BaseException:
            loaded.model.close()
            raise
        runner.dtype_measured = measured
        return runner


class ModelRunner:
    """Owns the weights and the KV caches."""

    dtype_measured: dict[str, Any] | None = None
    """With dtype=fastest: what it was chosen by."""

    def __init__(
        self,
        loaded: LoadedModel,
        engine: EngineConfig,
        device: torch.device,
        dtype: torch.dtype,
        attention: str = "auto",
    ) -> None:
        config = loaded.config
        config.check_context(engine.max_model_len)
        self.loaded = loaded
        self.num_kv_blocks = kv_blocks(engine, config.kv_bytes_per_token(dtype.itemsize))
        self.num_host_blocks = host_blocks(engine, config.kv_bytes_per_token(dtype.itemsize))
        self._device, self._dtype = device, dtype
        self._threads = torch.get_num_threads()
        kv_bytes = self.num_kv_blocks * engine.block_size * config.kv_bytes_per_token(dtype.itemsize)
        check_memory(kv_bytes, available_memory(device), engine, self.num_kv_blocks)
        self._backend = get_backend(attention, device, dtype)
        caches = [
            allocate_kv(
                self.num_kv_blocks,
                engine.block_size,
                config.kv_heads,
                config.head_dim,
                dtype,
                device,
                self._backend,
            )
            for _ in range(config.layers)
        ]
        self._k_caches = [k for k, _ in caches]
        self._v_caches = [v for _, v in caches]
        self._caches = [*self._k_caches, *self._v_caches]
        self._kv_bytes = sum(t.numel() * t.element_size() for t in self._caches)
        self._host_caches = self._allocate_host()
        self._affinity = engine.cpu_affinity
        self._rows = RowGuarantee(1, "not checked: engine.determinism=fast")
        if engine.determinism == BITWISE:
            self._rows = find_row_guarantee(
                loaded.model.row_probes(), engine.max_num_batched_tokens, engine.max_num_seqs, device, dtype
            )
        self._determinism = self._rows.guarantee
        if self._determinism == BITWISE and self._backend.name == "torch":
            self._determinism = "not bitwise: the torch attention adds in an order that depends on the chunk"

        self._staging, self._readback = Staging(device), Readback(device)
        self._compiled = compile_model(loaded.model, device) if engine.compile else None
        self._graphs = self._build_graphs(engine)

    @property
    def asynchronous(self) -> bool:
        """Whether `begin` comes back before the pass has ended."""
        return self._device.type == "cuda"

    def adopt_thread(self) -> None:
        """Passes will be run by the calling thread: how many threads they use is a setting of each thread."""
        torch.set_num_threads(self._threads)

    @torch.inference_mode()
    def copy(self, copies: Copies) -> None:
        """Blocks to host memory, and then back. On CUDA these are transfers from and to pinned memory, in
        the stream of the passes: what comes later waits for them, the host does not."""
        for device, host in zip(self._caches, self._host_caches, strict=True):
            for block, place in copies.out:
                host[place].copy_(device[block], non_blocking=True)
            for place, block in copies.back:
                device[block].copy_(host[place], non_blocking=True)

    def run(self, batch: RaggedBatch) -> StepResult:
        """One pass: writes the keys and values of the batch's tokens, samples a token per sample row."""
        return self.begin(batch).result()

    @torch.inference_mode()
    def begin(self, batch: RaggedBatch, carried: Carried | None = None) -> DevicePass:
        """Launches a pass behind those that were launched before; the CPU has no queue and computes it now.
        At most two may be under way. `carried`: tokens that only the device knows yet."""
        span = Span(self._device)
        done = None if self._graphs is None else self._graphs.run(batch, carried)
        if done is None:
            logits, pad = self._eager(batch, carried)
            done = logits, fused.argmax(logits), pad
        return DevicePass(done[0], done[1], batch.sampling, done[2], self._readback, span)

    def _eager(self, batch: RaggedBatch, carried: Carried | None) -> tuple[torch.Tensor, int]:
        """Logits [R, vocab] and the number of rows that were added."""
        tokens, samples = len(batch.token_ids), len(batch.sample_rows)
        multiple = self._rows.multiple
        rows, width = batch.block_table.shape
        shape = Shape(tokens + -tokens % multiple, rows, samples + -samples % multiple, width)
        inputs = self._staging.stage(batch, shape, carried)
        max_q_len = int((batch.cu_q[1:] - batch.cu_q[:-1]).max())
        return self._forward(inputs, tokens, max_q_len)[:samples], shape.tokens - tokens

    def _forward(self, inputs: Inputs, real_tokens: int, max_q_len: int) -> torch.Tensor:
        ctx = ForwardContext(
            backend=self._backend,
            k_caches=self._k_caches,
            v_caches=self._v_caches,
            slot=inputs.slot,
            cu_q=inputs.cu_q,
            kv_len=inputs.kv_len,
            block_table=inputs.block_table,
            max_q_len=max_q_len,
            real_tokens=real_tokens,
            sample_rows=inputs.sample_rows,
        )
        return self.loaded.model.forward(inputs.token_ids, inputs.positions, ctx)

    @torch.inference_mode()
    def _build_graphs(self, engine: EngineConfig) -> DecodeGraphs | None:
        """None where decodes run without graphs; `_no_graphs` then says why. Raises ConfigError where they
        are asked for and cannot be."""
        self._no_graphs = why_no_graphs(engine, self._device, self._backend.name)
        if self._no_graphs is not None:
            return None
        sizes = engine.cuda_graph_sizes or ladder(engine.max_num_seqs)
        width = -(-engine.max_model_len // engine.block_size)
        try:
            return DecodeGraphs(
                lambda inputs: self._forward(inputs, inputs.token_ids.shape[0], 1),
                sizes,
                width,
                self.loaded.config.vocab,
                self._dtype,
                self._device,
                cuda_recorder(self._device),
            )
        except RuntimeError as error:  # an operation that cannot be captured, or no memory for the graphs
            self._no_graphs = f"capturing failed: {' '.join(str(error).split())[:200]}"
            if engine.cuda_graphs:
                raise ConfigError(f"engine.cuda_graphs=true: {self._no_graphs}; use false") from None
            return None

    def _allocate_host(self) -> list[torch.Tensor]:
        """Like the caches, on the host. The memory is touched now: a system that gives it out only when it
        is written would end the server in the middle of a run."""
        pinned = self._device.type == "cuda"
        return [
            torch.zeros(self.num_host_blocks, *cache.shape[1:], dtype=cache.dtype, pin_memory=pinned)
            for cache in self._caches
        ]

    def info(self) -> dict[str, Any]:
        """What a run records about its engine. Bytes and counts."""
        return {
            "device": str(self._device),
            "dtype": str(self._dtype).removeprefix("torch."),
            "dtype_measured": self.dtype_measured,
            "threads": torch.get_num_threads(),
            "cpu_affinity": None if self._affinity is None else list(self._affinity),
            "linear": getattr(self.loaded.model, "linear_kind", "torch"),
            "attention": self._backend.name,
            "attention_isa": getattr(self._backend, "isa", None),
            "determinism": self._determinism,
            "row_multiple": self._rows.multiple,
            "parameters": self.loaded.parameters,
            "kv_bytes": self._kv_bytes,
            "num_kv_blocks": self.num_kv_blocks,
            "num_host_blocks": self.num_host_blocks,
            "graphs": {"on": False, "why": self._no_graphs} if self._graphs is None else self._graphs.info(),
            "compile": self._compiled,
        }

    def close(self) -> None:
        self.loaded.model.close()


def resolve_device(device: str) -> torch.device:
    """auto: cuda when torch sees a GPU. Raises ConfigError."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={device}: choose from auto, cpu, cuda")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("device=cuda: torch sees no CUDA device here; use device=cpu or device=auto")
    return torch.device("cuda" if available and device != "cpu" else "cpu")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """auto: float32 on the CPU, where it is exact to compare; bfloat16 on CUDA. (fastest: build_runner.)"""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype}: choose from auto, fastest, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def kv_blocks(engine: EngineConfig, bytes_per_token: int) -> int:
    """Blocks of the pool, block 0 included, which belongs to nobody. From kv_memory_gb it is at most what
    max_num_seqs sequences of max_model_len could fill, and at least one of them. A num_kv_blocks of the
    user's may be smaller: then a request that can never fit is refused when it comes. Raises ConfigError."""
    if engine.num_kv_blocks is not None:
        return engine.num_kv_blocks
    assert engine.kv_memory_gb is not None
    per_sequence = -(-engine.max_model_len // engine.block_size)
    needed = per_sequence + NULL_BLOCK + 1
    blocks = int(engine.kv_memory_gb * 1e9 / (bytes_per_token * engine.block_size))
    if blocks < needed:
        raise ConfigError(
            f"engine.kv_memory_gb={engine.kv_memory_gb} is {blocks} blocks of engine.block_size="
            f"{engine.block_size}: one sequence of engine.max_model_len={engine.max_model_len} needs "
            f"{needed}, the null block included"
        )
    return min(blocks, engine.max_num_seqs * per_sequence + 1)


def host_blocks(engine: EngineConfig, bytes_per_token: int) -> int:
    """Blocks of host memory for preempted sequences. Raises ConfigError."""
    if engine.preemption != "swap":
        return 0
    bytes_per_block = bytes_per_token * engine.block_size
    blocks = int(engine.swap_memory_gb * 1e9 / bytes_per_block)
    free = available_memory(torch.device("cpu"))
    if blocks < 1 or blocks * bytes_per_block > free:
        raise ConfigError(
            f"engine.swap_memory_gb={engine.swap_memory_gb}: needs at least one block, "
            f"{bytes_per_block / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
        )
    return blocks


def check_memory(kv_bytes: int, available: int, engine: EngineConfig, num_kv_blocks: int) -> None:
    """A KV pool that the memory does not hold is refused at the start: on the CPU the system gives out pages
    only when they are touched, and would end the server in the middle of a run. Raises ConfigError."""
    if kv_bytes > available:
        setting = "num_kv_blocks" if engine.num_kv_blocks is not None else "kv_memory_gb"
        raise ConfigError(
            f"engine.{setting}={getattr(engine, setting)}: {num_kv_blocks} blocks of engine.block_size="
            f"{engine.block_size} take {kv_bytes / 1e9:.3g} GB, and {available / 1e9:.3g} GB are free"
        )

"""What a load is aimed at, how it is driven, and what comes back of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.tokenizer import Tokenizer

KINDS = ("open", "closed")
BACKENDS = ("auto", "lean", "aiohttp")
APIS = ("completions", "chat")
DIALECTS = ("batchmark", "openai")


class LoadError(ValueError):
    """A setting of the load cannot work. The message is one line: the setting, its value, what would work."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server. dialect "batchmark" (ours) is told where the answer really ends in `stop_after`; "openai"
    gets it as max_tokens with ignore_eos. tokenizer: for text prompts, and for counts where a server sends
    none."""

    base_url: str  # http://host:port, with or without /v1
    model: str
    api: str = "completions"
    dialect: str = "batchmark"
    api_key: str | None = field(default=None, repr=False)
    send_ids: bool = True  # prompts as token ids; False: as text
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if self.api not in APIS:
            raise LoadError(f"engine.api={self.api}: choose from {', '.join(APIS)}")
        if self.dialect not in DIALECTS:
            raise LoadError(f"dialect={self.dialect}: choose from {', '.join(DIALECTS)}")
        if not self.base_url.startswith(("http://", "https://")):
            raise LoadError(f"engine.base_url={self.base_url}: needs to begin with http:// or https://")
        if self.sends_text and self.tokenizer is None:
            raise LoadError(
                "engine.tokenizer=null: text prompts need a tokenizer, give a folder or tokenizer.json"
            )

    @property
    def sends_text(self) -> bool:
        """Chat has no token-id prompts."""
        return self.api == "chat" or not self.send_ids

    @property
    def root_url(self) -> str:
        """base_url without /v1 and trailing slash: the paths begin with v1/."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """kind "open": every request leaves at its own time; concurrency then caps what is under way, and the
    wait for a place counts as latency from the intended time. kind "closed": `concurrency` clients, each
    sends its next request when its last one has ended; a client that is in a session thinks and goes on with
    it."""

    run_id: str
    kind: str = "open"
    requests: int | None = None  # the first n of the schedule; None: all of it
    duration_s: float | None = None  # open: arrivals before this; closed: stop sending after this
    concurrency: int | None = None
    timeout_s: float | None = 600.0  # patience for a whole answer, from the dispatch of each attempt
    max_wait_s: float | None = None  # open with a cap: who has waited longer for a place is shed
    ramp_s: float | None = None  # closed: the clients begin one after the other, spread over this time
    retries: int = 0  # further attempts of a request that broke or was refused before any token
    retry_backoff_s: float = 0.5  # before the first retry; each further one waits twice as long
    backend: str = "auto"  # how the bytes are moved, one of BACKENDS
    trust_env: bool = False  # proxies and .netrc as the environment says (aiohttp; about 1 ms a request)
    processes: int | str = "auto"  # that share the load; one call of run_load is one of them
    keep_text: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LoadError(f"load={self.kind}: choose from {', '.join(KINDS)}")
        if self.backend not in BACKENDS:
            raise LoadError(f"load.backend={self.backend}: choose from {', '.join(BACKENDS)}")
        if self.kind == "closed" and self.concurrency is None:
            raise LoadError("load.concurrency=null: load=closed needs the number of clients")
        for name in ("requests", "duration_s", "concurrency", "timeout_s", "max_wait_s", "ramp_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise LoadError(f"load.{name}={value}: needs a number above 0, or null for none")
        for name in ("retries", "retry_backoff_s"):
            if not getattr(self, name) >= 0:
                raise LoadError(f"load.{name}={getattr(self, name)}: needs a number of 0 or more")
        if self.processes != "auto" and not (isinstance(self.processes, int) and self.processes > 0):
            raise LoadError(f"load.processes={self.processes}: needs auto or a number above 0")
        if self.max_wait_s is not None and (self.kind, self.concurrency is None) != ("open", False):
            raise LoadError(
                f"load.max_wait_s={self.max_wait_s:g}: only load=open with load.concurrency has a wait"
            )
        if self.ramp_s is not None and self.kind != "closed":
            raise LoadError(
                f"load.ramp_s={self.ramp_s:g}: is for load=closed; an open schedule has its own rates"
            )


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What a backend says about its own work once the load is over."""

    backend: str  # "lean" or "aiohttp"
    stamps: str  # where the time of a chunk comes from: "kernel", or "reader" (taken after the read)
    loop_lag_ms: tuple[float, ...]  # how late its loop came, 20 samples a second
    read_lag_ms: tuple[float, ...] = ()  # from the arrival of bytes in the kernel to their reading, a sample
    connections: int = 0  # that were opened
    clock_offset_step_ns: int | None = None  # a jump of the wall clock, seen while kernel stamps were mapped


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the load generator knows beside its records. Times are ns from the run's t0."""

    scheduled: int
    sent: int  # requests that were written to a socket, in whatever attempt
    counts: dict[str, int]  # requests by their final outcome; they add up to scheduled
    last_send_ns: int | None
    load_end_ns: int  # the last answer has ended
    incomplete_reason: str | None
    loop_lag_ms: tuple[float, ...]  # how late the loop came, 20 samples a second
    cpu_s: float  # of this process, from the start of the load to its end
    notes: tuple[str, ...] = ()
    backend: str = "aiohttp"
    stamps: str = "reader"
    read_lag_ms: tuple[float, ...] = ()
    connections: int = 0
    sent_attempts: int = 0  # as `sent`, each retry counted too
    retried: int = 0  # attempts that were followed by another one
    clock_offset_step_ns: int | None = None

"""What a load is aimed at, how it is driven, and what comes back of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.tokenizer import Tokenizer

KINDS = ("open", "closed")
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
    sends its next request when its last one has ended."""

    run_id: str
    kind: str = "open"
    requests: int | None = None  # the first n of the schedule; None: all of it
    duration_s: float | None = None  # stop sending after this; what is under way is waited for
    concurrency: int | None = None
    timeout_s: float | None = 600.0  # patience for a whole answer, from its dispatch
    keep_text: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LoadError(f"load={self.kind}: choose from {', '.join(KINDS)}")
        if self.kind == "closed" and self.concurrency is None:
            raise LoadError("load.concurrency=null: load=closed needs the number of clients")
        for name in ("requests", "duration_s", "concurrency", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise LoadError(f"load.{name}={value}: needs a number above 0, or null for none")


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the load generator knows beside its records. Times are ns from the run's t0."""

    scheduled: int
    sent: int  # requests that were written to a socket
    counts: dict[str, int]  # by outcome; they add up to scheduled
    last_send_ns: int | None
    load_end_ns: int  # the last answer has ended
    incomplete_reason: str | None
    loop_lag_ms: tuple[float, ...]  # event-loop lag, 20 samples a second
    cpu_s: float  # of this process, from the start of the load to its end
    notes: tuple[str, ...] = ()

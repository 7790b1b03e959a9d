"""The messages between the server and its engine process, and their bytes.

A frame is `<length: u32><kind: u8><payload: length bytes>`, little-endian. The payload is JSON: an array of
typed fields, or an object where the fields are open; the token ids of a prompt follow theirs as raw int32.
Both ends are this program on this host; even so nothing is unpickled, every field has its type checked, and a
frame has a largest size.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import orjson

from engines.request import Request, SamplingParams
from engines.stats import QueueState, Stats

MAX_FRAME_BYTES = 1 << 28
"""Far above any prompt that the server's limit of a body lets through."""
HEAD = struct.Struct("<IB")
ABORT_REASONS = ("abort", "stop")
QUESTIONS = ("limits", "steps", "records")
_COUNT = struct.Struct("<I")
_INT32 = "i"


class WireError(ValueError):
    """These bytes are no message, or the message is too large for a frame."""


@dataclass(frozen=True, slots=True)
class Start:
    """Server to engine, once: what to build. `records` is a folder or None."""

    config: dict[str, Any]
    records: str | None
    server_pid: int


@dataclass(frozen=True, slots=True)
class Add:
    """Server to engine. `key` is the server's name for the request, used in everything that comes back."""

    key: int
    arrival_ns: int
    request: Request
    route: int = 0  # the number of the engine, in the order of engines.routes


@dataclass(frozen=True, slots=True)
class Abort:
    """Server to engine: nobody waits for more of this answer. reason: one of ABORT_REASONS."""

    key: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Server to engine, answered by one Told with the same key between two iterations. what: one of
    QUESTIONS."""

    key: int
    what: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """Engine to server. error: in one line, why it was not done; nothing has changed then."""

    key: int
    error: str | None
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ready:
    """Engine to server, once: the model is loaded."""

    facts: dict[str, Any]  # for the ready line
    tokenizer: dict[str, Any]  # for engines.model.tokenizer.from_description
    stats: Stats


@dataclass(frozen=True, slots=True)
class Unfit:
    """Engine to server, in the place of Ready: a setting cannot work, in one line."""

    message: str


@dataclass(frozen=True, slots=True)
class Died:
    """Engine to server, at last: the engine has failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Produced:
    """What an iteration produced for one request. Its last one has a finish_reason."""

    key: int
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int | None = None  # of its prompt; with its first token


@dataclass(frozen=True, slots=True)
class Refusal:
    key: int
    reason: str
    message: str
    status: int
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass, for /metrics."""

    tokens: int
    duration_ns: int
    host_gap_ns: int | None


@dataclass(frozen=True, slots=True)
class Left:
    """A scheduled request that has left, for /metrics: how long it was in each state; None: never was."""

    queued_ns: int
    prefill_ns: int | None
    decode_ns: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """Engine to server, after every iteration and after commands: all that has happened since the last
    one. at_ns: when, on CLOCK_MONOTONIC."""

    at_ns: int
    stats: Stats
    produced: list[Produced] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    queues: list[QueueState] = field(default_factory=list)  # of every route, or none: not in every report


Message = Start | Add | Abort | Ask | Ready | Unfit | Died | Report | Told

_KINDS: dict[type, int] = {Start: 0, Add: 1, Abort: 2, Ask: 3}
_KINDS |= {Ready: 16, Unfit: 17, Died: 18, Report: 19, Told: 20}
_TYPES = {kind: message for message, kind in _KINDS.items()}

Types = tuple[type, ...]
_NONE = type(None)
_INT: Types = (int,)
_STR: Types = (str,)
_DICT: Types = (dict,)
_LIST: Types = (list,)
_FLOAT: Types = (float,)
_MAYBE_INT: Types = (int, _NONE)
_MAYBE_STR: Types = (str, _NONE)

# key, route, arrival_ns, max_tokens, temperature, top_p, seed, ignore_eos, stop_after, priority, tenant,
# class, deadline_ms, label
_ADD: Sequence[Types] = [_INT, _INT, _INT, _INT, _FLOAT, _FLOAT, _MAYBE_INT, (bool,), _MAYBE_INT, _INT]
_ADD = [*_ADD, _STR, _STR, (float, _NONE), _DICT]
_START = (_DICT, _MAYBE_STR, _INT)
_ABORT = (_INT, _STR)
_READY = (_DICT, _DICT, _DICT)
_TEXT = (_STR,)
_REPORT = (_INT, _DICT, _LIST, _LIST, _LIST, _LIST, _LIST)
_ASK = (_INT, _STR, _DICT)
_TOLD = (_INT, _MAYBE_STR, _DICT)
_QUEUE: Sequence[Types] = [*(_INT,) * 6, (float, int, _NONE), _DICT, _DICT]
_QUEUE_FIELDS = tuple(f.name for f in fields(QueueState))
_PRODUCED = (_INT, _LIST, _MAYBE_STR, _MAYBE_STR, _MAYBE_INT)
_REFUSAL = (_INT, _STR, _STR, _INT, _MAYBE_INT)
_PASS = (_INT, _INT, _MAYBE_INT)
_LEFT = (_INT, _MAYBE_INT, _MAYBE_INT)


def encode(message: Message) -> bytes:
    """The frame of a message. Raises WireError when it is larger than MAX_FRAME_BYTES, and for a request with
    a field of another type, which the engine could not read."""
    if isinstance(message, Add):
        payload = _add_payload(message)
    else:
        payload = orjson.dumps(_fields(message))
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(payload)} bytes: needs at most {MAX_FRAME_BYTES}")
    return HEAD.pack(len(payload), _KINDS[type(message)]) + payload


def decode(kind: int, payload: bytes | memoryview) -> Message:
    """The message of a payload. Raises WireError."""
    message = _TYPES.get(kind)
    if message is None:
        raise WireError(f"kind {kind} is not a message")
    if message is Add:
        return _add(payload)
    values = _json(payload)
    if message is Report:
        return _report(values)
    if message is Abort:
        key, reason = _checked(values, _ABORT)
        if reason not in ABORT_REASONS:
            raise WireError(f"{reason!r:.60} is no reason to abort")
        return Abort(key, reason)
    if message is Ask:
        key, what, arguments = _checked(values, _ASK)
        if what not in QUESTIONS:
            raise WireError(f"{what!r:.60} is no question")
        return Ask(key, what, arguments)
    if message is Told:
        return Told(*_checked(values, _TOLD))
    if message is Start:
        return Start(*_checked(values, _START))
    if message is Ready:
        facts, tokenizer, stats = _checked(values, _READY)
        return Ready(facts, tokenizer, _stats(stats))
    return message(*_checked(values, _TEXT))


def _fields(message: Message) -> Sequence[Any]:
    if isinstance(message, Report):
        return (
            message.at_ns,
            message.stats,
            [
                (p.key, p.token_ids, p.finish_reason, _text(p.error), p.cached_tokens)
                for p in message.produced
            ],
            [(r.key, r.reason, _text(r.message), r.status, r.retry_after_s) for r in message.refusals],
            [(p.tokens, p.duration_ns, p.host_gap_ns) for p in message.passes],
            [(r.queued_ns, r.prefill_ns, r.decode_ns) for r in message.left],
            [list(vars(q).values()) for q in message.queues],
        )
    if isinstance(message, Ask):
        return (message.key, message.what, message.arguments)
    if isinstance(message, Told):
        return (message.key, _text(message.error), message.value)
    if isinstance(message, Abort):
        return (message.key, message.reason)
    if isinstance(message, Start):
        return (message.config, message.records, message.server_pid)
    if isinstance(message, Ready):
        return (message.facts, message.tokenizer, message.stats)
    if isinstance(message, Unfit):
        return (_text(message.message),)
    assert isinstance(message, Died)
    return (_text(message.reason),)


def _add_payload(message: Add) -> bytes:
    request, sampling = message.request, message.request.sampling
    fields = [
        message.key,
        message.route,
        message.arrival_ns,
        request.max_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.seed,
        request.ignore_eos,
        request.stop_after,
        request.priority,
        request.tenant,
        request.request_class,
        request.deadline_ms,
        request.label,
    ]
    # Here too: what the engine cannot read would end it, and with it everyone's answers.
    head = orjson.dumps(_checked(fields, _ADD))
    ids = array(_INT32, request.prompt_token_ids)
    return b"".join((_COUNT.pack(len(head)), _COUNT.pack(len(ids)), head, ids.tobytes()))


def _add(payload: bytes | memoryview) -> Add:
    if len(payload) < 2 * _COUNT.size:
        raise WireError("a request without its lengths")
    (size,), (count,) = _COUNT.unpack_from(payload), _COUNT.unpack_from(payload, _COUNT.size)
    start = 2 * _COUNT.size
    ids = array(_INT32)
    if len(payload) != start + size + count * ids.itemsize:
        raise WireError(f"a request of {len(payload)} bytes that names {size} and {count} ids")
    head = _checked(_json(payload[start : start + size]), _ADD)
    ids.frombytes(payload[start + size :])
    key, route, arrival_ns, max_tokens, temperature, top_p, seed, ignore_eos, stop_after, *rest = head
    priority, tenant, request_class, deadline_ms, label = rest
    request = Request(
        prompt_token_ids=ids.tolist(),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature, top_p, seed),
        ignore_eos=ignore_eos,
        stop_after=stop_after,
        priority=priority,
        tenant=tenant,
        request_class=request_class,
        deadline_ms=deadline_ms,
        label=label,
    )
    return Add(key, arrival_ns, request, route)


def _report(values: Any) -> Report:
    at_ns, stats, produced, refusals, passes, left, queues = _checked(values, _REPORT)
    rows = [_checked(row, _PRODUCED) for row in produced]
    if not all(type(token) is int for _, token_ids, *_ in rows for token in token_ids):
        raise WireError("a token id that is no number")
    return Report(
        at_ns,
        _stats(stats),
        [Produced(*row) for row in rows],
        [Refusal(*_checked(row, _REFUSAL)) for row in refusals],
        [Pass(*_checked(row, _PASS)) for row in passes],
        [Left(*_checked(row, _LEFT)) for row in left],
        [_queue(row) for row in queues],
    )


def _queue(row: Any) -> QueueState:
    values = dict(zip(_QUEUE_FIELDS, _checked(row, _QUEUE), strict=True))
    if not all(type(count) is int for key in ("by_class", "by_tenant") for count in values[key].values()):
        raise WireError("a number of waiting requests that is no number")
    return QueueState(**values)


def _stats(values: dict[str, Any]) -> Stats:
    if not all(type(value) in (int, dict) for value in values.values()):
        raise WireError("a figure that is no number")
    try:
        return Stats(**values)
    except TypeError as error:
        raise WireError(f"figures: {error}") from None


def _json(payload: bytes | memoryview) -> Any:
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise WireError(f"a payload that is not JSON: {error}") from None


def _checked(values: Any, types: Sequence[Types]) -> list[Any]:
    if type(values) is not list or len(values) != len(types):
        raise WireError(f"a message without its {len(types)} fields")
    for value, allowed in zip(values, types, strict=True):
        if type(value) not in allowed:
            raise WireError(f"{value!r:.60} where {allowed[0].__name__} is due")
    return values


def _text(text: str | None) -> str | None:
    """An error may quote anything; what is no Unicode must not keep it from being told."""
    return None if text is None else text.encode("utf-8", "replace").decode()


assert sys.byteorder == "little" or array(_INT32).itemsize == 4  # int32 in the order of this one host

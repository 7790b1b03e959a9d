"""What the parent of a load and its worker processes tell each other, as messages that JSON can carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.loadgen.settings import LoadResult, LoadSettings, Target
from harness.tokenizer import ApproximateTokenizer, load_tokenizer
from workloads.schedule import ScheduledRequest, Segment

WARM_UP_RUN = "warmup"
"""The label under which the engine records the warm-up, so that no figure counts it."""

_REQUEST_FIELDS = tuple(f.name for f in fields(ScheduledRequest))
_TUPLES = tuple(f.name for f in fields(LoadResult) if str(f.type).startswith("tuple"))


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What one worker has to do. log: the file that it appends its records to. warm_up: requests that go
    through the whole path before the load. live: somebody watches, so progress is wanted more than once a
    second."""

    target: Target
    settings: LoadSettings
    requests: Sequence[ScheduledRequest]
    seed: int  # prompts are cut by it
    log: Path
    warm_up: Sequence[ScheduledRequest] = ()
    live: bool = False

    def to_message(self) -> dict[str, Any]:
        target = {f.name: getattr(self.target, f.name) for f in fields(Target)}
        tokenizer = self.target.tokenizer
        # A tokenizer travels as its name: the approximate one is a table that each process makes itself.
        known = tokenizer is not None and not isinstance(tokenizer, ApproximateTokenizer)
        target["tokenizer"] = tokenizer.name if known and tokenizer is not None else None
        return {
            "type": "job",
            "target": target,
            "settings": dataclasses.asdict(self.settings),
            "requests": encode_requests(self.requests),
            "seed": self.seed,
            "log": str(self.log),
            "warm_up": encode_requests(self.warm_up),
            "live": self.live,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Job:
        """Raises ValueError (TokenizerError, LoadError, WorkloadError) for what cannot work."""
        target = dict(message["target"])
        target["tokenizer"] = load_tokenizer(target["tokenizer"])
        return cls(
            target=Target(**target),
            settings=LoadSettings(**message["settings"]),
            requests=decode_requests(message["requests"]),
            seed=message["seed"],
            log=Path(message["log"]),
            warm_up=decode_requests(message["warm_up"]),
            live=message["live"],
        )


def encode_requests(requests: Sequence[ScheduledRequest]) -> list[tuple[Any, ...]]:
    """A row per request, its fields in order."""
    row = attrgetter(*_REQUEST_FIELDS)
    place = _REQUEST_FIELDS.index("segments")
    return [
        (*values[:place], [tuple(s) for s in values[place]], *values[place + 1 :])
        for values in map(row, requests)
    ]


def decode_requests(rows: Sequence[Sequence[Any]]) -> list[ScheduledRequest]:
    requests = []
    for row in rows:
        values = dict(zip(_REQUEST_FIELDS, row, strict=True))
        values["segments"] = tuple(Segment(*segment) for segment in values["segments"])
        requests.append(ScheduledRequest(**values))
    return requests


def encode_result(result: LoadResult) -> dict[str, Any]:
    return {"type": "result", **{f.name: getattr(result, f.name) for f in fields(LoadResult)}}


def decode_result(message: Mapping[str, Any]) -> LoadResult:
    """Raises KeyError or TypeError for what is no result."""
    values = {f.name: message[f.name] for f in fields(LoadResult)}
    return LoadResult(**{**values, **{name: tuple(values[name]) for name in _TUPLES}})

"""Answers read without a network: pieces in, what was understood out."""

from __future__ import annotations

from harness.loadgen.answer import Answer


def read(*pieces: bytes, stream: bool = True, status: int = 200, kind: str = "text/event-stream") -> Answer:
    """Head at 0, piece k at (k + 1) * 10."""
    answer = Answer(stream=stream, keep_text=True)
    answer.begin(0, status, kind)
    for k, piece in enumerate(pieces):
        if not answer.feed((k + 1) * 10, piece):
            break
    answer.finish()
    return answer


def chunks(answer: Answer) -> list[tuple[int, int]]:
    return list(zip(answer.chunk_ns, answer.chunk_tokens, strict=True))


def outcome(answer: Answer) -> tuple[str, str | None]:
    assert answer.verdict is not None
    return answer.verdict.outcome, answer.verdict.reason

"""Our engine as a side: `python -m engines.server` as a person starts it, and a client over real sockets on
the same cores."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from harness.conf import compose
from harness.loadgen.sse import SSEParser
from harness.loadgen.transport import AiohttpTransport, TransportError
from harness.peers.sides import PeerError, Round
from harness.peers.traffic import Ask
from harness.records import read_steps
from harness.server_process import ServerError, ServerProcess


class ServerSide:
    """One engine behind its HTTP server. All rounds go over the same few connections, streamed."""

    def __init__(self, name: str, overrides: Sequence[str], streams: int, folder: Path) -> None:
        """overrides: of a run's configuration. Raises UsageError."""
        from omegaconf import OmegaConf

        self.name, self.ready = name, dict[str, Any]()
        self._streams, self._records = streams, folder / name
        self._records.mkdir()
        cfg = compose([f"engine={name}", *overrides])
        OmegaConf.save(cfg, self._records / "config.yaml", resolve=True)
        self._server = ServerProcess(
            self._records / "config.yaml", self._records, self._records / "server.log"
        )

    def wait_ready(self) -> Mapping[str, Any]:
        """The ready line. Raises PeerError."""
        try:
            self.ready = self._server.wait_ready()
        except ServerError as error:
            self._server.stop()
            raise PeerError(f"{self.name}: {error}") from None
        except BaseException:
            self._server.kill()
            raise
        return self.ready

    def run(self, asks: Sequence[Ask]) -> Round:
        try:
            return asyncio.run(self._round(asks))
        except TransportError as error:
            end = self._server.describe_end() if self._server.ended_within(1.0) else str(error)
            raise PeerError(f"{self.name}: {end}") from None

    def close(self) -> Mapping[str, Any]:
        self._server.stop()
        return {"steps": read_steps(self._records)}

    async def _round(self, asks: Sequence[Ask]) -> Round:
        transport = AiohttpTransport(f"http://{self.ready['host']}:{self.ready['port']}")
        places, model = asyncio.Semaphore(self._streams), self.ready["model"]

        async def ask_one(ask: Ask) -> _Answer:
            async with places:
                answer = _Answer()
                await transport.post("v1/completions", _body(ask, model), answer)
                return answer

        try:
            start_ns = time.monotonic_ns()
            answers = await asyncio.gather(*map(ask_one, asks))
            end_ns = max((answer.last_ns for answer in answers), default=start_ns)
        finally:
            await transport.close()
        tokens = [answer.tokens(self.name) for answer in answers]
        return Round((end_ns - start_ns) / 1e9, tokens, start_ns, end_ns)


class _Answer:
    """Collects one response; it is parsed when the round is over."""

    def __init__(self) -> None:
        self.status, self.last_ns = 0, 0
        self._pieces: list[bytes] = []

    def on_send(self, now_ns: int) -> None:
        pass

    def on_headers(self, now_ns: int, status: int, content_type: str) -> None:
        self.status = status

    def on_data(self, now_ns: int, piece: bytes) -> bool:
        self.last_ns = now_ns
        self._pieces.append(piece)
        return True

    def tokens(self, side: str) -> list[int]:
        """Raises PeerError for an answer that is none."""
        text = b"".join(self._pieces)
        if self.status != 200:
            raise PeerError(
                f"{side}: HTTP {self.status}: {' '.join(text.decode(errors='replace').split())[:200]}"
            )
        ids: list[int] = []
        for event in SSEParser().feed(text):
            if event.data == b"[DONE]":
                return ids
            chunk = orjson.loads(event.data)
            if "error" in chunk:
                raise PeerError(f"{side}: {chunk['error'].get('message')}")
            for choice in chunk["choices"]:
                ids += choice.get("token_ids") or []
        raise PeerError(f"{side}: an answer broke off after {len(ids)} tokens")


def _body(ask: Ask, model: str) -> bytes:
    return json.dumps(
        {
            "model": model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
    ).encode()

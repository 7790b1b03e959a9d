"""`python -m engines.server`: one reference engine behind an OpenAI-compatible server.

Standard output carries one JSON line, "ready" or "error"; everything else goes to standard error.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from engines.config import ConfigError
from engines.routes import Route, resolved, routes_of
from engines.server.engine_process import EngineDied, EngineProcess

USAGE = """\
usage: python -m engines.server [+engine=NAME] [model=NAME] [server.port=N] [key=value ...]
       python -m engines.server --config FILE [--records DIR] [--exit-with-stdin]

An OpenAI-compatible server over one of the reference engines, the files of harness/conf/engine.

  +engine=chunked model=tiny server.port=8000    settings, as every command takes them
  --config FILE       a fully resolved configuration (a run's config.yaml) in their place
  --records DIR       write steps.arrow and engine_requests.jsonl there; a folder without a steps.arrow
  --exit-with-stdin   end when standard input closes, so that the server never outlives who started it;
                      a line {"records": "DIR"} there begins new records, with the caches emptied
  -h, --help          this text

Settings: server.host (127.0.0.1)  server.port (0: a free one)  model  model.id  model.weights
  device  dtype  seed  engine.max_num_seqs  engine.max_num_batched_tokens  engine.max_model_len
  engine.num_kv_blocks  engine.block_size  engine.prefill_chunk_size  engine.reservation  engine.threads
  engine.max_waiting_requests  engine.max_waiting_tokens  engine.queue_timeout_ms  engine.tenant_rate
  engine.kv_high_watermark  engine.kv_reject_watermark  engine.stream_idle_timeout_ms
  engine.api_key_env (the name of the environment variable with the key that clients must send)
  engine.admin_token_env (the same for the token of /admin and /debug; without it there are none)
  server.log_format (text, json)  server.routes (a scheduler and limits of their own for some requests)

Routes: POST /v1/completions  POST /v1/chat/completions  GET /v1/models  GET /health  GET /metrics
WebSocket: GET /v1/completions/ws  GET /v1/chat/completions/ws
  GET and PATCH /admin/limits  GET /debug/steps?last=N
Exit codes: 0 asked to end, 1 the engine has died or could not write its records, 2 a bad setting"""

MOST_FILES = 65536


@dataclass(frozen=True, slots=True)
class Arguments:
    overrides: list[str] = field(default_factory=list)
    config: Path | None = None
    records: Path | None = None
    exit_with_stdin: bool = False


def parse(args: list[str]) -> Arguments:
    """Raises ConfigError."""
    overrides: list[str] = []
    paths: dict[str, Path] = {}
    exit_with_stdin = False
    rest = iter(args)
    for arg in rest:
        name, _, value = arg.partition("=")
        if arg == "--exit-with-stdin":
            exit_with_stdin = True
        elif name in ("--config", "--records"):
            value = value or next(rest, "")
            if not value:
                raise ConfigError(f"{name}: needs a {'file' if name == '--config' else 'folder'}")
            paths[name] = Path(value)
        elif arg.startswith("-"):
            raise ConfigError(f"{arg}: is not an option; see --help")
        else:
            overrides.append(arg)
    if "--config" in paths and overrides:
        raise ConfigError(f"{overrides[0]}: --config holds every setting; give overrides or a file")
    return Arguments(overrides, paths.get("--config"), paths.get("--records"), exit_with_stdin)


def load_config(arguments: Arguments) -> Mapping[str, Any]:
    """The resolved configuration. Raises ConfigError."""
    from omegaconf import OmegaConf

    if arguments.config is None:
        from harness.conf import UsageError, compose

        try:
            config: Any = compose(arguments.overrides)
        except UsageError as error:
            raise ConfigError(str(error)) from None
    else:
        try:
            config = OmegaConf.load(arguments.config)
        except FileNotFoundError:
            raise ConfigError(f"--config {arguments.config}: no such file") from None
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"--config {arguments.config}: cannot be read ({reason})") from None
    values = OmegaConf.to_container(config, resolve=True)
    if not isinstance(values, dict):
        raise ConfigError(f"--config {arguments.config}: holds no settings")
    for key in ("engine", "model", "server", "device", "dtype", "seed"):
        if key not in values:
            raise ConfigError(f"--config {arguments.config}: {key} is missing")
    return {str(key): value for key, value in values.items()}


def engine_routes(config: Mapping[str, Any]) -> list[Route]:
    """The engine that is asked for, behind those of server.routes. Raises ConfigError."""
    engine = config["engine"]
    if engine.get("kind") != "reference":
        raise ConfigError(
            f"engine={engine.get('name')} runs elsewhere: choose one of our own, such as chunked"
        )
    return routes_of(config)


def secret(setting: str, variable: str | None) -> str | None:
    """What the variable holds that `setting` names. Raises ConfigError."""
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(f"{setting}={variable}: this variable is not set, or is empty")
    return value


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        raise ConfigError(f"server.host={host}: not an address; 127.0.0.1 or 0.0.0.0 work") from None
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"server.port={port} is in use: choose another or 0") from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"server.port={port} needs more rights: choose 1024 or above, or 0") from None
        raise ConfigError(f"server.host={host}: cannot listen there ({error.strerror})") from None
    return listener


def allow_connections() -> None:
    """Every open request holds a file; a usual soft limit of 1024 is soon reached by a batch that is slow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def announce(event: dict[str, Any], for_people: str = "") -> None:
    print(json.dumps(event), flush=True)
    if for_people and sys.stderr.isatty():
        print(for_people, file=sys.stderr, flush=True)


def run(args: list[str]) -> int:
    arguments = parse(args)
    config = load_config(arguments)
    routes = engine_routes(config)
    config, engine = resolved(config, routes), routes[-1].engine
    api_key = secret("engine.api_key_env", engine.api_key_env)
    admin_token = secret("engine.admin_token_env", engine.admin_token_env)
    host, port = config["server"]["host"], config["server"]["port"]
    with bind(host, port) as listener:
        allow_connections()
        process = EngineProcess(config, engine, arguments.records)  # loads while we do
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import asyncio

        from engines.server.launch import Secrets, Service, Stop, serve
        from engines.server.log import configure
        from engines.server.parent import Parent

        configure(config["server"].get("log_format", "text"))
        stop = Stop()
        parent = Parent(stop, announce) if arguments.exit_with_stdin else None
        try:
            service = Service(config["server"], routes, Secrets(api_key, admin_token), process)
        except EngineDied as error:
            print(f"the engine has stopped: {error}", file=sys.stderr, flush=True)
            return 1
        port = listener.getsockname()[1]

        def on_ready() -> None:
            if parent is not None:
                parent.serve(service.engine)
            shown = f"[{host}]" if ":" in host else host
            announce(
                {"event": "ready", "host": host, "port": port, **service.facts},
                f"{service.facts['model']} on {engine.name}: http://{shown}:{port}/v1 (Ctrl-C ends it)",
            )

        code = asyncio.run(serve(service, listener, stop, on_ready))
        if code:
            print(stop.reason, file=sys.stderr, flush=True)
        return code


def main() -> NoReturn:
    args = sys.argv[1:]
    if any(arg in ("-h", "--help") for arg in args):
        print(USAGE)
        sys.exit(0)

    def leave(*_: object) -> NoReturn:
        os._exit(0)  # nothing is open yet: the server is still loading

    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    try:
        code = run(args)
    except ConfigError as error:
        announce({"event": "error", "message": str(error)}, f"engines.server: {error}")
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()

"""One real server, measured several times: every pass begins as with a new server and is whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from harness.conf import UsageError, compose
from harness.records import read_engine_requests, read_steps
from harness.server_process import ServerError, ServerProcess
from harness.standing import Stage, StandingServer
from tests.support.harness_command import ROOT, SHORT, gone, wait_for

CACHED = (  # two of its parts are shared by every request, so a cache that was not emptied shows
    *(*SHORT, "+workload=rag", "engine.prefix_cache=true", "engine=chunked"),
    *(
        "load=closed",
        "load.concurrency=1",
        "workload.length_scale=0.1",
        "workload.cancel.after_tokens.share=0",
    ),
)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """With a host lock of its own: other tests have theirs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Stage() as stage:
        yield stage


def config(tmp_path, *overrides):
    return compose([*overrides, f"output.dir={tmp_path}"])


def hits(run_dir):
    """Tokens found in the prefix cache by each request of a run, warm-up apart."""
    requests = read_engine_requests(run_dir)
    return requests[requests["run"] == run_dir.name].sort_values("id")["cached_tokens"].tolist()


def test_every_pass_begins_as_with_a_new_server_and_is_whole(stage, tmp_path):
    cfg = config(tmp_path, *CACHED)
    folders = [tmp_path / name for name in ("first", "second")]
    with StandingServer(cfg, tmp_path / "server", stage) as server:
        outcomes = [server.measure(cfg, folder) for folder in folders]
        pids = {json.loads((f / "meta.json").read_text())["server"]["engine_pid"] for f in folders}
        with pytest.raises(RuntimeError, match="one Stage"), StandingServer(cfg, tmp_path / "other"):
            pass
    assert len(pids) == 1
    for number, (folder, outcome) in enumerate(zip(folders, outcomes, strict=True)):
        assert outcome.summary["counts"]["completed"] == 6
        assert not [reason for reason in outcome.summary["invalid_reasons"] if "client_bound" not in reason]
        meta = json.loads((folder / "meta.json").read_text())
        assert (meta["earlier_passes"], meta["complete"]) == (number, True)
        assert json.loads((folder / "engine_end.json").read_text())["integrity"] == "ok"
        assert read_steps(folder)["step"].min() == 0
        assert set(read_engine_requests(folder)["run"]) == {"warmup", folder.name}
    assert sum(hits(folders[0])) > 0  # the requests of one pass do share
    assert hits(folders[0]) == hits(folders[1])
    assert hits(folders[1])[0] == 0  # nothing was left of the pass before


def test_what_makes_it_another_server_is_refused(stage, tmp_path):
    cfg = config(tmp_path, *SHORT)
    with StandingServer(cfg, tmp_path / "server", stage) as server:
        with pytest.raises(UsageError, match=r"^engine\.max_num_seqs=3 \(the server has \d+\): a pass may"):
            server.measure(config(tmp_path, *SHORT, "engine.max_num_seqs=3"), tmp_path / "run")
        assert not (tmp_path / "run").exists()
        other = config(tmp_path, *SHORT, "seed=7", "load.requests=3", "slo.ttft_ms=1")
        assert server.measure(other, tmp_path / "run").summary["counts"]["completed"] == 3
    with (
        pytest.raises(UsageError, match="engine"),
        StandingServer(
            config(tmp_path, *SHORT, "engine=static", "engine.num_kv_blocks=20"), tmp_path / "refused", stage
        ),
    ):
        pass


def test_a_server_that_dies_ends_the_pass_and_says_so(stage, tmp_path):
    cfg = config(tmp_path, *SHORT, "load.requests=200", "workload.rate=8")
    with StandingServer(cfg, tmp_path / "server", stage) as server:
        log = tmp_path / "run" / "requests.jsonl"

        def kill():
            wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") > 2, "records")
            os.kill(server._server.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        outcome = server.measure(cfg, tmp_path / "run")
        killer.join()
        assert outcome.exit_code == 3
        assert any(
            "server_died: the server was ended by SIGKILL" in r for r in outcome.summary["invalid_reasons"]
        )
        assert 0 < outcome.summary["counts"]["completed"] < 200
        assert server.died == "the server was ended by SIGKILL"
        with pytest.raises(ServerError, match="ended by SIGKILL"):
            server.measure(cfg, tmp_path / "next")


def test_orders_that_make_no_sense_are_answered_and_change_nothing(tmp_path):
    cfg = config(tmp_path, *SHORT)
    from omegaconf import OmegaConf

    OmegaConf.save(cfg, tmp_path / "config.yaml", resolve=True)
    with ServerProcess(tmp_path / "config.yaml", None, tmp_path / "log") as server:
        server.wait_ready()
        server.record(tmp_path / "one")
        for order, said in ((b"nonsense\n", "no order"), (b'{"records": 5}\n', "needs a folder")):
            server._process.stdin.write(order)
            server._process.stdin.flush()
            with pytest.raises(ServerError, match=said):
                server._hear("records", "did not answer", 20)
        with pytest.raises(ServerError, match=r"steps\.arrow exists; give another folder"):
            server.record(tmp_path / "one")
        server.record(tmp_path / "two")
        assert server.stop() == 0
    assert {path.name for path in (tmp_path / "two").iterdir()} == {
        *("steps.arrow", "engine_requests.jsonl", "engine_end.json")
    }


PARENT = """
import sys, time
from pathlib import Path
from harness.server_process import ServerProcess
folder = Path(sys.argv[1])
process = ServerProcess(folder / "config.yaml", None, folder / "log")
process.wait_ready()
process.record(folder / "records")
print(process.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_its_parent_after_an_order_too(tmp_path):
    from omegaconf import OmegaConf

    OmegaConf.save(config(tmp_path, *SHORT), tmp_path / "config.yaml", resolve=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, env=env)
    with parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    assert gone(pid)
    assert (tmp_path / "records" / "engine_end.json").exists()  # in good order

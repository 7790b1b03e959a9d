"""Our engines beside other systems: the same work for all, and what is said of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import psutil
import pytest

from engines.model import smollm2
from harness.cli import INVALID, USAGE, guard
from harness.peers import command
from harness.peers.limit import Decoder, decoder_of, limit_seconds
from harness.peers.sides import ChildSide, PeerError, Round
from harness.peers.table import lines, summary
from harness.peers.traffic import Ask, draw, shortened

ROOT = Path(__file__).resolve().parents[2]
PEERS = [sys.executable, "-m", "harness.peers", "transformers", "--smoke", "--threads", "1"]
PATIENCE_S = 120.0


def test_traffic_is_drawn_once_and_within_its_bounds() -> None:
    asks = draw(200, (64, 192), (32, 96), 49152, seed=3)
    assert asks == draw(200, (64, 192), (32, 96), 49152, seed=3) != draw(200, (64, 192), (32, 96), 49152, 4)
    assert {min(len(a.prompt) for a in asks) - 64, 192 - max(len(a.prompt) for a in asks)} <= set(range(5))
    assert {min(a.output for a in asks) - 32, 96 - max(a.output for a in asks)} <= set(range(5))
    assert all(1000 <= token < 49152 for a in asks for token in a.prompt)
    assert all(32 <= token < 127 for a in draw(9, (4, 8), (1, 2), 384, 0) for token in a.prompt)
    assert [a.output for a in shortened(asks, 40)] == [min(a.output, 40) for a in asks]


def test_limit_by_hand() -> None:
    decoder = Decoder(layer_weights=1000, head_weights=100, kv_values=10, attention_flops=40)
    one = [Ask((5, 5, 5), 2)]
    # Prompt: 3 tokens through the layers, 1 row of the head, 1 + 2 + 3 keys seen. Then a decode over 4 keys.
    flops = [2 * (3 * 1000 + 100) + 6 * 40, 2 * (1000 + 100) + 4 * 40]
    read = [(1100 + 3 * 10) * 2, (1100 + 4 * 10) * 2]
    machine = {"gflop_s": 1.0, "read_gb_s": 1e9}
    assert limit_seconds(one, 1, decoder, machine, 2) == pytest.approx(sum(flops) / 1e9)
    assert limit_seconds(one, 1, decoder, {"gflop_s": 1e9, "read_gb_s": 1.0}, 2) == pytest.approx(
        sum(read) / 1e9
    )
    # Two at once share the weights' way; one seat makes them wait for each other.
    memory = {"gflop_s": 1e9, "read_gb_s": 1.0}
    together, apart = (limit_seconds(one * 2, seats, decoder, memory, 2) for seats in (2, 1))
    assert apart == pytest.approx(2 * sum(read) / 1e9)
    assert together == pytest.approx((sum(read) + (3 + 4) * 10 * 2) / 1e9)


def test_the_decoder_is_read_from_its_configuration() -> None:
    config = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152}
    found = decoder_of(config | {"num_attention_heads": 9, "num_key_value_heads": 3})
    norms = (2 * 30 + 1) * 576
    assert found.layer_weights + found.head_weights + norms == 134_515_008  # SmolLM2-135M, as published
    assert (found.kv_values, found.attention_flops) == (30 * 2 * 3 * 64, 30 * 4 * 9 * 64)


def test_ratios_are_of_the_same_round_and_agreement_of_first_tokens() -> None:
    def rounds(*seconds: float, first: int = 7) -> list[Round]:
        return [Round(s, [[first, 1], [8, 1, 1]], 0, int(s * 1e9)) for s in seconds]

    steps = pd.DataFrame({"start_ns": [0, 10**9, 9 * 10**9], "duration_ns": [5 * 10**8] * 3})
    sides = {"chunked": rounds(1.0, 2.0, 1.0, first=9), "generate": rounds(2.0, 2.0, 4.0)}
    found = summary(sides, 10.0, {"chunked": {"steps": steps}, "generate": {}})
    ours, base = found["chunked"], found["generate"]
    assert ours["ratio_rounds"] == [2.0, 1.0, 4.0]
    assert (ours["ratio"], ours["tokens_per_s"], ours["share_of_limit"]) == (2.0, 5.0, 0.5)
    assert (ours["first_tokens_agree"], base["first_tokens_agree"], base["pass_share"]) == (0.5, 1.0, None)
    # Rounds of 1, 2 and 1 s from 0: each has the passes that begin within it, here 2 of 0.5 s.
    assert ours["pass_share"] == pytest.approx(3 * (0.5 + 0.5) / 4.0)
    alone = summary({"chunked": sides["chunked"]}, None, {"chunked": {}})["chunked"]
    assert alone["ratio"] is alone["ratio_rounds"] is alone["share_of_limit"] is alone["pass_share"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["transformers", "--streams", "0"], "--streams 0: needs at least 1"),
        (["transformers", "--prompts", "9", "4"], "--prompts 9 4: needs two lengths from 1 on"),
        (["transformers", "--threads", "100000"], "--threads 100000: this machine has"),
        (["transformers", "--sides", "static"], "--sides static: choose from continuous, chunked, generate"),
        (["transformers", "--sides", "chunked", "--at-least", "2"], "--at-least 2: needs generate"),
        (["transformers", "--seed", "-1"], "--seed -1: needs 0 or above"),
        (["transformers", "--at-least", "nan"], "--at-least nan: needs a ratio above 0"),
    ],
)
def test_what_cannot_work_is_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guard(lambda: command.main(options)) == USAGE
    assert said in capsys.readouterr().err


def test_what_is_not_installed_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = {**command.PEERS, "a_peer_that_is_not_there": ()}
    monkeypatch.setattr(command, "PEERS", missing)
    assert guard(lambda: command.main(["transformers", "a_peer_that_is_not_there"])) == USAGE
    assert "a_peer_that_is_not_there: the package is not installed here" in capsys.readouterr().err
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "a_package_that_is_not_there")
    assert guard(lambda: command.main(["transformers"])) == USAGE
    assert "run `make model`" in capsys.readouterr().err


def test_a_side_that_dies_is_one_line() -> None:
    side = ChildSide("no_such_system", {})
    with pytest.raises(PeerError, match="no_such_system: KeyError"):
        side.wait_ready()
    assert not psutil.pid_exists(side._process.pid)


def test_all_sides_give_the_same_tokens() -> None:
    done = subprocess.run(PEERS, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    out = done.stdout.splitlines()
    result = json.loads(out[-1])
    sides = result["sides"]
    assert list(sides) == ["continuous", "chunked", "generate", "generate_batch"]
    assert [text.split()[0] for text in out[3:7]] == list(sides)
    assert out[:7] == lines(result)
    for side in sides.values():
        assert side["first_tokens_agree"] == 1.0  # the same model, in float32
        assert side["tokens_per_s"] > 0
    assert 0 < sides["chunked"]["pass_share"] <= 1
    assert {about["threads"] for about in result["about"].values()} == {1}


def test_an_interrupt_leaves_nothing_behind() -> None:
    endless = ["--sides", "chunked", "generate", "--rounds", "100000", "--outputs", "60", "90"]
    with subprocess.Popen(
        [*PEERS, *endless], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as peers:
        assert peers.stderr is not None
        assert any("round 1 of 100000" in text for text in peers.stderr)
        family = psutil.Process(peers.pid).children(recursive=True)
        assert len(family) >= 3  # the server, its engine, transformers
        peers.send_signal(signal.SIGINT)
        said = peers.stderr.read()
        assert peers.wait(PATIENCE_S) == INVALID
    assert "interrupted: nothing is reported" in said
    gone, alive = psutil.wait_procs(family, PATIENCE_S)
    assert not alive
    assert len(gone) == len(family)

"""Who held which seat: derived from step logs whose answer is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.dashboard.seats import KINDS, Seats, passes, seats
from harness.metrics.run import load_run
from tests.harness.test_attribution import long_prompt_stalls_two, pass_of, told
from tests.support.run_factory import request, write_run


def blocks(found: Seats) -> list[tuple[int, int, str, int, int, int]]:
    """(seat, sequence, state, first pass, last pass, tokens)."""
    kinds = [KINDS[kind] for kind in found.kind]
    columns = (found.seat, found.seq, kinds, found.first, found.last, found.tokens)
    return [(int(a), int(b), c, int(d), int(e), int(f)) for a, b, c, d, e, f in zip(*columns, strict=True)]


def test_a_decode_that_a_pass_leaves_out_keeps_its_seat(tmp_path: Path) -> None:
    found = seats(load_run(long_prompt_stalls_two(tmp_path)))
    assert found.count == 3
    assert blocks(found) == [
        (0, 0, "prefill", 0, 0, 50),
        (1, 1, "prefill", 0, 0, 50),
        (0, 0, "decode", 1, 3, 3),
        (1, 1, "decode", 1, 3, 3),
        (2, 2, "prefill", 3, 3, 900),
        (0, 0, "left out", 4, 4, 0),
        (1, 1, "left out", 4, 4, 0),
        (2, 2, "decode", 4, 4, 1),
        (0, 0, "decode", 5, 5, 1),
        (1, 1, "decode", 5, 5, 1),
    ]


def static_batch(folder: Path, **changes: object) -> Path:
    """Two requests in one batch, the shorter prompt padded; the first ends early and its row is computed on.
    A third has to wait for the whole batch and then takes the lowest seat."""
    steps = [
        pass_of(0, 1.00, 1.05, [(0, 20, 0), (1, 50, 0)], left_pad_tokens=30, host_gap_ns=None),
        pass_of(1, 1.05, 1.06, [(0, 1, 1), (1, 1, 1)]),
        pass_of(2, 1.06, 1.07, [(0, 1, 3), (1, 1, 1)], ended_rows=1),
        pass_of(3, 1.07, 1.08, [(0, 1, 3), (1, 1, 1)], ended_rows=1),
        pass_of(4, 1.0805, 1.10, [(2, 40, 0)]),
    ]
    client = [request(i, [(1.081, 2 + 2 * i)], intended=0.99) for i in (0, 1)]
    client.append(request(2, [(1.101, 1)], intended=1.0))
    engine = [told(i, 0.995, 0.999, 1.05, 1.0801) for i in (0, 1)] + [told(2, 1.0, 1.0803, 1.1, 1.1001)]
    return write_run(folder, client, engine=engine, steps=steps, name="static", **changes)  # type: ignore[arg-type]


def test_ended_rows_and_left_padding_of_a_static_batch(tmp_path: Path) -> None:
    found = seats(load_run(static_batch(tmp_path)))
    assert found.count == 2
    assert blocks(found) == [
        (0, 0, "prefill", 0, 0, 20),
        (1, 1, "prefill", 0, 0, 50),
        (0, 0, "decode", 1, 1, 1),
        (1, 1, "decode", 1, 3, 3),
        (0, 0, "ended row", 2, 3, 2),
        (0, 2, "prefill", 4, 4, 40),
    ]
    assert found.pad.tolist() == [30, 0, 0, 0, 0, 0]


def test_a_finished_answer_that_nothing_computes_holds_its_seat_until_it_leaves(tmp_path: Path) -> None:
    steps = [
        pass_of(0, 1.00, 1.05, [(0, 20, 0), (1, 50, 0)], host_gap_ns=None),
        pass_of(1, 1.05, 1.06, [(1, 1, 1)]),
        pass_of(2, 1.06, 1.07, [(1, 1, 1)]),
        pass_of(3, 1.07, 1.08, [(2, 5, 0)]),
    ]
    client = [request(i, [(1.071, 1)], intended=0.99) for i in range(3)]
    engine = [told(i, 0.995, 0.999, 1.05, 1.0701) for i in (0, 1)]  # the next pass has begun: 0.1 ms too late
    run = write_run(tmp_path, client, engine=[*engine, told(2, 1.0, 1.07, 1.08, 1.08)], steps=steps)
    found = blocks(seats(load_run(run)))
    assert (0, 0, "held", 1, 3, 0) in found
    assert (2, 2, "prefill", 3, 3, 5) in found  # both seats were still taken
    assert (1, 1, "held", 3, 3, 0) in found


def test_a_preempted_request_gives_its_seat_up_and_takes_another(tmp_path: Path) -> None:
    steps = [
        pass_of(0, 1.00, 1.05, [(0, 20, 0), (1, 50, 0)], host_gap_ns=None),
        pass_of(1, 1.05, 1.06, [(0, 1, 1)], preempted=[1]),
        pass_of(2, 1.06, 1.07, [(0, 1, 1), (2, 9, 0)]),
        pass_of(3, 1.07, 1.08, [(0, 1, 1), (2, 1, 1), (1, 51, 2)]),
    ]
    client = [request(i, [(1.081, 3)], intended=0.99) for i in range(3)]
    engine = [told(i, 0.995, 0.999, 1.05, 1.08) for i in range(3)]
    found = blocks(seats(load_run(write_run(tmp_path, client, engine=engine, steps=steps))))
    assert (1, 2, "prefill", 2, 2, 9) in found  # the seat of 1
    assert (2, 1, "recomputed", 3, 3, 51) in found
    assert not [block for block in found if block[2] == "left out"]


def test_between_slices_nobody_holds_a_seat(tmp_path: Path) -> None:
    rows = [[(0, 20, 0)], [(0, 1, 1)], [(1, 30, 0)], [(1, 1, 1)], [(0, 22, 2)]]
    steps = [pass_of(i, 1 + 0.01 * i, 1.01 + 0.01 * i, row) for i, row in enumerate(rows)]
    client = [request(i, [(1.06, 3)], intended=0.99) for i in range(2)]
    engine = [told(0, 0.995, 1.0, 1.01, 1.05), told(1, 0.995, 1.02, 1.03, 1.04)]
    run = write_run(
        tmp_path, client, engine=engine, steps=steps, name="sliced", server={"scheduler": "sliced"}
    )
    found = seats(load_run(run))
    assert found.count == 1
    assert [block[1] for block in blocks(found)] == [0, 0, 1, 1, 0]


def test_no_seat_is_taken_twice_and_every_row_of_the_log_is_in_a_block(tmp_path: Path) -> None:
    for folder in (long_prompt_stalls_two(tmp_path / "a"), static_batch(tmp_path / "b")):
        run = load_run(folder)
        found, steps = seats(run), passes(run.steps)
        taken = np.zeros((found.count, len(steps)), int)
        for seat, first, last in zip(found.seat, found.first, found.last, strict=True):
            taken[seat, first : last + 1] += 1
        assert taken.max() == 1
        assert found.tokens.sum() == sum(sum(tokens) for tokens in steps["tokens"])
        assert found.pad.sum() == steps["left_pad_tokens"].sum()
    assert seats(load_run(write_run(tmp_path / "c"))).count == 0

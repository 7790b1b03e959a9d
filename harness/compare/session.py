"""One comparison, from its arms to compare.json, table, page and exit code."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from harness.cli import INCONCLUSIVE, INVALID, PASS, put, say
from harness.compare.arms import Arm
from harness.compare.refusal import refusals
from harness.compare.result import Result, as_json, conclude
from harness.compare.rounds import Bench, Ended
from harness.compare.settings import Settings
from harness.compare.table import print_result
from harness.conf import UsageError
from harness.plan import check_workloads
from harness.standing import Stage


def compare(arms: Sequence[Arm], chosen: Settings) -> int:
    """Measure, judge, write, print."""
    check_workloads([arms[0].cfg])
    folder = new_folder(Path(arms[0].cfg.output.dir).expanduser())
    result = Result(arms, chosen, ())
    with Stage() as stage:
        try:
            with Bench(arms, chosen, folder, stage) as bench:
                while result.ended is None and not result.is_over:
                    result = _after_round(result, bench)
                    write(result, folder)
        except (Ended, KeyboardInterrupt) as end:  # while the servers were starting
            result = replace(result, ended=str(end) or "interrupted")
        except UsageError:  # a server has refused its settings
            shutil.rmtree(folder, ignore_errors=True)
            raise
        stage.interruption.on_signal = lambda: say("writing the results; once more to leave at once")
        if result.ended:
            whole = len(result.rounds)
            say(f"{result.ended}; {whole} whole round{'' if whole == 1 else 's'} kept")
        return finish(result, folder)


def _after_round(result: Result, bench: Bench) -> Result:
    """One more round, and what it makes of the result."""
    try:
        one = bench.measure_round()
    except (Ended, KeyboardInterrupt) as end:
        return replace(result, ended=str(end) or "interrupted")
    rounds = (*result.rounds, one)
    refused = refusals(one, result.arms) if one.valid else []
    return conclude(replace(result, rounds=rounds, refused=refused))


def write(result: Result, folder: Path) -> None:
    from harness.metrics.summary import clean
    from harness.records import write_json

    write_json(folder / "compare.json", clean(as_json(result, folder)))


def finish(result: Result, folder: Path) -> int:
    """Table, page, the last line, the exit code."""
    from harness.dashboard import write_dashboard

    if not result.rounds:
        shutil.rmtree(folder / "rounds", ignore_errors=True)
    write(result, folder)
    print_result(result)
    try:
        if result.valid:
            write_dashboard([folder], folder / "report.html")
    finally:
        put(f"results: {folder}")
    if result.ended or result.refused or not result.judged:
        return INVALID
    return PASS if result.decided else INCONCLUSIVE


def new_folder(output: Path) -> Path:
    """Raises UsageError."""
    folder = output / f"{datetime.now():%Y%m%d-%H%M%S}-compare-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"output.dir={output}: cannot be written ({error.strerror})") from None
    return folder

"""What the commands leave on disk: whole files or none, and no work for a path that cannot be written."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.conf import compose
from workloads import draw, output
from workloads.__main__ import load_workload, main
from workloads.errors import WorkloadError
from workloads.fitting.command import override
from workloads.page.frame import write_page

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def trace(path):
    rows = [f"2024-05-12 00:00:{i:02d}.{i * i:04d},{100 + i},{10 + i % 7}" for i in range(30)]
    path.write_text("\n".join([HEADER, *rows]))
    return path


def python(*argv, **options):
    return subprocess.run([sys.executable, *argv], capture_output=True, **options)


@pytest.mark.parametrize(
    "argv",
    [
        ("fit", "TRACE", "--out"),
        ("fit", "TRACE", "--table"),
        ("convert", "TRACE", "--to", "mooncake", "--out"),
        ("show", "rag", "--out"),
        ("show", "rag", "-o"),
    ],
    ids=" ".join,
)
def test_a_path_that_cannot_be_written_ends_a_command_before_its_work(capsys, tmp_path, argv):
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.write_text("mine")
    argv = [str(trace(tmp_path / "t.csv")) if a == "TRACE" else a for a in argv]
    for path in (folder, file / "x", *([file] if argv[0] != "show" else [])):
        assert main([*argv, str(path)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert str(path) in said.err
        assert said.err.count("\n") == 1
    assert file.read_text() == "mine"


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path):
    def half(partial):
        partial.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(WorkloadError, match=r"x: cannot be written \(No space left on device"):
        output.write("--out", tmp_path / "new" / "x", half)
    assert list((tmp_path / "new").iterdir()) == []


def test_of_two_at_once_neither_mixes_with_the_other_nor_replaces_it(tmp_path):
    path = tmp_path / "x"

    def slow(partial):
        path.write_text("fast")  # by another command, meanwhile
        partial.write_text("slow")

    with pytest.raises(WorkloadError, match="exists"):
        output.write("--out", path, slow)
    assert path.read_text() == "fast"
    assert list(tmp_path.iterdir()) == [path]


def test_a_signal_leaves_no_half_file_and_no_traceback(tmp_path):
    code = f"""
import os, signal
from workloads import output
from workloads.__main__ import _leave
signal.signal(signal.SIGINT, _leave)
def fill(partial):
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
output.write("--out", {str(tmp_path / "x")!r}, fill)
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_standard_output_that_is_full_is_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "workloads", "convert", trace(tmp_path / "t.csv"), "--to", "azure"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == b"error: standard output: cannot be written (No space left on device)\n"


def test_names_that_are_no_utf_8(tmp_path):
    path = trace(tmp_path / b"\xff [b].csv".decode("utf-8", "surrogateescape"))
    preset = tmp_path / "fitted.yaml"
    done = python("-m", "workloads", "fit", path, "-o", preset)
    assert (done.returncode, done.stderr) == (0, b"")
    assert preset.read_text(encoding="utf-8").startswith(r"# Fitted to \udcff [b].csv")


@pytest.mark.parametrize(
    "path", ["a/b-c_1.yaml", "a b/ü.yaml", "日本={x},y.yaml", "it's (1).yaml", 'a"b.yaml']
)
def test_the_command_that_fit_prints_names_the_file_to_shell_and_hydra(path):
    (argument,) = shlex.split(override(path))
    parsed = OverridesParser.create().parse_override(argument)
    assert (parsed.key_or_group, parsed.value()) == ("workload", path)


@pytest.mark.parametrize(
    "option", ["--memory-gb=nan", "--memory-gb=1e300", "--replicas=1000000000", "--name= "]
)
def test_an_option_of_fit_that_cannot_be_used_ends_it_before_its_work(capsys, tmp_path, option):
    assert main(["fit", str(trace(tmp_path / "t.csv")), option]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"error: {option.split('=')[0]}=")


def test_names_in_a_trace_are_text_whatever_they_look_like(capsys, tmp_path):
    users = ["${x}", "a.b", "~", "true", "1", "", r"\${z}", "日本 #", "a: b"]
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    rows = [{"timestamp": 1740830400 + i, "user": users[i % 9], "usage": usage} for i in range(900)]
    log, preset = tmp_path / "log.jsonl", tmp_path / "my.yaml"
    log.write_text("\n".join(map(json.dumps, rows)))
    name = "${y}"
    assert main(["fit", str(log), "-o", str(preset), "--name", name]) == 0
    node = load_workload(str(preset), [])
    assert node["name"] == "$ {y}"
    drawn = set(draw(node, seed=0, requests=900).columns.tenant.names)
    assert drawn >= {user.replace("${", "$ {") for user in users if user}
    assert compose([f"+workload={preset}"]).workload.name == "$ {y}", "which a run can write down"


def test_a_setting_that_refers_to_nothing_is_one_line(capsys, tmp_path):
    preset = tmp_path / "p.yaml"
    preset.write_text("name: ${nope}\nkind: preset\n")
    assert main(["show", str(preset)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can be another user")
def test_a_folder_without_permission_is_one_line(tmp_path):
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o700)
    trace(shut / "t.csv")
    code = f"""
import os
import harness.conf, omegaconf, rich.console
import workloads.convert, workloads.fitting.command, workloads.page.command
from workloads.__main__ import main
os.setuid(65534)
file, out = {str(shut / "t.csv")!r}, {str(shut / "x")!r}
for argv in (["show", file], ["fit", file], ["convert", file, "--to", "azure"], ["show", "rag", "-o", out]):
    assert main(argv) == 2, argv
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(b"\n") == 4


def test_a_file_is_replaced_as_a_whole_and_a_pipe_never(tmp_path):
    path = tmp_path / "page.html"
    for text in (b"one", b"two"):
        output.whole(path, text)
        assert path.read_bytes() == text
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file") as refused:
        write_page("<p>", pipe)
    assert refused.value.filename == str(pipe)
    assert pipe.is_fifo()
    with pytest.raises(FileNotFoundError) as missing:
        output.whole(tmp_path / "none" / "page.html", b"x")
    assert missing.value.filename == str(tmp_path / "none" / "page.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "pipe"]


def test_a_bad_row_says_which_option_leaves_it_out(tmp_path):
    path = trace(tmp_path / "bad.csv")
    with open(path, "a") as file:
        file.write("\n2024-05-12 00:01:00.0,many,3\n")
    done = python("-m", "workloads", "convert", str(path), "--to", "azure")
    assert done.returncode == 2
    assert done.stderr.endswith(b"'many' is not a whole number; --on-bad-row skip leaves such rows out\n")

"""All experiments into one folder: <name>.json, .md and .png of each, and an index of the verdicts.

Each runs in a process of its own, so that one that fails, hangs or eats the memory ends none of the others.
The index is made from the JSON files that are there, whenever they were made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from html import escape
from pathlib import Path
from typing import Any

from harness.child import running
from harness.cli import INVALID, PASS, REGRESSION, put, say
from harness.conf import UsageError
from harness.experiments.registry import NAMES, experiment
from harness.experiments.result import markdown

DEFAULT = Path("results/gallery")
WIDTH = 1680  # pixels of a picture, two to a pixel of its layout
CELLS = (("claim", "text"), ("published", "published"), ("measured", "measured"))
CSS = """
:root { color-scheme: light dark; --line: #ddd; --held: #00664a; --partly: #7a4b00; --not: #a33f00 }
body { font: 16px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
td, th { border-bottom: 1px solid var(--line); padding: .35rem .5rem; text-align: left; vertical-align: top }
.held { color: var(--held) } .partly { color: var(--partly) } .not { color: var(--not) }
td.held, td.partly, td.not { white-space: nowrap; font-weight: 600 }
figure { margin: 3rem 0 }
img { max-width: 100%; height: auto; border: 1px solid var(--line) } h2 { margin-bottom: .2rem }
@media (max-width: 40rem) {
  table, tbody, tr, td { display: block } thead { display: none }
  td { border: 0; padding: .1rem 0 } tr { border-bottom: 1px solid var(--line); padding: .6rem 0 }
  td[data-is]::before { content: attr(data-is) ": "; opacity: .7; font-weight: 400 }
}
@media (prefers-color-scheme: dark) {
  :root { --line: #444; --held: #4fc796; --partly: #f0bd5a; --not: #ff8b70 }
  body { background: #14171b; color: #e7eaee } a { color: #8ab4ff } a:visited { color: #c3a6ff }
}
"""


def gallery(args: argparse.Namespace) -> int:
    """Run what is asked for, then write the index. The worst exit code of all."""
    folder = args.output or DEFAULT
    worst, began = PASS, time.monotonic()
    for place, name in enumerate(NAMES, 1):
        if args.resume and finished(folder, name, args):
            say(f"{place} of {len(NAMES)}: {name} is there")
            continue
        say(f"{place} of {len(NAMES)}: {name}, {(time.monotonic() - began) / 60:.1f} min so far")
        code = run_apart(name, folder, args)
        worst = max(worst, code, key=(PASS, REGRESSION, INVALID).index)
    found = read_all(folder)
    write_index(found, folder)
    for one in found:
        put(f"{one['name']:28}{one['verdict']:10}{one['seconds']:6.0f} s")
    put(f"results: {folder}")
    return worst


def run_apart(name: str, folder: Path, args: argparse.Namespace) -> int:
    """Its exit code; what it could not do is INVALID."""
    command = [sys.executable, "-m", "harness.experiments", name, "-o", str(folder), "--seed", str(args.seed)]
    command += [f"--{flag}" for flag in ("virtual", "real", "smoke") if getattr(args, flag)]
    with running(command, stdout=subprocess.DEVNULL) as process:
        try:
            code = process.wait(args.timeout)
        except subprocess.TimeoutExpired:
            say(f"error: {name} took longer than --timeout={args.timeout:g} s and was ended")
            return INVALID
    if code in (PASS, REGRESSION):
        return code
    say(f"error: {name} ended with exit code {code}; the others go on")
    return INVALID


def finished(folder: Path, name: str, args: argparse.Namespace) -> bool:
    """Whether the folder has it in the form that is asked for."""
    found = _read(folder / f"{name}.json")
    real = args.real or (experiment(name).real and not args.virtual)
    wanted = ("real" if real else "virtual", args.smoke, args.seed)
    return found is not None and (found["mode"], found["smoke"], found["seed"]) == wanted


def read_all(folder: Path) -> list[dict[str, Any]]:
    return [found for name in NAMES if (found := _read(folder / f"{name}.json")) is not None]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("schema_version") == 1 and "verdict" in found else None


def write_result(found: dict[str, Any], folder: Path) -> Path:
    """<name>.png, .md and at last .json, which says that it is finished. Without Chromium there is no
    picture."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output={folder}: cannot be written ({error.strerror})") from None
    path = folder / f"{found['name']}.json"
    draw(found["figure"], path.with_suffix(".png"))
    path.with_suffix(".md").write_text(markdown(found), encoding="utf-8")
    path.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return path


def draw(figure: dict[str, Any], path: Path) -> None:
    import plotly.graph_objects as go

    from harness.dashboard.export import ExportError, export_figure

    try:
        export_figure(go.Figure(figure), path, WIDTH)
    except ExportError as error:
        say(f"no picture: {error}")


def write_index(found: list[dict[str, Any]], folder: Path) -> None:
    """README.md for the repository, index.html for a browser: every verdict on one screen."""
    if not found:
        raise UsageError(f"--output={folder}: has no result of an experiment, so there is nothing to list")
    rows = [
        f"| [{one['title']}]({one['name']}.md)<br>{one['source']} | {_cell(one, 'text')} "
        f"| {_cell(one, 'published')} | {_cell(one, 'measured')} | **{one['verdict']}** |"
        for one in found
    ]
    text = [
        "# Gallery",
        "",
        "Published results of the field, rerun by `make gallery` (`python -m harness.experiments "
        "gallery`), and what came out "
        f"on {machine(found)}. Virtual time where only counts matter. Shown is the first claim of each; the "
        "verdict is on all of them. The pages have the others, the reasons and the ratios.",
        "",
        "| experiment, source | claim | published | measured | verdict |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]
    (folder / "README.md").write_text("\n".join(text), encoding="utf-8")
    (folder / "index.html").write_text(page(found), encoding="utf-8")


def page(found: list[dict[str, Any]]) -> str:
    rows, figures = [], []
    for one in found:
        name, title = escape(one["name"]), escape(one["title"])
        kind = one["verdict"].split()[0]
        picture = escape(one["figure"]["layout"]["title"]["text"], quote=True)
        verdict = f"<td class={kind}>{escape(one['verdict'])}</td>"
        first = "".join(_told(what, one["claims"][0][key]) for what, key in CELLS)
        rows.append(
            f'<tr><td><a href="#{name}">{title}</a><br><small>{escape(one["source"])}</small></td>{verdict}'
            f"{first}</tr>"
        )
        claims = "".join(
            f"<tr><td>{escape(c['text'])}</td>{_told('published', c['published'])}"
            f"<td class={'held' if c['held'] else 'not'}>{'held' if c['held'] else 'not held'}</td>"
            f"{_told('measured', c['measured'])}</tr>"
            for c in one["claims"]
        )
        figures.append(
            f'<figure id="{name}"><h2>{title}</h2><p>{escape(one["source"])}. Published: '
            f"{escape(one['published'])}."
            f' <a href="{name}.md">all figures</a>, <a href="{name}.json">data</a></p>'
            f'<img src="{name}.png" alt="{picture}">'
            f"<p><b class={kind}>{escape(one['verdict'])}:</b> "
            f"{escape(one['because'])}</p><table><thead><tr><th>claim<th>"
            f"published<th><th>measured</thead><tbody>{claims}</tbody></table></figure>"
        )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Gallery</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{CSS}</style></head>'
        f"<body><h1>Published results, rerun</h1><p>On {escape(machine(found))}; in virtual time where only "
        "counts matter. Shown is the first claim of each; the verdict is on all of them.</p>"
        "<table><thead><tr><th>experiment<th>verdict<th>claim<th>published<th>measured</thead><tbody>"
        f"{''.join(rows)}</tbody></table>{''.join(figures)}</body></html>\n"
    )


def _told(what: str, text: str) -> str:
    """A cell that says what it is where a narrow screen has no room for the head."""
    return f'<td data-is="{what}">{escape(text)}</td>'


def machine(found: list[dict[str, Any]]) -> str:
    names = {f"{m['cores']} cores of {m['cpu']}" for one in found if (m := one["machine"])}
    return " and ".join(sorted(names)) or "no machine: all in virtual time"


def _cell(one: dict[str, Any], key: str) -> str:
    return str(one["claims"][0][key]).replace("|", "\\|")

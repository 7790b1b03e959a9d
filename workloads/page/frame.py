"""What every page of this project is made of: colours, style, script, plotly.js, and data that is safe inside
a script element. A page opens from disk and asks the network for nothing. (`harness.dashboard` uses it too.)
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from workloads import output

# Okabe and Ito's palette: told apart by colour-blind readers, and on light and dark ground. The last four
# are for many runs on one page, where no palette keeps all apart.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6FDF", "#999999"),
    *("#A6611A", "#E7298A", "#8DB600", "#4D4DFF"),
)


def style() -> str:
    return (resources.files("workloads.page") / "page.css").read_text(encoding="utf-8")


def script() -> str:
    """Draws FIGURES, plain Plotly JSON of an id each, into the elements of those ids, in the theme that the
    reader wants."""
    return (resources.files("workloads.page") / "page.js").read_text(encoding="utf-8")


def plotly() -> str:
    """plotly.js as the plotly package ships it; a closing tag inside it would end our script element."""
    text = (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script")


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def write_page(html: str, out: Path) -> None:
    """The whole page or none of it. Raises OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    output.whole(out, html.encode("utf-8"))

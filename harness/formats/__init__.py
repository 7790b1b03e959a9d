"""What a gate found, in the forms that CI systems and benchmark trackers read. Each module is one form: a
pure function from a Report to text. A figure that is null or unreliable is a number in none of them."""

from harness.formats.bencher import bencher
from harness.formats.github_benchmark import bigger_is_better, smaller_is_better
from harness.formats.junit import junit
from harness.formats.markdown import markdown
from harness.formats.pytorch import pytorch
from harness.formats.report import Figure, Report

__all__ = [
    "Figure",
    "Report",
    "bencher",
    "bigger_is_better",
    "junit",
    "markdown",
    "pytorch",
    "smaller_is_better",
]

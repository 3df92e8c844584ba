"""The training loop, its metrics and its report."""

from .loop import Run
from .report import write_report

__all__ = ["Run", "write_report"]

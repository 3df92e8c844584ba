"""taut's report: one page without anything from outside, of one run or of several side by side."""

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 260, 56, 34
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 720px; margin: 2em auto;
  padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.1em; margin-top: 2em }
table { border-collapse: collapse } td, th { padding: .25em .9em .25em 0; text-align: right }
td:first-child, th:first-child { text-align: left }
svg text { font: 12px system-ui, sans-serif; fill: #57606a }
pre { background: #f6f8fa; padding: 1em; overflow-x: auto; font-size: 13px }
"""


def read_metrics(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"report: {run} has no metrics.jsonl: give the folder of a run")
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page of some runs' folders."""
    read = {Path(run).name: read_metrics(Path(run)) for run in runs}
    plots = (
        ("Loss", "loss", "train"),
        ("Loss on held-out texts", "loss", "eval"),
        ("Accuracy on held-out texts", "accuracy", "eval"),
        ("Tokens per second", "tokens_per_s", "train"),
        ("Padding avoided", "padding_avoided", "train"),
    )
    parts = [f"<h1>{html.escape(', '.join(read))}</h1>", _table(read)]
    for title, metric, kind in plots:
        lines = {
            name: [(row["step"], row[metric]) for row in rows if row["kind"] == kind]
            for name, rows in read.items()
        }
        lines = {name: points for name, points in lines.items() if points}
        if lines:
            parts.append(f"<h2>{title}</h2>{_plot(lines)}")
    for run in runs:
        config = Path(run) / "config.toml"
        if config.is_file():
            parts.append(f"<h2>Settings of {html.escape(Path(run).name)}</h2>")
            parts.append(f"<pre>{html.escape(config.read_text())}</pre>")
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>taut report</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style>{''.join(parts)}</html>\n"
    )
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _table(read: dict[str, list[dict[str, Any]]]) -> str:
    head = ("run", "steps", "minutes", "loss", "held-out loss", "accuracy", "tokens/s")
    rows = []
    for name, metrics in read.items():
        train = [row for row in metrics if row["kind"] == "train"]
        held = [row for row in metrics if row["kind"] == "eval"]
        speeds = sorted(row["tokens_per_s"] for row in train)
        cells = [
            html.escape(name),
            str(train[-1]["step"]) if train else "0",
            f"{metrics[-1]['seconds'] / 60:.1f}" if metrics else "",
            f"{train[-1]['loss']:.3f}" if train else "",
            f"{held[-1]['loss']:.3f}" if held else "",
            f"{held[-1]['accuracy']:.1%}" if held else "",
            f"{speeds[len(speeds) // 2]:,.0f}" if train else "",
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    titles = "".join(f"<th>{title}</th>" for title in head)
    return f"<table><tr>{titles}</tr>{''.join(rows)}</table>"


def _ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers from low to high."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda x: abs(x - rough / power))
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]


def _plot(lines: dict[str, list[tuple[float, float]]]) -> str:
    """A line for each run."""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    low, high = min(ys), max(ys)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - room, high + room
    left, right = min(xs), max(max(xs), min(xs) + 1)

    def across(x: float) -> float:
        return _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - 12)

    def down(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _BOTTOM - 12)

    parts = []
    for tick in _ticks(low, high):
        y = down(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - 12}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,.4g}</text>')
    for tick in _ticks(left, right):
        x, y = across(tick), _HEIGHT - 12
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{tick:,.0f}</text>')
    for i, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) == 1:
            x, y = points[0]
            parts.append(f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{colour}"/>')
        if len(lines) > 1:
            parts.append(
                f'<text x="{_WIDTH - 16}" y="{24 + 16 * i}" text-anchor="end" '
                f'style="fill:{colour}">{html.escape(name)}</text>'
            )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%">{"".join(parts)}</svg>'

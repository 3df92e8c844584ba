"""Interleaved timing of variants of one step, with floors, saved bytes and a JSON row for each.

Timings on shared cores drift, so variants take turns, round by round, in one process; minimum and
median are reported, only ratios are claimed, and targets are judged on minima: a neighbour's work
comes in steps of 4 ms and can hold more than half of the runs. A floor (copying the bytes that an
op must move, or its GEMMs alone) is one more variant of the same run.

On a GPU a step is captured once and replayed, so what is timed is the device. The time of a call
with its launches, which bounds small batches, stands beside it.
"""

import argparse
import json
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
ROUNDS = 10
RUNS_A_TURN = 4
# three times the last-level caches of the machines the targets were set on, and long to write
SCRUB_BYTES = {"cpu": 96 << 20, "cuda": 512 << 20}
WARM_UP_S = 0.3  # long enough to leave the clock ramp and the first touch of every buffer behind


def device_from_arguments(description: str | None) -> str:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return parser.parse_args().device


def machine(device: str) -> dict[str, object]:
    """What a result must say about where it was taken."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    git = ("git", "describe", "--always", "--dirty", "--abbrev=10")
    commit = subprocess.run(
        git, capture_output=True, text=True, cwd=RESULTS.parent, check=False
    ).stdout.strip()
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else (names or [platform.machine()])[0],
        "threads": torch.get_num_threads(),
        "commit": commit or "unknown",
        "date": datetime.now(UTC).date().isoformat(),
    }


def slug(device: str) -> str:
    """A processor as a part of a file name: results of two machines stand side by side."""
    plain = re.sub(r"\((r|tm)\)|\bprocessor\b", "", device.lower())
    return "-".join(re.findall(r"[a-z0-9]+", plain))


def _call_seconds(step: Callable[[], object], device: str) -> float:
    """By the host's clock, launches included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    """A step as a CUDA graph. Its results stay where they are: nothing is allocated in a replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    return lambda: (graph.replay(), kept)


def _device_seconds(step: Callable[[], object], scrub: torch.Tensor) -> float:
    """By the device's clock, from cold caches; the scrub also hides the launch."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    scrub.add_(1)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def compiled(form: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for the shapes of one case: what it learnt of the cases before would make it
    generalise, and run eagerly after its eighth recompilation."""
    torch.compiler.reset()
    return torch.compile(form, dynamic=False)


def copy_step(num_bytes: int, device: str = "cpu") -> Callable[[], object]:
    """Moves num_bytes in all (half read, half written) as fast as a copy can."""
    source = torch.ones(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def time_steps(
    steps: Mapping[str, Callable[[], object]], device: str = "cpu", rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Seconds of each step, interleaved; every round starts with another variant.

    When its turn comes a step runs once untimed, then a few times timed, each time after all
    threads have rewritten a buffer larger than the last-level cache: every variant finds its code
    warm, the caches cold and the threads awake, whatever ran before it.
    """
    for step in steps.values():
        start = time.perf_counter()
        while time.perf_counter() - start < WARM_UP_S:
            _call_seconds(step, device)
    scrub = torch.zeros(SCRUB_BYTES[device] // 4, device=device)
    if device == "cuda":
        steps = {name: _captured(step) for name, step in steps.items()}
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            steps[name]()
            for _ in range(RUNS_A_TURN):
                if device == "cuda":
                    times[name].append(_device_seconds(steps[name], scrub))
                else:
                    scrub.add_(1)
                    times[name].append(_call_seconds(steps[name], device))
    return times


class Report:
    """The rows of one benchmark: printed as they come, written to results/ at the end."""

    def __init__(self, stem: str, device: str) -> None:
        self.stem, self.device = stem, device
        self.rows: list[dict[str, object]] = []
        self.machine = machine(device)
        print(f"{stem}: {', '.join(f'{k} {v}' for k, v in self.machine.items())}")

    def compare(
        self,
        case: str,
        steps: Mapping[str, Callable[[], object]],
        *,
        bytes_moved: int = 0,
        flops: int = 0,
        saved: Mapping[str, int] | None = None,
        targets: Mapping[str, float] | None = None,
        rounds: int = ROUNDS,
    ) -> dict[str, float]:
        """Time the variants and judge the one named taut; returns each minimum in seconds.

        bytes_moved adds a copy of as many bytes as a floor. targets: variant -> how many times as
        fast taut must be, judged on the minima (below 1 for a floor).
        """
        steps = dict(steps)
        if bytes_moved:
            steps["copy"] = copy_step(bytes_moved, self.device)
        times = time_steps(steps, self.device, rounds)
        best = {name: min(t) for name, t in times.items()}
        middle = {name: median(t) for name, t in times.items()}
        best_taut, middle_taut = (times_of.get("taut", 0) for times_of in (best, middle))
        print(f"\n{case}")
        for name in steps:
            row = {
                "case": case,
                "variant": name,
                "min_ms": round(best[name] * 1e3, 4),
                "median_ms": round(middle[name] * 1e3, 4),
            }
            if self.device == "cuda":
                call = min(_call_seconds(steps[name], "cuda") for _ in range(20))
                row["call_ms"] = round(call * 1e3, 4)
            if best_taut:
                row["times_as_long_as_taut"] = round(best[name] / best_taut, 3)
                row["by_median"] = round(middle[name] / middle_taut, 3)
            if bytes_moved:
                row["gb_per_s"] = round(bytes_moved / best[name] / 1e9, 2)
            if flops:
                row["gflop_per_s"] = round(flops / best[name] / 1e9, 1)
            if saved and name in saved:
                row["saved_bytes"] = saved[name]
            if targets and name in targets:
                row["target"] = targets[name]
                row["met"] = best[name] / best_taut >= targets[name]
            self.rows.append(row)
            shown = [f"{k} {v}" for k, v in row.items() if k not in ("case", "variant")]
            print(f"  {name:<14}" + "  ".join(shown))
        return best

    def note(self, case: str, **figures: object) -> None:
        """A row that is not a timing."""
        self.rows.append({"case": case, **figures})
        print(f"\n{case}\n  " + "  ".join(f"{k} {v}" for k, v in figures.items()))

    def write(self) -> None:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.stem}.{slug(str(self.machine['device']))}.json"
        rows = ",\n".join("  " + json.dumps(row) for row in self.rows)
        path.write_text(f'{{"machine": {json.dumps(self.machine)},\n "rows": [\n{rows}\n]}}\n')
        missed = [f"{r['case']} against {r['variant']}" for r in self.rows if r.get("met") is False]
        shown = path.relative_to(RESULTS.parent.parent)
        print(f"\nwritten to {shown}; targets missed: {missed or 'none'}")

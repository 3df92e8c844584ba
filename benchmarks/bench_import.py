"""import taut against import torch, in fresh processes.  python -m benchmarks.bench_import"""

import subprocess
import sys
import time
from statistics import median

from benchmarks.harness import Report

ROUNDS = 7
LIMIT = 2.0  # times import torch


def seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    report = Report("import", "cpu")
    times: dict[str, list[float]] = {"import torch": [], "import taut": []}
    for statement in times:
        seconds(statement)  # bytecode and the page cache
    for _ in range(ROUNDS):
        for statement, taken in times.items():
            taken.append(seconds(statement))
    ratio = median(times["import taut"]) / median(times["import torch"])
    report.note(
        "import, warm, with the start of Python",
        torch_s=round(median(times["import torch"]), 3),
        taut_s=round(median(times["import taut"]), 3),
        ratio=round(ratio, 3),
        target=LIMIT,
        met=ratio < LIMIT,
    )
    report.write()


if __name__ == "__main__":
    main()

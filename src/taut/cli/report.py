"""taut report: one HTML page of one run, or of several side by side."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--out", default="report.html", help="the page; default %(default)s")


def run(args: argparse.Namespace) -> int:
    from taut.train.report import write_report

    print(write_report([Path(run) for run in args.runs], args.out), file=sys.stdout)
    return 0

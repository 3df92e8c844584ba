"""taut info: versions, CPU features, and which form of each op runs where and why."""

import argparse
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers")
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "sve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # it has none


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_features() -> tuple[str, list[str]]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = dict(line.partition(":")[::2] for line in reversed(lines))
    found = {name.strip(): value.split() for name, value in fields.items()}
    flags = found.get("flags", found.get("Features", []))
    model = " ".join(found.get("model name", [])) or platform.processor() or platform.machine()
    return model, [name for name in FEATURES if name in flags]


def run(args: argparse.Namespace) -> int:
    del args
    import torch
    from rich.console import Console
    from rich.table import Table

    from taut.ops import library, native
    from taut.ops.forms import forms

    console = Console(soft_wrap=True, highlight=False)
    model, features = _cpu_features()
    folders = ", ".join(map(str, library.library_folders())) or "none"
    facts = {
        "taut": _version("taut"),
        "python": sys.version.split()[0],
        **{name: _version(name) for name in PACKAGES},
        "cpu": f"{model}, {torch.get_num_threads()} threads",
        "cpu features": " ".join(features) or "unknown",
        "cpu kernels": f"{native.build} (folder: {folders})",
        "openmp": ", ".join(library.openmp_runtimes()) or "unknown",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    for name, value in facts.items():
        console.print(f"[bold]{name:>14}[/]  {value}", markup=True)
    table = Table("op", "device", "form", "why", box=None, padding=(0, 2, 0, 0))
    for line in forms():
        table.add_row(*line)
    console.print()
    console.print(table)
    return 0

"""The rules of the tree that a machine can check, and proof that each check can fail."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A part may import itself and the parts on the lines below its own. `data` stands aside: it imports
# `packed` alone and is imported by the top line alone, whose two parts may import each other.
LAYERS = [
    {"config", "train"},
    {"hf", "memory", "optim", "parallel"},
    {"models"},
    {"nn"},
    {"ops"},
    {"packed"},
]
SEE_ALL = {"", "__main__", "cli", "testing"}  # "" is taut/__init__; no part may import these
MAX_LINES = 600
SHAPELESS_NAMES = {"utils", "util", "common", "helpers", "misc"}
PICKLE_READERS = {"pickle", "cloudpickle", "dill", "joblib", "shelve"}


def may_import(part: str, other: str) -> bool:
    if part == other:
        return True
    if part in SEE_ALL:
        return other != "testing"
    if part == "data":
        return other == "packed"
    if part in LAYERS[0] and other in LAYERS[0] | {"data"}:
        return True
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    return other in rank and rank[part] < rank[other]


def python_files(root: Path, *folders: str) -> Iterator[tuple[Path, str, ast.Module]]:
    """Path, path from the root, and syntax tree of each Python file."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path, path.relative_to(root).as_posix(), ast.parse(path.read_text())


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def at_import_time(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: all but the bodies of functions."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo.extend(ast.iter_child_nodes(node))


def imported(nodes: Iterator[ast.AST], importer: str, is_package: bool) -> list[tuple[int, str]]:
    """(line, full name) of everything imported; `from a import b` counts as a.b."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                drop = node.level - (1 if is_package else 0)
                package = importer.split(".")[: -drop or None]
                base = ".".join([*package, *filter(None, [node.module])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def check_import_directions(root: Path) -> list[str]:
    faults = []
    for path, where, tree in python_files(root, "src/taut"):
        name = module_name(root, path)
        part = f"{name}.".split(".")[1]
        if part not in SEE_ALL.union({"data"}, *LAYERS):
            faults.append(f"{where}: {part} has no place among the layers")
            continue
        for line, target in imported(ast.walk(tree), name, path.name == "__init__.py"):
            package, *rest = target.split(".")
            if package != "taut":
                continue
            other = rest[0] if rest else ""
            if not may_import(part, other):
                faults.append(f"{where}:{line}: {part or 'taut'} may not import {target}")
    return faults


def check_triton_is_imported_on_use(root: Path) -> list[str]:
    faults = []
    for path, where, tree in python_files(root, "src/taut"):
        name = module_name(root, path)
        is_kernel = name.startswith("taut.ops.triton")
        for line, target in imported(at_import_time(tree), name, path.name == "__init__.py"):
            is_triton = f"{target}.".startswith(("triton.", "taut.ops.triton."))
            if (is_triton and not is_kernel) or target.split(".")[0] == "transformers":
                faults.append(f"{where}:{line}: import {target} inside the function that needs it")
    return faults


def check_file_lengths(root: Path) -> list[str]:
    files = [
        path
        for folder in ("src", "tests", "benchmarks")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in {".py", ".cpp", ".h"}
    ]
    lengths = [(path, len(path.read_text().splitlines())) for path in files]
    return [
        f"{path.relative_to(root).as_posix()}: {length} lines, the limit is {MAX_LINES}"
        for path, length in lengths
        if length > MAX_LINES
    ]


def defines_an_op(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            callee = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            callee = node.func.id if isinstance(node.func, ast.Name) else callee
            schema = ast.unparse(node.args[0]).lstrip("f").strip("'\"")
            if callee in {"define", "custom_op", "triton_op"} and schema.startswith("taut::"):
                return True
    return False


def check_ops_have_test_and_benchmark(root: Path) -> list[str]:
    faults = []
    for path in sorted((root / "src/taut/ops").glob("*.py")):
        if defines_an_op(ast.parse(path.read_text())):
            wanted = (f"tests/ops/test_{path.stem}.py", f"benchmarks/bench_{path.stem}.py")
            where = path.relative_to(root).as_posix()
            faults += [f"{where}: no {x}" for x in wanted if not (root / x).is_file()]
    return faults


def check_module_names(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root).as_posix()}: says nothing about what it holds"
        for folder in ("src", "tests", "benchmarks")
        for path in sorted((root / folder).rglob("*"))
        if path.stem.strip("_") in SHAPELESS_NAMES
    ]


def check_only_commands_print(root: Path) -> list[str]:
    faults = []
    for _, where, tree in python_files(root, "src", "tests"):
        if where == "src/taut/__main__.py" or where.startswith("src/taut/cli/"):
            continue
        faults += [
            f"{where}:{node.lineno}: print"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        ]
    return faults


def check_no_pickle_is_read(root: Path) -> list[str]:
    faults = []
    for path, where, tree in python_files(root, "src"):
        name = module_name(root, path)
        for line, target in imported(ast.walk(tree), name, path.name == "__init__.py"):
            if target.split(".")[0] in PICKLE_READERS or target == "torch.load":
                faults.append(f"{where}:{line}: {target} reads pickles")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                allows = any(word.arg == "allow_pickle" for word in node.keywords)
                if allows or ast.unparse(node.func) == "torch.load":
                    faults.append(f"{where}:{node.lineno}: {ast.unparse(node.func)} reads pickles")
    return faults


CHECKS = [
    check_import_directions,
    check_triton_is_imported_on_use,
    check_file_lengths,
    check_ops_have_test_and_benchmark,
    check_module_names,
    check_only_commands_print,
    check_no_pickle_is_read,
]


@pytest.mark.parametrize("check", CHECKS)
def test_tree_keeps_the_rule(check):
    assert (ROOT / "src/taut/__init__.py").is_file()  # the checks look at something
    assert check(ROOT) == []


OP = 'torch.library.define("taut::x_fwd", "(Tensor x) -> Tensor")'
VIOLATIONS = [
    (check_import_directions, "src/taut/ops/x.py", "from taut.nn import block"),
    (check_import_directions, "src/taut/ops/x.py", "from ..nn.block import Block"),
    (check_import_directions, "src/taut/ops/x.py", "from .. import models"),
    (check_import_directions, "src/taut/ops/__init__.py", "from ..nn import block"),
    (check_import_directions, "src/taut/ops/x.py", "import taut.train.trainer"),
    (check_import_directions, "src/taut/nn/x.py", "def f():\n    from taut.optim import AdamW"),
    (check_import_directions, "src/taut/nn/x.py", "from taut import PackedBatch"),
    (check_import_directions, "src/taut/nn/x.py", "import taut"),
    (check_import_directions, "src/taut/hf/x.py", "from ..memory import ledger"),
    (check_import_directions, "src/taut/packed.py", "from .ops import norm"),
    (check_import_directions, "src/taut/data/x.py", "from ..ops import norm"),
    (check_import_directions, "src/taut/models/x.py", "from ..data import balance"),
    (check_import_directions, "src/taut/train/x.py", "from ..cli import info"),
    (check_import_directions, "src/taut/train/x.py", "from ..testing import saved_bytes"),
    (check_import_directions, "src/taut/__main__.py", "from taut.testing import saved_bytes"),
    (check_import_directions, "src/taut/extras/x.py", ""),
    (check_triton_is_imported_on_use, "src/taut/ops/x.py", "import triton.language as tl"),
    (check_triton_is_imported_on_use, "src/taut/ops/x.py", "from .triton.x import kernel"),
    (check_triton_is_imported_on_use, "src/taut/ops/x.py", "from . import triton"),
    (check_triton_is_imported_on_use, "src/taut/ops/__init__.py", "from .triton import x"),
    (check_triton_is_imported_on_use, "src/taut/testing.py", "if 1:\n    from triton import jit"),
    (check_triton_is_imported_on_use, "src/taut/hf/x.py", "class A:\n    import transformers"),
    (check_triton_is_imported_on_use, "src/taut/ops/triton/x.py", "import transformers"),
    (check_file_lengths, "src/taut/csrc/x.cpp", "\n" * (MAX_LINES + 1)),
    (check_file_lengths, "tests/test_x.py", "\n" * (MAX_LINES + 1)),
    (check_file_lengths, "benchmarks/bench_x.py", "\n" * (MAX_LINES + 1)),
    (check_ops_have_test_and_benchmark, "src/taut/ops/x.py", OP),
    (check_ops_have_test_and_benchmark, "src/taut/ops/x.py", OP.replace('("', '(f"')),
    (check_ops_have_test_and_benchmark, "src/taut/ops/x.py", '@custom_op("taut::x")\ndef f(): ...'),
    (check_module_names, "src/taut/nn/utils.py", ""),
    (check_module_names, "src/taut/_common/x.py", ""),
    (check_module_names, "src/taut/csrc/helpers.h", ""),
    (check_only_commands_print, "src/taut/nn/x.py", "print(1)"),
    (check_only_commands_print, "tests/test_x.py", "def test_x():\n    print(1)"),
    (check_no_pickle_is_read, "src/taut/train/x.py", "import pickle"),
    (check_no_pickle_is_read, "src/taut/train/x.py", "def f():\n    from pickle import loads"),
    (check_no_pickle_is_read, "src/taut/train/x.py", "torch.load(path, weights_only=True)"),
    (check_no_pickle_is_read, "src/taut/train/x.py", "from torch import load"),
    (check_no_pickle_is_read, "src/taut/data/x.py", "np.load(path, allow_pickle=True)"),
]


@pytest.mark.parametrize(("check", "path", "source"), VIOLATIONS)
def test_violation_is_caught(check, path, source, tmp_path):
    write(tmp_path, path, source)
    (fault, *_) = check(tmp_path)
    assert path.startswith(fault.split(":")[0])


ALLOWED = [
    ("src/taut/__init__.py", "from .models import bert"),
    ("src/taut/__main__.py", "from taut.cli import info\nprint(info)"),
    ("src/taut/cli/x.py", "import taut\nfrom taut import config\nprint(taut.__version__)"),
    ("src/taut/config.py", "from .train.trainer import TrainerConfig\nfrom .data import balance"),
    ("src/taut/train/x.py", "from ..data import balance\nfrom ..hf import load"),
    ("src/taut/data/x.py", "import numpy\nfrom ..packed import PackedBatch"),
    ("src/taut/testing.py", "from .memory.ledger import saved_bytes"),
    ("src/taut/ops/x.py", "def f():\n    from .triton.x import kernel\n    return lambda: kernel"),
    ("src/taut/ops/triton/x.py", "import triton\nfrom .random import uniform"),
    ("src/taut/ops/random.py", '"""Defines no op."""\nfrom torch import Tensor'),
    ("src/taut/nn/utilities.py", "\n" * MAX_LINES),
    ("src/taut/train/y.py", "from json import load\nsafetensors.torch.load(data)"),
]


@pytest.mark.parametrize(("path", "source"), ALLOWED)
def test_what_is_allowed_passes(path, source, tmp_path):
    write(tmp_path, path, source)
    assert [fault for check in CHECKS for fault in check(tmp_path)] == []


def write(root: Path, path: str, source: str) -> None:
    (root / path).parent.mkdir(parents=True)
    (root / path).write_text(source)


def test_ops_with_test_and_benchmark_pass(tmp_path):
    write(tmp_path, "src/taut/ops/x.py", OP)
    write(tmp_path, "tests/ops/test_x.py", "")
    assert len(check_ops_have_test_and_benchmark(tmp_path)) == 1
    write(tmp_path, "benchmarks/bench_x.py", "")
    assert check_ops_have_test_and_benchmark(tmp_path) == []


def test_import_taut_is_light():
    code = "import sys, taut; print(*{'triton', 'transformers'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []

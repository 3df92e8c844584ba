"""Texts to train on: those that every Python carries, and files of the user."""

import ast
import importlib
import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
_LONGEST = 10_000_000  # characters of a record


def _modules() -> Iterator[Path]:
    """The sources of the standard library, in one order on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED.intersection(path.relative_to(root).parts):
            yield path


def stdlib_docs() -> Iterator[str]:
    """Docstrings of the standard library, and the topics of Python's help."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in _modules():
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # samples of broken code
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text:
                yield text
    for _, text in sorted(importlib.import_module("pydoc_data.topics").topics.items()):
        yield from (part.strip() for part in text.split("\n\n\n") if part.strip())


def stdlib_code() -> Iterator[str]:
    """The sources of the standard library, a file a record."""
    for path in _modules():
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


SOURCES: dict[str, Callable[[], Iterator[str]]] = {
    "stdlib-docs": stdlib_docs,
    "stdlib-code": stdlib_code,
}


def read_source(name: str, *, field: str = "text", policy: str = "raise") -> Iterator[str]:
    """The records of a source: one of SOURCES, a text file (a paragraph a record), a folder of text
    files (a file a record), or JSON lines with a field.

    policy says what becomes of a record that is not UTF-8, holds NUL, is longer than 10 MB or lacks
    the field: "raise", or "skip".
    """
    if policy not in ("raise", "skip"):
        raise ValueError(f"data: policy must be raise or skip; got {policy!r}")
    if name in SOURCES:
        yield from SOURCES[name]()
        return
    path = Path(name)
    if not path.exists():
        raise ValueError(
            f"data: source must be one of {', '.join(SOURCES)}, or a file or folder; there is no "
            f"{name}"
        )
    for where, record in _records(path, field):
        wrong = _fault(record, field)
        if wrong is None:
            assert isinstance(record, str)
            yield record
        elif policy == "raise":
            raise ValueError(f"data: {where} {wrong}: correct it, or set data.policy=skip")


def _records(path: Path, field: str) -> Iterator[tuple[str, str | bytes | None]]:
    """Where a record stands, and its text; bytes if they are no UTF-8, None without the field."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if not file.is_file():
            continue
        raw = file.read_bytes()
        if file.suffix == ".jsonl":
            for number, line in enumerate(raw.splitlines(), 1):
                yield f"{file}, line {number},", _of_json(line, field)
        elif path.is_dir():
            yield str(file), _decoded(raw)
        else:
            for number, part in enumerate(raw.replace(b"\r\n", b"\n").split(b"\n\n"), 1):
                if part.strip():
                    yield f"{file}, paragraph {number},", _decoded(part.strip())


def _decoded(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _of_json(line: bytes, field: str) -> str | bytes | None:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return line
    text = entry.get(field) if isinstance(entry, dict) else None
    return text if isinstance(text, str) else None


def _fault(record: str | bytes | None, field: str) -> str | None:
    if record is None:
        return f"has no text in the field {field!r}"
    if isinstance(record, bytes):
        return "is not UTF-8, or not JSON"
    if "\0" in record:
        return "holds a NUL"
    if len(record) > _LONGEST:
        return f"is longer than {_LONGEST:,} characters"
    return None

"""For every test: Triton's interpreter where there is no GPU, one seed, no luck with memory."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, when it is first imported

OP_TESTS = Path(__file__).parent / "ops"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--composites",
        action="store_true",
        help="refuse to run unless taut is an installed copy without native kernels",
    )
    if not pluginmanager.hasplugin("timeout"):  # a GPU machine may lack it: same file, no limit
        parser.addini("timeout", "seconds a test may take; needs pytest-timeout")


def _installed_taut() -> tuple[Path, list[str]]:
    """Where taut was imported from, and the names of its native libraries."""
    import taut

    folders = [Path(folder, "lib") for folder in taut.__path__]
    return Path(taut.__file__).parent, sorted({x.name for f in folders for x in f.glob("libtaut*")})


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--composites"):
        folder, libraries = _installed_taut()
        if libraries or not folder.is_relative_to(sys.prefix):
            raise pytest.UsageError(
                f"--composites: wants an install in {sys.prefix} without native kernels, "
                f"got {folder} with {', '.join(libraries) or 'none'}"
            )


def pytest_report_header() -> str:
    folder, libraries = _installed_taut()
    return f"taut: {folder}, native kernels: {', '.join(libraries) or 'none'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = {"gpu": not HAS_CUDA, "native": not _installed_taut()[1]}
    left_out = [
        x for x in items if any(absent[name] and x.get_closest_marker(name) for name in absent)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [x for x in items if x not in set(left_out)]


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _fill_with_garbage(x: Tensor) -> Tensor:
    """NaN, or for integers a number that no sum or index survives."""
    with torch.no_grad():
        if x.is_floating_point() or x.is_complex():
            return x.fill_(float("nan"))
        return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max - 1)


def _garbage_for_taut(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrapped(*args, **kwargs):
        # Dynamo folds the first test to True and never sees the frame
        if torch.compiler.is_compiling():
            return empty(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        x = empty(*args, **kwargs)
        return _fill_with_garbage(x) if caller.split(".")[0] == "taut" else x

    return wrapped


@pytest.fixture(scope="session")
def _dynamo_knows_torch() -> None:
    """Dynamo lists torch's functions at its first use: it must see the real ones."""
    torch.compile(torch.relu, backend="eager")(torch.zeros(1))


@pytest.fixture
def garbage_in_fresh_memory(_dynamo_knows_torch) -> Iterator[None]:
    """Uninitialised tensors that taut asks for hold garbage, so an unwritten output shows."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in (
            (torch, ("empty", "empty_like", "empty_strided")),
            (Tensor, ("new_empty", "new_empty_strided")),
        ):
            for name in names:
                patch.setattr(owner, name, _garbage_for_taut(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True)
def _garbage_in_op_tests(request: pytest.FixtureRequest) -> None:
    if OP_TESTS in request.path.parents:
        request.getfixturevalue("garbage_in_fresh_memory")

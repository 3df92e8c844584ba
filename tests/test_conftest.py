"""The test set-up itself: what it promises to every other test file."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

CONFTEST = Path(__file__).with_name("conftest.py")
ASKS_FOR_MEMORY = """
def fresh(x):
    yield torch.empty(3)
    yield torch.empty_like(x)
    yield torch.empty_strided((2, 2), (1, 2))
    yield x.new_empty(3)
    yield x.new_empty_strided((3,), (1,))
    yield torch.empty(3, dtype=torch.bfloat16, requires_grad=True)
"""


@pytest.mark.usefixtures("garbage_in_fresh_memory")
def test_memory_that_taut_asks_for_holds_nan():
    taut_module = {"__name__": "taut.ops.probe", "torch": torch}
    exec(ASKS_FOR_MEMORY, taut_module)
    for x in taut_module["fresh"](torch.zeros(2, 2)):
        assert x.isnan().all()


@pytest.mark.usefixtures("garbage_in_fresh_memory")
@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.int64, 2**62), (torch.int32, 2**30), (torch.uint8, 100)], ids=str
)
def test_integers_that_taut_asks_for_are_large(dtype, least):
    taut_module = {"__name__": "taut", "torch": torch, "dtype": dtype}
    exec("x = torch.empty(2, dtype=dtype)", taut_module)
    assert (taut_module["x"] >= least).all()


@pytest.mark.usefixtures("garbage_in_fresh_memory")
@pytest.mark.parametrize(("name", "is_filled"), [("tautology.x", False), ("taut.ops.x", True)])
def test_memory_that_others_ask_for_is_theirs(name, is_filled):
    module = {"__name__": name, "torch": torch, "zeros": torch.zeros(3)}
    exec("x = torch.empty(3, out=zeros)", module)
    assert module["x"].isnan().all() == is_filled


@pytest.mark.usefixtures("garbage_in_fresh_memory")
def test_garbage_is_invisible_to_the_compiler():
    taut_module = {"__name__": "taut.ops.probe", "torch": torch}
    exec("def f(x): return torch.empty_like(x).copy_(x) + x.new_empty(3).fill_(1)", taut_module)
    compiled = torch.compile(taut_module["f"], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_gpu_tests_are_deselected_without_a_gpu(tmp_path):
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_x.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_a(): pass\ndef test_b(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    want = "2 passed" if torch.cuda.is_available() else "1 passed, 1 deselected"
    assert want in run.stdout, run.stdout


@pytest.mark.parametrize(("is_installed", "libraries"), [(True, 0), (True, 1), (False, 0)])
def test_composites_option_takes_an_install_without_libraries_alone(
    is_installed, libraries, tmp_path, monkeypatch, pytestconfig
):
    package = tmp_path / "taut"
    (package / "lib").mkdir(parents=True)
    for i in range(libraries):
        (package / "lib" / f"libtaut_{i}.so").touch()
    fake = SimpleNamespace(__file__=str(package / "__init__.py"), __path__=[str(package)])
    monkeypatch.setitem(sys.modules, "taut", fake)
    monkeypatch.setattr(sys, "prefix", str(tmp_path if is_installed else tmp_path / "venv"))
    session = SimpleNamespace(config=SimpleNamespace(getoption=lambda name: name == "--composites"))
    conftest = pytestconfig.pluginmanager.get_plugin(str(CONFTEST))
    if is_installed and not libraries:
        assert conftest.pytest_report_header() == f"taut: {package}, native kernels: none"
        conftest.pytest_sessionstart(session)
    else:
        with pytest.raises(pytest.UsageError, match=re.escape(str(package))):
            conftest.pytest_sessionstart(session)

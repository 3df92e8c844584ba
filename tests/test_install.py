"""What a wheel holds, and that it works, built with a C++ compiler and without one."""

import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
HAS_COMPILER = any(map(shutil.which, [os.environ.get("CXX", "c++"), "g++", "clang++"]))
IS_X86 = platform.machine() in {"x86_64", "AMD64"}


def build_wheel(folder: Path, *options: str, **environment: str) -> Path:
    if find_spec("scikit_build_core"):  # else pip fetches it
        options = ("--no-build-isolation", *options)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT]
    subprocess.run([*command, *options], check=True, env=os.environ | environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def composite_wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("composite")
    return build_wheel(folder, CC="/nonexistent", CXX="/nonexistent")


@pytest.fixture(scope="module")
def native_wheel(tmp_path_factory):
    # the folder that `make setup` builds in: nothing is compiled twice
    folder = tmp_path_factory.mktemp("native")
    return build_wheel(folder, f"--config-settings=build-dir={ROOT / 'build/native'}")


def import_from(wheel: Path, folder: Path) -> Path:
    """Import taut in a new environment: this wheel, and torch and the rest from the present one."""
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "present.pth").write_text(str(Path(torch.__file__).parents[1]))
    zipfile.ZipFile(wheel).extractall(site_packages)
    command = [folder / "bin/python", "-I", "-c", "import taut; print(taut.__file__)"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Path(output.strip()).relative_to(site_packages)


def test_wheel_without_compiler_has_no_library_and_imports(composite_wheel, tmp_path):
    names = zipfile.ZipFile(composite_wheel).namelist()
    assert not [name for name in names if re.search(r"/lib/|\.(so|dylib|dll)$", name)]
    assert import_from(composite_wheel, tmp_path) == Path("taut/__init__.py")


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler on this machine")
def test_wheel_serves_every_python_and_holds_every_library(native_wheel, tmp_path):
    assert re.fullmatch(r"taut-[\d.]+-py3-none-(linux|macosx|win)\w+\.whl", native_wheel.name)
    names = zipfile.ZipFile(native_wheel).namelist()
    levels = ["amx", "generic", "v3", "v4"] if IS_X86 else ["generic"]
    libraries = sorted(name for name in names if name.startswith("taut/lib/"))
    assert [Path(name).stem for name in libraries] == [f"libtaut_{level}" for level in levels]
    assert import_from(native_wheel, tmp_path) == Path("taut/__init__.py")


@pytest.mark.parametrize("wheel", ["composite_wheel", "native_wheel"])
def test_wheel_holds_the_package_alone(wheel, request):
    names = zipfile.ZipFile(request.getfixturevalue(wheel)).namelist()
    assert not [name for name in names if not re.match(r"taut(-[\d.]+\.dist-info)?/", name)]
    assert not [name for name in names if name.endswith((".cpp", ".h", ".pyc"))]
    modules = {p.relative_to(ROOT / "src").as_posix() for p in ROOT.glob("src/taut/**/*.py")}
    assert modules == {name for name in names if name.endswith(".py")}
    assert any(name.endswith("/LICENSE") for name in names)

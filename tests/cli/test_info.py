"""taut info: what it must say, in a process of its own as a user runs it."""

import subprocess
import sys

import pytest
import torch

from taut import ops
from taut.__main__ import main
from taut.cli.info import PACKAGES
from taut.ops import native
from taut.ops.forms import forms


def taut(*arguments):
    command = [sys.executable, "-m", "taut", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_names_versions_features_and_the_form_of_every_op():
    run = taut("info")
    assert run.returncode == 0, run.stderr
    for name in (*PACKAGES, "openmp", "cpu features"):
        assert name in run.stdout
    assert torch.__version__ in run.stdout
    assert native.build.split(":")[0] in run.stdout
    for line in forms():
        assert line.op in run.stdout


def test_every_op_has_a_line_for_every_device():
    seen = {(line.op, line.device) for line in forms()}
    names = [name for name in ops.__all__ if not isinstance(getattr(ops, name), type)]
    names.append("optimizer")  # taut.optim calls it, not the user
    assert seen == {(op, device) for op in names for device in ("cpu", "cuda")}
    assert all(line.why for line in forms())


def test_says_why_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(native, "library", None)
    monkeypatch.setattr(native, "build", "no library: as this test wants it")
    (line,) = (x for x in forms() if (x.op, x.device) == ("mlp", "cpu"))
    assert (line.form, line.why) == ("composite", "no library: as this test wants it")


@pytest.mark.parametrize("arguments", [(), ("inform",), ("info", "--loud")])
def test_a_wrong_command_ends_with_code_2_and_no_traceback(arguments):
    run = taut(*arguments)
    assert run.returncode == 2
    assert "usage: taut" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_users_mistake_is_one_line(monkeypatch, capsys):
    def refuse(args):
        raise ValueError("the rule, what came, what to do")

    monkeypatch.setattr("taut.cli.info.run", refuse)
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "taut info: the rule, what came, what to do\n"

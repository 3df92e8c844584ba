import subprocess
import sys

import pytest

SMALL = [
    "data.vocab_size=300",
    "data.longest=16",
    "model.hidden_size=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "train.steps=12",
    "train.budget_tokens=128",
]


def taut(*arguments, columns="80"):
    return subprocess.run(
        [sys.executable, "-m", "taut", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"COLUMNS": columns, "PATH": "", "HOME": "/nonexistent"},
    )


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(f"a text about {i} and {i + 1} things" for i in range(100)))
    return path


@pytest.mark.parametrize("columns", ["80", "20"])
def test_trains_without_a_terminal(columns, texts, tmp_path):
    out = tmp_path / "run"
    settings = [f"data.source={texts}", f"train.out={out}", *SMALL]
    done = taut("train", *settings, columns=columns)
    assert done.returncode == 0, done.stderr
    assert "step 10/12  loss" in done.stdout
    assert "held-out loss" in done.stdout
    assert (out / "report.html").is_file()
    done = taut("report", str(out), "--out", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").is_file()


def test_a_dry_run_says_what_would_happen(texts, tmp_path):
    out = tmp_path / "run"
    done = taut("train", "--dry-run", f"data.source={texts}", f"train.out={out}", *SMALL)
    assert done.returncode == 0, done.stderr
    for word in ("100 texts", "M parameters", "12 steps of 128 tokens"):
        assert word in done.stdout
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stepz=3"], "no setting 'train.stepz'; the nearest is train.steps"),
        (["none.toml"], "there is no recipe none.toml"),
        (["a.toml", "b.toml"], "one recipe at a time; got a.toml, b.toml"),
        (["data.source=/nonexistent/x"], "there is no /nonexistent/x"),
    ],
)
def test_user_errors_are_one_line(arguments, message, tmp_path):
    done = taut("train", *arguments, *([f"train.out={tmp_path}/r"] if "=" in arguments[0] else []))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1

"""Every example runs from a shell, cut short."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# example -> arguments that make it short, what it must print
RUNS = {
    "huggingface_mlm.py": (["--steps", "4"], ["BertModel: 6 layers on packed tokens", "MB kept"])
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(path):
    arguments, wanted = RUNS[path.name]
    done = subprocess.run(
        [sys.executable, str(path), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout for line in wanted), done.stdout

import pytest
import torch

from taut.nn import training_dtype
from taut.ops import native


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        ("amx", torch.bfloat16),
        ("v4", torch.bfloat16),
        ("v3", torch.float32),
        ("generic", torch.float32),
        ("no library: no compiler", torch.float32),
    ],
)
def test_a_cpu_that_multiplies_bf16_trains_in_it(build, dtype, monkeypatch):
    monkeypatch.setattr(native, "build", build)
    assert training_dtype() == training_dtype("cpu") == dtype

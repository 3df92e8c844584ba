"""The sample inputs that PyTorch tests its own operators with; they ship in its wheel."""

import sys
from types import ModuleType
from typing import Any
from unittest import TestCase
from unittest.mock import patch

import torch


def torch_samples(name: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Each with an input, args and kwargs."""
    # their module takes no more than this base class from a package that nothing else here needs
    expecttest = ModuleType("expecttest")
    expecttest.TestCase = TestCase  # type: ignore[attr-defined]
    with patch.dict(sys.modules, {"expecttest": sys.modules.get("expecttest", expecttest)}):
        from torch.testing._internal.common_methods_invocations import op_db

    (info,) = [info for info in op_db if info.name == name and not info.variant_test_name]
    return list(info.sample_inputs("cpu", dtype))

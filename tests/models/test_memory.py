"""What a layer keeps for the backward pass is what the formula says, with dropout on."""

import pytest
import torch
import transformers

import taut
from taut.models import Bert, BertConfig, Gpt2, Gpt2Config
from taut.testing import saved_bytes

WIDTH, HEADS, LENGTHS = 768, 12, [512, 100]
TOKENS = sum(LENGTHS)
ALLOWED = (20 * WIDTH + 4 * HEADS + 8) * 1.02  # bytes a token


def a_layer(make, run):
    """Bytes that one layer more keeps, for each token."""
    torch.manual_seed(0)
    kept = []
    for num_layers in (2, 3):
        model = make(num_layers).train()
        kept.append(saved_bytes(run, model))
        del model
    return (kept[1] - kept[0]) / TOKENS


def ours(batch):
    return lambda model: model(batch, seed=1).sum


def eager(lengths):
    ids = torch.randint(5, 900, (len(lengths), max(lengths)))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()

    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, attention_mask=mask, labels=ids).loss

    return run


def batch_of(kind, lengths):
    gen = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 900, (n,), generator=gen) for n in lengths]
    return taut.PackedBatch.from_sequences(rows, rows)


CASES = {
    "bert": lambda n: Bert(BertConfig(vocab_size=1000, num_layers=n)),
    "gpt2": lambda n: Gpt2(Gpt2Config(vocab_size=1000, num_layers=n)),
    "pre-norm decoder": lambda n: Gpt2(
        Gpt2Config(vocab_size=1000, num_layers=n, activation_dropout=0.1)
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_keeps_what_the_formula_says(case):
    batch = batch_of(case, LENGTHS)
    kept = a_layer(lambda n: CASES[case](n).bfloat16(), ours(batch))
    assert 20 * WIDTH <= kept <= ALLOWED


@pytest.mark.parametrize("case", ["bert", "gpt2"])
def test_is_a_third_of_eager_at_512(case):
    """Of transformers in bf16 by autocast, with its own choice of attention."""
    config = {
        "bert": lambda n: transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=1000, num_hidden_layers=n, attn_implementation="eager"
            )
        ),
        "gpt2": lambda n: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=1000,
                n_layer=n,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
                attn_implementation="eager",
            )
        ),
    }[case]
    ours_kept = a_layer(lambda n: CASES[case](n).bfloat16(), ours(batch_of(case, [512])))
    theirs_kept = a_layer(lambda n: config(n), eager([512]))
    assert ours_kept <= 0.30 * theirs_kept

import numpy as np

from taut.data import causal, mask_words

IDS = np.concatenate([[2], np.arange(5, 4000), [3]])
HOW = {"seed": 1, "epoch": 2, "mask_id": 4, "vocab_size": 5000}


def test_fractions_are_those_of_bert():
    inputs, targets = mask_words(IDS, sample_id=0, **HOW)
    chosen = targets != -100
    assert abs(chosen.mean() - 0.15) < 0.02
    assert (targets[chosen] == IDS[chosen]).all()
    assert (inputs[~chosen] == IDS[~chosen]).all()
    masked = inputs[chosen] == 4
    assert abs(masked.mean() - 0.8) < 0.06
    kept = inputs[chosen] == IDS[chosen]
    assert abs(kept.mean() - 0.1) < 0.05
    assert inputs[chosen][~masked].min() >= 5


def test_special_tokens_are_never_chosen():
    for sample in range(50):
        _, targets = mask_words(np.array([2, 7, 3]), sample_id=sample, **HOW)
        assert targets.tolist() == [-100, 7, -100]  # and one word is always chosen


def test_a_sample_is_masked_alike_wherever_it_stands():
    one, other = (mask_words(IDS, sample_id=9, **HOW) for _ in range(2))
    assert all((a == b).all() for a, b in zip(one, other, strict=True))
    for change in ({"sample_id": 8}, {"sample_id": 9, "epoch": 3}, {"sample_id": 9, "seed": 2}):
        differs = mask_words(IDS, **HOW | change)
        assert (differs[1] != one[1]).any()


def test_the_next_token_is_the_target():
    inputs, targets = causal(np.array([2, 9, 8, 3]))
    assert inputs.tolist() == [2, 9, 8, 3]
    assert targets.tolist() == [9, 8, 3, -100]

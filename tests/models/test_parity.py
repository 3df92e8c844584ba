"""Every model against its twin in transformers: logits, loss, the gradient of every parameter."""

import pytest
import torch

from tests.models.twins import HEADS, LENGTHS, TWINS, gradients, make_batches, ours, theirs

TOLERANCE = 1e-5  # of the largest entry


def assert_close(got, want, name):
    error = (got - want).abs().max().item()
    largest = want.abs().max().item()
    assert got.shape == want.shape, name
    assert largest > 0, f"{name}: the twin's is all zero, which would prove nothing"
    assert error <= TOLERANCE * largest, f"{name}: {error:.3g} of {largest:.3g}"


def logits_of(name, output, batches):
    """Theirs as our `predict` gives them: rows of real tokens."""
    if "PreTraining" in name:
        return output.prediction_logits[batches.mask], output.seq_relationship_logits
    is_of_tokens = "LM" in name or "Token" in name or "Generation" in name or "MT" in name
    return (output.logits[batches.mask] if is_of_tokens else output.logits,)


@pytest.mark.parametrize("name", [name for name in TWINS if name not in HEADS])
def test_hidden_states(name):
    model = theirs(name).eval()
    twin = ours(model).eval()
    batches = make_batches(name, model, twin)
    want = model(**batches.padded).last_hidden_state[batches.mask]
    got = twin.decode(*batches.packed) if hasattr(twin, "decode") else twin.encode(*batches.packed)
    assert_close(got, want, "hidden states")


@pytest.mark.parametrize("name", HEADS)
def test_logits_loss_and_gradients(name):
    model = theirs(name)
    twin = ours(model)
    batches = make_batches(name, model, twin)
    output = model(**batches.padded)
    output.loss.backward()
    loss = twin(*batches.packed)
    loss.mean.backward()
    assert_close(loss.mean, output.loss, "loss")
    predicted = twin.predict(*batches.packed)
    predicted = predicted if isinstance(predicted, tuple) else (predicted,)
    for got, want in zip(predicted, logits_of(name, output, batches), strict=True):
        assert_close(got, want, "logits")
    for parameter, (want, got) in gradients(model, twin).items():
        assert_close(got, want, f"gradient of {parameter}")


@pytest.mark.parametrize("name", [n for n in HEADS if not n.startswith("ViT")])
def test_packed_is_one_by_one(name):
    """Sums of losses and gradients of sequences on their own are those of the batch."""
    model = theirs(name)
    twin = ours(model)
    whole = twin(*make_batches(name, model, twin).packed)
    whole.sum.sum().backward()
    want = {key: p.grad.clone() for key, p in twin.named_parameters() if p.grad is not None}
    twin.zero_grad()
    batch, *more = make_batches(name, model, twin).packed
    total = 0
    for i, piece in enumerate(batch.split(1)):
        rows = slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
        rest = [x[rows] if isinstance(x, torch.Tensor) else x.split(1)[i] for x in more]
        loss = twin(piece, *rest)
        loss.sum.sum().backward()
        total = total + loss.sum
    torch.testing.assert_close(total, whole.sum, rtol=1e-5, atol=1e-5)
    for key, p in twin.named_parameters():
        if key in want:
            assert_close(p.grad, want[key], key)
    assert len(want) > len(LENGTHS)

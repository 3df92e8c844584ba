"""What models do beyond agreeing with transformers: seeds, sizes, targets, refusals."""

import math

import pytest
import torch

from taut import PackedBatch
from taut.models import (
    Bert,
    BertConfig,
    Gpt2,
    Gpt2Config,
    Transformer,
    TransformerConfig,
    Vit,
    VitConfig,
    generate,
    next_token_targets,
)
from taut.models.decoding import Search
from taut.nn.blocks import Layout

SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4}
TEXT = SMALL | {"vocab_size": 50, "max_positions": 30}


def rows(*lengths, vocab=50, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocab, (n,), generator=gen) for n in lengths]


def bert(**fields):
    return Bert(BertConfig(**TEXT | fields)).init_weights(0).train()


def text_batch(*lengths):
    given = rows(*lengths)
    return PackedBatch.from_sequences(given, given)


def losses_and_gradients(model, *batch, **kwargs):
    model.zero_grad()
    loss = model(*batch, **kwargs)
    loss.mean.backward()
    return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_seed_draws_the_same_dropout_and_torch_draws_the_seed():
    model, batch = bert(), text_batch(9, 4)
    first = model(batch, seed=3, step=1).sum
    assert model(batch, seed=3, step=1).sum.equal(first)
    assert not model(batch, seed=3, step=2).sum.equal(first)
    torch.manual_seed(1)
    drawn = model(batch).sum
    assert not model(batch).sum.equal(drawn)
    torch.manual_seed(1)
    assert model(batch).sum.equal(drawn)
    model.eval()
    assert model(batch, seed=3).sum.equal(model(batch, seed=4).sum)


def test_dropout_belongs_to_the_sample_not_to_the_batch():
    """A sequence meets the same masks alone, in another order, and beside others."""
    model, batch = bert(dropout=0.3), text_batch(9, 4, 6)
    whole = model(batch, seed=1).sum
    pieces = [model(piece, seed=1).sum for piece in batch.split(1)]
    torch.testing.assert_close(torch.stack(pieces).sum(), whole, rtol=1e-5, atol=0)
    given, order = rows(9, 4, 6), [2, 0, 1]
    turned = PackedBatch.from_sequences(
        [given[i] for i in order], [given[i] for i in order], sample_ids=order
    )
    torch.testing.assert_close(model(turned, seed=1).sum, whole, rtol=1e-5, atol=0)
    other = PackedBatch.from_sequences(given, given, sample_ids=[4, 5, 6])
    assert abs(model(other, seed=1).sum - whole) > 1e-3


def test_every_dropout_site_draws_for_itself():
    """Two sites that shared a number would drop the same features: each must matter alone."""
    batch = text_batch(12, 7)
    plain = bert(dropout=0.0).eval()(batch).sum
    config = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    sums = []
    for name in config:
        model = bert(**config | {name: 0.3})
        sums.append(model(batch, seed=1).sum)
    assert len({round(x.item(), 4) for x in [plain, *sums]}) == 4


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit", "transformer"])
def test_no_two_dropouts_share_a_site(kind, monkeypatch):
    sites = []
    monkeypatch.setattr(
        Layout, "dropout", lambda self, p, site, keys=None: sites.append(site) if p else None
    )
    on = {"dropout": 0.1, "activation_dropout": 0.1}
    if kind == "bert":
        bert(**on, head="sequence", has_pooler_dropout=True)(
            PackedBatch.from_sequences([[4, 5]], [[1, -100]])
        )
    elif kind == "gpt2":
        Gpt2(Gpt2Config(**TEXT | on))(text_batch(3))
    elif kind == "vit":
        vit = Vit(VitConfig(**SMALL | on, image_size=32))
        vit(vit.pack([torch.rand(3, 32, 32)], [1]))
    else:
        model = transformer(**on)
        model(PackedBatch.from_sequences([[4, 5]]), model.target_batch([[6]]))
    a_block = {"bert": 4, "gpt2": 4, "vit": 4, "transformer": 5}[kind]
    assert len(sites) == len(set(sites)) > 2 * a_block


@pytest.mark.parametrize("head", ["mlm", "token", "sequence", "pretraining"])
def test_empty_sequences_and_absent_targets(head):
    model = bert(head=head)
    tokens = [row.tolist() for row in rows(3, 0, 5)]
    batch = PackedBatch.from_sequences(tokens)
    loss, grads = losses_and_gradients(model, batch, seed=1)
    assert loss.count.sum() == 0
    assert loss.mean == 0
    assert all(grad.isfinite().all() for grad in grads)
    predicted = model.predict(batch)
    if head in ("sequence", "pretraining"):
        labels = predicted if head == "sequence" else predicted[1]
        assert labels.shape == (3, 2)
        assert labels.isfinite().all()


def test_targets_of_sequences_stand_where_they_are_read():
    batch = PackedBatch.from_sequences(rows(3, 4), [[-100] * 3, [-100, 1, -100, -100]])
    with pytest.raises(ValueError, match="first token of a sequence; got one at row 4"):
        bert(head="sequence")(batch)
    model = Gpt2(Gpt2Config(**TEXT, head="sequence"))
    with pytest.raises(ValueError, match="last token of a sequence; got one at row 4"):
        model(batch)
    images = torch.rand(2, 3, 32, 32)
    vit = Vit(VitConfig(**SMALL, image_size=32, num_labels=3))
    packed = vit.pack(list(images))
    packed.targets[2] = 1
    with pytest.raises(ValueError, match="first row of an image; got one at row 2"):
        vit(PackedBatch(**{k: getattr(packed, k) for k in packed.__dataclass_fields__}))


def test_a_head_is_needed_for_a_loss():
    batch = text_batch(3)
    for model in (bert(head="none"), Gpt2(Gpt2Config(**TEXT, head="none"))):
        with pytest.raises(ValueError, match="without a head there is no loss"):
            model(batch)
        with pytest.raises(ValueError, match="without a head there are no logits"):
            model.predict(batch)
        assert model.encode(batch).shape == (3, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 30}, "hidden_size must be a multiple of num_heads; got 30 and 4"),
        ({"num_layers": 0}, "num_layers must be at least 1; got 0"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\); got 1.0"),
        ({"activation": "mish"}, "activation must be one of .*; got 'mish'"),
        ({"head": "nsp"}, "head must be one of none, mlm, .*; got 'nsp'"),
    ],
)
def test_configs_refuse(fields, message):
    with pytest.raises(ValueError, match=message):
        BertConfig(**TEXT | fields)


def test_named_sizes_have_the_published_numbers_of_parameters():
    meta = torch.device("meta")
    published = {  # millions, of the encoders and decoders without their heads
        (Bert, BertConfig.named("bert-base", head="none")): 108.9,  # 109.5 with the pooler
        (Bert, BertConfig.named("bert-large", head="none")): 334.1,
        (Bert, BertConfig.named("roberta-base", head="none")): 124.1,
        (Gpt2, Gpt2Config.named("gpt2")): 124.4,
        (Gpt2, Gpt2Config.named("gpt2-xl")): 1557.6,
        (Vit, VitConfig.named("vit-b16")): 86.6,
        (Vit, VitConfig.named("vit-l16")): 304.3,
        (Transformer, TransformerConfig.named("transformer-base", vocab_size=37000)): 63.1,
        (Transformer, TransformerConfig.named("bart-base")): 139.4,
    }
    for (model, config), millions in published.items():
        with meta:
            count = model(config).param_count()
        assert count / 1e6 == pytest.approx(millions, abs=0.06), config
    with pytest.raises(ValueError, match=r"there are bert-base, .*; got 'bert-huge'"):
        BertConfig.named("bert-huge")


def test_flops_are_those_of_the_products():
    """6 a parameter of a linear and a token, 12 width times what is seen for attention."""
    config = Gpt2Config(vocab_size=1000, hidden_size=64, num_layers=3, num_heads=2)
    model = Gpt2(config)
    linears = 3 * (4 * 64 * 64 + 2 * 64 * 256)
    want = 6 * (linears + 1000 * 64 * 0.5) + 3 * 12 * 64 * (100 / 2)
    assert model.flops_per_token(100, targets=0.5) == pytest.approx(want)


def test_next_token_targets_stay_in_their_sequence():
    batch = next_token_targets(PackedBatch.from_sequences([[1, 2, 3], [], [4], [5, 6]]))
    assert batch.targets.tolist() == [2, 3, -100, -100, 6, -100]


def test_init_is_drawn_by_its_seed():
    a, b = bert().init_weights(7), bert().init_weights(7)
    assert all(x.equal(y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not a.tokens.weight.equal(bert().init_weights(8).tokens.weight)
    assert not a.tokens.weight[0].any()  # the row of padding
    deep = Gpt2(Gpt2Config(**TEXT | {"hidden_size": 256, "num_layers": 8}))
    shrunk = deep.blocks[0].attention.out.weight.std() / deep.blocks[0].attention.qkv.weight.std()
    assert shrunk.item() == pytest.approx(1 / math.sqrt(16), rel=0.05)


def test_images_of_mixed_sizes_are_each_as_alone():
    vit = Vit(VitConfig(**SMALL, image_size=64, patch_size=16, num_labels=3)).eval()
    gen = torch.Generator().manual_seed(0)
    images = [torch.rand(3, h, w, generator=gen) for h, w in ((64, 64), (16, 48), (32, 16))]
    together = vit.predict(vit.pack(images))
    alone = torch.cat([vit.predict(vit.pack([image])) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    positions = vit.pack(images[1:2]).positions
    assert positions.tolist() == [0, 1, 2, 3]  # the first row of the 4 x 4 grid
    assert vit.pack(images[2:]).positions.tolist() == [0, 1, 5]
    for bad in (torch.rand(3, 80, 16), torch.rand(3, 20, 16), torch.rand(1, 16, 16)):
        with pytest.raises(ValueError, match="sides multiples of 16 up to 64; image 1 is"):
            vit.pack([images[0], bad])


def test_mean_pooling_averages_the_patches():
    vit = Vit(VitConfig(**SMALL, image_size=32, patch_size=16, num_labels=3, pooling="mean"))
    images = list(torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    batch = vit.pack(images, [2, 0, 1])
    hidden = vit.encode(batch).view(3, 4, 32).mean(1)
    want = torch.nn.functional.linear(hidden, vit.classifier.weight, vit.classifier.bias)
    torch.testing.assert_close(vit.predict(batch), want, rtol=1e-5, atol=1e-6)
    loss = vit(batch)
    target = torch.tensor([2, 0, 1])
    torch.testing.assert_close(loss.mean, torch.nn.functional.cross_entropy(want, target))


def transformer(**fields):
    """With matrices so large and vectors so small that what it says changes from word to word."""
    small = SMALL | {"vocab_size": 30, "max_positions": 40, "dropout": 0.0}
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**small | fields))
    with torch.no_grad():
        for p in model.parameters():
            p.add_((1.0 if p.dim() > 1 else 0.1) * torch.randn_like(p))
    return model.eval()


STYLES = {
    "post-norm": {},
    "pre-norm": {"is_pre_norm": True, "activation": "swiglu"},
    "learned, two tables": {"positions": "learned", "source_vocab_size": 40},
    "halves": {"positions": "sinusoidal_halves", "has_embedding_norm": True},
}


@pytest.mark.parametrize("style", STYLES)
def test_greedy_search_is_that_of_the_whole_decoder(style):
    """A token a step with kept keys gives what the decoder over all tokens gives."""
    model = transformer(**STYLES[style])
    source = PackedBatch.from_sequences(rows(5, 1, 8, vocab=30))
    found = generate(model, source, max_tokens=7)
    for i, piece in enumerate(source.split(1)):
        text = []
        for _ in range(7):
            logits = model.predict(piece, model.target_batch([text]))[-1]
            word = int(logits.argmax())
            if word == model.config.end_id:
                break
            text.append(word)
        assert found[i] == text


@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_kept_keys_give_the_logits_of_all_tokens(style):
    """Of hypotheses of random words, which change places on the way."""
    model = transformer(**STYLES[style]).double()
    source = PackedBatch.from_sequences(rows(5, 1, 8, vocab=30))
    search = Search(model, source, beams=2)
    texts = torch.stack(rows(*[7] * 6, vocab=30))
    for step in range(7):
        if step == 4:
            order = torch.tensor([1, 1, 3, 2, 4, 5])  # within a source sequence
            search.take(order)
            texts[:, :4] = texts[order, :4]
        got = search.step(texts[:, step])
        for i, row in enumerate(texts[:, : step + 1]):
            want = model.predict(source.split(1)[i // 2], PackedBatch.from_sequences([row]))
            torch.testing.assert_close(got[i], want[-1].float().log_softmax(-1))


def beam_reference(model, source, beams, max_tokens):
    """Beam search that runs the whole decoder on each hypothesis at each step."""
    going, ended = [(0.0, [])], []
    for _ in range(max_tokens):
        follows = []
        for score, text in going:
            logits = model.predict(source, model.target_batch([text]))[-1].log_softmax(-1)
            follows += [(score + logits[w].item(), [*text, w]) for w in range(len(logits))]
        follows.sort(key=lambda entry: -entry[0])
        going = []
        for rank, (score, text) in enumerate(follows[: 2 * beams]):
            if text[-1] != model.config.end_id:
                going.append((score, text))
            elif rank < beams:
                ended.append((score / len(text), text[:-1]))
        going = going[:beams]
        if len(ended) >= beams:
            break
    if len(ended) < beams:
        ended += [(score / len(text), text) for score, text in going]
    return max(ended)[1]


@pytest.mark.parametrize("style", STYLES)
def test_beam_search_is_that_of_the_whole_decoder(style):
    """Hypotheses change places, and what is kept of each goes with it."""
    model = transformer(**STYLES[style])
    source = PackedBatch.from_sequences(rows(5, 1, 8, vocab=30))
    found = generate(model, source, beams=4, max_tokens=7)
    for i, piece in enumerate(source.split(1)):
        assert found[i] == beam_reference(model, piece, 4, 7)


def test_generate_refuses_and_stops():
    model = transformer()
    source = PackedBatch.from_sequences(rows(4, vocab=30))
    with pytest.raises(ValueError, match="beams and max_tokens must be at least 1; got 0 and 5"):
        generate(model, source, beams=0, max_tokens=5)
    assert all(len(text) <= 3 for text in generate(model, source, beams=3, max_tokens=3))


def test_source_and_target_must_pair_up():
    model = transformer()
    with pytest.raises(ValueError, match="as many sequences; got 2 and 1"):
        model(PackedBatch.from_sequences(rows(3, 4, vocab=30)), model.target_batch(rows(3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_training_follows_32_bit(dtype):
    model, batch = bert(dropout=0.1), text_batch(12, 7, 20)
    loss, grads = losses_and_gradients(model, batch, seed=1)
    model.to(dtype)
    loss_16, grads_16 = losses_and_gradients(model, batch, seed=1)
    assert loss_16.sum.dtype == torch.float32
    assert loss_16.mean.item() == pytest.approx(loss.mean.item(), rel=0.02)
    for a, b in zip(grads_16, grads, strict=True):
        assert (a.float() - b).norm() <= 0.1 * b.norm() + 1e-4

"""Accelerated models of transformers give what transformers gives, and say where they do not."""

import copy
import inspect
import logging
import pickle

import pytest
import torch
import transformers
from torch import nn

import taut
from taut.hf.swapped import Swapped
from taut.nn.blocks import Layout
from tests.models.twins import HEADS, TWINS, make_batches, ours, theirs

TOLERANCE = 1e-5  # of the largest entry
WITH_LOSS = [
    "BertForMaskedLM",
    "BertForPreTraining",
    "RobertaForMaskedLM",
    "GPT2LMHeadModel",
    "BartForConditionalGeneration",
    "MarianMTModel",
]
DROPOUT = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "roberta": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bart": ("dropout", "attention_dropout", "activation_dropout"),
    "marian": ("dropout", "attention_dropout", "activation_dropout"),
    "vit": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}


def assert_close(got, want, name):
    error, largest = (got - want).abs().max().item(), want.abs().max().item()
    assert error <= TOLERANCE * largest, f"{name}: {error:.3g} of {largest:.3g}"


def pair(name, **fields):
    """A model, its accelerated copy and a padded batch with its mask of tokens."""
    model = theirs(name, **fields)
    batches = make_batches(name, model, ours(model))
    swapped = copy.deepcopy(model)
    taut.accelerate(swapped)
    return model, swapped, batches


def gradients_close(swapped, model):
    wanted = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for key, p in swapped.named_parameters():
        if key in wanted and not key.endswith(("key.bias", "k_proj.bias")):
            assert_close(p.grad, wanted[key], key)
        elif key in wanted:  # 0 in exact arithmetic: rounding alone is left of both
            assert p.grad.abs().max() <= TOLERANCE * largest
    assert len(wanted) >= 40


@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradients_in_training(name):
    model, swapped, batches = pair(name)
    want, got = model(**batches.padded), swapped(**batches.padded)
    want.loss.backward()
    got.loss.backward()
    assert_close(got.loss, want.loss, "loss")
    gradients_close(swapped, model)
    assert ("logits" in got) == (name not in WITH_LOSS)


@pytest.mark.parametrize("name", TWINS)
def test_outputs_of_tokens_in_evaluation(name, caplog):
    """Without a cache, which transformers keeps itself: then nothing here would be ours."""
    caplog.set_level(logging.INFO, "taut")
    model, swapped, batches = pair(name)
    given = {key: x for key, x in batches.padded.items() if "label" not in key}
    if "labels" in batches.padded and "decoder_start_token_id" in model.config.to_dict():
        base = f"{model.config.model_type.capitalize()}Model"
        given |= make_batches(base, model, ours(model)).padded
    if name.startswith(("GPT2", "Bart", "Marian")):
        given["use_cache"] = False
    want, got = model.eval()(**given), swapped.eval()(**given)
    key = next(k for k in ("last_hidden_state", "logits", "prediction_logits") if k in want)
    rows = batches.mask if want[key].dim() == 3 else slice(None)
    assert_close(got[key][rows], want[key][rows], key)
    left = {record.message.rpartition(": ")[2] for record in caplog.records}
    assert left <= {"logits are wanted, and no loss"}  # a head's, on a packed model below it


@pytest.mark.parametrize("name", TWINS)
def test_calls_in_training_run_packed(name, caplog):
    caplog.set_level(logging.INFO, "taut")
    _, swapped, batches = pair(name)
    swapped(**batches.padded)
    assert isinstance(swapped.base_model, Swapped)
    assert not [record.message for record in caplog.records if record.name == "taut"]


def halves(drawn):
    """Of two runs of as many dropouts."""
    assert len(drawn) % 2 == 0
    return drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]


@pytest.mark.parametrize("name", WITH_LOSS)
def test_dropout_draws_what_our_models_draw(name, monkeypatch):
    """Padded through accelerate, packed through ours: the same masks, so the same gradients."""
    family = theirs(name).config.model_type
    fields = dict.fromkeys(DROPOUT[family], 0.2)
    model = theirs(name, **fields)
    twin = ours(model)
    batches = make_batches(name, model, twin)
    taut.accelerate(model)
    drawn = []
    plain = Layout.dropout
    monkeypatch.setattr(
        Layout, "dropout", lambda *args, **kw: drawn.append(plain(*args, **kw)) or drawn[-1]
    )
    torch.manual_seed(5)
    loss = model(**batches.padded).loss
    torch.manual_seed(5)
    want = twin(*batches.packed).mean
    assert_close(loss, want, "loss")
    # masks are a function of these coordinates alone: equal ones are equal masks, bit by bit
    by_site = [{d.site: d for d in half if d} for half in halves(drawn)]
    assert by_site[0].keys() == by_site[1].keys()
    assert len(by_site[0]) > 8
    for a, b in ((by_site[0][site], by_site[1][site]) for site in by_site[0]):
        assert (a.p, a.seed, a.step) == (b.p, b.seed, b.step)
        for name in ("sample_ids", "positions", "key_positions"):
            one, other = getattr(a, name), getattr(b, name)
            assert (one is None) == (other is None)
            assert one is None or one.equal(other)
    torch.manual_seed(6)
    assert abs(model(**batches.padded).loss - want) > 1e-4  # another seed, another mask


@pytest.mark.parametrize("name", ["BertModel", "ViTModel"])
def test_evaluation_drops_nothing(name):
    model, swapped, batches = pair(
        name, **dict.fromkeys(DROPOUT[theirs(name).config.model_type], 0.2)
    )
    want = model.eval()(**batches.padded).last_hidden_state[batches.mask]
    state = torch.get_rng_state()
    assert_close(swapped.eval()(**batches.padded).last_hidden_state[batches.mask], want, name)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "MarianMTModel"])
def test_restores_to_identity(name):
    model = theirs(name)
    before = {key: (module, type(module)) for key, module in model.named_modules()}
    state = {key: x.data_ptr() for key, x in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = str(taut.accelerate(model))
    assert "on packed tokens" in first
    assert "replaced before" in str(taut.accelerate(model))
    assert {key: x.data_ptr() for key, x in model.state_dict().items()} == state
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters()
    }
    assert type(model).__name__ == name
    assert isinstance(model, before[""][1])
    taut.restore(model)
    after = {key: (module, type(module)) for key, module in model.named_modules()}
    assert after.keys() == before.keys()
    assert all(after[key][0] is m and after[key][1] is kind for key, (m, kind) in before.items())


def test_copies_pickles_and_files_are_those_of_the_model(tmp_path):
    model, swapped, batches = pair("BertForMaskedLM")
    for again in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert isinstance(again, Swapped)
        assert_close(again(**batches.padded).loss, model(**batches.padded).loss, "loss")
        assert again.bert.encoder is not swapped.bert.encoder
    swapped.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert plain.config.architectures == ["BertForMaskedLM"]
    assert all(a.equal(b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert inspect.signature(swapped.forward) == inspect.signature(model.forward)


def masks_4d(mask, causal):
    seen = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
    seen = seen & torch.ones(seen.shape[-2:], dtype=torch.bool).tril() if causal else seen
    lowest = torch.finfo(torch.float32).min
    additive = torch.zeros(seen.shape).masked_fill(~seen, lowest)
    return {
        "2-D integers": mask.long(),
        "2-D bool": mask,
        "4-D bool": seen,
        "4-D additive": additive,
        "4-D minus infinity": additive.masked_fill(~seen, -torch.inf),
    }


@pytest.mark.parametrize("kind", list(masks_4d(torch.ones(1, 2, dtype=torch.bool), False)))
@pytest.mark.parametrize("name", ["BertModel", "GPT2Model"])
def test_masks_of_all_kinds(name, kind, caplog):
    model, swapped, batches = pair(name)
    given = dict(batches.padded)
    want = model(**given).last_hidden_state[batches.mask]
    given["attention_mask"] = masks_4d(batches.mask, name == "GPT2Model")[kind]
    assert_close(swapped(**given).last_hidden_state[batches.mask], want, kind)
    assert not [r for r in caplog.records if r.name == "taut" and r.levelno >= logging.WARNING]


def test_padding_on_the_left_and_gaps():
    model, swapped, batches = pair("BertModel")
    mask = batches.padded["attention_mask"].flip(1)
    mask[2, 3:6] = 0
    given = batches.padded | {"attention_mask": mask}
    want = model(**given).last_hidden_state[mask.bool()]
    assert_close(swapped(**given).last_hidden_state[mask.bool()], want, "hidden states")


def said(caplog):
    return [r.message for r in caplog.records if r.name == "taut" and r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda given: {"attention_mask": torch.rand(4, 1, 17, 17)}, "adds more to scores"),
        (lambda given: {"attention_mask": torch.rand(4, 17)}, "is not 0 and 1"),
        (
            lambda given: {"attention_mask": torch.ones(4, 1, 17, 17, dtype=torch.bool).tril()},
            "neither of padding nor causal",
        ),
        (lambda given: {"encoder_hidden_states": torch.rand(4, 3, 48)}, "encoder_hidden_states"),
    ],
)
def test_other_masks_and_inputs_fall_back_visibly(change, reason, caplog):
    model, swapped, batches = pair("BertModel")
    given = batches.padded | change(batches.padded)
    want = model.eval()(**given).last_hidden_state
    assert swapped.eval()(**given).last_hidden_state.equal(want)
    assert len(said(caplog)) == 1
    assert reason in said(caplog)[0]
    swapped(**given)
    assert len(said(caplog)) == 1  # once for each reason


def test_labels_on_padding_fall_back_visibly(caplog):
    model, swapped, batches = pair("BertForMaskedLM")
    given = batches.padded | {"labels": batches.padded["input_ids"]}
    assert_close(swapped(**given).loss, model(**given).loss, "loss")
    assert "labels on padding" in said(caplog)[0]
    assert swapped.eval()(**given).loss.equal(model.eval()(**given).loss)
    assert_close(swapped.train()(**batches.padded).loss, model(**batches.padded).loss, "loss")
    assert len(said(caplog)) == 1  # the next call is packed again


def test_hidden_states_attentions_tuples_and_caches_keep_working():
    model, swapped, batches = pair("GPT2LMHeadModel")
    model.eval(), swapped.eval()
    ids = batches.padded["input_ids"][:, :5]
    for options in ({"output_hidden_states": True}, {"output_attentions": True}):
        want, got = model(ids, **options), swapped(ids, **options)
        (key,) = (option.removeprefix("output_") for option in options)
        assert len(got[key]) == len(want[key]) > 2
        assert all(a.equal(b) for a, b in zip(got[key], want[key], strict=True))
    assert isinstance(swapped(ids, return_dict=False), tuple)
    past = swapped(ids, use_cache=True).past_key_values
    follows = swapped(ids[:, :1], past_key_values=past).logits
    want = model(ids[:, :1], past_key_values=model(ids, use_cache=True).past_key_values).logits
    assert follows.equal(want)
    greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert swapped.generate(ids, **greedy).equal(model.generate(ids, **greedy))


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "GPT2Model"])
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_sequences_end_to_end(name, with_kwargs):
    """As DataCollatorWithFlattening gives them, which transformers' BERT mixes up."""
    model, swapped, batches = pair(name)
    rows = [row[m] for row, m in zip(batches.padded["input_ids"], batches.mask, strict=True)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=with_kwargs)
    given = collate([{"input_ids": row.tolist()} for row in rows])
    del given["labels"]
    got = swapped(**given).last_hidden_state[0]
    alone = [model(input_ids=row[None]).last_hidden_state[0] for row in rows]
    assert_close(got, torch.cat(alone), "hidden states")


def test_lost_boundaries_raise():
    _, swapped, batches = pair("BertModel")
    ids = batches.padded["input_ids"][:1, :6]
    for positions in ([0, 1, 2, 1, 2, 3], [3, 4, 0, 1, 2, 3]):
        with pytest.raises(ValueError, match="a boundary was lost"):
            swapped(ids, position_ids=torch.tensor([positions]))
    with pytest.raises(ValueError, match="name other boundaries"):
        swapped(
            ids,
            position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]),
            cu_seq_lens_q=torch.tensor([0, 2, 6], dtype=torch.int32),
        )


def test_a_causal_loss_does_not_cross_boundaries():
    model, swapped, batches = pair("GPT2LMHeadModel")
    rows = [row[m] for row, m in zip(batches.padded["input_ids"], batches.mask, strict=True)]
    given = transformers.DataCollatorWithFlattening()([{"input_ids": r.tolist()} for r in rows])
    want = model(**batches.padded).loss
    assert_close(swapped(**given).loss, want, "loss")
    given["labels"] = given["input_ids"]  # which says nothing of boundaries
    assert_close(swapped(**given).loss, want, "loss")


def test_an_adapter_is_not_looked_through(caplog):
    class Adapter(nn.Linear):
        def forward(self, input):
            return super().forward(input) + 1

    model, swapped, batches = pair("BertModel")
    for m in (model, swapped):
        own = m.encoder.layer[1].attention.self
        adapter = Adapter(48, 48)
        adapter.load_state_dict(own.query.state_dict())
        own.query = adapter
    assert swapped(**batches.padded)[0].equal(model(**batches.padded)[0])
    assert "a Adapter in a layer" in said(caplog)[0]
    taut.restore(swapped)
    assert "Adapter" in str(taut.accelerate(swapped))
    assert not isinstance(swapped, Swapped)


def test_a_hook_is_not_passed_by(caplog):
    model, swapped, batches = pair("BertModel")
    seen = []
    swapped.encoder.layer[0].register_forward_hook(lambda *args: seen.append(1))
    assert swapped(**batches.padded)[0].equal(model(**batches.padded)[0])
    assert seen == [1]
    assert "a hook on a BertLayer" in said(caplog)[0]


def test_a_layer_that_differs_is_kept(caplog):
    model = theirs("BertModel")
    model.encoder.layer[2].attention.self.scaling *= 1.1
    report = taut.accelerate(model)
    assert "layer 2 gives other numbers" in str(report)
    assert "layer 2 gives other numbers" in said(caplog)[0]
    assert not isinstance(model, Swapped)


def test_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(ValueError, match="a model of transformers is needed"):
        taut.accelerate(nn.Linear(2, 2))


def test_frozen_parameters_get_no_gradient():
    model, swapped, batches = pair("BertForMaskedLM")
    for m in (model, swapped):
        for key, p in m.named_parameters():
            p.requires_grad_(".1." in key)
        m(**batches.padded).loss.backward()
    assert all((p.grad is not None) == (".1." in key) for key, p in swapped.named_parameters())
    for (key, p), q in zip(swapped.named_parameters(), model.parameters(), strict=True):
        if q.grad is not None and not key.endswith("key.bias"):
            assert_close(p.grad, q.grad, key)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "MarianMTModel"])
def test_gradient_checkpointing_changes_no_bit(name):
    family = theirs(name).config.model_type
    fields = dict.fromkeys(DROPOUT[family], 0.2)
    _, swapped, batches = pair(name, **fields)
    found = []
    for is_on in (False, True):
        if is_on:
            swapped.activation_checkpointing_enable()
        swapped.zero_grad()
        torch.manual_seed(1)
        swapped(**batches.padded).loss.backward()
        found.append([p.grad for p in swapped.parameters()])
    assert all((a is None and b is None) or a.equal(b) for a, b in zip(*found, strict=True))


def test_accumulation_and_compile(caplog):
    model, swapped, batches = pair("BertForMaskedLM")
    compiled = torch.compile(swapped)
    for _ in range(2):
        got, want = compiled(**batches.padded).loss, model(**batches.padded).loss
        assert_close(got, want, "loss")
        got.backward()
        want.backward()
    gradients_close(swapped, model)
    assert not said(caplog)


def test_autocast_computes_in_16_bit():
    model, swapped, batches = pair("BertForMaskedLM")
    want = model(**batches.padded).loss
    with torch.autocast("cpu", torch.bfloat16):
        theirs_16, got = model(**batches.padded).loss, swapped(**batches.padded).loss
    got.backward()
    assert abs(got - want) <= 2 * abs(theirs_16 - want) + 2e-3
    assert {p.grad.dtype for p in swapped.parameters()} == {torch.float32}


def test_packed_models_need_no_labels():
    """Without labels the base packs, and the head is transformers' own."""
    model, swapped, batches = pair("BertForMaskedLM")
    given = {key: x for key, x in batches.padded.items() if key != "labels"}
    got, want = swapped(**given).logits, model(**given).logits
    assert_close(got[batches.mask], want[batches.mask], "logits")

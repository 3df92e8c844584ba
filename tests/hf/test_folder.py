"""Hugging Face folders in and out: the same bytes, the same names, and clear refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import taut
from tests.models.twins import TWINS, theirs


@pytest.fixture
def folder(tmp_path):
    def make(name, **fields):
        model = theirs(name, **fields)
        model.save_pretrained(tmp_path / "theirs")
        return tmp_path / "theirs"

    return make


def same_files(one, other, *, but=""):
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    a = {key: x for key, x in a.items() if not key.endswith(but or "/")}
    assert a.keys() == b.keys()
    assert all(a[key].dtype == b[key].dtype and a[key].equal(b[key]) for key in a)


@pytest.mark.parametrize("name", TWINS)
def test_tensors_come_back_byte_by_byte(name, folder, tmp_path):
    source = folder(name)
    taut.save(taut.load(source), tmp_path / "ours")
    same_files(source, tmp_path / "ours")
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "ours")
    )
    assert before == after


@pytest.mark.parametrize("name", TWINS)
def test_a_new_model_writes_what_transformers_reads(name, folder, tmp_path):
    source = folder(name)
    model = taut.load(source)
    model.hf_source = None  # as if it had been made here
    taut.save(model, tmp_path / "ours")
    # sinusoids, which transformers writes for one Marian and not for the other, and makes anew
    same_files(source, tmp_path / "ours", but="embed_positions.weight" if "Marian" in name else "")
    again = type(theirs(name)).from_pretrained(tmp_path / "ours")
    want = dict(theirs(name).named_parameters())
    assert all(p.equal(want[key]) for key, p in again.named_parameters())


def test_16_bit_weights_stay_16_bit(folder, tmp_path):
    source = folder("BertForMaskedLM")
    tensors = load_file(source / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in tensors.items()}, source / "model.safetensors")
    model = taut.load(source)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    taut.save(model, tmp_path / "ours")
    same_files(source, tmp_path / "ours")


def test_shards_are_read_and_written(folder, tmp_path):
    source = folder("GPT2LMHeadModel")
    model = taut.load(source)
    taut.save(model, tmp_path / "shards", max_shard_bytes=60_000)
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    names = set(index["weight_map"].values())
    assert len(names) > 2
    assert not (tmp_path / "shards/model.safetensors").exists()
    assert all((tmp_path / "shards" / name).stat().st_size < 80_000 for name in names)
    taut.save(taut.load(tmp_path / "shards"), tmp_path / "whole")
    same_files(source, tmp_path / "whole")


def test_names_of_old_files_are_kept(folder, tmp_path):
    """LayerNorm.gamma, buffers of positions, and tied weights that are written twice."""
    source = folder("BertForMaskedLM")
    tensors = load_file(source / "model.safetensors")
    old = {key.replace("LayerNorm.weight", "LayerNorm.gamma"): x for key, x in tensors.items()}
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    words = tensors["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.weight"] = words.clone()
    save_file(old, source / "model.safetensors")
    model = taut.load(source)
    taut.save(model, tmp_path / "ours")
    same_files(source, tmp_path / "ours")
    old["cls.predictions.decoder.weight"] = words + 1
    save_file(old, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"must equal bert\.embeddings\.word"):
        taut.load(source)


def test_unknown_tensors_are_named_and_kept(folder, tmp_path):
    source = folder("BertForMaskedLM")
    tensors = load_file(source / "model.safetensors") | {"extra.weight": torch.ones(3)}
    save_file(tensors, source / "model.safetensors")
    with pytest.warns(UserWarning, match=r"1 tensors of .*: extra\.weight"):
        model = taut.load(source)
    taut.save(model, tmp_path / "ours")
    same_files(source, tmp_path / "ours")


def test_missing_tensors_are_named(folder):
    source = folder("BertForMaskedLM")
    tensors = load_file(source / "model.safetensors")
    del tensors["bert.encoder.layer.1.output.dense.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 tensors .*layer\.1\.output\.dense\.weight"):
        taut.load(source)


def test_a_new_head_is_drawn_and_said(folder):
    source = folder("BertForMaskedLM")
    with (
        pytest.warns(UserWarning, match=r"drawn at random.*: bert\.pooler\.dense\.weight"),
        pytest.warns(UserWarning, match=r"has no place for 5 tensors .*cls\.predictions\.bias"),
    ):
        model = taut.load(source, head="sequence", num_labels=5, dropout=0.3)
    assert model.classifier.weight.shape == (5, 48)
    assert model.config.dropout == model.config.attention_dropout == 0.3
    batch = taut.PackedBatch.from_sequences([[3, 4, 5]], [[2, -100, -100]])
    assert model(batch).mean.isfinite()


def test_fields_and_tensors_must_fit(folder):
    source = folder("BertForMaskedLM")
    with pytest.raises(ValueError, match="has no field 'layers'"):
        taut.load(source, layers=3)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(ValueError, match=r"make \(96, 48\); got \(80, 48\)"):
        taut.load(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type must be one of bert, .*; got 'llama'"),
        ({"architectures": ["BertLMHeadModel"]}, "architectures must be one of .*BertLMHeadModel"),
        ({"hidden_act": "mish"}, "activation must be one of .*; got 'mish'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be absolute"),
        ({"is_decoder": True}, "is_decoder must be False"),
    ],
)
def test_what_we_cannot_compute_is_refused(change, message, folder):
    source = folder("BertForMaskedLM")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        taut.load(source)


def test_a_pickle_is_never_read(folder):
    source = folder("BertForMaskedLM")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pytorch_model\.bin, a pickle, .*save_pretrained"):
        taut.load(source)


def test_no_folder_no_config_no_sound_file(folder, tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        taut.load(tmp_path / "nowhere")
    source = folder("BertForMaskedLM")
    (source / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        taut.load(source)


def test_a_model_without_a_home_is_refused(tmp_path):
    config = taut.models.TransformerConfig(
        vocab_size=50, hidden_size=32, num_layers=1, num_heads=2, positions="sinusoidal"
    )
    with pytest.raises(ValueError, match="no Transformer with positions 'sinusoidal'"):
        taut.save(taut.models.Transformer(config), tmp_path)
    assert not list(tmp_path.iterdir())

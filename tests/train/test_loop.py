"""A small run from a file of texts to a model and a report."""

import json
import math

import pytest
import torch
import transformers

import taut
from taut.config import read_config
from taut.train import Run, write_report

WORDS = [
    "cat",
    "sat",
    "on",
    "mat",
    "and",
    "dog",
    "ate",
    "all",
    "of",
    "food",
    "while",
    "it",
    "rained",
]


class Quiet:
    def __init__(self):
        self.steps, self.evaluations = [], []

    def stage(self, name, count):
        pass

    def step(self, step, steps, metrics):
        self.steps.append((step, metrics))

    def evaluation(self, step, metrics):
        self.evaluations.append((step, metrics))


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    lines = [" ".join(WORDS[i % 5 : i % 5 + 4 + i % 9]) for i in range(200)]
    path.write_text("\n\n".join(lines))
    return path


def config(texts, out, *settings):
    small = [
        f"data.source={texts}",
        f"train.out={out}",
        "data.vocab_size=300",
        "data.longest=16",
        "data.held_out=0.1",
        "model.hidden_size=32",
        "model.num_layers=2",
        "model.num_heads=2",
        "optim.warmup_steps=5",
        "train.steps=40",
        "train.budget_tokens=256",
        "train.eval_every=20",
        "train.dtype=float32",
    ]
    return read_config(None, [*small, *settings])


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_learns_and_leaves_a_model(kind, texts, tmp_path):
    display = Quiet()
    run = Run(config(texts, tmp_path / "run", f"model.kind={kind}", "optim.lr=0.01"), display)
    run.train()
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    train, held = ([row for row in rows if row["kind"] == kind] for kind in ("train", "eval"))
    assert [row["step"] for row in train] == [10, 20, 30, 40]
    assert [row["step"] for row in held] == [20, 40] == [step for step, _ in display.evaluations]
    assert train[-1]["loss"] < train[0]["loss"] - 0.5
    assert all(0 < row["padding_avoided"] < 1 for row in train)
    assert read_config(run.out / "config.toml") == run.config
    loaded = taut.load(run.out / "model")
    want = dict(run.model.named_parameters())
    assert all(p.equal(want[name]) for name, p in loaded.named_parameters())
    name = {"bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel"}[kind]
    getattr(transformers, name).from_pretrained(run.out / "model")
    assert (run.out / "model" / "tokenizer.json").is_file()
    page = write_report([run.out], tmp_path / "report.html").read_text()
    assert page.count("<svg") == 5
    assert "http" not in page


def test_a_run_repeats_bit_by_bit(texts, tmp_path):
    models = []
    for name in ("a", "b"):
        run = Run(config(texts, tmp_path / name, "train.steps=6"), Quiet())
        run.train()
        models.append(list(run.model.parameters()))
    assert all(p.equal(q) for p, q in zip(*models, strict=True))


def test_accumulated_batches_are_one(texts, tmp_path):
    """Unequal batches weigh by their targets: the step is that of all in one batch."""
    settings = config(texts, tmp_path / "run", "optim.kind=adamw", "model.dropout=0.1")
    whole, cut = Run(settings, Quiet()), Run(settings, Quiet())
    samples = [int(i) for i in whole.trained[:12]]
    parts = [samples[:1], samples[1:4], samples[4:]]
    one = whole.step(1, [whole.make_batch(samples, 0)])
    many = cut.step(1, [cut.make_batch(part, 0) for part in parts])
    assert many["targets"] == one["targets"]
    assert many["loss_sum"] == pytest.approx(one["loss_sum"], rel=1e-5)
    assert many["norm"] == pytest.approx(one["norm"], rel=1e-4)
    for p, q in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        moments = [run.optimizer.state[x]["exp_avg"] for run, x in ((whole, p), (cut, q))]
        torch.testing.assert_close(*moments, rtol=1e-4, atol=1e-7)


def test_a_run_is_never_written_over(texts, tmp_path):
    settings = config(texts, tmp_path / "run", "train.steps=1")
    Run(settings, Quiet()).train()
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="holds a run already"):
        Run(settings, Quiet())
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_rates_rise_and_fall(texts, tmp_path):
    halves = {"linear": 0.5, "cosine": 0.5, "constant": 1.0, "wsd": 1.0, "inverse_sqrt": 0.477}
    for schedule, half in halves.items():
        run = Run(config(texts, tmp_path / "r", f"optim.schedule={schedule}"), Quiet())
        lr = run.config.optim.lr
        assert run.rate(1) == pytest.approx(lr / 5)
        assert run.rate(5) == lr
        assert run.rate(5 + 35 // 2) == pytest.approx(lr * half, rel=0.05)
        assert 0 < run.rate(40) <= lr


def test_gradients_that_are_not_finite(texts, tmp_path):
    for policy in ("raise", "skip"):
        run = Run(config(texts, tmp_path / policy, f"train.non_finite={policy}"), Quiet())
        batch = next(run.batches())
        with torch.no_grad():
            run.model.norm.weight[0] = math.inf
        before = [p.detach().clone() for p in run.model.parameters()]
        if policy == "raise":
            with pytest.raises(ValueError, match="gradients of step 1 are not finite"):
                run.step(1, [batch])
        else:
            assert run.step(1, [batch])["skipped"] == 1
        assert all(p.equal(q) for p, q in zip(run.model.parameters(), before, strict=True))


def test_an_interrupt_keeps_the_model(texts, tmp_path):
    class Impatient(Quiet):
        def step(self, step, steps, metrics):
            raise KeyboardInterrupt

    run = Run(config(texts, tmp_path / "run"), Impatient())
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert (run.out / "model" / "model.safetensors").is_file()


def test_reports_compare_runs(texts, tmp_path):
    for name in ("one", "two"):
        Run(config(texts, tmp_path / name, "train.steps=10"), Quiet()).train()
    page = write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "x.html").read_text()
    assert page.count("<polyline") == 10
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl"):
        write_report([tmp_path / "three"], tmp_path / "y.html")

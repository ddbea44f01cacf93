# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ``long_training.py`` trains: a GPT of 10.9 million parameters, its configuration, and its text."""

import hashlib
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from scripts.examples.gpt import ByteGPT
from tests.perf.lib import convergence
from tests.perf.lib.long_runs import CONTROL, METHODS, STEPS

MODEL = {"dim": 384, "layers": 6, "heads": 6, "sequence_length": 128}
MICRO_BATCH = 4
HELD_OUT = 0.05  # of the text, its end


def make_model(seed: int, method: str) -> ByteGPT:
    """Return the model, of 10.9 million parameters, with the weights of a seed; the control's are moved a little."""
    torch.manual_seed(seed)
    model = ByteGPT(**MODEL)
    if method == CONTROL:
        convergence.move(model, convergence.CONTROL_NOISE)
    return model


def configuration(method: str, steps: int = STEPS) -> dict[str, Any]:
    """Return DeepSpeed's configuration: AdamW in bf16 with fp32 masters, gradients clipped at 1.

    Args:
        method: one of ``METHODS``.
        steps: of the whole run, over which the learning rate rises and falls.
    """
    config = convergence.configuration(convergence.ADAMW, METHODS[method], steps, bf16=True)
    return config | {"train_micro_batch_size_per_gpu": MICRO_BATCH}


def read_text() -> Tensor:
    """Return the Python sources of the DeepSpeed that is installed, as bytes; the same on all machines.

    Its installation writes one of them itself.
    """
    root = Path(deepspeed.__file__).parent
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    text = b"".join((root / name).read_bytes() for name in names if name != "git_version_info_installed.py")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def fingerprint(text: Tensor) -> str:
    """Return what tells a text from others."""
    return f"{len(text)} bytes, sha256 {hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]}"

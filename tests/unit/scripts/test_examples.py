# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The examples train under their strategy, in rank processes as on two nodes of two ranks."""

import re
from typing import Any

import pytest

from tests.harness import examples
from tests.harness.frameworks.comparison import needs
from tests.harness.tiers import since

# What rank 0 logs, what losses begin with, and the packages that they need.
EXAMPLES = {
    "own_script.py": (["N-I-G (p=N, g=I, os=G; stage 2)"], 1.0, ()),
    "muon.py": (["N-I-G (p=N, g=I, os=G; stage 2)"], 1.0, ()),
    "lora.py": (["I-N-G (p=I, g=N, os=G; stage 3)"], 5.5, ("transformers", "peft")),  # 5.5: one of 256 tokens
    "images.py": (["I-N-G (p=I, g=N, os=G; stage 3)"], 5.5, ("transformers", "peft")),
    "moe_layers.py": (["N-I-G (p=N, g=I, os=G; stage 2)", "experts of ep_size_2 over 2 in 2 group(s) of 1"], 1.0, ()),
    "autoep.py": (["N-I-G (p=N,", "experts of ep_size_2 over 2 in 2 group(s) of 1"], 5.5, ("transformers",)),
    "packed_experts.py": (["I-I-G (p=I, g=I,", "MixtralExperts", "2 windows"], 5.5, ("transformers",)),
}
SINCE = {
    "autoep.py": [since(transformers="5.23")],
    "images.py": [since(transformers="5.0")],
    "packed_experts.py": [since(transformers="5.0")],
}


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.frameworks, needs(*packages), *SINCE.get(name, ())] if packages else []),
                *([] if name == "own_script.py" else [pytest.mark.deep]),
            ],
        )
        for name, (_, _, packages) in EXAMPLES.items()
    ],
)
def test_an_example_trains_under_its_strategy(ranks: Any, example: str) -> None:
    logged, first, _ = EXAMPLES[example]
    (lines, _), *_ = results = ranks(4).run(examples.run, example)
    for words in (*logged, "over 4 data-parallel ranks in 2 group(s) of 2"):
        assert any(words in line for line in lines), (words, lines)
    for number, (_, printed) in enumerate(results):
        (loss,) = re.findall(rf"rank {number}: last loss (\d\.\d+)", printed)
        assert float(loss) < 0.9 * first, printed

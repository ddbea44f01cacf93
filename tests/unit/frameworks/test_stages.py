# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A stage that is left out, and that Accelerate cannot infer: refused before training, with the value to write."""

from typing import Any

from tests.harness.frameworks.comparison import needs
from tests.harness.frameworks.configurations import placed
from tests.harness.tiers import with_cases

pytestmark = needs("transformers", "accelerate")


@with_cases(
    "strategy, seam, message",
    (
        "fastest",
        True,
        'zero_optimization.paro_strategy "fastest" needs zero_optimization.stage with Accelerate, HF Trainer and '
        "TRL, which read it before the model is built. Set zero_optimization.stage to 1, 2 or 3: the fastest "
        "strategy of that stage is chosen.",
    ),
    (
        "IIG",
        False,
        "zero_optimization.paro_strategy needs zero_optimization.stage with Accelerate, HF Trainer and TRL, which "
        "already use stage 2. Set zero_optimization.stage to 3.",
    ),
)
def test_a_stage_that_accelerate_cannot_know(frameworks: Any, strategy: str, seam: bool, message: str) -> None:
    section = {**placed("IIG", stage=None), "paro_strategy": strategy}
    for error in frameworks(2).run_expect_error(prepared_case, section, seam):
        assert (error.type, error.message) == ("ValueError", message)


def test_stages_1_and_2_need_no_seam(frameworks: Any) -> None:
    """Accelerate takes both for 2, and looks the stage up when it saves."""
    for strategy, stage in (("NNG", 1), ("NIG", 2)):
        assert frameworks(2).run(prepared_case, placed(strategy, stage=None), False) == [stage] * 2


def prepared_case(section: dict[str, Any], seam: bool) -> int:
    """The stage in the configuration that Accelerate keeps, where our seam in it is in place or not."""
    from unittest import mock

    from accelerate.utils import DummyOptim
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    from tests.harness.frameworks import accelerated, tiny

    read = HfDeepSpeedConfig.set_stage_and_offload
    try:
        with mock.patch.object(HfDeepSpeedConfig, "set_stage_and_offload", read if seam else read.__wrapped__):
            accelerator = accelerated.make_accelerator(section)
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        model = tiny.make_model()
        accelerator.prepare(model, DummyOptim(model.parameters(), lr=0.1))
        return int(accelerator.deepspeed_config["zero_optimization"]["stage"])
    finally:
        tiny.forget()

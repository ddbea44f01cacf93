# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""States of a stage-1/2 optimizer of ours that leave the device: into checkpoints and to the host, and back."""

from collections.abc import Mapping
from typing import Any

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import PARAM_SLICE_MAPPINGS, PARTITION_COUNT, ZERO_STAGE
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from deepspeed_ext.zero.flat_gradients import FlatGradients
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.regroup import sharded_otherwise


class Stage12States(ParoOptimizer):
    """Such an optimizer, ``Stage12Optimizer``; DeepSpeed's class comes after it."""

    gradients: FlatGradients

    def check_states(self, state: Mapping[str, Any]) -> None:
        """Refuse a rank's state dict that is sharded otherwise: the parent would pad a shard that is too short.

        Raises:
            ValueError: it is of another stage, sharded over another number of ranks, or of parameters elsewhere.
        """
        stage, saved = int(state.get(ZERO_STAGE, 1)), state[PARTITION_COUNT]
        if stage > 2 or saved != self.partition_count:
            raise sharded_otherwise(
                f"of stage {stage} and sharded over {saved} ranks",
                f"are of stage 1 or 2 and sharded over {self.partition_count} ranks (an entry for each parameter "
                f"group)",
            )
        if PARAM_SLICE_MAPPINGS not in state:  # of an older DeepSpeed
            return
        # By place, whatever the names: it is how the parent takes them.
        saved, own = (
            [[(piece.start, piece.numel) for piece in group.values()] for group in mappings]
            for mappings in (state[PARAM_SLICE_MAPPINGS], self._param_slice_mappings)
        )
        if saved != own:
            raise sharded_otherwise(
                "in another order", "go by round_robin_gradients, the parameter groups and the sizes of parameters"
            )

    def _load_legacy_checkpoint(
        self, state_dict_list: list[Any], load_optimizer_states: bool = True, load_from_fp32_weights: bool = False
    ) -> None:
        """Refuse optimizer states that are sharded otherwise.

        Raises:
            ValueError: see ``check_states``.
        """
        self.check_states(state_dict_list[dist.get_rank(group=self.dp_process_group)])
        super()._load_legacy_checkpoint(state_dict_list, load_optimizer_states, load_from_fp32_weights)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Offload DeepSpeed's states, and with its gradients our slices."""
        self._finish_buckets()
        super().offload_states(*args, **kwargs)
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:
            self.gradients.to("cpu")

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Bring back what ``offload_states`` has moved."""
        super().reload_states(*args, **kwargs)
        self.gradients.to(get_accelerator().current_device_name())

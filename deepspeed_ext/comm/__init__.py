# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Communication between ranks, independent of optimizers, configuration keys, and DeepSpeed's ZeRO."""

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The patch series, which gives a DeepSpeed the features of deepspeed_ext."""

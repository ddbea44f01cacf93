# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Training scripts to copy: nothing in them knows of deepspeed_ext, which their configuration files ask for."""

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parses our keys of the ``zero_optimization`` section, and refuses options that contradict them.

The raw section is validated (``model``) and becomes the parsed ``section``, which contains the strategy. Then
``check`` compares it with the rest of the configuration and the ranks.
"""

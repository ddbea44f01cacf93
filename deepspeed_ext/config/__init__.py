# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How our keys of the ``zero_optimization`` section are read, once, and what is refused beside them.

A raw section is normalized (``normalize``) and validated (``validate``), and becomes the parsed ``section``, which
holds the strategy. ``check`` then looks at the rest of the configuration and at the ranks.
"""

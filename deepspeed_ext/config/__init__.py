# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Our keys of the ``zero_optimization`` section: read, validated, and what is refused beside them."""

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The last module that a fork server imports: prepares the server for all its ranks. See ``rank_process.prepare``."""

from tests.harness.rank_process import prepare

prepare()

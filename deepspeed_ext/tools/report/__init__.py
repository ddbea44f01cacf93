# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes: some steps of a training are recorded, and shown as a page, a trace and a paragraph."""

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Records some steps of a training, and reports their time as a page, a trace and a paragraph."""

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Long runs that look for faults: programs that one starts, each of which also is a test by what it finds."""

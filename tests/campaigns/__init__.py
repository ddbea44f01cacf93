# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Long runs that search for faults: programs to start by hand, which fail, as tests do, if they find one."""

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Several ranks on this machine: started, ended, and with networks of a limited rate between them."""

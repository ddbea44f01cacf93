# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How bytes move between ranks. Knows no optimizer, no key and nothing of DeepSpeed's ZeRO."""

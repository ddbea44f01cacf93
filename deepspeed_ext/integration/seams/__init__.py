# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What stands in the place of DeepSpeed's symbols, a module for each purpose.

Each function takes the original and returns its replacement, which looks for our keys and calls the original if there
are none. A DeepSpeed that has these features built in uses the same functions as decorators. Nothing of ours is
imported before it is needed: most of it imports DeepSpeed, which may be just being imported.
"""

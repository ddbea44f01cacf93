# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which tests run which lines, and the choice of tests for a change.

Note [How tests are recorded]
    ``scripts/test record`` loads the plugin ``recording.py``. In every process that runs tests (pytest's own, workers
    of pytest-xdist, ranks), a ``Recorder`` records the lines that run (coverage.py), and the files of the repository
    that are opened, under a context, which is the id of the running test. In other Python processes that tests start,
    coverage.py's start-up hook records the lines, under the context in their environment.
    Code that runs once for several tests has a context of its own, ``NODE#NAME``: the set-up of a fixture that is
    shared within NODE, or the import of test file NODE. It counts for each test below NODE that uses NAME.
    Results that a process computes once and keeps (``functools.cache``) count only for the test that came first.
    Each process writes files of its own, which ``store.py`` merges at the end.
"""

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Loads of files that may not be trusted: only listed classes are unpickled, so that no file can run code.

DeepSpeed's functions call ``torch.load(weights_only=False)``. Within ``restrict_loads``, this thread's calls are made
with ``weights_only=True`` instead, and torch accepts the classes below in addition to its own and to those that the
script has passed to ``torch.serialization.add_safe_globals``.
"""

import argparse
import builtins
import datetime
import functools
import os
import pathlib
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.utils.tensor_fragment import fragment_address

from deepspeed_ext.checkpoint.folder import CheckpointError
from deepspeed_ext.overrides import replace_attributes

_DEEPSPEED = (
    *(loss_scaler.LossScaler, loss_scaler.DynamicLossScaler, fragment_address, SubparamShape),
    *(ZeroStageEnum, OffloadDeviceEnum, OffloadStateTypeEnum),
)
_BUILTINS = ("int", "float", "bool", "str", "bytes", "list", "dict", "tuple", "frozenset", "slice", "range")
_CONTAINERS = (*(getattr(builtins, name) for name in _BUILTINS), argparse.Namespace)
_TIMES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath)
_REFUSED = re.compile(r"(?:GLOBAL |got <class '|got (?=\w+\.))([\w.]+)")  # in messages of torch
_TORCH_ADVICE = "WeightsUnpickler error: "  # ends its general advice

# In this thread: whether files are trusted; None outside of ``restrict_loads``.
_trusted: ContextVar[bool | None] = ContextVar("trusted", default=None)
_lock = threading.RLock()  # torch has one list for all threads: without it, one could end another's permissions


@functools.cache
def _listed() -> tuple[Any, ...]:
    """Return the accepted classes, as ``torch.serialization.safe_globals`` takes them."""
    scalar, array = np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]
    functions = [
        (function, f"{package}.multiarray.{name}")
        for package in ("numpy.core", "numpy._core")  # of numpy 1 and 2
        for function, name in ((scalar, "scalar"), (array, "_reconstruct"))
    ]
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"}
    paths = [(kind, f"{module}.{kind.__name__}") for module in ("pathlib", "pathlib._local") for kind in _PATHS]
    return (*_DEEPSPEED, *_CONTAINERS, *_TIMES, *paths, np.ndarray, np.dtype, *dtypes, *functions)


def is_trusted() -> bool:
    """Return whether this thread's loads are of trusted files."""
    return bool(_trusted.get())


@contextmanager
def restrict_loads(trusted: bool) -> Iterator[None]:
    """Let this thread's ``torch.load`` accept only listed classes within this context, unless files are trusted."""
    token = _trusted.set(trusted)
    try:
        with replace_attributes(torch, load=functools.partial(_load_restricted, torch.load)):
            yield
    finally:
        _trusted.reset(token)


def _load_restricted(load: Callable[..., Any], file: Any, *args: Any, **options: Any) -> Any:
    """Run ``torch.load``; in a thread within ``restrict_loads``, only with listed classes."""
    return load_listed(load, file, *args, **options) if _trusted.get() is False else load(file, *args, **options)


def load_listed(load: Callable[..., Any], file: Any, *args: Any, **options: Any) -> Any:
    """Run ``torch.load`` with ``weights_only=True`` and the listed classes, unless this thread's files are trusted.

    Raises:
        CheckpointError: the file has another class or function. Nothing of it has run.
    """
    if is_trusted():
        return load(file, *args, **{"weights_only": False, **options})
    with _lock:
        # Without those that the script has added: torch would remove them at the end of the context.
        added = [entry for entry in _listed() if entry not in torch.serialization.get_safe_globals()]
        try:
            with torch.serialization.safe_globals(added):
                # Not ``torch.load``, which scripts replace by one that sets ``weights_only=False``.
                return torch.serialization.load(file, *args, **{**options, "weights_only": True})
        except pickle.UnpicklingError as error:
            refused = _REFUSED.search(str(error))
            if refused is None:  # it is damaged
                raise pickle.UnpicklingError(
                    str(error).rpartition(_TORCH_ADVICE)[2].strip().partition("\n")[0]
                ) from None
            path = os.fspath(file) if isinstance(file, str | os.PathLike) else getattr(file, "name", file)
            raise CheckpointError(
                f"{path} has {refused[1]}, which is not among the classes of checkpoints: unpickling it could run any "
                f'code. If you trust the file, set "checkpoint": {{"trusted": true}} in the configuration (--trusted '
                f"for commands), or pass the class to torch.serialization.add_safe_globals."
            ) from None

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Files of weights in the safetensors format: what is in which, and where.

The ``safetensors`` package writes a file from tensors that are all there. Here they come one by one, so the header is
written from their shapes before. The format (https://github.com/huggingface/safetensors#format): 8 bytes with the
length of the header, little-endian; the header, JSON; and the elements of all tensors, without gaps.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, zip_longest

import torch

from deepspeed_ext.checkpoint.weights import Weight

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # as transformers names them
NAMES = ("model.safetensors", "model-*-of-*.safetensors", INDEX)  # patterns of all files of an export
_ALIGNED = 8  # bytes of the header, so that elements begin where all dtypes may
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorFile:
    """A file of some weights.

    Attributes:
        name: of the file.
        weights: in the order in which they are gathered.
        writer: the rank that writes it.
    """

    name: str
    weights: tuple[Weight, ...]
    writer: int

    def layout(self) -> tuple[bytes, dict[str, int]]:
        """Return the begin of the file, and where in the file the elements of each weight begin, by its name."""
        # Dtypes with more bytes come first, so that each element is aligned.
        inside = sorted(self.weights, key=lambda weight: -weight.dtype.itemsize)
        ends = list(accumulate(weight.nbytes for weight in inside))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for weight, end in zip(inside, ends, strict=True):
            where = [end - weight.nbytes, end]
            header[weight.name] = {"dtype": _DTYPES[weight.dtype], "shape": weight.shape, "data_offsets": where}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        begin = struct.pack("<Q", len(text)) + text
        return begin, {w.name: len(begin) + end - w.nbytes for w, end in zip(inside, ends, strict=True)}

    def units(self) -> Iterator[tuple["TensorFile", list[Weight]]]:
        """Yield this file with what of it is gathered together."""
        yield from ((self, list(some)) for _, some in groupby(self.weights, key=lambda weight: weight.unit))


def divide(weights: Sequence[Weight], most: int, writers: int) -> list[TensorFile]:
    """Divide weights into files as transformers does: in their order, and named by their number.

    Args:
        most: bytes of a file, unless a single weight has more.
        writers: number of ranks that write; files are dealt out to them in turn.

    Raises:
        ValueError: the format has no name for a dtype.
    """
    unknown = [weight for weight in weights if weight.dtype not in _DTYPES]
    if unknown:
        raise ValueError(f"safetensors has no name for the dtype of {unknown[0].name}, {unknown[0].dtype}.")
    parts: list[list[Weight]] = [[]]
    filled = 0
    for weight in sorted(weights, key=lambda weight: not weight.of_first_rank):
        if parts[-1] and filled + weight.nbytes > most:
            parts.append([])
            filled = 0
        parts[-1].append(weight)
        filled += weight.nbytes
    several = len(parts) > 1
    names = [
        f"model-{n:05d}-of-{len(parts):05d}.safetensors" if several else WEIGHTS for n in range(1, len(parts) + 1)
    ]
    of_first = sum(part[0].of_first_rank for part in parts[1:] if part)  # further files with what the first rank has
    return [
        TensorFile(name, tuple(part), max(0, n - of_first) % writers)
        for n, (name, part) in enumerate(zip(names, parts, strict=True))
    ]


def interleaved(files: Sequence[TensorFile], writers: int) -> list[tuple[TensorFile, list[Weight]]]:
    """Return the units of all files in the order in which all ranks gather them: one for each writer in turn, so that
    these write at the same time."""
    of_each = [[unit for file in files if file.writer == writer for unit in file.units()] for writer in range(writers)]
    return [unit for row in zip_longest(*of_each) for unit in row if unit is not None]


def index_of(files: Sequence[TensorFile]) -> str:
    """Return the text of the index, which says in which of several files each weight is."""
    total = sum(weight.nbytes for file in files for weight in file.weights)
    where = {weight.name: file.name for file in files for weight in file.weights}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"

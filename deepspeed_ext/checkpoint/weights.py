# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The weights of a full model under the names that a load expects, and the layout of their safetensors files.

Note [Expert names]
    AutoEP replaces a mixture by a layer with other names that has only this rank's experts. Exported experts have the
    names and shapes of the replaced mixture. These are taken from DeepSpeed's preset for the model's family, and match
    transformers 5.0.0 and later, where an expert's gate and up projections (``w1``, ``w3``) are one tensor. Experts of
    DeepSpeed's ``MoE`` layers are numbered among all experts, as in the files of a checkpoint.

Note [Weight files]
    The ``safetensors`` package writes a file from tensors that are all in memory. Here weights are gathered one by
    one, so the header is written first, from their shapes. The format
    (https://github.com/huggingface/safetensors#format): 8 bytes with the length of the header, little-endian; the
    header, JSON; and the elements of all tensors, without gaps.

Everything here is the same on all ranks, except for the values.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, zip_longest
from typing import Any, cast

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.module_inject.auto_ep_presets.registry import apply_config_overrides, get_preset
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed_ext.checkpoint.experts import is_autoep
from deepspeed_ext.deepspeed_types import Engine, is_partitioned

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # as transformers names them
NAMES = ("model.safetensors", "model-*-of-*.safetensors", INDEX)  # patterns of all files of an export
_ALIGNMENT = 8  # bytes: the header is padded to a multiple, so that elements of all dtypes are aligned
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
_MOE_EXPERTS = "deepspeed_moe.experts.deepspeed_experts"  # in a ``MoE`` layer
_Mixture = Callable[[str, nn.Module], Iterator["Weight"]]  # yields the weights of a module in a mixture, by its path


@dataclass(frozen=True)
class Weight:
    """A tensor of the full model.

    Attributes:
        name: the name that a load expects.
        shape: the full shape.
        dtype: the exported dtype.
        unit: name of a module; weights of one unit are gathered together.
        sources: this rank's part: parameters, possibly partitioned by ZeRO, or a buffer. Several are concatenated in
            dimension 1.
        group: ranks with different experts; None if all ranks have the same.
        owners: ranks of ``group`` whose parts, concatenated in dimension 0, are the full tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    sources: tuple[Tensor, ...]
    group: ProcessGroup | None = None
    owners: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in a file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def from_first_rank(self) -> bool:
        """Whether the first rank's values are exported, because ranks may have different ones: buffers."""
        return not self.parameters

    @property
    def is_collective(self) -> bool:
        """Whether other ranks have a part of it."""
        return self.group is not None or any(is_partitioned(source) for source in self.parameters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Sources that are parameters."""
        return [source for source in self.sources if isinstance(source, nn.Parameter)]

    def parts(self) -> Iterator[Tensor]:
        """Yield its elements on the device in contiguous parts. Its sources must be gathered. Collective over
        ``group``."""
        tensors = [source.detach() for source in self.sources]
        local = (tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)).contiguous()
        if self.group is None:
            yield local
            return
        for owner in self.owners:
            part = local if owner == dist.get_rank(group=self.group) else torch.empty_like(local)
            dist.broadcast(part.view(torch.uint8), dist.get_global_rank(self.group, owner), group=self.group)
            yield part


def gather_weights(weights: Iterable[Weight]) -> AbstractContextManager[Any]:
    """Gather the sources of weights, and release them at the end of this context. Collective over their owners.

    Available parameters are not released. DeepSpeed's ``checkpoint_event_prologue`` must have completed all fetches.
    """
    params = [param for weight in weights for param in weight.parameters if is_partitioned(param)]
    absent = [param for param in params if param.ds_status != ZeroParamStatus.AVAILABLE and param.ds_numel]
    return cast(AbstractContextManager[Any], deepspeed.zero.GatheredParameters(absent))


def exported_weights(engine: Engine, dtype: torch.dtype | None, exclude_frozen: bool) -> list[Weight]:
    """Return the parameters and persistent buffers of a model in the order of its modules, tied ones once.

    Args:
        dtype: exported dtype of floating-point tensors; None keeps each dtype.
        exclude_frozen: omit parameters without gradients.

    Raises:
        NotImplementedError: the model uses pipelines or tensor parallelism, or names of experts are unknown.
    """
    _require_full_model(engine)
    mixtures: dict[str, _Mixture] = {}
    weights: dict[tuple[int, tuple[int, ...]], Weight] = {}
    for path, module in engine.module.named_modules():
        if isinstance(module, MoE):
            mixtures[path] = partial(_moe_weights, path, module)
        elif is_autoep(module):
            mixtures[path] = partial(_autoep_weights, path, module, _autoep_preset(engine, path, module))
        inside = next(
            (mixture for prefix, mixture in mixtures.items() if f"{path}.".startswith(f"{prefix}.")), _module_weights
        )
        for weight in inside(path, module):
            if not (exclude_frozen and any(not param.requires_grad for param in weight.parameters)):
                weights.setdefault((id(weight.sources[0]), weight.owners), weight)
    exported = weights.values()
    return [replace(w, dtype=dtype) if dtype and w.dtype.is_floating_point else w for w in exported]


def _require_full_model(engine: Engine) -> None:
    """Refuse pipelines (no rank has all names) and tensor parallelism (no rank has full tensors)."""
    if engine.pipeline_parallelism:
        raise NotImplementedError(
            "Weights of a pipeline cannot be exported: each stage has only its own layers, named by number. Save a "
            "checkpoint, which has a file per layer (layer_*-model_states.pt)."
        )
    if engine.mp_world_size > 1:
        raise NotImplementedError(
            f"Weights that are split over {engine.mp_world_size} tensor-parallel ranks cannot be exported, because "
            f"each module splits them in its own way. engine.save_16bit_model supports tensor_parallel.autotp_size."
        )


def _module_weights(path: str, module: nn.Module) -> Iterator[Weight]:
    """Yield a module's own parameters and persistent buffers, named by ``path``."""
    for name, param in module.named_parameters(recurse=False):
        yield _weight(path, name, (param,))
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield _weight(path, name, (buffer,))


def _weight(path: str, name: str, sources: tuple[Any, ...], group: ProcessGroup | None = None) -> Weight:
    """Return a weight of a module; with a group, of packed experts, of which each rank has a part."""
    first, *others = (tuple(source.ds_shape if is_partitioned(source) else source.shape) for source in sources)
    if others:
        first = first[0], sum(shape[1] for shape in (first, *others)), *first[2:]
    ranks = 1 if group is None else dist.get_world_size(group=group)
    shape = first if group is None else (ranks * first[0], *first[1:])
    dtype = sources[0].ds_tensor.dtype if is_partitioned(sources[0]) else sources[0].dtype
    owners = () if group is None else tuple(range(ranks))
    return Weight(
        name=_join_path(path, name), shape=shape, dtype=dtype, unit=path, sources=sources, group=group, owners=owners
    )


def _join_path(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _moe_weights(prefix: str, layer: Any, path: str, module: nn.Module) -> Iterator[Weight]:
    """Yield the weights of a module in a ``MoE`` layer; for an expert, those of the same module on all ranks."""
    experts = f"{_join_path(prefix, _MOE_EXPERTS)}."
    if layer.ep_size == 1 or not path.startswith(experts):
        yield from _module_weights(path, module)
        return
    number, _, inside = path.removeprefix(experts).partition(".")
    group = groups._get_expert_parallel_group(layer.expert_group_name)
    for owner in range(layer.ep_size):
        expert_path = _join_path(experts[:-1], str(owner * layer.num_local_experts + int(number)), inside)
        yield from (replace(weight, group=group, owners=(owner,)) for weight in _module_weights(expert_path, module))


def _autoep_preset(engine: Engine, path: str, layer: Any) -> Any:
    """Return the preset with the names of the mixture that AutoEP replaced by a layer.

    Raises:
        NotImplementedError: there is none.
    """
    try:
        return apply_config_overrides(engine._config.expert_parallel_config, get_preset(layer.model_family))
    except ValueError as error:
        raise NotImplementedError(
            f"The experts of {path} cannot be exported: AutoEP replaced the layer "
            f"(expert_parallel.moe_layer_pattern), and its original format is unknown. Save a checkpoint, and convert "
            f"it. ({error})"
        ) from error


def _autoep_weights(prefix: str, layer: Any, preset: Any, path: str, module: nn.Module) -> Iterator[Weight]:
    """Yield the weights of a module in a layer of AutoEP. See Note [Expert names]."""
    inside = path[len(prefix) :].removeprefix(".")
    if inside != "experts":
        renamed = {
            "router": preset.router_pattern,
            "router.gate": preset.router_pattern,
            "shared_experts": preset.shared_experts_pattern,
            "shared_experts_gate": preset.shared_experts_gate_pattern,
        }
        longest = max((old for old in renamed if f"{inside}.".startswith(f"{old}.")), key=len, default="")
        yield from _module_weights(
            _join_path(prefix, renamed.get(longest, ""), inside[len(longest) :].removeprefix(".")), module
        )
        return
    path_of_experts, group = _join_path(prefix, preset.experts_pattern), None if layer.ep_size == 1 else layer.ep_group
    gate, up, down = (cast(nn.Parameter, getattr(module, attribute)) for attribute in ("w1", "w3", "w2"))
    packed = {preset.expert_w1: (gate, up), preset.expert_w2: (down,)}
    if preset.expert_w3 is not None:
        packed = {preset.expert_w1: (gate,), preset.expert_w3: (up,), preset.expert_w2: (down,)}
    yield from (_weight(path_of_experts, name, sources, group) for name, sources in packed.items())


# Files #############################################################################################


@dataclass(frozen=True)
class TensorFile:
    """A file of the export.

    Attributes:
        name: the file's name.
        weights: its weights, in the order of gathers.
        writer: the rank that writes it.
    """

    name: str
    weights: tuple[Weight, ...]
    writer: int

    def layout(self) -> tuple[bytes, dict[str, int]]:
        """Return the first bytes of the file, up to the elements, and the offset of each weight in the file."""
        # Dtypes with more bytes come first, so that each element is aligned.
        inside = sorted(self.weights, key=lambda weight: -weight.dtype.itemsize)
        ends = list(accumulate(weight.nbytes for weight in inside))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for weight, end in zip(inside, ends, strict=True):
            offsets = [end - weight.nbytes, end]
            header[weight.name] = {"dtype": _DTYPES[weight.dtype], "shape": weight.shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        begin = struct.pack("<Q", len(text)) + text
        return begin, {w.name: len(begin) + end - w.nbytes for w, end in zip(inside, ends, strict=True)}

    def units(self) -> Iterator[tuple["TensorFile", list[Weight]]]:
        """Yield this file with each list of weights that are gathered together."""
        yield from ((self, list(group)) for _, group in groupby(self.weights, key=lambda weight: weight.unit))


def divide_into_files(weights: Sequence[Weight], max_bytes: int, writers: int) -> list[TensorFile]:
    """Divide weights into files as transformers does: in order, named by number.

    Args:
        max_bytes: maximum bytes of a file, unless a single weight has more.
        writers: number of writer ranks; files are assigned to them in turn.

    Raises:
        ValueError: the format does not support a dtype.
    """
    unknown = [weight for weight in weights if weight.dtype not in _DTYPES]
    if unknown:
        raise ValueError(f"safetensors does not support the dtype of {unknown[0].name}, {unknown[0].dtype}.")
    parts: list[list[Weight]] = [[]]
    filled = 0
    for weight in sorted(weights, key=lambda weight: not weight.from_first_rank):
        if parts[-1] and filled + weight.nbytes > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(weight)
        filled += weight.nbytes
    several = len(parts) > 1
    names = [
        f"model-{n:05d}-of-{len(parts):05d}.safetensors" if several else WEIGHTS for n in range(1, len(parts) + 1)
    ]
    # Further files with the first rank's buffers also have the first rank as writer.
    first_rank_files = sum(part[0].from_first_rank for part in parts[1:] if part)
    return [
        TensorFile(name, tuple(part), max(0, n - first_rank_files) % writers)
        for n, (name, part) in enumerate(zip(names, parts, strict=True))
    ]


def interleave_units(files: Sequence[TensorFile], writers: int) -> list[tuple[TensorFile, list[Weight]]]:
    """Return the units of all files in the order of gathers: one for each writer in turn, so that writers overlap."""
    units_by_writer = [
        [unit for file in files if file.writer == writer for unit in file.units()] for writer in range(writers)
    ]
    return [unit for row in zip_longest(*units_by_writer) for unit in row if unit is not None]


def index_text(files: Sequence[TensorFile]) -> str:
    """Return the text of the index, which maps each weight to one of several files."""
    total = sum(weight.nbytes for file in files for weight in file.weights)
    file_names = {weight.name: file.name for file in files for weight in file.weights}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(file_names.items()))}, indent=2)
        + "\n"
    )

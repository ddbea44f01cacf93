# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Selection of ZeRO-3's leaf modules, each of which is fetched as one unit.

Note [Safe leaf modules]
    Everything inside a leaf module is fetched when its forward or backward begins, and reduced when its backward ends.
    So its descendants must be used through the module only: they are in one place of the model, and share no
    parameters with the rest. The module must have a forward of its own; lists of modules have none. The root is
    never a leaf module, because the full model would be gathered at once.

Note [Granularity or budget]
    By *granularity* (DeepSpeed #6649): parameters / (1 + descendants), where descendants are the modules inside that
    have parameters; lists are not counted. Starting from the top, the first module at or below the threshold is
    chosen. Such a mean hardly changes with depth, so it cannot tell a layer from its block of experts. It is kept for
    users who have tuned it.

    By a *budget* in bytes for the largest unit: starting from the top, the first module is chosen for which
    parameters, gradients and gather buffer fit. A module that contains a stack of layers is skipped even if it fits:
    inside one unit, no layer could be prefetched while another computes. So the units are layers. If a layer does not
    fit, its block of experts should still be one unit, because ranks may use different experts.

Note [Units without a key]
    A unit of the default has at most 1/4 of ``stage3_max_live_parameters``: a running unit, a prefetched one, the
    buffer that it is gathered into, and a unit's gradients stay within that limit. Mixtures of experts are fetched as
    without units, and so are all modules in or around them: a unit would gather every expert, used or not.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from deepspeed_ext.leaf.chunks import set_chunks, unset_chunks
from deepspeed_ext.leaf.windows import experts_in, set_windows, unset_windows, why_no_windows, windows_of

_LEAF = "_z3_leaf"  # DeepSpeed's flag on a module
_SET_BY_CHOICE = "paro_leaf"  # marks flags that this package, not the user, has set
_EXPERTS = re.compile("expert", re.IGNORECASE)
_ROUTER = re.compile("router|^gate$|gating|TopKGate", re.IGNORECASE)
_CONTAINERS = tuple(getattr(nn, name) for name in torch.nn.modules.container.__all__)
_DEFAULT_SHARE = 4  # see Note [Units without a key]
HOOKS_PER_MODULE = 4  # number of hooks that DeepSpeed registers on each module


class LeafKind(Enum):
    """Ways to fetch a module."""

    UNIT = "coarse"  # as one
    CHUNKED = "chunked"  # its listed experts are fetched in windows; everything else in it as usual
    WINDOWED = "windowed"  # its packed experts are fetched in windows
    FINE = "fine"  # its own parameters are fetched when it is entered
    INSIDE = "inside"  # it is inside a unit, and fetched with it


@dataclass(frozen=True)
class Settings:
    """Criteria of the choice: either ``budget`` or ``threshold`` is used."""

    budget: int | None  # bytes of the largest unit, see ``unit_bytes``; None to choose by granularity
    threshold: int  # granularity up to which a module is a unit
    most_live: int  # ``stage3_max_live_parameters``: caps units by granularity, and gives the default budget
    is_default: bool = False  # whether no key asks for units; see Note [Units without a key]


@dataclass
class ModuleChoice:
    """A module, and the way to fetch it."""

    name: str
    module: nn.Module
    numel: int  # elements of its parameters, including those of all descendants
    granularity: int | None  # elements / (1 + descendants); None if it has none
    bytes: int  # memory that it takes as a unit, see ``unit_bytes``
    kind: LeafKind
    why: str = ""  # why it is not a unit; empty if it is one
    chunks: list[list[nn.Module]] = field(default_factory=list)  # windows of listed experts
    windows: list[list[int]] = field(default_factory=list)  # windows of packed experts, by their numbers


def numel_of(param: Tensor) -> int:
    """Return the number of elements of a parameter, gathered or not."""
    return int(getattr(param, "ds_numel", param.numel()))


def unit_bytes(params: Iterable[Tensor]) -> int:
    """Return the bytes that parameters take while their unit is in use.

    These are the parameters, the buffer that they are gathered into, and the gradients of trained ones.
    """
    return sum(numel_of(p) * p.element_size() * (2 + int(p.requires_grad)) for p in params)


def default_budget(model: nn.Module, most_live: int) -> int:
    """Return the budget that fits a unit of ``most_live`` trained elements of the model's mean size.

    Their largest size would count a bf16 model twice for one parameter that it keeps in fp32, such as a router.
    """
    numel = sum(numel_of(p) for p in model.parameters())
    nbytes = sum(numel_of(p) * p.element_size() for p in model.parameters())
    return most_live * 3 * nbytes // numel if numel else most_live * 3 * 4


def default_settings(model: nn.Module, most_live: int) -> Settings:
    """Return the settings without a key; see Note [Units without a key]."""
    return Settings(default_budget(model, most_live // _DEFAULT_SHARE), 0, most_live, is_default=True)


class _ModelTree:
    """A model with data for the choice: names, users of parameters, and stacks of layers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names_by_id: dict[int, list[str]] = {}  # id of a module: its names in the model
        self.users_by_id: dict[int, set[int]] = {}  # id of a parameter: ids of the modules that hold it
        for name, module in model.named_modules(remove_duplicate=False):
            self.names_by_id.setdefault(id(module), []).append(name)
            for param in module.parameters(recurse=False):
                self.users_by_id.setdefault(id(param), set()).add(id(module))
        self.stacks = {id(module) for module in model.modules() if self._is_stack(module)}

    def granularity(self, module: nn.Module) -> tuple[int, int, int | None]:
        """Return a module's elements, number of counted modules and granularity, as DeepSpeed counts them."""
        numel = sum(numel_of(p) for p in module.parameters(recurse=False))
        if next(module.parameters(), None) is None:
            return 0, 0, None
        children = list(module.children())
        if not children:
            return numel, 1, None
        counted = 0
        for child in children:
            child_numel, inside, _ = self.granularity(child)
            numel, counted = numel + child_numel, counted + inside
        if isinstance(module, _CONTAINERS):
            return numel, counted, None
        return numel, counted + 1, numel // (counted + 1)

    def why_unsafe(self, module: nn.Module) -> str:
        """Return why a module cannot be a unit at any size; empty if it can. See Note [Safe leaf modules]."""
        if module is self.model:
            return "it is the model"
        if module.__dict__.get(_LEAF) is False:
            return "it has been unset as a leaf module"
        if isinstance(module, _CONTAINERS) or not _has_forward(module):
            return "a list or a sequence may be entered item by item"
        if not any(next(child.parameters(), None) is not None for child in module.children()):
            return "it has no submodules with parameters"
        for m in module.modules():
            if m is not module and is_set_by_user(m):
                return f"{self.names_by_id[id(m)][0]} has been set as a leaf module"
        return self.why_entered_elsewhere(module)

    def why_entered_elsewhere(self, module: nn.Module) -> str:
        """Return the reason why contents of a module may be used from outside it; empty if there is none."""
        inside = {id(m) for m in module.modules()}
        path = self.names_by_id[id(module)][0]
        for m in module.modules():
            if any(name != path and not name.startswith(f"{path}.") for name in self.names_by_id[id(m)]):
                return f"{self.names_by_id[id(m)][0]} is in several places of the model"
        if any(self.users_by_id[id(p)] - inside for p in module.parameters()):
            return "it shares parameters with other modules"
        return ""

    @functools.cached_property
    def _near_mixtures(self) -> set[int]:
        """The ids of mixtures of experts, and of all modules in and around them."""
        mixtures = [m for m in self.model.modules() if is_mixture(m) or why_no_windows(m) is not None]
        mixture_ids = {id(m) for m in mixtures}
        around = {id(m) for m in self.model.modules() if any(id(inner) in mixture_ids for inner in m.modules())}
        return around.union(id(inner) for mixture in mixtures for inner in mixture.modules())

    def is_near_mixture(self, module: nn.Module) -> bool:
        """Return whether a module is a mixture of experts, contains one, or is inside one."""
        return id(module) in self._near_mixtures

    def holds_stack(self, module: nn.Module) -> bool:
        """Return whether a module contains layers that follow one another."""
        return not is_mixture(module) and any(id(m) in self.stacks for m in _outside_mixtures(module))

    @staticmethod
    def _is_stack(module: nn.Module) -> bool:
        """Return whether a module is a list of several modules of one class that have submodules."""
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        same_class = len(children) > 1 and len({type(child) for child in children}) == 1
        layers = same_class and not isinstance(children[0], _CONTAINERS) and any(True for _ in children[0].children())
        return isinstance(module, _CONTAINERS) and layers


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not getattr(nn.Module, "forward", None)


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module is a mixture of experts.

    It is if a child with parameters has "expert" in its name, or in its class name and contains no mixture; or is a
    list of modules of one class with a gate or a router as sibling.
    """
    if isinstance(module, _CONTAINERS):
        return False
    return bool(experts_of(module)) or any(
        _EXPERTS.search(name) or (_EXPERTS.search(type(child).__name__) and not any(map(is_mixture, child.modules())))
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
    )


def experts_of(module: nn.Module) -> list[nn.Module]:
    """Return the experts in a list or dictionary that is a child of a mixture; none if it has no such list."""
    routed = any(
        _ROUTER.search(name) or _ROUTER.search(type(child).__name__) for name, child in module.named_children()
    )
    for name, child in module.named_children():
        experts = [expert for expert in child.children() if next(expert.parameters(), None) is not None]
        same_class = (
            isinstance(child, (nn.ModuleList, nn.ModuleDict)) and len({type(expert) for expert in experts}) == 1
        )
        named = experts and (_EXPERTS.search(name) or _EXPERTS.search(type(experts[0]).__name__))
        if same_class and len(experts) > 1 and (named or routed):
            return experts
    return []


def _outside_mixtures(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and its descendants, except for descendants of mixtures."""
    yield module
    if not is_mixture(module):
        for child in module.children():
            yield from _outside_mixtures(child)


def choose(model: nn.Module, settings: Settings) -> list[ModuleChoice]:
    """Choose the way to fetch each module with parameters, parents first. Changes nothing."""
    tree = _ModelTree(model)
    choices: list[ModuleChoice] = []
    visited: set[int] = set()

    def visit(name: str, module: nn.Module, inside: bool) -> None:
        numel, _, granularity = tree.granularity(module)
        params = list(module.parameters())
        if not params or id(module) in visited:
            return
        visited.add(id(module))
        kind = LeafKind.INSIDE if inside else LeafKind.FINE
        choice = ModuleChoice(name, module, numel, granularity, unit_bytes(params), kind=kind)
        choices.append(choice)
        if not inside:
            choice.why = _why_not(tree, choice, settings)
            choice.kind = LeafKind.FINE if choice.why else LeafKind.UNIT
            window_budget = None if settings.is_default else settings.budget
            if choice.kind == LeafKind.FINE and window_budget is not None and is_mixture(module):
                choice.chunks = _chunks(tree, module, window_budget)
                choice.kind = LeafKind.CHUNKED if choice.chunks else choice.kind
            if choice.kind == LeafKind.FINE and window_budget is not None:
                choice.windows, why = _windows(tree, choice, window_budget)
                choice.kind, choice.why = (LeafKind.WINDOWED if choice.windows else choice.kind), why or choice.why
        experts = {id(expert) for chunk in choice.chunks for expert in chunk}
        for child_name, child in module.named_children():
            child_is_inside = choice.kind in (LeafKind.UNIT, LeafKind.INSIDE) or any(
                id(m) in experts for m in child.children()
            )
            visit(f"{name}.{child_name}" if name else child_name, child, child_is_inside)

    visit("", model, False)
    return choices


def _why_not(tree: _ModelTree, choice: ModuleChoice, settings: Settings) -> str:
    """Return the reason why a module outside of units is not a unit itself; empty if it is."""
    if is_set_by_user(choice.module):
        return ""
    why_unsafe = tree.why_unsafe(choice.module)
    if why_unsafe:
        return why_unsafe
    if settings.budget is None:
        if choice.numel > settings.most_live:
            return f"{choice.numel:,} parameters are more than stage3_max_live_parameters"
        if choice.granularity is None or choice.granularity > settings.threshold:
            return "above the threshold"
        return ""
    if settings.is_default and tree.is_near_mixture(choice.module):
        return "it is a mixture of experts, or contains or belongs to one"
    if settings.is_default and choice.numel > settings.most_live // _DEFAULT_SHARE:
        return f"{choice.numel:,} parameters are more than 1/{_DEFAULT_SHARE} of stage3_max_live_parameters"
    if tree.holds_stack(choice.module):
        return "it contains a stack of layers"
    return f"{choice.bytes:,} bytes are more than the budget" if choice.bytes > settings.budget else ""


def _chunks(tree: _ModelTree, module: nn.Module, budget: int) -> list[list[nn.Module]]:
    """Return windows of a mixture's listed experts that fit the budget; none if there is no such list."""
    experts = experts_of(module)
    bytes_each = [unit_bytes(expert.parameters()) for expert in experts]
    if max(bytes_each, default=0) > budget or any(tree.why_entered_elsewhere(expert) for expert in experts):
        return []
    chunks: list[list[nn.Module]] = []
    remaining_bytes = 0
    for expert, needed_bytes in zip(experts, bytes_each, strict=True):
        if needed_bytes > remaining_bytes:
            chunks.append([])
            remaining_bytes = budget
        chunks[-1].append(expert)
        remaining_bytes -= needed_bytes
    return chunks


def expert_bytes(module: nn.Module) -> int:
    """Return the bytes of one packed expert of a module, as a unit; 0 if experts cannot be separated."""
    return unit_bytes(module.parameters(recurse=False)) // experts_in(module) if has_window_experts(module) else 0


def has_window_experts(module: nn.Module) -> bool:
    """Return whether a module's experts are packed, and can be fetched in windows."""
    return bool(_EXPERTS.search(type(module).__name__)) and why_no_windows(module) == ""


def _windows(tree: _ModelTree, choice: ModuleChoice, budget: int) -> tuple[list[list[int]], str]:
    """Return windows of a module's packed experts, and the reason for them.

    There are none without such experts, or if the module fits the budget. There are none either if its experts look
    packed but must stay together; then the reason explains that.
    """
    why = why_no_windows(choice.module)
    if why is None or choice.bytes <= budget:
        return [], ""
    why = why or tree.why_entered_elsewhere(choice.module)
    if why or not has_window_experts(choice.module):
        return [], f"its packed experts stay together: {why or 'its class is not named as experts'}"
    return windows_of(experts_in(choice.module), expert_bytes(choice.module), budget), (
        f"{choice.bytes:,} bytes are more than the budget"
    )


def is_set_by_choice(module: nn.Module) -> bool:
    """Return whether this package has flagged a module as a leaf module."""
    return bool(module.__dict__.get(_SET_BY_CHOICE))


def is_set_by_user(module: nn.Module) -> bool:
    """Return whether the user, or DeepSpeed, has flagged a module as a leaf module."""
    return bool(getattr(module, _LEAF, False)) and not is_set_by_choice(module)


def set_leaves(choices: Iterable[ModuleChoice]) -> list[nn.Module]:
    """Flag units, and experts in windows, as leaf modules for DeepSpeed; return the units."""
    choices = list(choices)
    units = [choice.module for choice in choices if choice.kind == LeafKind.UNIT]
    experts = [expert for choice in choices for chunk in choice.chunks for expert in chunk]
    windowed = [choice for choice in choices if choice.windows]
    for module in (*units, *experts, *(choice.module for choice in windowed)):
        if not getattr(module, _LEAF, False):
            setattr(module, _LEAF, True)
            setattr(module, _SET_BY_CHOICE, True)
    for choice in choices:
        if choice.chunks:
            set_chunks(choice.module, choice.chunks)
    for choice in windowed:
        set_windows(choice.module, choice.windows)
    return units


def _unset(module: nn.Module) -> bool:
    """Undo all settings on one module, and return whether there were any."""
    # No ``or``: all of them must be undone.
    return unset_chunks(module) | unset_windows(module) | bool(module.__dict__.pop(_SET_BY_CHOICE, False))


def unset_leaves(model: nn.Module) -> None:
    """Undo ``set_leaves``, so that another engine can choose anew.

    DeepSpeed's attributes on modules and parameters are removed, too. Otherwise, another engine would treat the
    parameters as those of leaf modules, and the autograd functions would call the old engine, which gathers nothing
    for a module that it kept whole.
    """
    for module in model.modules():
        module.__dict__.pop("pre_bwd_fn", None)
        module.__dict__.pop("post_bwd_fn", None)
    flagged = [module for module in model.modules() if _unset(module)]
    for module in flagged:
        module.__dict__.pop(_LEAF, None)
    if not flagged:
        return
    for param in model.parameters():
        param.__dict__.pop("ds_z3_leaf_module", None)

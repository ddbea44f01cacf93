# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext``: see ``tools/main.py``."""

from deepspeed_ext.integration import fork, patcher, patches
from deepspeed_ext.tools import main as cli

_EXPECTED = ("applied", "hooked", "as expected")


def print_patches() -> None:
    """Print each symbol of DeepSpeed that we replace, and its state."""
    patcher.import_all()
    if (version := fork.version()) is not None:
        print(f"\nthis DeepSpeed is a fork with hooks (version {version}): none of its symbols is patched at run time")
    if problem := patcher.unsupported_reason():
        print(f"\nthis DeepSpeed is not known, and our keys are refused: {problem}")
    tested = ", ".join(patches.TESTED_VERSIONS)
    print(f"\nsymbols of DeepSpeed (supported {patches.DEEPSPEED_VERSIONS}, tested {tested})")
    for patch, state in patcher.status():
        print(f"  {state:<12} {patch.path}\n{'':<15}{patch.purpose}")
    problems = patcher.override_problems()
    print("\nmethods of DeepSpeed's classes that ours override", *(problems or ["all as expected"]), sep="\n  ")


def patch_problems() -> list[str]:
    """Return the problems of the patches, or of a fork's hooks."""
    patcher.import_all()
    problem = patcher.unsupported_reason()
    states = [f"{patch.path}: {state}" for patch, state in patcher.status() if state not in _EXPECTED]
    unmatched_hooks = patcher.unmatched_hooks() if fork.version() is not None else []
    return [*([problem] if problem else []), *states, *unmatched_hooks, *patcher.override_problems()]


def main() -> None:
    """Run a command; without one, print the report."""
    cli.main(print_patches, patch_problems)


if __name__ == "__main__":
    main()

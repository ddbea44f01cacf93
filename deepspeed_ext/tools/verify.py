# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext verify``: check the files of a checkpoint without a model, ranks, or a GPU."""

import argparse
from pathlib import Path

GOOD, BAD, FAILED = 0, 1, 2  # exit statuses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    parser.add_argument("folder", help="the folder of checkpoints, or of one checkpoint or export")
    parser.add_argument("--tag", help="the checkpoint in it (default: the one that the file latest names)")


def run(arguments: argparse.Namespace) -> int:
    """Print the problems of a checkpoint, and return the exit status."""
    from deepspeed_ext.checkpoint import digests
    from deepspeed_ext.checkpoint.folder import LATEST, RECORD

    try:
        folder = Path(arguments.folder)
        latest = folder / LATEST
        if arguments.tag or latest.is_file():
            folder = folder / (arguments.tag or latest.read_text().strip())
        files = len(digests.content_files(folder))
        if not files and not (folder / RECORD).is_file():
            print(f"{folder} is not a checkpoint: it has no files of a save or an export.")
            return FAILED
        if not (folder / RECORD).is_file():
            print(f"{folder} has no {RECORD}: only the checksums that torch writes into files are compared.")
        problems = list(digests.problems(folder))
    except OSError as error:
        print(f"{arguments.folder} cannot be read: {error}")
        return FAILED
    print(*problems, f"{folder}: {files} files, {len(problems)} problems", sep="\n")
    return BAD if problems else GOOD

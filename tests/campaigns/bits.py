# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Digests of trained weights with every option, so that two commits can be compared bit by bit; and their checkpoints.

    python -m tests.campaigns.bits --write FILE --save FOLDER        at one commit
    python -m tests.campaigns.bits --compare FILE --load FOLDER      at another one

Trains every strategy with each set of options of the checker of stream order: LoCo, updates in few bits and without
loss, Muon, experts, offload, overlap, pipelines; and resumes from checkpoints. Exit status 1 if a digest differs, or
if a case is new or missing. Another machine may have other digests.
"""

import argparse
import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepspeed_ext.strategy import plain_name
from tests.harness import ranks

WORLD = 4
SAVED = ("defaults", "LoCo", "in few bits", "Muon", "experts")  # sets of options with checkpoints to resume from


def digest(tensors: list[Any]) -> str:
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@_deterministic()
def train_digests(options: str, names: Sequence[str]) -> dict[str, str]:
    """Train strategies with a set of options; a digest of losses, norms and weights for each."""
    import torch

    from tests.harness import pipelines, stream_cases, training

    provided, results = stream_cases.OPTIONS[options], {}
    for name in names:
        if provided.pipe is not None:
            run: Any = pipelines.train_pipeline(provided.pipe, training.placed(name, 1, **provided.zero))
            weights = list(run.weights.values())
        else:
            run = training.train(stream_cases.job_of(options, name), training.placed(name, **provided.zero))
            weights = [run.weights]
        results[name] = digest([torch.tensor(run.losses), torch.tensor(run.norms), *weights])
    return results


@_deterministic()
def resume_digests(options: str, names: Sequence[str], folder: str, load: bool) -> dict[str, str]:
    """Digests of two steps each, after a checkpoint of each strategy that is saved now, or loaded."""
    from tests.harness import stream_cases, training

    results = {}
    for name in names:
        job, location = stream_cases.job_of(options, name), str(Path(folder, options, name))
        engine, model = training.make_engine(job, training.placed(name, **stream_cases.OPTIONS[options].zero))
        data = training.batches(job)
        for number in range(4 * job.accumulation):
            if number == 2 * job.accumulation and load:
                assert engine.load_checkpoint(location)[0] is not None
            elif number == 2 * job.accumulation:
                engine.save_checkpoint(location)
            training.micro_step(engine, job, number, *next(data))
            engine.step()
        results[name] = digest([training.whole_weights(model)])
        engine.destroy()
    return results


def cases(only: Sequence[str], strategies: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Each set of options with its strategies, or some of them."""
    from tests.harness.stream_cases import OPTIONS

    for options, provided in OPTIONS.items():
        if not only or options in only:
            yield options, [name for name in provided.strategies if not strategies or name in strategies]


def quietly(pool: Any, case: Any, *arguments: Any) -> list[dict[str, str]]:
    """Run a case on all ranks; the pool prints their logs."""
    with contextlib.redirect_stdout(io.StringIO()):
        answers: list[dict[str, str]] = pool(WORLD).run(case, *arguments, timeout=600.0)
    return answers


def digests(arguments: argparse.Namespace, pool: Any) -> dict[str, Any]:
    """All of them, of every rank, by the names of their cases."""
    from tests.campaigns import bits  # by the name that ranks know this module by

    results = dict[str, Any]()
    for options, names in cases(arguments.only, arguments.strategies):
        answers = quietly(pool, bits.train_digests, options, tuple(names))
        results |= {f"{options}: {name}": [answer[name] for answer in answers] for name in names}
        print(f"{len(results):4} {options}", file=sys.stderr, flush=True)
        folder = arguments.load or arguments.save
        if options in SAVED and folder:
            answers = quietly(pool, bits.resume_digests, options, tuple(names), folder, bool(arguments.load))
            results |= {f"{options}, resumed: {name}": [answer[name] for answer in answers] for name in names}
    return results


def main(words: Sequence[str] | None = None, pool: Any = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--write", type=Path, help="the file to write digests to")
    subject.add_argument("--compare", type=Path, help="the file to compare digests with")
    parser.add_argument("--save", default="", help="folder for checkpoints that another commit goes on from")
    parser.add_argument("--load", default="", help="folder with checkpoints of another commit")
    parser.add_argument("--only", nargs="*", default=(), help="names of sets of options")
    parser.add_argument("--strategies", nargs="*", type=plain_name, default=(), help="strategies")
    arguments = parser.parse_args(words)
    with contextlib.ExitStack() as stack:
        if pool is None:
            ranks.prepare_environment()
            pool = stack.enter_context(contextlib.closing(ranks.RankPool()))
        results = digests(arguments, pool)
    if arguments.write:
        arguments.write.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(arguments.compare.read_text(encoding="utf-8"))
    retained = {options for options, _ in cases(arguments.only, arguments.strategies)}
    retained |= {f"{options}, resumed" for options in retained if arguments.load}
    before = {case: item for case, item in before.items() if case.split(":")[0] in retained}
    apart = sorted(case for case in before.keys() | results.keys() if before.get(case) != results.get(case))
    print("\n".join(f"DIFFERS {case}" for case in apart) or f"{len(results)} cases, all bits equal")
    sys.exit(bool(apart))


if __name__ == "__main__":
    main()

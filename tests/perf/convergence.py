# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares final losses: trains a byte-level GPT of ``scripts/examples`` on CPU ranks with each method.

    python -m tests.perf.convergence loco       # gradients in 4 bits
    python -m tests.perf.convergence ablation   # settings of LoCo, and optimizers
    python -m tests.perf.convergence mixture    # a mixture of experts with LoCo
    python -m tests.perf.convergence updates    # updated parameters, or gradient sums, in few bits
    python -m tests.perf.convergence outer      # an outer optimizer between groups
    python -m tests.perf.convergence long       # 3,000 steps of a GPT of 10.9 million parameters
    python -m tests.perf.convergence tuning --start FILE    # from weights that ``long --weights FOLDER`` has written

All methods and optimizers of a study (``lib/studies.py``) start from the same weights with the same seed, and use the
same batches. Seeds change the weights; if those come from a file, they change the batches. The final loss is the mean
over the last tenth of the steps or, with outer steps, that of outer weights on held-out text. A control sends the same
data as its reference, but starts from slightly perturbed weights. This program adds methods to the package: *direct*
sends quantized parameters, not their differences to the receivers' values; *coarse* sends sums in blocks as large as
those of differences, and does not average their errors; *errors in fp32* and *in 4 bits* store LoCo's errors so.

A run writes a file with the loss of every step to ``--runs``, and is not repeated, so the program can be interrupted
and started again.

Exit status 0 if methods end within the bounds of the study, and methods that are too coarse end outside of them; 1 if
not; 2 if a run failed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from deepspeed_ext import outer_weights
from deepspeed_ext.comm.hops import MaxOverRanks, Update
from deepspeed_ext.comm.spans import Contents
from deepspeed_ext.config.settings import LocoSettings
from deepspeed_ext.loco import hop, reference, setup
from deepspeed_ext.loco.feedback import ErrorFeedback
from deepspeed_ext.loco.updates import QuantizedDifferences
from deepspeed_ext.model_bytes import muon_parameters
from deepspeed_ext.strategy import plain_name
from scripts.emulation.launching import add_options, exit_on_signals, launch_workers, start_rank
from scripts.emulation.traffic import TrafficMeter
from scripts.examples.gpt import Batches, ByteGPT, byte_loss, read_corpus
from scripts.examples.steps import average, train_step
from tests.perf.lib import records, studies
from tests.perf.lib.studies import OPTIMIZERS, STUDIES, Run, Study

MODEL = {"dim": 64, "layers": 2, "heads": 4, "sequence_length": 64}
LARGE = {"dim": 384, "layers": 6, "heads": 6, "sequence_length": 128}
CORPUS_BYTES = 2_000_000
HELD_OUT, PERIOD = 20_000, 220_000  # bytes: so many of each so many, so that held-out text is of the same kind
LARGE_HELD_OUT = 0.05  # of the text, its end
EVALUATED, BATCHES = 1024, 16  # rows of held-out text, of all ranks; batches of each rank for the larger model


class DirectHop(QuantizedDifferences):
    """Sends quantized parameters instead of differences."""

    def encode(self, updates: Sequence[Update], max_over_ranks: MaxOverRanks) -> list[Tensor]:
        return super().encode(
            [update._replace(replica=torch.zeros_like(update.replica)) for update in updates], max_over_ranks
        )

    def write(self, codes: Tensor, replica: Tensor) -> None:
        replica.zero_()
        super().write(codes, replica)


class CoarseSums(hop.QuantizedSums):
    """Sums quantized like those of 1-bit Adam's server, in blocks of 128."""

    def __init__(self, settings: LocoSettings, device: str | None = None, pinned: bool = False) -> None:
        super().__init__(settings.model_copy(update={"err_beta": 0.0, "block_size": 128}), device, pinned)


class FullErrors(ErrorFeedback):
    """Errors in fp32; ``error_bits`` is 16."""

    def _empty(self, splits: Sequence[int], device: str | torch.device, pinned: bool = False) -> Tensor:
        return super()._empty(splits, device, pinned).float()


class FewBitErrors(FullErrors):
    """Errors rounded to 4 bits with a scale for each block of gradients."""

    def store(self, contents: Contents, updated: Tensor) -> None:
        blocks = updated.view(1, -1, self.settings.block_size)
        q, scales = reference.quantize(blocks, reference.Packing(4, self.settings.block_size).largest)
        blocks.copy_(q * scales.float().unsqueeze(-1))
        super().store(contents, updated)


class Mixture(nn.Module):
    """Mixtral over bytes that returns its own loss, with 2 of 8 experts for each token."""

    def __init__(self, dim: int, layers: int, heads: int, sequence_length: int) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        super().__init__()
        shape = {"hidden_size": dim, "intermediate_size": 2 * dim, "num_hidden_layers": layers, "vocab_size": 256}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
        self.model = MixtralForCausalLM(MixtralConfig(**shape, max_position_embeddings=sequence_length))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return byte_loss(self.model(tokens, use_cache=False).logits, targets)


PUT_IN = {
    "direct": (setup, "QuantizedDifferences", DirectHop),
    "coarse": (setup, "QuantizedSums", CoarseSums),
    "errors in fp32": (hop, "ErrorFeedback", FullErrors),
    "errors in 4 bits": (hop, "ErrorFeedback", FewBitErrors),
}


@contextmanager
def put_in(method: str) -> Iterator[None]:
    """Replace parts of the package by a method that it does not have, if the run uses one."""
    with ExitStack() as stack:
        for words in filter(method.__contains__, PUT_IN):
            stack.enter_context(mock.patch.object(*PUT_IN[words]))
        yield


# What runs in the ranks ###########################################################################


def configuration(study: Study, run: Run) -> dict[str, Any]:
    """Return DeepSpeed's configuration; the learning rate rises for a tenth of the steps, and then falls to zero."""
    optimizer = OPTIMIZERS[run.optimizer]
    schedule = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": [rate for key, rate in optimizer["params"].items() if key.endswith("lr")],  # by group
        "warmup_num_steps": max(2, run.steps // 10),
        "warmup_type": "linear",
        "total_num_steps": run.steps,
    }
    return {
        "train_micro_batch_size_per_gpu": 4 if study.large or study.tuned else 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": study.bf16},
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "zero_allow_untested_optimizer": True,  # SGD, Adafactor, Adam8bit
        "steps_per_print": 1_000_000,
        "zero_optimization": study.methods[run.method].configured(run.optimizer, study.group_size),
    }


def read_text(study: Study) -> tuple[Tensor, Tensor]:
    if study.large:  # the Python sources of the DeepSpeed that is installed, but for one that its installation writes
        root = Path(deepspeed.__file__).parent
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
        text = b"".join((root / name).read_bytes() for name in names if name != "git_version_info_installed.py")
        corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = round(len(corpus) * (1 - LARGE_HELD_OUT))
        return corpus[:cut], corpus[cut:]
    if not study.held_out:
        return read_corpus(CORPUS_BYTES), torch.empty(0)
    corpus = read_corpus(CORPUS_BYTES * PERIOD // (PERIOD - HELD_OUT))
    is_held_out = torch.arange(len(corpus)) % PERIOD >= PERIOD - HELD_OUT
    return corpus[~is_held_out], corpus[is_held_out]


def fingerprint(*text: Tensor) -> str:
    content = torch.cat([part.to(torch.uint8) for part in text]).numpy().tobytes()
    return f"{len(content)} bytes, sha256 {sha256(content).hexdigest()[:16]}"


class Trainer:
    """Trains one run after another on one of the ranks, from the weights in a file, if any; keeps last weights."""

    def __init__(self, study: Study, start: Path | None = None, weights: Path | None = None) -> None:
        self._study, self._model, self._weights = study, LARGE if study.large or study.tuned else MODEL, weights
        self._text, self._held_out = read_text(study)
        self.text = fingerprint(self._text, self._held_out)
        self._start = None if start is None else torch.load(start, weights_only=True)
        if start is not None:
            self.text += f", from weights of sha256 {sha256(start.read_bytes()).hexdigest()[:16]}"

    def train(self, run: Run, until: int | None = None) -> Run:
        """Train, evaluate, and return the run with its losses; ``until``: number of steps, by default all."""
        begin, study = time.perf_counter(), self._study
        run.text, run.parts = self.text, [{"from": 0, **records.circumstances()}]
        torch.manual_seed(run.seed)
        model = (Mixture if study.mixture else ByteGPT)(**self._model)
        if self._start is not None:
            model.load_state_dict(self._start)
        noise = study.methods[run.method].noise
        with torch.no_grad():
            for parameter in model.parameters() if noise else ():
                parameter.mul_(1 + noise * torch.randn_like(parameter))
        run.elements = sum(parameter.numel() for parameter in model.parameters())
        with put_in(run.method):
            config = configuration(study, run)
            parts: dict[str, Any] = {"model": model, "model_parameters": model.parameters(), "config": config}
            if run.optimizer == "Adam8bit":
                from bitsandbytes.optim import Adam8bit

                parts["optimizer"] = Adam8bit(model.parameters(), **config.pop("optimizer")["params"])
            engine, *_ = deepspeed.initialize(**parts)
        run.matrices = sum(parameter.numel() for parameter in muon_parameters(model.parameters()))
        self._steps(engine, run, until or run.steps)
        if self._weights is not None:
            engine.save_16bit_model(self._weights, f"{run.name}.pt")
        engine.destroy()
        run.seconds = round(time.perf_counter() - begin, 1)
        return run

    def _steps(self, engine: Any, run: Run, until: int) -> None:
        batches = Batches(self._text, engine, self._model["sequence_length"], run.seed if self._study.tuned else 0)
        held_out = list(self._batches_of_held_out(engine)) if self._study.held_out else []
        every = max(1, run.steps // self._study.held_out) if held_out else 0
        meter, losses = TrafficMeter(), []
        for step in range(until):
            if step == 1:  # the step before opens connections
                dist.barrier()
                meter.start()
                dist.barrier()
            if step == run.steps - 1 and held_out:
                run.own_loss = _evaluate(engine, held_out)
            losses.append(train_step(engine, [batches.draw(step)]))
            if not held_out:
                run.norms.append(float(engine.get_global_grad_norm()))
            if every and ((step + 1) % every == 0 or step + 1 == run.steps):
                with outer_weights(engine):  # fragments under way have arrived then
                    run.held_out[str(step + 1)] = _evaluate(engine, held_out)
        dist.barrier()
        meter.stop()
        run.received = meter.split(self._study.group_size).inter_mean / max(1, until - 1)
        run.losses = [average(loss) for loss in losses]

    def _batches_of_held_out(self, engine: Any) -> Iterator[tuple[Tensor, Tensor]]:
        length = self._model["sequence_length"]
        if self._study.large:
            yield from map(Batches(self._held_out, engine, length, seed=0).draw, range(BATCHES))
            return
        for rows in held_out_rows(self._held_out, length, dist.get_rank(), dist.get_world_size()).split(64):
            yield rows[:, :-1], rows[:, 1:]


def held_out_rows(text: Tensor, length: int, rank: int, ranks: int) -> Tensor:
    """Return the rows that a rank evaluates; they have the length of training rows, plus one byte."""
    starts = torch.linspace(0, len(text) - length - 1, EVALUATED).long()[rank::ranks]
    return text[starts[:, None] + torch.arange(length + 1)].long()


def _evaluate(engine: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss on held-out text; each rank evaluates its part with its own weights."""
    engine.eval()
    with torch.no_grad():
        losses = [engine(*batch) for batch in batches]
    engine.train()
    return average(torch.stack(losses))


def work(args: argparse.Namespace, study: Study) -> None:
    first = start_rank()
    torch._dynamo.config.disable = True  # Muon's compiled kernels take minutes to compile for ranks without a GPU
    trainer = Trainer(study, args.start, args.weights)
    runs = [replace(Run(**values), text=trainer.text) for values in json.loads(args.worker.read_text())]
    missing = [run for run in runs if run.found(args.runs) is None]
    dist.barrier()  # all have looked before the first one writes
    for run in tqdm(missing, "runs", disable=not first):
        trainer.train(run)
        if first:
            print(f"{run.name}: {run.final_loss:.4f}, {run.seconds:.0f} s", flush=True)
            run.write(args.runs)
    dist.destroy_process_group()


# What starts them #################################################################################


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train in several ways, and compare where that ends.")
    parser.add_argument("study", choices=STUDIES)
    add_options(parser, "convergence.log", 48 * 3600)
    parser.add_argument("--seeds", type=int, nargs="+", help="of the runs")
    parser.add_argument("--groups", type=int, nargs="+", help="numbers of them, of the study's size")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run")
    for option in ("--optimizers", "--methods"):
        parser.add_argument(option, nargs="+", type=plain_name, metavar="NAME")
    parser.add_argument("--runs", type=Path, help="folder of the files of runs; runs that are there are not repeated")
    parser.add_argument("--weights", type=Path, help="folder for last weights of each run with all of them (p = N)")
    parser.add_argument("--start", type=Path, help="file with first weights, for tuning")
    parser.add_argument("--csv", type=Path, help="append rows here")
    args = parser.parse_args()
    study = STUDIES[args.study]
    args.seeds, args.groups = args.seeds or list(range(study.seeds)), args.groups or list(study.groups)
    args.methods, args.optimizers = args.methods or list(study.methods), args.optimizers or list(study.optimizers)
    args.runs = (args.runs or study.folder).resolve()
    if study.tuned != (args.start is not None):
        parser.error("--start is for tuning, which needs it")
    for option, names in (("methods", study.methods), ("optimizers", study.optimizers)):
        if unknown := set(getattr(args, option)) - set(names):
            parser.error(f"--{option} must be among {', '.join(names)}, got {', '.join(sorted(unknown))}")
    if beside := {study.methods[name].against for name in args.methods} - set(args.methods):
        parser.error(f"--methods must also name {', '.join(sorted(beside))}, which others are compared with")
    if (args.steps or 2) < 2:
        parser.error(f"--steps must be at least 2, got {args.steps}")
    return args


def main() -> int:
    args = parse_arguments()
    study = replace(STUDIES[args.study], steps=args.steps or STUDIES[args.study].steps)
    if args.worker is not None:
        work(args, study)
        return 0
    exit_on_signals()
    runs = studies.planned(study, args.optimizers, args.groups, args.seeds)
    runs = [run for run in runs if run.method in args.methods]
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "runs.json"
        for groups in args.groups:
            order.write_text(json.dumps([vars(run) for run in runs if run.groups == groups]))
            launch_workers(__spec__.name, order, args, groups * study.group_size, sys.argv[1:])
    return report(args, study, [Run.read(args.runs / f"{run.name}.json") for run in runs])


def report(args: argparse.Namespace, study: Study, runs: Sequence[Run]) -> int:
    """Print a table and verdicts, and append rows; return the exit status."""
    rows = studies.rows_of(study, runs)
    print(records.markdown(studies.table(study, rows)))
    verdicts = [*studies.judged(study, runs), *studies.judged_norms(study, runs)]
    print("\n".join(line for _, line in verdicts))
    if args.csv is not None:
        records.append_rows(args.csv, rows)
    return 0 if all(passed for passed, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

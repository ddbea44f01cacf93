# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Writes tables into pages, from the rows of results, the planner and our keys: ``python -m tests.perf.tables``.

A table replaces the text between ``<!-- table: tables.py NAME -->`` and ``<!-- end -->``; NAME is one of ``TABLES``.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

from pydantic import BaseModel

from deepspeed_ext.config.model import ParoConfig
from deepspeed_ext.config.settings import SaveSettings
from deepspeed_ext.strategy import hyphenate
from deepspeed_ext.tools.report.contents import group_rows
from scripts import ROOT
from tests.perf import sum_errors
from tests.perf.lib import collectives, how_to, network, paper, predictions, settings, speeds, studies, tabulated
from tests.perf.lib.records import RESULTS, Table, markdown, read, read_rows, seconds_of

CLUSTER, OVERLAP = "emulated_cluster.csv", "overlap.csv"


def pipelines() -> Table:
    rows = {(row.method, row.mbit): row for row in read("pipelines.csv")}
    (slow, fast), lines = settings.PIPELINE["4x2-pipeline"].mbit, []
    for name in (name for name, mbit in rows if mbit == fast):
        received = f"{rows[name, slow].bytes_between / 2e6:#.3g} MB"
        lines.append([name, *(seconds_of(rows[name, rate].median) for rate in (slow, fast)), received])
    return ["", f"{slow} Mbit/s", f"{fast:,} Mbit/s", "received from other nodes per step"], lines


def pipelines_memory() -> Table:
    """Return what the rank of a pipeline holds that has the most, in MB."""
    lines = []
    for row in (row for row in read("pipelines.csv") if row.mbit == 100):
        sizes = [*row.held, row.more["activation_bytes"], row.memory + row.more["activation_bytes"]]
        of_formula = f"{row.memory / row.more['formula_held']:.2f}"
        lines.append([row.method, *(f"{nbytes / 1e6:#.3g}" for nbytes in sizes), of_formula])
    return ["MB", "parameters", "gradients", "optimizer states", "activations", "sum", "states, of the formula"], lines


def leaf_overhead(packed: bool) -> Table:
    rows = [row for row in read_rows(RESULTS / "leaf_overhead.csv") if row.get("packed") == str(packed)]
    lines = []
    for name, row in {row["case"]: row for row in rows if row["ranks"] == "1"}.items():
        median, low, high = (float(row[f"milliseconds_{part}"]) for part in ("median", "quartile_1", "quartile_3"))
        counts = [f"{int(row[column]):,}" for column in ("hooks", "operators")]
        lines.append([name, *counts, f"{median:.0f} ({low:.0f} to {high:.0f})", f"{float(row['of_stock']):.2f}"])
    return ["", "hooks", "operators", "ms per step, median (quartiles)", "overhead, relative to ZeRO-3"], lines


def kernels() -> Table:
    """Return milliseconds of kernels of differences, beside a copy of as many bytes."""
    rows = {row["case"]: row for row in read_rows(RESULTS / "loco_kernels.csv") if "compress" not in row["case"]}
    columns = {"seconds": (1e3, ".1f"), "copy_seconds": (1e3, ".1f"), "of_copy_bandwidth": (1, ".2f")}
    columns |= {"times_faster_than_pytorch": (1, ".0f")}
    lines = [
        [name, *(format(float(row[key]) * times, form) for key, (times, form) in columns.items())]
        for name, row in rows.items()
    ]
    return ["kernel", "ms", "copy, ms", "of the copy's bandwidth", "times plain PyTorch"], lines


def long_training() -> Table:
    study = studies.STUDIES["long"]
    return studies.table(study, studies.rows_of(study, studies.read_runs(study)))


def lossless() -> Table:
    columns = ("changed", "entropy", "nibble", "pairs", "bitmap", "gaps")
    rows = [row for row in read_rows(RESULTS / "lossless_updates.csv") if row["weights"].startswith("all")]
    lines = []
    for row, worst in zip(rows[::2], rows[1::2], strict=True):
        tuning = ", tuning" if row["tuning"] == "True" else ""
        numbers = [*(row[column] for column in columns), worst["pairs"]]
        lines.append([row["learning_rate"] + tuning, *(f"{float(number):.2f}" for number in numbers)])
    return ["learning rate", *columns, "worst step, pairs"], lines


def growth() -> Table:
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in (row for row in read_rows(RESULTS / "growth.csv") if not row.get("modules")):
        at = row["ranks"], stage_name(row["method"])
        made_only = float(row["seconds_step"]) == 0 and at in found
        found[at] = {**found[at], "seconds_creation": row["seconds_creation"]} if made_only else row
    lines = []
    for name in (method for ranks, method in found if ranks == "16384"):
        pair = [found["64", name], found["16384", name]]
        messages = {sum(int(row[f"messages_{kind}"]) for kind in ("intra", "inter", "world")) for row in pair}
        line = [name, ", ".join(dict.fromkeys(row["groups"] for row in pair)), str(max(messages))]
        for column, form in (("seconds_creation", ".2g"), ("seconds_step", ".2g"), ("mb", ".0f")):
            values = [format(float(row[column]), form) for row in pair if float(row[column] or 0)]
            line.append(", ".join(dict.fromkeys(values)))
        lines.append(line)
    return ["", "groups", "messages per step", "creation, s", "step, s", "MB"], lines


def creation() -> Table:
    """Return seconds in which an engine of a model of 10,000 modules is made, by method and number of ranks."""
    rows = [row for row in read_rows(RESULTS / "growth.csv") if row.get("modules")]
    seconds = {(row["method"], row["ranks"]): float(row["seconds_creation"]) for row in rows}
    worlds = sorted({ranks for _, ranks in seconds}, key=int)
    methods = dict.fromkeys(method for method, _ in seconds)
    lines = [[stage_name(name), *(f"{seconds[name, ranks]:.2g}" for ranks in worlds)] for name in methods]
    return ["creation, s", *(f"{ranks} ranks" for ranks in worlds)], lines


def report_groups() -> Table:
    """Return what a report says of groups with 6 micro-batches, of which those of the second take twice as long."""
    rows = [list(map(str, row.values())) for row in group_rows([6, 6], [0.08, 0.16])]
    columns = ["seconds per micro-batch", "micro-batches", "waits, s per step", "balanced"]
    return ["group", *columns], [[str(number), *row] for number, row in enumerate(rows)]


def _against(file: str, setting: str) -> Table:
    return tabulated.against(read(file), setting)


def stage_name(method: str) -> str:
    return method if len(method) > 1 else f"ZeRO-{method}"


def host_time() -> Table:
    """Return CPU milliseconds of the host for a step."""
    rows = read_rows(RESULTS / "host_time.csv")
    quartiles = [f"{float(row['ms_low']):.0f} to {float(row['ms_high']):.0f}" for row in rows]
    lines = [
        [hyphenate(row["method"]), f"{float(row['ms_median']):.0f}", both, f"{float(row['ms_min']):.0f}"]
        for row, both in zip(rows, quartiles, strict=True)
    ]
    return ["CPU ms per step", "median", "quartiles", "smallest"], lines


def save_faults() -> Table:
    """Return how trainings continued after faults in saves, of all seeds."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in read_rows(RESULTS / "save_faults.csv"):
        found.setdefault(row["fault"], []).append(row)
    lines = []
    for fault, rows in found.items():
        counts = [sum(int(row[name]) for row in rows) for name in ("recovered", "refused", "other")]
        injected = " + ".join(row["injected"] for row in rows)
        lines.append([fault, injected, *map(str, counts), f"{max(float(row['longest']) for row in rows):.0f}"])
    header = ["fault", "injected, by seed", "recovered from the newest complete save", "refused by name", "other"]
    return [*header, "longest, s"], lines


def keys(kind: type[BaseModel]) -> Table:
    """Return the keys that are the fields of a model, with the strings below them."""
    (tree,) = cast(list[ast.ClassDef], ast.parse(inspect.getsource(kind)).body)
    docs = {ast.unparse(one.target): doc for one, doc in pairwise(tree.body) if isinstance(one, ast.AnnAssign)}
    lines = []
    for name, field in kind.model_fields.items():
        default = "absent" if field.default is None else f"`{json.dumps(field.default)}`"
        shown = cast(dict[str, str], field.json_schema_extra or {}).get("shown", default)
        meaning = " ".join(ast.literal_eval(cast(ast.Expr, docs[name]).value).split())
        lines.append([f"`{name}`", shown, field.description or "", meaning])
    return ["key", "default", "value", "meaning"], lines


TABLES: dict[str, Callable[[], Table]] = {
    "2x2-large-4": lambda: tabulated.setting(read(CLUSTER), "2x2-large-4"),
    "2x2-large-4-muon": lambda: tabulated.setting(read(CLUSTER), "2x2-large-4-muon"),
    "2x2-large-4-bf16": lambda: tabulated.setting(read(CLUSTER), "2x2-large-4-bf16"),
    **{
        f"{name}-against": partial(_against, CLUSTER, name)
        for name in ("2x2-large-4", "2x2-large-4-bf16", "2x2-large-4-muon")
    },
    "gpt2-against": partial(_against, "gpt2_cluster.csv", "2x2-gpt2"),
    "all": lambda: tabulated.all_settings(read(CLUSTER)),
    "equal-speed": lambda: tabulated.equal_speed(read(CLUSTER), "2x2-large-4"),
    "equal-speed-bf16": lambda: tabulated.equal_speed(read(CLUSTER), "2x2-large-4-bf16"),
    "overlap-seconds": lambda: tabulated.overlap_seconds(read(OVERLAP)),
    "overlap-against": lambda: tabulated.overlap_against(read(OVERLAP)),
    "outer-cluster": lambda: tabulated.outer(read("outer_cluster.csv")),
    "host-parameters": lambda: tabulated.measured(read("host_parameters.csv")),
    "mixture": lambda: tabulated.measured(read("mixture_cluster.csv")),
    "gpt2": lambda: tabulated.measured([r for r in read("gpt2_cluster.csv") if r.setting == "2x2-gpt2"], "ZeRO-1"),
    "save-faults": save_faults,
    "saves": lambda: tabulated.saves(read("saves.csv")),
    "speeds": lambda: speeds.SpeedsMeasurement.table(read(speeds.FILE)),
    "report-groups": report_groups,
    "outer": lambda: studies.stored("outer"),
    "updates": lambda: studies.stored("updates", "AdamW"),
    "updates-muon": lambda: studies.stored("updates", "Muon"),
    "ablation": lambda: studies.stored("ablation", "AdamW"),
    "ablation-optimizers": lambda: studies.stored("ablation", "Adafactor", "Adam8bit"),
    "mixture-losses": lambda: studies.stored("mixture"),
    "tuning": lambda: studies.stored("tuning"),
    "few-bits": predictions.few_bits,
    "long-training": long_training,
    "kernels": kernels,
    "lossless": lossless,
    "growth": growth,
    "host_time": host_time,
    "sum-errors": sum_errors.table,
    "network": network.table,
    "collectives": collectives.table,
    "collectives-large": lambda: collectives.table("64 MiB"),
    "expected": predictions.expected,
    "paper": paper.table,
    "paper-rates": paper.rates,
    "paper-emulated": lambda: tabulated.measured(read(paper.FILE)),
    "pipelines": pipelines,
    "pipelines-memory": pipelines_memory,
    "leaf-overhead": lambda: leaf_overhead(packed=False),
    "creation": creation,
    "keys": lambda: keys(ParoConfig),
    "keys-of-saves": lambda: keys(SaveSettings),
    **{
        f"at-scale-{name}-{regime}": partial(predictions.at_scale, parameters, share)
        for name, parameters in predictions.SCALE_MODELS.items()
        for regime, share in predictions.TRAINABLE.items()
    },
    **{
        f"{name}-{model}": partial(predictions.on_cluster, name, model)
        for name in predictions.CLUSTERS
        for model in predictions.MODELS
    },
    **{f"host-{kind}": partial(predictions.host_parameters, kind) for kind in predictions.HOST_METHODS},
    **{f"how-to-slow-network-{kind}": partial(how_to.slow_network, kind) for kind in ("full", "LoRA", "QLoRA")},
    "how-to-accumulation": how_to.accumulation,
    "how-to-number-of-gpus": how_to.number_of_gpus,
    "how-to-lora": how_to.lora,
    "how-to-ulysses": how_to.ulysses,
    "how-to-moe": how_to.mixture,
    "how-to-saving": how_to.saving,
    "how-to-going-back": how_to.going_back,
}
PLOTTED = (network, collectives, sum_errors)
_TABLE = re.compile(r"(<!-- table: tables.py (?P<name>\S+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    return _TABLE.sub(lambda match: match[1] + markdown(TABLES[match["name"]]()), page)


def pages() -> Sequence[Path]:
    package = ROOT / "deepspeed_ext"
    ours = (package / name / "README.md" for name in ("config", "leaf", "pipeline", "tools/report"))
    return [ROOT / "README.md", *ours, *sorted((package / "how_to").glob("*.md")), *sorted(RESULTS.glob("*.md"))]


def main() -> None:
    for page in pages():
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    for measurement in PLOTTED:
        measurement.plot()


if __name__ == "__main__":
    main()

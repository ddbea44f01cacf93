# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What pages say of keys, strategies and measurements, against the code and the rows of the results."""

import csv
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext import build_lock
from deepspeed_ext.config import keys
from deepspeed_ext.config.refused import REFUSED
from deepspeed_ext.loco.settings import LocoSettings, UpdateSettings
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from scripts import ROOT
from tests.harness.documents import Page, page, pages

pytestmark = pytest.mark.quick

RESULTS = ROOT / "tests" / "perf" / "results"
KEYS_PAGE, STRATEGIES_PAGE = "deepspeed_ext/config/README.md", "deepspeed_ext/zero/README.md"
SHAPED_AS_KEYS = re.compile(r"`((?:paro|stage3|zeropp?|mics)_\w+)`")
NO_KEYS = {"zero_to_fp32", "zero_optimization"}


def results(program: str) -> Page:
    """The page of a benchmark's results."""
    return page(f"tests/perf/results/{program}.md")


def rows_of(file: str) -> list[dict[str, str]]:
    with (RESULTS / file).open(newline="", encoding="utf-8") as kept:
        return list(csv.DictReader(kept))


def defaults_case() -> dict[str, Any]:
    """Defaults of the section's fields: ours and DeepSpeed's."""
    from deepspeed_ext.config.section import ParoZeroConfig
    from deepspeed_ext.planner.fastest import STATES_SHARE

    fields = ParoZeroConfig.model_fields
    found = {field.alias or name: field.default for name, field in fields.items()}
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float | str | None)} | {
        "share": STATES_SHARE
    }


@pytest.fixture(scope="module")
def defaults(ranks: Any) -> dict[str, Any]:
    (found,) = ranks(1).run(defaults_case)
    return dict(found)


def test_the_table_of_keys_is_the_code(defaults: dict[str, Any]) -> None:
    table = {row[0].strip("`"): row[1].strip("`") for row in page(KEYS_PAGE).rows("key")}
    assert set(table) == {*keys.OURS, *keys.REMOVED, keys.QUANTIZED, keys.THRESHOLD}
    assert table[keys.MEMORY] == f"{defaults['share']:.0%} of the device's free memory".replace("%", " %")
    assert table[keys.DECISION] == defaults[keys.DECISION] == keys.DECISION_FILE
    for key in (keys.QUANTIZED, keys.THRESHOLD):
        assert json.loads(table[key]) == defaults[key], key
    assert defaults[keys.LEAF_BYTES] is None and table[keys.LEAF_BYTES] == "0"
    for name in ("deepspeed_ext/leaf/README.md", "deepspeed_ext/planner/README.md"):
        assert {row[0].strip("`"): row[1].strip("`") for row in page(name).rows("key")}.items() <= table.items()


def test_keys_that_pages_name_exist(defaults: dict[str, Any]) -> None:
    known = {*defaults, *keys.OURS, *keys.REMOVED, *NO_KEYS}
    for one in pages():
        if not one.name.startswith("patches/"):
            assert set(SHAPED_AS_KEYS.findall(one.text)) <= known, one.name


def test_the_tables_of_loco_are_the_code() -> None:
    for heading, settings in (("## Keys", LocoSettings()), ("## Updates between groups in 4 bits", UpdateSettings())):
        rows = page("deepspeed_ext/loco/README.md").section(heading).rows("sub-key")
        assert {row[0].strip("`"): json.loads(row[1]) for row in rows} == dataclasses.asdict(settings)


def test_what_is_refused_is_named_under_limits() -> None:
    limits = page(STRATEGIES_PAGE).section("## Limits").text
    named = {"zenflow": "ZenFlow", "super_offload": "SuperOffload", "device": "NVMe offload"}
    named |= {
        "expert_parallel": "expert parallelism",
        "compile": "compile.deepcompile",
        "reduce_scatter": "`reduce_scatter: false` with LoCo",
    }
    for row in REFUSED:
        last = row.key.split()[-1].split(".")[-1]
        assert named.get(last, last) in limits, row.key


def value_of(formula: str, **names: float) -> float:
    """The value of a formula as pages write it: ``(s+1) a M``, ``2Ψ + 2Ψ/m + 12Ψ/n``."""
    product = re.sub(r"(?<=[\w)]) (?=[a-zA-Z(])", " * ", formula)
    product = re.sub(r"(\d)(?=[sΨ])", r"\1*", product)
    return float(eval(product.replace("Ψ", "P"), {}, names))


def test_the_tables_of_strategies_are_the_code() -> None:
    one = page(STRATEGIES_PAGE)
    known = {name: row for row in one.rows("strategy") for name in row[0].split(", ")}
    assert set(known) == set(STRATEGIES)
    for name, (_, known_as, stage) in known.items():
        strategy = STRATEGIES[name]
        ours = strategy.known_as.replace("Megatron ", "Megatron's ").replace("FSDP ", "FSDP's ")
        assert known_as.replace("`", "") == ours, name
        assert int(stage) == strategy.stage
    n, m, s, psi = 12, 4, 5, 1000
    sizes, states = GroupSizes(n, m), ModelStates.of(psi)
    names = {"n": n, "m": m, "s": s, "P": psi, "M": 2 * psi, "a": (m - 1) / m, "b": (n // m - 1) / n}
    formulas = {row[0].split(",")[0]: row[1:] for row in one.section("## Memory and bytes").rows("strategy")}
    assert set(formulas) == set(STRATEGIES)
    for name, (memory, intra, inter) in formulas.items():
        strategy = STRATEGIES[name]
        volume = strategy.volume(sizes, states, s)
        assert value_of(memory, **names) == pytest.approx(strategy.memory(sizes, states).total), name
        assert value_of(intra, **names) == pytest.approx(volume.intra), name
        assert value_of(inter, **names) == pytest.approx(volume.inter), name


def test_the_readmes_measurements_have_their_rows() -> None:
    methods = {
        "ZeRO-3, lean": "ZeRO-3",
        "ZeRO-3, defaults": "ZeRO-3 defaults",
        "FSDP2 HSDP": "HSDP",
        "HSDP, kept": "HSDP kept",
    }
    shown = page("README.md").section("## What was measured").rows("")
    assert len(shown) == 8
    rows = {
        (row["method"], row["link_mbit"]): row
        for row in rows_of("emulated_cluster.csv")
        if row["setting"] == "2x2-large-4"
    }
    for name, limited, unlimited, held in shown:
        method = methods.get(name, name)
        for seconds, link in ((limited, "100"), (unlimited, "unlimited")):
            decimals = len(seconds.partition(".")[2])
            assert float(seconds) == round(float(rows[method, link]["seconds_median"]), decimals), (name, link)
        row = rows[method, "100"]
        states = sum(float(row[f"{state}_bytes"]) for state in ("parameter", "gradient", "optimizer"))
        assert int(held) == round(states / 1e6), name
        assert row["date"].startswith("2026-11-23") and "tests.perf.emulated_cluster" in row["command"]


def test_measurements_of_pipelines_and_leaf_modules_have_their_rows() -> None:
    pipelines = {row["case"]: row for row in rows_of("pipelines.csv") if row["mbit"] == "100"}
    for name, *cells in page("deepspeed_ext/pipeline/README.md").section("## What was measured").rows(""):
        for cell, column in zip(cells, ("parameters", "gradients", "inter"), strict=True):
            shown = cell.removesuffix(" MB")
            assert shown == f"{float(pipelines[name][column]) / 1e6:#.3g}", (name, column)
    cases = {
        "plain PyTorch": "plain",
        "ZeRO-3": "zero3",
        "ZeRO-3, best leaf modules set by hand": "zero3 + leaf: Layer, threshold 1",
        "`stage3_leaf_bytes: true`": "ours",
    }
    leaf = {row["case"]: row for row in rows_of("leaf_overhead.csv") if row["ranks"] == "1"}
    shown = page("deepspeed_ext/leaf/README.md").section("## What was measured").rows("")
    assert {name for name, *_ in shown} == set(cases)
    for name, milliseconds, of_stock in shown:
        row = leaf[cases[name]]
        numbers = [round(float(row[f"milliseconds_{part}"])) for part in ("median", "quartile_1", "quartile_3")]
        assert milliseconds == "{} ({} to {})".format(*numbers), name
        assert not of_stock or float(of_stock) == round(float(row["of_stock"]), 2), name


def test_what_is_said_of_a_small_models_updates_has_its_rows() -> None:
    text = " ".join(results("overlap").text.split())
    whole, windows = rows_of("first_module.csv")
    for what, between in (("waited", " s, median of 5 turns"), ("longer", " s")):
        for row, unit in ((whole, between), (windows, " s")):
            median, least, most = (f"{float(row[key]):.3g}" for key in (what, f"least {what}", f"most {what}"))
            assert f"{median}{unit} ({least} to {most})" in text, (row["method"], what)
    assert f"take {float(whole['link']):.3g} s" in text and f"{float(windows['first']):.2%}".replace("%", " %") in text


def test_what_is_said_of_loco_has_its_rows() -> None:
    text = " ".join(page("deepspeed_ext/loco/README.md").section("## What was measured").text.split())
    rows = {
        row["method"]: float(row["seconds_median"])
        for row in rows_of("emulated_cluster.csv")
        if (row["setting"], row["link_mbit"]) == ("2x2-large-4", "100")
    }
    ratios = [f"{rows[f'{name} + LoCo'] / rows[name]:.2f}" for name in ("NNG", "NIG", "IIG")]
    assert "a step of NNG takes {} of the time, of NIG {}, of IIG {}".format(*ratios) in text
    kernels = [row for row in rows_of("loco_kernels.csv") if "compress" in row["case"]]
    assert all(0.3 <= float(row["of_copy_bandwidth"]) < 0.65 for row in kernels)
    assert all(44.5 <= float(row["times_faster_than_pytorch"]) < 95.5 for row in kernels)
    assert "0.3 to 0.6 of a copy's bandwidth, 45 to 95 times" in text
    losses = {(row["optimizer"], row["method"]): row for row in rows_of("loco_convergence.csv")}
    for optimizer in ("AdamW", "SGD"):
        by_seed = losses[optimizer, "LoCo"]["relative_difference_by_seed"].split()
        assert all(abs(float(one)) < 0.002 for one in by_seed), optimizer
    worse = [f"{float(losses[optimizer, 'int4/4096']['relative_difference']):.1%}" for optimizer in ("AdamW", "SGD")]
    assert "it is {} and {} worse".format(*(one.replace("%", " %") for one in worse)) in text


def test_what_is_said_of_steps_with_an_outer_optimizer_has_its_rows() -> None:
    rows = rows_of("outer_cluster.csv")
    seconds = {(row["method"], row["link_mbit"]): float(row["seconds_median"]) for row in rows}
    ours, peer = "III outer, streaming", "FSDP2 outer"
    both, exact = "NIG + LoCo + updates", "III outer, 32 bits"

    def ratio(method: str, link: str, other: str = ours) -> float:
        return seconds[method, link] / seconds[other, link]

    def own(method: str, link: str) -> float:
        return seconds[method, link] / seconds[method, "unlimited"]

    section = results("outer_cluster")
    text = " ".join(section.text.split())
    assert {f"{ratio(method, '20'):.0f}" for method in ("DDP", "HSDP")} == {"75"}
    for said in (
        f"streaming, takes {seconds[ours, '20']:.3f} s. {both} takes {ratio(both, '20'):.1f} times as long",
        f"FSDP2 with the outer step {ratio(peer, '20'):.1f} times, DDP and HSDP 75 times",
        f"streaming is at {own(ours, '20'):.2f} and meets both",
        f"it is {ratio(both, '20', 'III outer'):.1f} times as fast, "
        f"and at {own('III outer', '20'):.2f} of its own time",
        f"streaming takes {seconds[ours, '5']:.3f} s, {own(ours, '5'):.2f} of its own time without a limit",
        f"{both} takes {ratio(both, '5'):.1f} times as long, FSDP2 with the outer step {ratio(peer, '5'):.1f} times, "
        f"HSDP {ratio('HSDP', '5'):.0f} times and DDP {ratio('DDP', '5'):.0f} times",
        f"{both} takes {ratio(both, '100'):.1f} times as long as streaming",
        f"FSDP2 with the outer step {ratio(peer, '100'):.1f} times. Without",
        f"at {ratio('DDP', 'unlimited'):.2f} of the time of streaming",
        f"outer step takes {ratio(peer, 'unlimited'):.2f} of it",
        f"III takes {seconds[exact, '20']:.3f} s at 20 Mbit/s, "
        f"and FSDP2 with the outer step {seconds[peer, '20']:.3f} s",
    ):
        assert said in text, said
    for row in rows:
        sent = float(row["link_bytes"]) / float(row["header_factor"])
        assert not row["formula_bytes"] or abs(sent / float(row["formula_bytes"]) - 1) < 0.003, row["method"]
        assert row["method"] != exact or float(row["weights_difference"]) == 0
    zero = " ".join(page(STRATEGIES_PAGE).section("## An outer optimizer").text.split())
    assert f"{ratio(both, '20'):.1f} times as fast as one of {both}" in zero
    assert f"{ratio(peer, '20'):.1f} times as fast as one of FSDP2" in zero


def test_what_is_said_of_a_mixture_has_its_rows() -> None:
    rows = {row["method"]: row for row in rows_of("mixture_cluster.csv")}

    def ratio(method: str, other: str) -> float:
        return float(rows[other]["seconds_median"]) / float(rows[method]["seconds_median"])

    def megabytes(*columns: str, method: str = "AutoEP, NIG") -> float:
        return sum(float(rows[method][column]) for column in columns) / 1e6

    held = [f"{state}_bytes" for state in ("parameter", "gradient", "optimizer")]
    section = results("mixture_cluster")
    text = " ".join(section.text.split())
    ours, both = "AutoEP, NIG", "AutoEP, NIG + LoCo + updates"
    for said in (
        f"exact, is {ratio(ours, 'ZeRO-3'):.1f} times as fast as ZeRO-3, as NIG without AutoEP is, and with LoCo and "
        f"updates in 4 bits {ratio(both, 'ZeRO-3'):.1f} times",
        f"it is {ratio(ours, 'AutoEP, ZeRO-2'):.1f} and {ratio(both, 'AutoEP, ZeRO-2'):.1f} times as fast",
        f"{megabytes('formula_expert_bytes'):.1f} of the {megabytes('formula_bytes'):.1f} MB are of experts",
        f"{megabytes(*held):.0f} MB instead of {megabytes(*held, method='NIG'):.0f} under NIG",
    ):
        assert said in text, said
    bound = re.search(r"\*\*Bytes\*\* are within ([\d.]+) %.* agree within ([\d.e-]+) of the largest weight", text)
    assert bound is not None
    for name, row in rows.items():
        sent = float(row["link_bytes"]) / float(row["header_factor"])
        apart = abs(sent / float(row["formula_bytes"] or sent) - 1)
        assert round(100 * apart, 1) <= float(bound[1]), name
        assert "LoCo" in name or float(row["weights_difference"]) < float(bound[2])


def test_what_is_said_of_parameters_in_host_memory_has_its_rows() -> None:
    rows = {(row["setting"].partition("-")[2], row["method"]): row for row in rows_of("host_parameters.csv")}

    def ratio(setting: str, method: str, other: str = "ZeRO-3", what: str = "median") -> float:
        return float(rows[setting, other][f"seconds_{what}"]) / float(rows[setting, method][f"seconds_{what}"])

    section = results("host_parameters")
    text = " ".join(section.text.split())
    for said in (
        f"ING is {ratio('full-100', 'ING'):.1f} times as fast as ZeRO-3, IIG {ratio('full-100', 'IIG'):.1f} times.",
        f"IIG is {ratio('full-100', 'IIG', 'GGG'):.1f} times as fast as GGG",
        f"ING is {ratio('LoRA-100', 'ING'):.1f} times as fast as ZeRO-3, IIG {ratio('LoRA-100', 'IIG'):.1f} times.",
        f"By the floors, ING would be {ratio('LoRA-100', 'ING', what='floor'):.0f} times as fast",
        f"By the floors, ING would be {ratio('LoRA-15', 'ING', what='floor'):.0f} times as fast",
        f"ING is {ratio('LoRA-15', 'ING'):.1f} times as fast as ZeRO-3, IIG {ratio('LoRA-15', 'IIG'):.1f} times.",
    ):
        assert said in text, said
    for row in rows.values():
        assert float(row["weights_difference"]) < 1e-6
        assert abs(float(row["copied_bytes"]) / float(row["copied_formula_bytes"]) - 1) < 0.001, row["method"]
    zero = " ".join(page(STRATEGIES_PAGE).section("## Parameters in host memory").text.split())
    full, lora = ratio("full-100", "IIG"), ratio("LoRA-100", "IIG")
    assert f"IIG is {full:.1f} times as fast as ZeRO-3 with `offload_param` in full training, and {lora:.1f}" in zero


def test_the_table_of_kernels_is_that_of_the_rows() -> None:
    rows = {row["case"]: row for row in rows_of("loco_kernels.csv") if "compress" not in row["case"]}
    shown = results("loco_kernels").rows("kernel")
    assert [name for name, *_ in shown] == list(rows)
    for name, *figures in shown:
        seconds, copy, share, times = (
            float(rows[name][key])
            for key in ("seconds", "copy_seconds", "of_copy_bandwidth", "times_faster_than_pytorch")
        )
        assert figures == [f"{seconds * 1e3:.1f}", f"{copy * 1e3:.1f}", f"{share:.2f}", f"{times:.0f}"], name


def test_what_is_said_of_updates_has_its_rows() -> None:
    trained = {(row["optimizer"], row["method"]): row for row in rows_of("updates_convergence.csv")}
    section = results("updates_convergence")
    shown = [("AdamW", *cells) for cells in section.rows("method")]
    shown += [("Muon", *cells) for cells in section.rows("with Muon")]
    assert {(optimizer, name) for optimizer, name, *_ in shown} == set(trained)
    for optimizer, name, loss, spread, mean, seeds, sent in shown:
        row = trained[optimizer, name]
        differences = [row["relative_difference"], *row["relative_difference_by_seed"].split()]
        assert [mean, *seeds.split(", ")] == [f"{100 * float(one):+.2f}" for one in differences], name
        assert [loss, spread] == [f"{float(row[column]):.4f}" for column in ("final_loss", "seed_spread")], name
        assert sent == f"{float(row['inter_bytes']) / 1e3:.1f}", name
    columns = ("changed", "entropy", "nibble", "pairs", "bitmap", "gaps")
    coded = [row for row in rows_of("lossless_updates.csv") if row["weights"].startswith("all")]
    for cells, row, worst in zip(
        results("lossless_updates").rows("learning rate"), coded[::2], coded[1::2], strict=True
    ):
        tuning = ", tuning" if row["tuning"] == "True" else ""
        assert cells[0] == row["learning_rate"] + tuning and row["weights"] == "all" != worst["weights"]
        numbers = [*(row[column] for column in columns), worst["pairs"]]
        assert cells[1:] == [f"{float(number):.2f}" for number in numbers], cells[0]


def test_what_grows_has_its_rows() -> None:
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows_of("growth.csv"):
        at = row["ranks"], row["method"].replace("1", "ZeRO-1").replace("2", "ZeRO-2").replace("3", "ZeRO-3")
        made_only = float(row["seconds_step"]) == 0 and at in found
        found[at] = {**found[at], "seconds_creation": row["seconds_creation"]} if made_only else row
    section = results("growth")
    assert len(section.rows("")) == 12
    for name, *cells in section.rows(""):
        small, large = found["64", name], found["16384", name]
        assert float(large["mb"] or 0) < 64
        for cell, column, form in zip(
            (cells[0], *cells[2:]),
            ("groups", "seconds_creation", "seconds_step", "mb"),
            ("", ".2g", ".2g", ".0f"),
            strict=True,
        ):
            both = [format(float(row[column]), form or ".0f") for row in (small, large) if float(row[column] or 0)]
            assert cell.rstrip(",") == ", ".join(dict.fromkeys(both)), (name, column)
        messages = {
            sum(int(row[f"messages_{kind}"]) for kind in ("intra", "inter", "world")) for row in (small, large)
        }
        assert int(cells[1]) in messages and len(messages - {0}) == 1, name


@pytest.mark.parametrize("program", ["at_scale", "predicted_clusters", "predicted_host_parameters"])
def test_predictions_are_what_the_planner_says_today(tmp_path: Path, program: str) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('only pictures need it')\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", f"tests.perf.{program}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    tables = results(program).text.split("(The script prints the other regimes")[0]
    lines = [line for line in tables.splitlines() if line.startswith(("| ", "**"))]
    assert len(lines) > 20
    assert not [line for line in lines if line not in said]


def test_messages_that_pages_quote() -> None:
    text = page("deepspeed_ext/troubleshooting.md").text + page("deepspeed_ext/debugging.md").text
    assert f"warns after {build_lock._UNKNOWN_SECONDS:.0f} seconds" in text
    assert "s old, the lock file of a process that builds" in inspect.getsource(build_lock)
    assert f"after {build_lock._UNKNOWN_SECONDS:.0f} seconds" in page("csrc/README.md").text
    quoted = {
        "has no key": "deepspeed_ext/values.py",
        "contradicts": "deepspeed_ext/config/validate.py",
        "is at the top level of the configuration; it belongs into": "deepspeed_ext/config/validate.py",
        "paro_group_size must divide the data-parallel size": "deepspeed_ext/strategy.py",
        "paro_strategy needs the number of ranks per node": "deepspeed_ext/comm/process_groups.py",
        "cannot be combined with": "deepspeed_ext/config/refused.py",
        "groups of one rank": "deepspeed_ext/zero/factory.py",
        "one group": "deepspeed_ext/zero/factory.py",
        "which gather parameters together": "deepspeed_ext/zero/sharded/coordinator.py",
        "enters its experts in another order than theirs": "deepspeed_ext/leaf/chunks.py",
    }
    for words, file in quoted.items():
        assert words in text and words in (ROOT / file).read_text(encoding="utf-8"), words

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The pages of claims: each claim has its figures, its date and its command from the rows."""

import re
import shlex
import statistics
from pathlib import Path

import pytest

from scripts import ROOT
from tests.harness.documents import Page, page
from tests.perf import cluster
from tests.perf.lib import records, studies
from tests.perf.lib.records import RESULTS, read_rows

pytestmark = pytest.mark.quick

PERF = ROOT / "tests" / "perf"
PAGE = "tests/perf/README.md"
MOST_WORDS = 1000
Key = tuple[str, ...]


def rows(program: str, *keys: str) -> dict[Key, dict[str, str]]:
    """The rows of a program by some of their columns; of equal ones the newest."""
    return {tuple(row[key] for key in keys): row for row in read_rows(RESULTS / f"{program}.csv")}


def states(row: dict[str, str]) -> float:
    """Bytes of a method's model states."""
    return sum(float(row[f"{state}_bytes"]) for state in ("parameter", "gradient", "optimizer"))


def dates(program: str) -> set[str]:
    """Days of a program's rows, or of the starts of its trainings, whose files take the place of rows."""
    if program == studies.STUDIES["long"].file:
        return {part["date"][:10] for run in studies.read_runs(studies.STUDIES["long"]) for part in run.parts}
    return {day[:10] for (day,) in rows(program, "date")}


def results_of(command: str) -> str:
    """The name of the file that a command's rows are in, without the ending."""
    _, _, module, *words = shlex.split(command.strip("`"))
    name = module.removeprefix("tests.perf.")
    if name == "cluster":
        name = cluster.measurement(cluster.parse_arguments(words).name).file
    elif name == "convergence":
        name = studies.STUDIES[words[0]].file
    return name.removesuffix(".csv")


def claims() -> list[list[str]]:
    """Claim, date, command and link of each row."""
    lines = [line for line in page(PAGE).section("## What is claimed").text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "claim"]


def shown(program: str) -> Page:
    """The page of its results."""
    return page(f"tests/perf/results/{program}.md")


def test_the_page_is_short_and_leads_to_all_results() -> None:
    one = page(PAGE)
    assert len(one.text.split()) <= MOST_WORDS
    linked = {Path(target).name for target in one.links() if target.startswith("results/")}
    assert linked == {path.name for path in (PERF / "results").glob("*.md")}
    programs = {path.stem for path in PERF.glob("*.py")} - {"__init__"}
    assert programs == {name for name in programs if re.search(rf"\b{name}\b", one.text)}


def test_each_claim_has_rows_of_its_date() -> None:
    found, program = claims(), ""
    assert len(found) == 22
    for claim, date, command, _ in found:
        program = program if command == "the same" else results_of(command)
        assert set(date.split(", ")) <= dates(program), claim


@pytest.mark.parametrize("path", sorted((PERF / "results").glob("*.md")), ids=lambda path: path.stem)
def test_a_page_of_results_begins_with_dates_of_its_rows(path: Path) -> None:
    said = path.read_text(encoding="utf-8").splitlines()[2]
    days = set(re.findall(r"\d{4}-\d\d-\d\d", said))
    assert days and said.startswith("*"), said
    for kept in (path.with_suffix(".csv"), path.with_suffix("")):
        if kept.exists():
            assert days <= dates(path.stem) and f"({kept.name})" in said


def test_commands_of_rows_name_no_folder_of_a_machine() -> None:
    words = shlex.split("/usr/bin/python3 -m tests.perf.cluster --csv /tmp/rows.csv --rounds 2 --log log --json=/x")
    assert records.command(words) == "python -m tests.perf.cluster --rounds 2 --log log"
    for path in (PERF / "results").rglob("*.*"):
        if path.suffix in (".csv", ".json"):
            assert not re.search(r" /\w+/", path.read_text(encoding="utf-8")), path


def test_figures_of_claims_have_their_rows() -> None:
    text = " ".join(page(PAGE).text.split())
    steps = rows("emulated_cluster", "setting", "method", "link_mbit")

    def seconds(method: str, link: str = "100", setting: str = "2x2-large-4") -> float:
        return float(steps[setting, method, link]["seconds_median"])

    def held(method: str, setting: str = "2x2-large-4") -> float:
        return states(steps[setting, method, "100"])

    few = "NIG + LoCo + updates"
    nig, muon = seconds("NIG"), "2x2-large-4-muon"
    bf16, hsdp, kept = "2x2-large-4-bf16", "HSDP (reduces in bf16)", "HSDP kept (reduces in bf16)"
    gpt2 = rows("gpt2_cluster", "setting", "method", "link_mbit")
    under = {row[0]: row[1] for row in shown("overlap").section("## Seconds of a step").rows("")}
    outer = rows("outer_cluster", "method", "link_mbit")
    host = rows("host_parameters", "setting", "method")
    mixture = rows("mixture_cluster", "method")
    saves = [row for row in shown("saves").rows("parameters, Mbit/s, disk") if plain(row[1])]
    aside = [float(row[6].removesuffix("%")) for row in saves if "slow" in row[0]]
    sharded = [row for row in saves if "real" in row[0] and row[1].startswith("IIG")]
    late = " and ".join(row[6].removesuffix("%") for row in sharded)
    ending = rows("updates_convergence", "optimizer", "method")
    [longer] = (
        float(row[6])
        for row in shown("outer_convergence").rows("inside")
        if row[:3] == ["Muon", "2", "NIG + LoCo + updates"]
    )
    alone = 100 * max(map(float, ending["AdamW", "NIG + LoCo"]["relative_difference_by_seed"].split()))
    apart = [abs(float(row[8])) for row in shown("outer_convergence").rows("inside") if row[8]]
    choices = [row[-2:] for row in shown("emulated_cluster").rows("setting")]
    exact, loco = (max(float(row[i]) for row in choices if row[i]) for i in (0, 1))
    kernels = [row for row in rows("loco_kernels", "case").values() if "compress" not in row["case"]]
    reached = [float(row["of_copy_bandwidth"]) for row in kernels]
    assert exact <= 1.07 and loco <= 1.16 and len(choices) == 15

    def gpt(method: str) -> tuple[float, float]:
        """Seconds of a step of GPT-2, and bytes of its states."""
        row = gpt2["2x2-gpt2", method, "100"]
        return float(row["seconds_median"]), states(row)

    def step(method: str, link: str = "20") -> float:
        return float(outer[method, link]["seconds_median"])

    def times(setting: str) -> float:
        return float(host[setting, "ZeRO-3"]["seconds_median"]) / float(host[setting, "ING"]["seconds_median"])

    def mixed(method: str) -> float:
        return float(mixture["ZeRO-3",]["seconds_median"]) / float(mixture[method,]["seconds_median"])

    def end(optimizer: str, method: str) -> float:
        return 100 * float(ending[optimizer, method]["relative_difference"])

    ours = "III outer, streaming"
    for said in (
        f"NIG is {seconds('ZeRO-3') / nig:.1f} times as fast as lean ZeRO-3, "
        f"{seconds('ZeRO-3 defaults') / nig:.1f} times as its defaults, "
        f"{seconds('ZeRO-1') / nig:.2f} times as ZeRO-1, "
        f"{seconds('DDP') / nig:.2f} times as DDP, {seconds('HSDP') / nig:.2f} times as HSDP",
        f"IIG is {seconds('HSDP') / seconds('IIG'):.2f} times as fast as HSDP, "
        f"in {100 * (1 - held('IIG') / held('HSDP')):.0f} % less memory",
        f"HSDP that keeps parameters takes {seconds('HSDP kept') / nig:.2f} of NIG's seconds "
        f"in {held('HSDP kept') / held('NIG'):.2f} times its memory",
        f"make NIG {nig / seconds(few):.1f} times as fast",
        f"In bf16, NIG takes {seconds('NIG', setting=bf16) / seconds(hsdp, setting=bf16):.2f} of HSDP's seconds, "
        f"in {held('NIG', bf16) / held(hsdp, bf16):.2f} of its memory. HSDP that keeps parameters takes "
        f"{seconds(kept, setting=bf16) / seconds('NIG', setting=bf16):.2f} of NIG's "
        f"in {held(kept, bf16) / held('NIG', bf16):.2f} times its memory",
        f"GPT-2 (124 M, bf16): NIG is {gpt('ZeRO-3')[0] / gpt('NIG')[0]:.1f} times as fast as ZeRO-3, "
        f"{gpt('ZeRO-1')[0] / gpt('NIG')[0]:.2f} times as ZeRO-1, "
        f"or {gpt('ZeRO-1')[0] / gpt(few)[0]:.1f} times with LoCo and updates.",
        f"HSDP that keeps parameters takes {gpt(kept)[0] / gpt('NIG')[0]:.2f} of NIG's seconds "
        f"in {gpt(kept)[1] / gpt('NIG')[1]:.2f} times its memory",
        f"IIG is {seconds('ZeRO-3', setting=muon) / seconds('IIG', setting=muon):.1f} times as fast as ZeRO-3",
        f"a step of NIG takes {under['NIG']} s, of DDP {under['DDP']} s, of HSDP (kept) {under['HSDP kept']} s, "
        f"of ZeRO-3 {under['ZeRO-3']} s",
        f"{step(few) / step(ours):.1f} times as fast at 20 Mbit/s as NIG with LoCo and updates, "
        f"and {step('HSDP') / step(ours):.0f} times as HSDP",
        f"III without streaming: {step(few) / step('III outer'):.1f} times",
        f"ING is {times('2x2-full-100'):.1f} times as fast as ZeRO-3; with LoRA {times('2x2-LoRA-100'):.1f} times, "
        f"at 15 Mbit/s {times('2x2-LoRA-15'):.1f} times",
        f"LoRA at 100 Mbit/s: {times('2x2-LoRA-100'):.1f} times",
        f"AutoEP and NIG is {mixed('AutoEP, NIG'):.1f} times as fast as ZeRO-3, "
        f"with LoCo and updates {mixed('AutoEP, NIG + LoCo + updates'):.1f} times",
        f"in its default order for at most {max(aside)} % of a synchronous one",
        f"for {late} % of a synchronous one where 10 were wanted, which is {sharded[0][5]} s",
        f"updates in 4 bits: {end('AdamW', few):.2f} % from exact training, "
        f"with Muon {end('Muon', few):.2f} % after 400 steps and {longer:.1f} % after [2,100]",
        f"[{alone:.2f} %](results/updates_convergence.md) after 1,000",
        f"sums in 4 bits (NII): {end('AdamW', 'NII + LoCo + updates'):.2f} %",
        f"at most {max(apart)} % from those in 32 bits",
        f"reach {min(reached):.2f} to {max(reached):.2f} of a copy's bandwidth",
        f"ZeRO-1 takes {seconds('ZeRO-1', 'unlimited'):.2f} s for a step and NIG {seconds('NIG', 'unlimited'):.2f} s",
        "costs at most 1.07 times the best measured strategy, 1.16 times with LoCo",
    ):
        assert said in text, said


def plain(method: str) -> bool:
    """Whether it saves beside the training, in its own order."""
    return "asynchronous" in method and "zero_order" not in method


def test_claims_of_one_host_have_their_rows() -> None:
    text = " ".join(page(PAGE).text.split())
    first = {row["method"]: float(row["waited"]) for row in rows("first_module", "method").values()}
    whole, windows = sorted(first.values(), reverse=True)
    coded = {row[0]: row[4] for row in shown("lossless_updates").rows("learning rate")}
    made = {row[0]: row[3].split(", ")[1] for row in shown("growth").rows("")}
    leaf = {row["case"]: row for row in rows("leaf_overhead", "case", "ranks").values() if row["ranks"] == "1"}
    imported = rows("import_cost", "method", "measured")["with the package", "of that ours"]
    bytes_of = {row["case"]: float(row["inter"]) / 1e6 for row in rows("pipelines", "case").values()}
    for said in (
        f"waits {windows:.3g} s for updates instead of {whole:.3g} s",
        f"take {coded['0.001']} bits without loss at a rate of 1e-3, and {coded['1e-05']} at 1e-5",
        f"an engine of NIG in {made['NIG']} s, of ZeRO-2 in {made['ZeRO-2']} s",
        f"leaves {float(leaf['ours']['of_stock']):.2f} of the host time",
        f"alone pays {float(imported['median_ms']):.1f} ms",
        f"receives {bytes_of['NIG']:#.3g} MB from other nodes under NIG, {bytes_of['ZeRO-1']:#.3g} MB under ZeRO-1",
    ):
        assert said in text, said


def test_claims_of_the_long_study_have_their_files() -> None:
    runs = {(run.method, run.seed): run for run in studies.read_runs(studies.STUDIES["long"])}

    def beyond(method: str, than: str, seed: int) -> float:
        return 100 * (runs[method, seed].final_loss / runs[than, seed].final_loss - 1)

    methods = ("NIG + LoCo", "NIG + LoCo + updates", "IIG + LoCo + updates")
    few = [beyond(method, "NIG", seed) for method in methods for seed in (0, 1)]
    chance = -beyond("ZeRO-2, control", "ZeRO-2", 1)
    claim = f"{min(few):.2f} to {max(few):+.2f} % from exact NIG; chance moves ZeRO-2 by {chance:.2f} %"
    assert claim in page(PAGE).text and f"within {max(few):.2f} %" in page("CHANGELOG.md").text
    for run in runs.values():
        assert len(run.losses) == run.steps == 3000 and statistics.fmean(run.losses[:10]) > 3 > 2 > run.final_loss


def test_the_readmes_measurements_have_their_rows() -> None:
    methods = {
        "ZeRO-3, lean": "ZeRO-3",
        "ZeRO-3, defaults": "ZeRO-3 defaults",
        "FSDP2 HSDP": "HSDP",
        "HSDP, kept": "HSDP kept",
    }
    table = page("README.md").section("## What was measured").rows("")
    assert len(table) == 8
    found = rows("emulated_cluster", "setting", "method", "link_mbit")
    for name, limited, unlimited, held in table:
        method = methods.get(name, name)
        for seconds, link in ((limited, "100"), (unlimited, "unlimited")):
            decimals = len(seconds.partition(".")[2])
            row = found["2x2-large-4", method, link]
            assert float(seconds) == round(float(row["seconds_median"]), decimals), (name, link)
        row = found["2x2-large-4", method, "100"]
        assert int(held) == round(states(row) / 1e6) and row["date"].startswith("2026-11-23"), name

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The pages of claims: each claim has its figures, its date and its command from the rows."""

import re
import shlex
import statistics
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts import ROOT
from tests.harness.documents import page
from tests.perf import cluster, sum_errors, tables
from tests.perf.lib import network, paper, records, studies, tabulated
from tests.perf.lib.records import RESULTS, Row, read_rows, seconds_of
from tests.perf.lib.settings import BOTH, EMBEDDINGS, LOCO

pytestmark = pytest.mark.quick

PERF = ROOT / "tests" / "perf"
PAGE = "tests/perf/README.md"
MOST_WORDS = 1000
OUTER, LONG = studies.STUDIES["outer"], studies.STUDIES["long"]


def dates(program: str) -> set[str]:
    """Days of a program's rows, or of the starts of its trainings, whose files take the place of rows."""
    if program == LONG.file:
        return {part["date"][:10] for run in studies.read_runs(LONG) for part in run.parts}
    return {row["date"][:10] for row in read_rows(RESULTS / f"{program}.csv")}


def results_of(command: str) -> str:
    """The name of the file that a command's rows are in, without the ending."""
    name, *words = shlex.split(command.split("`")[1])
    if name == "cluster":
        name = cluster.measurement(cluster.parse_arguments(words).name).file
    elif name == "convergence":
        name = studies.STUDIES[words[0]].file
    return name.removesuffix(".csv")


def test_the_page_is_short_and_leads_to_all_results() -> None:
    claims_page = page(PAGE)
    assert len(claims_page.text.split()) <= MOST_WORDS
    linked = {Path(target).name for target in claims_page.links() if target.startswith("results/")}
    assert linked == {path.name for path in (PERF / "results").glob("*.md")}
    programs = {path.stem for path in PERF.glob("*.py")} - {"__init__"}
    assert programs == {name for name in programs if re.search(rf"\b{name}\b", claims_page.text)}


def test_each_claim_has_rows_of_its_date() -> None:
    lines = [line for line in page(PAGE).section("## Claims").text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rows = [row for row in cells if row[0] != "claim"]
    assert len(rows) == 26
    for claim, date, command in rows:
        assert set(date.split(", ")) <= dates(results_of(command)), claim


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


def rows(file: str, setting: str = "", mbit: float | None = 100) -> dict[str, Row]:
    """Rows of a file by method: of a setting, if one is given, at a rate."""
    rows = (row for row in records.read(file) if row.mbit == mbit)
    return {row.method: row for row in rows if row.setting == (setting or row.setting)}


def times(rows_by_method: dict[str, Row], method: str, other: str) -> float:
    return rows_by_method[other].median / rows_by_method[method].median


def share(rows_by_method: dict[str, Row], method: str, other: str) -> float:
    """A method's memory as a share of another's."""
    return rows_by_method[method].memory / rows_by_method[other].memory


def table(name: str) -> dict[str, list[str]]:
    """Lines of a generated table, by their first cell."""
    return {line[0]: line for line in tables.TABLES[name]()[1]}


def missing(sentences: Iterable[str], name: str = PAGE) -> list[str]:
    """Sentences that a page does not have."""
    text = " ".join(page(name).text.split())
    return [said for said in sentences if said not in text]


def test_figures_of_emulated_networks_have_their_rows() -> None:
    few = "NIG" + BOTH
    fp32, bf16 = (rows(tables.CLUSTER, f"2x2-large-4{form}") for form in ("", "-bf16"))
    gpt2, free = rows("gpt2_cluster.csv", "2x2-gpt2"), rows(tables.CLUSTER, "2x2-large-4", None)
    outer, mixture = rows("outer_cluster.csv", mbit=20), rows("mixture_cluster.csv")
    full, lora = (rows("host_parameters.csv", f"2x2-{kind}-100") for kind in ("full", "LoRA"))
    slow = rows("host_parameters.csv", "2x2-LoRA-15", 15)
    under, piped = table("overlap-seconds"), {method: line[3] for method, line in table("pipelines").items()}
    pipes = rows("pipelines.csv")
    hops = [1 / float(table("collectives")[f"{at}, all-gather, 1 x 64 MiB"][5]) for at in ("2x8", "8x2")]
    apart_by = {line[2]: float(line[6]) for line in tables.TABLES["ablation"]()[1]}
    predicted, emulated = (table("paper-rates")[name][3].split(" of ")[0] for name in ("200 Gbit/s", "emulated"))
    saved = records.read("saves.csv")
    aside = [row for row in saved if "asynchronous" in row.method]
    worst = max(tabulated.stopped_share(row, saved) or 0.0 for row in aside if row.more["disk"] == "slow")
    missed = [row for row in aside if row.more["disk"] == "real" and row.method.startswith("IIG")]
    late = max(100 * (tabulated.stopped_share(row, saved) or 0.0) for row in missed)
    choices = [line[-2:] for line in tables.TABLES["all"]()[1]]
    exact, loco = (max(float(line[i]) for line in choices if line[i]) for i in (0, 1))
    assert exact <= 1.07 and loco <= 1.10 and len(choices) == 15
    slowest, slow_link = (rows("network.csv", "2x2-curve-4", rate) for rate in (5, 100))
    hsdp, kept = "HSDP (reduces in bf16)", "HSDP kept (reduces in bf16)"
    uneven = rows("speeds.csv", mbit=1000)
    held = [share(fp32, "NIG", peer) for peer in ("ZeRO-3", "ZeRO-3 defaults", "ZeRO-1", "DDP", "HSDP")]
    shares = [1 / times(uneven, "NIG, 8 and 4", peer) for peer in ("NIG", "ZeRO-1", "HSDP")]
    sentences = (
        "takes {:.2f} of its seconds with 6 and 6, {:.2f} of ZeRO-1's, {:.2f} of HSDP's".format(*shares),
        f"{predicted} of PaRO's {len(paper.CLAIMS)} ratios are predicted within 15 %, {emulated} emulated",
        f"4,096 costs {apart_by['block 4096']:.1f} %, no feedback {apart_by['no errors']:.2f} %",
        "two hops take {:.2f} of a flat ring's seconds on 2x8 ranks, {:.2f} on 8x2".format(*hops),
        f"N-I-G is {times(fp32, 'NIG', 'ZeRO-3'):.1f} times as fast as ZeRO-3 without caching, "
        f"{times(fp32, 'NIG', 'ZeRO-3 defaults'):.1f} times as its defaults, "
        f"{times(fp32, 'NIG', 'ZeRO-1'):.2f} times as ZeRO-1, {times(fp32, 'NIG', 'DDP'):.2f} times as DDP, "
        f"{times(fp32, 'NIG', 'HSDP'):.2f} times as HSDP, "
        "in {:.2f}, {:.2f}, {:.2f}, {:.2f}, {:.2f} of their memory".format(*held),
        f"HSDP that keeps parameters takes {times(fp32, 'NIG', 'HSDP kept'):.2f} of N-I-G's seconds "
        f"(in bf16 {times(bf16, 'NIG', kept):.2f}, GPT-2 {times(gpt2, 'NIG', kept):.2f}) "
        f"in {share(fp32, 'HSDP kept', 'NIG'):.2f} times its memory ({share(gpt2, kept, 'NIG'):.2f})",
        f"make N-I-G {times(fp32, few, 'NIG'):.1f} times as fast",
        f"takes {times(slowest, 'HSDP kept', few):.2f} of the seconds of HSDP kept at 5 Mbit/s "
        f"and {times(slow_link, 'HSDP kept', few):.2f} at 100; "
        f"from {network.end_of_gain(records.read(network.FILE))[1]:.0f} Mbit/s on, nothing is gained",
        f"In bf16, N-I-G takes {times(bf16, hsdp, 'NIG'):.2f} of HSDP's seconds "
        f"in {share(bf16, 'NIG', hsdp):.2f} of its memory, {times(bf16, kept, 'NIG'):.2f} of HSDP kept's "
        f"in {share(bf16, 'NIG', kept):.2f}",
        f"N-I-G is {times(gpt2, 'NIG', 'ZeRO-3'):.1f} times as fast as ZeRO-3 without caching, "
        f"in {share(gpt2, 'NIG', 'ZeRO-3'):.2f} times its memory; {times(gpt2, 'NIG', 'ZeRO-1'):.2f} times as ZeRO-1, "
        f"or {times(gpt2, few, 'ZeRO-1'):.1f} times with LoCo and updates",
        f"a step of N-I-G takes {under['NIG'][1]} s, of HSDP {under['HSDP'][1]} s, of DDP {under['DDP'][1]} s, "
        f"of ZeRO-3 {under['ZeRO-3'][1]} s",
        f"is {times(outer, 'III outer, streaming', 'FSDP2 outer'):.1f} times as fast at 20 Mbit/s as FSDP2 with fp32 "
        f"outer steps, {times(outer, 'III outer, streaming', few):.1f} times as N-I-G with LoCo and updates",
        f"I-N-G is {times(full, 'ING', 'ZeRO-3'):.1f} times as fast as ZeRO-3 without caching, "
        f"in {share(full, 'ING', 'ZeRO-3'):.1f} times its memory; with LoRA {times(lora, 'ING', 'ZeRO-3'):.0f} times, "
        f"at 15 Mbit/s {times(slow, 'ING', 'ZeRO-3'):.0f} times, in {share(lora, 'ING', 'ZeRO-3'):.1f} times",
        f"under AutoEP: N-I-G is {times(mixture, 'AutoEP, NIG', 'AutoEP, ZeRO-3'):.1f} times as fast as ZeRO-3; "
        f"{times(mixture, 'AutoEP, NIG', 'AutoEP, ZeRO-2'):.1f} times as ZeRO-2 "
        f"in {share(mixture, 'AutoEP, NIG', 'AutoEP, ZeRO-2'):.2f} times its memory, "
        f"with LoCo and updates {times(mixture, 'AutoEP, ' + few, 'AutoEP, ZeRO-2'):.1f} times",
        f"slow disk stalls training for at most {worst:.1%} of a synchronous one, ".replace("%", " %")
        + f"of I-I-G on a real disk for {late:.1f} %",
        f"a step of ZeRO-1 takes {free['ZeRO-1'].median:.2f} s, of N-I-G {free['NIG'].median:.2f} s",
        "takes at most 1.07 times as long as the best measured strategy, 1.10 times with LoCo",
        f"N-N-G takes {times(pipes, 'ZeRO-1', 'NNG'):.2f} of ZeRO-1's seconds, "
        f"N-I-G {times(pipes, 'ZeRO-1', 'NIG'):.2f}; "
        f"a rank receives {piped['NIG']} from other nodes, under ZeRO-1 {piped['ZeRO-1']}",
    )
    assert not missing(sentences)


def test_ratios_of_the_paper_in_the_readme_have_their_rows() -> None:
    ratios = [cell.split()[0] for cell in table("paper")["7B-full: I-I-G / ZeRO-3"][1:]]
    said = "reports I-I-G at {} times ZeRO-3's speed; predicted (at a fitted rate) {}, emulated {}".format(*ratios)
    assert not missing([said], "README.md")


def test_figures_of_losses_have_their_rows() -> None:
    few = "NIG" + BOTH
    ending = {(row["optimizer"], row["method"]): row for row in read_rows(RESULTS / "updates_convergence.csv")}
    read = studies.read(OUTER)
    outer = {(r["optimizer"], r["ranks"], r["method"]): float(r["relative_difference"]) for r in read}
    longer = " and ".join(f"{100 * outer['Muon', ranks, few]:.1f}" for ranks in ("2", "4"))
    apart = max(abs(100 * claims_page) for (*_, method), claims_page in outer.items() if method.endswith(", 4 bits"))
    alone = 100 * max(map(float, ending["AdamW", "NIG" + LOCO]["relative_difference_by_seed"].split()))
    runs = {(run.method, run.seed): run for run in studies.read_runs(LONG)}

    def end(optimizer: str, method: str) -> float:
        return 100 * float(ending[optimizer, method]["relative_difference"])

    def beyond(method: str, than: str, seed: int) -> float:
        return 100 * (runs[method, seed].final_loss / runs[than, seed].final_loss - 1)

    long = [beyond(method, "NIG", seed) for method in ("NIG" + LOCO, few, "IIG" + BOTH) for seed in (0, 1)]
    sentences = (
        f"LoCo and 4-bit updates: on average {end('AdamW', few):.2f} % from exact training, "
        f"with Muon {end('Muon', few):.2f} % after 400 steps and, with 2 and 4 groups, {longer} % after [2,100]",
        f"[{alone:.2f} %](results/updates_convergence.md) after 1,000",
        f"on average at most {apart:.2f} % from those in 32 bits",
        f"{min(long):.2f} to {max(long):+.2f} % from exact N-I-G; "
        f"ZeRO-3 (one seed) ends {-beyond('ZeRO-3', 'ZeRO-2', 0):.2f} % below ZeRO-2",
    )
    assert not missing(sentences)
    assert f"within {max(long):.2f} %" in page("CHANGELOG.md").text
    for run in runs.values():
        assert len(run.losses) == run.steps == 3000 and statistics.fmean(run.losses[:10]) > 3 > 2 > run.final_loss


def test_figures_of_one_host_have_their_rows() -> None:
    coded = {rate: line[4] for rate, line in table("lossless").items()}
    creation_seconds = {method: line[3].split(", ")[1] for method, line in table("growth").items() if ", " in line[3]}
    reached = [float(line[3]) for line in tables.kernels()[1]]
    leaf = {row["case"]: row for row in read_rows(RESULTS / "leaf_overhead.csv") if row["packed"] == "False"}
    cost, made = read_rows(RESULTS / "import_cost.csv"), table("creation")
    host = {row["method"]: float(row["ms_median"]) for row in read_rows(RESULTS / "host_time.csv")}
    errors = sum_errors.errors()
    relative_errors = {
        name: sorted(errors[kind, name][64] / errors[kind, "ring"][64] for kind in ("noise", "signal"))
        for name in ("ordered", "two levels")
    }
    imported = [row["median_ms"] for row in cost if row["measured"] == "of that ours"]
    sentences = (
        f"take {coded['0.001']} bits at a rate of 1e-3, and {coded['1e-05']} at 1e-5",
        f"an N-I-G engine takes {creation_seconds['NIG']} s with 16,384 ranks, ZeRO-2 {creation_seconds['ZeRO-2']} s; "
        f"with 10,000 modules {made['NIG'][1]} and {made['ZeRO-2'][1]} s",
        f"reach {min(reached):.2f} to {max(reached):.2f} of a copy's bandwidth",
        f"adds to 8 layers of 64 experts to {float(leaf['stage3_leaf_bytes']['of_stock']):.2f}, "
        f"DeepSpeed's threshold to {float(leaf['ZeRO-3, granularity threshold']['of_stock']):.2f}",
        f"adds {float(imported[-1]):.1f} ms",
        f"I-I-G takes {host['IIG'] / host['HSDP']:.2f} of HSDP's host time "
        f"(kept: {host['IIG'] / host['HSDP, kept']:.1f}), N-I-G {host['NIG'] / host['ZeRO-2']:.2f} of ZeRO-2's",
        "the error of an ordered sum is {:.2f} to {:.2f} of a bf16 ring's, in two levels {:.2f} to {:.2f}".format(
            *relative_errors["ordered"], *relative_errors["two levels"]
        ),
    )
    assert not missing(sentences)


def test_figures_of_guides_have_their_rows() -> None:
    def taken(rows_by_method: dict[str, Row], *methods: str) -> list[str]:
        return [f"{seconds_of(rows_by_method[method].median)} s" for method in methods]

    def within(method: str) -> float:
        return float(gpt2[method].more["bytes_within"])

    cluster, gpt2 = rows(tables.CLUSTER, "2x2-large-4"), rows("gpt2_cluster.csv", "2x2-gpt2")
    lora, slow = rows("host_parameters.csv", "2x2-LoRA-100"), rows("host_parameters.csv", "2x2-LoRA-15", 15)
    leaf = {row["case"]: row for row in read_rows(RESULTS / "leaf_overhead.csv") if row["packed"] == "False"}
    saved = {(row.method, row.more["disk"]): row for row in records.read("saves.csv") if row.setting == "2x2-25M-1000"}
    lean, defaults, iig, nig, hsdp = taken(cluster, "ZeRO-3", "ZeRO-3 defaults", "IIG", "NIG", "HSDP")
    of_lora = "ZeRO-3 takes {}, I-N-G {}".format(*taken(lora, "ZeRO-3", "ING"))
    of_mixture = taken(rows("mixture_cluster.csv", "2x2-100"), "ZeRO-3", "IIG", "AutoEP, NIG")
    of_leaf = [
        f"{float(leaf[case]['milliseconds_median']):,.0f} ms"
        for case in ("plain PyTorch", "ZeRO-3", "stage3_leaf_bytes")
    ]
    stops = [
        f"{saved[method, disk].more['critical_seconds']:.2f} s"
        for disk in ("slow", "real")
        for method in ("IIG", "IIG, asynchronous")
    ]
    less = f"in {100 * (1 - share(cluster, 'IIG', 'HSDP')):.0f} % less memory"
    sentences = {
        "coming_from": (f"a step takes {iig} and HSDP's {hsdp}, {less}",),
        "how_to/slow_network": (
            f"ZeRO-3 without caching takes {lean} per step (with its defaults {defaults}), I-I-G {iig}, N-I-G {nig}",
            of_lora,
        ),
        "how_to/lora": (
            f"I-N-G is {times(lora, 'ING', 'ZeRO-3'):.1f} times as fast as ZeRO-3 at 100 Mbit/s, "
            f"and {times(slow, 'ING', 'ZeRO-3'):.1f} times at 15 Mbit/s",
        ),
        "how_to/moe": (
            "plain PyTorch takes {} per step, ZeRO-3 {}, ZeRO-3 with `stage3_leaf_bytes` {}".format(*of_leaf),
            "ZeRO-3 takes {} per step, I-I-G {}, AutoEP with N-I-G {}".format(*of_mixture),
        ),
        "how_to/saving": (
            "a save of I-I-G stops training for {}, and an asynchronous one for {}. On the machine's own disk "
            "these are {} and {}".format(*stops),
        ),
        "how_to/frameworks": (f"is {times(gpt2, 'NIG', 'ZeRO-3'):.1f} times as fast under N-I-G as under ZeRO-3",),
        "zero/modules": (
            f"a node's ranks send each other {within('IIG' + EMBEDDINGS) / within('IIG'):.2f} of the bytes "
            f"(N-I-G: {within('NIG') / within('IIG'):.2f}), and hold {share(gpt2, 'IIG' + EMBEDDINGS, 'IIG'):.2f} "
            f"times as much (N-I-G: {share(gpt2, 'NIG', 'IIG'):.2f})",
        ),
    }
    assert not [said for name, some in sentences.items() for said in missing(some, f"deepspeed_ext/{name}.md")]

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How-to pages have the same parts, measured figures of the rows, and messages of the code."""

import re

import pytest

from scripts import ROOT
from tests.harness.documents import Page, page, pages, sections_in
from tests.perf import tables
from tests.perf.lib.records import RESULTS, Row, read, read_rows, seconds_of

pytestmark = pytest.mark.quick

FOLDER = "deepspeed_ext/how_to/"
TITLES = {
    "slow_network": "My two nodes are slower than one",
    "other_number_of_gpus": "Resume on another number of GPUs",
    "lora": "LoRA with ZeRO-3 and gradient checkpointing",
    "ulysses": "Long sequences: Ulysses with ZeRO-3",
    "moe": "MoE at ZeRO-3 is slow or hangs",
    "saving": "Saving takes minutes",
    "going_back": "Going back to plain DeepSpeed",
    "frameworks": "Strategies in training frameworks",
}
MOST_LINES = 115


def how_to(name: str) -> Page:
    """The page of that name."""
    return page(f"{FOLDER}{name}.md")


def text_of(name: str) -> str:
    """The text of a page without line breaks."""
    return " ".join(how_to(name).text.split())


def test_pages_have_their_parts() -> None:
    names = {one.name.removeprefix(FOLDER).removesuffix(".md") for one in pages() if one.name.startswith(FOLDER)}
    assert names == set(TITLES)
    for name, title in TITLES.items():
        one = how_to(name)
        assert one.text.startswith(f"# {title}\n") and len(one.text.splitlines()) <= MOST_LINES, name
        headings = re.findall("^## (.*)$", one.text, re.MULTILINE)
        assert [heading for heading in headings if heading.startswith("Predicted")], name
        assert headings[-3:] == ["Measured", "Limits", "Verify"], name
        sections = [section["zero_optimization"] for section in sections_in(one) if "zero_optimization" in section]
        assert any("paro_strategy" in section for section in sections), name
        assert all("stage" in section for section in sections if "paro_strategy" in section), name


def median(rows: dict[str, Row], method: str) -> str:
    return seconds_of(rows[method].median)


def test_measured_figures_are_those_of_the_rows() -> None:
    def rows(file: str, setting: str) -> dict[str, Row]:
        return {row.method: row for row in read(file) if row.setting == setting and row.mbit in (15, 100)}

    cluster, mixture = rows(tables.CLUSTER, "2x2-large-4"), rows("mixture_cluster.csv", "2x2-100")
    adapters, slow = (rows("host_parameters.csv", f"2x2-LoRA-{rate}") for rate in (100, 15))
    gpt2 = rows("gpt2_cluster.csv", "2x2-gpt2")
    one_process = {row["case"]: row for row in read_rows(RESULTS / "leaf_overhead.csv") if row["ranks"] == "1"}
    plain, stock, units = (
        f"{float(one_process[case]['milliseconds_median']):,.0f}" for case in ("plain", "zero3", "ours")
    )
    saves = {
        (row.method, row.more["disk"]): f"{row.more['critical_seconds']:.2f}"
        for row in read("saves.csv")
        if row.setting == "2x2-25M-1000"
    }
    assert (
        f"ZeRO-3 without caching takes {median(cluster, 'ZeRO-3')} s per step (with its defaults "
        f"{median(cluster, 'ZeRO-3 defaults')} s), I-I-G {median(cluster, 'IIG')} s, N-I-G {median(cluster, 'NIG')} s"
    ) in text_of("slow_network")
    sentence = f"ZeRO-3 takes {median(adapters, 'ZeRO-3')} s, I-N-G {median(adapters, 'ING')} s"
    assert sentence in text_of("slow_network")
    times = [f"{rows['ZeRO-3'].median / rows['ING'].median:.1f}" for rows in (adapters, slow)]
    sentence = f"I-N-G is {times[0]} times as fast as ZeRO-3 at 100 Mbit/s, and {times[1]} times at 15 Mbit/s"
    assert sentence in text_of("lora")
    sentence = f"plain PyTorch takes {plain} ms per micro-batch, ZeRO-3 {stock} ms, ZeRO-3 with"
    sentence += f" `stage3_leaf_bytes` {units} ms"
    assert sentence in text_of("moe")
    sentence = (
        f"ZeRO-3 takes {median(mixture, 'ZeRO-3')} s per step, I-I-G {median(mixture, 'IIG')} s, "
        f"AutoEP with N-I-G {median(mixture, 'AutoEP, NIG')} s"
    )
    assert sentence in text_of("moe")
    sentence = (
        f"a save of I-I-G stops training for {saves['IIG', 'slow']} s, and an asynchronous one for "
        f"{saves['IIG, asynchronous', 'slow']} s. On the machine's own disk these are {saves['IIG', 'real']} s and "
        f"{saves['IIG, asynchronous', 'real']} s"
    )
    assert sentence in text_of("saving")
    sentence = f"is {gpt2['ZeRO-3'].median / gpt2['NIG'].median:.1f} times as fast under N-I-G as under ZeRO-3"
    assert sentence in text_of("frameworks")


@pytest.mark.parametrize(
    "name, words, file",
    [
        ("other_number_of_gpus", "cannot be loaded without conversion. Converting it to", "checkpoint/conversion.py"),
        ("moe", "look like mixtures of experts are not fetched as a unit", "leaf/setup.py"),
        ("moe", "which gather parameters together", "zero/sharded/coordinator.py"),
        ("moe", "so I is N for them", "zero/announcement.py"),
        ("frameworks", "has no effect: the engine's optimizer is DeepSpeed's own", "config/section.py"),
    ],
)
def test_messages_are_in_the_code(name: str, words: str, file: str) -> None:
    assert words in text_of(name) and words in (ROOT / "deepspeed_ext" / file).read_text(encoding="utf-8")

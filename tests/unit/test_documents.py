# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Snippets, commands and links of pages, and the length of the README."""

import ast
import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts import ROOT
from tests.harness.documents import Page, page, pages, sections_in, sources_of

pytestmark = pytest.mark.quick

MOST_WORDS = 1000
EXAMPLES = {  # shown on a page
    "README.md": ("own_script.py", "trainer.py"),
    "deepspeed_ext/checkpoint/README.md": ("export_weights.py",),
}
NAMES = [one.name for one in pages()]


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def test_the_readme_is_a_door() -> None:
    readme = page("README.md")
    assert len(readme.text.split()) <= MOST_WORDS
    headings = re.findall(r"^## (.*)$", readme.text, re.MULTILINE)
    assert headings == [
        "Install",
        "Your own script",
        "Hugging Face Trainer",
        "Launch on several nodes",
        "Which strategy",
        "What was measured",
        "When it does not help",
        "Links",
    ]
    first = readme.text.split("## Install")[0]
    assert "**Status:**" in first and "GPU" in first and "idea.svg" in first


@pytest.mark.parametrize("name", NAMES)
def test_no_link_is_dead(name: str) -> None:
    for target in page(name).links():
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / name).parent / path if path else ROOT / name
        assert there.exists(), f"{name}: {target}"
        if anchor:
            linked = page(there.resolve().relative_to(ROOT).as_posix())
            assert anchor in linked.anchors(), f"{name}: {target}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), ["README.md"]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        for target in page(name).links():
            there = ((ROOT / name).parent / target.partition("#")[0]).resolve()
            if "://" not in target and there.suffix == ".md":
                waiting += {there.relative_to(ROOT).as_posix()} - reached
    assert reached == set(NAMES)


def code_of(example: str) -> str:
    """An example without its header and docstring."""
    text = (ROOT / "scripts" / "examples" / example).read_text(encoding="utf-8")
    return "\n".join(text.splitlines()[ast.parse(text).body[0].end_lineno :]).strip()


def test_python_snippets_are_the_examples_that_run() -> None:
    shown = {one.name: [block.strip() for block in one.blocks("python")] for one in pages()}
    for name, blocks in shown.items():
        assert blocks == [code_of(example) for example in EXAMPLES.get(name, ())], name
        assert all(len([line for line in block.splitlines() if line.strip()]) <= 18 for block in blocks), name


def test_configurations_on_pages_are_accepted(ranks: Any) -> None:
    shown = [(one.name, section) for one in pages() for section in sections_in(one)]
    assert len(shown) >= 30
    refused = [answer for answer in ranks(1).run(accept_case, shown)[0] if answer]
    assert not refused


def test_configurations_show_the_stage_beside_a_strategy() -> None:
    """Frameworks that read ``zero_optimization.stage`` themselves need it."""
    folder = ROOT / "scripts" / "examples"
    texts = {one.name: one.text for one in pages()}
    texts |= {path.name: path.read_text(encoding="utf-8") for path in (*folder.glob("*.py"), *folder.rglob("*.json"))}
    assert {"own_script.py", "nig.json"} <= texts.keys()
    assert [name for name, text in texts.items() if re.search(r"{\s*\"paro_strategy\"", text)] == []
    assert all(json.loads(path.read_text())["zero_optimization"].get("stage") for path in folder.rglob("*.json"))


def test_batches_on_pages_fit_one_to_four_nodes() -> None:
    shown = [section for one in pages() for section in sections_in(one)]
    names = "train_batch_size", "train_micro_batch_size_per_gpu"
    sizes = [tuple(section[name] for name in names) for section in shown if section.keys() >= set(names)]
    assert sizes and all(batch % (micro * 8 * nodes) == 0 for batch, micro in sizes for nodes in range(1, 5)), sizes


def accept_case(shown: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What DeepSpeed's configuration says against each, with our checks in it."""
    from unittest import mock

    import deepspeed

    from deepspeed_ext.config import check

    def problem(name: str, section: dict[str, Any]) -> str:
        try:
            deepspeed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **section})
        except Exception as error:
            return f"{name}: {section}: {error}"
        return ""

    with mock.patch.object(check, "sharding_ranks", lambda *_: 16):
        return [problem(name, section) for name, section in shown]


def commands_in(one: Page) -> list[list[str]]:
    """Commands of a page: in blocks for bash, and between backquotes where they begin with a program that we know."""
    lines = [line for block in one.blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:python -m|torchrun|deepspeed --|scripts/\w+ |pip install)[^`]*)`", one.prose())
    found = [shlex.split(line, comments=True) for line in lines]
    return [words for words in found if words]


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist_and_have_these_options(name: str) -> None:
    for words in commands_in(page(name)):
        while "=" in words[0]:
            words = words[1:]  # variables
        check_command(name, words)


def check_command(name: str, words: list[str]) -> None:
    """Look a command up: its program, its script or module, and its options in the sources of these."""
    program, rest = words[0], words[1:]
    if "--" in rest:  # what follows is another command, of a script; a bare name is the reader's own
        at = rest.index("--")
        if "/" in rest[at + 1]:
            check_command(name, rest[at + 1 :])
        rest = rest[:at]
    if program == "python":
        assert rest[0] == "-m", (name, words)
        check_options(name, module_sources(name, rest[1]), rest[2:])
    elif program in ("deepspeed", "torchrun"):
        at = next((i for i, word in enumerate(rest) if word.endswith(".py") or word == "-m"), len(rest))
        launcher = package("deepspeed") / "launcher" / "runner.py"
        if program == "torchrun":
            launcher = package("torch") / "distributed" / "run.py"
        check_options(name, launcher.read_text(encoding="utf-8"), rest[:at])
        if at < len(rest):
            check_command(name, ["python", *rest[at:]] if rest[at] == "-m" else rest[at:])
    elif program.endswith(".py"):
        assert (ROOT / program).is_file(), (name, words)
        more = (package("deepspeed") / "__init__.py").read_text(encoding="utf-8")
        check_options(name, sources_of(ROOT / program) + more, rest)
    elif program.startswith("scripts/"):
        text = (ROOT / program).read_text(encoding="utf-8")
        inner = re.search(r"python -m (\S+)", text)
        check_options(name, text + (module_sources(name, inner[1]) if inner else ""), rest)
    elif program in ("pip", "pre-commit", "find", "source"):
        pass  # others' programs
    else:
        raise AssertionError(f"{name}: what is {words}?")


def module_sources(name: str, module: str) -> str:
    """Sources of what ``python -m`` runs: ours with all that they import, or a module of DeepSpeed's."""
    if module.startswith("deepspeed."):
        path = package("deepspeed") / Path(*module.split(".")[1:]).with_suffix(".py")
        return path.read_text(encoding="utf-8")
    if module == "tests.perf.NAME":
        return ""
    path = ROOT / module.replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert path.is_file(), f"{name}: there is no module {module}"
    if module == "deepspeed_ext":
        return "".join(one.read_text(encoding="utf-8") for one in (ROOT / "deepspeed_ext" / "cli").glob("*.py"))
    return sources_of(path)


def check_options(name: str, sources: str, words: list[str]) -> None:
    """Every option stands in the sources, and every file of the repository is there."""
    for word in words:
        if word.startswith("--"):
            option = word.partition("=")[0]
            assert f'"{option}"' in sources or f"'{option}'" in sources, (name, option)
        elif word.startswith("scripts/") and "{" not in word:
            assert (ROOT / word).exists(), (name, word)


def test_names_of_files_and_modules_are_there() -> None:
    for one in pages():
        if one.name == "CHANGELOG.md" or one.name.startswith("patches/"):
            continue
        for path in re.findall(r"`((?:scripts|tests|csrc|deepspeed_ext)/[\w./*]+)`", one.text):
            assert list(ROOT.glob(path.rstrip("/"))), f"{one.name}: {path}"
        for module in re.findall(r"python -m ((?:scripts|tests)\.[\w.]+[\w])", one.text):
            module_sources(one.name, module)


def test_programs_that_commands_begin_with_are_installed() -> None:
    assert shutil.which("deepspeed") and shutil.which("torchrun")

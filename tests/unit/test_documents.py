# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Snippets, commands, configurations, and links of pages."""

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from scripts import ROOT
from tests.harness.documents import Page, page, pages, sections_in, sources_of

pytestmark = pytest.mark.quick

LAUNCHERS = {"deepspeed": "launcher/runner.py", "torchrun": "distributed/run.py"}
EXAMPLES = {  # shown on a page
    "README.md": ("trainer.py",),
    "deepspeed_ext/checkpoint/export.md": ("export_weights.py",),
}


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def test_no_link_is_dead_and_every_page_is_linked() -> None:
    linked = {"README.md"}
    for one in pages():
        for target in one.links():
            path, _, anchor = target.partition("#")
            if "://" not in target:
                there = ((ROOT / one.name).parent / path if path else ROOT / one.name).resolve()
                assert there.exists(), f"{one.name}: {target}"
                anchors = page(there.relative_to(ROOT).as_posix()).anchors() if anchor else {""}
                assert anchor in anchors, f"{one.name}: {target}"
                linked |= {there.relative_to(ROOT).as_posix()} - {one.name}
    assert linked >= {one.name for one in pages()}


def code_of(example: str) -> str:
    text = (ROOT / "scripts" / "examples" / example).read_text(encoding="utf-8")
    return "\n".join(text.splitlines()[ast.parse(text).body[0].end_lineno :]).strip()


def test_python_snippets_are_the_examples_that_run() -> None:
    for name, blocks in {one.name: [block.strip() for block in one.blocks("python")] for one in pages()}.items():
        assert blocks == [code_of(example) for example in EXAMPLES.get(name, ())], name
        assert all(len([line for line in block.splitlines() if line.strip()]) <= 18 for block in blocks), name


def test_configurations_on_pages_are_accepted(ranks: Any) -> None:
    shown = [(one.name, section) for one in pages() for section in sections_in(one)]
    assert len(shown) >= 30
    assert not [(where, error) for where, error in ranks(1).each(error_case, shown) if error]


def test_configurations_show_the_stage_beside_the_strategy() -> None:
    """Frameworks that read ``zero_optimization.stage`` themselves need it."""
    folder = ROOT / "scripts" / "examples"
    texts = {one.name: one.text for one in pages()}
    texts |= {path.name: path.read_text(encoding="utf-8") for path in (*folder.glob("*.py"), *folder.rglob("*.json"))}
    assert {"own_script.py", "nig.json"} <= texts.keys()
    assert [name for name, text in texts.items() if re.search(r"{\s*\"paro_strategy\"", text)] == []
    assert all(json.loads(path.read_text())["zero_optimization"].get("stage") for path in folder.rglob("*.json"))


def error_case(shown: tuple[str, dict[str, Any]]) -> str:
    """What DeepSpeed's configuration says against a section of a page, with our checks in it."""
    from unittest import mock

    import deepspeed

    from deepspeed_ext.config import check
    from tests.harness.snapshots import error_of

    with mock.patch.object(check, "sharding_ranks", lambda *_: 16):
        return error_of(deepspeed.DeepSpeedConfig, {"train_micro_batch_size_per_gpu": 1, **shown[1]})


def commands_in(one: Page) -> list[list[str]]:
    """Commands of a page: in blocks for bash, and between backquotes where they begin with a program that we know."""
    lines = [line for block in one.blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:python -m|torchrun|deepspeed --|scripts/\w+ |pip install)[^`]*)`", one.prose())
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_commands_exist_and_have_these_options() -> None:
    for one in pages():
        for words in commands_in(one):
            while "=" in words[0]:
                words = words[1:]  # variables
            check_command(one.name, words)


def check_command(name: str, words: list[str]) -> None:
    """Check that a program and its script or module are there, and its options in the sources of these."""
    program, *rest = words
    launched = [i for i, word in enumerate(rest) if program in LAUNCHERS and (word == "-m" or word.endswith(".py"))]
    at = min([*launched, *(i for i, word in enumerate(rest) if word == "--"), len(rest)])
    inner = [word for word in rest[at : at + 1] if word != "--"] + rest[at + 1 :]
    if inner and (at in launched or "/" in inner[0]):  # a bare name is the reader's own
        check_command(name, ["python", *inner] if inner[0] == "-m" else inner)
    options = rest[:at]
    if program in LAUNCHERS:
        sources = (package(program.replace("run", "")) / LAUNCHERS[program]).read_text(encoding="utf-8")
    elif program == "python":
        sources, options = module_sources(name, options[1]), options[2:]
    elif program.endswith(".py"):
        sources = sources_of(ROOT / program) + (package("deepspeed") / "__init__.py").read_text(encoding="utf-8")
        assert (ROOT / program).is_file(), (name, words)
    elif program.startswith("scripts/"):
        sources = (ROOT / program).read_text(encoding="utf-8")
        sources += "".join(module_sources(name, module) for module in re.findall(r"python -m (\w\S+)", sources))
    else:
        assert program in ("pip", "pre-commit", "find", "source"), f"{name}: what is {words}?"
        return
    for word in options:
        if word.startswith("--"):
            option = word.partition("=")[0]
            assert f'"{option}"' in sources or f"'{option}'" in sources, (name, option)
        assert not word.startswith("scripts/") or "{" in word or (ROOT / word).exists(), (name, word)


def module_sources(name: str, module: str) -> str:
    """Sources of what ``python -m`` runs: ours with all that they import, or a module of DeepSpeed's."""
    if module.startswith("deepspeed."):
        path = package("deepspeed") / Path(*module.split(".")[1:]).with_suffix(".py")
        return path.read_text(encoding="utf-8")
    if module == "tests.perf.NAME":
        return ""
    path = ROOT / module.replace(".", "/")
    program = path / "__main__.py"  # not whether there is a folder: bytecode of a removed package leaves one
    path = program if program.is_file() else path.with_suffix(".py")
    assert path.is_file(), f"{name}: there is no module {module}"
    if module == "deepspeed_ext":
        return "".join(one.read_text(encoding="utf-8") for one in (ROOT / "deepspeed_ext" / "tools").rglob("*.py"))
    return sources_of(path)


def test_names_of_files_and_modules_are_there() -> None:
    for one in pages():
        if one.name == "CHANGELOG.md" or one.name.startswith("patches/"):
            continue
        for path in re.findall(r"`((?:scripts|tests|csrc|deepspeed_ext)/[\w./*]+)`", one.text):
            assert list(ROOT.glob(path.rstrip("/"))), f"{one.name}: {path}"
        for module in re.findall(r"python -m ((?:scripts|tests)\.[\w.]+[\w])", one.text):
            module_sources(one.name, module)

# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed that the series is for: fetched by pip, verified, and unpacked as a git repository."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT

BASE = ROOT / "patches" / "BASE"
WORK = ROOT / "build" / "fork"
# The repository has links where its source distribution has copies.
_LINKS = {"accelerator": "../accelerator", "ops/csrc": "../../csrc", "ops/op_builder": "../../op_builder"}
_IDENTITY = ("deepspeed_ext contributors", "deepspeed_ext@users.noreply.github.com")


class Requirement(NamedTuple):
    """A version of DeepSpeed, and the SHA-256 of its source distribution."""

    version: str
    sha256: str


class Failed(Exception):
    """An error to show to the user without a traceback."""


def requirement() -> Requirement:
    """Return the base version in ``patches/BASE``, which pip reads as well."""
    match = re.search(
        r"^deepspeed==(\S+) --hash=sha256:([0-9a-f]{64})$", BASE.read_text(encoding="utf-8"), re.MULTILINE
    )
    if match is None:
        raise Failed(f"{BASE} must have a line 'deepspeed==VERSION --hash=sha256:DIGEST'")
    return Requirement(*match.groups())


def run(command: list[str], **kwargs: object) -> str:
    """Run a program, and return its output.

    Raises:
        Failed: it failed; the message has its output.
    """
    try:
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **kwargs)  # type: ignore
    except OSError as error:
        raise Failed(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise Failed(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}")
    return str(done.stdout)


def fetch(version: str) -> Path:
    """Return the archive of DeepSpeed's source distribution, downloaded once; that of BASE is verified."""
    base = requirement()
    archive = WORK / f"deepspeed-{version}.tar.gz"
    if not archive.is_file():
        WORK.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--no-binary", "deepspeed", "--no-build-isolation", "--dest", str(WORK)]
        run([*pip, *(["--require-hashes", "-r", str(BASE)] if version == base.version else [f"deepspeed=={version}"])])
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if version == base.version and digest != base.sha256:
        raise Failed(f"{archive} has SHA-256 {digest}, {BASE.name} says {base.sha256}: remove it")
    return archive


def git(tree: Path, *arguments: str, date: str | None = None, **kwargs: object) -> str:
    """Run git in a tree, whatever the user has configured; return its output."""
    name, email = _IDENTITY
    environment = {
        # Inside a git hook, these variables name the hook's repository.
        **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_NAME": name for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_EMAIL": email for who in ("AUTHOR", "COMMITTER")},
    }
    if date is not None:
        environment |= {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    return run(["git", "-C", str(tree), *arguments], env=environment, **kwargs)


def extract_all(content: tarfile.TarFile, folder: str) -> None:
    """Extract all of an archive, owned by whoever runs this."""
    if hasattr(tarfile, "data_filter"):
        content.extractall(folder, filter="data")
        return
    for member in content:  # Python before 3.10.12 and 3.11.4 has no filters, and would give root's files away
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    content.extractall(folder)


def extract(version: str, tree: Path) -> Path:
    """Make a fresh folder with the source distribution of a version."""
    archive = fetch(version)
    shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent) as folder, tarfile.open(archive) as content:
        extract_all(content, folder)
        (Path(folder) / f"deepspeed-{version}").rename(tree)
    return tree


def unpack(version: str, tree: Path) -> Path:
    """Make a fresh tree of a version, as a git repository with one commit, tagged ``base``."""
    extract(version, tree)
    for name, link in _LINKS.items():
        copy = tree / "deepspeed" / name
        if not copy.is_dir():
            raise Failed(f"DeepSpeed {version} has no deepspeed/{name}: its layout is another one")
        shutil.rmtree(copy)
        copy.symlink_to(link)
    (tree / ".gitignore").write_text("__pycache__/\n*.egg-info/\n/build/\n/build.txt\ngit_version_info_installed.py\n")
    git(tree, "init", "--quiet", "--initial-branch=main")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", f"DeepSpeed {version}", date="2000-01-01T00:00:00Z")
    git(tree, "tag", "base")
    return tree


def importable(tree: Path) -> Path:
    """Return a folder, for a search path, with nothing but the package of a tree: others next to it would hide
    ours."""
    folder = tree.parent / "lib"
    folder.mkdir(exist_ok=True)
    link = folder / "deepspeed"
    if not link.is_symlink():
        link.symlink_to(tree / "deepspeed")
    return folder

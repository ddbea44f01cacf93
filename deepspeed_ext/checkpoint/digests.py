# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Sizes and digests of a checkpoint's files, in ``digests.json`` of its folder.

A rank writes each file's entry next to it, and the commit collects the entries of all ranks. A thread reads the file
from the page cache while it is being written and flushed, so a digest takes little time if there is a free core. It is
SHA-256, because CPUs have instructions for it (1.9 GiB/s per core; BLAKE2b: 1.1), and ``sha256sum`` can check it.
"""

import hashlib
import json
import os
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deepspeed_ext.checkpoint.folder import RECORD, SIDECAR, CheckpointError, CheckpointFolder, saved_files
from deepspeed_ext.checkpoint.owned_folder import sync
from deepspeed_ext.checkpoint.trust import load_listed

_VERSION = 1
_CHUNK_BYTES = 2**20
_POLL_SECONDS = 0.002  # until a reader looks for more of a file that is being written
_DEPTH = 3  # folders between the file of a parameter in a universal checkpoint and the checkpoint's own, inclusive


@dataclass(frozen=True)
class Entry:
    """What is recorded of a file: its bytes, their digest, and the rank that wrote it."""

    size: int
    digest: str
    rank: int


def digest_of(path: str | os.PathLike[str]) -> str:
    """Return the digest of a file's content."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


# Writing ##########################################################################################


@contextmanager
def recording(path: str, rank: int) -> Iterator[None]:
    """Compute the digest of a file while this context writes it, only appending; then write its entry next to it."""
    written = threading.Event()
    followed: list[tuple[int, str]] = []

    def run() -> None:
        with suppress(OSError):  # the writer fails, too, or `digest_of` below
            followed.append(_follow(path, written))

    thread = threading.Thread(target=run, name="deepspeed_ext digest", daemon=True)
    if not os.path.exists(path):  # otherwise it could read content that the writer replaces
        with suppress(RuntimeError):  # the process is ending, or has no more threads
            thread.start()
    try:
        yield
    finally:
        written.set()
        if thread.ident is not None:
            thread.join()
    size = os.path.getsize(path)
    digest = next((digest for count, digest in followed if count == size), None) or digest_of(path)
    write_entry(path, Entry(size, digest, rank))


def write_entry(path: str | os.PathLike[str], entry: Entry) -> None:
    """Write a file's entry next to it."""
    Path(f"{path}{SIDECAR}").write_text(json.dumps(asdict(entry)))


def _follow(path: str, written: threading.Event) -> tuple[int, str]:
    """Read a file while it is being written; return its bytes and digest."""
    digest, buffer, size = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES)), 0
    while not os.path.exists(path) and not written.wait(_POLL_SECONDS):
        pass
    with open(path, "rb", buffering=0) as file:
        while True:
            is_complete = written.is_set()  # before the read, which may be at the end only for now
            count = file.readinto(buffer)
            if not count and is_complete:
                return size, digest.hexdigest()
            if not count:
                written.wait(_POLL_SECONDS)
            digest.update(buffer[:count])
            size += count


def take(path: Path) -> str:
    """Return the digest in a file's entry, and remove the entry; compute it if there is none."""
    sidecar = Path(f"{path}{SIDECAR}")
    if not sidecar.exists():
        return digest_of(path)
    digest = written_digest(path)
    sidecar.unlink()
    return digest


def written_digest(path: Path) -> str:
    """Return the digest in a file's entry."""
    return Entry(**json.loads(Path(f"{path}{SIDECAR}").read_text())).digest


def collect(folder: Path, target: CheckpointFolder | None = None) -> None:
    """Replace the entries of a folder's files by one record.

    Args:
        target: the folder that it will replace, whose record keeps the entries of files that stay.
    """
    sidecars = sorted(folder.rglob(f"*{SIDECAR}"))
    files = {} if target is None else _entries_of_others(target)
    for sidecar in sidecars:
        files[str(sidecar.relative_to(folder)).removesuffix(SIDECAR)] = json.loads(sidecar.read_text())
    record = folder / RECORD
    record.write_text(json.dumps({"version": _VERSION, "digest": _digest_of_entries(files), "files": files}, indent=1))
    sync(record)
    for sidecar in sidecars:
        sidecar.unlink()


def _entries_of_others(target: CheckpointFolder) -> dict[str, dict[str, object]]:
    with suppress(CheckpointError):  # the record is damaged
        return {name: asdict(entry) for name, entry in read_record(target.path).items() if target.keeps(name)}
    return {}


def record_all(folder: Path) -> None:
    """Record all files of a folder that this process has written."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        sync(path)
        write_entry(path, Entry(path.stat().st_size, digest_of(path), 0))
    collect(folder)


def _digest_of_entries(files: Mapping[str, Mapping[str, object]]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


# Reading ##########################################################################################


def read_record(folder: Path) -> dict[str, Entry]:
    """Return the entry of each file, by its path in the folder; empty if none are recorded, as by earlier versions.

    Raises:
        CheckpointError: the record is damaged.
    """
    path = folder / RECORD
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != _VERSION:
            raise ValueError(f"its version is {content['version']}, expected {_VERSION}")
        entries = {name: Entry(**entry) for name, entry in content["files"].items()}
        if content["digest"] != _digest_of_entries(content["files"]):
            raise ValueError("its content does not match its own digest")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}, which has the sizes and digests of the files, is damaged ({error}). Remove it to load without "
            f"them."
        ) from error
    return entries


def check(folder: Path, part: slice, with_digests: bool) -> None:
    """Compare sizes, and optionally digests, with those recorded by the save. Files may be missing.

    Args:
        part: this rank's share of the files.

    Raises:
        CheckpointError: a file has changed.
    """
    record = read_record(folder)
    for name in sorted(record)[part]:
        problem = _problem(folder / name, record[name], with_digests)
        if problem and (folder / name).exists():
            raise CheckpointError(
                f"{problem}. If another program has replaced it on purpose, remove {folder / RECORD}."
            )


def explain(path: str | os.PathLike[str]) -> str:
    """Return a sentence on whether an unreadable file is as it was saved; empty if that is unknown. Never raises."""
    with suppress(Exception):
        for folder in Path(path).parents[:_DEPTH]:
            entry = read_record(folder).get(str(Path(path).relative_to(folder)))
            if entry is not None:
                problem = _problem(Path(path), entry, True)
                return f" {problem}." if problem else " Its digest is the one that was recorded by the save."
    return ""


def _problem(path: Path, entry: Entry, with_digest: bool) -> str:
    """Return how a file differs from its entry; empty if it does not."""
    writer = f"rank {entry.rank} wrote"
    if not path.is_file():
        return f"{path} is missing, which {writer}"
    size = path.stat().st_size
    if size != entry.size:
        return f"{path} has {size} bytes, expected {entry.size}, which {writer}"
    if with_digest and digest_of(path) != entry.digest:
        return f"{path} has changed: its digest differs from that of the {size} bytes that {writer}"
    return ""


def problems(folder: Path) -> Iterator[str]:
    """Yield each problem of a checkpoint's files: short, changed, missing, unexpected, or a damaged record."""
    try:
        record = read_record(folder)
    except CheckpointError as error:
        yield str(error)
        return
    for name, entry in sorted(record.items()):
        if problem := _problem(folder / name, entry, True):
            yield problem
    for path in content_files(folder):
        if record and str(path.relative_to(folder)) not in record:
            yield f"{path} is unexpected: the save did not write it"
        elif not record and (problem := _archive_problem(path)):
            yield problem


def content_files(folder: Path) -> Sequence[Path]:
    """Return the files of a folder that only saves, conversions, and exports write."""
    patterns = "zero/**/*.pt", "model.safetensors", "model-*-of-*.safetensors"
    return [*saved_files(folder), *(path for pattern in patterns for path in sorted(folder.glob(pattern)))]


def _archive_problem(path: Path) -> str:
    """Return how a file without an entry is damaged, according to the checksums in it, if it has any."""
    try:
        if path.suffix == ".pt" and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                member = archive.testzip()
            return f"{path} has changed: the checksum of {member} differs" if member else ""
        if path.suffix == ".pt":  # it is truncated, or was saved with checkpoint_serialization false
            load_listed(torch.load, path, map_location="cpu")
    except Exception as error:  # torch raises any kind of error for a damaged file
        return f"{path} cannot be read: {type(error).__name__}: {error}"
    return ""

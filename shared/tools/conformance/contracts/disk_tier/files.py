"""Clauses of a disk tier: whole pages come back, and nothing else."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from diptych.shared.interfaces import DiskTier, PageMemory
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal

NUM_BYTES = 2400
"""Of a page: a multiple of every number of views below."""
SECONDS = 20.0


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "tier"


def page_of(fill: int) -> bytes:
    return bytes((fill + i) % 251 for i in range(NUM_BYTES))


def memory_of(
    contents: bytes, num_views: int = 1, wait: Callable[[], None] = lambda: None
) -> tuple[bytearray, PageMemory]:
    buffer = bytearray(contents)
    size = len(buffer) // num_views
    views = [memoryview(buffer)[i : i + size] for i in range(0, len(buffer), size)]
    return buffer, PageMemory(views, wait)


def result(future: Future[Any]) -> Any:
    return future.result(SECONDS)


def name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write(tier: DiskTier, key: str, fill: int, num_views: int = 1) -> bool:
    written: bool = result(tier.write(name(key), memory_of(page_of(fill), num_views)[1]))
    return written


def read(tier: DiskTier, key: str, num_views: int = 1) -> bytes | None:
    buffer, memory = memory_of(bytes(NUM_BYTES), num_views)
    return bytes(buffer) if result(tier.read(name(key), memory)) else None


def found(tier: DiskTier, keys: Sequence[str]) -> list[str]:
    """The keys of which the tier has a page that has the right bytes."""
    return [key for key in keys if read(tier, key) == page_of(ord(key))]


@contract(
    "A page that was written is read with its bytes, also by another tier of the folder and to other views.",
    table("views", ("one view", 1), ("as many as layers", 24), ("more than one system call takes", 1200)),
)
def pages_come_back(impl: type[DiskTier], case: Case) -> None:
    with new_folder() as folder:
        first, second = impl(folder, 10, NUM_BYTES), impl(folder, 10, NUM_BYTES)
        for i, key in enumerate("ab"):
            expect_equal(f"whether {key} is written", write(first, key, i, case.views), True)
        for tier in (first, second, impl(folder, 10, NUM_BYTES)):
            expect_equal("the second page", read(tier, "b", 3), page_of(1))
            expect_equal("the first page", read(tier, "a", case.views), page_of(0))
            expect_equal("a page that was not written", read(tier, "c"), None)


@contract("Pages are found up to the first that does not exist.", EXAMPLE)
def found_up_to_a_gap(impl: type[DiskTier], case: Case) -> None:
    with new_folder() as folder:
        tier = impl(folder, 10, NUM_BYTES)
        for key in ("a", "b", "d"):
            write(tier, key, 0)
        for keys, expected in (("abcd", 2), ("ab", 2), ("cab", 0), ("", 0)):
            expect_equal(f"pages found of {keys!r}", result(tier.find([name(key) for key in keys])), expected)
        tier.remove(name("a"))
        expect_equal("pages found after the first is removed", result(tier.find([name("a"), name("b")])), 0)
        expect_equal("the removed page", read(tier, "a"), None)


@contract("When there are more pages than fit, the least recently used leave; reads and writes use.", EXAMPLE)
def least_recently_used_leave(impl: type[DiskTier], case: Case) -> None:
    with new_folder() as folder:
        tier = impl(folder, 3, NUM_BYTES)
        for key in "abc":
            write(tier, key, ord(key))
        read(tier, "a")
        write(tier, "b", ord("b"))
        write(tier, "d", ord("d"))
        expect_equal("pages left", found(tier, "abcd"), ["a", "b", "d"])
        smaller = impl(folder, 2, NUM_BYTES)
        write(smaller, "e", ord("e"))
        expect_equal("number of files", len(list(folder.iterdir())), 2)


@contract(
    "A damaged page is not read, and is removed.",
    table("change", ("a bit",), ("cut",), ("empty",), ("longer",), ("another key",)),
)
def damaged_pages(impl: type[DiskTier], case: Case) -> None:
    with new_folder() as folder:
        tier = impl(folder, 10, NUM_BYTES)
        files = {}
        for key in "ab":
            before = set(folder.iterdir())
            write(tier, key, ord(key))
            (files[key],) = set(folder.iterdir()) - before
        whole = files["a"].read_bytes()
        changed = {
            "a bit": bytes([whole[0] ^ 1]) + whole[1:],
            "cut": whole[: NUM_BYTES // 2],
            "empty": b"",
            "longer": whole + b"a",
            "another key": files["b"].read_bytes(),
        }
        files["a"].write_bytes(changed[case.name])
        expect_equal("the damaged page", read(tier, "a"), None)
        expect_equal("whether its file is there", files["a"].exists(), False)
        expect_equal("the other page", found(tier, "ab"), ["b"])
        write(tier, "a", ord("a"))
        expect_equal("pages after a new write", found(tier, "ab"), ["a", "b"])


@contract("A disk that takes nothing loses pages, and no other.", EXAMPLE)
def a_disk_that_fails(impl: type[DiskTier], case: Case) -> None:
    with new_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tier = impl(folder, 10, NUM_BYTES)
        write(tier, "a", ord("a"))
        away = folder.rename(folder.with_name("away"))
        expect_equal("whether a page is written", write(tier, "b", ord("b")), False)
        expect_equal("pages without a folder", found(tier, "ab"), [])
        away.rename(folder)
        expect_equal("whether a later page is written", write(tier, "c", ord("c")), True)
        expect_equal("pages", found(tier, "abc"), ["a", "c"])
        expect_equal("number of files", len(list(folder.iterdir())), 2)


@contract("Folder and files are open to their owner only.", EXAMPLE)
def owner_only(impl: type[DiskTier], case: Case) -> None:
    with new_folder() as folder:
        tier = impl(folder, 10, NUM_BYTES)
        write(tier, "a", 0)
        for path in (folder, *folder.iterdir()):
            expect_equal(f"permissions of others for {path.name}", path.stat().st_mode & 0o077, 0)


@contract("The memory of a page is used only when no other copy uses it.", EXAMPLE)
def waits_for_copies(impl: type[DiskTier], case: Case) -> None:
    with new_folder() as folder:
        tier = impl(folder, 10, NUM_BYTES)

        def arrive(contents: bytes) -> None:
            buffer[:] = contents

        buffer, memory = memory_of(bytes(NUM_BYTES), 2, lambda: arrive(page_of(1)))
        result(tier.write(name("a"), memory))
        expect_equal("the page, which arrives during the wait", read(tier, "a"), page_of(1))
        buffer, memory = memory_of(bytes(NUM_BYTES), 2, lambda: arrive(page_of(2)))
        result(tier.read(name("a"), memory))
        expect_equal("the page that is read, after the copies before", bytes(buffer), page_of(1))

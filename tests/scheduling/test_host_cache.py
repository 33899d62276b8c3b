"""Host pages with a tier below them, and what a tiered cache forgets."""

from __future__ import annotations

import errno
import os
import resource
import signal
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.optimized.tiers import disk_tier as optimized
from diptych.optimized.tiers.host_pool import HostPool as OptimizedPool
from diptych.reference.radix_cache import RadixCache
from diptych.reference.tiers import disk_tier as reference
from diptych.reference.tiers.host_pool import HostPool
from diptych.shared.interfaces import DiskTier, PageMemory, RadixKey
from diptych.shared.scheduling import disk_pages, page_files
from diptych.shared.scheduling.host_cache import HostCache, tiered
from diptych.shared.tools.conformance.contracts.host_pool.copies import make_kv_pool
from diptych.shared.tools.conformance.oracles.cache_world import CacheWorld

PAGE_LEN, NUM_PAGES = 4, 3
IDS = list(range(20))


PANELS = pytest.mark.parametrize("panel", [reference, optimized], ids=["reference", "optimized"])


def cache_on(tier: DiskTier, seed: int = 0) -> HostCache:
    return HostCache(HostPool(make_kv_pool(HostPool, seed=seed), NUM_PAGES, PAGE_LEN), "model", tier)


def tier_of(panel: Any, folder: Path) -> DiskTier:
    kv_pool = make_kv_pool(HostPool)
    tier: DiskTier = panel.DiskTier(folder, 10, PAGE_LEN * kv_pool.num_bytes_per_token)
    return tier


def found(tier: DiskTier, digests: list[str]) -> list[bool]:
    return [tier.find([digest]).result() == 1 for digest in digests]


def load(cache: HostCache, ids: list[int], namespace: object = None) -> list[int]:
    """Read pages as for a request; returns those that arrive."""
    tree = CacheWorld(RadixCache, 1).cache
    req: Any = SimpleNamespace(rid="a", all_ids=ids, max_prefix_len=len(ids), extra_key=namespace)
    assert cache.disk is not None
    cache.disk.ask(req, tree)
    while not cache.disk.has_arrived(req, tree, may_wait=True):
        cache.check()
    cache.check()
    return cache._find(cache.digests(ids, namespace), first=0)


def contents(cache: HostCache, pages: list[int]) -> list[bytes]:
    return [b"".join(cache.pool.page_views(page)) for page in pages]


@PANELS
def test_pages_of_the_tier_below_come_back(tmp_path: Path, panel: Any) -> None:
    first, tier = cache_on(tier_of(panel, tmp_path)), tier_of(panel, tmp_path)
    first.store(IDS[:11], None, torch.arange(1, 12))
    assert first.disk is not None
    first.disk.finish()
    digests = first.digests(IDS, None)
    pages = [first.pages[digest] for digest in digests[:2]]
    assert found(tier, digests) == [True, True, False, False, False]
    other = cache_on(tier, seed=50)
    assert contents(other, load(other, IDS)) == contents(first, pages)[:1]  # at most half of its memory
    assert contents(other, load(other, IDS)) == contents(first, pages)
    assert len(other._find(digests, first=1)) == 1
    assert other._find(digests, first=2) == []
    other.check()
    assert load(cache_on(tier), IDS, "another namespace") == []


@PANELS
def test_each_panel_reads_the_files_of_the_other(tmp_path: Path, panel: Any) -> None:
    first = cache_on(tier_of(reference, tmp_path))
    first.store(IDS[:4], None, torch.arange(1, 5))
    second = cache_on(tier_of(panel, tmp_path), seed=50)
    assert contents(second, load(second, IDS[:12])) == contents(first, [*first.pages.values()])


@PANELS
def test_files_that_were_there_before_leave_in_the_order_of_their_times(tmp_path: Path, panel: Any) -> None:
    tmp_path.chmod(0o755)
    a, b, c, d, e, *new = (digit * 64 for digit in "abcdef01")
    foreign = {"photo.jpg", "f.kv", "Makefile", f"{a}.kv.12345678", f"{a}.1234567z"}
    old = {f"{d}.12345678": path_time(tmp_path) - 2 * page_files.STALE_SECONDS}  # unfinished
    times = {f"{a}.kv": 3.0, f"{b}.kv": 1.0, f"{c}.kv": 2.0, **dict.fromkeys(foreign, 1.0), **old}
    for name, time in {**times, f"{e}.12345678": path_time(tmp_path)}.items():
        (tmp_path / name).write_bytes(b"1")
        os.utime(tmp_path / name, (time, time))
    tier = panel.DiskTier(tmp_path, 3, 1)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    (tmp_path / f"{e}.12345678").unlink()
    left = []
    for name in new:
        before = {path.stem for path in tmp_path.glob("*.kv")}
        tier.write(name, PageMemory([memoryview(bytearray(b"2"))], lambda: None)).result()
        left += before - {path.stem for path in tmp_path.glob("*.kv")}
    assert left == [b, c, a]
    assert {path.name for path in tmp_path.iterdir()} == {*foreign, *(f"{name}.kv" for name in new)}


@PANELS
def test_a_page_that_the_disk_cannot_look_up_is_not_found(
    tmp_path: Path, panel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, **_: object) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    cache = cache_on(panel.DiskTier(tmp_path, 3, 1))
    monkeypatch.setattr(Path, "stat", fail)
    assert load(cache, IDS) == []


def test_time_in_the_queue_is_not_time_that_the_disk_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_of(reference, tmp_path)
    cache, tree = cache_on(tier), CacheWorld(RadixCache, 1).cache
    arrives: Future[bool] = Future()
    monkeypatch.setattr(tier, "find", lambda keys: reference.done(1))
    monkeypatch.setattr(tier, "read", lambda *_: arrives)
    now = 0.0
    monkeypatch.setattr(disk_pages, "time", SimpleNamespace(monotonic=lambda: now))
    req: Any = SimpleNamespace(rid="a", all_ids=IDS, max_prefix_len=len(IDS), extra_key=None)
    assert cache.disk is not None
    cache.disk.ask(req, tree)
    now = 2 * disk_pages.MAX_WAIT_SECONDS
    assert not cache.disk.has_arrived(req, tree, may_wait=False)
    now = 2.9 * disk_pages.MAX_WAIT_SECONDS
    assert not cache.disk.has_arrived(req, tree, may_wait=False)
    now = 3.1 * disk_pages.MAX_WAIT_SECONDS
    assert cache.disk.has_arrived(req, tree, may_wait=False)
    arrives.set_result(True)
    cache.disk.finish()


@PANELS
def test_pages_are_their_owners_alone_and_damaged_ones_are_not_loaded(tmp_path: Path, panel: Any) -> None:
    first = cache_on(tier_of(panel, tmp_path / "tier"))
    first.store(IDS[:4], None, torch.arange(1, 5))
    assert first.disk is not None
    first.disk.finish()
    (file,) = (tmp_path / "tier").iterdir()
    assert [path.stat().st_mode & 0o077 for path in (file, file.parent)] == [0, 0]
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert load(cache_on(tier_of(panel, tmp_path / "tier")), IDS[:12]) == []
    assert not file.exists()


def path_time(path: Path) -> float:
    return path.stat().st_mtime


def test_a_page_that_is_written_is_not_used_for_others(tmp_path: Path) -> None:
    """Those whose write has not begun are cancelled."""
    tier = tier_of(optimized, tmp_path)
    cache = cache_on(tier)
    may_write, has_begun = Event(), Semaphore(0)
    write = tier._write

    def slow(key: str, memory: PageMemory) -> bool:
        has_begun.release()
        assert may_write.wait(30)
        return write(key, memory)

    tier._write = slow
    cache.store(IDS[:12], None, torch.arange(1, 13))
    for _ in range(optimized.NUM_WRITERS):
        assert has_begun.acquire(timeout=30)
    before = list(cache.pages)
    cache.store(IDS[::-1], None, torch.arange(1, 21))
    cache.check()
    expected = contents(cache, [cache.pages[digest] for digest in before if digest in cache.pages])
    assert len(expected) == optimized.NUM_WRITERS == NUM_PAGES - 1
    may_write.set()
    assert cache.disk is not None
    cache.disk.finish()
    assert sorted(found(tier, before)) == [False, True, True]
    assert found(tier, list(cache.pages)) == [True] * NUM_PAGES
    assert contents(cache, [cache.pages[digest] for digest in before if digest in cache.pages]) == expected


def test_too_many_writes_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized, "MAX_QUEUED_BYTES", 3)
    tier, may_write = optimized.DiskTier(tmp_path, 10, 1), Event()
    memory = PageMemory([memoryview(bytearray(b"1"))], lambda: None)
    slow = memory._replace(wait=lambda: may_write.wait(30) and None)
    writes = [tier.write(key, slow) for key in "abcd"]
    assert (writes[3].done(), writes[3].result()) == (True, False)
    may_write.set()
    assert [write.result() for write in writes[:3]] == [True] * 3
    assert tier.write("e", memory).result()
    monkeypatch.setattr(optimized, "MAX_QUEUED_BYTES", 0)
    while tier._num_queued:
        pass
    assert tier.write("f", memory).result()  # one page always has room


def test_loads_that_started_early_belong_to_the_next_pass() -> None:
    pool = OptimizedPool(make_kv_pool(OptimizedPool), NUM_PAGES, PAGE_LEN)
    pool.load([0], torch.arange(1, 5))
    pool.copies_so_far()()
    assert pool._pending == []
    pool.before_pass()
    assert pool._has_loads
    pool.copies_so_far()()
    assert pool._has_loads
    pool.before_pass()
    assert not pool._has_loads


def test_what_may_hold_nan_is_forgotten_in_every_tier() -> None:
    called: list[object] = []
    host: Any = SimpleNamespace(
        forget=called.append, clear=lambda: called.append("all"), store=lambda *_: None
    )
    world = CacheWorld(tiered(RadixCache, host), 1)
    called.clear()
    world.finish(world.prefill([1, 2, 3, 4]))
    key = RadixKey([1, 2, 3, 4])
    world.cache.discard(key, 0)
    assert called == [key]
    assert len(world.cache.match_prefix(key).device_indices) == 0
    world.cache.reset()
    assert called == [key, "all"]
    assert len(world.cache.match_prefix(key).device_indices) == 0


@PANELS
def test_forgotten_pages_leave_the_disk_and_others_stay(tmp_path: Path, panel: Any) -> None:
    tier = tier_of(panel, tmp_path)
    cache = cache_on(tier)
    assert cache.disk is not None
    ids = IDS[: NUM_PAGES * PAGE_LEN]
    keys = [RadixKey(ids), RadixKey(ids, "another namespace")]
    digests = [cache.digests(key.token_ids, key.extra_key) for key in keys]
    for key in keys:
        cache.store(key.token_ids, key.extra_key, torch.arange(1, len(ids) + 1))
        cache.disk.finish()
    assert found(tier, [*digests[0], *digests[1]]) == [True] * 2 * NUM_PAGES
    cache.forget(keys[0])
    for each, is_there in zip(digests, (False, True)):
        assert found(tier, each) == [is_there] * NUM_PAGES
    cache.check()
    assert cache.pages == {}


def test_a_failing_disk_is_reported(tmp_path: Path) -> None:
    for panel in (reference, optimized):
        tier = panel.DiskTier(tmp_path / "tier", 3, 1)
        tier.files.folder.rename(tmp_path / "away")
        with pytest.warns(RuntimeWarning, match=r"tier: KV pages are not written: No such file or directory"):
            assert not tier.write("b", PageMemory([memoryview(b"1")], lambda: None)).result()
        (tmp_path / "away").rename(tier.files.folder)


@PANELS
def test_a_full_disk_leaves_no_file(tmp_path: Path, panel: Any) -> None:
    """A file may not grow beyond the limit of the process, as on a full disk."""
    tier = panel.DiskTier(tmp_path, 3, 2**16)
    memory = PageMemory([memoryview(bytes(2**15))] * 2, lambda: None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**15 + 100, limits[1]))
        with pytest.warns(RuntimeWarning, match="File too large"):
            assert not tier.write("a", memory).result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []
    assert tier.write("a", memory).result()

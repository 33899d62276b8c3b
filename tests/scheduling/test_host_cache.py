"""Host pages with a tier below them, and what a tiered cache forgets."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.reference.radix_cache import RadixCache
from diptych.reference.tiers.disk_tier import DiskTier
from diptych.reference.tiers.host_pool import HostPool
from diptych.shared.interfaces import RadixKey
from diptych.shared.scheduling.host_cache import HostCache, tiered
from diptych.shared.tools.conformance.contracts.host_pool.copies import make_kv_pool
from diptych.shared.tools.conformance.oracles.cache_world import CacheWorld

PAGE_LEN, NUM_PAGES = 4, 3
IDS = list(range(20))


def cache_on(tier: DiskTier, seed: int = 0) -> HostCache:
    return HostCache(HostPool(make_kv_pool(HostPool, seed=seed), NUM_PAGES, PAGE_LEN), "model", tier)


def tier_of(folder: Path) -> DiskTier:
    kv_pool = make_kv_pool(HostPool)
    return DiskTier(folder, 10, PAGE_LEN * kv_pool.num_bytes_per_token)


def test_pages_of_the_tier_below_come_back(tmp_path: Path) -> None:
    first, tier = cache_on(tier_of(tmp_path)), tier_of(tmp_path)
    first.store(IDS[:11], None, torch.arange(1, 12))
    digests = first.digests(IDS, None)
    pages = [first.pages[digest] for digest in digests[:2]]
    assert [tier.read(digest) is not None for digest in digests] == [True, True, False, False, False]
    other = cache_on(tier, seed=50)
    found = other._find(digests, first=0)
    assert [other.pool.page_bytes(page) for page in found] == [first.pool.page_bytes(page) for page in pages]
    assert len(other._find(digests, first=1)) == 1
    assert other._find(digests, first=2) == []
    other.check()
    assert cache_on(tier)._find(cache_on(tier).digests(IDS, "another namespace"), first=0) == []


def test_files_that_were_there_before_leave_in_the_order_of_their_times(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.kv").write_bytes(b"1")
    for name, time in (("a", 3), ("b", 1), ("c", 2)):
        os.utime(tmp_path / f"{name}.kv", (time, time))
    tier = DiskTier(tmp_path, 3, 1)
    left = []
    for name in "xyz":
        before = {path.stem for path in tmp_path.glob("*.kv")}
        tier.write(name, b"2")
        left += before - {path.stem for path in tmp_path.glob("*.kv")}
    assert left == ["b", "c", "a"]
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".kv"]
    assert (tier.read("a"), tier.read("y"), tier.read("z")) == (None, b"2", b"2")
    for path in (tmp_path, *tmp_path.iterdir()):
        assert path.stat().st_mode & 0o077 == 0
    intact = (tmp_path / "y.kv").read_bytes()
    for damaged in (b"cut", b"", b"3" + intact[1:], intact + b"2"):
        (tmp_path / "y.kv").write_bytes(damaged)
        assert tier.read("y") is None
        assert not (tmp_path / "y.kv").exists()
    (tmp_path / "x.kv").write_bytes(intact)  # a page of another prompt
    assert tier.read("x") is None


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


def test_forgotten_pages_leave_the_disk_and_others_stay(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    cache = cache_on(tier)
    ids = IDS[: NUM_PAGES * PAGE_LEN]
    keys = [RadixKey(ids), RadixKey(ids, "another namespace")]
    for key in keys:
        cache.store(key.token_ids, key.extra_key, torch.arange(1, len(ids) + 1))
    forgotten, kept = ([tier.read(d) for d in cache.digests(key.token_ids, key.extra_key)] for key in keys)
    assert None not in forgotten + kept
    cache.forget(keys[0])
    for key, before in zip(keys, ([None] * len(forgotten), kept)):
        digests = cache_on(tier).digests(key.token_ids, key.extra_key)
        assert [tier.read(digest) for digest in digests] == before
        assert len(cache_on(tier_of(tmp_path))._find(digests, first=0)) == len(before) - before.count(None)
    cache.check()
    assert cache.pages == {}


def test_a_disk_that_takes_nothing_costs_no_answer(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "tier", 3, 1)
    tier.write("a", b"1")
    tier.folder.rename(tmp_path / "away")
    with pytest.warns(RuntimeWarning, match=r"tier: KV pages are not written: No such file or directory"):
        tier.write("b", b"2")
    assert (tier.read("a"), tier.read("b")) == (None, None)
    (tmp_path / "away").rename(tier.folder)
    tier.write("c", b"3")
    assert (tier.read("a"), tier.read("b"), tier.read("c")) == (b"1", None, b"3")
    assert {path.name for path in tier.folder.iterdir()} == {"a.kv", "c.kv"}


@pytest.mark.parametrize("change", ["a bit", "cut", "longer", "another key"])
def test_pages_are_their_owners_alone_and_damaged_ones_are_not_loaded(tmp_path: Path, change: str) -> None:
    tier = DiskTier(tmp_path / "tier", 3, 4)
    for key in ("a", "b"):
        tier.write(key, key.encode() * 4)
    files = [tier.folder / "a.kv", tier.folder / "b.kv"]
    assert tier.folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    data = files[0].read_bytes()
    changed = {
        "a bit": bytes([data[0] ^ 1]) + data[1:],
        "cut": data[:-1],
        "longer": data + b"a",
        "another key": files[1].read_bytes(),
    }
    files[0].write_bytes(changed[change])
    assert tier.read("a") is None
    assert tier.read("b") == b"bbbb"

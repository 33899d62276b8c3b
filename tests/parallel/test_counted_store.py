"""The exchanges of torch's symmetric memory, by ranks of which one has had another engine before."""

from __future__ import annotations

import threading

from torch.distributed import HashStore, PrefixStore, Store

from diptych.shared.parallel.counted_store import CountedStore


def exchange(store: Store, number: int, rank: int) -> list[bytes]:
    """As torch does it: a value of each rank under PREFIX/NUMBER/RANK."""
    keys = [f"CUDASymmetricMemory/{number}/{peer}" for peer in range(2)]
    store.set(keys[rank], f"{number} of {rank}")
    return store.multi_get(keys)


def exchanges(store: Store, first: int, rank: int, found: dict[int, list[list[bytes]]]) -> None:
    counted = CountedStore(store)
    store = PrefixStore("group", counted)  # calls from C++ reach the class
    found[rank] = [exchange(store, first + i, rank) for i in range(3)]


def test_ranks_with_other_counts_find_each_other() -> None:
    shared, found = HashStore(), dict[int, list[list[bytes]]]()
    counts = {0: 7, 1: 0}
    threads = [threading.Thread(target=exchanges, args=(shared, counts[r], r, found)) for r in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0] == found[1] == [[b"%d of 0" % (7 + i), b"%d of 1" % i] for i in range(3)]


def test_a_rank_without_earlier_groups_needs_no_such_store() -> None:
    """Its numbers begin at zero already. Keys without a number are as they are."""
    shared = HashStore()
    PrefixStore("group", shared).set("CUDASymmetricMemory/0/1", "1")
    counted = CountedStore(shared)
    store = PrefixStore("group", counted)
    store.set("CUDASymmetricMemory/9/0", "0")
    store.set("name", "a")
    assert store.multi_get(["CUDASymmetricMemory/9/0", "CUDASymmetricMemory/9/1"]) == [b"0", b"1"]
    assert PrefixStore("group", shared).get("CUDASymmetricMemory/0/0") == b"0"
    assert PrefixStore("group", shared).get("name") == store.get("name") == b"a"
    assert (store.add("CUDASymmetricMemory/10", 1), store.add("CUDASymmetricMemory/10", 1)) == (1, 2)
    store.wait(["CUDASymmetricMemory/10"])
    assert PrefixStore("group", shared).check(["CUDASymmetricMemory/1"])

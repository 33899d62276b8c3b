"""Split servers of several ranks: the answers of one engine, and the same decisions on every rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.reference.parallel.collectives import Collectives
from diptych.reference.parallel.split_ranks import RankTransport
from diptych.reference.parallel.whole_pages import HeadParts
from diptych.shared import registry
from diptych.shared.engine.processes.child import EngineProcessEnded
from diptych.shared.engine.processes.ranks import LeadScheduler
from diptych.shared.parallel.alone import ALONE
from diptych.shared.parallel.channel import signed
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types import FinishAbort, FinishError
from tests.parallel.engine_pair import STATES, bring_to, config_of, output_ids
from tests.parallel.split_ranks import SECRET, cluster_of
from tests.parallel.tiny_ranks import answers_of_one, requests
from tests.planted import Bug, Bugs

HOST_PARTS = ("scheduler", "memory_pool", "radix_cache", "schedule_policy", "prefill_adder", "collectives")
OPTIMIZED: dict[str, Any] = {"use": dict.fromkeys(HOST_PARTS, "optimized")}
EAGLE = {"speculative": "eagle", "speculative_num_steps": 2}
DRAFTS = {"speculative": "standalone", "speculative_num_steps": 3}
WAYS: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((2, 1), {}),
    ((1, 2), {}),
    ((2, 2), OPTIMIZED),
    ((2, 2), {}),
    ((2, 4), {"page_size": 1}),
    ((4, 1), OPTIMIZED),
    ((2, 2), {"chunked_prefill_size": 8, "max_total_tokens": 64}),
    ((2, 1), {"model": "latent rows"}),
    ((1, 2), {"model": "latent rows"}),
    ((2, 2), {"model": "qwen3-moe"}),
    ((1, 2), {"speculative": "ngram"}),
    ((2, 2), DRAFTS),
    ((2, 1), EAGLE),
    ((1, 2), EAGLE | {"page_size": 1}),
    ((4, 2), EAGLE | OPTIMIZED),
]


def rows(values: Sequence[Any], is_fast: Callable[[Any], bool]) -> list[Any]:
    return [pytest.param(each, marks=[] if is_fast(each) else pytest.mark.full) for each in values]


@pytest.mark.parametrize("way", rows(WAYS, lambda way: way in [*WAYS[:3], WAYS[-3]]), ids=str)
def test_ranks_answer_as_one_engine(
    folders: dict[str, str], way: tuple[tuple[int, int], dict[str, Any]], tmp_path: Path
) -> None:
    """KV heads are two: four ranks have each of them twice."""
    sizes, flags = way[0], {**way[1]}
    use = {"transport": "reference", **flags.pop("use", {})}
    if "speculative_num_steps" in flags:
        head = "llama" if flags["speculative"] == "standalone" else "eagle-draft"
        flags["speculative_draft_model"] = folders[head]
    config = config_of(folders, "reference", **flags).updated(use=use)
    expected = output_ids(answers_of_one(config))
    with cluster_of(config, sizes, tmp_path) as cluster:
        for _ in range(2):  # the second time the decode server has most prompts
            assert cluster.answer(requests()) == expected
        cluster.finish()


@pytest.mark.parametrize("state", rows(STATES, lambda state: state == "copying"))
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_server_ends(folders: dict[str, str], state: str, side: str, tmp_path: Path) -> None:
    """As if its processes were killed: running requests go on, others get an error, and no rank loses a
    page."""
    drafts = EAGLE | {"speculative_draft_model": folders["eagle-draft"]} if side == "prefill" else {}
    config = config_of(folders, "reference", chunked_prefill_size=8, **drafts)
    expected = answers_of_one(config)
    with cluster_of(config, (2, 2), tmp_path) as cluster:
        req = bring_to(cluster, state)
        sender, receiver = cluster.links()
        end = sender if side == "prefill" else receiver
        end.connection.shutdown(socket.SHUT_RDWR)
        time.sleep(0.02)
        cluster.gate.set()
        cluster.until(lambda: sender.is_lost and receiver.is_lost)
        cluster.finish()
        if state == "scheduled":
            assert req.output_ids == expected[4].output_ids
        else:
            assert isinstance(req.finished_reason, FinishError)
            assert "the prefill engine has ended" in str(req.finished_reason)
        cluster.until(lambda: not cluster.prefills[0].side.sides)
        late = requests()[3]
        cluster.answer([late])
        assert isinstance(late.finished_reason, FinishError)
        cluster.finish()


def check_abort(folders: dict[str, str], state: str, folder: Path) -> None:
    config = config_of(folders, "reference", chunked_prefill_size=8)
    expected = answers_of_one(config)
    with cluster_of(config, (2, 2), folder) as cluster:
        req = bring_to(cluster, state)
        assert cluster.decode.scheduler.abort(req.rid)
        assert not cluster.decode.scheduler.abort("unknown")
        if state == "copying":
            for _ in range(5):
                cluster.decode.scheduler.step()
            assert cluster.decode_side.transfers  # its pages stay
            cluster.gate.set()
        cluster.finish()
        again = requests()[4]
        cluster.add(again)
        cluster.finish()
        assert isinstance(req.finished_reason, FinishAbort)
        assert again.output_ids == expected[4].output_ids


@pytest.mark.parametrize("state", rows(STATES, lambda state: state == "copying"))
def test_a_request_is_aborted(folders: dict[str, str], state: str, tmp_path: Path) -> None:
    check_abort(folders, state, tmp_path)


def test_a_request_moves_to_another_prefill_server(folders: dict[str, str], tmp_path: Path) -> None:
    """The servers of a request are chosen alike on all ranks, and are connected when it names them."""
    config = config_of(folders, "reference")
    expected = answers_of_one(config)
    with cluster_of(config, (1, 2, 2), tmp_path) as cluster:
        for i, address in enumerate(cluster.addresses):
            req = requests()[i]
            req.prefill_server = signed(address, SECRET)
            assert cluster.answer([req]) == [expected[i].output_ids]
            assert cluster.prefills[i].scheduler.stats().num_generated_tokens == 1
        forged = requests()[2]
        forged.prefill_server = signed(address, b"another secret of 16")
        with pytest.raises(ValueError, match="not signed"):
            cluster.add(forged)
        req = requests()[4]
        req.prefill_server = signed(cluster.addresses[1], SECRET)
        cluster.add(req)
        cluster.until(lambda: bool(cluster.decode_side.transfers), "decode")
        cluster.links()[1].connection.shutdown(socket.SHUT_RDWR)
        cluster.until(lambda: req.finished_reason is not None)
        assert req.output_ids == expected[4].output_ids
        cluster.finish()


def test_a_rank_that_ends_ends_the_server(folders: dict[str, str], tmp_path: Path) -> None:
    """An idle server detects it, too."""
    with cluster_of(config_of(folders, "reference"), (2, 1), tmp_path) as cluster:
        server = cluster.prefills[0]
        server.scheduler.step()
        for _, other in server._pipes:
            other.close()
        with pytest.raises(EngineProcessEnded, match="rank 1"):
            server.scheduler.step()
        assert server.scheduler.has_work()  # whose step raises
        with pytest.raises(EngineProcessEnded, match="rank 1"):
            server.scheduler.step()


@pytest.mark.parametrize(("size", "num_heads"), [(2, 4), (4, 2), (3, 1), (1, 2)], ids=str)
def test_gathered_heads_are_those_of_one_engine(size: int, num_heads: int) -> None:
    assert not differs_from_one_engine(size, num_heads, HeadParts)


def differs_from_one_engine(size: int, num_heads: int, parts: Any) -> bool:
    """Gather pages of ranks, whose pools have parts of one pool, and scatter them to other pages."""
    source, target = [3, 1], [2, 4]
    num_parts = min(size, num_heads)

    def pool_of(num_heads: int) -> Any:
        pool = registry.load("memory_pool", "reference").TokenToKVPool
        return pool(16, 4, 2, num_heads, 8, torch.float32, "cpu")

    whole = pool_of(num_heads)
    for buffer in (whole._k, whole._v):
        buffer.copy_(torch.randn(buffer.shape))

    def run(tp: Collectives) -> bool:
        own = pool_of(num_heads // num_parts)
        first = tp.rank * num_parts // size * (num_heads // num_parts)
        heads = slice(first, first + num_heads // num_parts)
        own._k.copy_(whole._k[:, :, heads])
        own._v.copy_(whole._v[:, :, heads])
        moved = parts(own, tp, num_parts)
        contents = moved.gather(source)
        differs = tp.rank == 0 and contents != HeadParts(whole, ALONE, 1).gather(source)
        moved.scatter(target, contents)
        for found, expected in ((own._k, whole._k), (own._v, whole._v)):
            pages, wanted = (x.unflatten(1, (-1, 4)) for x in (found, expected[:, :, heads]))
            differs |= not torch.equal(pages[:, target], wanted[:, source])
        return differs

    return any(on_ranks(size, run, seconds=2.0))


BUGS = Bugs("heads of ranks", finder="they are those of one engine")
PAGES = "reference.parallel.whole_pages"
for _name, _before, _after in (
    ("gathered in the wrong order", "heads.movedim(0, -2)", "heads.flip(0).movedim(0, -2)"),
    ("scattered in the wrong order", "heads[part_of]", "heads.flip(0)[part_of]"),
    ("copies of a head are sent, too", "(rank % copies == 0)", "1"),
    ("neighbours have different heads", "* num_parts // self.tp.size", "% num_parts"),
    ("K in place of V", "for buffer in buffers], dim=1)", "for buffer in buffers[:1] * 2], dim=1)"),
):
    BUGS.words(_name, f"{PAGES}:HeadParts", (PAGES, _before, _after))


@BUGS.found_by(RuntimeError, ValueError, honest=True)
def test_heads_that_are_mixed_up(bug: Bug) -> bool:
    parts = HeadParts if bug.plant is None else bug.planted
    return differs_from_one_engine(4, 2, parts)


def _follows_no_abort(self: LeadScheduler, rid: str) -> bool:
    """Followers do not know of an abort."""
    return self.scheduler.abort(rid)


def _ends_at_its_abort(self: RankTransport, room: str) -> None:
    """A room ends at its abort, though its pages may still come."""
    ABORT(self, room)
    self._ended[room] = "failed"


def _done_before_its_pages(self: RankTransport, room: str) -> str:
    """A room is done before its pages are written."""
    status = self._ended.pop(room, "open")
    if status != "open":
        del self.rooms[room]
        if self.real is not None:
            self.real.take(room)
    return status


ABORT = RankTransport.abort
RANKS = Bugs("ranks of split servers")
RANKS.add_all(_follows_no_abort, where=f"{LeadScheduler.__module__}.LeadScheduler.abort", finder="waiting")
RANKS.add_all(_ends_at_its_abort, where=f"{RankTransport.__module__}.RankTransport.abort", finder="copying")
RANKS.add_all(
    _done_before_its_pages, where=f"{RankTransport.__module__}.RankTransport.poll", finder="copying"
)


@RANKS.found_by(AssertionError)
def test_ranks_that_do_not_agree(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bug.plant_in(monkeypatch)
    check_abort(folders, bug.finder, tmp_path)

"""Speculation in an engine whose prompts come from another one: the answers of one engine, and its drafts."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from diptych.reference.parallel.transport import Transport
from diptych.reference.speculative.eagle import EagleDrafter
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.processes.disaggregated import sent_pool_of
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.loading.sent_pool import BLOCK_BYTES, SentPool, block_starts, drafter_name, sent_pool
from diptych.shared.types import Req, SamplingParams, SpeculationStats
from tests.parallel.engine_pair import SECONDS, output_ids, pair_of
from tests.parallel.split_ranks import cluster_of
from tests.planted import Bug, Bugs

OPTIMIZED = {"use": dict.fromkeys(("scheduler", "drafter", "draft_tree"), "optimized")}
SHARED = {"use": {"transport": "shared_memory"}}
EAGLE3 = {"speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3"}
CHAIN = {"speculative_topk": 1, "speculative_num_steps": 3}
STANDALONE = {
    "speculative": "standalone",
    "speculative_draft_model": "tiny-dense",
    "speculative_num_steps": 3,
}
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculative": "ngram"},
    "optimized ngram": {"speculative": "ngram", "speculative_topk": 1} | OPTIMIZED,
    "chain": EAGLE3 | CHAIN,
    "optimized chain": EAGLE3 | CHAIN | OPTIMIZED,
    "tree, pages of one token": EAGLE3 | {"page_size": 1},
    "optimized tree": EAGLE3 | OPTIMIZED,
    "chunks, shared memory": EAGLE3 | CHAIN | {"chunked_prefill_size": 8} | SHARED,
    "standalone": STANDALONE | {"chunked_prefill_size": 8},
    "optimized standalone": STANDALONE | OPTIMIZED,
}
SLOW = {*FLAGS} - {"plain", "ngram", "optimized chain", "chunks, shared memory"}
TEXTS = (
    "Read this story: Mara lives in Bergen. Mara works as a baker. In which city does Mara live?",
    "Count from 3 to 9.",
    "Read this story: Mara lives in Bergen. Mara works as a baker. Who works as a baker?",
)


class Found(NamedTuple):
    """Answers, how often drafts were accepted, and what was drafted for each verification."""

    answers: list[list[int]]
    stats: SpeculationStats
    drafts: list[Any]


def tiny_dense(flags: dict[str, Any]) -> EngineConfig:
    defaults: dict[str, Any] = {"panel": "reference", "page_size": 4, "context_len": 256}
    flags = {**defaults, "max_total_tokens": 1024, "max_running_requests": 8, **flags}
    return EngineConfig(model="tiny-dense", device="cpu", **{"dtype": "float32"} | flags)


def prompts(assembly: Assembly) -> list[Req]:
    assert assembly.tokenizer is not None
    params = SamplingParams(temperature=0.0, max_new_tokens=14)
    return [Req(text, assembly.tokenizer.encode(text), params, seed=0) for text in TEXTS]


def one_by_one(assembly: Assembly, scheduler: Any, step: Callable[[], Any]) -> Found:
    """The prompts, each alone, so that its drafts are the same wherever its prompt is computed."""
    reqs, drafts, drafter = prompts(assembly), [], assembly.parts.drafter
    if drafter is not None:
        draft = type(drafter).draft

        def watched(*arguments: Any) -> Any:
            tree = draft(drafter, *arguments)
            drafts.append(tree.token_ids.tolist())
            return tree

        drafter.draft = watched  # type: ignore[method-assign]
    for req in reqs:
        scheduler.add_request(req)
        while req.finished_reason is None:
            step()
    return Found(output_ids(reqs), scheduler.stats().speculation, drafts)


@cache
def of_one_engine(name: str) -> list[Found]:
    assembly = assemble(tiny_dense(FLAGS[name]))
    return [one_by_one(assembly, assembly.scheduler, assembly.scheduler.step) for _ in range(2)]


def of_a_pair(name: str) -> list[Found]:
    """Cold, and with cached prompts."""
    with pair_of(tiny_dense(FLAGS[name])) as pair:
        found = [one_by_one(pair.decode, pair.decode_side, pair.step) for _ in range(2)]
        assert pair.prefill.scheduler.stats().speculation == SpeculationStats(), "it drafts nothing"
        pair.finish()
    return found


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return of_one_engine("plain")[0].answers


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in FLAGS]
)
def test_the_drafts_of_one_engine(plain: list[list[int]], name: str) -> None:
    """The answers of one engine without drafts, in as many verifications as in one engine with them."""
    found = of_a_pair(name)
    assert [each.answers for each in found] == [plain] * 2
    assert found == of_one_engine(name)
    assert name == "plain" or found[1].stats.num_accepted_tokens > 10


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2), marks=pytest.mark.full)], ids=str)
def test_ranks_have_the_whole_head(plain: list[list[int]], sizes: tuple[int, int], tmp_path: Path) -> None:
    """The KV heads of the target are divided; those of the head are not."""
    with cluster_of(tiny_dense(FLAGS["chain"]), sizes, tmp_path) as cluster:
        found = one_by_one(cluster.decode.assemblies[0], cluster.decode.scheduler, cluster.step)
        cluster.finish()
    assert found.answers == plain
    assert found == of_one_engine("chain")[0]


def other_head(folder: Path) -> str:
    """A head of the same shapes: a copy, with other weights."""
    copy = folder / "head"
    shutil.copytree(resolve_model_path("tiny-dense-eagle3", "auto"), copy)
    (weights,) = copy.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return str(copy)


FP8 = EAGLE3 | {"kv_cache_dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    "other", [{}, STANDALONE, EAGLE3, FP8], ids=["none", "standalone", "another head", "another dtype"]
)
def test_sides_with_different_drafters(other: dict[str, Any], tmp_path: Path) -> None:
    """They are not connected, and each goes on."""
    if other is EAGLE3:
        other = other | {"speculative_draft_model": other_head(tmp_path)}
    if other is FP8:  # the target's pools are alike, the head's are not
        other = other | {"dtype": "bfloat16"}
    engines = [assemble(tiny_dense(flags)) for flags in (FP8 if "dtype" in other else EAGLE3, other)]
    ends = socket.socketpair()
    with ThreadPoolExecutor(2) as threads:
        connecting = list(map(threads.submit, [Transport] * 2, ends, map(sent_pool_of, engines)))
        said = [str(each.exception(SECONDS)) for each in connecting]
    names = ["drafter eagle3", f"drafter {other['speculative']}" if other else "no KV of a drafter"]
    assert all(name in each for each in said for name in names), said
    if other.get("dtype"):
        names = [f"KV in torch.{name} and states in torch.{name}" for name in ("float32", "bfloat16")]
        assert all(name in each for each in said for name in names), said
    assert [end.fileno() for end in ends] == [-1, -1]
    for engine in engines:
        allocator = engine.parts.allocator
        assert allocator.available_size() == allocator.size


def test_a_drafter_whose_states_cannot_be_sent() -> None:
    drafter: Any = SimpleNamespace(kv_pool=None, hidden_layers=())
    with pytest.raises(ValueError, match="it reads hidden states of the prompt, and has no kv_pool"):
        sent_pool(tiny_dense({}), None, drafter, torch.float32)


def test_what_is_compared_of_a_draft_model(tmp_path: Path) -> None:
    """A byte in a block that is read changes the name, wherever the block is; one between two blocks does
    not. A small file is read whole."""
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")

    def name(size: int, changed: int | None = None) -> str:
        content = bytearray(size)
        if changed is not None:
            content[changed] = 1
        weights.write_bytes(content)
        return drafter_name(tiny_dense(EAGLE3 | {"speculative_draft_model": str(tmp_path)}))

    size, middle = 4 * 2**20, BLOCK_BYTES // 2
    assert name(size) != name(size + 1)
    assert all(name(size, start + middle) != name(size) for start in block_starts(size))
    assert name(size, block_starts(size)[1] - middle) == name(size)
    assert all(name(10**6, place) != name(10**6) for place in range(1234, 10**6, 10**5))


BUGS = Bugs("drafts behind another engine", finder="drafts of one engine")
COPY = Transport._copy


def _state_of_the_request_before(self: EagleDrafter, req: Req, state: bytes) -> None:
    """Hidden states of another request."""
    RESTORE(self, req, getattr(self, "last_state", state))
    self.last_state = state  # type: ignore[attr-defined]


def _pages_of_another_request(self: Any, room: str, layer: int, source: list[int], target: list[int]) -> None:
    """KV of the drafter comes from other pages of the pool, in reverse."""
    COPY(self, room, layer, source[::-1] if self.kv_pool.is_of_drafter(layer) else source, target)


def _a_token_late(self: Transport, layer: int) -> list[torch.Tensor]:
    """The drafter's KV of each token is that of the token before."""
    pages = PAGES(self, layer)
    late = isinstance(self.kv_pool, SentPool) and self.kv_pool.is_of_drafter(layer)
    return [each.flatten(0, 1).roll(1, 0).view(each.shape) for each in pages] if late else pages


PAGES = Transport._pages
RESTORE = EagleDrafter.restore
BUGS.add_all(_state_of_the_request_before, where=f"{EagleDrafter.__module__}.EagleDrafter.restore")
BUGS.add_all(_pages_of_another_request, where=Transport._copy)
BUGS.add_all(_a_token_late, where=Transport._pages)


@BUGS.found_by(honest=True)
def test_what_comes_for_the_drafter(
    bug: Bug, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> bool:
    bug.plant_in(monkeypatch)
    found = of_a_pair("chain")
    assert [each.answers for each in found] == [plain] * 2, "a draft changes no answer"
    return found != of_one_engine("chain")

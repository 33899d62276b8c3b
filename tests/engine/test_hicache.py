"""The tiers of the prefix cache: answers stay the same, and what was evicted comes back."""

from __future__ import annotations

import math
import os
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.features import host_tier
from diptych.shared.engine.llm import LLM
from diptych.shared.scheduling import disk_pages, host_cache
from diptych.shared.tools.conformance.whole_engine.switches import GREEDY, prompts
from diptych.shared.types import SamplingParams
from tests.planted import Bug, Bugs

REFERENCE = {"device": "cpu", "panel": "reference"}
ONE = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


NUM_PROMPTS = 4


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Answers of an engine without tiers."""
    llm = LLM("tiny-dense", **REFERENCE)
    outputs = llm.generate(prompts(llm)[:NUM_PROMPTS], GREEDY, progress=False)
    return [output.output_ids for output in outputs]


def engine(**flags: Any) -> LLM:
    return LLM("tiny-dense", check_invariants=True, **{**REFERENCE, "hicache_tokens": 2048, **flags})


def evict_all(llm: LLM) -> None:
    tree = llm.assembly.parts.tree_cache
    tree.evict(tree.evictable_size())
    assert tree.evictable_size() == 0


def num_loaded(llm: LLM) -> int:
    return llm.assembly.parts.tree_cache.host.num_loaded_tokens


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"page_size": 4, "chunked_prefill_size": 16, "enable_mixed_chunk": True, "schedule_policy": "lpm"},
    {"page_size": 16, "schedule_policy": "lpm"},
    {"hicache_tokens": 96},  # pages are forgotten there, too
    {"max_total_tokens": 256, "schedule_conservativeness": 0.01},  # retraction, and eviction all the time
    {"speculative": "ngram", "page_size": 4},
    {"kv_cache_dtype": "auto", "max_total_tokens": 256, "page_size": 16},
)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=str(flags), marks=[pytest.mark.full] * (i > 1))
        for i, flags in enumerate(SETTINGS)
    ],
)
def test_answers_are_the_same_when_prefixes_come_back(alone: list[list[int]], flags: dict[str, Any]) -> None:
    llm = engine(**flags)
    for _ in range(2):
        outputs = llm.generate(prompts(llm)[:NUM_PROMPTS], GREEDY, progress=False)
        assert [output.output_ids for output in outputs] == alone
        evict_all(llm)
    assert num_loaded(llm) > 0
    if not flags:
        assert all(output.num_cached_tokens >= output.num_prompt_tokens - 16 for output in outputs)


def test_loaded_kv_has_the_bits_of_the_computed(alone: list[list[int]]) -> None:
    llm = engine()
    prompt = prompts(llm)[0]
    parts = llm.assembly.parts

    def cached_kv() -> torch.Tensor:
        match = parts.tree_cache.match_prefix(host_cache.RadixKey(prompt))
        pool = llm.assembly.kv_pool
        return torch.stack([pool.k_buffer(i)[match.device_indices] for i in range(pool.num_layers)])

    llm.generate(prompt, ONE, progress=False)
    computed = cached_kv().clone()
    evict_all(llm)
    for layer in range(llm.assembly.kv_pool.num_layers):
        llm.assembly.kv_pool.k_buffer(layer).fill_(float("nan"))
        llm.assembly.kv_pool.v_buffer(layer).fill_(float("nan"))
    output = llm.generate(prompt, ONE, progress=False)
    assert output.output_ids == alone[0][:1]
    assert torch.equal(cached_kv()[:, : output.num_cached_tokens], computed[:, : output.num_cached_tokens])
    assert output.num_cached_tokens == num_loaded(llm) > 0


def test_only_what_the_tree_lacks_is_loaded() -> None:
    llm = engine()
    tree = llm.assembly.parts.tree_cache
    prompt = prompts(llm)[0]
    llm.generate(prompt, ONE, progress=False)
    evict_all(llm)
    first = llm.generate(prompt[: len(prompt) // 2], ONE, progress=False)
    evict_all(llm)
    llm.generate(prompt[: len(prompt) // 2], ONE, progress=False)
    before = num_loaded(llm)
    in_tree = len(tree.match_prefix(host_cache.RadixKey(prompt)).device_indices)
    assert in_tree >= first.num_cached_tokens > 0
    output = llm.generate(prompt, ONE, progress=False)
    assert num_loaded(llm) - before == output.num_cached_tokens - in_tree > 0


@pytest.mark.parametrize("scheduler", ["reference", "optimized"])
def test_a_request_that_bans_every_token_leaves_the_tiers_as_they_are(scheduler: str) -> None:
    llm = engine(use={"scheduler": scheduler})
    first, second = prompts(llm)[:2]
    llm.generate(first, ONE, progress=False)
    host = llm.assembly.parts.tree_cache.host
    before = set(host.pages)
    banned = dict.fromkeys(range(llm.assembly.parts.num_token_ids), -math.inf)
    params = SamplingParams(max_new_tokens=2, logit_bias=banned)
    assert "every token is banned" in llm.generate(second, params, progress=False).finish_reason.message
    assert before <= set(host.pages) != set()
    evict_all(llm)
    assert llm.generate(first, ONE, progress=False).num_cached_tokens > 0


def test_namespaces_never_share_pages() -> None:
    llm = engine()
    prompt = prompts(llm)[0]
    llm.generate(prompt, ONE, extra_key="a", progress=False)
    evict_all(llm)
    assert llm.generate(prompt, ONE, progress=False).num_cached_tokens == 0
    assert llm.generate(prompt, ONE, extra_key="b", progress=False).num_cached_tokens == 0
    assert llm.generate(prompt, ONE, extra_key="a", progress=False).num_cached_tokens > 0
    host = llm.assembly.parts.tree_cache.host
    keys = {host.digests(prompt, key)[0] for key in ("a", ("a", None), (None, "a"), None, "None")}
    assert len(keys) == 5


def test_the_digest_of_a_model_is_of_all_that_decides_its_kv(tmp_path: Path) -> None:
    weights = tmp_path / "a.safetensors"
    config = EngineConfig(random_seed=0, context_len=64, hicache_tokens=64, hicache_dir=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    weights.write_bytes(b"1")
    os.utime(weights, ns=(0, 0))
    found = [host_tier.model_digest(tmp_path, config)]
    assert host_tier.model_digest(tmp_path, config) == found[0]
    os.utime(weights, ns=(0, 1))
    assert host_tier.model_digest(tmp_path, config) == found[0]  # a copy of the same weights
    weights.write_bytes(b"2")
    os.utime(weights, ns=(0, 0))
    found.append(host_tier.model_digest(tmp_path, config))
    weights.rename(tmp_path / "b.safetensors")
    found.append(host_tier.model_digest(tmp_path, config))
    for changed in ({"dtype": "float32"}, {"random_seed": 1}, {"context_len": 65}):
        found.append(host_tier.model_digest(tmp_path, config.updated(**changed)))
    code = tmp_path / "mine.py"
    for choice, text in (("mine:A", ""), ("mine:B", ""), (f"{code}:A", "1"), (f"{code}:A", "2")):
        code.write_text(text)
        theirs = config.updated(use={"attention": choice})
        found.append(host_tier.model_digest(tmp_path, theirs))
    ours = config.updated(use={"attention": "triton"})
    assert host_tier.model_digest(tmp_path, ours) == host_tier.model_digest(tmp_path, config)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match="no file of weights"):
        host_tier.model_digest(tmp_path, config)
    found.append(host_tier.model_digest(tmp_path, config.updated(load_format="dummy")))
    parts = [tmp_path / f"a-0000{i}-of-00002.gguf" for i in (1, 2)]
    (tmp_path / "weights.gguf").symlink_to(parts[0])
    for texts in ("ab", "bb", "ba"):
        for part, text in zip(parts, texts):
            part.write_text(text)
        found.append(host_tier.model_digest(tmp_path, config))
    (tmp_path / "config.json").write_text("[]")
    found.append(host_tier.model_digest(tmp_path, config))
    assert len(set(found)) == len(found)


class EachPageAlone(host_cache.HostCache):
    """A page's digest is of its own tokens, not of those before it."""

    def digests(self, token_ids, extra_key):
        size = self.pool.page_len
        starts = range(0, len(token_ids) - size + 1, size)
        return [str((token_ids[start : start + size], extra_key)) for start in starts]


class WithoutNamespace(host_cache.HostCache):
    """Adapters and tenants share pages."""

    def digests(self, token_ids, extra_key):
        return super().digests(token_ids, None)


class TwoOwners(host_cache.HostCache):
    """A page that is taken for a digest stays free."""

    def take(self, num, keep):
        return [*self.free[-num:], 0, 0][:num]


def shares_wrongly(llm: LLM) -> bool:
    """Whether a page is found behind other tokens, or in another namespace."""
    first, second, third = (list(range(start, start + 16)) for start in (40, 60, 80))
    for ids in ([*first, *second, 5], [*third, *first, 5]):
        llm.generate(ids, ONE, progress=False)
    evict_all(llm)
    found = llm.generate([*third, *second, 5], ONE, progress=False).num_cached_tokens
    evict_all(llm)
    foreign = llm.generate([*third, 5], ONE, extra_key="other", progress=False).num_cached_tokens
    return (found, foreign) != (16, 0)


BUGS = Bugs("host cache", f"{host_tier.__name__}.HostCache", "shares_wrongly")
BUGS.add_all(EachPageAlone, WithoutNamespace, says="wrongly")
BUGS.add_all(TwoOwners, says="owners of host pages")


@BUGS.found_by(AssertionError, honest=True)
def test_pages_belong_to_all_tokens_before_them_and_to_a_namespace(
    bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    bug.plant_in(monkeypatch)
    return {"shares_wrongly": "wrongly"} if shares_wrongly(engine()) else {}


def test_flush_forgets_the_host_too() -> None:
    llm = engine()
    llm.generate(prompts(llm)[0], ONE, progress=False)
    assert llm.flush_cache()
    assert llm.generate(prompts(llm)[0], ONE, progress=False).num_cached_tokens == 0


@pytest.mark.full
@pytest.mark.parametrize("disk_tier", ["reference", "optimized"])
def test_pages_on_disk_survive_the_engine(alone: list[list[int]], tmp_path: Path, disk_tier: str) -> None:
    flags = {"hicache_dir": str(tmp_path), "hicache_tokens": 512, "use": {"disk_tier": disk_tier}}
    first = engine(**flags)
    prompt = prompts(first)[0]
    first.generate(prompt, ONE, progress=False)
    finish_writes(first)
    assert len(list(tmp_path.glob("*.kv"))) == len(prompt) // 16
    again = engine(**flags)
    output = again.generate(prompt, GREEDY, progress=False)
    assert output.output_ids == alone[0]
    assert output.num_cached_tokens == num_loaded(again) == (len(prompt) - 1) // 16 * 16
    other = LLM("tiny-moe", **REFERENCE, **flags)
    assert other.generate(prompt, ONE, progress=False).num_cached_tokens == 0
    for llm in (again, other):
        finish_writes(llm)
    for path in tmp_path.glob("*.kv"):
        path.write_bytes(b"cut off")
    broken = engine(**flags)
    assert broken.generate(prompt, ONE, progress=False).num_cached_tokens == 0
    small = engine(**flags, hicache_dir_tokens=32)
    small.generate(prompt[::-1], ONE, progress=False)
    finish_writes(small)
    assert len(list(tmp_path.glob("*.kv"))) == 2


@pytest.mark.gpu
def test_the_disk_tier_on_a_gpu(alone: list[list[int]], tmp_path: Path) -> None:
    """Pages are written from page-locked memory that a copy from the GPU fills, and read into it."""
    flags = {"panel": "optimized", "device": "cuda", "dtype": "float32", "hicache_tokens": 512}
    for _ in range(2):
        llm = engine(hicache_dir=str(tmp_path), **flags)
        for _ in range(3):
            outputs = llm.generate(prompts(llm)[:NUM_PROMPTS], GREEDY, progress=False)
            assert [output.output_ids for output in outputs] == alone
            finish_writes(llm)
            evict_all(llm)
            llm.assembly.parts.tree_cache.host.clear()
        assert num_loaded(llm) > 0


def finish_writes(llm: LLM) -> None:
    llm.assembly.parts.tree_cache.host.disk.finish()


@pytest.mark.parametrize("panel", ["reference", "optimized"])
@pytest.mark.parametrize("flags", [{"hicache_tokens": 96}, {"hicache_tokens": 2048, "page_size": 4}], ids=str)
def test_answers_stay_when_pages_go_to_a_disk(
    alone: list[list[int]], tmp_path: Path, panel: str, flags: dict[str, Any]
) -> None:
    use = dict.fromkeys(("scheduler", "host_pool", "disk_tier"), panel)
    llm = engine(hicache_dir=str(tmp_path), use=use, **flags)
    for _ in range(3):
        outputs = llm.generate(prompts(llm)[:NUM_PROMPTS], GREEDY, progress=False)
        assert [output.output_ids for output in outputs] == alone
        evict_all(llm)
    finish_writes(llm)
    host = llm.assembly.parts.tree_cache.host
    assert host.disk.asked == host.disk.arriving == {}
    host.clear()  # the disk alone
    before = num_loaded(llm)
    llm.generate(prompts(llm)[0], ONE, progress=False)
    assert num_loaded(llm) > before


@pytest.mark.parametrize("scheduler", ["reference", "optimized"])
def test_decoding_goes_on_while_a_disk_is_slow(
    alone: list[list[int]], tmp_path: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits for its pages; the requests that run do not."""
    monkeypatch.setattr(disk_pages, "MAX_WAIT_SECONDS", 60.0)
    flags = {"hicache_dir": str(tmp_path), "use": {"disk_tier": "optimized", "scheduler": scheduler}}
    llm = engine(**flags)
    first = prompts(llm)[0]
    llm.generate(first, ONE, progress=False)
    finish_writes(llm)
    evict_all(llm)
    host = llm.assembly.parts.tree_cache.host
    host.clear()
    may_read = Event()
    read = host.disk.tier._read
    monkeypatch.setattr(host.disk.tier, "_read", lambda *given: may_read.wait(30) and read(*given))
    [running] = llm.submit(first[::-1], GREEDY)
    llm.step()
    [waiting] = llm.submit(first, GREEDY)
    while not running.is_finished:
        assert llm.step()
    assert not waiting.output_ids
    may_read.set()
    while llm.step():
        pass
    assert waiting.output_ids == alone[0]
    assert waiting.num_cached_tokens == num_loaded(llm) > 0
    monkeypatch.setattr(disk_pages, "MAX_WAIT_SECONDS", 0.05)
    may_read.clear()
    evict_all(llm)
    host.clear()
    late = llm.generate(first, GREEDY, progress=False)
    assert (late.output_ids, late.num_cached_tokens) == (alone[0], 0)
    may_read.set()
    finish_writes(llm)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a GPU")
def test_the_optimized_panel_in_the_interpreter() -> None:
    llm = engine(panel="optimized", use={"attention": "triton"}, max_running_requests=2, hicache_tokens=64)
    ids = list(range(40, 58))
    cold = llm.generate(ids, ONE, progress=False)
    evict_all(llm)
    warm = llm.generate(ids, ONE, progress=False)
    assert warm.output_ids == cold.output_ids
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, {"page_size": 16}, {"enable_mixed_chunk": True}], ids=str)
def test_the_optimized_panel_on_a_gpu(alone: list[list[int]], flags: dict[str, Any]) -> None:
    llm = engine(panel="optimized", device="cuda", dtype="float32", **flags)
    for _ in range(3):
        outputs = llm.generate(prompts(llm)[:NUM_PROMPTS], GREEDY, progress=False)
        assert [output.output_ids for output in outputs] == alone
        evict_all(llm)
    assert num_loaded(llm) > 0


def test_refusals(tmp_path: Path) -> None:
    for flags, message in (
        ({"disable_radix_cache": True}, "does not work with disable_radix_cache=True"),
        ({"hicache_tokens": 8}, "hicache_tokens=8 is 0 pages of 16 tokens"),
        ({"hicache_tokens": None, "hicache_dir": str(tmp_path)}, "needs hicache_tokens"),
        ({"hicache_dir": __file__}, f"hicache_dir={__file__}: "),
        ({"speculative": "standalone", "speculative_draft_model": "tiny-dense"}, "the draft model's KV"),
    ):
        with pytest.raises(ValueError, match=message):
            engine(**flags)

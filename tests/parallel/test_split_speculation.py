"""Speculation in an engine whose prompts come from another one: the answers of one engine, and its drafts."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.types import Req, SpeculationStats
from tests.parallel.engine_pair import config_of, output_ids, pair_of
from tests.parallel.tiny_ranks import answers, requests
from tests.planted import Bug, Bugs

OPTIMIZED = dict.fromkeys(("scheduler", "drafter", "draft_tree"), "optimized")
STANDALONE = {"speculative": "standalone", "speculative_num_steps": 3}
FLAGS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative": "ngram"},
    "ngram chains": {"speculative": "ngram", "speculative_topk": 1, "speculative_num_draft_tokens": 4},
    "standalone": STANDALONE,
    "standalone, chunks": STANDALONE | {"chunked_prefill_size": 8},
    "standalone trees": STANDALONE | {"speculative_topk": 2, "speculative_num_draft_tokens": 6},
    "small pool": STANDALONE | {"max_total_tokens": 64},
    "optimized ngram": {"speculative": "ngram", "speculative_topk": 1, "use": OPTIMIZED},
    "optimized standalone": STANDALONE | {"use": OPTIMIZED},
}


def config_with(folders: dict[str, str], flags: dict[str, Any]) -> EngineConfig:
    """The draft model is the target: what it drafts after the right tokens is accepted."""
    flags = {**flags}
    use = {"transport": "reference", **flags.pop("use", {})}
    if flags["speculative"] == "standalone":
        flags["speculative_draft_model"] = folders["llama"]
    return config_of(folders, "reference", **flags).updated(use=use)


def split(config: EngineConfig) -> tuple[list[Req], SpeculationStats]:
    """All requests through two engines, cold and with cached prompts, and what speculation gave cold."""
    with pair_of(config) as pair:
        for turn in range(2):
            reqs = requests()
            for req in reqs:
                pair.decode_side.add_request(req)
            pair.until(lambda: not pair.decode_side.has_work())
            if turn == 0:
                cold, stats = reqs, pair.decode_side.stats().speculation
            assert output_ids(reqs) == output_ids(cold)
        pair.finish()
    return cold, stats


@pytest.mark.parametrize("name", FLAGS)
def test_drafts_change_no_answer(folders: dict[str, str], name: str) -> None:
    config = config_with(folders, FLAGS[name])
    found, _ = split(config)
    plain = config_of(folders, "reference")
    assert output_ids(found) == output_ids(answers(assemble(plain)))


def gains(folders: dict[str, str]) -> tuple[int, int]:
    """Accepted drafts: behind another engine, and in one engine."""
    config = config_with(folders, STANDALONE)
    alone = assemble(config)
    answers(alone)
    return split(config)[1].num_accepted_tokens, alone.scheduler.stats().speculation.num_accepted_tokens


def learns_less(folders: dict[str, str]) -> bool:
    found, expected = gains(folders)
    assert expected >= 15
    return found < expected - 5  # requests come one by one there, and all at once here


BUGS = Bugs("prompts of another engine", finder="its drafts are accepted as often")
LEARNS = "shared.speculation.computed_prompt"
for _name, _before, _after in (
    ("the tokens in reverse", "torch.tensor(prompt[start:end]", "torch.tensor(prompt[start:end][::-1]"),
    (
        "positions from zero",
        "torch.arange(start, end, device",
        "torch.zeros(end - start, dtype=torch.int64, device",
    ),
    (
        "the last token alone",
        "range(req.cache_protected_len, len(prompt)",
        "range(len(prompt) - 1, len(prompt)",
    ),
):
    BUGS.words(_name, f"{LEARNS}:computed_chunks", (LEARNS, _before, _after))


@BUGS.found_by(honest=True)
def test_a_draft_model_knows_prompts_of_another_engine(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    if bug.plant is not None:
        monkeypatch.setattr("diptych.reference.speculative.speculative_decoding.computed_chunks", bug.planted)
    return learns_less(folders)

"""Clauses of drafters, on the built-in model: drafts are trees, and answers do not change."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file

from diptych.shared import registry
from diptych.shared.config import EngineConfig, read_config, read_draft_config
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.build.features.beside_model import drafter_class
from diptych.shared.interfaces import Drafter
from diptych.shared.loading.draft_weights import dummy_draft_weights
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.scheduling.invariants import check_idle, check_invariants
from diptych.shared.tools.conformance.clauses.case import Case, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.types import (
    DraftBatch,
    DraftShape,
    DraftTree,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    Req,
    SamplingParams,
    StepOutput,
)

PROMPTS = (
    "Count from 3 to 20.",
    "Repeat this sentence: Mara has the red kite. Bo has the blue drum.",
    "Say the word kite 9 times.",
)


@cache
def random_block_head() -> str:
    """A folder with a DFlash head of random weights for the built-in model."""
    folder = Path(mkdtemp(prefix="diptych-dflash-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 1871, "target_layer_ids": [1, 3, 4]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    draft_config = read_draft_config(folder, read_config(ASSETS / "tiny-dense"))
    save_file(dict(dummy_draft_weights(draft_config)), folder / "model.safetensors")
    return str(folder)


DRAFT_MODELS: dict[str, Callable[[], str]] = {
    "standalone": lambda: "tiny-dense",
    "eagle3": lambda: "tiny-dense-eagle3",
    "dflash": random_block_head,
}


class Setting(Case):
    page_size: int = 1
    chunk: int | None = None
    max_new_tokens: int = 16

    def flags(self) -> dict[str, Any]:
        flags: dict[str, Any] = {
            "speculative": self.algorithm,
            "speculative_num_steps": self.shape.num_steps,
            "speculative_topk": self.shape.top_k,
            "speculative_num_draft_tokens": self.shape.num_draft_tokens,
        }
        if self.algorithm in DRAFT_MODELS:
            flags["speculative_draft_model"] = DRAFT_MODELS[self.algorithm]()
        return flags


SETTINGS = table(
    "algorithm shape page_size chunk",
    *(
        (algorithm, *rest)
        for algorithm in ("ngram", "standalone", "eagle3")
        for rest in (
            (DraftShape(3, 1, 4), 1, None),
            (DraftShape(5, 4, 16), 1, 16),
            (DraftShape(3, 2, 8), 16, None),
            (DraftShape(1, 4, 5), 4, 12),
        )
    ),
    ("dflash", DraftShape(3, 1, 4), 1, None),
    ("dflash", DraftShape(7, 1, 8), 4, 12),
    name="{algorithm}, {shape}, page {page_size}, chunk {chunk}",
    of=Setting,
)


Branches = set[tuple[tuple[int, ...], tuple[int, ...]]]
"""A request's tokens, and drafts from its root down to a node."""


def branches_of(reqs: Sequence[Req], tree: DraftTree) -> Branches:
    branches: Branches = set()
    for i, req in enumerate(reqs):
        paths: list[tuple[int, ...]] = [()]
        for token_id, parent in list(zip(tree.token_ids[i].tolist(), tree.parents[i].tolist()))[1:]:
            paths.append((*paths[max(parent, 0)], token_id))
        branches |= {(tuple(req.all_ids), path) for path in paths[1 : int(tree.num_nodes[i])]}
    return branches


def watched(impl: type[Drafter]) -> type[Drafter]:
    """A subclass of the drafter that checks the contract about trees at every call."""

    class Watched(impl):  # type: ignore[misc, valid-type]
        def extend(
            self,
            reqs: Sequence[Req],
            forward_batch: ForwardBatch,
            hidden_states: torch.Tensor | None,
            next_token_ids: torch.Tensor,
        ) -> None:
            rows = self.rows.req_to_token.clone()
            super().extend(reqs, forward_batch, hidden_states, next_token_ids)
            expect_equal("req_to_token after extend", self.rows.req_to_token, rows)

        def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
            rows = self.rows.req_to_token.clone()
            tree: DraftTree = super().draft(batch, shape)
            expect_equal("req_to_token after draft", self.rows.req_to_token, rows)
            expect_equal("trees", (tree.batch_size, tree.num_draft_tokens), (len(batch.reqs), shape[2]))
            expect_equal("roots", tree.token_ids[:, 0], batch.root_ids)
            expect_true("no tree is too deep", int(tree.depths.amax()) <= shape.num_steps, tree.depths)
            ids = tree.token_ids
            is_token = (ids >= 0) & (ids < self.parts_of_world.num_token_ids)
            expect_true("every node is a token", bool(is_token.all()), ids)
            self.branches |= branches_of(batch.reqs, tree)
            self.last_tree = tree
            return tree

        def allocate(self, req_to_token_pool: Any, num_slots: int) -> None:
            self.rows = req_to_token_pool
            super().allocate(req_to_token_pool, num_slots)

        def __init__(self, config: EngineConfig, parts: Any) -> None:
            self.parts_of_world = parts
            self.branches: Branches = set()
            super().__init__(config, parts)

    return Watched


def world(
    impl: Any,
    setting: Setting | None,
    wrap: Callable[[type[Drafter]], type[Drafter]] = watched,
    **flags: Any,
) -> Assembly:
    """An engine with the built-in model on a CPU, with or without speculation. `wrap`: changes the drafter's
    class."""
    config = EngineConfig(
        model="tiny-dense", panel="reference", device="cpu", max_total_tokens=1024, context_len=256
    )
    if setting is None:
        return assemble(config.updated(**flags))
    config = config.updated(
        page_size=setting.page_size, chunked_prefill_size=setting.chunk, **setting.flags(), **flags
    )
    return assemble(config, replace={"drafter": wrap(drafter_class(impl, config))})


def answers(assembly: Assembly, max_new_tokens: int, **params: Any) -> dict[str, list[int]]:
    """The answers to all prompts, computed twice: the second time prefixes come from the cache."""
    scheduler, parts = assembly.scheduler, assembly.parts
    assert assembly.tokenizer is not None
    outputs: list[StepOutput] = []
    ids: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS * 2):
        req = Req(
            rid=f"r{i}",
            origin_input_ids=assembly.tokenizer.chat([{"role": "user", "content": prompt}]),
            sampling_params=SamplingParams(
                max_new_tokens=max_new_tokens, **{"temperature": 0.0, "ignore_eos": True, **params}
            ),
            seed=i,
            eos_token_ids=assembly.model_config.eos_token_ids,
        )
        ids[req.rid] = req.output_ids
        scheduler.add_request(req)
        if i % len(PROMPTS) == len(PROMPTS) - 1:
            while scheduler.has_work():
                outputs += scheduler.step()
                check_invariants(
                    scheduler.state(), parts.allocator, parts.req_to_token_pool, parts.tree_cache
                )
    check_idle(parts.allocator, parts.req_to_token_pool, parts.tree_cache)
    errors = [o.finished_reason for o in outputs if o.finished_reason and o.finished_reason.kind == "error"]
    expect_equal("errors", errors, [])
    return ids


@cache
def answers_alone(max_new_tokens: int, temperature: float) -> dict[str, list[int]]:
    return answers(world(None, None), max_new_tokens, temperature=temperature)


TRAINED = Setting(
    "eagle3, trained",
    algorithm="eagle3",
    shape=DraftShape(5, 4, 16),
    page_size=4,
    chunk=12,
    max_new_tokens=60,
)
"""The built-in head, on what it was trained for: answers that end where they end."""

LOWEST_ACCEPTANCE = 3.0
"""Tokens per verification, the bonus token included."""


def guesses_of(impl: Any) -> tuple[float, Branches]:
    """Tokens per verification, and all drafts."""
    assembly = world(impl, TRAINED)
    answers(assembly, TRAINED.max_new_tokens, ignore_eos=False)
    drafter: Any = assembly.parts.drafter
    return assembly.scheduler.stats().speculation.acceptance_length_with_bonus, drafter.branches


@cache
def guesses_of_the_reference() -> tuple[float, Branches]:
    return guesses_of(registry.load("drafter", "reference"))


@contract(
    "With a trained draft model it drafts the reference's trees, to one branch in fifty, and as much is "
    "accepted, to a hundredth: what reads other hidden states, or at other positions, guesses well still.",
    (TRAINED,),
)
def trained_drafts(impl: Any, case: Setting) -> None:
    if isinstance(impl, type):
        return  # one drafter, whatever its model
    acceptance, branches = guesses_of(impl)
    expected_acceptance, expected = guesses_of_the_reference()
    expect_true("the reference is good", expected_acceptance >= LOWEST_ACCEPTANCE, expected_acceptance)
    share = len(branches & expected) / len(branches | expected)
    expect_true("the branches are the same", share >= 0.98, share)
    expect_true(
        f"acceptance near {expected_acceptance:.3f}",
        abs(acceptance - expected_acceptance) <= 0.01 * expected_acceptance,
        acceptance,
    )


@contract("It guesses trees, and leaves greedy answers as they are.", SETTINGS)
def greedy_answers(impl: Any, case: Setting) -> None:
    expected = answers_alone(case.max_new_tokens, 0.0)
    expect_equal("answers", answers(world(impl, case), case.max_new_tokens), expected)


@contract("It leaves sampled answers as they are.", SETTINGS[::4])
def sampled_answers(impl: Any, case: Setting) -> None:
    expected = answers_alone(case.max_new_tokens, 1.0)
    expect_equal("answers", answers(world(impl, case), case.max_new_tokens, temperature=1.0), expected)


@contract(
    "Drafting with the target itself is right every time: positions, slots and KV line up.",
    tuple(setting for setting in SETTINGS if setting.algorithm == "standalone"),
)
def target_as_draft(impl: Any, case: Setting) -> None:
    if isinstance(impl, type):
        return  # one drafter, whatever its model
    assembly = world(impl, case)
    answers(assembly, case.max_new_tokens)
    stats = assembly.scheduler.stats().speculation
    expect_true("something was drafted", stats.num_drafted_tokens > 0)
    if case.shape.top_k == 1 or case.shape.num_steps == 1:
        expect_equal("accepted drafts", stats.num_accepted_tokens, stats.num_drafted_tokens)
    else:  # where the next token is uncertain, the likeliest continuation may start with another token
        expect_true("nine in ten are accepted", stats.acceptance_rate >= 0.9, stats)


@contract(
    "Drafting with the target itself, each node is among the likeliest after its own ancestors, as the target"
    " sees them: no beam sees another one.",
    tuple(setting for setting in SETTINGS if setting.algorithm == "standalone" and setting.shape.top_k > 1),
)
def beams_are_alone(impl: Any, case: Setting) -> None:
    if isinstance(impl, type):
        return
    assembly = world(impl, case)
    runner = assembly.parts.model_runner
    drafter: Any = assembly.parts.drafter
    forward = runner.forward

    def verified(forward_batch: ForwardBatch) -> LogitsOutput:
        output = forward(forward_batch)
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            tree: DraftTree = drafter.last_tree
            num_token_ids = assembly.parts.num_token_ids
            logits = output.next_token_logits[:, :num_token_ids].view(*tree.token_ids.shape, -1)
            parents = tree.parents.clamp(min=0)[:, :, None].expand_as(logits)
            after_parent = logits.gather(1, parents)
            least = after_parent.topk(case.shape.top_k, dim=-1).values[..., -1]
            own = after_parent.gather(2, tree.token_ids[:, :, None])[..., 0]
            is_likely = own >= least - 1e-3  # float32 sums in another order
            expect_true("nodes are likely", bool((is_likely | (tree.parents < 0)).all()), is_likely)
        return output

    runner.forward = verified  # type: ignore[method-assign]
    answers(assembly, case.max_new_tokens)

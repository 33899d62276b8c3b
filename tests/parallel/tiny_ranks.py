"""Tiny random models for several ranks, and what all of their requests get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.processes.ranks import collectives_of
from diptych.shared.engine.processes.replicas_in_step import ScheduleInStep
from diptych.shared.interfaces import Collectives
from diptych.shared.tools.conformance.oracles.rank_threads import SECONDS, on_ranks
from diptych.shared.types import Req, SamplingParams

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,  # not divisible by 2 or 4
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than four ranks
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "attention_bias": True,
    "mlp_bias": True,
    "torch_dtype": "float32",
}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "mlp_bias": False,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": True,
}
EAGLE = LLAMA | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "num_attention_heads": 2}
MAX_STEPS = 500


def make_config(model: str, **flags: Any) -> EngineConfig:
    flags = {"max_total_tokens": 2048, "max_running_requests": 8, "panel": "reference"} | flags
    return EngineConfig(
        model=model, load_format="dummy", device="cpu", dtype="float32", check_invariants=True, **flags
    )


def requests() -> list[Req]:
    """Greedy and random ones, with shared prefixes, penalties and log-probabilities."""
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {7: 2.0, 130: 3.0}},
        {"temperature": 0.0, "return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.01},
    ]
    return [
        Req(
            rid=f"r{i}",
            origin_input_ids=[(3 * j * (1 + i % 2) + 1) % 131 for j in range(5 + 4 * i)],
            sampling_params=SamplingParams(max_new_tokens=11, **params),
            seed=i,
        )
        for i, params in enumerate(asked)
    ]


def answers(assembly: Assembly) -> list[Req]:
    """All requests, finished: they come one per step."""
    scheduler, waiting, done = assembly.scheduler, requests(), requests()[:0]
    while waiting or scheduler.has_work():
        if waiting:
            done.append(waiting.pop(0))
            scheduler.add_request(done[-1])
        scheduler.step()
    return done


def answers_of_one(config: EngineConfig) -> list[Req]:
    """Those of one rank, which many tests compare with."""
    if (key := repr(config)) not in _OF_ONE:
        _OF_ONE[key] = answers(assemble(config))
    return _OF_ONE[key]


_OF_ONE: dict[str, list[Req]] = {}


def of_replicas(
    config: EngineConfig,
    size: int,
    seconds: float = SECONDS,
    in_turn: bool = False,
    impl: type[Collectives] | None = None,
    ep: int = 1,
    only: Sequence[str] = (),
    **more: Any,
) -> tuple[list[Req], list[ScheduleInStep]]:
    """The requests (`only`: with these ids), finished, of the ranks of replicas in step that take them in
    turn; and what ran them. `more`: flags that need several ranks."""

    of_all = config.updated(dp=size, ep=ep, dp_attention=True, **more)

    def run(dp: Collectives) -> tuple[list[Req], ScheduleInStep]:
        assembly = assemble(of_all, clock=lambda: 0.0, tp=dp)
        replica = ScheduleInStep(assembly.scheduler, assembly.parts.model_runner, dp)
        number = dp.rank // config.tp
        own, step = [req for req in requests() if not only or req.rid in only][number::size], 0
        waiting = list(own)
        while dp.all_gather(torch.tensor([bool(waiting) or replica.has_work()])).any():
            assert step < MAX_STEPS, "requests do not end"
            if waiting and step % 2 == 0:
                replica.add_request(waiting.pop(0))
            replica.step()
            step += 1
        return own, replica

    grid = of_all if config.tp > 1 else None
    kind = impl or collectives_of(config)
    found = on_ranks(size * config.tp, run, seconds, impl=kind, in_turn=in_turn, config=grid)
    reqs = sorted((req for own, _ in found for req in own), key=lambda req: req.rid)
    return reqs, [replica for _, replica in found]


def of_ranks(config: EngineConfig, size: int) -> list[list[Req]]:
    """The requests of each rank; no clock differs."""

    def run(tp: Collectives) -> list[Req]:
        return answers(assemble(config.updated(tp=size), clock=lambda: 0.0, tp=tp))

    return on_ranks(size, run, impl=collectives_of(config))

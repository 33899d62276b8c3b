"""No request makes a compiler work: neither in an LLM nor in a server."""

from __future__ import annotations

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.bench.serve_process import own_server
from diptych.shared.types import SamplingParams

pytestmark = pytest.mark.gpu

FLAGS: dict[str, dict[str, Any]] = {
    "tiny-dense": {},
    "tiny-moe": {},
    "Qwen3-0.6B": {"load_format": "dummy", "context_len": 8192},
    "mixed": {"model": "tiny-dense", "enable_mixed_chunk": True, "chunked_prefill_size": 512},
    "fp8": {"model": "tiny-dense", "kv_cache_dtype": "fp8_e4m3", "page_size": 16},
    "ngram": {"model": "tiny-dense", "speculative": "ngram"},
    "eagle3": {
        "model": "tiny-dense", "speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3",
    },
    "standalone": {
        "model": "tiny-dense", "speculative": "standalone", "speculative_draft_model": "tiny-dense",
    },
    "quantized": {"model": "tiny-moe", "quantization": "fp8"},
    "hybrid": {"model": "tiny-hybrid"},
    "deterministic hybrid": {"model": "tiny-hybrid", "deterministic": True},
}  # fmt: skip
PROMPT_LENS = (1, 2, 5, 16, 17, 40, 64, 130, 300, 700, 1500)
NUM_REQUESTS = (1, 2, 3, 4, 5, 9, 17, 33, 70)


def random_params(dice: random.Random, rid: int) -> SamplingParams:
    """Penalties, filters, log-probabilities, bias and grammars, each with some probability."""
    choices: dict[str, Any] = {
        "top_p": 0.9, "top_k": 20, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.5,
        "repetition_penalty": 1.1, "logit_bias": {5: 1.0}, "min_new_tokens": 3,
    }  # fmt: skip
    fields = {name: value for name, value in choices.items() if dice.random() < 0.25}
    if dice.random() < 0.3:
        fields |= {"return_logprob": True, "top_logprobs_num": dice.choice((0, 1, 5))}
        fields |= {"logprob_start_len": dice.choice((-1, 0))}
    if dice.random() < 0.2:
        fields["regex"] = "[a-z ]{1,40}"
    temperature = dice.choice((0.0, 0.8))
    return SamplingParams(max_new_tokens=dice.choice((3, 4, 9)), temperature=temperature, seed=rid, **fields)


def random_prompts(llm: LLM, dice: random.Random, num: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Arguments of `LLM.generate`."""
    limit = llm.assembly.parts.num_token_ids
    prompts = [[dice.randrange(limit) for _ in range(dice.choice(PROMPT_LENS))] for _ in range(num)]
    params = [random_params(dice, rid) for rid in range(num)]
    return prompts, [each.updated(regex=None) if llm.tokenizer is None else each for each in params]


@pytest.mark.parametrize("name", FLAGS)
def test_no_request_of_an_llm_compiles(name: str) -> None:
    llm = LLM(**{"model": name, "device": "cuda", "max_total_tokens": 65536, **FLAGS[name]})
    dice = random.Random(0)
    for num_requests in NUM_REQUESTS:
        llm.generate(*random_prompts(llm, dice, num_requests), progress=False)
    several = SamplingParams(n=4, temperature=0.8, max_new_tokens=8)
    llm.generate([list(range(20))], several, progress=False)
    assert " ".join(each.kernel for each in llm.assembly.compilations.after_ready) == ""
    assert llm.stats().num_compiled_kernels == 0


def test_no_request_of_a_server_compiles() -> None:
    dice = random.Random(1)
    with own_server(["--model", "tiny-dense", "--device", "cuda"]) as url:

        def complete(rid: int) -> None:
            body: dict[str, Any] = {
                "model": "tiny-dense", "prompt": "Count from 3 to 9. " * dice.choice((1, 5, 40)),
                "max_tokens": 9, "temperature": dice.choice((0, 0.8)), "n": dice.choice((1, 3)), "seed": rid,
            }  # fmt: skip
            body |= {"logprobs": 2} if dice.random() < 0.3 else {}
            body |= {"frequency_penalty": 0.5} if dice.random() < 0.3 else {}
            body |= {"top_p": 0.9} if dice.random() < 0.3 else {}
            data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
            urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data, headers)).read()

        with ThreadPoolExecutor(16) as clients:
            list(clients.map(complete, range(64)))
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert "diptych:kernels_compiled_after_ready_total 0.0" in metrics

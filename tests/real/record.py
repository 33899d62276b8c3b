"""Measures number formats, modes and drafts on the real model, and writes a file of results:

python -m tests.real.record -o FILE
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from diptych import LLM
from diptych.shared.tools.bench import result_header
from tests.real import measure
from tests.real.fetch import FILE, PACKAGE, SITE, fetch_model
from tests.real.measure import CODE, FORMAT_FLAGS, FP32, PROSE, compared, distributions, engine

NUM_PROSE, NUM_CODE = 250, 150
NUM_ANSWERED, NUM_DRAFTED = 32, 64
"""Most tokens of an answer: to compare modes, and to count drafts."""

MODES: dict[str, dict[str, Any]] = {
    "pages of 16 tokens": {"page_size": 16},
    "pages of 4 tokens": {"page_size": 4},
    "chunks of 64 tokens": {"chunked_prefill_size": 64},
    "mixed steps of 16 tokens": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "no prefix cache": {"disable_radix_cache": True},
    "host tier": {"hicache_tokens": 2048},
    "deterministic": {"deterministic": True},
    "n-gram drafts": {"speculative": "ngram"},
}
"""Each in float32."""

DRAFTED = {
    "summary": f"Summarize this text in five sentences.\n\n{PROSE}",
    "code": "Rename the function by_item to count_items, and print the whole module.\n\n"
    f"```python\n{CODE}```",
    "story": "Tell a story about a lighthouse keeper.",
}
"""The last has nothing to repeat but the answer itself."""


class Baseline:
    """The plain engine in float32."""

    def __init__(self) -> None:
        llm = engine("reference", **FP32)
        self.ids = measure.text_ids(llm, NUM_PROSE, NUM_CODE)
        self.expected = distributions(llm, self.ids)
        self.answers = measure.answers(llm, NUM_ANSWERED)
        self.drafted = {kind: answered(llm, kind).output_ids for kind in DRAFTED}

    def compared(self, found: torch.Tensor) -> dict[str, Any]:
        return compared(self.expected[-len(found) :], found, self.ids)


def answered(llm: LLM, kind: str) -> Any:
    messages = [{"role": "user", "content": DRAFTED[kind]}]
    return llm.chat(messages, temperature=0, max_tokens=NUM_DRAFTED, progress=False)


def formats(base: Baseline) -> Iterator[dict[str, Any]]:
    yield row("format", "fp32", base.compared(base.expected))
    for name, flags in FORMAT_FLAGS.items():
        yield row("format", name, base.compared(distributions(engine("reference", **flags), base.ids)))


def peers(base: Baseline) -> Iterator[dict[str, Any]]:
    """transformers with the weights that the engine reads, and llama.cpp if its server is there."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from diptych.shared.loading.model_path import resolve_model_path
    from diptych.shared.loading.weights import iterate_weights

    folder = resolve_model_path(str(FILE))
    weights = dict(iterate_weights(folder))
    config = LlamaConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        missing, _ = model.load_state_dict({k: v.to(dtype) for k, v in weights.items()}, strict=False)
        assert set(missing) <= {"lm_head.weight"}  # that of the embedding
        with torch.inference_mode():
            logits = model(torch.tensor([base.ids])).logits[0, :-1]
        yield row("peer", f"transformers, {name}", base.compared(logits.float().log_softmax(-1)))
    if SITE.is_dir():
        from tests.real.llama_cpp import running, scored

        with running(FILE) as url:
            yield row("peer", "llama.cpp", scored(url, base.expected, base.ids))


def modes(base: Baseline) -> Iterator[dict[str, Any]]:
    for name, flags in MODES.items():
        llm = engine("reference", **FP32, **flags)
        is_same = measure.answers(llm, NUM_ANSWERED) == base.answers
        yield row("mode", name, base.compared(distributions(llm, base.ids)) | {"same_answers": is_same})
    yield row("mode", "cached prefix", cached(base))


def cached(base: Baseline) -> dict[str, Any]:
    """The second half of the text, whose first half is in the prefix cache."""
    llm, middle = engine("reference", **FP32), len(base.ids) // 2
    llm.generate(base.ids[:middle], max_tokens=1, progress=False)
    found = base.compared(distributions(llm, base.ids, middle))
    first, again = (measure.answers(llm, NUM_ANSWERED) for _ in range(2))
    return found | {"same_answers": first == again == base.answers}


def drafts(base: Baseline) -> Iterator[dict[str, Any]]:
    llm = engine("reference", **FP32, speculative="ngram")
    for kind, plain in base.drafted.items():
        out = answered(llm, kind)
        found = {
            "num_tokens": len(out.output_ids),
            "num_verifications": out.speculation.num_verifications,
            "tokens_per_verification": out.speculation.acceptance_length_with_bonus,
            "acceptance_rate": out.speculation.acceptance_rate,
            "same_answers": out.output_ids == plain,
        }
        yield row("drafts", kind, found)


def row(kind: str, name: str, found: dict[str, Any]) -> dict[str, Any]:
    gc.collect()
    rounded = {
        key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()
    }
    print(f"{kind}: {name:<26}", *(f"{key} {value}" for key, value in rounded.items()), flush=True)
    return {"kind": kind, "name": name, **rounded}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    fetch_model()
    torch.set_num_threads(1)  # the same order of summation on every computer
    base, results = Baseline(), []
    facts = {"package": PACKAGE, "file": FILE.name}
    for result in chain(
        formats(base), peers(base), modes(base), drafts(base)
    ):  # an interrupt keeps what is done
        results.append(result)
        report = {**result_header.header("real"), **facts, "results": results}
        result_header.write_json(options.output, report)


if __name__ == "__main__":
    main()

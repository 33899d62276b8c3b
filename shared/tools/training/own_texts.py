"""Texts that a target writes itself, its questions too if none are given, and its hidden states there: what
heads are trained on."""

import json
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import typer
from torch.nn import functional

from diptych.shared.config import ModelConfig
from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import CausalLM
from diptych.shared.modeling.kv_pool import attention_component
from diptych.shared.tools.bench.prompt_texts import Asked, encode
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.tools.corpus.corpus import training_chats
from diptych.shared.types import SamplingParams
from diptych.shared.types.attention import AttentionLayer

TEXTS_AT_ONCE = {"cpu": 16, "cuda": 64}
ANSWERS_AT_ONCE = 2048
RUNNING = {"cpu": 64, "cuda": 1024}
GRAPHS = (1, 32, 128, 256, 512, 768, 1024)
QUESTION_LEN = 96
"""Of questions that the target asks itself, in tokens; longer ones are left out."""


class Text(NamedTuple):
    """A chat that ends with the target's answer, and the target's hidden states, in its dtype or bfloat16."""

    token_ids: torch.Tensor  # [n]
    is_said: torch.Tensor  # [n]: by the assistant, in any of its turns
    features: torch.Tensor  # [n, num_features * hidden_size]
    last: torch.Tensor  # [n, hidden_size]: what the target's output projection takes
    anchors: list[int]  # any token of an answer but the last


class Target(NamedTuple):
    model: CausalLM
    config: ModelConfig
    layers: tuple[int, ...]  # whose inputs the head takes
    mask_id: int

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


Answer = tuple[list[int], list[bool]]
"""Token ids of a chat, and which of these the assistant says."""


def reader_of(target: str, device: str) -> LLM:
    """The target whose hidden states are read: its operations can be differentiated."""
    options: dict[str, Any] = {"dtype": "float32", "max_running_requests": RUNNING["cpu"]}
    if device == "cuda":  # nothing is written
        options = {"dtype": "bfloat16", "max_running_requests": 1, "max_total_tokens": 4096}
    return LLM(model=target, panel="reference", device=device, disable_radix_cache=True, **options)


def writer_of(target: str, reader: LLM) -> LLM:
    """The target that writes: on a GPU an engine of its own, in large batches."""
    if reader.config.device != "cuda":
        return reader
    return LLM(
        model=target, max_running_requests=RUNNING["cuda"], cuda_graph_bs=GRAPHS, mem_fraction_static=0.3
    )  # fmt: skip


def questions(num: int) -> list[Asked]:
    """Chats of the corpus up to the assistant's last words, each once: a held-out one is not trained on."""
    asked = dict[str, Asked]()
    for chat in islice(training_chats("dflash"), num):
        last = max(i for i, message in enumerate(chat) if message["role"] == "assistant")
        asked.setdefault(json.dumps(chat[:last]), [dict(message) for message in chat[:last]])
    return [*asked.values()]


def own_questions(llm: LLM, num: int, seconds: float = 0.0) -> list[Asked]:
    """What the target writes where its chat template expects a user's words, each once. After `seconds`, if
    there are any, no more are begun."""
    assert llm.tokenizer is not None
    before, _, _ = llm.tokenizer.render([{"role": "user", "content": "@@"}]).partition("@@")
    prompt = llm.tokenizer.encode(before, add_special_tokens=False)
    begin, asked = time.monotonic(), dict[str, None]()
    for start in range(0, num, ANSWERS_AT_ONCE):
        params = [
            SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=QUESTION_LEN, seed=i)
            for i in range(start, min(start + ANSWERS_AT_ONCE, num))
        ]
        outputs: Any = llm.generate([prompt] * len(params), params, progress=False)
        asked |= dict.fromkeys(
            output.text.strip() for output in outputs if len(output.output_ids) < QUESTION_LEN
        )
        if seconds and time.monotonic() - begin > seconds:
            break
    asked.pop("", None)
    typer.echo(f"{len(asked)} questions in {time.monotonic() - begin:.0f} s")
    return [[{"role": "user", "content": text}] for text in asked]


def answered(
    llm: LLM, asked: Sequence[Asked], max_new_tokens: int, temperature: float = 0.0, seconds: float = 0.0
) -> list[Answer]:
    """Prompts and the target's answers: greedy, with a `temperature` every second one is sampled. After
    `seconds`, if there are any, no more are begun."""
    begin, answers = time.monotonic(), list[Answer]()
    for start in range(0, len(asked), ANSWERS_AT_ONCE):
        part = asked[start : start + ANSWERS_AT_ONCE]
        prompts = encode(llm, part)
        params = [
            SamplingParams(temperature=temperature * (i % 2), max_new_tokens=max_new_tokens, seed=i)
            for i in range(start, start + len(part))
        ]
        outputs: Any = llm.generate(prompts, params, progress=False)
        answers += [
            (prompt + output.output_ids, said_before(llm, chat, prompt) + [True] * len(output.output_ids))
            for chat, prompt, output in zip(part, prompts, outputs)
        ]
        if seconds and time.monotonic() - begin > seconds:
            break
    elapsed, num_tokens = time.monotonic() - begin, sum(sum(is_said) for _, is_said in answers)
    typer.echo(f"{len(answers)} answers, {num_tokens} tokens, {num_tokens / elapsed:.0f} tokens/s")
    return answers


def said_before(llm: LLM, asked: Asked, prompt: list[int]) -> list[bool]:
    """Which tokens of a prompt are the assistant's earlier answers, with the token that ends each."""
    is_said = [False] * len(prompt)
    chat = [] if isinstance(asked, str) else asked
    for i, message in enumerate(chat):
        if message["role"] == "assistant":
            (before,) = encode(llm, [chat[:i]])
            for place in range(len(before), len(prompt)):
                is_said[place] = prompt[: len(before)] == before
                if prompt[place] in llm.assembly.model_config.eos_token_ids:
                    break
    return is_said


class WholeTexts:
    """Attention of texts from their first token on, all at once. Layers with more than a causal mask go to
    the session's attention."""

    def __init__(self, session: ModelSession) -> None:
        self.other = session.attention

    def plan(self, batch: Any) -> tuple[Any, torch.Tensor]:
        """With the place of each token in [num_texts, text_len] of equally long texts."""
        lens = batch.extend_seq_lens_cpu
        firsts = torch.arange(len(lens), device=batch.positions.device) * max(lens)
        places = firsts.repeat_interleave(batch.extend_seq_lens) + batch.positions
        return self.other.plan(batch), places

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, *, k: Any = None, v: Any = None) -> Any:
        other, places = plan
        if (
            k is None
            or layer.sliding_window >= 0
            or layer.attention_chunk
            or layer.logit_cap
            or layer.sinks is not None
        ):
            return self.other.run(q, layer, other, k=k, v=v)
        text_len = max(request.rows.stop - request.rows.start for request in other)
        padded = []
        for x in (q, k, v):
            rows = x.new_zeros(len(other) * text_len, *x.shape[1:])
            padded.append(rows.index_copy(0, places, x).unflatten(0, (len(other), text_len)).transpose(1, 2))
        heads = functional.scaled_dot_product_attention(
            padded[0], padded[1], padded[2], is_causal=True, scale=layer.scale, enable_gqa=True
        )
        return heads.transpose(1, 2).flatten(0, 1)[places]


def texts_of(target: Target, answers: Sequence[Answer]) -> list[Text]:
    """The target's hidden states, text by text. Texts without an anchor are left out."""
    texts, num = [], TEXTS_AT_ONCE[target.device.type]
    for start in range(0, len(answers), num):
        part = answers[start : start + num]
        session = ModelSession(target.model, len(part), max(len(ids) for ids, _ in part))
        if attention_component(target.config) == "attention":
            session.attention = WholeTexts(session)
        captured = dict.fromkeys(target.layers, torch.empty(0))
        batch = session.forward_batch({i: ids for i, (ids, _) in enumerate(part)})
        last = session.hidden_states(batch, captured).to(torch.bfloat16)
        features = torch.cat([captured[layer] for layer in target.layers], dim=-1).to(torch.bfloat16)
        lens = [len(ids) for ids, _ in part]
        for (ids, is_said), *states in zip(part, features.split(lens), last.split(lens)):
            anchors = [i for i in range(len(ids) - 1) if is_said[i] and is_said[i + 1]]
            if anchors:
                token_ids, marks = (torch.tensor(row, device=target.device) for row in (ids, is_said))
                texts.append(Text(token_ids, marks, states[0].clone(), states[1].clone(), anchors))
    return texts

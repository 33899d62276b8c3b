"""The oracle: the reference panel's model in float32, which gives the expected log-probabilities."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig, read_config
from diptych.shared.loading.load_model import load_model
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.text.token_bytes import TokenBytes
from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.tools.conformance.oracles.sampling_oracle import adjusted, exact_distribution
from diptych.shared.tools.conformance.server.chat_oracle import ChatOracle
from diptych.shared.types import Req, SamplingParams

CHUNK = 512  # prompt tokens of one forward pass
NUM_CACHED = 64


class Oracle:
    """Computes expected logits. `model`: the model that the server serves: a folder in Hugging Face format, a
    built-in model or an id. `tool_call_parser`: how it writes calls, as the flag of the server. Raises
    `ValueError` if there is no model or no tokenizer.

    `vocab_size`: the number of ids with a token. `num_rows`: the rows of the LM head in the softmax: equally
    many (this project's engine), or also the padding rows behind them (vLLM, llama.cpp). `find_rows`
    decides."""

    def __init__(self, model: str | Path, tool_call_parser: str = "auto") -> None:
        self._tool_call_parser = tool_call_parser
        self.folder = resolve_model_path(str(model))
        self.tokenizer = Tokenizer.from_pretrained(self.folder)
        self.config = read_config(self.folder)
        config = EngineConfig().updated(model=str(model), device="cpu", dtype="float32", panel="reference")
        self.model = load_model(
            self.folder,
            self.config,
            config,
            lambda name: registry.load(name, "reference"),
            torch.device("cpu"),
            torch.float32,
        )
        self.vocab_size = min(self.config.vocab_size, self.tokenizer.vocab_size)
        self.num_rows = self.vocab_size
        self.context_len = self.config.context_len
        self.eos_token_ids = frozenset(self.config.eos_token_ids) | self.tokenizer.eos_token_ids
        self._known: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 [len(ids), num_rows]; row i has the logits of the token behind ids[: i + 1]. Cached by
        text. Ids of padding rows are allowed, because vLLM draws them. Raises `ValueError` for ids that the
        model does not have."""
        key = tuple(int(token_id) for token_id in ids)
        size = self.config.vocab_size
        if not key or any(not 0 <= token_id < size for token_id in key):
            raise ValueError(f"token ids must be in [0, {size}), and at least one: {key!s:.80}")
        if key not in self._known:
            session = ModelSession(self.model, max_len=len(key))
            pieces = [session.step({0: key[i : i + CHUNK]})[0] for i in range(0, len(key), CHUNK)]
            self._known[key] = torch.cat(pieces).float().numpy()
            while len(self._known) > NUM_CACHED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key][:, : self.num_rows]

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """float64 [len(ids), num_rows], log softmax of `logits`."""
        logits = self.logits(ids).astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        normalised: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return normalised

    def exact(self, prompt: Sequence[int], output: Sequence[int] = (), **params: Any) -> np.ndarray:
        """float64 [num_rows]: the probability of each token behind prompt and output, by the sampler's
        contract. `params`: fields of SamplingParams."""
        row = self.logits([*prompt, *output])[-1].tolist()
        sampling = SamplingParams(**params)
        req = Req("exact", list(prompt), sampling, 0, self.eos_token_ids, output_ids=list(output))
        if sampling.is_greedy:
            changed = np.array(adjusted(row, req))
            chosen: np.ndarray = np.eye(len(row))[int(changed.argmax())]
            return chosen
        return np.array(exact_distribution(row, req))

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """The greedy continuation, and the gap between the two best logits at each of its tokens."""
        output: list[int] = []
        leads: list[float] = []
        session = ModelSession(self.model, max_len=len(prompt) + max_tokens)
        new = list(prompt)
        while len(output) < max_tokens:
            row = session.step({0: new})[0][-1, : self.num_rows]
            best = row.topk(2).values.tolist()
            new = [int(row.argmax())]
            leads.append(best[0] - best[1])
            output += new
        return output, leads

    @cached_property
    def chat(self) -> ChatOracle:
        """Prompts and answers of conversations. Raises `ValueError` for an unknown tool parser."""
        return ChatOracle(self, self._tool_call_parser)

    @cached_property
    def text_of_token(self) -> list[str]:
        """The text of each token alone, as servers write it: its bytes, with U+FFFD for incomplete
        characters."""
        table = TokenBytes(self.tokenizer)
        return [table.of(i).decode("utf-8", errors="replace") for i in range(self.vocab_size)]

    @cached_property
    def id_of_text(self) -> dict[str, int]:
        """Token text -> id, without texts that several tokens share."""
        found: dict[str, int] = {}
        shared: set[str] = {""}
        for token_id, text in enumerate(self.text_of_token):
            if text in found:
                shared.add(text)
            found[text] = token_id
        return {text: token_id for text, token_id in found.items() if text not in shared}

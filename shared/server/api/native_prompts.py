"""From a body of /generate to its prompts and their parameters: each option is one for all, or a list."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import numpy as np

from diptych.shared.engine.requests.input_embeds import PLACEHOLDER
from diptych.shared.server.api.field_types import MAX_PROMPTS
from diptych.shared.server.api.generation import Generation
from diptych.shared.server.api.native_protocol import NativeRequest, NativeSamplingParams
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.http.errors import ApiError, bad_request, first_word, renamed
from diptych.shared.types import SamplingParams

OF_A_PROMPT = ("return_logprob", "top_logprobs_num", "logprob_start_len", "token_ids_logprob")
"""Fields of the body that are fields of SamplingParams."""


async def start_native(body: NativeRequest, state: ServerState) -> Generation:
    """Validate everything and make the generation; nothing runs yet."""
    if [body.text, body.input_ids, body.input_embeds].count(None) != 2:
        raise bad_request("give one of text, input_ids and input_embeds", "text")
    field, given = _prompts(body)
    if not given:
        raise bad_request(f"{field} is an empty list", field)
    if len(given) > MAX_PROMPTS:
        raise bad_request(f"{field} takes at most {MAX_PROMPTS} entries, got {len(given)}", field)
    options = _Options(body, len(given))
    prompts, params, seeds, embeds = list[list[int]](), list[SamplingParams](), list[int](), list[bytes]()
    for index, prompt in enumerate(given):
        await asyncio.sleep(0)  # all prompts together may take long
        if field == "input_embeds":
            embeds.append(_as_bytes(prompt))
            ids = [PLACEHOLDER] * len(prompt)
        else:
            ids = await state.prompts.of_text(prompt, field) if isinstance(prompt, str) else prompt
        asked = options.of("sampling_params", index)
        params.append(await _params(options, index, ids, field, state))
        prompts.append(ids)
        seed = asked.seed if asked.seed is not None else asked.sampling_seed
        seeds.append(secrets.randbits(63) if seed is None else seed)
    if len({each.n for each in params}) > 1:
        raise bad_request("n must be the same in all sampling_params", "sampling_params")
    loras = [options.of("lora_path", index) for index in range(len(given))]
    for name in loras:
        if name is not None and name not in state.adapters:
            raise ApiError(404, f"no LoRA adapter {name!r} is loaded", param="lora_path")
    state.check_admission(len(prompts), params[0].n)
    return Generation(
        state.client,
        state.prompts.tokenizer,
        state.metrics,
        prompts,
        params,
        seed=seeds,
        extra_key=body.cache_salt if body.extra_key is None else f"{body.cache_salt or ''}\0{body.extra_key}",
        priority=body.priority,
        routing_key=body.routing_key,
        lora=loras,
        input_embeds=embeds,
        diffusion=None if body.diffusion is None else body.diffusion.params(),
        name=options.names(),
        keeps_aborted=True,
    )


class _Options:
    """The options of each prompt."""

    def __init__(self, body: NativeRequest, num_prompts: int) -> None:
        self.body = body
        self.num_prompts = num_prompts
        for name in ("sampling_params", "return_logprob", "top_logprobs_num", "logprob_start_len", "rid"):
            self._check(name, getattr(body, name))
        self._check("lora_path", body.lora_path)
        if _is_nested(body.token_ids_logprob):
            self._check("token_ids_logprob", body.token_ids_logprob)
        names = self.names() or []
        if len(set(names)) < len(names):
            raise bad_request("rid has the same id twice", "rid")

    def _check(self, name: str, value: Any) -> None:
        if isinstance(value, list) and len(value) != self.num_prompts:
            raise bad_request(f"{name} has {len(value)} entries for {self.num_prompts} prompts", name)

    def of(self, name: str, index: int) -> Any:
        value = getattr(self.body, name)
        is_list = _is_nested(value) if name == "token_ids_logprob" else isinstance(value, list)
        return value[index] if is_list else value

    def names(self) -> list[str] | None:
        """An id for each prompt; of one id for several, parts."""
        rid = self.body.rid
        if isinstance(rid, str):
            return [rid] if self.num_prompts == 1 else [f"{rid}_{i}" for i in range(self.num_prompts)]
        return rid


def _prompts(body: NativeRequest) -> tuple[str, list[Any]]:
    """The field that has them, and its entries."""
    if body.text is not None:
        return "text", [body.text] if isinstance(body.text, str) else body.text
    if body.input_ids is not None:
        return "input_ids", body.input_ids if _is_nested(body.input_ids) else [body.input_ids]
    rows: Any = body.input_embeds
    is_several = bool(rows) and bool(rows[0]) and isinstance(rows[0][0], list)
    return "input_embeds", rows if is_several else [rows]


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


async def _params(
    options: _Options, index: int, prompt: list[int], field: str, state: ServerState
) -> SamplingParams:
    state.prompts.check(prompt, field)
    asked: NativeSamplingParams = options.of("sampling_params", index)
    with renamed({"logit_bias": "sampling_params.logit_bias"}):
        fields = asked.fields()
    room = state.prompts.ready.context_len - len(prompt)
    fields["max_new_tokens"] = min(fields["max_new_tokens"], room)
    try:
        params = SamplingParams(**fields, **{name: options.of(name, index) for name in OF_A_PROMPT})
    except ValueError as error:
        name = first_word(error)
        place = name if name in NativeRequest.model_fields else f"sampling_params.{name}"
        raise bad_request(str(error), place) from None
    with renamed({name: f"sampling_params.{name}" for name in fields}):
        state.prompts.check(prompt, field, params)
        return await state.prompts.with_words(params)


def _as_bytes(rows: list[list[float]]) -> bytes:
    """float32, row after row."""
    widths = {len(row) for row in rows}
    if len(widths) != 1 or 0 in widths:
        raise bad_request(f"rows of input_embeds must be of one length, got {sorted(widths)}", "input_embeds")
    with np.errstate(over="ignore"):  # the engine refuses what is not finite
        return np.array(rows, np.float32).tobytes()

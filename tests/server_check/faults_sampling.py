"""Faults of sampling: parameters without effect, seeds, samples that depend on each other."""

from __future__ import annotations

import copy
from collections import Counter

from tests.server_check.faults import changes_reply, changes_request, fault
from tests.server_check.faulty_proxy import Ask, Body, FaultyProxy, Reply


@changes_request("temperature ignored", "Every temperature above 0 acts as 1.", "sampling.temperature")
def temperature_ignored(body: Body) -> Body | None:
    return {"temperature": 1.0} if body.get("temperature", 1.0) > 0 else None


@changes_request("temperature squared", "The temperature divides twice.", "sampling.temperature")
def temperature_squared(body: Body) -> Body | None:
    return {"temperature": body.get("temperature", 1.0) ** 2}


@changes_request("greedy samples", "Temperature 0 acts as 0.7.", "sampling.greedy")
def greedy_samples(body: Body) -> Body | None:
    return {"temperature": 0.7} if body.get("temperature", 1.0) == 0 else None


@changes_request("top_p ignored", "top_p has no effect.", "sampling.top_p")
def top_p_ignored(body: Body) -> Body | None:
    return {"top_p": None}


@changes_request("top_k off by one", "top_k keeps one token too many.", "sampling.top_k")
def top_k_off_by_one(body: Body) -> Body | None:
    return {"top_k": body["top_k"] + 1} if body.get("top_k", -1) >= 1 else None


@changes_request("min_p ignored", "min_p has no effect.", "sampling.min_p")
def min_p_ignored(body: Body) -> Body | None:
    return {"min_p": None}


@changes_request("frequency penalty ignored", "frequency_penalty has no effect.", "sampling.penalties")
def frequency_ignored(body: Body) -> Body | None:
    return {"frequency_penalty": None}


@changes_request("presence penalty ignored", "presence_penalty has no effect.", "sampling.penalties")
def presence_ignored(body: Body) -> Body | None:
    return {"presence_penalty": None}


@changes_request(
    "no greedy penalties", "Penalties have no effect at temperature 0.", "sampling.greedy_penalties"
)
def no_greedy_penalties(body: Body) -> Body | None:
    is_greedy = body.get("temperature", 1.0) == 0
    return {"presence_penalty": None, "frequency_penalty": None} if is_greedy else None


@fault(
    "prompt penalized",
    "Presence and frequency penalties also count the tokens of the prompt.",
    "sampling.penalties",
)
async def prompt_penalized(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    presence, frequency = (body.get(f"{name}_penalty") or 0.0 for name in ("presence", "frequency"))
    prompts = proxy.prompts(body)
    if len(prompts) != 1 or not (presence or frequency):
        return await ask(body)
    bias = {int(token): value for token, value in (body.get("logit_bias") or {}).items()}
    for token, count in Counter(prompts[0]).items():
        bias[token] = bias.get(token, 0.0) - presence - frequency * count
    return await ask(
        {**body, "logit_bias": {str(token): max(value, -100.0) for token, value in bias.items()}}
    )


@changes_request(
    "repetition penalty ignored", "repetition_penalty has no effect.", "sampling.repetition_penalty"
)
def repetition_ignored(body: Body) -> Body | None:
    return {"repetition_penalty": None}


@changes_request("logit_bias ignored", "logit_bias has no effect.", "sampling.logit_bias")
def logit_bias_ignored(body: Body) -> Body | None:
    return {"logit_bias": None}


@changes_request("seed ignored", "The seed of a request has no effect.", "sampling.same_seed")
def seed_ignored(body: Body) -> Body | None:
    return {"seed": None}


@changes_request("one seed", "Every request samples with the same seed.", "sampling.other_seed")
def one_seed(body: Body) -> Body | None:
    return {"seed": 1}


@changes_reply("identical choices", "All n choices are copies of the first one.", "sampling.other_seed")
def identical_choices(body: Body, reply: Reply) -> None:
    n = body.get("n", 1)
    if reply.is_stream or n == 1:
        return
    for chunk in reply.chunks:
        firsts = {choice["index"]: choice for choice in chunk["choices"]}
        chunk["choices"] = [
            {**copy.deepcopy(firsts[choice["index"] // n * n]), "index": choice["index"]}
            for choice in chunk["choices"]
        ]

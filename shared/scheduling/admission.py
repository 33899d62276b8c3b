"""What a request must satisfy to enter the engine, which request a full queue turns away or a more important
one displaces, and which waited or ran too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import PrefillAdder, RadixKey, SchedulerFeature
from diptych.shared.scheduling.pages import round_down_to_page
from diptych.shared.types import FinishAbort, Req


def admit(req: Req, vocab_size: int, context_len: int, pool_size: int) -> None:
    """Raise `ValueError`, or clamp `req.max_new_tokens` so that prompt + output fits.

    A request of P prompt and O output tokens takes P + O positions of the context and P + O - 1 slots of
    the KV pool: the last token's KV is never needed.
    """
    num_prompt = len(req.origin_input_ids)
    params = req.sampling_params
    if num_prompt == 0:
        raise ValueError(f"request {req.rid!r}: the prompt is empty; it needs at least one token")
    if min(req.origin_input_ids) < 0 or max(req.origin_input_ids) >= vocab_size:
        i, bad = next((i, t) for i, t in enumerate(req.origin_input_ids) if not 0 <= t < vocab_size)
        raise ValueError(
            f"request {req.rid!r}: token id {bad} at position {i} is outside the vocabulary [0, {vocab_size})"
        )
    params.check_against_vocab(vocab_size)
    if num_prompt >= context_len:
        raise ValueError(
            f"request {req.rid!r}: the prompt has {num_prompt} tokens; the context of {context_len} tokens "
            f"allows {context_len - 1} and one of output"
        )
    if num_prompt > pool_size:
        raise ValueError(
            f"request {req.rid!r}: the prompt has {num_prompt} tokens; the KV pool has {pool_size} slots "
            "(raise max_total_tokens)"
        )
    if params.logprob_start_len >= num_prompt:
        raise ValueError(
            f"request {req.rid!r}: logprob_start_len ({params.logprob_start_len}) must be below the prompt's "
            f"{num_prompt} tokens"
        )
    longest = min(context_len, pool_size + 1) - num_prompt
    if req.diffusion is not None:  # whole blocks, and the last token has KV too
        longest = round_down_to_page(min(context_len, pool_size), req.diffusion.block_len) - num_prompt
        if longest < 1:
            raise ValueError(
                f"request {req.rid!r}: the prompt of {num_prompt} tokens leaves no room for a block of "
                f"{req.diffusion.block_len} in the context ({context_len}) and the KV pool ({pool_size})"
            )
    req.max_new_tokens = min(params.max_new_tokens, longest)


def check_fields(
    rid: object, extra_key: object, priority: object, routing_key: object, logit_processor: object
) -> None:
    """Raise `ValueError` for one of another type than `Req` has."""
    for name, value in (("rid", rid), ("extra_key", extra_key), ("routing_key", routing_key)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be a text or None, got {value!r}")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    if logit_processor is not None and not callable(logit_processor):
        raise ValueError(f"logit_processor must be a function or None, got {logit_processor!r}")


def turned_away(waiting_queue: Sequence[Req], config: EngineConfig) -> Req:
    """Whom a queue with one request too many does not take: the newcomer (the last), or a strictly less
    important request."""
    if not config.enable_priority_scheduling:
        return waiting_queue[-1]
    return min(reversed(waiting_queue), key=lambda req: req.priority)


class Preemption(SchedulerFeature):
    """A request that finds no room displaces running requests of lower priority, by at least `threshold`."""

    def __init__(self, threshold: int, retract: Callable[[Req], None]) -> None:
        self.threshold = threshold
        self.retract = retract

    def makes_room(self, req: Req, adder: PrefillAdder) -> bool:
        victims = adder.preempt_to_schedule(req, self.threshold)
        for victim in victims:
            self.retract(victim)
        return bool(victims)


def fewest_victims(candidates: list[Req], num_missing: int, num_reserved: Callable[[Req], int]) -> list[Req]:
    """The running requests to preempt, at least one, so that `num_missing` tokens become free: the least
    important ones, of these the latest queued. Empty if all of them do not suffice."""
    victims: list[Req] = []
    for victim in sorted(candidates, key=lambda r: (r.priority, -r.queue_start_time)):
        if victims and num_missing <= 0:
            break
        victims.append(victim)
        # Only the victim's own slots; its cached prefix may be shared.
        num_missing -= victim.kv_allocated_len - victim.cache_protected_len + num_reserved(victim)
    return [] if num_missing > 0 else victims


def overdue(req: Req, config: EngineConfig, now: float) -> FinishAbort | None:
    """A reason to end a request that has waited, or run, longer than it may."""
    if req.req_pool_idx is None:
        if config.waiting_timeout is not None and now - req.queue_start_time > config.waiting_timeout:
            return FinishAbort(f"waited longer than {config.waiting_timeout} s", 503)
    elif config.running_timeout is not None:
        assert req.run_start_time is not None
        if now - req.run_start_time > config.running_timeout:
            return FinishAbort(f"ran longer than {config.running_timeout} s", 503)
    return None


def prefix_key(req: Req, is_bigram: bool) -> RadixKey:
    """The key of the prefix that a request may take from the cache: at most max_prefix_len entries."""
    num_tokens = req.max_prefix_len + is_bigram  # the second token of the last bigram follows them
    return RadixKey(req.key_ids[:num_tokens], req.extra_key, is_bigram)


INIT_RATIO = 0.7  # times the conservativeness: most requests stop before max_new_tokens
MIN_FACTOR = 0.14
DECAY_STEPS = 600  # decode steps without a retraction from the initial ratio to the least
RETRACT_DECODE_STEPS = 20  # head-room after a retraction, so that the next one is not due at once


class NewTokenRatio:
    """Expected used fraction of max_new_tokens: falls while all goes well, jumps up on a retraction."""

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(INIT_RATIO * conservativeness, 1.0)
        self.least = self.initial * MIN_FACTOR
        self.current = self.initial

    def decay(self) -> None:
        """Behind each decision to decode."""
        step = (self.initial - self.least) / DECAY_STEPS
        self.current = max(self.current - step, self.least)

    def raise_after_retraction(self, running: Sequence[Req]) -> None:
        """Raise the ratio to what the remaining requests have used of theirs, plus some steps more."""
        num_used = sum(len(req.output_ids) for req in running) + RETRACT_DECODE_STEPS * len(running)
        num_allowed = sum(req.max_new_tokens for req in running) + 1
        self.current = min(num_used / num_allowed, 1.0)

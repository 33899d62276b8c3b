"""What a step did and why, in sentences. Made from the calls that were noted, and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from diptych.shared.tools.record.watch import Call

MODES = {
    "extend": "prefill",
    "decode": "decode",
    "mixed": "prefill and decode",
    "target_verify": "verification of drafts",
}


@dataclass(frozen=True)
class Words:
    """Sentences for the calls of an engine with pages of this size."""

    page_size: int

    def events(self, calls: Sequence[Call]) -> list[list[str]]:
        """[code, view, text] for each call, in order; allocations that follow each other are one."""
        found = []
        for name, group in groupby(calls, key=lambda call: call.name):
            some = list(group)
            if name in ("alloc", "free"):
                merged = {**some[-1].args, "pages": [page for call in some for page in call.args["pages"]]}
                some = [some[-1]._replace(args=merged)]
            for call in some:
                view, write = WRITERS[name]
                text = write(self, call.args)
                if text:
                    found.append([call.code, view, text])
        return found

    def size(self, num_tokens: int) -> str:
        """A number of tokens in pages, if a page has several."""
        if self.page_size == 1:
            return counted(num_tokens, "slot")
        return counted(-(-num_tokens // self.page_size), "page")

    def choose(self, args: dict[str, Any]) -> str:
        prompts, decoding, paused = args["prompts"], args["decoding"], args["paused"]
        if not prompts:
            return f"The batch: one token for {names(decoding)}, which {verb('decode', decoding)}."
        beside = f" and one token for {names(decoding)}" if decoding else ""
        rest = f" {capital(names(paused))} {verb('pause', paused)} for this step." if paused else ""
        return f"The batch: the prompt of {names(prompts)}{beside}, because prompts go first.{rest}"

    def admit(self, args: dict[str, Any]) -> str:
        rid, tokens, cached = f"Request {args['rid']}", args["tokens"], args["cached"]
        if args["result"] == "CONTINUE":
            found = f"{cached} of its {tokens} tokens are in the prefix cache, {args['now']} are computed now"
            rest = tokens - cached - args["now"]
            return f"{rid} starts: {found}" + (f", {rest} in later steps." if rest else ".")
        if args["result"] == "NO_TOKEN":
            needed = -(-(tokens - cached) // self.page_size) * self.page_size + args["answer"]
            free = max(args["rem_total"], 0) // self.page_size * self.page_size
            rest = " (and one slot more)" if self.size(free) == self.size(needed) else ""
            return (
                f"{rid} waits: {self.size(free)} free, {self.size(needed)} needed{rest}. Needed: "
                f"{tokens - cached} tokens to compute and at most {args['answer']} to answer. Free: not "
                "taken or evictable, less what running requests may still need."
            )
        if args["result"] == "WAIT":
            return f"{rid} waits one step: this step computes a prefix that it can then find in the cache."
        return f"{rid} waits: the budget of prompt tokens of this step is used up."

    def chunk(self, args: dict[str, Any]) -> str:
        done, now = args["done"], args["now"]
        if not now:
            return f"Request {args['rid']}: no room to go on with its prompt."
        rest = args["tokens"] - done - now
        end = f"{rest} are left" if rest else "the prompt is complete"
        return f"Request {args['rid']} goes on with its prompt: {done} tokens done, {now} come now, {end}."

    def alloc(self, args: dict[str, Any]) -> str:
        free = f"{counted(args['free'], self.unit)} left"
        if not args["pages"]:
            return f"The new tokens fit on pages that are already taken; {free}."
        return f"{counted(len(args['pages']), self.unit)} taken: {runs(args['pages'])}; {free}."

    def free(self, args: dict[str, Any]) -> str:
        num = len(set(args["pages"]))
        return f"{counted(num, self.unit)} given back: {runs(args['pages'])}; {args['free']} are free."

    @property
    def unit(self) -> str:
        return "slot" if self.page_size == 1 else "page"

    def evict(self, args: dict[str, Any]) -> str:
        return (
            f"Memory is short by {counted(args['wanted'], 'token')}: {args['evicted']} leave the radix tree, "
            "those of the leaf that was not used for the longest time."
        )

    def cache(self, args: dict[str, Any]) -> str:
        rid, end, after = args["rid"], args["end"], args["after"]
        if after <= args["before"]:
            return ""
        tail = "" if after == end else f" ({end - after} behind the last full page stay outside)"
        if args["freed"]:
            tail += f"; {self.size(args['freed'])} of it were there already, so its own copy is given back"
        return f"The KV of request {rid}'s first {after} tokens is in the radix tree and locked{tail}."

    def finish(self, args: dict[str, Any]) -> str:
        start = f"Request {args['rid']} leaves: its {args['end']} tokens of KV stay in the prefix cache"
        if args["freed"]:
            return f"{start} as far as it takes them, unlocked. Given back: {self.size(args['freed'])}."
        return f"{start}, unlocked, and can be evicted."

    def forward(self, args: dict[str, Any]) -> str:
        rows = args["rows"]
        new, read = sum(count for _, count, _ in rows), sum(end for _, _, end in rows)
        mode = MODES.get(args["mode"], args["mode"])
        return (
            f"The model runs once ({mode}): {counted(new, 'new token')} of {counted(len(rows), 'request')}; "
            f"attention reads the KV of {counted(read, 'token')}."
        )

    def sample(self, args: dict[str, Any]) -> str:
        greedy, drawn = args["num_greedy"], args["rows"] - args["num_greedy"]
        texts = []
        if greedy:
            texts.append(f"takes the token with the largest logit for {counted(greedy, 'request')}")
        if drawn:
            texts.append(f"draws a token for {counted(drawn, 'request')}")
        return f"The sampler {' and '.join(texts)}."


Writer = Callable[[Words, dict[str, Any]], str]
WRITERS: dict[str, tuple[str, Writer]] = {
    "choose": ("batch", Words.choose),
    "admit": ("queue", Words.admit),
    "chunk": ("queue", Words.chunk),
    "alloc": ("pool", Words.alloc),
    "free": ("pool", Words.free),
    "evict": ("tree", Words.evict),
    "cache": ("tree", Words.cache),
    "finish": ("tree", Words.finish),
    "forward": ("batch", Words.forward),
    "sample": ("logits", Words.sample),
}
"""Name of a call -> the view of the page that shows it, and its sentence."""


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def runs(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 -> 1–3, 7."""
    ordered = sorted(set(numbers))
    pieces, start = [], 0
    for i in range(1, len(ordered) + 1):
        if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
            first, last = ordered[start], ordered[i - 1]
            pieces.append(str(first) if first == last else f"{first}–{last}")
            start = i
    return ", ".join(pieces[:12]) + (" …" if len(pieces) > 12 else "")


def names(rids: Sequence[str]) -> str:
    word = "request" if len(rids) == 1 else "requests"
    listed = rids[0] if len(rids) == 1 else f"{', '.join(rids[:-1])} and {rids[-1]}"
    return f"{word} {listed}"


def verb(word: str, rids: Sequence[str]) -> str:
    return f"{word}s" if len(rids) == 1 else word


def capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def waits(reasons: Sequence[tuple[str, str]]) -> list[str]:
    """(request, why it waits) -> sentences, one for each reason."""
    found = []
    for why, some in groupby(reasons, key=lambda pair: pair[1]):
        rids = [rid for rid, _ in some]
        found.append(f"{capital(names(rids))} {verb('wait', rids)}: {why}.")
    return found


def summary(
    calls: Sequence[Call], arrived: Sequence[str], waiting: Sequence[str], ended: dict[str, str]
) -> str:
    """One line on a step. ended: request -> why."""
    texts = [f"{names(arrived)} {verb('arrive', arrived)}"] if arrived else []
    for call in calls:
        if call.name == "forward":
            prompts = [rid for rid, count, _ in call.args["rows"] if count > 1]
            others = [rid for rid, count, _ in call.args["rows"] if count == 1]
            if prompts:
                what, be = ("prompt", "is") if len(prompts) == 1 else ("prompts", "are")
                texts.append(f"the {what} of {names(prompts)} {be} computed")
            if others:
                texts.append(f"{names(others)} {verb('get', others)} one more token")
    if waiting:
        texts.append(f"{names(waiting)} {verb('wait', waiting)}")
    texts += [f"request {rid} ends ({why})" for rid, why in ended.items()]
    return f"{capital('; '.join(texts) or 'nothing is left to compute')}."

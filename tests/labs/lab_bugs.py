"""The bugs of the labs, in plain words. `python -m tests.labs.seal` writes shared/tools/course/labs.json."""

from __future__ import annotations

from dataclasses import dataclass

from tests.planted import Bugs

GITHUB = "https://github.com/"


@dataclass(frozen=True)
class LabBug:
    title: str
    story: str
    scene: str  # function of shared/tools/course/lab_scenes.py
    component: str
    changes: tuple[tuple[str, str], ...]  # words of the reference's module -> other words
    best: str  # the clause that says it best
    explanation: str
    links: tuple[str, ...]  # on GitHub


BUGS = (
    LabBug(
        title="Right alone, wrong in a batch of three",
        story="""The new model was demonstrated all morning without a mistake. In the afternoon three people
        asked at the same time.""",
        scene="alone_and_together",
        component="model_runner",
        changes=(
            ("hidden_states[forward_batch.last_token_rows]", "hidden_states[-len(forward_batch.seq_lens) :]"),
        ),
        best="last-token-logits",
        explanation="""The runner took the last rows of the step as the last tokens of the requests. With one
        request that is the same row. With several prompts in a step the rows are ragged: request i ends at
        extend_start_loc[i] + extend_seq_lens[i] - 1. Decode steps have one row a request, so only the first
        token was wrong, and the text went on from it.""",
        links=("vllm-project/vllm-metal/pull/81", "nod-ai/amd-shark-ai/issues/2235"),
    ),
    LabBug(
        title="The end of the answer says too much",
        story="""A customer streams JSON and stops before a key. Now his parser sees the key after all.""",
        scene="streamed_to_a_stop",
        component="detokenizer",
        changes=(("len(self._held_text) - num_held_chars(self._held_text, stop)", "len(self._held_text)"),),
        best="beginning-is-held-back",
        explanation="""Text that may be the beginning of a stop string must wait until the next token
        decides. This detokenizer gave it out at once. A stop string of several tokens was then half on its
        way to the client when it was recognized, and nothing that was given out can be taken back. The text
        of a request without a stream is cut at the same place, so only streams show it.""",
        links=("sgl-project/sglang/pull/11462", "SharpAI/SwiftLM/issues/126"),
    ),
    LabBug(
        title="Short questions only",
        story="""All tests of the release passed: their prompts have fewer than 100 tokens. Then a user
        pasted a document.""",
        scene="after_much_text",
        component="layers",
        changes=(
            (
                "rope_angles(self.rope, torch.arange(self.context_len, device=positions.device))",
                "rope_angles(\n"
                "                self.rope, torch.arange(self.context_len, "
                "device=positions.device).bfloat16().float()\n"
                "            )",
            ),
        ),
        best="far-positions",
        explanation="""The positions were made in bfloat16, the dtype of the model. It has 8 significant
        bits: from 256 on only even numbers exist, from 512 on multiples of 4. Neighbouring tokens then have
        the same rotation, and the model loses their order. Positions and angles are computed in float32 or
        better; only the rotated values are rounded.""",
        links=(
            "huggingface/transformers/issues/25681",
            "huggingface/transformers/pull/29285",
            "EleutherAI/gpt-neox/issues/1003",
        ),
    ),
    LabBug(
        title="Less variety than promised",
        story="""The writers complain that at top_p = 0.5 the assistant has lost a part of its
        vocabulary.""",
        scene="drawn_with_top_p",
        component="sampler",
        changes=(
            (
                "keep &= (before < top_ps * total)",
                "keep &= (before + weights <= top_ps * total) | (ranks == 0)",
            ),
        ),
        best="filters-keep",
        explanation="""Top-p keeps the smallest set of tokens whose sum reaches p. The token with which the
        sum crosses p belongs to it: its own share does not count, only that of the tokens before it. With
        `sum <= p` this token is lost, and with a flat distribution that is a large part of the
        probability.""",
        links=("ggml-org/llama.cpp/pull/1953", "fishaudio/fish-speech/pull/1171", "Biohub/esm/pull/360"),
    ),
    LabBug(
        title="A word too many",
        story="""Operations set --chunked-prefill-size so that long prompts stop blocking others. Since then
        long prompts get odd answers.""",
        scene="in_chunks",
        component="scheduler",
        changes=(
            (
                "                    tree_cache.cache_unfinished_req(req)\n                    continue\n",
                "                    tree_cache.cache_unfinished_req(req)\n"
                "                    if not req.output_ids:\n"
                "                        requests.append_tokens(req, *tokens)\n"
                "                    continue\n",
            ),
        ),
        best="chunks-and-prefixes",
        explanation="""A step computes a chunk of the prompt, and the sampler draws a token for each request
        of the step. The token after a chunk that is not the last has no meaning: the prompt goes on there.
        Here it was appended to the answer.""",
        links=("tenstorrent/tt-xla/issues/5830", "sgl-project/sglang/pull/37295"),
    ),
    LabBug(
        title="Whose prefix is it?",
        story="""The answers are right, and a security audit is not content: it measures the time to the
        first token.""",
        scene="two_tenants",
        component="radix_cache",
        changes=(
            (
                "return extra_key, *entries[start : start + self.page_size]",
                "return None, *entries[start : start + self.page_size]",
            ),
        ),
        best="namespaces",
        explanation="""The tree found children by their tokens alone, so all namespaces shared one tree. A
        tenant can find out by time whether another one has sent a prompt. With adapters it is worse: KV that
        was computed with one adapter answers for another.""",
        links=(
            "sgl-project/sglang/issues/24638",
            "kvcache-ai/ktransformers/issues/2184",
            "vllm-project/vllm/issues/44701",
        ),
    ),
    LabBug(
        title="It needs a restart every Tuesday",
        story="""Answers are right and fast. After some days the server takes fewer requests at a time, and
        in the end none.""",
        scene="after_many_requests",
        component="memory_pool",
        changes=(
            (
                "        self._free_pages.extend(pages)\n",
                "        self._free_pages.extend(list(pages)[:-1] or pages)\n",
            ),
        ),
        best="free-whole-pages",
        explanation="""Of several pages that were freed in one call, the last one did not come back: an end
        that was taken for exclusive. Requests that end with one page of their own lose nothing, so short
        tests are green. A check of the sum, free + cached + owned = all, finds it in the step in which it
        happens; --check-invariants is that check.""",
        links=("sgl-project/sglang/issues/6888", "kekzl/imp/issues/1115", "sgl-project/sglang-jax/issues/70"),
    ),
    LabBug(
        title="The same seed, another answer",
        story="""An evaluation was repeated with the same seeds and gave other numbers. On the developer's
        laptop it does not.""",
        scene="seeded_beside_others",
        component="sampler",
        changes=(
            (
                "gumbel_noise(info.seeds[:, None], positions[:, None], token_ids)",
                "gumbel_noise(info.seeds[:, None] + torch.arange(len(logits))[:, None], positions[:, "
                "None], token_ids)",
            ),
        ),
        best="batch-mates",
        explanation="""The noise of a request also depended on its row in the batch. Who else asks at that
        moment decides about the row. The noise must be a function of the request's own seed and position,
        and of the token: then the batch does not matter.""",
        links=("vllm-project/vllm/issues/51226", "vllm-project/vllm/issues/1211"),
    ),
    LabBug(
        title="The first answer is right",
        story="""After each restart the engine answers the first question perfectly. Monitoring asks one
        question after a restart, and is content.""",
        scene="one_after_another",
        component="attention",
        changes=(("table[forward_batch.req_pool_indices[i], :num_keys]", "table[i + 1, :num_keys]"),),
        best="decode",
        explanation="""Attention took row i + 1 of req_to_token for request i of the batch. Rows are given
        out in order, so that is true for the first batch after the start. Freed rows go to the end of the
        queue: later batches have other rows, and read what the first requests left in theirs. A batch names
        its rows in req_pool_indices, and nothing else may.""",
        links=("nod-ai/amd-shark-ai/issues/2235",),
    ),
    LabBug(
        title="Two users, one thought",
        story="""Two users send the same question in the same second. One gets the answer, the other one
        something else.""",
        scene="twins",
        component="radix_cache",
        changes=(
            (
                "        self.req_to_token_pool.write(req.req_pool_idx, num_owned, "
                "shared[num_owned:prefix_len])\n",
                "",
            ),
        ),
        best="remapped-before-freed",
        explanation="""Both computed the same prompt. The first one's KV went into the tree; the second one's
        is a duplicate and is freed. But its row of req_to_token still named the freed slots. The next tokens
        of any request are written there, and the second user's attention reads them. The row must name the
        tree's slots before the duplicates are freed.""",
        links=("sgl-project/mini-sglang/pull/142",),
    ),
    LabBug(
        title="Five crashes in a night",
        story="""Under load the whole engine stops, with every request in it. The last one to come had a long
        prompt.""",
        scene="prompt_beside_long_answers",
        component="prefill_adder",
        changes=(
            (
                "limit = num_free if self.rem_chunk_tokens is None else min(num_free, self.rem_chunk_tokens)",
                "limit = num_free if self.rem_chunk_tokens is None else self.rem_chunk_tokens",
            ),
        ),
        best="a-chunked-request-takes-no-more-memory-than-there-is",
        explanation="""A prompt that was started goes on with the next chunk. Its limit is the chunk budget,
        or the free memory if that is less. The adder looked at the budget alone, and the allocation failed
        in the middle of the step. Without a page of memory the prompt must wait: a step later another
        request may have ended.""",
        links=("sgl-project/sglang/pull/30743", "sgl-project/sglang/pull/23174"),
    ),
    LabBug(
        title="Right, and slow",
        story="""No answer is wrong, and the cache has the size it always had. Since the last release the
        popular system prompt is computed again and again.""",
        scene="a_popular_prompt",
        component="radix_cache",
        changes=(("            child.last_access_time = self._time\n", ""),),
        best="eviction-order",
        explanation="""A match did not refresh the time of the nodes that it reached, so the least recently
        used node was in truth the oldest one. A prompt that all users send was evicted as soon as enough
        one-time prompts had come behind it. No answer changes; only the order of eviction, the hit rate and
        the time to the first token do.""",
        links=("sgl-project/mini-sglang/pull/124", "sgl-project/sglang/pull/24892"),
    ),
)
LABS = Bugs("lab")
for _bug in BUGS:
    _story = " ".join(_bug.story.split())
    LABS.add(_bug.title, _bug.changes, _story, where=_bug.component, finder=_bug.best)

"""A prompt that is in the prefix cache before its logits are known."""

from __future__ import annotations

from typing import NamedTuple

from diptych.shared.interfaces import PrefixCache, RadixKey
from diptych.shared.types import Req


class CachedPrompt(NamedTuple):
    """The prompt of an extending request: its tokens, of which it computes those from `start` on."""

    key: RadixKey
    start: int
    page_len: int  # tokens that determine a page of the cache: one more for bigrams

    @classmethod
    def of(cls, req: Req, tree_cache: PrefixCache) -> CachedPrompt:
        is_bigram, page_size = tree_cache.is_bigram, tree_cache.page_size
        return cls(
            RadixKey(req.fill_key_ids, req.extra_key, is_bigram), req.kv_matched_len, page_size + is_bigram
        )

    def may_be_held_by(self, req: Req) -> bool:
        """Whether the prompt of another request agrees for a page more, so that it may use KV of this one."""
        end = self.start + self.page_len
        prefix = self.key.token_ids[:end]
        return req.extra_key == self.key.extra_key and len(prefix) == end and req.fill_key_ids[:end] == prefix

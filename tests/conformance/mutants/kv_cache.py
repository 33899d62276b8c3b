"""Planted bugs of the KV cache of one request."""

from __future__ import annotations

from tests.conformance.mutants.mutant import bugs_in

bug = bugs_in("kv_cache", "reference.kv_cache:KVCache", folder="reference.")
KEYS = "self._k[layer_id] = _joined(self._k[layer_id], k)"
VALUES = "self._v[layer_id] = _joined(self._v[layer_id], v)"
JOINED = "return new.clone() if rows is None else torch.cat((rows, new))"
NUM_TOKENS = "return min(0 if k is None else len(k) for k in self._k)"
# fmt: off
bug("NewestRowsFirst", "New rows go before the old ones.",
    ("kv_cache", "torch.cat((rows, new))", "torch.cat((new, rows))"))
bug("OneLayerForAll", "All layers share the rows of layer 0.",
    ("kv_cache", KEYS, "self._k[:] = [_joined(self._k[0], k)] * len(self._k)"),
    ("kv_cache", VALUES, "self._v[:] = [_joined(self._v[0], v)] * len(self._v)"))
bug("RowsInFloat32", "Rows are kept in float32.", ("kv_cache", JOINED, JOINED.replace("new", "new.float()")))
bug("RowsAreTheCallers", "The first rows are the caller's tensors.", ("kv_cache", "new.clone() if", "new if"))
bug("RowsOfTheClass", "All caches share their rows.",
    ("kv_cache", "self._k: list[torch.Tensor | None] = [None] * num_layers",
     "self._k = vars(interface).setdefault('all_k', [None] * 9)"),
    ("kv_cache", "self._v: list[torch.Tensor | None] = [None] * num_layers",
     "self._v = vars(interface).setdefault('all_v', [None] * 9)"))
bug("CountsTheFirstLayer", "num_tokens counts the rows of layer 0, also in the middle of a pass.",
    ("kv_cache", NUM_TOKENS, "return 0 if self._k[0] is None else len(self._k[0])"))
bug("OnlyTheLastToken", "Only the last token is computed, of a prompt too.",
    ("kv_cache", "return token_ids[start:], list(range(start, len(token_ids)))",
     "return token_ids[-1:], [len(token_ids) - 1]"))
bug("PositionsFromZero", "Positions of new tokens count from 0.",
    ("kv_cache", "list(range(start, len(token_ids)))", "list(range(len(token_ids) - start))"))
bug("SeesWhatFollows", "Tokens of a prompt attend to later ones.",
    ("kv_cache", ".tril(num_rows - num_new)", ""))
bug("MaskWithoutOffset", "The causal mask begins at the first row.",
    ("kv_cache", ".tril(num_rows - num_new)", ".tril()"))
bug("ChunkSeesItself", "Rows before the new ones are forgotten, if there are several new ones.",
    ("kv_cache", "weights = scores",
     "visible[:, : (num_new > 1) * (num_rows - num_new)] = False\n        weights = scores"))
bug("HeadsInTurn", "Query head h reads KV head h % num_kv_heads.",
    ("kv_cache", "x.repeat_interleave(group_size, dim=0)", "x.repeat(group_size, 1, 1)"))
bug("SoftmaxInHalf", "Scores are in the dtype of q, and overflow.",
    ("kv_cache", "dtype = torch.promote_types(q.dtype, torch.float32)", "dtype = q.dtype"))
bug("ComputesTwice", "The last token is computed once more in the next pass.",
    ("kv_cache", "start = self.num_tokens\n",
     "start = self.num_tokens\n        if start > 8:\n            self._k = [k[:-1] for k in self._k]\n"
     "            self._v = [v[:-1] for v in self._v]\n            start -= 1\n"))

"""Wrong ideas in stages 08 to 14. The first of each stage is caught quickly."""

from tests.docs.wrong_ideas import WrongIdea as W

_ROWS = "hidden if is_verify else hidden[forward_batch.last_token_rows]"
_PADDING = '1 if name == "seq_lens" else 0  #'

# fmt: off
IDEAS = (
    W("08", "logits are computed for every token of a prompt",
      "forward", "last-token-logits", "Logits of every token", ((_ROWS, "hidden"),)),
    W("08", "steps that verify drafts read the last token, as others do",
      "forward", "verify-logits", "of every node", ((_ROWS, "hidden[forward_batch.last_token_rows]"),)),
    W("08", "nobody asks for log-probabilities of a prompt",
      "forward", "input-logprobs", "how likely its own tokens",
      (("if forward_batch.input_logprob_rows is not None:", "if False:"),)),
    W("08", "slot -1 means no slot",
      "padding", "decode-writes-its-slots", "Slot -1 is the last slot",
      ((_PADDING, '1 if name == "seq_lens" else -1 if name == "out_cache_loc" else 0  #'),)),
    W("08", "rows behind the batch do not matter: they keep what they held",
      "padding", "decode-writes-its-slots", "a slot of an earlier batch",
      (("            head[num:] = " + _PADDING + " slot 0 and row 0 are the dummy page's\n", ""),)),
    W("08", "the rows of the padding are part of the result",
      "padding", "decode-logits", "only the batch's own rows",
      (("output.next_token_logits[:num]", "output.next_token_logits"),)),
    W("08", "there is a graph for every batch",
      "padding", "decode-logits", "larger than every size",
      (("if size >= batch.batch_size), None)", "if size >= batch.batch_size))"),)),
    W("08", "positions follow from the lengths, so they are not copied",
      "padding", "decode-logits", "Every field of the batch",
      (("            head[:num] =", '            if name != "positions":\n                head[:num] ='),)),
    W("08", "a row of the head is a token",
      "sampling", "sampled-tokens", "more rows than there are tokens",
      (("output.next_token_logits[:, :num_token_ids]", "output.next_token_logits"),)),
    W("08", "a token is sampled behind the end of its request, also at nodes",
      "sampling", "sampled-nodes", "each node has its own",
      (("info, forward_batch.sampled_positions", "info, forward_batch.seq_lens - 1"),)),
)

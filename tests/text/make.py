"""Small tokenizers made in memory."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from diptych.shared.text.tokenizer import Tokenizer

EOS, START = "<|end|>", "<|start|>"
TEXTS = [
    "Once upon a time there was a stop sign at the end of the road.",
    "naïve café déjà vu, 你好世界, こんにちは, 🙂🙃🇩🇪👩‍👩‍👧, Ünïcödé — done",
    "def f(x):\n    return x + 1\n\n\n",
    "  two spaces , a comma . and !?  ",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}no thinking{% endif %}"
)


@cache
def byte_level(clean_up: bool = False) -> Tokenizer:
    """A byte-level BPE: tokens are bytes and merged bytes, which need not be whole characters."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    raw.train_from_iterator(TEXTS * 3, trainer)
    raw.add_special_tokens([EOS, START])
    raw.add_tokens([AddedToken(" the stop sign", normalized=False)])
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=raw,
            eos_token=EOS,
            chat_template=CHAT_TEMPLATE,
            clean_up_tokenization_spaces=clean_up,
            clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=clean_up,
        )
    )


@cache
def byte_fallback() -> Tokenizer:
    """Words with a visible space, single bytes for everything else, and the first space of a text dropped."""
    words = ["▁", "▁Once", "▁upon", "▁a", "▁time", "▁stop", "s", "top", ".", "é", "▁café"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(words)}
    vocab["<unk>"] = len(vocab)
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([EOS, START])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS, unk_token="<unk>"))

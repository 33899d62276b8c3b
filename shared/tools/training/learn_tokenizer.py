"""The built-in models' tokenizer: a byte-level BPE learned from the corpus, written in Hugging Face format.

python -m diptych.shared.tools.training.learn_tokenizer DIR
"""

import json
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from diptych.shared.tools.corpus.corpus import training_chats

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
# Not a multiple of 64, while the models' vocab_size is: code that mixes the two up fails here first.
VOCAB_SIZE = 1871
NUM_TRAINING_CHATS = 20_000

# A word with its leading space; one digit; marks with their leading space; line breaks; other white space.
_SPLIT = r"[ ]?\p{L}+|\p{N}|[ ]?[^\s\p{L}\p{N}]+|[\r\n]+|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(num_chats: int = NUM_TRAINING_CHATS, seed: int | str = "tokenizer") -> Tokenizer:
    """Learn the merges. All 256 bytes are in the vocabulary: any text comes back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    chats = islice(training_chats(seed), num_chats)
    pieces = (f"{message['role']}\n{message['content']}" for chat in chats for message in chat)
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; AutoTokenizer loads the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main(folder: Annotated[Path, typer.Argument(help="where the tokenizer files are written")]) -> None:
    """Train the tokenizer on the corpus."""
    tokenizer = train_tokenizer()
    save_tokenizer(tokenizer, folder)
    typer.echo(f"{tokenizer.get_vocab_size()} tokens in {folder}")


if __name__ == "__main__":
    typer.run(main)

"""The built-in models: a corpus that needs no download, a tokenizer, a trainer and an evaluation.

`corpus` writes chats (stories, sums, JSON records, echoes, small talk), `tokenizer` learns a byte-level BPE
from them, `train` makes the models of `shared/assets/`, `evaluate` scores any engine on held-out questions.
"""

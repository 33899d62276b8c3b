"""Expected prompts and answers of conversations: the chat template as transformers renders it, the reference
model's greedy answer, and the dialect that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from diptych.shared.dialects.parts.answer_parser import AnswerParser, Piece
from diptych.shared.dialects.parts.choose import choose_dialect, inert_for, reasoning_state
from diptych.shared.dialects.parts.history import as_history
from diptych.shared.interfaces.dialect import ReasoningState
from diptych.shared.text.control_text import ControlText, control_chars
from diptych.shared.text.tokenizer import Conversation, Tokenizer
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.tools.conformance.server.conversations import Talk

JSON = dict[str, Any]
MAX_TOGETHER = 8  # answers of one batch
SWITCHES = ("enable_thinking", "thinking")


class Read(NamedTuple):
    """A greedy answer of the reference as the dialect reads it. `calls`: names and arguments. `lead`: the
    smallest distance of the two best logits at any token: a server may write another text from there."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str
    lead: float
    num_tokens: int


class Model(Protocol):
    """What is used of an `Oracle`."""

    tokenizer: Tokenizer
    model: Any
    num_rows: int
    eos_token_ids: frozenset[int]


class ChatOracle:
    """Prompts and answers of one model. `dialect`: by the chat template, or by the name of a tool parser."""

    def __init__(self, oracle: Model, tool_call_parser: str = "auto") -> None:
        self.oracle = oracle
        self.tokenizer = oracle.tokenizer
        self.dialect = choose_dialect(oracle.tokenizer, tool_call_parser)
        self._controls = control_chars(self.dialect.markers, oracle.tokenizer)

    @property
    def has_tools(self) -> bool:
        """Whether the chat template writes tools into a prompt."""
        return "tools" in self.tokenizer.chat_template

    @cached_property
    def thinking_switch(self) -> str:
        """The template's variable that turns thinking on and off; empty: it has none."""
        return next((name for name in SWITCHES if name in self.tokenizer.chat_template), "")

    @cached_property
    def markers(self) -> list[str]:
        """The spellings of special tokens and of the dialect's markers, the likeliest to matter first."""
        added = self.tokenizer.hf_tokenizer.added_tokens_decoder
        special = [added[token_id].content for token_id in sorted(self.tokenizer.special_ids)]
        mine = [*self.dialect.markers, *(self.dialect.reasoning or ())[:2]]
        known = [marker for marker in mine if self.tokenizer.token_to_id(marker) is not None]
        return list(dict.fromkeys([*(m for m in special if "im_" in m or "end" in m), *known, *special]))

    def prompt(
        self, messages: Sequence[JSON], tools: list[JSON] | None = None, **template_args: Any
    ) -> Conversation:
        """The prompt with markers in messages as plain text. Raises `ValueError` if the template refuses."""
        return self.tokenizer.conversation(
            as_history(self.dialect, [_plain(message) for message in messages]),
            tools=tools or None,
            inert=inert_for(self.dialect, self.tokenizer),
            ending_with=(self.dialect.reasoning or ())[:2],
            **{"add_generation_prompt": True, **template_args},
        )

    def num_prompt_tokens(
        self, messages: Sequence[JSON], tools: list[JSON] | None = None, **template_args: Any
    ) -> int:
        return len(self.prompt(messages, tools, **template_args).ids)

    def num_with_control_tokens(self, messages: Sequence[JSON], tools: list[JSON] | None = None) -> int:
        """The number of tokens if markers in messages become control tokens: transformers' own rendering."""
        text = self.tokenizer.render(
            as_history(self.dialect, [_plain(message) for message in messages]), tools=tools or None
        )
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def read(self, prompt: Conversation, ids: Sequence[int], tools: Sequence[JSON], lead: float) -> Read:
        """Read token ids that the model wrote. Ids end with an end token, or the answer was cut."""
        is_cut = not ids or ids[-1] not in self.oracle.eos_token_ids
        text = ControlText(self.tokenizer, self._controls).decode(list(ids if is_cut else ids[:-1]), True)
        schemas: Mapping[str, Any] = {
            tool["function"]["name"]: tool["function"].get("parameters") or True for tool in tools
        }
        state: ReasoningState = reasoning_state(self.dialect, prompt.ending)
        parser = AnswerParser(self.dialect, schemas, state, None, self._controls)
        texts = {"content": "", "reasoning": ""}
        calls: list[list[str]] = []
        for event in [*parser.feed(text), *parser.finish(is_cut)]:
            if isinstance(event, Piece):
                texts[event.kind] += event.text
            elif event.name is not None:
                calls.append([event.name, event.arguments])
            else:
                calls[-1][1] += event.arguments
        finish = "length" if is_cut else "tool_calls" if calls else "stop"
        found = tuple((name, arguments) for name, arguments in calls)
        return Read(texts["content"], texts["reasoning"], found, finish, lead, len(ids))

    def greedy(self, talks: Sequence[Talk], max_tokens: int, **template_args: Any) -> list[Read]:
        """The reference's greedy answers to conversations, with their tools."""
        found: list[Read] = []
        for start in range(0, len(talks), MAX_TOGETHER):
            some = talks[start : start + MAX_TOGETHER]
            prompts = [self.prompt(talk.messages, talk.tools, **template_args) for talk in some]
            answers = self._generate([prompt.ids for prompt in prompts], max_tokens)
            found += [
                self.read(prompt, ids, talk.tools, lead)
                for prompt, talk, (ids, lead) in zip(prompts, some, answers)
            ]
        return found

    def _generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[tuple[list[int], float]]:
        """Greedy continuations up to an end token, in one batch, with their smallest leads."""
        longest = max(map(len, prompts)) + max_tokens
        session = ModelSession(self.oracle.model, num_reqs=len(prompts), max_len=longest)
        outputs: list[list[int]] = [[] for _ in prompts]
        leads = [float("inf")] * len(prompts)
        new = dict(enumerate(prompts))
        for _ in range(max_tokens):
            rows = session.step(new)
            for i, row in zip(list(new), rows):
                best = row[-1, : self.oracle.num_rows].topk(2)
                leads[i] = min(leads[i], float(best.values[0] - best.values[1]))
                outputs[i].append(int(best.indices[0]))
            new = {i: outputs[i][-1:] for i in new if outputs[i][-1] not in self.oracle.eos_token_ids}
            if not new:
                break
        return list(zip(outputs, leads))

    def greedy_text(self, prompt: Sequence[int], max_tokens: int, **params: Any) -> tuple[str, float]:
        """The text of a greedy answer with penalties or a bias, by the contract of the sampler, and the
        smallest lead. `params`: of SamplingParams."""
        from diptych.shared.tools.conformance.oracles.sampling_oracle import adjusted
        from diptych.shared.types import Req, SamplingParams

        sampling = SamplingParams(temperature=0.0, **params)
        session = ModelSession(self.oracle.model, max_len=len(prompt) + max_tokens)
        output: list[int] = []
        lead = np.inf
        new: Sequence[int] = prompt
        while len(output) < max_tokens:
            row = session.step({0: new})[0][-1, : self.oracle.num_rows].tolist()
            req = Req("greedy", list(prompt), sampling, 0, self.oracle.eos_token_ids, output_ids=list(output))
            changed = np.array(adjusted(row, req))
            second, best = np.argsort(changed)[-2:]
            lead = min(lead, float(changed[best] - changed[second]))
            new = [int(best)]
            if int(best) in self.oracle.eos_token_ids:
                break
            output += new
        return self.tokenizer.decode(output, skip_special_tokens=True), float(lead)


def _plain(message: JSON) -> JSON:
    """A message as templates take it: parts of text are joined."""
    content = message.get("content")
    if isinstance(content, list):
        message = {**message, "content": "".join(part["text"] for part in content)}
    return dict(message)

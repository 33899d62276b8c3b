"""`diptych chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from diptych.shared.tools.commands import launch
from diptych.shared.tools.commands.options import EngineOptions, SamplingOptions, spread
from diptych.shared.tools.commands.printed_answer import Answer, collect

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM
    from diptych.shared.types import SamplingParams

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message (without TEXT: remove it)
/stats         what the engine has done so far
/help          this list
/exit          leave (so does Ctrl-D)
Ctrl-C ends an answer, not the program."""

MIN_ANSWER_LEN = 16
"""The least number of tokens of the context that are kept free for an answer."""


@spread
def chat(
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
) -> None:
    """Talk with a model. Each turn shows how much of the prompt was in the prefix cache."""
    llm = launch.start_llm(engine.to_flags())
    params = sampling.to_params(llm.sampling_defaults)

    from diptych.shared.types import SamplingParams

    conversation = Chat(llm, SamplingParams(**params), system)
    print(f"{llm.config.model}; /help lists the commands, /exit leaves")
    conversation.run(read_line)


def read_line(prompt: str) -> str:
    if sys.stdin.isatty():
        import readline  # noqa: F401  gives `input` editing and history
    return input(prompt)


class Chat:
    """One conversation. `messages` holds complete turns (user, assistant, user, assistant ...)."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        if llm.tokenizer is None:
            raise ValueError(f"{llm.config.model} has no tokenizer: name one with --tokenizer")
        self.llm = llm
        self.tokenizer = llm.tokenizer
        self.params = params
        self.system = system
        self.messages: list[dict[str, str]] = []

    def run(self, read: Callable[[str], str]) -> None:
        """Run until /exit or the end of the input. `read` shows a prompt and returns a line."""
        while True:
            try:
                line = read("\nyou: ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n/exit leaves")
                continue
            if line == "/exit":
                return
            try:
                self._handle(line)
            except ValueError as error:
                print("error:", error)

    def _handle(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        if command == "/help":
            print(HELP)
        elif command == "/reset":
            self.messages.clear()
            print("the conversation is forgotten")
        elif command == "/system":
            self.system = argument.strip() or None
            print("system message:", self.system or "none")
        elif command == "/stats":
            self._print_stats()
        elif command.startswith("/"):
            raise ValueError(f"no command {command}; /help lists them")
        elif line:
            self._answer(line)

    def _answer(self, text: str) -> None:
        prompt_ids = self._fit(text)
        print(f"{self.llm.config.model}: ", end="", flush=True)
        answer = collect(
            lambda: self.llm.stream(prompt_ids, self.params), lambda piece: print(piece, end="", flush=True)
        )
        print()
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]
        print(_turn_summary(answer))

    def _fit(self, text: str) -> list[int]:
        """The prompt of the next turn. Forgets the oldest turns while the prompt leaves too little room for
        an answer; a message that is too long on its own raises `ValueError` and changes nothing."""
        room = self._max_len() - min(self.params.max_new_tokens, MIN_ANSWER_LEN)
        for num_dropped in range(0, len(self.messages) + 1, 2):
            messages = [*self.messages[num_dropped:], {"role": "user", "content": text}]
            if self.system is not None:
                messages.insert(0, {"role": "system", "content": self.system})
            prompt_ids: list[int] = self.tokenizer.chat(messages)
            if len(prompt_ids) <= room:
                break
        else:
            raise ValueError(f"this message takes {len(prompt_ids)} tokens; {room} fit into the context")
        if num_dropped:
            del self.messages[:num_dropped]
            print(f"(the context is full: forgot the oldest turns, {num_dropped // 2} of them)")
        return prompt_ids

    def _max_len(self) -> int:
        """The maximum length of prompt and answer together."""
        config = self.llm.config
        limits = [config.context_len, config.max_total_tokens, self.llm.model_config.context_len]
        return min(limit for limit in limits if limit is not None)

    def _print_stats(self) -> None:
        stats = self.llm.stats()
        rows = stats._asdict()
        speculation = rows.pop("speculation")
        if self.llm.config.speculative is not None:
            rows |= speculation._asdict()
        for name, value in rows.items():
            print(f"{name:22} {value:.3f}" if isinstance(value, float) else f"{name:22} {value}")
        if stats.num_prompt_tokens:
            share = stats.num_cached_tokens / stats.num_prompt_tokens
            print(f"{'prefix-cache hit rate':22} {share:.0%}")


def _turn_summary(answer: Answer) -> str:
    share = answer.num_cached_tokens / answer.num_prompt_tokens if answer.num_prompt_tokens else 0.0
    return f"({answer.summary()}: {share:.0%})"

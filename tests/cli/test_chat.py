"""`diptych chat`, with an engine that answers from a script."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import FakeLLM
from typer.testing import Result

from diptych.shared.tools.commands.chat import Chat
from diptych.shared.types import SamplingParams

Reader = Callable[[str], str]


def lines(*script: Any) -> Reader:
    """Gives the script's lines one after the other; an exception in it is raised; the end is Ctrl-D."""
    remaining: Iterator[Any] = iter(script)

    def read(prompt: str) -> str:
        line = next(remaining, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    return read


def test_history_grows_and_is_sent_again() -> None:
    llm = FakeLLM(answer="yes")
    Chat(llm, SamplingParams(), system="Be brief.").run(lines("one?", "two?", "/exit", "never"))
    assert llm.text_of(0) == "system:Be brief.|user:one?|assistant:"
    assert llm.text_of(1) == "system:Be brief.|user:one?|assistant:yes|user:two?|assistant:"
    assert len(llm.prompts) == 2


def test_turn_shows_the_prefix_cache_hit(capsys: pytest.CaptureFixture[str]) -> None:
    Chat(FakeLLM(answer="yes"), SamplingParams()).run(lines("one?"))
    output = capsys.readouterr().out
    assert "fake: yes\n" in output
    assert "20 prompt tokens, 10 of them from the prefix cache: 50%" in output


def test_reset_and_system() -> None:
    llm = FakeLLM(answer="yes")
    Chat(llm, SamplingParams()).run(lines("one?", "/reset", "/system Be rude.", "two?", "/system", "three?"))
    assert llm.text_of(1) == "system:Be rude.|user:two?|assistant:"
    assert llm.text_of(2) == "user:two?|assistant:yes|user:three?|assistant:"


def test_ctrl_c_ends_the_answer_not_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(answer="abcdef", interrupt_after=3)
    Chat(llm, SamplingParams()).run(lines("one?", KeyboardInterrupt, "two?"))
    output = capsys.readouterr().out
    assert output.count("interrupted") == 2
    assert "/exit leaves" in output
    assert llm.num_closed == 2
    assert llm.text_of(1) == "user:one?|assistant:abc|user:two?|assistant:"


def test_oldest_turns_are_dropped_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(answer="yes", context_len=90)
    chat = Chat(llm, SamplingParams(), system="Be brief.")
    chat.run(lines("question one?", "question two?", "question three?"))
    assert llm.text_of(2) == "system:Be brief.|user:question three?|assistant:"
    assert "forgot the oldest turns, 1 of them" in capsys.readouterr().out
    for prompt in llm.prompts:
        assert len(prompt) < 90


def test_message_that_never_fits_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(answer="yes", context_len=90)
    chat = Chat(llm, SamplingParams())
    chat.run(lines("one?", "long " * 30, "/stats"))
    assert "error: this message takes 165 tokens; 74 fit into the context" in capsys.readouterr().out
    assert [message["content"] for message in chat.messages] == ["one?", "yes"]


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    Chat(llm, SamplingParams()).run(lines("/help", "/stats", "/nothing", "", "/exit"))
    output = capsys.readouterr().out
    assert "/reset" in output
    assert "num_cached_tokens      50" in output
    assert "prefix-cache hit rate  25%" in output
    assert "error: no command /nothing" in output
    assert llm.prompts == []


def test_stats_show_speculation_like_the_rest_and_only_where_it_is_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Chat(FakeLLM(), SamplingParams()).run(lines("/stats"))
    plain = capsys.readouterr().out.splitlines()
    Chat(FakeLLM(speculative="ngram"), SamplingParams()).run(lines("/stats"))
    rows = capsys.readouterr().out.splitlines()
    assert [row for row in rows if row not in plain] == [
        "num_verifications      4",
        "num_drafted_tokens     12",
        "num_accepted_tokens    6",
    ]
    assert set(plain) <= set(rows)
    assert "Speculation" not in "".join(rows + plain)


def test_command_reads_the_terminal(fake: FakeLLM, diptych: Callable[..., Result]) -> None:
    result = diptych("chat", "--system", "Be brief.", input="one?\n/exit\n")
    assert result.exit_code == 0
    assert fake.text_of(0) == "system:Be brief.|user:one?|assistant:"
    assert "Bergen." in result.stdout

"""An answer on the terminal: its text while it arrives, then its times and the number of cached tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.shared.types import GenerateOutput, SpeculationStats, TokenLogprob


@dataclass
class Answer:
    """An answer that grows by `add`, which takes the next piece of a stream. Times are in seconds since the
    request."""

    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""  # "stop", "length", "abort" or "error"
    finish_message: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    speculation: SpeculationStats | None = None
    num_first_tokens: int = 0  # tokens of the first piece
    time_to_first_token: float | None = None
    total_time: float = 0.0

    def add(self, piece: GenerateOutput, elapsed: float) -> None:
        self.text += piece.text
        self.output_ids += piece.output_ids
        self.output_logprobs += piece.output_logprobs
        self.num_prompt_tokens = piece.num_prompt_tokens
        self.num_cached_tokens = piece.num_cached_tokens
        self.num_retractions = piece.num_retractions
        if piece.speculation.num_verifications:
            self.speculation = piece.speculation
        if self.time_to_first_token is None and piece.output_ids:
            self.time_to_first_token = elapsed
            self.num_first_tokens = len(piece.output_ids)
        self.total_time = elapsed
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason.kind
            self.finish_message = getattr(piece.finish_reason, "message", "")

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed: tokens after the first over the time since the first. None for a single token."""
        num_tokens = len(self.output_ids) - self.num_first_tokens
        seconds = self.total_time - (self.time_to_first_token or 0.0)
        return num_tokens / seconds if num_tokens > 0 and seconds > 0 else None

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{len(self.output_ids)} tokens"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.time_to_first_token is not None:
            parts.append(f"first token after {self.time_to_first_token * 1000:.0f} ms")
        parts.append(f"{self.num_prompt_tokens} prompt tokens")
        parts.append(f"{self.num_cached_tokens} of them from the prefix cache")
        if self.num_retractions:
            parts.append(f"retracted {self.num_retractions} times")
        if self.speculation is not None:
            stats = self.speculation
            parts.append(
                f"{stats.acceptance_length_with_bonus:.2f} tokens per verification"
                f" ({stats.acceptance_length:.2f} without the bonus token),"
                f" {stats.acceptance_rate:.0%} of drafts accepted"
            )
        if self.finish_reason in ("abort", "error"):
            parts.append(f"{self.finish_reason}: {self.finish_message or 'interrupted'}")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The answer as a dict for programs."""
        values: dict[str, Any] = {
            "text": self.text,
            "output_ids": self.output_ids,
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": len(self.output_ids),
            "num_retractions": self.num_retractions,
            "time_to_first_token_s": self.time_to_first_token,
            "total_time_s": self.total_time,
            "tokens_per_s": self.tokens_per_second,
        }
        if self.speculation is not None:
            stats = self.speculation
            values["speculation"] = {
                **stats._asdict(),
                "acceptance_length": stats.acceptance_length,
                "acceptance_length_with_bonus": stats.acceptance_length_with_bonus,
                "acceptance_rate": stats.acceptance_rate,
            }
        if self.finish_message:
            values["finish_message"] = self.finish_message
        if self.output_logprobs:
            values["output_logprobs"] = [
                {
                    "token_id": token.token_id,
                    "logprob": token.logprob,
                    "top": [list(pair) for pair in token.top],
                }
                for token in self.output_logprobs
            ]
        return values


def collect(
    stream: Callable[[], Iterator[GenerateOutput]],
    on_text: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Run a stream to its end. Ctrl-C ends the request, not the program: the answer so far comes back with
    finish_reason "abort"."""
    answer = Answer()
    start = clock()
    pieces = stream()
    try:
        for piece in pieces:
            answer.add(piece, clock() - start)
            if piece.text:
                on_text(piece.text)
    except KeyboardInterrupt:
        answer.finish_reason = "abort"
        answer.total_time = clock() - start
    finally:
        # Closing an unfinished stream makes the engine drop the request and free what it holds.
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    return answer

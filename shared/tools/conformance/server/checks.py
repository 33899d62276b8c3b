"""The registry of checks, and running them against a server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from diptych.shared.tools.conformance.clauses.time_limit import TimeLimitExceeded, time_limit, until
from diptych.shared.tools.conformance.server.client import Answer, Malformed, Refused, Server, Unreachable
from diptych.shared.tools.conformance.server.logprob_tolerance import TABLE, Tolerance

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.server.capabilities import Offers
    from diptych.shared.tools.conformance.server.oracle import Oracle

Status = Literal["holds", "fails", "not offered", "near tie"]
GROUPS = {
    "api": "does it answer, and count tokens as the model's tokenizer does?",
    "scoring": "do tokens have the reference's log-probabilities?",
    "dependence": "does an answer depend on other requests or on the prefix cache?",
    "streaming": "is a streamed answer the same as a whole one?",
    "sampling": "do samples follow the exact distribution?",
    "seeded": "is each single token the one that the reference draws?",
    "semantics": "do usage, stops, errors and other fields follow the API?",
    "prompt": "does a conversation give the prompt of the chat template?",
    "tools": "are calls made when asked for, parsed and streamed without loss?",
    "reasoning": "is reasoning apart from the text, and can it be turned off?",
    "schema": "is each keyword of JSON Schema satisfied, or refused?",
}
"""In the order of a run -> the question."""
MODULES = (
    "scoring",
    "dependence",
    "streaming",
    "distributions",
    "penalties",
    "sampling",
    "semantics",
    "refusals",
    "seeded",
    "chat_params",
    "prompt_checks",
    "tool_choice",
    "tool_parsing",
    "tool_schemas",
    "long_arguments",
    "reasoning_checks",
    "schemas",
)


@dataclass(frozen=True)
class Finding:
    """One finding of a check. `evidence`: data for the report; only JSON values."""

    status: Status
    what: str = ""
    expected: Any = None
    actual: Any = None
    evidence: dict[str, Any] = field(default_factory=dict)
    num_cases: int = 1


@dataclass(frozen=True)
class Limits:
    """The amounts of requests and tokens of a run."""

    num_prompts: int = 8
    prompt_len: int = 48  # tokens of an ordinary prompt
    long_prompt_len: int = 400
    max_tokens: int = 16
    num_draws: int = 1500  # of one chi-square test
    num_talks: int = 16  # conversations with tools
    num_schemas: int = 24  # random JSON schemas
    num_seeded: int = 1000  # single tokens that are verified
    long_call: int = 1280  # tokens of a long call
    concurrency: int = 8


QUICK = Limits(
    num_prompts=4, prompt_len=32, long_prompt_len=160, max_tokens=8, num_draws=400, concurrency=4,
    num_talks=4, num_schemas=9, num_seeded=400, long_call=320,
)  # fmt: skip
THOROUGH = Limits(
    num_prompts=32, prompt_len=96, long_prompt_len=1500, max_tokens=48, num_draws=6000, concurrency=24,
    num_talks=300, num_schemas=300, num_seeded=5000, long_call=65_536,
)  # fmt: skip


@dataclass
class Context:
    """The inputs of a check. `prompts`: token ids. `rng`: of the check that runs, from `seed` and its name:
    alone it asks the same. `progress` takes a line of text. `dtype`: the format that selects the
    `tolerance`."""

    server: Server
    offers: Offers
    oracle: Oracle
    seed: int
    limits: Limits
    prompts: list[list[int]]
    progress: Callable[[str], None] = lambda text: None
    tolerance: Tolerance = TABLE["float32"]
    dtype: str = "float32"
    answers: list[Answer] = field(default_factory=list)  # greedy answers to the prompts, once computed
    noise_is_known: bool = False  # the server's samples have this project's noise
    call_mode: str | None = None  # how calls are demanded, once found
    pairs: list[Any] | None = None  # answers of reference and server with tools, once computed
    rng: random.Random = field(default_factory=random.Random)

    def prompt_of(self, ids: Sequence[int]) -> str | list[int]:
        """A prompt in the form that this server takes: token ids if it accepts them, otherwise their text."""
        return list(ids) if self.offers.token_id_prompts else self.oracle.tokenizer.decode(ids)


Run = Callable[[Context], "Iterable[Finding] | Finding"]


@dataclass(frozen=True)
class Check:
    name: str  # group.name
    sentence: str  # what must hold
    why: str  # what goes wrong for users if it does not
    run: Run

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Result:
    """The findings of one check."""

    check: Check
    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        """The worst status of its findings: fails, near tie, holds; not offered only if there is no other."""
        found = {finding.status for finding in self.findings}
        order: tuple[Status, ...] = ("fails", "near tie", "holds")
        return next((status for status in order if status in found), "not offered")

    @property
    def num_cases(self) -> int:
        return sum(finding.num_cases for finding in self.findings if finding.status != "not offered")


CHECKS: list[Check] = []


def check(name: str, sentence: str, why: str = "") -> Callable[[Run], Run]:
    """Registers a function as a check. Raises `ValueError` for an unknown group, or a name used twice."""
    if name.partition(".")[0] not in GROUPS or any(each.name == name for each in CHECKS):
        raise ValueError(f"{name!r} must be GROUP.NAME, used once, with a group of {', '.join(GROUPS)}")

    def register(run: Run) -> Run:
        CHECKS.append(Check(name, sentence, why, run))
        return run

    return register


def all_checks() -> list[Check]:
    """Every check, in the order of the groups."""
    for module in MODULES:
        if (Path(__file__).parent / f"{module}.py").is_file():
            import_module(f"{__package__}.{module}")
    return sorted(CHECKS, key=lambda each: list(GROUPS).index(each.group))


def chosen(only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[Check]:
    """Checks by name or group. Raises `ValueError` for a name that is neither, and when none is left."""
    checks = all_checks()
    known = {each.name for each in checks} | {each.group for each in checks}
    unknown = [name for name in (*only, *skip) if name not in known]
    if unknown:
        group = unknown[0].partition(".")[0]
        near = sorted(name for name in known if name.partition(".")[0] == group) or list(GROUPS)
        raise ValueError(f"no check or group {', '.join(unknown)}; there are {', '.join(near)}; see --list")
    found = [each for each in checks if not only or each.name in only or each.group in only]
    found = [each for each in found if each.name not in skip and each.group not in skip]
    if not found:
        raise ValueError("nothing is left to check: --skip takes away all that --only chooses")
    return found


def run_checks(context: Context, checks: Sequence[Check]) -> Iterator[Result]:
    """Run the checks; one result for each. If the server stops answering, the current check fails and the run
    ends. A check that does not end in the time of the server's `ends_at` has no result, unless it failed
    before."""
    ends_at = context.server.ends_at
    for each in checks:
        context.progress(each.name)
        context.rng = random.Random(f"{each.name} {context.seed}")
        findings: list[Finding] = []
        is_gone = False
        with suppress(TimeLimitExceeded), time_limit(until(ends_at)):
            is_gone = run_check(context, each, findings)
        if time.monotonic() > ends_at:
            findings = [finding for finding in findings if finding.status == "fails"]
            if findings:
                yield Result(each, tuple(findings))
            return
        yield Result(each, tuple(findings) or (Finding("not offered", "nothing to check"),))
        if is_gone:
            return


def run_check(context: Context, each: Check, findings: list[Finding]) -> bool:
    """Appends the findings; whether the server has stopped. Errors of the client and of the check become
    findings, except after the end of the check."""
    try:
        outcome = each.run(context)
        if isinstance(outcome, Finding):
            outcome = [outcome]
        for finding in outcome:
            # One by one, so that findings before an exception are kept.
            findings.append(_with_request(context.server, finding))
    except (Refused, Malformed) as error:
        findings.append(Finding("fails", f"the server's answer cannot be used: {error}"))
    except Unreachable as error:
        if time.monotonic() > context.server.ends_at:
            return False
        findings.append(Finding("fails", f"no answer: {error}"))
        return not answers(context.server)
    except Exception as error:  # the other checks go on
        what = "this check ended with an error, its own or of an answer in a form that it does not know"
        finding = Finding("fails", f"{what}: {type(error).__name__}: {error}")
        findings.append(_with_request(context.server, finding))
    return False


def _with_request(server: Server, finding: Finding) -> Finding:
    """A failure with the last request that was sent before it."""
    if finding.status != "fails" or not (curl := server.curl()):
        return finding
    return replace(finding, evidence={**finding.evidence, "last request": curl})


def answers(server: Server) -> bool:
    try:
        server.get("/v1/models")
    except Unreachable:
        return False
    return True

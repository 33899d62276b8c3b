"""The page pool of a real run: three requests, their page tables and the free pages, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.shared.engine.llm import LLM
from diptych.shared.types import SamplingParams
from docs.figures.blocks import boxes, chips, heading, span
from docs.figures.five_requests import EXACT
from docs.figures.svg import slider

PAGE_SIZE = 4
NUM_PAGES = 32
QUESTIONS = {"A": "What is 12 + 30?", "B": "Count from 3 to 9.", "C": "What is 7 + 8?"}
HUES = dict(zip(QUESTIONS, ("fa", "fb", "fc")))


@dataclass
class State:
    """num_tokens and page_tables: by request; free: pages in the order in which they will be taken."""

    num_tokens: dict[str, int]
    page_tables: dict[str, list[int]]
    free: list[int]


class Run:
    """The reference panel with a pool small enough to draw, without a prefix cache."""

    def __init__(self) -> None:
        pool = {"page_size": PAGE_SIZE, "max_total_tokens": PAGE_SIZE * NUM_PAGES}
        self.llm = LLM("tiny-dense", **EXACT, **pool, disable_radix_cache=True)
        self.states: list[tuple[State, str]] = []

    def submit(self, name: str) -> None:
        prompt = self.llm.chat_prompt([{"role": "user", "content": QUESTIONS[name]}])
        self.llm.submit(prompt, SamplingParams(temperature=0, max_new_tokens=24), rid=name)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.llm.step()

    def keep(self, text: str) -> None:
        parts, running = self.llm.assembly.parts, self.llm.scheduler.state().running
        tables = {}
        for req in sorted(running, key=lambda req: req.rid):
            slots = parts.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_committed_len).tolist()
            tables[req.rid] = list(dict.fromkeys(slot // PAGE_SIZE for slot in slots))
        free = list(parts.allocator._free_pages)
        tokens = {req.rid: req.kv_committed_len for req in running}
        self.states.append((State(tokens, tables, free), text))


def record() -> list[tuple[State, str]]:
    run = Run()
    run.submit("A")
    run.step()
    run.keep(
        "Request A arrives. Its prompt has {A} tokens, so it takes five pages of four slots from the "
        "front of the free list. Two slots of the last page are free."
    )
    run.submit("B")
    run.step()
    run.keep("Request B arrives: {B} tokens fill four pages. No page has tokens of two requests.")
    run.step(3)
    run.keep(
        "Three decode steps. Each request wrote three tokens and took one more page when its "
        "last one was full: the pages of a request need not be neighbours."
    )
    while "A" in {req.rid for req in run.llm.scheduler.state().running}:
        run.step()
    run.keep("A ends. Its pages go to the end of the free list. Nothing is copied and nothing is moved.")
    run.submit("C")
    run.step()
    run.keep("Request C arrives and takes pages from the front of the list again.")
    while run.llm.scheduler.state().running:
        run.step()
    run.keep("All requests have ended. Every page is free, in the order in which it came back.")
    return run.states


def draw(state: State) -> str:
    """The pages with their slots, the page tables, and the free list."""
    free_page = "<i></i>" * PAGE_SIZE
    slots = dict.fromkeys(range(1, NUM_PAGES + 1), free_page)
    for name, pages in state.page_tables.items():
        for i, page in enumerate(pages):
            used = min(PAGE_SIZE, state.num_tokens[name] - PAGE_SIZE * i)
            slots[page] = f'<i class="{HUES[name]}"></i>' * used + "<i></i>" * (PAGE_SIZE - used)
    pool = "".join(
        f'<div>{span("s" if own == free_page else "", str(page))}<div class="slots">{own}</div></div>'
        for page, own in slots.items()
    )
    parts = [f'<div class="pool">{pool}</div>']
    for name, question in QUESTIONS.items():
        pages = state.page_tables.get(name, [])
        note = f"{state.num_tokens[name]} tokens" if pages else "no pages"
        parts += [heading(f"{name}, “{question}”: {note}"), chips((HUES[name], str(page)) for page in pages)]
    free = chips(("f0", str(page)) for page in state.free)
    return boxes("".join([*parts, heading(f"Free list: {len(state.free)} pages"), free]))


def make() -> str:
    steps = [(draw(state), text.format(**state.num_tokens)) for state, text in record()]
    return slider(
        steps,
        f"A pool of {NUM_PAGES} pages with {PAGE_SIZE} slots each, in a run of the reference panel with "
        "<code>tiny-dense</code> and without a prefix cache. A colour is a request; grey slots hold no "
        "token. Below: the page tables, and the free list in the order in which pages are taken.",
    )

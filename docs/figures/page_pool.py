"""The page pool of a real run: three requests, their page tables and the free pages, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.shared.engine.llm import LLM
from diptych.shared.types import SamplingParams
from docs.figures.svg import HUES, NARROW, WIDE, Svg, slider, views

PAGE_SIZE = 4
NUM_PAGES = 32
QUESTIONS = {"A": "What is 12 + 30?", "B": "Count from 3 to 9.", "C": "What is 7 + 8?"}
CELL, GAP, ROW = 8.0, 8.0, 52.0


@dataclass
class State:
    """num_tokens and page_tables: by request; free: pages in the order in which they will be taken."""

    num_tokens: dict[str, int]
    page_tables: dict[str, list[int]]
    free: list[int]


class Run:
    """The reference panel with a pool small enough to draw, without a prefix cache."""

    def __init__(self) -> None:
        self.llm = LLM(
            "tiny-dense",
            panel="reference",
            device="cpu",
            dtype="float32",
            page_size=PAGE_SIZE,
            max_total_tokens=PAGE_SIZE * NUM_PAGES,
            disable_radix_cache=True,
        )
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


def draw(state: State, width: int) -> Svg:
    svg = Svg(width)
    per_row = 16 if width == WIDE else 8
    owner = {page: name for name, pages in state.page_tables.items() for page in pages}
    edges = []  # between the slots of a page
    for page in range(1, NUM_PAGES + 1):
        row, column = divmod(page - 1, per_row)
        x, y = column * (PAGE_SIZE * CELL + GAP), row * ROW
        name = owner.get(page)
        svg.text(x + PAGE_SIZE * CELL / 2, y + 12, str(page), "mid" if name else "mid s")
        svg.rect(x, y + 18, PAGE_SIZE * CELL, 22, "f0")
        if name:
            used = min(PAGE_SIZE, state.num_tokens[name] - PAGE_SIZE * state.page_tables[name].index(page))
            svg.rect(x, y + 18, used * CELL, 22, hue(name))
        edges += [(x + slot * CELL, y + 18) for slot in range(1, PAGE_SIZE)]
    svg.strokes([(x, y, x, y + 22) for x, y in edges], "cut")
    y = svg.height + 26
    for name, question in QUESTIONS.items():
        pages = state.page_tables.get(name, [])
        y = chips(svg, y, f"{name}  {question}", pages, hue(name), f"{state.num_tokens.get(name, 0)} tokens")
    chips(svg, y, "Free list", state.free, "f0", f"{len(state.free)} pages")
    return svg


def chips(svg: Svg, y: float, name: str, pages: list[int], cls: str, note: str) -> float:
    """One page table: a name, a number of tokens, and page numbers in order. Returns the next free y."""
    svg.text(0, y, name, "b")
    svg.text(176, y, note if pages else "–", "s")
    is_wide = svg.width == WIDE
    x0, y0 = (262.0, y - 15) if is_wide else (0.0, y + 7)
    per_row = int((svg.width - x0) // 26)
    for i, page in enumerate(pages):
        x, top = x0 + i % per_row * 26, y0 + i // per_row * 24
        svg.rect(x, top, 24, 20, cls)
        svg.text(x + 12, top + 14.5, str(page), "mid")
    rows = max(1, -(-len(pages) // per_row)) if pages or is_wide else 0
    return y0 + rows * 24 + (21 if is_wide else 26)


def hue(name: str) -> str:
    return f"f{HUES[list(QUESTIONS).index(name)]}"


def make() -> str:
    steps = []
    for state, text in record():
        label = "The page pool. Pages of " + ", ".join(
            f"{name}: {pages}" for name, pages in state.page_tables.items()
        )
        text = text.format(**state.num_tokens)
        steps.append(
            (views(f"{label}. Free pages: {state.free}", draw(state, WIDE), draw(state, NARROW)), text)
        )
    return slider(
        steps,
        f"A pool of {NUM_PAGES} pages with {PAGE_SIZE} slots each, in a run of the reference panel with "
        "<code>tiny-dense</code> and without a prefix cache. A colour is a request; grey slots hold no "
        "token. Below: the page tables, and the free list in the order in which pages are taken.",
    )

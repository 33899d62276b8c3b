"""Markdown tables from the code and from recorded runs: fields, flags, tolerances, families, checks."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from docs.generators.classes import ROOT, Field, fields_of, named, summary

Notes = dict[str, str]

_NOTE = re.compile(r"(\S+): (.*)")


def notes_of(body: str) -> Notes:
    """Lines "name: text" of a marker; an indented line continues the one before."""
    notes: Notes = {}
    last = ""
    for line in filter(str.strip, body.splitlines()):
        if line[0] == " ":
            notes[last] += " " + line.strip()
            continue
        match = _NOTE.fullmatch(line)
        if match is None or match.group(1) in notes:
            raise ValueError(f"a note is a new name, a colon and a text, got {line!r}")
        last, notes[match.group(1)] = match.groups()
    return notes


def cell(text: object) -> str:
    """A text inside a table: one line, pipes escaped."""
    return " ".join(str(text).split()).replace("|", "\\|")


def code(text: str) -> str:
    """Inline code inside a table, empty for an empty text. A pipe in code needs no escape."""
    return f"`{' '.join(text.split())}`" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> str:
    """Columns without any content are left out. `align`: l or r for each column."""
    rows = [list(row) for row in rows]
    align = align or "l" * len(head)
    kept = [i for i in range(len(head)) if any(str(row[i]) for row in rows)]
    lines = [[head[i] for i in kept], ["--:" if align[i] == "r" else "---" for i in kept]]
    lines += [[str(row[i]) for i in kept] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells_of(line: str) -> list[str]:
    """The texts of a row, without marks and links."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).replace("*", "").replace("`", "")
    return [each.strip() for each in plain.strip("|").split("|")]


def wrapping(text: str) -> str:
    """A table of long names, which may break anywhere (docs/stylesheets/extra.css)."""
    return f'<div class="wraps" markdown>\n\n{text}\n\n</div>'


def mechanisms() -> str:
    """The sections and rows of mechanisms.tsv, whose cells are Markdown."""
    text = Path(__file__).with_name("mechanisms.tsv").read_text("utf-8")
    num_missing, num_different = text.count("\tnot built: "), text.count("\tdiffers: ")
    count = text.count("\n") - text.count("# ")
    parts = [f"{count} mechanisms: {num_missing} are not built in a panel, and {num_different} differ."]
    for section in text[2:].split("\n# "):
        title, *rows = section.splitlines()
        lines = ["| Mechanism | reference | optimized | Clause or remark |", "|---|---|---|---|"]
        lines += ["| {} | {} | {} | {} |".format(*row.split("\t")) for row in rows]
        parts += [f"## {title}", wrapping("\n".join(lines))]
    return "\n\n".join(parts)


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def card(dotted: str, notes: dict[str, str] | None = None) -> str:
    """A type: its docstring and a table of its fields. `notes`: texts for fields without a comment."""
    cls = named(dotted)
    notes = dict(notes or {})
    blocks = [summary(cls)]
    groups: list[tuple[str, list[Field]]] = [("", [])]
    for each in fields_of(cls):
        group = "Computed" if each.default == "computed" else each.group.rstrip(".:")
        if group and group != groups[-1][0]:
            groups.append((group, []))
        groups[-1][1].append(each)
    for group, fields in groups:
        if fields:
            blocks += [f"*{group}:*"] if group else []
            blocks.append(field_table(fields, notes))
    if notes:
        raise ValueError(f"{dotted} has no field {', '.join(notes)}")
    return "\n\n".join(filter(None, blocks))


def field_table(fields: Iterable[Field], notes: dict[str, str] | None = None) -> str:
    """Takes the notes that it uses out of `notes`."""
    rows = []
    for each in fields:
        note = notes.pop(each.name.partition("(")[0], "") if notes else ""
        text = ". ".join(filter(None, [_sentence(each.comment).rstrip("."), note]))
        default = "" if each.default == "computed" else each.default
        rows.append([code(each.name), code(each.type), code(default), cell(text)])
    return table(["Field", "Type", "Default", "Meaning"], rows)


def _sentence(text: str) -> str:
    """Capitalized, unless it begins with a name: int64, req_pool_idx, len(x), eagle3."""
    first = text.partition(" ")[0].rstrip(",:;.")
    return text[:1].upper() + text[1:] if first.isalpha() and first.islower() else text


def flags(group: str, *more: str) -> str:
    """The flags of a group: option, default, help, and the text below the field, which says what it costs."""
    from diptych.shared.flags.engine_flags import EngineFlags
    from diptych.shared.flags.flag import flags_of
    from diptych.shared.tools.commands.options import help_of

    wanted = " ".join([group, *more])
    costs = {each.name: each.comment for each in fields_of(EngineFlags)}
    found = [each for each in flags_of(EngineFlags).values() if each.group == wanted]
    if not found:
        raise ValueError(f"no flag has the group {wanted!r}")
    rows = []
    for each in found:
        option, default = f"`--{each.name.replace('_', '-')}`", code(str(each.default))
        rows.append([option, default, cell(help_of(each, False)), cell(costs[each.name])])
    return table(["Flag", "Default", "What it does", "Effect and cost"], rows)


def tolerances() -> str:
    """The table of diptych.shared.tools.conformance.clauses.tolerance, with its reasons below."""
    from diptych.shared.tools.conformance.clauses.tolerance import EXACT, TABLE

    rows: list[list[object]] = [["exact", "any", 0, 0, 0, EXACT.reason]]
    for kind, by_dtype in TABLE.items():
        for i, (dtype, row) in enumerate(by_dtype.items()):
            numbers = [f"{value:.2g}" for value in (row.atol, row.rtol, row.rms)]
            is_new = i == 0 or row.reason != list(by_dtype.values())[i - 1].reason
            rows.append([kind if i == 0 else "", _dtype(dtype), *numbers, cell(row.reason if is_new else "")])
    return table(["Kind", "dtype", "atol", "rtol", "rms", "Reason"], rows, "llrrrl")


def near_ties() -> str:
    from diptych.shared.tools.conformance.clauses.tolerance import NEAR_TIE

    return table(["dtype", "Gap of logits"], [[_dtype(dtype), gap] for dtype, gap in NEAR_TIE.items()], "lr")


def accuracy_limits() -> str:
    """What each number format may lose, and why."""
    from diptych.shared.tools.conformance.whole_engine.accuracy import LIMITS

    rows = [
        [f"`{name}`", f"{limit.exact:.0%}", f"{limit.perplexity:.1%}", limit.logprob, cell(limit.reason)]
        for name, limit in LIMITS.items()
    ]
    return table(["Format", "Exact match", "Perplexity", "Logprob", "Reason"], rows, "lrrrl")


def server_checks(group: str) -> str:
    """The checks of `diptych check server` in one of its groups."""
    from diptych.shared.tools.conformance.server.checks import GROUPS, all_checks

    if group not in GROUPS:
        raise ValueError(f"no group {group!r} of checks; there are {', '.join(GROUPS)}")
    rows = [
        [code(each.name), cell(each.sentence), cell(each.why)] for each in all_checks() if each.group == group
    ]
    return table(["Check", "What must hold", "Why it matters"], rows)


def server_results() -> str:
    """What each check of chat says about other servers, from the recorded run."""
    found: dict[str, dict[str, str]] = read("docs/samples/servers/chat.json")
    names = dict.fromkeys(name for statuses in found.values() for name in statuses)
    rows = [[code(name), *(statuses.get(name, "") for statuses in found.values())] for name in names]
    return table(["Check", *found], rows)


def reproducers(*server: str) -> str:
    """Bugs of a server that `tests/server_check/reproducers.py` shows, from its recorded run."""
    found = read("docs/samples/servers/reproducers.json")[" ".join(server)]
    names = ("name", "request", "expected", "got")
    rows = [[code(row["name"]), *(cell(row[each]) for each in names[1:])] for row in found["rows"]]
    return table(["Reproducer", "Request", "Expected", "Got"], rows)


def read(path: str) -> Any:
    """A file of JSON, by its path in the repository."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def families() -> str:
    """The architectures of config.json, and the module that each panel has for them."""
    from diptych.optimized import models as optimized
    from diptych.reference import models as reference
    from diptych.shared.config.families import FAMILIES

    panels = (reference.CLASSES, optimized.CLASSES)
    rows = [
        [f"`{name}`", *(code(each.get(family.decoder, "").partition(":")[0]) or "refused" for each in panels)]
        for name, family in FAMILIES.items()
    ]
    return table(["Architecture", "Reference", "Optimized"], rows)


def draft_shapes() -> str:
    """The default shapes of each algorithm of speculation."""
    from diptych.shared.config.speculation_flags import DEFAULT_SHAPES

    head = ["Algorithm", *(f"`--speculative-{name}`" for name in ("num-steps", "topk", "num-draft-tokens"))]
    return table(head, [[f"`{name}`", *shape] for name, shape in DEFAULT_SHAPES.items()], "lrrr")


@cache
def calculator() -> str:
    """The data of docs/javascripts/calculator.js: known shapes in three precisions, and cards."""
    import torch

    from diptych.shared.config import EngineConfig
    from diptych.shared.config.hf_config import read_config
    from diptych.shared.loading.model_path import ASSETS
    from diptych.shared.loading.quantize import with_quantization
    from diptych.shared.tools.bench.size import CARDS, OVERHEAD, formula_of

    config, models = EngineConfig(), {}
    for path in sorted((ASSETS / "configs").iterdir()):
        if "eagle" in path.name:
            continue
        model = read_config(path)
        precisions = {"as it is": (model, model.dtype)}
        if model.quantization is None:
            fp8 = with_quantization(model, "fp8")
            precisions["FP8 weights"] = (fp8, model.dtype)
            precisions["FP8 weights and KV"] = (fp8, torch.float8_e4m3fn)
        models[path.name] = {
            name: asdict(formula_of(each, config, model.dtype, kv_dtype))
            for name, (each, kv_dtype) in precisions.items()
        }
    cards = {name: {"memory": each.memory, **asdict(each.ceilings)} for name, each in CARDS.items()}
    limits = {"mem_fraction_static": config.mem_fraction_static, "overhead": OVERHEAD}
    limits["max_running_requests"] = config.max_running_requests
    data = json.dumps({"models": models, "cards": cards, "config": limits}, separators=(",", ":"))
    return f'<script type="application/json" id="calculator-data">{data}</script>'


def dialects() -> str:
    """Every dialect that reads calls, in the order in which templates are tried."""
    from diptych.shared.dialects.parts import choose

    rows = []
    for module, cls in choose.dialects().items():
        if module == "plain":
            continue
        about = (inspect.getdoc(inspect.getmodule(cls)) or "").partition("\n")[0].rstrip(".")
        names = ", ".join(f"`{name}`" for name in cls.tool_parsers)
        markers = cls.reasoning[:2] if cls.reasoning is not None else ()
        shown = " ".join(f"`{marker}`" for marker in markers) or "none"
        rows.append([cell(about), names, shown, f"`shared/dialects/{module}.py`"])
    return wrapping(table(["Family", "`--tool-call-parser`", "Reasoning", "File"], rows))


def cheats() -> str:
    """Planted patterns of the kernel checker, what finds them, in how many operations they are named, and
    which of other checks find them."""
    peers = read("tests/kernel_check/peers.json")["found"]
    rows = []
    for number, row in read("tests/kernel_check/cheats.json").items():
        found = [each for each in row["found"].values() if each != "NOT NAMED"]
        count = f"{len(found)} of {len(row['found'])}"
        others = peers.get(number, dict.fromkeys(peers["1"], "not wrong"))
        rows.append((number, row["what"], row["finds"], count, *others.values()))
    return table(
        ("", "A kernel that", "What finds it", "Named in", *peers["1"]), rows, "rlll" + "l" * len(peers["1"])
    )


def clients() -> str:
    """Every client: its version, what its script does, and the result of the recorded run."""
    from docs.generators.record_clients import RECORD
    from docs.generators.record_clients import clients as scripts

    found = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}
    rows = []
    for client in scripts():
        facts = found.get(client.name, {"version": "", "date": "", "result": "not run yet"})
        package = f"`{client.package}` {facts['version']}"
        rows.append([client.name, package, cell(client.does), cell(facts["result"]), facts["date"]])
    return table(["Client", "Package", "What it does", "Result", "Date"], rows)

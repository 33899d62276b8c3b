"use strict";
const run = JSON.parse(document.getElementById("data").textContent);
const { facts, requests, steps, code } = run;
const last = steps.length - 1;
const $ = (id) => document.getElementById(id);
const HUES = ["--fa", "--fb", "--fc", "--fd", "--fe"];
const place = Object.fromEntries(requests.map((request, i) => [request.name, i]));
const hue = (name) => `var(${HUES[place[name] % HUES.length]})`;
const unit = facts.page_size === 1 ? "slot" : "page";
const counted = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
const VIEWS = { queue: "Queue", batch: "Batch", pool: "Pages", tree: "Radix tree", logits: "Logits", time: "Time and memory", code: "Code" };
let now = 0, view = "queue", shownCode = null, timer = null;

/* An element: el("td.n", "text" or children ...), with properties in a plain object. */
function el(name, ...content) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const each of content.flat()) {
    if (each === null || each === undefined) continue;
    if (typeof each === "object" && !(each instanceof Node)) {
      for (const [key, value] of Object.entries(each)) {
        if (key === "style") made.style.cssText = value;
        else if (key in made) made[key] = value;
        else made.setAttribute(key, value);
      }
    } else made.append(each instanceof Node ? each : String(each));
  }
  return made;
}
const table = (headings, rows) =>
  el("table", el("thead", el("tr", headings.map((text, i) => el(rows[0]?.[i]?.className === "n" ? "th.n" : "th", text)))), el("tbody", rows.map((cells) => el("tr", cells.map((cell) => (cell instanceof Node && cell.tagName === "TD" ? cell : el("td", cell)))))));
const chip = (text, background, title) => el("span.chip", text, { style: background ? `background:${background}` : "", title: title || "" });
const name = (rid) => chip(rid, hue(rid), requests[place[rid]].text);
const note = (text) => el("p.soft", text);

/* The recording has changes from step to step: here they become states. */
const states = [];
{
  let tables = {}, cached = new Set(), tree = [];
  for (const step of steps) {
    tables = { ...tables };
    const fresh = new Set();
    for (const [rid, change] of Object.entries(step.tables)) {
      if (change === null) { delete tables[rid]; continue; }
      const kept = (tables[rid] || []).slice(0, change[0]);
      tables[rid] = kept.concat(change.slice(1));
      change.slice(1).forEach((page) => { if (!cached.has(page)) fresh.add(page); });
    }
    cached = new Set(cached);
    step.cached[0].forEach((page) => cached.add(page));
    step.cached[1].forEach((page) => cached.delete(page));
    if (step.tree !== null) tree = step.tree;
    else tree = tree.filter((node) => node[5] !== "evicted").map((node) => [...node.slice(0, 5), ""]);
    states.push({ tables, cached, tree, fresh });
  }
}
const used = [...new Set(states.flatMap((s) => [...Object.values(s.tables).flat(), ...s.cached]))].sort((a, b) => a - b);
const MAX_PAGES = 1024;

/* What each request did in each step, for the lanes. */
const lanes = requests.map(() => []);
steps.forEach((step, i) => {
  for (const [rid, count] of step.rows) if (rid) lanes[place[rid]][i] = { kind: count > 1 ? "prompt" : "decode", text: "" };
  for (const [rid, , text, , , , , counts] of step.tokens) if (counts && lanes[place[rid]][i]) lanes[place[rid]][i].text = text;
  for (const [rid] of step.running) if (!lanes[place[rid]][i]) lanes[place[rid]][i] = { kind: "pause", text: "" };
  for (const [rid] of step.queue) if (!lanes[place[rid]][i]) lanes[place[rid]][i] = { kind: "wait", text: "" };
});

function drawLanes() {
  const columns = `minmax(90px, 190px) repeat(${steps.length}, minmax(${steps.length > 60 ? 8 : 12}px, 1fr))`;
  $("lanes").replaceChildren(...requests.map((request, r) =>
    el("div.lane", { style: `grid-template-columns:${columns}` },
      el("span.who", name(request.name), request.text, { title: request.text }),
      steps.map((step, i) => {
        const did = lanes[r][i];
        if (!did) return el("span");
        const label = `Request ${request.name}, step ${i + 1}: ${{ wait: "waits", pause: "pauses" }[did.kind] || did.text || did.kind}`;
        const fill = did.kind === "wait" || did.kind === "pause" ? "" : `background-color:${hue(request.name)}`;
        return el(`button.cell.${did.kind}`, did.text.trim(), { type: "button", title: label, style: fill, "aria-label": label, onclick: () => show(i) }, { "data-step": i });
      }))));
}

const draw = {
  queue(step) {
    const parts = [el("h3", counted(step.queue.length, "request") + " waiting")];
    parts.push(step.queue.length ? table(["", "why it waits"], step.queue.map(([rid, why]) => [name(rid), why])) : note("The queue is empty."));
    parts.push(el("h3", `${step.running.length} of at most ${facts.max_running} running`));
    const running = step.chunked ? [[step.chunked, null, 0], ...step.running] : step.running;
    parts.push(running.length ? table(["", "tokens with KV", "answer so far"], running.map(([rid, kv, outputs]) => [name(rid), el("td.n", kv === null ? "a part of its prompt" : kv), answer(rid, outputs)])) : note("Nothing runs."));
    const done = requests.filter((request) => steps.slice(0, now + 1).some((each) => request.name in each.ended));
    if (done.length) parts.push(el("h3", "Ended"), table(["", "answer", "from the cache"], done.map((r) => [name(r.name), r.answer, el("td.n", `${r.cached} of ${r.prompt}`)])));
    return parts;
  },
  batch(step) {
    if (!step.rows.length) return [note("No batch in this step.")];
    const total = step.rows.reduce((sum, row) => sum + row[1], 0);
    return [
      el("h3", `One forward pass, ${counted(total, "token")}`),
      el("div", step.rows.flatMap(([rid, count, end]) => pieces(rid, end - count, end).map((text) => chip(text, hue(rid), `request ${rid}`)))),
      note("These tokens go through all layers together. A prompt brings many of them, a request that decodes brings one: the token that the step before gave it."),
      table(["", "positions", "new", "KV read"], step.rows.map(([rid, count, end]) => [name(rid), `${end - count} to ${end - 1}`, el("td.n", count), el("td.n", end)])),
    ];
  },
  pool(step) {
    const state = states[now], owners = {};
    for (const [rid, pages] of Object.entries(state.tables)) for (const page of pages) (owners[page] = owners[page] || []).push(rid);
    const cells = used.slice(0, MAX_PAGES).map((page) => {
      const who = owners[page] || [], stripes = who.map((rid, i) => `${hue(rid)} ${(100 * i) / who.length}% ${(100 * (i + 1)) / who.length}%`);
      const classes = `div.page${state.cached.has(page) ? ".cached" : ""}${state.fresh.has(page) ? ".fresh" : ""}`;
      const fill = who.length ? `background:linear-gradient(90deg,${stripes.join(",")})` : state.cached.has(page) ? "background:var(--grey)" : "";
      return el(classes, page, el("br"), who.join(" "), { style: fill });
    });
    const [free, evictable, held] = step.memory.map((tokens) => Math.round(tokens / facts.page_size));
    const rest = facts.num_pages - used.length;
    return [
      el("h3", `${counted(facts.num_pages, unit)}${facts.page_size > 1 ? ` of ${facts.page_size} tokens` : ""}: ${free} free, ${evictable} cached and not in use`),
      el("div.pages", cells),
      el("div.legend", requests.map((r) => el("span", el("i", { style: `background:${hue(r.name)}` }), `request ${r.name}`)), el("span", "dashed: in the radix tree"), el("span", "framed: taken in this step")),
      rest > 0 ? note(`${counted(rest, unit)} of the pool are never used in this run.`) : null,
      el("h3", "Page tables"),
      ...(Object.keys(state.tables).length ? Object.entries(state.tables).map(([rid, pages]) => el("p", { style: "margin:4px 0" }, name(rid), pages.slice(0, 200).map((page) => chip(page, state.cached.has(page) ? "var(--grey)" : hue(rid))))) : [note("No request has memory.")]),
      note(`A ${unit} has the K and V of ${counted(facts.page_size, "token")} in all layers: ${(facts.page_size * facts.bytes_per_token).toLocaleString("en")} bytes. Grey in a page table: the radix tree owns it; other requests may have it in their tables too. ${held} are locked by requests that run.`),
    ];
  },
  tree() {
    const nodes = states[now].tree, depth = {};
    if (!nodes.length) return [note("The radix tree is empty.")];
    return [
      el("h3", `${counted(nodes.filter((n) => n[5] !== "evicted").length, "node")} below the root`),
      ...nodes.map(([id, parent, text, tokens, locks, change]) => {
        depth[id] = (depth[parent] ?? -1) + 1;
        const classes = `div.node${locks ? ".locked" : ""}${change === "evicted" ? ".evicted" : change ? ".changed" : ""}`;
        const words = [counted(tokens, "token"), locks ? counted(locks, "lock") : "", change].filter(Boolean).join(", ");
        return el(classes, { style: `margin-left:${Math.min(depth[id] * 22, 160)}px` }, el("span.box.m", text), " ", el("span.soft", words));
      }),
      el("div.legend", el("span", el("i", { style: "background:var(--fa)" }), "locked by a running request"), el("span", "framed: new or split in this step"), el("span", "dashed: evicted in this step")),
    ];
  },
  logits(step) {
    if (!step.tokens.length) return [note("No token was chosen in this step.")];
    return step.tokens.flatMap(([rid, position, text, logit, p, rank, others, counts]) => [
      el("h3", name(rid), ` token ${position + 1} of its answer: `, el("span.m", `“${text}”`), counts ? "" : " (behind its end: not used)"),
      ...others.map(([other, value, share], i) => el("div.cand", el("span.m", i === rank ? el("b", other) : other, { title: other }), el("div.bar", { style: `background:${i === rank ? hue(rid) : "var(--grey)"};width:${Math.max(100 * share, 0.3)}%` }), el("span.n", `${value.toFixed(2)} · ${(100 * share).toFixed(1)} %`))),
      rank >= others.length ? note(`Drawn: “${text}” with logit ${logit.toFixed(2)} (${(100 * p).toFixed(2)} %), number ${rank + 1} of all.`) : null,
    ]).concat(note("The largest logits of the model, and the softmax of them at temperature 1. Bold: the token that was chosen."));
  },
  time(step) {
    const { length, cpu, device } = step.time;
    const bar = ([label, from, to], fill) => el("div.span", el("span", label), el("div", el("div.bar", { style: `margin-left:${(100 * from) / length}%;width:${(100 * (to - from)) / length}%;max-width:${100 - (100 * from) / length}%;background:${fill}` })), el("span.n", `${((to - from) / 1000).toFixed(2)} ms`));
    const longest = Math.max(...steps.slice(1).map((each) => each.time.length), 1), pool = facts.num_pages * facts.page_size;
    const chart = (of) => el("div.chart", steps.map((each, i) => el(`button${i === now ? ".now" : ""}`, of(each), { type: "button", title: `step ${i + 1}`, "aria-label": `step ${i + 1}`, onclick: () => show(i) })));
    const part = (share, fill) => el("i", { style: `height:${Math.max(0, 100 * share)}%;background:${fill}` });
    return [
      el("h3", `Step ${now + 1}: ${(length / 1000).toFixed(2)} ms`),
      ...cpu.map((span) => bar(span, "var(--fb)")), ...device.map((span) => bar([`model, ${facts.device}`, span[1], span[2]], "var(--fc)")),
      facts.overlaps ? note("The engine launches a batch before it reads the results of the one before.") : note("CPU work and the model take turns: this engine does not overlap them."),
      el("h3", "Length of every step"), chart((each) => part(Math.min(each.time.length / longest, 1), "var(--fb)")), note("The first step also warms up; its bar is cut."),
      el("h3", "KV memory after every step"), chart((each) => [part(each.memory[2] / pool, "var(--fd)"), part(1 - (each.memory[0] + each.memory[1] + each.memory[2]) / pool, "var(--fa)"), part(each.memory[1] / pool, "var(--grey)")]),
      el("div.legend", el("span", el("i", { style: "background:var(--fd)" }), "cached and locked"), el("span", el("i", { style: "background:var(--fa)" }), "of requests alone"), el("span", el("i", { style: "background:var(--grey)" }), "cached, can be evicted"), el("span", "rest: free")),
    ];
  },
  code(step) {
    const keys = [...new Set(step.events.map((event) => event[0]).filter(Boolean))];
    const chosen = shownCode in code ? shownCode : keys[0];
    if (!chosen) return [note("No code was noted in this step.")];
    const [file, line, text] = code[chosen], link = (facts.source_pages || {})[file];
    return [
      el("div", keys.map((key) => el("button", key.split(".").slice(-1)[0], { type: "button", onclick: () => open("code", key), style: `margin:0 4px 4px 0;padding:0 8px;${key === chosen ? "font-weight:700" : ""}` }))),
      el("p", el("code", `${file}:${line}`), link ? [" ", el("a", "whole file", { href: `${link}#__codelineno-0-${line}`, target: "_top" })] : null),
      el("pre", text.split("\n").flatMap((row, i) => row.includes("# --8<--") ? [] : [el("span.no", String(line + i).padStart(4) + "  "), row, "\n"])),
    ];
  },
};

/* Texts of tokens [from, to) of a request, where the recording has them. */
function pieces(rid, from, to) {
  const request = requests[place[rid]], found = [];
  if (!request) return found;
  for (let i = from; i < Math.min(to, from + 64); i++) found.push(i < request.prompt ? request.pieces[i] ?? "…" : outputs(rid)[i - request.prompt] ?? "…");
  return found;
}
function outputs(rid) {
  const texts = [];
  for (const step of steps) for (const token of step.tokens) if (token[0] === rid && token[7]) texts[token[1]] = token[2];
  return texts;
}
const answer = (rid, count) => el("td.m", outputs(rid).slice(0, count).join(""));

function open(which, key) { view = which; shownCode = key || shownCode; render(); }

function render() {
  const step = steps[now];
  $("range").value = now + 1;
  $("number").textContent = `step ${now + 1} of ${steps.length}`;
  $("title").textContent = step.title;
  $("back").disabled = now === 0;
  $("next").disabled = now === last;
  document.querySelectorAll(".cell").forEach((cell) => {
    cell.classList.toggle("now", Number(cell.dataset.step) === now);
    cell.classList.toggle("later", Number(cell.dataset.step) > now);
  });
  $("events").replaceChildren(...step.events.map(([key, where, text]) => el("li",
    el("button.text", text, { type: "button", onclick: () => open(where) }),
    key ? el("button.code", `${code[key][0]}:${code[key][1]}`, { type: "button", onclick: () => open("code", key) }) : null)));
  $("tabs").replaceChildren(...Object.entries(VIEWS).map(([key, label]) => el("button", label, { type: "button", role: "tab", "aria-selected": String(key === view), onclick: () => open(key) })));
  $("view").replaceChildren(...draw[view](step).filter(Boolean));
  const hash = `#step=${now + 1}&view=${view}`;
  if (location.hash !== hash) history.replaceState(null, "", hash);
}
function show(index) { now = Math.max(0, Math.min(last, index)); shownCode = null; render(); }
function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => (now === last ? play(false) : show(now + 1)), 1600) : null;
  $("play").textContent = on ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", on ? "Pause" : "Play");
}
function fromHash() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.get("view") in VIEWS) view = wanted.get("view");
  show((Number(wanted.get("step")) || 1) - 1);
}

$("facts").textContent = `${facts.model} on ${facts.device} in ${facts.dtype}; ${counted(facts.num_pages, unit)} of KV; ${facts.num_steps > steps.length ? `the first ${steps.length} of ${facts.num_steps} steps` : counted(steps.length, "step")}; ${facts.panel}`;
$("range").max = steps.length;
$("range").addEventListener("input", () => show(Number($("range").value) - 1));
$("back").addEventListener("click", () => show(now - 1));
$("next").addEventListener("click", () => show(now + 1));
$("play").addEventListener("click", () => { if (now === last) show(0); play(timer === null); });
$("theme").addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const views = Object.keys(VIEWS);
  if (event.key === "ArrowLeft" && event.target.id !== "range") show(now - 1);
  else if (event.key === "ArrowRight" && event.target.id !== "range") show(now + 1);
  else if (event.key === "Home" && event.target.id !== "range") show(0);
  else if (event.key === "End" && event.target.id !== "range") show(last);
  else if (event.key === " " && event.target.tagName !== "BUTTON") { event.preventDefault(); play(timer === null); }
  else if (views[Number(event.key) - 1]) open(views[Number(event.key) - 1]);
});
window.addEventListener("hashchange", fromHash);
try { // within a page of the site: its colours
  const page = window.parent !== window && window.parent.document.body;
  const follow = () => { document.documentElement.dataset.theme = page.dataset.mdColorScheme === "slate" ? "dark" : "light"; };
  if (page && page.dataset.mdColorScheme) {
    follow();
    new MutationObserver(follow).observe(page, { attributeFilter: ["data-md-color-scheme"] });
  }
} catch { /* another origin */ }
drawLanes();
fromHash();

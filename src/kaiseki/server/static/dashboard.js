// The page: one stream of events in, panels out. What a request's life was comes from its explain document.

import { LANE_PX, Lanes } from "/dashboard/lanes.js";

const $ = (id) => document.getElementById(id);
const lanes = new Lanes($("lanes"), $("scroller"));
// Tenants get these in order; hatching and labels say the same, so colour is never alone.
const TENANT_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#8a8a8a"];
const KEPT_MS = 300_000;

let last = null; // newest event
let shown = []; // requests with a lane, in order
let selected = null; // id of the request that the keyboard is on
let paused = false;
const past = []; // [now_ms, attainment, tokens] of the last five minutes
let tokens = 0;
const tenantOrder = [];

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function tenantColour(name) {
  if (!tenantOrder.includes(name)) tenantOrder.push(name);
  return TENANT_COLOURS[tenantOrder.indexOf(name) % TENANT_COLOURS.length];
}

const NS = "http://www.w3.org/2000/svg";

function track(parts, mark) {
  // Bars are SVG, since the page allows no inline styles.
  const box = element("div", undefined, { class: "track" });
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", "0 0 100 10");
  svg.setAttribute("preserveAspectRatio", "none");
  let x = 0;
  for (const [share, colour, title] of parts) {
    const rect = document.createElementNS(NS, "rect");
    const width = Math.max(0, Math.min(100 - x, share * 100));
    for (const [k, v] of Object.entries({ x, y: 0, width, height: 10, fill: colour })) rect.setAttribute(k, v);
    if (title) rect.append(Object.assign(document.createElementNS(NS, "title"), { textContent: title }));
    svg.append(rect);
    x += width;
  }
  if (mark !== undefined) {
    const rect = document.createElementNS(NS, "rect");
    for (const [k, v] of Object.entries({ x: Math.min(99, mark * 100), y: 0, width: 1, height: 10, fill: "currentColor" })) {
      rect.setAttribute(k, v);
    }
    svg.append(rect);
  }
  box.append(svg);
  return box;
}

function bar(label, parts, text, mark) {
  const row = element("div", undefined, { class: "bar" });
  row.append(element("span", label, { title: label }), track(parts, mark), element("span", text));
  return row;
}

function fill(id, rows, nothing) {
  $(id).replaceChildren(...(rows.length ? rows : [element("p", nothing, { class: "empty" })]));
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const percent = (share) => `${Math.round(share * 100)} %`;

function drawFigures(event) {
  const span = past.length > 1 ? (past.at(-1)[0] - past[Math.max(0, past.length - 11)][0]) / 1000 : 0;
  const base = past[Math.max(0, past.length - 11)] ?? [0, [], 0, 0];
  const rate = (now, then) => (span > 0 ? ((now - then) / span).toFixed(0) : "–");
  const kv = event.kv;
  const figures = [
    [event.requests.length && event.running !== undefined ? event.running : event.requests.filter((r) => r.state === "running").length, "running"],
    [event.waiting ?? event.queue.reduce((n, q) => n + q.waiting, 0), "waiting"],
    [percent(1 - kv.free_blocks / kv.total_blocks), `of ${kv.total_blocks} KV blocks`],
    [rate(past.at(-1)[2], base[2]), "tokens/s computed"],
    [rate(event.slot, base[3]), "slots/s"],
    [event.slot < 0 ? "–" : event.slot, "slot"],
  ];
  $("figures").replaceChildren(...figures.map(([value, label]) => {
    const box = element("div", undefined, { class: "figure" });
    box.append(element("b", String(value)), element("span", label));
    return box;
  }));
}

function drawClasses(event) {
  // Until the page has watched for five minutes there is nothing to take the difference from.
  const long = past.at(-1)[0] - past[0][0] > 0.95 * KEPT_MS;
  $("span").textContent = long ? "last 5 min" : "since start";
  const then = new Map((long ? past[0][1] : []).map((c) => [`${c.tenant}/${c.class}`, c]));
  const totals = new Map();
  for (const c of event.attainment) {
    const before = then.get(`${c.tenant}/${c.class}`);
    const [good, bad] = totals.get(c.class) ?? [0, 0];
    totals.set(c.class, [good + c.attained - (before?.attained ?? 0), bad + c.missed - (before?.missed ?? 0)]);
  }
  const rows = [...totals].filter(([, [good, bad]]) => good + bad).map(([name, [good, bad]]) => {
    const share = good / (good + bad);
    return bar(name, [[share, style("good")], [1 - share, style("bad")]], `${percent(share)} of ${good + bad}`);
  });
  fill("classes", rows, "No request has ended.");
}

function drawTenants(event) {
  const served = new Map();
  for (const [, , , , byTenant] of past) for (const [t, n] of Object.entries(byTenant)) served.set(t, (served.get(t) ?? 0) + n);
  const all = Object.entries(event.tenants ?? {}).map(([name, t]) => [name, served.get(name) ?? 0, t.weight]).filter((t) => t[1]);
  const sum = all.reduce((n, t) => n + t[1], 0) || 1;
  const weights = all.reduce((n, t) => n + t[2], 0) || 1;
  const rows = all.sort((a, b) => b[1] - a[1]).slice(0, 12).map(([name, n, weight]) =>
    bar(name, [[n / sum, tenantColour(name)]], `${percent(n / sum)} of tokens`, weight / weights));
  if (all.length > 12) rows.push(element("p", `and ${all.length - 12} more`, { class: "note" }));
  fill("tenants", rows, "No tenant was served in the last five minutes.");
}

function drawQueue(event) {
  const reasons = new Map();
  for (const q of event.queue) {
    const entry = reasons.get(q.reason) ?? { count: 0, detail: q.detail, tenants: [] };
    entry.count += q.waiting;
    entry.tenants.push(`${q.tenant} ${q.waiting}`);
    reasons.set(q.reason, entry);
  }
  const most = Math.max(1, ...[...reasons.values()].map((r) => r.count));
  const rows = [...reasons].sort((a, b) => b[1].count - a[1].count).flatMap(([name, r]) => [
    bar(name.replaceAll("_", " "), [[r.count / most, style("waits"), r.detail]], `${r.count} waiting`),
    element("p", `${r.detail} (${r.tenants.slice(0, 6).join(", ")})`, { class: "note" }),
  ]);
  fill("queue", rows, "Nothing waits.");
}

function drawKv(event) {
  const kv = event.kv;
  const byTenant = new Map();
  for (const [request, tenant, blocks] of kv.held) {
    if (!byTenant.has(tenant)) byTenant.set(tenant, []);
    byTenant.get(tenant).push([request, blocks]);
  }
  const rows = [...byTenant].map(([tenant, held]) => {
    const blocks = held.reduce((n, [, b]) => n + b, 0);
    const parts = held.sort((a, b) => b[1] - a[1]).slice(0, 64).flatMap(([request, b], i) => [
      [Math.max(0, b / kv.total_blocks - 0.004), tenantColour(tenant), `${request}: ${b} blocks`],
      [Math.min(0.004, b / kv.total_blocks), "transparent"],
    ]);
    return bar(tenant, parts, `${blocks} in ${held.length}`);
  });
  fill("kv", rows, "No request holds blocks.");
  const cached = kv.total_blocks - kv.live_blocks;
  $("kv").append(element("p", `${kv.live_blocks} of ${kv.total_blocks} blocks of ${kv.block_tokens} tokens are held by requests, `
    + `${cached} are free or cached. Shared blocks count for each request that has them.`, { class: "note" }));
}

function drawLanes() {
  if (!last) return;
  const wanted = $("filter").value.trim().toLowerCase();
  shown = last.requests.filter((r) => !wanted || `${r.request} ${r.tenant} ${r.class}`.toLowerCase().includes(wanted));
  const list = $("requests");
  while (list.children.length > shown.length) list.lastChild.remove();
  shown.forEach((r, i) => {
    let row = list.children[i];
    if (!row) {
      row = element("li", undefined, { role: "option" });
      row.append(element("span"));
      list.append(row);
    }
    row.id = `r-${r.request}`;
    row.dataset.request = r.request;
    row.setAttribute("aria-selected", String(r.request === selected));
    const state = r.state === "running" ? `→ ${r.output_tokens}` : (r.reason ?? r.state).replaceAll("_", " ");
    row.title = `${r.request}: ${r.tenant}/${r.class}, ${r.prompt_tokens} prompt tokens, ${r.output_tokens} output tokens, `
      + `${(r.age_ms / 1000).toFixed(1)} s old${r.demoted ? ", demoted" : ""}${r.reason ? `, waits: ${r.reason}` : ""}`;
    row.firstChild.replaceChildren(`${r.tenant}/${r.class} `, element("em", `${r.prompt_tokens} ${state}`));
  });
  if (selected) list.setAttribute("aria-activedescendant", `r-${selected}`);
  lanes.windowMs = Number($("window").value) * 1000;
  lanes.draw(shown);
}

function take(event) {
  lanes.take(event);
  for (const n of Object.values(event.tokens)) tokens += n;
  past.push([event.now_ms, event.attainment, tokens, event.slot, event.tokens]);
  while (past.length > 1 && past[0][0] < event.now_ms - KEPT_MS) past.shift();
  last = event;
  if (paused) return;
  const status = $("status");
  const bad = !event.health.ok;
  status.classList.toggle("bad", bad);
  status.textContent = bad ? event.health.reason : `policy ${event.policy}${event.draining ? ", draining" : ""}, live`;
  drawFigures(event);
  drawClasses(event);
  drawTenants(event);
  drawQueue(event);
  drawKv(event);
  drawLanes();
}

function drawWaits(waits, total) {
  const reasons = new Map();
  for (const w of waits) {
    const entry = reasons.get(w.reason) ?? { ms: 0, detail: w.detail, others: [] };
    entry.ms += w.ms;
    if (w.yielded_to) entry.others.push(w.yielded_to);
    reasons.set(w.reason, entry);
  }
  const rows = [...reasons].sort((a, b) => b[1].ms - a[1].ms).map(([name, r]) => {
    const box = element("div");
    const some = r.others.slice(0, 2).join(", ") + (r.others.length > 2 ? ` and ${r.others.length - 2} more` : "");
    box.append(
      bar(name.replaceAll("_", " "), [[r.ms / total, style("waits")]], `${r.ms.toFixed(0)} ms, ${percent(r.ms / total)}`),
      element("p", `${r.detail}${some ? `; in favour of ${some}` : ""}`, { class: "note" }));
    return box;
  });
  fill("story-waits", rows, "It did not wait.");
}

async function explain(request) {
  const answer = await fetch(`/kaiseki/v1/requests/${encodeURIComponent(request)}`);
  const found = await answer.json();
  $("story-title").textContent = request;
  $("story-summary").textContent = answer.ok ? found.summary : found.error.message;
  drawWaits(found.waits ?? [], Math.max(1, found.total_wait_ms ?? 1));
  const changes = found.counterfactuals ?? [];
  $("story-counterfactuals").replaceChildren(...(changes.length ? changes : ["Nothing that is known."]).map((c) =>
    element("li", typeof c === "string" ? c : c.text ?? JSON.stringify(c))));
  $("story-timeline").replaceChildren(...(found.timeline ?? []).map((e) => {
    const row = element("tr");
    row.append(element("td", e.slot ?? "–"), element("td", e.t_ms.toFixed(1)), element("td", e.event.replaceAll("_", " ")), element("td", e.detail));
    return row;
  }));
  if (!$("story").open) $("story").showModal();
}

function select(step) {
  if (!shown.length) return;
  const at = shown.findIndex((r) => r.request === selected);
  const next = Math.max(0, Math.min(shown.length - 1, at < 0 ? 0 : at + step));
  selected = shown[next].request;
  const scroller = $("scroller");
  if ((next + 2) * LANE_PX > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = (next + 2) * LANE_PX - scroller.clientHeight;
  if (next * LANE_PX < scroller.scrollTop) scroller.scrollTop = next * LANE_PX;
  drawLanes();
}

function togglePause() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
}

function nextTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("kaiseki-theme", root.dataset.theme);
  if (last) take({ ...last, slots: [], marks: [], tokens: {} });
}

$("requests").addEventListener("click", (e) => {
  const row = e.target.closest("li");
  if (!row) return;
  selected = row.dataset.request;
  drawLanes();
  explain(selected);
});
$("requests").addEventListener("keydown", (e) => {
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 };
  if (e.key in steps) select(steps[e.key]);
  else if (e.key === "Enter" && selected) explain(selected);
  else return;
  e.preventDefault();
});
document.addEventListener("keydown", (e) => {
  if (e.target.matches("input, select") || e.ctrlKey || e.metaKey || e.altKey || $("story").open) return;
  if (e.key === "/") { $("filter").focus(); e.preventDefault(); }
  if (e.key === "p") togglePause();
  if (e.key === "t") nextTheme();
});
$("pause").addEventListener("click", togglePause);
$("theme").addEventListener("click", nextTheme);
$("filter").addEventListener("input", drawLanes);
$("window").addEventListener("change", drawLanes);
$("scroller").addEventListener("scroll", () => { if (last) lanes.draw(shown); });
addEventListener("resize", drawLanes);

const theme = localStorage.getItem("kaiseki-theme");
if (theme) document.documentElement.dataset.theme = theme;

const stream = new EventSource("/kaiseki/v1/live");
stream.onmessage = (message) => {
  if (message.data === "[DONE]") {
    stream.close();
    $("status").textContent = "the server has ended the stream";
    return;
  }
  take(JSON.parse(message.data));
};
stream.onerror = () => {
  $("status").classList.add("bad");
  $("status").textContent = "connection lost, trying again…";
};

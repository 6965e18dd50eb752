"use strict";
// Draws what /dashboard/events says. Everything is set as text, nothing as markup.
const SILENCE_MS = 6000, AGAIN_MS = 1000, DENSE = 17, SPAN_S = 120;
const { VERDICTS, MOODS, STATES, MARKS } = /*glyphs*/ {};
const MARKED = { "taken-over": "took over from a lost server", gained: "gained a copy", "given-up": "gave up a copy" };
const SORTS = ["number", "load", "state"];
const at = (id) => document.getElementById(id);
let board = null, paused = false, sort = 0, heardMs = 0, trouble = "", chosen = [0, 0], step = 0;

// -- figures for people

function number(x) {
  if (x === null) return "–";
  if (x >= 999500) return (x / 1e6).toPrecision(3) + "M";
  if (x >= 9999.5) return (x / 1e3).toPrecision(3) + "k";
  return x >= 9.95 ? Math.round(x).toLocaleString("en-US") : x.toFixed(1).replace(".0", "");
}
function seconds(s) {
  if (s === null) return "–";
  if (s >= 7200) return (s / 3600).toFixed(1) + " h";
  if (s >= 120) return Math.round(s / 60) + " min";
  if (s >= 0.9995) return (s < 9.95 ? s.toFixed(1).replace(".0", "") : Math.round(s)) + " s";
  return s >= 0.9995e-3 ? Number((s * 1e3).toPrecision(3)) + " ms" : Math.round(s * 1e6) + " µs";
}
const percent = (x) => (x === null ? "–" : Math.round(100 * x) + "%");
const bar = (x) => "▁▂▃▄▅▆▇█"[Math.min(7, Math.floor(8 * (x ?? 0)))];
const clock = (s) => new Date(s * 1000).toISOString().slice(11, 19);

// -- the document

function make(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}
function draw() {
  document.body.classList.toggle("stale", board !== null && trouble !== "");
  at("news").hidden = !trouble;
  if (trouble && heardMs) at("news").textContent =
    `✕ No news for ${seconds((Date.now() - heardMs) / 1000)}: ${trouble}. Trying again; below is what was known.`;
  else if (trouble) at("news").textContent = `✕ ${trouble}. Trying again.`;
  at("live").textContent = trouble ? "✕ no news" : paused ? "· paused at " + clock(board.at_s) : board ? "✓ live" : "";
  if (!board) return;
  drawTop();
  if (trouble) {
    // What was well may not be any more.
    at("bar").className = "bar unknown";
    at("verdict").textContent = "? NO NEWS, was " + board.verdict;
    document.title = "? " + board.gateway.model;
  }
  drawGateway(board.gateway, board.rates, board.past);
  drawWorkers();
  drawHeat(board.heat);
  at("inspection").hidden = !board.inspection;
  if (board.inspection) drawInspection(board.inspection);
  drawHappenings();
}
function drawModels() {
  const links = at("models"), names = JSON.stringify(board.models);
  // Made anew they would lose the focus.
  if (links.dataset.names === names) return;
  links.dataset.names = names;
  links.hidden = board.models.length < 2;
  links.replaceChildren(...board.models.map((name) => {
    const link = make("a", name);
    link.setAttribute("href", "?model=" + encodeURIComponent(name));
    if (name === board.gateway.model) link.setAttribute("aria-current", "page");
    return link;
  }));
}
function drawTop() {
  at("bar").className = "bar " + board.verdict;
  const verdict = `${VERDICTS[board.verdict]} ${board.verdict.toUpperCase()}`;
  if (at("verdict").textContent !== verdict) at("verdict").textContent = verdict;
  document.title = `${verdict} ${board.gateway.model}`;
  const said = [...board.facts, board.rates.failed ? `${board.rates.failed} requests failed` : "no request failed"];
  for (const router of board.routers) said.push(router.name + " " + router.state);
  at("facts").replaceChildren(...said.map((text, place) => make("span", text, place ? "" : "model")));
  drawModels();
  at("clock").textContent = clock(board.at_s) + " UTC";
  at("reasons").replaceChildren(...board.reasons.map((reason) => {
    const line = make("li");
    line.append(make("b", `${MOODS[reason.mood]} ${reason.text}`, reason.mood), make("span", reason.do && `  → ${reason.do}`));
    return line;
  }));
}
function drawGateway(gateway, rates, past) {
  at("gateway-title").textContent = gateway.name;
  at("window").textContent = `last ${Math.round(rates.window_s)} s; goodput: TTFT ≤ ${seconds(gateway.ttft_target_s)}, ` +
    `TPOT ≤ ${seconds(gateway.tpot_target_s)}`;
  at("tiles").replaceChildren(...board.figures.map(({ name, value, more, mood }) => {
    const tile = make("div");
    tile.append(make("dt", name), make("dd", value, mood === "info" ? "" : mood));
    if (more) tile.append(make("dd", more, "more"));
    return tile;
  }));
  const most = curve(at("tokens-curve"), past, (point) => point.tokens_per_s, true);
  at("tokens-most").textContent = `most ${number(most)}`;
  at("tokens-curve").setAttribute("aria-label", `tokens a second, now ${number(rates.tokens_per_s)}, most ${number(most)}`);
  const slowest = curve(at("itl-curve"), past, (point) => point.itl_p99_s, false);
  at("itl-most").textContent = slowest ? `most ${seconds(slowest)}` : "";
  at("itl-curve").setAttribute("aria-label", `99th percentile of the time between tokens, most ${seconds(slowest || null)}`);
}
function curve(svg, past, read, filled) {
  const [, , wide, tall] = svg.getAttribute("viewBox").split(" ").map(Number);
  const most = Math.max(0, ...past.map((point) => read(point) ?? 0));
  const x = (s) => (wide * (1 - (board.at_s - s) / SPAN_S)).toFixed(1);
  const y = (value) => (tall - 2 - (tall - 8) * (most ? value / most : 0)).toFixed(1);
  const runs = [[]];
  for (const point of past) {
    if (read(point) === null) runs.push([]);
    else runs[runs.length - 1].push(point);
  }
  const parts = [];
  for (const run of runs.filter((run) => run.length)) {
    const line = run.map((point) => `${x(point.at_s)} ${y(read(point))}`).join("L");
    if (filled) parts.push(path(`M${x(run[0].at_s)} ${tall}L${line}L${x(run[run.length - 1].at_s)} ${tall}Z`, "area"));
    // One point alone is a short stroke.
    parts.push(path(`M${line}${run.length === 1 ? "h2" : ""}`, "line"));
  }
  for (const one of board.happenings) {
    const kind = one.mood === "bad" ? "bad" : one.kind === "replaced" || one.kind === "redundant" ? "good" : "";
    if (kind && board.at_s - one.at_s < SPAN_S) parts.push(path(`M${x(one.at_s)} 0V${tall}`, kind, one.text));
  }
  svg.replaceChildren(...parts);
  return most;
}
function path(d, kind, title) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "path");
  made.setAttribute("d", d);
  made.setAttribute("class", kind);
  if (title) made.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "title")).textContent = title;
  return made;
}
function drawWorkers() {
  const pool = board.pools.attention;
  const serving = board.workers.filter((worker) => worker.state === "serving").length;
  at("attention-size").textContent = `${serving}${pool ? " of " + pool.wanted : ""} serving` +
    (pool && pool.starting ? `, ${pool.starting} starting` : "");
  const workers = [...board.workers];
  if (SORTS[sort] === "load") workers.sort((a, b) => (b.tokens_per_s ?? 0) - (a.tokens_per_s ?? 0));
  if (SORTS[sort] === "state") workers.sort((a, b) => (a.state === "serving") - (b.state === "serving"));
  at("workers").tBodies[0].replaceChildren(...workers.map((worker) => {
    const row = make("tr"), kv = make("td");
    const meter = make("meter");
    meter.value = worker.kv_use ?? 0;
    meter.high = 0.9;
    meter.setAttribute("aria-label", "KV in use");
    kv.append(meter, " " + percent(worker.kv_use));
    row.append(make("td", worker.name),
      make("td", `${STATES[worker.state] ?? ""} ${worker.state}`, worker.state === "serving" ? "" : "warn"), kv,
      make("td", String(worker.running)), make("td", String(worker.waiting)), make("td", number(worker.tokens_per_s)),
      make("td", percent(worker.busy)));
    return row;
  }));
}
function sorted(servers) {
  const found = [...servers];
  if (SORTS[sort] === "load") found.sort((a, b) => b.rows_per_s - a.rows_per_s);
  const rank = (server) => (server.state === "lost" ? 0 : server.state === "serving" ? 2 : 1);
  if (SORTS[sort] === "state") found.sort((a, b) => rank(a) - rank(b));
  return found;
}
function drawHeat(heat) {
  const servers = sorted(heat.servers), map = at("map");
  at("heat-size").textContent = heat.hottest >= 1
    ? `hottest ${number(heat.hottest)}${heat.balance ? `, busiest server ${heat.balance.toFixed(2)} of mean` : ""}` : "no load";
  const dense = servers.length > DENSE || heat.layers > 2 * DENSE;
  map.classList.toggle("dense", dense);
  const head = make("tr"), foot = make("tr"), corner = make("th", "server", "corner");
  head.append(corner);
  foot.append(make("th", "busy"));
  foot.firstChild.scope = "row";
  for (const server of servers) {
    const well = server.state === "serving", kind = well ? "" : server.state === "lost" ? "bad" : "warn";
    const digits = server.name.split("/")[1], glyph = STATES[server.state] ?? "";
    // Where there is no room for every number, every fifth.
    const name = make("th", dense ? glyph || (digits % 5 ? "" : digits) : `${digits} ${glyph}`, kind);
    name.scope = "col";
    name.title = server.name + " " + server.state;
    head.append(name);
    const replacement = server.replacement && "→ " + server.replacement.split("/")[1];
    const busy = dense ? glyph || bar(server.busy) : well ? percent(server.busy) : replacement || server.state;
    foot.append(make("td", busy, replacement ? "" : kind));
  }
  map.tHead.replaceChildren(head);
  map.tFoot.replaceChildren(foot);
  const body = map.tBodies[0];
  // Cells are kept, so that colours glide and the pointer stays where it is.
  while (body.rows.length > heat.layers) body.deleteRow(-1);
  for (let layer = 0; layer < heat.layers; layer++) {
    const row = body.rows[layer] ?? body.insertRow();
    if (!row.cells.length) row.append(make("th"));
    row.cells[0].scope = "row";
    row.cells[0].textContent = dense && layer % 4 ? "" : "layer " + layer;
    while (row.cells.length > servers.length + 1) row.deleteCell(-1);
    servers.forEach((server, place) => drawCell(row.cells[place + 1] ?? row.insertCell(), server, layer, heat.hottest, dense));
  }
  drawDetail(servers);
}
function drawCell(cell, server, layer, hottest, dense) {
  const heat = hottest >= 1 ? Math.min(1, server.rows[layer] / hottest) : 0, mark = MARKS[server.marks[layer]] ?? "";
  const lost = server.state === "lost", held = server.held[layer];
  const kind = lost ? "lost" + (server.replacement ? " replaced" : "") : !held ? "none" : "cell" + (heat > 0.55 ? " hi" : "");
  const text = lost ? "✕" : dense ? "" : held ? number(Math.round(server.rows[layer])) : "·";
  const level = dense ? Math.round(20 * heat) * 5 : Math.round(100 * heat);
  const shown = [kind, text, level, mark].join();
  // Of a large model most cells stay what they were.
  if (cell.shown === shown) return;
  cell.shown = shown;
  cell.className = kind;
  cell.textContent = text;
  cell.style.setProperty("--h", level + "%");
  if (mark && held && !lost) cell.append(make("i", mark));
}
function drawDetail(servers) {
  for (const cell of at("map").querySelectorAll(".chosen")) cell.classList.remove("chosen");
  const [layer, place] = chosen, server = servers[place];
  if (!server || layer >= board.heat.layers) return;
  if (document.activeElement === at("map")) at("map").tBodies[0].rows[layer]?.cells[place + 1]?.classList.add("chosen");
  const name = `${server.name}, layer ${layer}: `;
  let said = `${number(server.rows[layer])} rows/s for ${server.held[layer]} of ${board.heat.experts} experts`;
  if (server.state === "lost") {
    said = `lost at ${clock(server.since_s)} UTC${server.gone_reason ? " (" + server.gone_reason + ")" : ""}, ` +
      (server.replacement ? `${server.replacement} serves in its place` : "not replaced yet");
  } else if (server.state !== "serving") said += `, ${server.state}`;
  const mark = MARKED[server.marks[layer]];
  const text = name + said + (mark ? `, ${mark} lately` : "");
  if (at("detail").textContent !== text) at("detail").textContent = text;
}
function drawInspection({ id, taps, produced, dropped, fault, layers }) {
  at("inspection-title").textContent = "inspection " + id;
  at("inspection-said").textContent = fault ? "✕ " + fault
    : `${taps} taps, ${number(produced)} records, ${number(dropped)} dropped`;
  at("inspection-said").className = fault ? "bad" : "";
  const head = make("tr"), gate = layers[step % layers.length];
  at("gates").tBodies[0].replaceChildren(...layers.map(({ layer, entropy, drift, pairs }) => {
    const row = make("tr"), now = entropy.findLast((x) => x !== null) ?? null;
    row.append(make("td", (layer === gate.layer ? "▸ " : "") + "layer " + layer),
      make("td", entropy.map((x) => (x === null ? " " : bar(x))).join("")), make("td", percent(now)),
      make("td", drift === null ? "–" : (100 * drift).toFixed(1)),
      make("td", pairs.slice(0, 6).map(([a, b, n]) => `${a}+${b} ×${number(n)}`).join("  ")));
    return row;
  }));
  at("layer").lastElementChild.textContent = gate ? "layer " + gate.layer : "no layer yet";
  head.append(make("th", "token"), ...(gate?.experts ?? []).map((expert) => make("th", String(expert))));
  at("by-token").tHead.replaceChildren(head);
  at("by-token").tBodies[0].replaceChildren(...(gate?.tokens ?? []).map(([text, counts]) => {
    const row = make("tr"), most = Math.max(1, ...counts);
    row.append(make("th", text), ...counts.map((count) => {
      const cell = make("td", count ? number(count) : "·", count ? "cell" + (count > 0.55 * most ? " hi" : "") : "none");
      cell.style.setProperty("--h", Math.round((100 * count) / most) + "%");
      return cell;
    }));
    return row;
  }));
}
function drawHappenings() {
  at("heard").textContent = board.as_of_s ? "router heard " + clock(board.as_of_s) : "";
  at("happenings").replaceChildren(...board.happenings.map((one) => {
    const line = make("li", undefined, board.at_s - one.at_s > 60 ? "old" : "");
    line.append(make("time", clock(one.at_s)), make("b", MOODS[one.mood], one.mood), make("span", one.text),
      make("small", seconds(Math.max(0, Math.round(board.at_s - one.at_s))).replace("0 µs", "now")));
    return line;
  }));
}

// -- keys

function press(act) {
  if (act === "pause") paused = !paused;
  if (act === "sort") sort = (sort + 1) % SORTS.length;
  if (act === "layer") step++;
  if (act === "help") return at("help").open ? at("help").close() : at("help").showModal();
  at("pause").lastElementChild.textContent = paused ? "go on" : "pause";
  at("pause").setAttribute("aria-pressed", String(paused));
  at("sort").lastElementChild.textContent = "sort: " + SORTS[sort];
  if (board) draw();
}
at("pause").addEventListener("click", () => press("pause"));
at("sort").addEventListener("click", () => press("sort"));
at("layer").addEventListener("click", () => press("layer"));
at("explain").addEventListener("click", () => press("help"));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "INPUT") return;
  const act = { p: "pause", s: "sort", l: "layer", "?": "help" }[event.key];
  if (act && (act === "help" || !at("help").open)) press(act);
});
at("map").addEventListener("keydown", (event) => {
  const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!move || !board) return;
  event.preventDefault();
  const most = [board.heat.layers - 1, board.heat.servers.length - 1];
  chosen = chosen.map((now, axis) => Math.max(0, Math.min(most[axis], now + move[axis])));
  drawDetail(sorted(board.heat.servers));
});
at("map").addEventListener("mouseover", (event) => {
  const cell = event.target.closest("tbody td");
  if (!cell || !board) return;
  chosen = [cell.parentNode.rowIndex - 1, cell.cellIndex - 1];
  drawDetail(sorted(board.heat.servers));
});
for (const kind of ["focus", "blur"]) at("map").addEventListener(kind, () => board && drawDetail(sorted(board.heat.servers)));

// -- news

let key = sessionStorage.getItem("eaas-key") ?? "";
if (location.hash.startsWith("#key=")) {
  key = decodeURIComponent(location.hash.slice(5));
  sessionStorage.setItem("eaas-key", key);
  // It must not stay in the address, which is copied and shown.
  history.replaceState(null, "", location.pathname + location.search);
}
at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  sessionStorage.setItem("eaas-key", key);
  at("key").value = "";
  at("ask").hidden = true;
  follow();
});
async function listen() {
  const stop = new AbortController();
  let timer = setTimeout(() => stop.abort(), SILENCE_MS);
  try {
    const headers = key ? { authorization: "Bearer " + key } : {};
    const reply = await fetch("dashboard/events" + location.search, { headers, signal: stop.signal, cache: "no-store" });
    if (reply.status === 401 || reply.status === 403) return "key";
    if (!reply.ok) return reply.status === 503 ? "the gateway feeds as many views as it can" : "the gateway answers " + reply.status;
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let left = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return "the gateway ended the connection";
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENCE_MS);
      const lines = (left + value).split("\n");
      left = lines.pop();
      const news = lines.filter((line) => line.startsWith("data:")).pop();
      if (!news) continue;
      heardMs = Date.now();
      trouble = "";
      const told = JSON.parse(news.slice(5));
      if (!paused) board = told;
      // Outside: a fault in drawing is none of the connection.
      queueMicrotask(draw);
    }
  } catch (error) {
    return stop.signal.aborted ? "the gateway is silent" : "the gateway does not answer";
  } finally {
    clearTimeout(timer);
    stop.abort();
  }
}
async function follow() {
  for (;;) {
    const reason = await listen();
    if (reason === "key") {
      at("ask").hidden = false;
      at("key").focus();
      return;
    }
    trouble = reason;
    draw();
    await new Promise((done) => setTimeout(done, AGAIN_MS));
  }
}
setInterval(() => trouble && draw(), 1000);
follow();

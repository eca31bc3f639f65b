// Reads /status.json once a second while the page is seen, and shows it. Whatever a client has chosen (tenants' and
// calls' names) is set as text, never as markup.
import { PoolMap, SHARE_STEPS, colours, sample } from "/status_map.js";
import { lines, short, stackedBars, swatch } from "/status_charts.js";

const POLL_MS = 1000;
const PATIENCE_MS = 8000;
const RECENT_SECONDS = 300;
const TENANT_COLOURS = 8;
const SPANS = [2, 5, 10];
const WARN_WAIT_SECONDS = 1;
const MISSES = { never_seen: "never seen", diverged: "diverged in a block", evicted: "evicted", bypassed: "bypassed" };

const byId = (id) => document.getElementById(id);
const full = (value) => value.toLocaleString("en");
const maps = new Map();
const tenantColours = new Map();
let last = null;
let view = "state";

function text(id, value) {
  const element = byId(id);
  if (element.textContent !== value) element.textContent = value;
}

function figure(id, value, unit = "") {
  const element = byId(id);
  element.replaceChildren(value);
  if (unit) {
    const small = document.createElement("span");
    small.className = "unit";
    small.textContent = unit;
    element.append(small);
  }
}

const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const count = (number, one, many = `${one}s`) => `${full(number)} ${number === 1 ? one : many}`;

function seconds(value) {
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

// A row of cells; what is text becomes a cell of text.
function row(heading, cells) {
  const line = document.createElement("tr");
  const first = document.createElement("th");
  first.scope = "row";
  first.append(...[heading].flat());
  first.title = first.textContent;
  line.append(first);
  for (const [value, kind] of cells) {
    const cell = document.createElement("td");
    if (kind) cell.className = kind;
    cell.append(value);
    line.append(cell);
  }
  return line;
}

function bar(active, cached, total, label) {
  const element = document.createElement("div");
  element.className = "bar";
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", label);
  for (const [name, blocks] of [["active", active], ["cached", cached]]) {
    const part = document.createElement("i");
    part.className = name;
    part.style.width = total ? `${(100 * blocks) / total}%` : "0";
    element.append(part);
  }
  return element;
}

function legend(id, entries) {
  byId(id).replaceChildren(...entries.map(([mark, words, number]) => {
    const item = document.createElement("li");
    const amount = document.createElement("b");
    amount.textContent = number;
    item.append(mark, words, amount);
    return item;
  }));
}

function showTiles(status) {
  const { history, pool, calls, totals } = status;
  const recent = Math.ceil(RECENT_SECONDS / history.bucket_seconds);
  const lately = (name) => history[name].slice(-recent).reduce((sum, value) => sum + value, 0);
  const [hit, queried] = [lately("hit_tokens"), lately("queried_tokens")];
  if (queried) figure("hit-rate", ((100 * hit) / queried).toFixed(1), "%");
  else figure("hit-rate", "–");
  byId("hit-bar").firstElementChild.style.width = queried ? `${(100 * hit) / queried}%` : "0";
  const ever = `since the start ${percent(totals.hit_tokens, totals.queried_tokens)} of ${full(totals.queried_tokens)}`;
  text("hit-words", (queried ? `${full(hit)} of ${count(queried, "prompt token")} were cached` : "no prompt came") +
    (totals.queried_tokens ? `\n${ever}` : ""));
  figure("pool-used", pool.total ? ((100 * pool.active) / pool.total).toFixed(0) : "–", "%");
  const [active, cached] = byId("pool-bar").children;
  active.style.width = pool.total ? `${(100 * pool.active) / pool.total}%` : "0";
  cached.style.width = pool.total ? `${(100 * pool.cached) / pool.total}%` : "0";
  text("pool-words", `${full(pool.active)} held, ${full(pool.cached)} cached, ${full(pool.free)} free of ` +
    count(pool.total, "block"));
  figure("live-calls", full(calls.live));
  text("live-words", `${full(calls.awaiting_first_token)} without a token yet`);
  figure("waiting-calls", full(totals.waiting_calls));
  byId("waiting-calls").classList.toggle("warn", calls.longest_wait_seconds > WARN_WAIT_SECONDS);
  text("waiting-words", totals.waiting_calls || calls.longest_wait_seconds
    ? `the longest for ${seconds(calls.longest_wait_seconds)}` : "nobody waits");
  // The last whole bucket: the latest has only begun.
  const out = (history.generated_tokens.at(-2) ?? 0) / history.bucket_seconds;
  figure("token-rate", short(out), "/s");
  const evicted = history.evicted_blocks.slice(-Math.ceil(60 / history.bucket_seconds)).reduce((a, b) => a + b, 0);
  text("token-words", `${full(evicted)} blocks evicted in a minute`);
}

function colourTenants(tenants) {
  // Who has a colour keeps it, as long as the page is open.
  for (const { name } of tenants) {
    if (!tenantColours.has(name)) {
      const free = tenantColours.size < TENANT_COLOURS && name !== "other";
      tenantColours.set(name, free ? tenantColours.size + 1 : 0);
    }
  }
}

function showLegend(status) {
  const colour = colours();
  const cell = (values) => ({ free: 0, active: 0, cached: 0, pinned: 0, holders: 0, tenant: 0, ...values });
  const { pool } = status;
  const sharing = [0, 0, 0, 0, 0];
  for (const worker of status.workers) {
    const map = worker.survey?.map;
    map?.sharing.forEach((blocks, at) => { sharing[Math.min(4, at)] += blocks * map.stride; });
  }
  const shared = sharing.slice(1).reduce((sum, value) => sum + value, 0);
  const one = (words, values, number) => [sample(cell(values), view, colour), words, full(number)];
  const free = one("free", { free: 1 }, pool.free);
  const pinned = one("pinned", { active: 1, holders: 1, pinned: 1 }, pool.pinned);
  if (view === "tenant") {
    legend("legend", [free, ...status.tenants.filter((tenant) => tenant.active_blocks + tenant.cached_blocks)
      .map((tenant) => one(tenant.name, { active: 1, tenant: tenantColours.get(tenant.name) },
        tenant.active_blocks + tenant.cached_blocks))]);
  } else {
    legend("legend", [free, one("cached", { cached: 1 }, pool.cached),
      one("held by one", { active: 1, holders: 1 }, sharing[0]),
      ...SHARE_STEPS.map((words, at) =>
        one(`shared by ${words}`, { active: 1, holders: 2 ** (at + 1) }, sharing[at + 1])),
      pinned]);
  }
  text("sharing", shared ? `${count(shared, "block is", "blocks are")} shared by several outputs, calls or pins: ` +
    "computed once, held by each." : "No block is shared at this moment.");
}

function label(worker) {
  // A socket's path says little; how its worker is called in the table does.
  return worker.address.replace(/^unix:.*\//, "");
}

function showMaps(status) {
  const there = new Set(status.workers.map((worker) => worker.address));
  for (const [address, map] of maps) {
    if (!there.has(address)) {
      map.element.remove();
      maps.delete(address);
    }
  }
  const largest = Math.max(1, ...status.workers.map((worker) => worker.survey?.map?.free.length ?? 0));
  status.workers.forEach((worker, at) => {
    let map = maps.get(worker.address);
    if (!map) {
      map = new PoolMap(byId("tip"));
      maps.set(worker.address, map);
    }
    // In the order of the document, whoever came when; moved only where it stands elsewhere.
    const place = byId("maps").children[at];
    if (place !== map.element) byId("maps").insertBefore(map.element, place ?? null);
    const why = worker.state === "serving" ? "it has not answered for a while" : worker.state;
    map.show({ ...worker, label: label(worker), why }, view, tenantColours, largest);
  });
}

function showCharts(status) {
  const { history } = status;
  const colour = colours();
  // As far back as there is something to show: a gateway that was just started has no ten minutes.
  const minutes = SPANS.find((span) => span * 60 >= history.queried_tokens.length * history.bucket_seconds) ?? SPANS.at(-1);
  const slots = (minutes * 60) / history.bucket_seconds;
  for (const element of document.querySelectorAll(".span")) element.textContent = `per minute, last ${minutes} minutes`;
  const perMinute = (values) => values.map((value) => (value * 60) / history.bucket_seconds);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const computed = history.queried_tokens.map((value, at) => value - history.hit_tokens[at]);
  const sources = [
    { name: "hit", words: "from the cache", values: history.hit_tokens, fill: 0 },
    { name: "computed", words: "computed", values: computed, fill: 1 },
  ].map((layer) => ({ ...layer, colour: colour(layer.name) }));
  const parts = (layers, kind) => layers.map((layer) =>
    [swatch(layer.name, layer.fill, layer.colour, kind), layer.words, full(layer.total ?? sum(layer.values))]);
  const told = (layers) => layers.map((layer) => `${layer.words} ${full(layer.total ?? sum(layer.values))}`).join(", ");
  const scaled = (layers) => layers.map((layer) => ({ ...layer, values: perMinute(layer.values) }));
  legend("tokens-legend", parts(sources, "bars"));
  stackedBars(byId("tokens-chart"), "tokens", scaled(sources), slots, minutes, `Prompt tokens: ${told(sources)}`);
  const reasons = Object.entries(MISSES).filter(([name]) => history.misses[name]).map(([name, words], fill) =>
    ({ name, words, values: history.misses[name], fill, colour: colour(name) }));
  legend("misses-legend", parts(reasons, "bars"));
  if (reasons.length) {
    stackedBars(byId("misses-chart"), "misses", scaled(reasons), slots, minutes, `Calls that missed: ${told(reasons)}`);
  }
  const calls = [
    { name: "running", words: "running now", values: history.running, total: status.totals.running_calls, fill: 0 },
    { name: "waiting", words: "waiting now", values: history.waiting, total: status.totals.waiting_calls, fill: 1 },
  ].map((layer) => ({ ...layer, colour: colour(layer.name) }));
  legend("queue-legend", parts(calls, "lines"));
  lines(byId("queue-chart"), "queue", calls, slots, minutes, `Calls: ${told(calls)}`);
}

function showTenants(status) {
  const most = Math.max(1, ...status.tenants.map((one) => one.active_blocks + one.cached_blocks));
  byId("tenants").tBodies[0].replaceChildren(...status.tenants.map((tenant) => {
    const mark = document.createElement("span");
    mark.className = "swatch";
    mark.style.background = `var(--tenant-${tenantColours.get(tenant.name) ?? 0})`;
    const [active, cached] = [tenant.active_blocks, tenant.cached_blocks];
    return row([mark, tenant.name], [
      [bar(active, cached, most, `${active} blocks held, ${cached} cached`)],
      [full(active), "number"], [full(cached), "number"], [tenant.floor_blocks ? full(tenant.floor_blocks) : "–", "number"],
      [full(tenant.running_calls), "number"],
      [full(tenant.waiting_calls), tenant.waiting_calls ? "number warn" : "number"],
      [percent(tenant.hit_tokens, tenant.queried_tokens), "number"]]);
  }));
}

function heat(value, top) {
  const shade = document.createElement("i");
  shade.style.opacity = top ? 0.5 * (value / top) : 0;
  const number = document.createElement("span");
  number.textContent = full(value);
  const both = document.createDocumentFragment();
  both.append(shade, number);
  return both;
}

// Numbers shaded by how large they are. Those of the diagonal are not, where they are of another kind.
function matrix(id, columns, rows, diagonal = true) {
  const table = byId(id);
  const shaded = (at, column) => diagonal || at !== column;
  const top = Math.max(0, ...rows.flatMap(([, values], at) => values.filter((_, column) => shaded(at, column))));
  const head = document.createElement("tr");
  for (const name of ["", ...columns]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.className = name ? "number" : "";
    cell.textContent = name;
    head.append(cell);
  }
  table.tHead.replaceChildren(head);
  table.tBodies[0].replaceChildren(...rows.map(([name, values], at) =>
    row(name, values.map((value, column) => [heat(value, shaded(at, column) ? top : 0), "heat"]))));
}

function showWorkers(status) {
  byId("workers").tBodies[0].replaceChildren(...status.workers.map((worker) => {
    const survey = worker.survey;
    const pool = survey?.pool;
    const line = row(label(worker), [
      [worker.state, worker.state === "serving" ? "" : worker.state === "draining" ? "warn" : "bad"],
      [pool ? bar(pool.active, pool.cached, pool.total, `${pool.active} blocks held, ${pool.cached} cached`) : "–"],
      [full(worker.known_blocks), "number"], [full(worker.live_calls), "number"],
      [survey ? full(survey.waiting_calls) : "–", "number"],
      [survey ? percent(survey.hit_tokens, survey.queried_tokens) : "–", "number"]]);
    line.firstElementChild.title = worker.address;
    return line;
  }));
  const names = status.workers.map(label);
  byId("overlap-part").hidden = !status.overlap;
  if (status.overlap) matrix("overlap", names, status.overlap.map((values, at) => [names[at], values]), false);
  const several = status.workers.length > 1;
  byId("homes-part").hidden = !several;
  if (several) {
    const blocks = (worker, name) => {
      const found = worker.survey?.tenants.find((tenant) => tenant.name === name);
      return found ? found.active_blocks + found.cached_blocks : 0;
    };
    matrix("homes", names, status.tenants.slice(0, 12).map(({ name }) =>
      [name, status.workers.map((worker) => blocks(worker, name))]));
  }
}

function showCalls(status) {
  const { calls } = status;
  const names = new Map(status.workers.map((worker) => [worker.address, label(worker)]));
  const more = calls.live - calls.oldest.length;
  text("calls-more", more > 0 ? `the ${full(calls.oldest.length)} oldest of ${full(calls.live)}` : "oldest first");
  byId("calls").hidden = !calls.live;
  byId("no-calls").hidden = calls.live > 0;
  byId("calls").tBodies[0].replaceChildren(...calls.oldest.map((call) => row(call.id, [
    [call.tenant, "name"],
    [call.awaits_first_token ? "waits for its first token" : call.completion_tokens ? "generating" : call.method,
      call.awaits_first_token && call.age_seconds > WARN_WAIT_SECONDS ? "warn" : ""],
    [call.prompt_tokens === null ? "–" : full(call.prompt_tokens), "number"],
    [full(call.completion_tokens), "number"], [seconds(call.age_seconds), "number"],
    [names.get(call.worker) ?? call.worker ?? "", "name"]])));
}

function show(status) {
  last = status;
  const { model } = status;
  text("model", model ? `${model.name} · ${full(model.context_length)} tokens of context` : "");
  text("version", status.version);
  text("fetched", `as of ${new Date(status.time * 1000).toLocaleTimeString("en-GB")}`);
  colourTenants(status.tenants);
  showTiles(status);
  showLegend(status);
  showMaps(status);
  showCharts(status);
  showTenants(status);
  showWorkers(status);
  showCalls(status);
  document.documentElement.dataset.shown = String(status.time);
}

function tellState(state, problem = "") {
  const pill = byId("state");
  if (pill.dataset.state !== state) {
    pill.dataset.state = state;
    pill.textContent = state;
  }
  byId("problem").hidden = !problem;
  text("problem", problem);
  byId("main").classList.toggle("stale", Boolean(problem));
}

async function poll() {
  try {
    const answer = await fetch("/status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    const status = await answer.json();
    tellState(status.state);
    show(status);
  } catch (error) {
    const since = last ? `; what is shown is from ${new Date(last.time * 1000).toLocaleTimeString("en-GB")}` : "";
    tellState("lost", `The gateway does not tell how it stands: ${error.message}${since}`);
  }
  setTimeout(whenSeen, POLL_MS);
}

// A page that nobody sees asks for nothing.
function whenSeen() {
  if (document.hidden) document.addEventListener("visibilitychange", whenSeen, { once: true });
  else poll();
}

byId("views").addEventListener("change", (event) => {
  view = event.target.value;
  if (last) show(last);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => last && show(last));
addEventListener("resize", () => last && showCharts(last));
whenSeen();

// A pool drawn as a map of cells. A cell is one block, or in a large pool several; then it is filled in proportion.
// Shapes tell states apart as colours do: free is a dot, cached a small square, active a full one, shared by several a
// full one with a hole, and a pin is a frame.

export const SHARE_STEPS = ["2", "3–4", "5–8", "9 or more"];
const GAP = 2;
const GROW_MS = 500;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

// 1 → 0, 2 → 1, 3 and 4 → 2, 5 to 8 → 3, more → 4.
export function shareStep(holders) {
  return holders < 2 ? 0 : Math.min(4, Math.ceil(Math.log2(holders)));
}

function square(context, x, y, size, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.roundRect(x, y, size, size, Math.min(2.5, size / 4));
  context.fill();
}

// One cell in a box of `size` at (x, y). `cell` has the numbers of its blocks, the most holders, and its owner.
export function drawCell(context, x, y, size, cell, view, colour) {
  const blocks = cell.free + cell.active + cell.cached;
  const used = cell.active + cell.cached;
  if (!used) {
    const dot = Math.max(1.5, size * 0.3);
    square(context, x + (size - dot) / 2, y + (size - dot) / 2, dot, colour("free"));
    return;
  }
  const step = shareStep(cell.holders);
  let active = colour("active");
  let cached = colour("cached");
  if (view === "tenant") active = cached = colour(`tenant-${cell.tenant}`);
  else if (step) active = colour(`share-${step + 1}`);
  if (blocks === 1) {
    const inset = cell.active ? 0 : size * 0.2;
    square(context, x + inset, y + inset, size - 2 * inset, cell.active ? active : cached);
  } else {
    square(context, x, y, size, colour("track"));
    const cachedHeight = (size * used) / blocks;
    const activeHeight = (size * cell.active) / blocks;
    context.fillStyle = cached;
    context.fillRect(x, y + size - cachedHeight, size, cachedHeight);
    context.fillStyle = active;
    context.fillRect(x, y + size - activeHeight, size, activeHeight);
  }
  if (step && size >= 6) {
    const hole = Math.max(2, size * (0.16 + 0.06 * step));
    square(context, x + (size - hole) / 2, y + (size - hole) / 2, hole, colour("panel"));
  }
  if (cell.pinned) {
    context.strokeStyle = colour("pinned");
    context.lineWidth = size >= 8 ? 2 : 1;
    context.strokeRect(x + 1, y + 1, size - 2, size - 2);
  }
}

// A canvas with one cell, for legends.
export function sample(cell, view, colour, size = 14) {
  const canvas = document.createElement("canvas");
  const ratio = window.devicePixelRatio || 1;
  canvas.width = canvas.height = size * ratio;
  canvas.style.width = canvas.style.height = `${size}px`;
  canvas.setAttribute("aria-hidden", "true");
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  drawCell(context, 0, 0, size, cell, view, colour);
  return canvas;
}

export class PoolMap {
  constructor(tip) {
    this.element = document.createElement("div");
    this.element.className = "map";
    this.title = document.createElement("h3");
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.element.append(this.title, this.canvas);
    this.tip = tip;
    this.cells = [];
    this.changedAt = [];
    this.incarnation = "";
    this.cursor = -1;
    this.frame = 0;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("keydown", (event) => this.step(event));
    this.canvas.addEventListener("blur", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  // Takes a worker of the status document, how tenants are coloured by name, and how many cells the largest map has:
  // cells are of one size on all maps.
  show(worker, view, tenants, largest) {
    this.largest = largest;
    const survey = worker.survey;
    const map = survey && survey.map;
    this.title.textContent = map ? `${worker.label} · ${survey.pool.total.toLocaleString("en")} blocks` +
      (map.blocks_per_cell > 1 ? `, ${map.blocks_per_cell} to a cell` : "") : `${worker.label} · no map: ${worker.why}`;
    this.canvas.hidden = !map;
    if (!map) return;
    this.view = view;
    this.map = map;
    const names = survey.tenants.map((tenant) => tenant.name);
    const cells = map.free.map((free, at) => ({
      free, active: map.active[at], cached: map.cached[at], pinned: map.pinned[at], holders: map.holders[at],
      owner: map.owner[at] ? names[map.owner[at] - 1] : "", tenant: tenants.get(names[map.owner[at] - 1]) ?? 0,
    }));
    const known = this.incarnation === survey.incarnation && this.cells.length === cells.length;
    const now = performance.now();
    cells.forEach((cell, at) => {
      const before = known ? this.cells[at] : cell;
      const same = before.active === cell.active && before.cached === cell.cached && before.holders === cell.holders;
      if (!same) this.changedAt[at] = now;
      else if (!known) this.changedAt[at] = 0;
    });
    this.cells = cells;
    this.incarnation = survey.incarnation;
    const pool = survey.pool;
    const shared = cells.filter((cell) => cell.holders > 1).length;
    this.canvas.setAttribute("aria-label", `Map of the pool of ${worker.label}: ${pool.free} blocks free, ` +
      `${pool.active} held, ${pool.cached} cached, ${pool.pinned} pinned; ${shared} cells with shared blocks. ` +
      "Arrow keys read out single cells.");
    this.draw();
  }

  draw() {
    if (!this.cells.length || this.canvas.hidden) return;
    const width = Math.floor(this.element.clientWidth);
    if (!width) return;
    const size = this.sizeFor(width);
    this.columns = Math.max(1, Math.floor((width + GAP) / (size + GAP)));
    this.pitch = size + GAP;
    const height = Math.ceil(this.cells.length / this.columns) * this.pitch;
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const colour = colours();
    const cache = new Map();
    const cached = (name) => {
      if (!cache.has(name)) cache.set(name, colour(name));
      return cache.get(name);
    };
    const now = performance.now();
    let growing = false;
    this.cells.forEach((cell, at) => {
      const x = (at % this.columns) * this.pitch;
      const y = Math.floor(at / this.columns) * this.pitch;
      // What has changed grows into its place, so that the eye finds it.
      const age = calm.matches ? 1 : Math.min(1, (now - (this.changedAt[at] || -GROW_MS)) / GROW_MS);
      growing ||= age < 1;
      const part = 1 - 0.5 * (1 - age) ** 2;
      const inset = (size * (1 - part)) / 2;
      drawCell(context, x + inset, y + inset, size * part, cell, this.view, cached);
      if (at === this.cursor) {
        context.strokeStyle = cached("ink");
        context.lineWidth = 2;
        context.strokeRect(x - 1, y - 1, size + 2, size + 2);
      }
    });
    cancelAnimationFrame(this.frame);
    if (growing) this.frame = requestAnimationFrame(() => this.draw());
  }

  // As large as fits into a map of pleasant height.
  sizeFor(width) {
    const wanted = Math.min(300, Math.max(90, width * 0.55));
    const size = Math.sqrt((width * wanted) / this.largest) - GAP;
    return Math.max(4, Math.min(22, Math.floor(size)));
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.pitch);
    const at = Math.floor((event.clientY - box.top) / this.pitch) * this.columns + column;
    if (column >= this.columns || at < 0 || at >= this.cells.length) return this.leave();
    this.tell(at, event.clientX, event.clientY);
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (event.key === "Escape") this.leave();
    if (by === undefined) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(this.cells.length - 1, this.cursor < 0 ? 0 : this.cursor + by));
    const box = this.canvas.getBoundingClientRect();
    this.tell(at, box.left + (at % this.columns) * this.pitch, box.top + Math.floor(at / this.columns) * this.pitch);
  }

  tell(at, x, y) {
    this.cursor = at;
    this.tip.textContent = this.words(at);
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(x + 14, window.innerWidth - this.tip.offsetWidth - 8)}px`;
    this.tip.style.top = `${Math.min(y + 16, window.innerHeight - this.tip.offsetHeight - 8)}px`;
    this.draw();
  }

  leave() {
    if (this.cursor < 0) return;
    this.cursor = -1;
    this.tip.hidden = true;
    this.draw();
  }

  words(at) {
    const cell = this.cells[at];
    const each = this.map.blocks_per_cell;
    const holders = cell.holders > 1 ? `shared by ${cell.holders}` : "held by one";
    const owner = cell.owner ? `\n${each > 1 ? "mostly " : ""}of ${cell.owner}` : "";
    if (each === 1) {
      const state = cell.active ? `active, ${holders}` : cell.cached ? "cached, held by nobody" : "free";
      return `Block ${at}\n${state}${cell.pinned ? ", pinned" : ""}${owner}`;
    }
    const part = this.map.stride > 1 ? ` (every ${this.map.stride}th looked at)` : "";
    const shared = cell.holders > 1 ? `\nthe most shared one by ${cell.holders}` : "";
    return `Blocks ${at * each} to ${(at + 1) * each - 1}${part}\n${cell.active} active, ${cell.cached} cached, ` +
      `${cell.free} free${cell.pinned ? `, ${cell.pinned} pinned` : ""}${shared}${owner}`;
  }
}

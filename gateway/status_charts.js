// Small charts in SVG over the buckets of the last minutes. Layers differ in pattern as well as in colour.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 150;
const LEFT = 34;
const BOTTOM = 18;
const TOP = 6;

function make(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

// The fills of layers: plain, hatched, dotted, hatched the other way.
function pattern(defs, id, at, colour) {
  if (at % 4 === 0) return colour;
  const size = 5;
  const box = make("pattern", { id, width: size, height: size, patternUnits: "userSpaceOnUse" }, defs);
  make("rect", { width: size, height: size, fill: colour, "fill-opacity": 0.38 }, box);
  if (at % 4 === 2) {
    make("circle", { cx: 2.5, cy: 2.5, r: 1.3, fill: colour }, box);
  } else {
    const line = at % 4 === 1 ? "M-1,6 L6,-1 M-1,1 L1,-1 M4,6 L6,4" : "M-1,-1 L6,6 M-1,4 L1,6 M4,-1 L6,1";
    make("path", { d: line, stroke: colour, "stroke-width": 1.4 }, box);
  }
  return `url(#${id})`;
}

export function swatch(name, at, colour, kind) {
  const svg = make("svg", { width: 14, height: 14, "aria-hidden": "true" });
  const id = `swatch-${kind}-${name}`;
  const fill = kind === "lines" ? colour : pattern(make("defs", {}, svg), id, at, colour);
  if (kind === "lines") {
    make("path", { d: "M0,7 H14", stroke: fill, "stroke-width": 3, "stroke-dasharray": at ? "4 3" : "none" }, svg);
  } else {
    make("rect", { width: 14, height: 14, rx: 3, fill }, svg);
  }
  return svg;
}

function round(top) {
  if (top <= 4) return 4;
  const power = 10 ** Math.floor(Math.log10(top));
  return [1, 2, 4, 5, 10].map((step) => step * power).find((step) => step >= top);
}

export function short(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 && value % 1 ? 1 : 0 });
}

function frame(holder, id, top, minutes, label) {
  const width = Math.max(160, holder.clientWidth);
  const svg = make("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label });
  const defs = make("defs", {}, svg);
  const inner = { left: LEFT, right: width - 4, top: TOP, bottom: HEIGHT - BOTTOM };
  const y = (value) => inner.bottom - ((inner.bottom - inner.top) * value) / top;
  for (const part of [0, 0.5, 1]) {
    make("line", { class: "grid", x1: inner.left, x2: inner.right, y1: y(top * part), y2: y(top * part) }, svg);
    make("text", { x: inner.left - 6, y: y(top * part) + 4, "text-anchor": "end" }, svg).textContent = short(top * part);
  }
  for (const [part, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
    const text = part === 1 ? "now" : `−${minutes * (1 - part)} min`;
    const x = inner.left + (inner.right - inner.left) * part;
    make("text", { x, y: HEIGHT - 3, "text-anchor": anchor }, svg).textContent = text;
  }
  return { svg, defs, inner, y, id };
}

// Bars on top of each other, a bar for each bucket; buckets stand at the right end, as the latest is now.
export function stackedBars(holder, id, layers, slots, minutes, label) {
  const count = layers[0].values.length;
  const sums = Array.from({ length: count }, (_, at) => layers.reduce((sum, layer) => sum + layer.values[at], 0));
  const { svg, defs, inner, y } = frame(holder, id, round(Math.max(...sums, 0)), minutes, label);
  const pitch = (inner.right - inner.left) / slots;
  const base = new Array(count).fill(0);
  layers.forEach((layer, at) => {
    const fill = pattern(defs, `${id}-${layer.name}`, layer.fill ?? at, layer.colour);
    let path = "";
    layer.values.forEach((value, bucket) => {
      if (!value) return;
      const x = inner.left + (slots - count + bucket) * pitch;
      const low = y(base[bucket]);
      base[bucket] += value;
      path += `M${x.toFixed(1)},${low.toFixed(1)}h${Math.max(0.8, pitch - 1).toFixed(1)}V${y(base[bucket]).toFixed(1)}` +
        `h${(-Math.max(0.8, pitch - 1)).toFixed(1)}z`;
    });
    make("path", { d: path || "M0,0", fill }, svg);
  });
  holder.replaceChildren(svg);
}

// Lines, the first one filled below; the others dashed.
export function lines(holder, id, layers, slots, minutes, label) {
  const count = layers[0].values.length;
  const top = round(Math.max(...layers.flatMap((layer) => layer.values), 0));
  const { svg, inner, y } = frame(holder, id, top, minutes, label);
  const pitch = (inner.right - inner.left) / Math.max(1, slots - 1);
  layers.forEach((layer, at) => {
    const points = layer.values.map((value, bucket) =>
      `${(inner.left + (slots - count + bucket) * pitch).toFixed(1)},${y(value).toFixed(1)}`);
    const start = (inner.left + (slots - count) * pitch).toFixed(1);
    if (!at) {
      const area = `M${start},${inner.bottom}L${points.join("L")}V${inner.bottom}z`;
      make("path", { d: area, fill: layer.colour, "fill-opacity": 0.16 }, svg);
    }
    const dash = at ? "5 3" : "none";
    make("path", { d: `M${points.join("L")}`, fill: "none", stroke: layer.colour, "stroke-width": 2,
      "stroke-linejoin": "round", "stroke-dasharray": dash }, svg);
  });
  holder.replaceChildren(svg);
}

// Plots over steps, drawn by uPlot with the colours of the page.

import { h } from "./dom.js";
import { num, tick } from "./format.js";

const uPlot = globalThis.uPlot;
const all = new Set();
const sync = uPlot.sync("steps");
let selected = null;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

addEventListener("themechange", () => all.forEach((plot) => plot.redraw()));

/** Mark `step` in all plots. */
export function select(step) {
  selected = step;
  all.forEach((plot) => plot.mark());
}

/**
 * A plot in a figure. `spec`: `title`, `unit`, `lines: [{name, label, tone, dashed}]`,
 * `band: [low, high]` (names), `stacked`, `height`, `onstep(step)`.
 */
export class Plot {
  #spec;
  #plot = null;
  #data = { step: [], series: {} };
  #values = h("span", { class: "values" });
  #host = h("div", { class: "canvas" });
  #marker = h("div", { class: "marker", hidden: true });
  #observer;

  constructor(spec) {
    this.#spec = spec;
    const unit = spec.unit ? h("span", { class: "unit" }, spec.unit) : null;
    this.element = h("figure", { class: `plot ${spec.large ? "large" : ""}` },
      h("figcaption", {}, h("span", { class: "plot-title" }, spec.title, unit), this.#values), this.#host);
    this.#observer = new ResizeObserver(() => this.#fit());
    this.#observer.observe(this.#host);
    all.add(this);
  }

  destroy() {
    all.delete(this);
    this.#observer.disconnect();
    this.#plot?.destroy();
  }

  redraw() {
    if (this.#plot) this.#plot.redraw(false, true);
    this.#say(null);
  }

  /** Move the line at the selected step. It is no part of the drawing, which takes far longer. */
  mark() {
    const at = this.#plot && selected !== null && this.#data.step.length ? this.#plot.valToPos(selected, "x") : -1;
    this.#marker.hidden = !(at >= 0 && at <= this.#plot.bbox.width / devicePixelRatio);
    this.#marker.style.setProperty("--at", `${Math.round(at)}px`);
  }

  update(data) {
    this.#data = data;
    const columns = this.#columns();
    if (this.#plot) this.#plot.setData(columns);
    else if (this.#host.clientWidth) this.#make(columns);
    this.#say(null);
    this.element.setAttribute("aria-label", this.#summary());
    this.element.setAttribute("role", "img");
    // For tests and other tools that look at the page: what is drawn, and up to where.
    this.element.dataset.points = data.step.length;
    this.element.dataset.last = data.step.at(-1) ?? "";
  }

  #columns() {
    const { step, series } = this.#data;
    const none = new Array(step.length).fill(null);
    const { lines, band, stacked } = this.#spec;
    if (!stacked) {
      return [step, ...lines.map((line) => series[line.name] ?? none), ...(band ?? []).map((name) => series[name] ?? none)];
    }
    const sums = [];
    let below = new Array(step.length).fill(0);
    for (const line of lines) {
      const values = series[line.name] ?? none;
      below = below.map((sum, at) => sum + Math.max(0, values[at] ?? 0));
      sums.push(below);
    }
    return [step, ...sums.reverse()]; // the whole first: smaller sums are drawn over it
  }

  #make(columns) {
    const { lines, band, stacked, height = 120 } = this.#spec;
    const shown = stacked ? [...lines].reverse() : lines;
    const series = shown.map((line) => {
      const paint = () => colour(`--${line.tone}`);
      const gaps = { spanGaps: true, points: { show: columns[0].length < 3, size: 5, fill: paint } };
      if (stacked) return { label: line.label, stroke: paint, fill: paint, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.8, 24], gap: 0 }) };
      return { label: line.label, stroke: paint, width: this.#spec.large ? 2 : 1.5, dash: line.dashed ? [5, 4] : undefined, ...gaps };
    });
    for (const _ of band ?? []) series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
    const axis = { stroke: () => colour("--muted"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.#plot = new uPlot({
      width: this.#host.clientWidth,
      height,
      legend: { show: false },
      cursor: { sync: { key: sync.key, setSeries: false }, drag: { x: false, y: false }, points: { size: 6 }, y: false },
      scales: { x: { time: false, range: (_, low, high) => widen(low, high, stacked) }, y: { range: (_, low, high) => room(low, high, stacked) } },
      axes: [
        { ...axis, size: 22, gap: 2, space: 46, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000], grid: { show: false } },
        { ...axis, size: 46, gap: 4, space: 26, values: (_, ticks) => ticks.map((value) => (value === null ? null : tick(value))) },
      ],
      series: [{}, ...series],
      bands: band ? [{ series: [lines.length + 2, lines.length + 1], fill: () => colour("--band") }] : [],
      hooks: { setCursor: [(plot) => this.#say(plot.cursor.idx)], draw: [() => requestAnimationFrame(() => this.mark())] },
    }, columns, this.#host);
    this.#plot.over.append(this.#marker);
    this.#plot.over.addEventListener("click", () => {
      const step = this.#data.step[this.#plot.cursor.idx];
      if (step !== undefined) this.#spec.onstep?.(step);
    });
  }

  #fit() {
    const width = this.#host.clientWidth;
    if (!width) return;
    if (this.#plot) this.#plot.setSize({ width, height: this.#spec.height ?? 120 });
    else if (this.#data.step.length) this.#make(this.#columns());
  }

  #say(index) {
    const { step, series } = this.#data;
    const parts = this.#spec.lines.map((line) => {
      const values = series[line.name] ?? [];
      const at = index ?? values.findLastIndex((value) => value !== null && value !== undefined);
      return h("span", { class: "value" }, h("i", { class: `swatch ${line.tone} ${line.dashed ? "dashed" : ""}` }),
        this.#spec.lines.length > 1 ? `${line.label} ` : "", h("b", {}, num(values[at])));
    });
    const where = index !== null && index !== undefined && step[index] !== undefined ? h("span", { class: "at" }, `step ${step[index]}`) : null;
    this.#values.replaceChildren(...parts, ...(where ? [where] : []));
  }

  #summary() {
    const { step, series } = this.#data;
    const said = this.#spec.lines.map((line) => {
      const values = (series[line.name] ?? []).filter(Number.isFinite);
      if (!values.length) return `${line.label}: no values`;
      return `${line.label}: ${num(values[0])} at first, ${num(values.at(-1))} now`;
    });
    const unit = this.#spec.unit ? `, ${this.#spec.unit}` : "";
    return `${this.#spec.title}${unit}, over ${step.length} points to step ${step.at(-1) ?? "none"}. ${said.join("; ")}.`;
  }
}

function widen(low, high, stacked) {
  if (low === null || low === undefined) return [0, 1];
  const edge = stacked ? 0.6 : 0;
  return low === high ? [low - 1, high + 1] : [low - edge, high + edge];
}

function room(low, high, stacked) {
  if (low === null || low === undefined) return [0, 1];
  if (stacked) return [0, high * 1.05 || 1];
  if (low === high) {
    const half = Math.abs(low) * 0.1 || 0.5;
    return [low - half, high + half];
  }
  const margin = (high - low) * 0.08;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

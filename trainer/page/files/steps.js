// The bar of steps: one column a step, as high as its reward. Works as a slider.

import { empty, failure, fill, h } from "./dom.js";
import { count, duration, num } from "./format.js";
import { Batch } from "./batch.js";

const HEIGHT = 56;
const PAGE = 5000;

export class Steps {
  #rows = { step: [], reward: [], trainable: [], groups: [], attempts: [], kept: [], splits: [], seconds: [] };
  #canvas = h("canvas", { height: HEIGHT });
  #chosen = h("i", { class: "chosen-step", hidden: true });
  #place = null; // of a column, by its index
  #slider = h("div", { class: "stepbar", role: "slider", tabindex: 0, "aria-label": "Step", "aria-orientation": "horizontal" }, this.#canvas, this.#chosen);
  #line = h("p", { class: "step-line" });
  #hint = h("p", { class: "quiet-text small" }, "Each column is a step, as high as its mean reward. Filled: its attempts are on disk. Click one, or use ← → and Enter.");
  #batch;

  constructor(body, app) {
    this.body = body;
    this.app = app;
    this.#batch = new Batch(app);
    this.#slider.addEventListener("keydown", (event) => this.#key(event));
    this.#slider.addEventListener("click", (event) => this.app.go({ step: this.#at(event), group: null, attempt: null }));
    this.#slider.addEventListener("pointermove", (event) => this.#hover(this.#at(event)));
    this.#slider.addEventListener("pointerleave", () => this.#hover(null));
    new ResizeObserver(() => this.#draw()).observe(this.#slider);
    addEventListener("themechange", () => this.#draw());
  }

  get list() {
    return this.#rows.step;
  }

  /** The newest step with a validation on disk. */
  get validated() {
    return this.#rows.step[this.#rows.splits.findLastIndex((splits) => splits.includes("val"))];
  }

  /** The step that is read: the chosen one, else the newest whose attempts are on disk. */
  get current() {
    const { step, kept } = this.#rows;
    if (this.app.route.step !== undefined) return this.app.route.step;
    const newest = kept.lastIndexOf(true);
    return newest >= 0 ? step[newest] : step.at(-1);
  }

  async load() {
    const since = this.#rows.step.length > 2 ? this.#rows.step.at(-3) : null;
    const found = await this.app.get("steps", { since, limit: PAGE });
    const first = found.step[0] ?? Infinity;
    const keep = this.#rows.step.findIndex((step) => step >= first);
    for (const name of Object.keys(this.#rows)) {
      const before = keep < 0 ? this.#rows[name] : this.#rows[name].slice(0, keep);
      this.#rows[name] = [...before, ...(found[name] ?? [])];
    }
  }

  async update(reasons) {
    try {
      if (reasons.has("run") || reasons.has("changed")) await this.load();
      if (!this.#rows.step.length) return fill(this.body, empty("No step has been trained yet.", "The bar grows with each one."));
      const attached = this.#slider.parentElement !== this.body;
      if (attached) fill(this.body, this.#slider, this.#line, this.#hint, this.#batch.element);
      if (reasons.has("run") || reasons.has("changed") || attached) this.#draw();
      else this.#mark();
      this.#hover(null);
      await this.#batch.show(this.current, this.app.route.split ?? "train", reasons);
    } catch (error) {
      fill(this.body, failure(error));
    }
  }

  /** Choose the step `by` places further. */
  move(by) {
    const { step } = this.#rows;
    const at = step.indexOf(this.current);
    const next = step[Math.min(step.length - 1, Math.max(0, at + by))];
    if (next !== undefined) this.app.go({ step: next, group: null, attempt: null });
  }

  #key(event) {
    const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10, Home: -1e9, End: 1e9 }[event.key];
    if (by) this.move(by);
    else if (event.key === "Enter") this.#batch.focus();
    else return;
    event.preventDefault();
  }

  #at(event) {
    const box = this.#slider.getBoundingClientRect();
    const { step } = this.#rows;
    const index = Math.floor(((event.clientX - box.left) / box.width) * step.length);
    return step[Math.min(step.length - 1, Math.max(0, index))];
  }

  #hover(step) {
    const shown = step ?? this.current;
    const at = this.#rows.step.indexOf(shown);
    const { reward, groups, trainable, attempts, kept, seconds } = this.#rows;
    const said = at < 0 ? `Step ${shown} has no record.` : [
      `Step ${shown}`,
      Number.isFinite(reward[at]) ? `reward ${num(reward[at])}` : "no training reward",
      groups[at] ? `${count(groups[at], "group")}${Number.isFinite(trainable[at]) ? `, ${trainable[at]} of them trainable` : ""}` : null,
      attempts[at] ? count(attempts[at], "attempt") : null,
      Number.isFinite(seconds[at]) ? duration(seconds[at]) : null,
      kept[at] ? null : "its attempts are not on disk",
    ].filter(Boolean).join(" · ");
    this.#line.textContent = said;
    if (step === null) {
      const bar = this.#slider;
      bar.setAttribute("aria-valuemin", this.#rows.step[0]);
      bar.setAttribute("aria-valuemax", this.#rows.step.at(-1));
      bar.setAttribute("aria-valuenow", shown);
      bar.setAttribute("aria-valuetext", said);
    }
  }

  #draw() {
    const width = this.#slider.clientWidth;
    const { step, reward, kept } = this.#rows;
    if (!width || !step.length) return;
    const scale = devicePixelRatio;
    this.#canvas.width = width * scale;
    this.#canvas.height = HEIGHT * scale;
    const ctx = this.#canvas.getContext("2d");
    ctx.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const [onDisk, gone] = ["--tone-3", "--line"].map((name) => style.getPropertyValue(name).trim());
    const real = reward.filter(Number.isFinite);
    const low = real.reduce((one, other) => Math.min(one, other), 0);
    const high = real.reduce((one, other) => Math.max(one, other), low + 1e-9);
    const column = width / step.length;
    const bar = Math.max(1, Math.min(28, column - (column > 4 ? 2 : 0)));
    this.#place = (at) => {
      const share = Number.isFinite(reward[at]) ? (reward[at] - low) / (high - low) : 0;
      return { left: at * column + (column - bar) / 2, wide: bar, tall: 4 + share * (HEIGHT - 8) };
    };
    step.forEach((_, at) => {
      const { left, wide, tall } = this.#place(at);
      ctx.fillStyle = kept[at] ? onDisk : gone;
      ctx.fillRect(left, HEIGHT - tall, wide, tall);
    });
    this.#mark();
  }

  /** Show which step is chosen, without drawing the others again. */
  #mark() {
    const at = this.#rows.step.indexOf(this.current);
    this.#chosen.hidden = at < 0 || !this.#place;
    if (this.#chosen.hidden) return;
    const { left, wide, tall } = this.#place(at);
    for (const [name, value] of Object.entries({ left, wide: Math.max(wide, 3), tall })) {
      this.#chosen.style.setProperty(`--${name}`, `${value}px`);
    }
  }
}

// The batch of one step: its groups in a list that draws only the rows in sight.

import { choice, empty, failure, fill, h } from "./dom.js";
import { column, count, num, shorten } from "./format.js";
import { newest } from "./api.js";

const ROW = 34;
const REASONS = {
  equal_rewards: "all rewards are equal",
  too_long: "longer than max_seq_length",
  stale: "older than max_steps_off_policy",
};
const SPARE = 8; // rows drawn above and below those in sight

/** Why a group was not trained on, in words. */
export function reason(group) {
  return REASONS[group.dropped] ?? group.dropped?.replaceAll("_", " ") ?? "it teaches nothing";
}

export class Batch {
  #head = h("div", { class: "batch-head" });
  #list = h("div", { class: "rows", role: "listbox", tabindex: 0, "aria-label": "Groups of the step" });
  #names = h("div", { class: "row names", "aria-hidden": "true" }, ["Example", "Mean", "Lowest to highest", "Spread", "First attempt"].map((name) => h("span", {}, name)));
  #space = h("div", { class: "space" });
  #groups = [];
  #shown = "";
  #active = 0;
  #latest = newest();

  constructor(app) {
    this.app = app;
    this.element = h("div", { class: "batch" }, this.#head, this.#names, this.#list);
    this.#list.append(this.#space);
    this.#list.addEventListener("scroll", () => this.#draw());
    this.#list.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.#list);
  }

  focus() {
    this.#list.focus();
  }

  async show(step, split, reasons) {
    const key = `${step} ${split}`;
    if (key === this.#shown && !reasons.has("changed") && !reasons.has("run")) return this.#mark();
    try {
      const found = await this.#latest((signal) => this.app.get(`steps/${step}`, { split }, signal));
      if (!found) return;
      this.#fill(step, split, found, key === this.#shown);
      this.#shown = key;
    } catch (error) {
      this.#shown = "";
      this.#groups = [];
      this.#head.replaceChildren(this.#title(step, split, null));
      this.#list.hidden = this.#names.hidden = true;
      fill(this.#space, "");
      this.#head.append(error.status === 404 ? empty(error.message, error.hint) : failure(error));
    }
  }

  #fill(step, split, found, same) {
    this.#groups = found.groups;
    this.app.groups = { step, split, list: found.groups };
    this.#head.replaceChildren(this.#title(step, split, found));
    this.#list.hidden = this.#names.hidden = !found.groups.length;
    if (!found.groups.length) this.#head.append(empty(`Step ${step} has no ${split === "val" ? "validation" : "training"} groups on disk.`));
    if (!same) {
      this.#list.scrollTop = 0;
      this.#active = 0;
    }
    this.#space.style.setProperty("--rows", found.groups.length);
    this.#list.style.setProperty("--shown", Math.min(10, found.groups.length));
    this.#mark();
  }

  #title(step, split, found) {
    const groups = found?.groups ?? [];
    const taught = groups.filter((group) => group.trainable).length;
    const attempts = groups.reduce((sum, group) => sum + group.n, 0);
    return h("div", { class: "batch-title" },
      h("h3", {}, `Batch of step ${step}`),
      groups.length ? h("span", { class: "quiet-text" }, `${count(groups.length, "group")}, ${count(attempts, "attempt")}${split === "val" ? "" : `; ${taught} of the groups teach something`}`) : null,
      choice("Attempts of", [["train", "Training"], ["val", "Validation"]], split, (value) => this.app.go({ step, split: value === "train" ? null : value, group: null, attempt: null })));
  }

  #mark() {
    const chosen = this.#groups.findIndex((group) => group.id === this.app.route.group);
    if (chosen >= 0) this.#active = chosen;
    this.#draw(true);
  }

  #key(event) {
    const last = this.#groups.length - 1;
    const to = { ArrowDown: this.#active + 1, ArrowUp: this.#active - 1, Home: 0, End: last, PageDown: this.#active + 8, PageUp: this.#active - 8 }[event.key];
    if (event.key === "Enter") this.#open(this.#groups[this.#active]);
    else if (to !== undefined) {
      this.#active = Math.min(last, Math.max(0, to));
      const top = this.#active * ROW;
      if (top < this.#list.scrollTop) this.#list.scrollTop = top;
      else if (top + ROW > this.#list.scrollTop + this.#list.clientHeight) this.#list.scrollTop = top + ROW - this.#list.clientHeight;
      this.#draw(true);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #open(group) {
    if (group) this.app.open({ step: this.app.groups.step, split: this.app.groups.split === "train" ? null : this.app.groups.split, group: group.id, attempt: null });
  }

  #draw() {
    const height = this.#list.clientHeight || ROW * 10;
    const first = Math.max(0, Math.floor(this.#list.scrollTop / ROW) - SPARE);
    const last = Math.min(this.#groups.length, Math.ceil((this.#list.scrollTop + height) / ROW) + SPARE);
    const means = column(this.#groups.map((group) => group.mean));
    const spreads = column(this.#groups.map((group) => group.spread));
    const ends = this.#groups.flatMap((group) => [group.min, group.max]).filter(Number.isFinite);
    const scale = [Math.min(0, ...ends), Math.max(...ends, 1e-9)];
    fill(this.#space, this.#groups.slice(first, last).map((group, at) => this.#row(group, first + at, means, spreads, scale)));
    this.#list.setAttribute("aria-activedescendant", `group-${this.#groups[this.#active]?.id ?? ""}`);
  }

  #row(group, at, means, spreads, scale) {
    const why = group.trainable || this.app.groups.split !== "train" ? "" : reason(group);
    return h("div", {
      id: `group-${group.id}`, role: "option", vars: { "--top": `${at * ROW}px` },
      class: `row ${group.id === this.app.route.group ? "chosen" : ""} ${at === this.#active ? "active" : ""}`,
      "aria-selected": String(group.id === this.app.route.group), "aria-posinset": at + 1, "aria-setsize": this.#groups.length,
      "aria-label": `Group ${group.id}, example ${group.example ?? "unknown"}: mean ${num(group.mean)}, spread ${num(group.spread)}, ${group.n} attempts${why ? `, ${why}` : ""}`,
      onclick: () => { this.#active = at; this.#open(group); },
    },
      h("span", { class: "example" }, group.example ?? `group ${group.id}`),
      h("span", { class: "number" }, means(group.mean)),
      range(group, scale),
      h("span", { class: "number quiet-text" }, `± ${spreads(group.spread)}`),
      h("span", { class: "preview" }, why ? h("span", { class: "why" }, `${why}${group.preview ? " · " : ""}`) : null, shorten(group.preview, 160)));
  }
}

/** From the lowest to the highest reward of a group, with its mean. */
function range(group, [low, high]) {
  const place = (value) => (Number.isFinite(value) ? `${((value - low) / (high - low)) * 100}%` : "0%");
  return h("span", { class: "range", "aria-hidden": "true", vars: { "--from": place(group.min), "--to": place(group.max), "--mean": place(group.mean) } }, h("i", { class: "span" }), h("i", { class: "mean" }));
}

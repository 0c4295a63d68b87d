// The tokens of an attempt, coloured by what each was trained with. Exact ids and numbers on focus.

import { choice, empty, failure, fill, h, pager } from "./dom.js";
import { count, drawn, num, signed, visible } from "./format.js";
import { newest } from "./api.js";

const LIMIT = 2000;
const COLOURS = [["logprob", "Logprob"], ["advantage", "Advantage"], ["gap", "Engine against learner"], ["mask", "Mask"]];
const SURPRISE = [0.1, 0.5, 1, 2, 4]; // nats below certainty
const GAPS = [0.01, 0.05, 0.2]; // nats between engine and learner

/** What a colour shows: the class of token `at`, and a legend of `[class, text]`. */
const RULES = {
  logprob: {
    of: (page, at) => (page.logprob[at] === null ? "none" : `q${SURPRISE.filter((edge) => -page.logprob[at] > edge).length}`),
    legend: () => [["none", "not sampled"], ["q0", "above −0.1"], ["q1", "−0.1 to −0.5"], ["q2", "to −1"], ["q3", "to −2"], ["q4", "to −4"], ["q5", "below −4 nats"]],
    missing: (page) => (page.logprob.every((value) => value === null) ? "The sampler's logprobs of this attempt are not on disk." : null),
  },
  advantage: {
    of: (page, at, scale) => (page.mask[at] ? diverging(page.advantage[at] / (scale || 1), [0.05, 0.35, 0.7]) : "none"),
    legend: (scale) => [["none", "not trained"], ["n3", `−${num(scale)}`], ["n2", ""], ["n1", ""], ["z", "0"], ["p1", ""], ["p2", ""], ["p3", `+${num(scale)}`]],
    missing: (page) => (page.advantage.every((value) => value === null) ? "This attempt has no advantage: it was not trained on." : null),
  },
  gap: {
    of: (page, at) => (gap(page, at) === null ? "none" : diverging(gap(page, at), GAPS)),
    legend: () => [["none", "not known"], ["n3", "learner below by 0.2 or more"], ["n2", "0.05"], ["n1", "0.01"], ["z", "equal"], ["p1", "0.01"], ["p2", "0.05"], ["p3", "learner above by 0.2 nats or more"]],
    missing: (page) => (page.learner.every((value) => value === null) ? "The learner's logprobs of this attempt are not on disk, so there is nothing to compare." : null),
  },
  mask: {
    of: (page, at) => (page.mask[at] ? "p2" : "none"),
    legend: () => [["p2", "trained on"], ["none", "context only"]],
    missing: () => null,
  },
};

function gap(page, at) {
  const [engine, learner] = [page.logprob[at], page.learner[at]];
  return engine === null || learner === null || engine === undefined || learner === undefined ? null : learner - engine;
}

function diverging(value, edges) {
  if (!Number.isFinite(value)) return "none";
  const size = edges.filter((edge) => Math.abs(value) >= edge).length;
  return size ? `${value < 0 ? "n" : "p"}${size}` : "z";
}

export class Tokens {
  #latest = newest();
  #key = "";
  #page = null;
  #offset = 0;
  #scale = 1;
  #attempt = null;
  #text = h("div", { class: "tokens", role: "group", "aria-label": "Tokens: arrow keys move from one to the next" });
  #tip = document.getElementById("tip");

  constructor(app) {
    this.app = app;
    this.element = h("section", { class: "token-view", "aria-label": "Tokens of an attempt", hidden: true });
    this.#text.addEventListener("pointerover", (event) => this.#point(event.target));
    this.#text.addEventListener("pointerleave", () => this.#untip());
    this.#text.addEventListener("focusin", (event) => this.#point(event.target));
    this.#text.addEventListener("focusout", () => this.#untip());
    this.#text.addEventListener("keydown", (event) => this.#move(event));
  }

  get colour() {
    const wished = this.app.route.colour;
    return wished in RULES ? wished : "logprob";
  }

  /** The next colour, for the key `t`. */
  turn() {
    if (this.element.hidden) return;
    const at = COLOURS.findIndex(([name]) => name === this.colour);
    this.app.go({ colour: COLOURS[(at + 1) % COLOURS.length][0] });
  }

  hide() {
    this.element.hidden = true;
    this.#key = "";
    this.#untip();
  }

  async show(attempt, scale) {
    const { step, split, project, name } = this.app.route;
    const key = [project, name, step, split, attempt.id].join(" ");
    this.#scale = scale;
    this.#attempt = attempt;
    const fresh = key !== this.#key;
    if (fresh) {
      this.#offset = 0;
      this.#key = key;
      await this.#load();
      if (this.app.arrived) this.element.scrollIntoView({ block: "nearest" });
    } else if (this.#page) this.#draw();
  }

  async #load() {
    const { step, split } = this.app.route;
    this.element.hidden = false;
    try {
      const page = await this.#latest((signal) => this.app.get(`attempts/${step}/${this.#attempt.id}/tokens`, { split, offset: this.#offset, limit: LIMIT }, signal));
      if (!page) return;
      this.#page = page;
      this.#draw();
    } catch (error) {
      this.#page = null;
      fill(this.element, h("h3", {}, "Tokens"), error.status === 404 ? empty(error.message, error.hint) : failure(error));
    }
  }

  #draw() {
    const page = this.#page, rule = RULES[this.colour];
    const trained = page.mask.reduce((sum, one) => sum + one, 0);
    const missing = page.total ? rule.missing(page) : "The tokens of this attempt are not on disk.";
    fill(this.element,
      h("div", { class: "controls" }, h("h3", {}, `Tokens of attempt ${this.#attempt.number ?? this.#attempt.id}`),
        h("span", { class: "quiet-text" }, `${count(page.total, "token")}${page.total > page.id.length ? "" : `, ${trained} of them trained on`}`),
        h("span", { class: "spring" }), choice("Colour tokens by", COLOURS, this.colour, (colour) => this.app.go({ colour }))),
      missing ? empty(missing) : this.#legend(rule.legend(this.#scale)),
      page.total ? this.#text : null,
      pager(this.#offset, LIMIT, page.total, "tokens", (to) => { this.#offset = to; this.#load(); }));
    this.#text.replaceChildren(...this.#spans(rule));
  }

  #legend(entries) {
    return h("ul", { class: "legend", "aria-label": "Legend" }, entries.map(([tone, text]) => h("li", {}, h("i", { class: `token ${tone}` }), text)));
  }

  #spans(rule) {
    const page = this.#page, parts = [];
    let sequence = this.#offset ? page.sequence?.[0] : undefined;
    for (let at = 0; at < page.id.length; at += 1) {
      if (page.sequence && page.sequence[at] !== sequence) {
        sequence = page.sequence[at];
        if (sequence || parts.length) parts.push(h("h4", {}, `Sequence ${sequence + 1}`));
      }
      const span = document.createElement("span");
      span.className = `token ${rule.of(page, at, this.#scale)}`;
      span.dataset.at = at;
      span.tabIndex = at ? -1 : 0;
      span.textContent = drawn(page.text[at]);
      parts.push(span);
    }
    return parts;
  }

  #move(event) {
    const token = event.target.closest?.(".token");
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!token || !by) return;
    const all = this.#text.querySelectorAll(".token");
    const next = all[Math.min(all.length - 1, Math.max(0, Number(token.dataset.at) + by))];
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    event.preventDefault();
    event.stopPropagation();
  }

  #point(target) {
    const token = target.closest?.(".token");
    if (!token || token.dataset.at === undefined) return this.#untip();
    const page = this.#page, at = Number(token.dataset.at);
    const logprob = page.logprob[at], apart = gap(page, at);
    const rows = [
      ["id", String(page.id[at])], ["text", visible(page.text[at])], ["place", String(this.#offset + at)],
      ["mask", page.mask[at] ? "trained on" : "context only"],
      ["logprob", logprob === null ? "not sampled" : `${exact(logprob)} (probability ${num(Math.exp(logprob))})`],
      ["learner", page.learner[at] === null ? "not known" : exact(page.learner[at])],
      apart === null ? null : ["gap", signed(apart, 5)],
      ["advantage", Number.isFinite(page.advantage[at]) ? signed(page.advantage[at], 4) : "none"],
      page.policy_step?.[at] === null || page.policy_step?.[at] === undefined ? null : ["sampled by", `step ${page.policy_step[at]}`],
    ].filter(Boolean);
    fill(this.#tip, h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
    this.#tip.hidden = false;
    token.setAttribute("aria-describedby", "tip");
    const box = token.getBoundingClientRect(), size = this.#tip.getBoundingClientRect();
    const below = box.bottom + size.height + 8 < innerHeight;
    this.#tip.style.setProperty("left", `${Math.max(8, Math.min(innerWidth - size.width - 8, box.left))}px`);
    this.#tip.style.setProperty("top", `${below ? box.bottom + 6 : Math.max(8, box.top - size.height - 6)}px`);
  }

  #untip() {
    this.#tip.hidden = true;
  }
}

function exact(value) {
  return value.toFixed(5).replace("-", "−");
}

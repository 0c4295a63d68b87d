// Attempts of a group side by side: messages, the reward and its parts, a judge's reasons.

import { choice, empty, failure, fill, h } from "./dom.js";
import { column, count, num, signed } from "./format.js";
import { newest } from "./api.js";
import { reason } from "./batch.js";
import { message, sharedPrefix, textOf } from "./messages.js";
import { Tokens } from "./tokens.js";

export class Attempts {
  #latest = newest();
  #shown = "";
  #found = null;
  #order = "number";
  #against = "none";
  #tokens;

  constructor(body, app) {
    this.body = body;
    this.app = app;
    this.#tokens = new Tokens(app);
  }

  get tokens() {
    return this.#tokens;
  }

  async update(reasons) {
    const { step, split, group } = this.app.route;
    if (group === undefined) {
      this.#shown = "";
      this.#found = null;
      return fill(this.body, empty("No group is open.", "Choose one in the batch of a step, or an example above."));
    }
    const key = `${this.app.route.project} ${this.app.route.name} ${step} ${split} ${group}`;
    if (key !== this.#shown) {
      try {
        const found = await this.#latest((signal) => this.app.get(`steps/${step}/groups/${group}`, { split }, signal));
        if (!found) return;
        this.#found = found;
        this.#shown = key;
        this.#against = "none";
        this.#draw();
      } catch (error) {
        this.#shown = "";
        return fill(this.body, failure(error));
      }
    }
    this.#mark();
    if (this.app.route.attempt !== undefined) await this.#tokens.show(this.#attempt(), this.#scale(), reasons);
    else this.#tokens.hide();
  }

  #attempt() {
    return this.#found.attempts.find((attempt) => attempt.id === this.app.route.attempt) ?? { id: this.app.route.attempt };
  }

  /** The largest advantage of the group, for the colours of its tokens. */
  #scale() {
    return Math.max(0, ...this.#found.attempts.map((attempt) => Math.abs(attempt.advantage ?? 0)));
  }

  #draw() {
    const { group, attempts } = this.#found;
    const { step, split } = this.app.route;
    const sorted = [...attempts].sort((one, other) => (this.#order === "reward" ? (other.reward ?? -Infinity) - (one.reward ?? -Infinity) : one.number - other.number));
    const shared = sharedPrefix(attempts);
    const first = attempts[0]?.conversations?.[0]?.messages ?? [];
    const scales = partScales(attempts);
    const text = column(attempts.flatMap((attempt) => [attempt.reward, ...Object.values(attempt.parts ?? {})]));
    const against = attempts.find((attempt) => String(attempt.id) === this.#against);
    fill(this.body,
      h("div", { class: "controls" },
        h("p", { class: "crumbs" }, h("button", { type: "button", class: "link", onclick: () => this.app.reveal("steps") }, `Step ${step}`), ` › ${split === "val" ? "validation, " : ""}example `, h("strong", {}, String(group.example ?? `group ${group.id}`)),
          h("span", { class: "quiet-text" }, ` · ${count(group.n, "attempt")}, mean ${num(group.mean)}, spread ${num(group.spread)}${group.trainable || split === "val" ? "" : ` · not trained on: ${reason(group)}`}`)),
        h("span", { class: "spring" }),
        h("button", { type: "button", onclick: () => this.app.moveGroup(-1), "aria-label": "Group before" }, "← Group"),
        h("button", { type: "button", onclick: () => this.app.moveGroup(1), "aria-label": "Next group" }, "Group →")),
      h("div", { class: "controls" },
        choice("Order attempts by", [["number", "Number"], ["reward", "Reward"]], this.#order, (value) => { this.#order = value; this.#redraw(); }),
        h("label", { class: "select" }, "Mark differences from ", h("select", { onchange: (event) => { this.#against = event.target.value; this.#redraw(); } },
          h("option", { value: "none" }, "nothing"), attempts.map((attempt) => h("option", { value: String(attempt.id), selected: String(attempt.id) === this.#against }, `attempt ${attempt.number}`))))),
      shared ? h("details", { class: "shared" }, h("summary", {}, `All attempts begin with the same ${count(shared, "message")}`), first.slice(0, shared).map((it) => message(it))) : null,
      h("div", { class: "attempts", role: "list", tabindex: 0, "aria-label": "Attempts, side by side" }, sorted.map((attempt) => this.#card(attempt, { shared, scales, against, text }))),
      attempts.length < group.n ? h("p", { class: "pager" }, h("button", { type: "button", class: "more-attempts", onclick: (event) => this.#more(event.target) }, "Show more"), `${attempts.length} of ${count(group.n, "attempt")}`) : null,
      this.#tokens.element);
  }

  /** Add the next page of a large group. */
  async #more(button) {
    button.disabled = true;
    const held = this.#found;
    try {
      const { step, split, group } = this.app.route;
      const found = await this.app.get(`steps/${step}/groups/${group}`, { split, offset: held.attempts.length });
      if (held !== this.#found) return; // another group was opened meanwhile
      if (!found.attempts.length) held.group.n = held.attempts.length; // fewer than the list said
      held.attempts.push(...found.attempts);
      this.#redraw();
    } catch (error) {
      button.replaceWith(failure(error));
    }
  }

  #redraw() {
    this.#draw();
    this.#mark();
  }

  #card(attempt, { shared, scales, against, text }) {
    const finish = attempt.finish ? `ended by ${attempt.finish}` : null;
    const facts = [Number.isFinite(attempt.turns) ? count(attempt.turns, "turn") : null, Number.isFinite(attempt.tokens) ? count(attempt.tokens, "token") : null, finish].filter(Boolean).join(" · ");
    return h("article", { class: "attempt", role: "listitem", "data-attempt": attempt.id, "aria-label": `Attempt ${attempt.number}, reward ${num(attempt.reward)}` },
      h("header", {},
        h("div", { class: "score" }, h("span", { class: "quiet-text" }, `Attempt ${attempt.number}`), h("strong", {}, text(attempt.reward)),
          Number.isFinite(attempt.advantage) ? h("span", { class: attempt.advantage > 0 ? "advantage rise" : attempt.advantage < 0 ? "advantage fall" : "advantage" }, `advantage ${signed(attempt.advantage)}`) : null),
        h("p", { class: "quiet-text small" }, facts),
        h("button", { type: "button", class: "open-tokens", onclick: () => this.app.go({ attempt: attempt.id === this.app.route.attempt ? null : attempt.id }) }, "Tokens")),
      bars(attempt, scales, text),
      attempt.error ? h("p", { class: "failed" }, attempt.error) : null,
      judges(attempt),
      (attempt.conversations ?? []).map((conversation, at) => this.#conversation(conversation, at, at === 0 ? shared : 0, against === attempt ? undefined : against)),
      attempt.conversations?.length ? null : empty("Its messages are not on disk."),
      (attempt.conversations ?? []).some((it) => it.messages.some((one) => one.cut)) ? h("button", { type: "button", onclick: (event) => this.#whole(attempt, event.target) }, "Read all of it") : null);
  }

  #conversation(conversation, at, skip, against) {
    const base = against?.conversations?.[at]?.messages;
    return h("div", { class: "conversation" }, at ? h("h4", {}, `Conversation ${at + 1}`) : null,
      conversation.messages.slice(skip).map((it, index) => {
        const other = base?.[index + skip];
        return message(it, base ? textOf(other?.role === it.role ? other.content : "") : undefined);
      }));
  }

  /** Replace the cut messages of an attempt by whole ones. */
  async #whole(attempt, button) {
    button.disabled = true;
    try {
      const { step, split } = this.app.route;
      const found = await this.app.get(`attempts/${step}/${attempt.id}`, { split });
      const at = this.#found.attempts.indexOf(attempt);
      if (at >= 0) this.#found.attempts[at] = { ...attempt, ...(found.attempt ?? found) };
      this.#redraw();
    } catch (error) {
      button.replaceWith(failure(error));
    }
  }

  #mark() {
    for (const card of this.body.querySelectorAll(".attempt")) {
      const chosen = card.dataset.attempt === String(this.app.route.attempt);
      card.classList.toggle("chosen", chosen);
      card.querySelector(".open-tokens")?.setAttribute("aria-pressed", String(chosen));
    }
  }
}

/** The reasons of judges. */
export function judges(attempt) {
  return (attempt.judge ?? []).map((judge) => h("blockquote", { class: "judge" }, h("cite", {}, judge.name), judge.reason));
}

/** For each part of the reward, its range over the group, so that bars can be compared. */
export function partScales(attempts) {
  const scales = new Map();
  const add = (name, value) => {
    if (!Number.isFinite(value)) return;
    const [low, high] = scales.get(name) ?? [0, 0];
    scales.set(name, [Math.min(low, value), Math.max(high, value)]);
  };
  for (const attempt of attempts) {
    add("reward", attempt.reward);
    for (const [name, value] of Object.entries(attempt.parts ?? {})) add(name, value);
  }
  return scales;
}

/** The reward and its parts as bars. */
export function bars(attempt, scales, text) {
  const rows = [["reward", attempt.reward], ...Object.entries(attempt.parts ?? {}).filter(([name]) => name !== "reward")];
  return h("dl", { class: "parts" }, rows.map(([name, value]) => {
    const [low, high] = scales.get(name) ?? [0, 0];
    const range = high - low || 1;
    const place = (number) => `${((number - low) / range) * 100}%`;
    const [from, to] = [Math.min(0, value ?? 0), Math.max(0, value ?? 0)];
    return h("div", { class: name === "reward" ? "part whole" : "part" }, h("dt", { title: name }, name.replaceAll("_", " ")),
      h("dd", {}, h("span", { class: `track ${value < 0 ? "negative" : ""}`, "aria-hidden": "true", vars: { "--from": place(from), "--to": place(to) } }), h("span", { class: "number" }, text(value))));
  }));
}

// The panels of plots: reward, signal, stability and time.

import { empty, failure, fill, h } from "./dom.js";
import { num, percent, signed } from "./format.js";
import { evaluators, label, others } from "./labels.js";
import { Plot } from "./plots.js";

const STABILITY = [
  "loss/sampler_gap", "canary/logprob_difference", "loss/sampler_kl", "loss/kl_div", "loss/kl_policy_ref",
  "loss/entropy", "loss/clip_frac", "loss/effective_sample_size", "loss/grad_norm", "loss/ratio", "loss/learning_rate", "loss/train",
];
const PARTS = [
  ["time/sample_s", "tone-4"], ["time/prepare_s", "tone-3"], ["time/gradient_s", "tone-1"],
  ["time/save_s", "tone-2"], ["time/load_s", "tone-5"], ["time/idle_s", "tone-6"],
];

/** A panel of plots that `build(columns)` lists; `derive(data)` adds computed series. */
class Charts {
  #plots = [];
  #shape = "";
  #names = [];
  #grid = null;
  #note = h("div", { class: "figures" });

  constructor(body, app, { build, derive, note, nothing }) {
    Object.assign(this, { body, app, build, derive, note, nothing });
  }

  async update() {
    try {
      const columns = this.app.overview?.columns ?? [];
      const specs = this.build(columns);
      const shape = JSON.stringify(specs.map((spec) => [spec.title, spec.names]));
      if (shape !== this.#shape) this.#lay(specs, shape);
      if (!specs.length) return;
      const data = await this.app.series.load(this.#names);
      this.derive?.(data);
      for (const plot of this.#plots) plot.update(data);
      if (this.note) fill(this.#note, this.note(data));
    } catch (error) {
      this.#shape = "";
      fill(this.body, failure(error));
    }
  }

  #lay(specs, shape) {
    this.#plots.forEach((plot) => plot.destroy());
    this.#shape = shape;
    this.#names = [...new Set(specs.flatMap((spec) => spec.names))];
    this.#plots = specs.map((spec) => new Plot({ ...spec, onstep: (step) => this.app.go({ step, group: null, attempt: null }) }));
    if (!specs.length) return fill(this.body, empty(this.nothing));
    const large = this.#plots.filter((_, at) => specs[at].large).map((plot) => plot.element);
    const small = this.#plots.filter((_, at) => !specs[at].large).map((plot) => plot.element);
    this.#grid = h("div", { class: "multiples" }, small);
    fill(this.body, this.note ? this.#note : null, large, small.length ? this.#grid : null);
  }
}

const one = (name, tone = "accent") => ({ title: label(name).label, unit: label(name).unit, names: [name], lines: [{ name, label: label(name).label, tone }] });

export const reward = (body, app) => new Charts(body, app, {
  nothing: "No reward yet. The first point appears when a step has been trained or a validation logged.",
  build: (columns) => {
    const has = (name) => columns.includes(name);
    const specs = [];
    if (has("train/reward") || has("val/reward")) {
      specs.push({
        title: "Mean reward of a step", large: true, height: 260, names: ["train/reward", "train/reward_std_dev", "val/reward"].filter(has),
        lines: [
          ...(has("train/reward") ? [{ name: "train/reward", label: "training", tone: "accent" }] : []),
          ...(has("val/reward") ? [{ name: "val/reward", label: "validation", tone: "ink", dashed: true }] : []),
        ],
        band: has("train/reward") ? ["low", "high"] : undefined,
      });
    }
    for (const name of evaluators(columns)) {
      const lines = [["train", "training", "accent"], ["val", "validation", "ink"]].filter(([split]) => has(`${split}/${name}`))
        .map(([split, text, tone]) => ({ name: `${split}/${name}`, label: text, tone, dashed: split === "val" }));
      specs.push({ title: label(`val/${name}`).label, names: lines.map((line) => line.name), lines });
    }
    if (has("train/reward_std_dev")) specs.push(one("train/reward_std_dev"));
    return specs;
  },
  derive: (data) => {
    const mean = data.series["train/reward"] ?? [];
    const spread = data.series["train/reward_std_dev"] ?? [];
    const at = (sign, edge) => mean.map((value, index) => {
      if (value === null) return null;
      return Number.isFinite(spread[index]) ? value + sign * spread[index] : data.series[`train/reward:${edge}`]?.[index] ?? null;
    });
    data.series.low = at(-1, "min");
    data.series.high = at(1, "max");
  },
  note: (data) => ["train/reward", "val/reward"].filter((name) => data.series[name]?.some(Number.isFinite)).map((name) => {
    const real = data.series[name].map((value, at) => [data.step[at], value]).filter(([, value]) => Number.isFinite(value));
    const [first, last] = [real[0], real.at(-1)];
    return h("div", { class: "figure" }, h("span", { class: "name" }, label(name).label), h("strong", {}, num(last[1])),
      h("span", {}, real.length > 1 ? `${signed(last[1] - first[1])} since step ${first[0]}` : `at step ${last[0]}`));
  }),
});

export const signal = (body, app) => new Charts(body, app, {
  nothing: "No groups yet. This panel shows how many groups teach something, and why the others do not.",
  build: (columns) => {
    const has = (name) => columns.includes(name);
    const specs = [];
    if (has("data/step_num_groups_submitted")) {
      specs.push({
        title: "Groups of a step", large: true, height: 180, stacked: true,
        names: ["data/step_num_groups_submitted", "data/step_num_groups_trainable", "data/dropped_equal_rewards"].filter(has),
        lines: [
          { name: "data/step_num_groups_trainable", label: "trainable", tone: "tone-1" },
          { name: "data/dropped_equal_rewards", label: "equal rewards", tone: "tone-5" },
          { name: "rest", label: "dropped otherwise", tone: "warn" },
        ],
      });
    }
    const rest = columns.filter((name) => /^data\/(dropped|lost)_/.test(name) && name !== "data/dropped_equal_rewards");
    for (const name of ["data/step_num_truncated", "train/exception_rate", "val/exception_rate", ...rest, "data/retokenized", "data/ambiguous_choices", "data/step_num_trajectories"]) {
      if (has(name)) specs.push(one(name));
    }
    return specs;
  },
  derive: (data) => {
    const [sent, taught, equal] = ["step_num_groups_submitted", "step_num_groups_trainable"].map((name) => data.series[`data/${name}`] ?? [])
      .concat([data.series["data/dropped_equal_rewards"] ?? []]);
    data.series.rest = data.step.map((_, at) => (sent[at] === null || sent[at] === undefined ? null : Math.max(0, sent[at] - (taught[at] ?? 0) - (equal[at] ?? 0))));
  },
  note: (data) => {
    const sum = (name) => (data.series[name] ?? []).reduce((total, value) => total + (value ?? 0), 0);
    const sent = sum("data/step_num_groups_submitted");
    if (!sent) return [];
    return [["teach something", sum("data/step_num_groups_trainable")], ["have equal rewards", sum("data/dropped_equal_rewards")]]
      .map(([text, part]) => h("div", { class: "figure" }, h("span", { class: "name" }, "Groups that"), h("strong", {}, percent(part / sent)), h("span", {}, text)));
  },
});

export const stability = (body, app) => new Charts(body, app, {
  nothing: "No gradient step yet. KL, entropy, clipping and the gradient norm appear with the first.",
  build: (columns) => [...STABILITY.filter((name) => columns.includes(name)), ...columns.filter((name) => name.startsWith("policy_age/"))].map((name) => {
    const spec = one(name);
    if (name !== "canary/logprob_difference" || !columns.includes("canary/bound")) return spec;
    return { ...spec, names: [name, "canary/bound"], lines: [...spec.lines.map((line) => ({ ...line, label: "difference" })), { name: "canary/bound", label: "bound", tone: "warn", dashed: true }] };
  }),
});

export function time(body, app) {
  const rest = h("div", { class: "body" });
  const main = h("div");
  const shown = (columns) => [...PARTS.map(([name]) => name).filter((name) => columns.includes(name))];
  const charts = new Charts(main, app, {
    nothing: "No times yet. They appear with the first trained step.",
    build: (columns) => {
      const parts = PARTS.filter(([name]) => columns.includes(name));
      if (!parts.length) return [];
      const rates = columns.includes("data/step_packed_tokens") && columns.includes("time/gradient_s")
        ? [{ title: "Tokens through the learner", unit: "tokens/s", names: ["data/step_packed_tokens", "time/gradient_s"], lines: [{ name: "rate", label: "tokens a second", tone: "accent" }] }] : [];
      const more = columns.filter((name) => (name.startsWith("gpu/") || name.startsWith("throughput/") || (name.startsWith("time/") && !shown(columns).includes(name))));
      return [
        { title: "Seconds of a step", unit: "s", large: true, height: 180, stacked: true, names: parts.map(([name]) => name), lines: parts.map(([name, tone]) => ({ name, label: label(name).label.toLowerCase(), tone })) },
        ...rates, ...more.map((name) => one(name)),
      ];
    },
    derive: (data) => {
      const [tokens, seconds] = [data.series["data/step_packed_tokens"], data.series["time/gradient_s"]];
      if (tokens && seconds) data.series.rate = tokens.map((value, at) => (value !== null && seconds[at] > 0 ? value / seconds[at] : null));
    },
  });
  const extra = new Charts(rest, app, {
    nothing: "Every series of this run is in a plot above.",
    build: (columns) => others(columns, [
      ...STABILITY, ...PARTS.map(([name]) => name), ...columns.filter((name) => /^(train|val|policy_age|gpu|throughput|time)\//.test(name)),
      ...columns.filter((name) => /^data\/(dropped|lost)_/.test(name)), "data/step_num_groups_submitted", "data/step_num_groups_trainable",
      "data/step_num_truncated", "data/retokenized", "data/ambiguous_choices", "data/step_num_trajectories",
    ]).map((name) => one(name)),
  });
  const details = h("details", { class: "more", ontoggle: () => details.open && extra.update() }, h("summary", {}, "Other series"), rest);
  fill(body, main, details);
  return { update: async () => { await charts.update(); if (details.open) await extra.update(); } };
}

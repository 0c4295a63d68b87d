// The verdict: how the run is doing in sentences, its time left, and the money.

import { empty, fill, h } from "./dom.js";
import { ago, clock, count, dollars, duration } from "./format.js";

const STATES = {
  training: "Training", sampling: "Sampling", idle: "Idle", ended: "Ended", degraded: "Degraded",
};

export function verdict(body, app) {
  return {
    update() {
      const overview = app.overview;
      if (!overview) return fill(body, empty("Nothing is known of this run yet."));
      const { verdict: found, run, missing = [] } = overview;
      fill(body,
        h("div", { class: "verdict" },
          h("div", { class: "sentences" },
            h("p", { class: "state" }, h("span", { class: `dot ${found.state}` }), h("strong", {}, STATES[found.state] ?? found.state),
              h("span", { class: "quiet-text" }, ` ${run.project} / ${run.name}, on ${run.base_model ?? "an unknown base model"}`)),
            found.sentences.map((sentence, at) => h("p", { class: at ? "" : "lead" }, sentence)),
            !found.sentences.length && !found.findings.length ? h("p", { class: "lead" }, "Nothing is wrong that the doctor could see.") : null,
            found.findings.length ? h("ul", { class: "findings", "aria-label": "Findings" }, found.findings.map(finding)) : null,
            missing.length ? h("details", { class: "missing" }, h("summary", {}, `${count(missing.length, "thing is", "things are")} missing or damaged`),
              h("ul", {}, missing.map((sentence) => h("li", {}, sentence)))) : null),
          h("dl", { class: "facts" }, facts(overview, app.server?.lease))));
    },
  };
}

function finding({ problem, hint }) {
  return h("li", {}, h("span", { class: "problem" }, problem), hint ? h("span", { class: "hint" }, hint) : null);
}

function facts({ verdict: found, run }, lease) {
  const step = found.steps_planned ? `${found.step} of ${found.steps_planned}` : String(found.step);
  const rows = [
    ["Step", step, found.steps_planned ? h("progress", { value: found.step, max: found.steps_planned, "aria-label": `Step ${step}` }) : null],
    found.seconds_per_step ? ["Time of a step", duration(found.seconds_per_step)] : null,
    found.seconds_left ? ["Time left", `about ${duration(found.seconds_left)}`] : null,
    ["Last news", h("time", { title: clock(run.updated) }, ago(run.updated))],
    ...money(lease),
  ];
  return rows.filter(Boolean).map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, more)));
}

function money(lease) {
  if (!lease) return [];
  return [
    lease.ends_at ? ["Lease ends", h("time", { title: clock(lease.ends_at) }, ago(lease.ends_at))] : null,
    Number.isFinite(lease.idle_minutes) ? ["Stops when idle for", `${lease.idle_minutes} min`] : null,
    Number.isFinite(lease.dollars_per_hour) ? ["Price", `${dollars(lease.dollars_per_hour)} an hour`] : null,
    Number.isFinite(lease.dollars_so_far) ? ["Spent", dollars(lease.dollars_so_far)] : null,
    Number.isFinite(lease.dollars_left) ? ["Left", dollars(lease.dollars_left)] : null,
  ].filter(Boolean);
}

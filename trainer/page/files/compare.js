// Two steps, a step and the base model, or two runs, on the examples that both have.

import { empty, failure, fill, h, pager, table } from "./dom.js";
import { column, count, num, signed } from "./format.js";
import { newest } from "./api.js";

const LIMIT = 50;

export function compare(body, app) {
  const latest = newest();
  const result = h("div", { class: "result", "aria-live": "polite" });
  const fields = {};
  let shown = "", offset = 0;

  function choose() {
    const route = app.route;
    const steps = app.steps.list;
    const options = (chosen, base) => [base ? h("option", { value: "base", selected: chosen === "base" }, "base model") : null,
      ...steps.map((step) => h("option", { value: String(step), selected: String(step) === chosen }, `step ${step}`))];
    const runs = app.runs.filter((run) => !(run.project === route.project && run.name === route.name));
    const field = (name, text, children) => {
      fields[name] = h("select", { onchange: changed }, children);
      return h("label", { class: "select" }, text, " ", fields[name]);
    };
    return h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
      field("a", "Compare", options(route.a ?? defaults().a, true)),
      field("b", "with", options(route.b ?? defaults().b, false)),
      runs.length ? field("with", "of", [h("option", { value: "" }, "this run"), ...runs.map((run) => h("option", { value: `${run.project}/${run.name}`, selected: route.with === `${run.project}/${run.name}` }, `${run.project} / ${run.name}`))]) : null);
  }

  function defaults() {
    return { a: "base", b: String(app.steps.validated ?? app.steps.list.at(-1) ?? "") };
  }

  function changed() {
    app.go({ a: fields.a.value, b: fields.b.value, with: fields.with?.value || null });
  }

  async function update(reasons) {
    if (!app.steps.list.length) return fill(body, empty("There is nothing to compare yet.", "Two trained steps are enough, or one and the base model."));
    const { a, b } = { ...defaults(), ...definite(app.route) };
    const key = [app.route.project, app.route.name, a, b, app.route.with, app.steps.list.length].join(" ");
    if (key === shown && !reasons.has("changed")) return;
    const focused = Object.keys(fields).find((name) => fields[name] === document.activeElement);
    fill(body, choose(), result);
    fields[focused]?.focus();
    try {
      const found = await latest((signal) => app.get("compare", { a, b, other: app.route.with }, signal));
      if (!found) return;
      if (key !== shown) offset = 0;
      shown = key;
      show(found, name(a), app.route.with ? `${name(b)} of ${app.route.with}` : name(b));
    } catch (error) {
      shown = "";
      fill(result, error.status === 404 || error.status === 400 ? empty(error.message, error.hint) : failure(error));
    }
  }

  function show(found, before, after) {
    const { paired, mean_difference: mean, interval, n } = found;
    if (!n) return fill(result, empty(`${before} and ${after} have no example in common.`, "Compare steps that attempted the same examples, for example two validations."));
    const rows = [...paired].sort((one, other) => Math.abs(other.difference) - Math.abs(one.difference));
    const values = column(rows.flatMap((row) => [row.a, row.b]));
    const most = Math.max(1e-9, ...rows.map((row) => Math.abs(row.difference)));
    fill(result,
      h("p", { class: "lead" }, `On ${count(n, found.split === "val" ? "validation example" : "training example")} that both have, ${after} scores `, h("strong", {}, signed(mean)), ` against ${before}`,
        interval ? ` (95 % interval ${signed(interval[0])} to ${signed(interval[1])}).` : "."),
      h("p", { class: "quiet-text" }, certainty(found)),
      table([
        { title: "Example", cell: (row) => String(row.example), class: "name" },
        { title: before, numeric: true, cell: (row) => values(row.a) },
        { title: after, numeric: true, cell: (row) => values(row.b) },
        { title: "Difference", numeric: true, cell: (row) => signed(row.difference) },
        { title: "", cell: (row) => h("span", { class: `balance ${row.difference < 0 ? "negative" : ""}`, "aria-hidden": "true", vars: { "--size": `${(Math.abs(row.difference) / most) * 50}%` } }) },
      ], rows.slice(offset, offset + LIMIT), { caption: `Rewards by example, ${before} and ${after}` }),
      pager(offset, LIMIT, rows.length, "examples", (to) => { offset = to; show(found, before, after); }),
      Number.isFinite(found.a?.mean) ? h("p", { class: "quiet-text small" }, `Means over all their examples: ${num(found.a.mean)} and ${num(found.b?.mean)}.`) : null);
  }

  return { update };
}

/** Whether chance alone may be the reason for the difference, and how that is known. */
export function certainty({ interval, clear, n, mean_difference: mean }) {
  if (!interval && n < 2) return "There are too few examples for an interval.";
  const known = interval ? `The interval ${clear ? "excludes" : "holds"} zero` : `The difference is the same on all ${n} examples`;
  if (clear) return `${known}: chance alone is an unlikely reason.`;
  return interval || mean ? `${known}${interval ? "" : ", which are few"}: chance alone may be the reason.` : `${known}.`;
}

function name(side) {
  return side === "base" ? "the base model" : `step ${side}`;
}

function definite(route) {
  return Object.fromEntries(["a", "b"].filter((key) => route[key] !== undefined).map((key) => [key, route[key]]));
}

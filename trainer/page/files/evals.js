// What `trainer eval` measured: models on the same examples, and the attempts behind a number.

import { empty, failure, fill, h, pager, table } from "./dom.js";
import { ago, clock, column, count, num, signed } from "./format.js";
import { newest } from "./api.js";
import { bars, judges, partScales } from "./attempts.js";
import { textOf } from "./messages.js";

const LIMIT = 10;
const CARDS = 16;

export function evals(body, app) {
  const latest = { list: newest(), examples: newest(), attempts: newest() };
  const parts = { head: h("div", {}), examples: h("div", { class: "eval-examples" }), attempts: h("div", { class: "eval-attempts", "aria-live": "polite" }) };
  let found = [], offset = 0, first = 0, shown = "", opened = "";

  async function update(reasons) {
    const fresh = reasons.has("run") || reasons.has("changed");
    if (fresh) {
      const answer = await latest.list((signal) => app.get("evals", {}, signal));
      if (!answer) return;
      found = answer.evals;
    }
    if (!found.length) return fill(body, empty("No evaluation is on disk.", "`trainer eval` compares checkpoints, the base model and other endpoints on the same examples."));
    const one = found.find((it) => it.name === app.route.eval) ?? found[0];
    if (parts.head.parentNode !== body) fill(body, parts.head, parts.examples, parts.attempts);
    if (fresh || one.name !== shown) {
      if (one.name !== shown) offset = 0;
      shown = one.name;
      fill(parts.head, head(one), one.models.length ? measured(one) : null, sentences(one), (one.missing ?? []).map((text) => h("p", { class: "failed" }, text)));
      await listExamples(one);
    }
    await openExample(one, fresh);
  }

  function head(one) {
    const field = h("select", { onchange: (event) => app.go({ eval: event.target.value, example: null }) },
      found.map((it) => h("option", { value: it.name, selected: it.name === one.name }, it.name)));
    const about = `${count(one.examples, "example")}, ${one.num_generations === 1 ? "each once" : `each ${one.num_generations} times`}`;
    return h("div", { class: "controls" }, h("label", { class: "select" }, "Evaluation ", field),
      h("span", { class: "quiet-text" }, `${about}${one.finished ? "" : " · not finished: it goes on, or was interrupted"} · `, h("time", { title: clock(one.updated) }, ago(one.updated))));
  }

  async function listExamples(one) {
    if (!one.models.length) return fill(parts.examples);
    try {
      const page = await latest.examples((signal) => app.get(`evals/${encodeURIComponent(one.name)}/examples`, { offset, limit: LIMIT }, signal));
      if (!page) return;
      const values = column(page.rows.flatMap((row) => row.means));
      const several = page.models.length > 1;
      fill(parts.examples, h("h3", {}, several ? "By example, the largest differences first" : "By example"),
        table([
          { title: "Example", cell: (row) => row.example, class: "name" },
          ...page.models.map((model, at) => ({ title: model, numeric: true, cell: (row) => values(row.means[at]) })),
          ...(several ? [{ title: "Last minus first", numeric: true, cell: (row) => signed(row.difference) }] : []),
        ], page.rows, { caption: "Rewards of the evaluation by example", onopen: (row) => app.go({ eval: one.name, example: row.example }), label: (row) => `Open the attempts at example ${row.example}` }),
        pager(offset, LIMIT, page.total, "examples", (to) => { offset = to; listExamples(one); }));
    } catch (error) {
      fill(parts.examples, failure(error));
    }
  }

  async function openExample(one, fresh) {
    const { example } = app.route;
    if (example === undefined) {
      opened = "";
      return fill(parts.attempts);
    }
    const key = JSON.stringify([one.name, example]);
    if (key === opened && !fresh) return;
    if (key !== opened) first = 0;
    await showAttempts(one, example);
    if (key !== opened && !fresh) parts.attempts.scrollIntoView({ block: "nearest" });
    opened = key;
  }

  async function showAttempts(one, example) {
    try {
      const page = await latest.attempts((signal) => app.get(`evals/${encodeURIComponent(one.name)}/attempts`, { example, offset: first, limit: CARDS }, signal));
      if (!page) return;
      const scales = partScales(page.attempts);
      const text = column(page.attempts.flatMap((it) => [it.reward, ...Object.values(it.parts)]));
      fill(parts.attempts,
        h("div", { class: "controls" }, h("h3", {}, `Attempts at ${example}`), h("button", { type: "button", onclick: () => app.go({ example: null }) }, "Close")),
        h("div", { class: "attempts", role: "list", tabindex: 0, "aria-label": `Attempts at ${example}` }, page.attempts.map((it) => card(it, scales, text))),
        pager(first, CARDS, page.total, "attempts", (to) => { first = to; showAttempts(one, example); }));
    } catch (error) {
      fill(parts.attempts, failure(error));
    }
  }

  return { update };
}

function measured(one) {
  const means = column(one.models.map((row) => row.mean));
  const compared = one.models.length > 1;
  const passes = one.models[0].pass_at.map((it, at) => ({ title: `pass@${it.k}`, numeric: true, cell: (row) => num(row.pass_at[at]?.mean) }));
  return table([
    { title: "Model", cell: (row) => h("span", { title: row.model }, row.model), class: "name" },
    { title: "Reward", numeric: true, cell: (row) => h("strong", {}, means(row.mean)) },
    { title: "95 %", numeric: true, cell: (row) => interval(row.interval, means) },
    ...passes,
    ...(compared ? [
      { title: "Difference", numeric: true, cell: (row) => (row.paired ? h("strong", { class: tone(row.paired) }, signed(row.paired.difference)) : "–") },
      { title: "95 %", numeric: true, cell: (row) => interval(row.paired?.interval, signed) },
      { title: "Better / worse", numeric: true, cell: (row) => (row.paired ? `${row.paired.better} / ${row.paired.worse}` : "–") },
    ] : []),
    { title: "Runs", numeric: true, cell: (row) => String(row.runs) },
    { title: "Lost", cell: (row) => lost(row.lost), class: "lost" },
  ], one.models, { caption: `Models in the evaluation ${one.name}` });
}

function tone(paired) {
  return !paired.clear ? "" : paired.difference > 0 ? "rise" : "fall";
}

function interval(range, text) {
  return range ? `${text(range[0])} to ${text(range[1])}` : "–";
}

/** Lost runs with their reasons, or `none`. */
function lost(counts) {
  const rows = Object.entries(counts ?? {});
  return rows.length ? rows.map(([reason, number]) => `${number} ${reason.replaceAll("_", " ")}`).join(", ") : "none";
}

export function verdicts(one) {
  return one.models.filter((row) => row.paired).map(({ model, paired }) => {
    if (!Number.isFinite(paired.difference)) return `${model} and ${paired.against} have no example in common.`;
    const on = `on ${count(paired.examples, "example")}`;
    const same = `the difference is the same on all ${paired.examples}`;
    const alike = !paired.interval && paired.examples > 1 && paired.better + paired.worse === paired.examples;
    if (!paired.clear) return `${model}: no clear difference to ${paired.against} ${on}${alike ? `: ${same}, but they are too few` : ""}.`;
    return `${model} is ${paired.difference > 0 ? "better" : "worse"} than ${paired.against} ${on}: ${paired.interval ? "the interval excludes zero" : same}.`;
  });
}

function sentences(one) {
  const method = `${one.interval_method}. Differences are paired by example.`;
  const passes = one.success && one.models[0]?.pass_at.length ? ` A run passes if its ${one.success}.` : "";
  return h("div", { class: "eval-words" }, verdicts(one).map((text) => h("p", {}, text)), h("p", { class: "quiet-text small" }, method + passes));
}

function card(it, scales, text) {
  const facts = [Number.isFinite(it.seconds) ? `${num(it.seconds)} s` : null, it.lost ? `lost: ${it.lost.replaceAll("_", " ")}` : null].filter(Boolean).join(" · ");
  return h("article", { class: "attempt", role: "listitem", "aria-label": `${it.model}, attempt ${it.number}, reward ${num(it.reward)}` },
    h("header", {}, h("div", { class: "score" }, h("span", { class: "quiet-text" }, `${it.model}, attempt ${it.number}`), h("strong", {}, text(it.reward))), h("p", { class: "quiet-text small" }, facts)),
    bars(it, scales, text),
    it.error ? h("p", { class: "failed" }, it.error) : null,
    judges(it),
    h("div", { class: "message" }, h("div", { class: "role" }, "output"), it.output ? h("div", { class: "text" }, textOf(it.output)) : h("div", { class: "quiet-text" }, "empty"),
      it.cut ? h("p", { class: "cut" }, `… and ${count(it.cut, "more character")}, in the file.`) : null));
}

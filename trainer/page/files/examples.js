// Groups by example: mean, spread and trend over steps, a page of rows at a time.

import { choice, empty, failure, fill, h, pager, sparkline, table } from "./dom.js";
import { column, count, signed } from "./format.js";
import { newest } from "./api.js";

const LIMIT = 25;
const ORDERS = [["spread", "Spread"], ["mean", "Mean"], ["trend", "Trend"], ["example", "Name"]];

export function examples(body, app) {
  const latest = newest();
  let order = "spread", offset = 0;

  async function update(reasons) {
    if (reasons?.has("run")) offset = 0;
    try {
      const found = await latest((signal) => app.get("examples", { order, limit: LIMIT, offset }, signal));
      if (found) show(found);
    } catch (error) {
      fill(body, failure(error));
    }
  }

  function show({ total, rows }) {
    if (!total) return fill(body, empty("No example is known by name.", "The harness sends `example_id` with each trajectory; another client can put it into a trajectory's metadata."));
    const means = column(rows.map((row) => row.mean)), spreads = column(rows.map((row) => row.spread));
    const decimals = rows.every((row) => Math.abs(row.trend ?? 0) >= 0.01 || !row.trend) ? 3 : 4;
    fill(body,
      h("div", { class: "controls" }, choice("Order by", ORDERS, order, (value) => { order = value; offset = 0; update(); }), h("span", { class: "quiet-text" }, count(total, "example"))),
      table([
        { title: "Example", cell: (row) => String(row.example), class: "name" },
        { title: "Groups", numeric: true, cell: (row) => String(row.steps?.length ?? "–") },
        { title: "Attempts", numeric: true, cell: (row) => String(row.n) },
        { title: "Mean", numeric: true, cell: (row) => means(row.mean) },
        { title: "Spread", numeric: true, cell: (row) => spreads(row.spread) },
        { title: "Trend a step", numeric: true, cell: (row) => h("span", { class: row.trend > 0 ? "rise" : row.trend < 0 ? "fall" : "" }, signed(row.trend, decimals)) },
        { title: "Mean over steps", cell: (row) => sparkline(row.means ?? [], { width: 140, label: `Means of example ${row.example} over ${row.steps?.length ?? 0} steps` }) },
      ], rows, { caption: "Groups by example", onopen: open, label: (row) => `Open example ${row.example} at its newest step` }),
      pager(offset, LIMIT, total, "examples", (to) => { offset = to; update(); }));
  }

  async function open(row) {
    const step = row.steps?.at(-1);
    if (step === undefined) return;
    try {
      const { groups } = await app.get(`steps/${step}`, {});
      const group = groups.find((it) => String(it.example) === String(row.example));
      app.open({ step, split: null, group: group?.id ?? null, attempt: null });
    } catch {
      app.open({ step, split: null, group: null, attempt: null });
    }
  }

  return { update };
}

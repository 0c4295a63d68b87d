// Checkpoints, the config and the log.

import { empty, failure, fill, h, table } from "./dom.js";
import { bytes, clock } from "./format.js";

export function records(body, app) {
  const parts = {
    checkpoints: h("div", {}),
    config: h("div", {}),
    logs: h("div", {}),
  };
  fill(body, h("h3", {}, "Checkpoints"), parts.checkpoints, h("h3", {}, "Config"), parts.config, h("h3", {}, "Log"), parts.logs);

  async function part(element, call) {
    try {
      fill(element, await call());
    } catch (error) {
      fill(element, failure(error));
    }
  }

  return {
    async update() {
      await Promise.all([
        part(parts.checkpoints, async () => checkpoints(await app.get("checkpoints"))),
        part(parts.config, async () => config(await app.get("config"))),
        part(parts.logs, async () => logs(await app.get("logs", { tail: 200 }))),
      ]);
    },
  };
}

function checkpoints(found) {
  const list = Array.isArray(found) ? found : found.checkpoints ?? [];
  if (!list.length) return empty("No checkpoint is on disk.", "Old ones are deleted as the server was told to.");
  const rows = [...list].sort((one, other) => other.step - one.step).slice(0, 200);
  return table([
    { title: "Step", numeric: true, cell: (row) => String(row.step) },
    { title: "sha256", cell: (row) => (row.sha256 ? h("code", { title: row.sha256 }, row.sha256.slice(0, 16)) : "–"), class: "name" },
    { title: "Parent", numeric: true, cell: (row) => (row.parent === null || row.parent === undefined ? "base" : String(row.parent)) },
    { title: "Size", numeric: true, cell: (row) => bytes(row.size) },
    { title: "Served", cell: (row) => (row.served ? "yes" : "no") },
    { title: "Made", cell: (row) => clock(row.created) },
  ], rows, { caption: "Checkpoints" });
}

/** Settings as a list of dotted names; nothing of them becomes markup. */
function config(found) {
  const rows = [...flatten(found.config ?? found)];
  if (!rows.length) return empty("No config was recorded.", "The harness and the server write one beside the checkpoints.");
  return h("dl", { class: "config" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function* flatten(value, prefix = "") {
  for (const [name, inner] of Object.entries(value ?? {})) {
    if (inner && typeof inner === "object" && !Array.isArray(inner)) yield* flatten(inner, `${prefix}${name}.`);
    else yield [prefix + name, typeof inner === "string" ? inner : JSON.stringify(inner)];
  }
}

function logs({ lines }) {
  if (!lines.length) return empty("There is no log here.", "A run that was pulled home has one only if it was pulled too.");
  const view = h("pre", { class: "log", tabindex: 0, "aria-label": "The last lines of the log" }, lines.join("\n"));
  requestAnimationFrame(() => { view.scrollTop = view.scrollHeight; });
  return view;
}

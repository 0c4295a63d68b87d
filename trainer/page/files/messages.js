// Messages of a conversation: texts, tool calls as blocks, what was cut off.

import { h } from "./dom.js";
import { count } from "./format.js";
import { differences } from "./diff.js";

/** A message's text: plain, or the texts of its parts; other parts are named. */
export function textOf(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content, null, 2);
  return content.map((part) => (typeof part === "string" ? part : part?.text ?? `[${part?.type ?? "part"}]`)).join("\n");
}

/** One message; `base` is the same message of the attempt it is compared with. */
export function message(it, base) {
  const text = textOf(it.content);
  const calls = it.tool_calls ?? [];
  return h("div", { class: `message ${it.role} ${it.trained ? "trained" : ""}` },
    h("div", { class: "role" }, it.role, it.name ? h("span", { class: "quiet-text" }, ` ${it.name}`) : null,
      it.trained ? h("span", { class: "badge", title: "Tokens of this message are trained on" }, "trained") : null),
    it.reasoning ? h("details", { class: "reasoning" }, h("summary", {}, "Reasoning"), h("div", { class: "text" }, textOf(it.reasoning))) : null,
    text ? h("div", { class: it.role === "tool" ? "text result" : "text" }, pieces(text, base)) : null,
    !text && !calls.length ? h("div", { class: "quiet-text" }, "empty") : null,
    calls.map(call),
    it.cut ? h("p", { class: "cut" }, `… and ${count(it.cut, "more character")}. Open the attempt to read all of it.`) : null);
}

function pieces(text, base) {
  if (base === undefined) return text;
  return differences(base, text).map(([piece, differs]) => (differs ? h("mark", {}, piece) : piece));
}

const JSON_TOKENS = /"(?:[^"\\]+|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g;
const DEEPEST = 100; // levels that are indented: deeper ones would take a square of the text's length

/** JSON with a line per value. Numbers stay as written: parsed ones lose digits, and 1.0 becomes 1. */
export function indented(json) {
  JSON.parse(json); // throws if it is not JSON
  const tokens = json.match(JSON_TOKENS);
  const opens = (token) => token === "{" || token === "[";
  const closes = (token) => token === "}" || token === "]";
  let depth = 0;
  const line = () => `\n${"  ".repeat(Math.min(depth, DEEPEST))}`;
  return tokens.map((token, at) => {
    if (opens(token)) {
      depth += 1;
      return closes(tokens[at + 1]) ? token : token + line();
    }
    if (closes(token)) {
      depth -= 1;
      return opens(tokens[at - 1]) ? token : line() + token;
    }
    if (token === ",") return token + line();
    if (token === ":") return ": ";
    return token.startsWith('"') ? JSON.stringify(JSON.parse(token)) : token; // é instead of \u00e9
  }).join("");
}

function call(it) {
  const called = it?.function ?? it ?? {};
  let words = called.arguments;
  if (typeof words === "string") {
    try {
      words = indented(words);
    } catch { /* shown as the model wrote it */ }
  } else words = JSON.stringify(words ?? {}, null, 2);
  return h("div", { class: "call" }, h("div", { class: "call-name" }, "calls ", h("code", {}, called.name ?? "a tool")), h("pre", {}, words));
}

/** How many first messages are the same in all `attempts`. */
export function sharedPrefix(attempts) {
  const lists = attempts.map((attempt) => attempt.conversations?.[0]?.messages ?? []);
  if (lists.length < 2) return 0;
  const key = (it) => JSON.stringify([it?.role, it?.content, it?.tool_calls, it?.name]);
  let shared = 0;
  while (lists.every((list) => list[shared] && !list[shared].trained && key(list[shared]) === key(lists[0][shared]))) shared += 1;
  return shared;
}

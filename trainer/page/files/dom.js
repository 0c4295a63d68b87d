// Builds elements. The only way from data to the document: text becomes text nodes, never markup.

const FORBIDDEN = new Set(["innerHTML", "outerHTML", "srcdoc", "style"]);

/** Make an element: `h("p", {class: "note"}, "text", child)`; `vars` sets CSS variables. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (FORBIDDEN.has(name) || (name.startsWith("on") && typeof value !== "function")) {
      throw new Error(`\`${name}\` would let data become markup`);
    }
    if (name === "vars") {
      for (const [key, number] of Object.entries(value)) element.style.setProperty(key, number);
    } else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value === "boolean") element[name] = value;
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Replace everything inside `element`. */
export function fill(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

/** An SVG element; attributes are numbers and names of ours, children are elements. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...flat(children));
  return element;
}

/** A sentence that says what is missing. */
export function empty(sentence, hint) {
  return h("p", { class: "empty" }, sentence, hint ? h("span", { class: "hint" }, ` ${hint}`) : null);
}

/** An error of the API, or of this page, as a sentence. */
export function failure(error) {
  return h("p", { class: "empty failed", role: "alert" }, error.message, error.hint ? h("span", { class: "hint" }, ` ${error.hint}`) : null);
}

/** A table whose columns are `{title, cell(row), numeric?, class?}`. */
export function table(columns, rows, { caption, onopen, label } = {}) {
  const open = (row) => (event) => {
    if (event.type === "keydown" && event.key !== "Enter") return;
    if (event.type === "click" && getSelection()?.toString()) return; // reading, not clicking
    event.stopPropagation();
    onopen(row);
  };
  const head = h("tr", {}, columns.map((column) =>
    h("th", { scope: "col", class: column.numeric ? "number" : column.class }, column.title)));
  const body = rows.map((row) => {
    const props = onopen ? { tabindex: 0, class: "opens", onclick: open(row), onkeydown: open(row), "aria-label": label?.(row) } : {};
    return h("tr", props, columns.map((column) =>
      h("td", { class: [column.numeric ? "number" : "", column.class ?? ""].join(" ").trim() || undefined }, column.cell(row))));
  });
  return h("div", { class: "table", tabindex: onopen ? undefined : 0, role: "region", "aria-label": caption },
    h("table", {}, caption ? h("caption", { class: "visually-hidden" }, caption) : null,
      h("thead", {}, head), h("tbody", {}, body)));
}

/** A small line of `values` over their index, with gaps where a value is null. */
export function sparkline(values, { width = 96, height = 22, label } = {}) {
  const real = values.filter((value) => Number.isFinite(value));
  if (!real.length) return h("span", { class: "quiet-text" }, "no values");
  const low = Math.min(...real), high = Math.max(...real), range = high - low || 1;
  const x = (index) => (values.length > 1 ? 2 + (index / (values.length - 1)) * (width - 4) : width / 2);
  const y = (value) => (high === low ? height / 2 : height - 3 - ((value - low) / range) * (height - 6));
  let path = "", pen = false;
  values.forEach((value, index) => {
    if (!Number.isFinite(value)) { pen = false; return; }
    path += `${pen ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = true;
  });
  const last = values.findLastIndex((value) => Number.isFinite(value));
  return svg("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label ?? `${real.length} values` },
    svg("path", { d: path }), svg("circle", { cx: x(last), cy: y(values[last]), r: 2 }));
}

/** Buttons of which one is pressed, as radio buttons: arrows move, a label names the group. */
export function choice(name, options, current, onchange) {
  return h("fieldset", { class: "choice" }, h("legend", {}, name), options.map(([value, text]) =>
    h("label", {}, h("input", { type: "radio", name, value, checked: value === current, onchange: () => onchange(value) }), h("span", {}, text))));
}

/** `Previous` and `Next` under a page of rows. */
export function pager(offset, limit, total, unit, onmove) {
  if (total <= limit && !offset) return null;
  const last = Math.min(offset + limit, total);
  return h("nav", { class: "pager", "aria-label": `Pages of ${unit}` },
    h("button", { type: "button", disabled: offset === 0, onclick: () => onmove(Math.max(0, offset - limit)) }, "Previous"),
    h("span", {}, `${(offset + 1).toLocaleString("en")}–${last.toLocaleString("en")} of ${total.toLocaleString("en")} ${unit}`),
    h("button", { type: "button", disabled: last >= total, onclick: () => onmove(offset + limit) }, "Next"));
}

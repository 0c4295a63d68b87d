// Numbers, times and amounts as people read them.

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A number with about three digits that matter; a dash where there is none. */
export function num(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 9999.5) return GROUPED.format(value);
  if (size < 1e-3) return value.toExponential(1).replaceAll("-", "−");
  if (Number.isInteger(value)) return minus(String(value));
  // From 999.5 on toPrecision(3) would round to 1.00e+3.
  return minus(size >= 999.5 ? value.toFixed(0) : value.toPrecision(3));
}

/** A tick of an axis: no zeros at the end. */
export function tick(value) {
  const text = num(value);
  return /^[−\d]+\.\d+$/.test(text) ? text.replace(/\.?0+$/, "") : text.replace(/\.0e/, "e");
}

/** The same with a sign, for differences. */
export function signed(value, decimals = 3) {
  if (!Number.isFinite(value)) return "–";
  const text = Math.abs(value).toFixed(decimals);
  if (Number(text) === 0) return `±${text}`;
  return `${value < 0 ? "−" : "+"}${text}`;
}

/** A column of numbers with as many decimals for all: aligned on the decimal point. */
export function column(values, most = 3) {
  const real = values.filter((value) => Number.isFinite(value));
  const whole = real.every((value) => Number.isInteger(value));
  const largest = Math.max(0, ...real.map(Math.abs));
  const decimals = whole ? 0 : largest >= 1000 ? 0 : largest >= 100 ? 1 : most;
  return (value) => (Number.isFinite(value) ? minus(value.toFixed(decimals)) : "–");
}

function minus(text) {
  return text.startsWith("-") ? `−${text.slice(1)}` : text;
}

export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const nearAnEnd = (share > 0 && share < 0.1) || (share > 0.99 && share < 1); // 99.8 is not 100
  return `${(share * 100).toFixed(nearAnEnd ? 1 : 0)} %`;
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
}

export function bytes(count) {
  if (!Number.isFinite(count)) return "–";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return `${(count / size).toFixed(count >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return `${count} B`;
}

export function dollars(amount) {
  return Number.isFinite(amount) ? `$${amount.toFixed(2)}` : "–";
}

/** Seconds since the epoch, or ISO text, as milliseconds. */
function moment(time) {
  const value = typeof time === "number" ? time * 1000 : Date.parse(time ?? "");
  return Number.isFinite(value) ? value : null;
}

export function ago(time, now = Date.now()) {
  const at = moment(time);
  if (at === null) return "at an unknown time";
  const seconds = (now - at) / 1000;
  if (seconds < 0) return `in ${duration(-seconds)}`;
  return seconds < 5 ? "just now" : `${duration(seconds)} ago`;
}

export function clock(time) {
  const at = moment(time);
  if (at === null) return "–";
  return new Date(at).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

export function count(number, one, many = `${one}s`) {
  return `${GROUPED.format(number)} ${number === 1 ? one : many}`;
}

/** Text as a JSON string shows it: spaces, newlines and control characters can be told apart. */
export function visible(text) {
  return JSON.stringify(text ?? "");
}

const UNSEEN = /^[\p{C}\p{Z}\p{M}]*$/u; // no character that has a shape of its own

/** A token's text, in which a character without a shape is drawn too. Runs of spaces stay as they are. */
export function drawn(text) {
  if (!text) return "∅";
  const controls = text.replace(/[\0-\x08\x0b-\x1f]/g, (one) => String.fromCodePoint(0x2400 + one.codePointAt(0))).replace(/\x7f/g, "␡");
  if (/^ +$/.test(text) || !UNSEEN.test(controls)) return controls;
  return controls.replace(/[^ ]/gu, (one) => {
    if (one === "\n") return "⏎\n";
    if (one === "\t") return "⇥";
    return /\p{M}/u.test(one) ? `◌${one}` : `U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  });
}

export function shorten(text, most = 120) {
  const line = (text ?? "").replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

// Where the reader is, in the address: `#/run/PROJECT/NAME/step/7/group/3/attempt/5`.

const KEYS = ["step", "split", "group", "attempt", "colour", "a", "b", "with", "eval", "example"];
const NUMBERS = new Set(["step", "group", "attempt"]);

export function parse(hash) {
  const parts = hash.replace(/^#\/?/, "").split("/").map(decode);
  if (parts[0] !== "run" || parts.length < 3) return {};
  const route = { project: parts[1], name: parts[2] };
  for (let at = 3; at + 1 < parts.length; at += 2) {
    const [key, text] = [parts[at], parts[at + 1]];
    if (!KEYS.includes(key)) continue;
    if (!NUMBERS.has(key)) route[key] = text;
    else if (/^\d+$/.test(text)) route[key] = Number(text);
  }
  return route;
}

export function format(route) {
  const parts = ["run", route.project, route.name];
  for (const key of KEYS) {
    if (route[key] !== undefined && route[key] !== null) parts.push(key, String(route[key]));
  }
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

// Words of one text that another does not have, in order.

const MOST = 1500; // words; a longer text is compared by lines

/** Pieces of `text` as `[piece, differs]`, compared with `base`. */
export function differences(base, text) {
  if (base === text) return [[text, false]];
  const byWords = (it) => it.match(/\s+|[^\s]+/g) ?? [];
  const byLines = (it) => it.match(/[^\n]*\n|[^\n]+$/g) ?? [];
  let [before, after] = [byWords(base), byWords(text)];
  if (Math.max(before.length, after.length) > MOST) [before, after] = [byLines(base), byLines(text)];
  if (Math.max(before.length, after.length) > MOST) return [[text, true]];
  let head = 0;
  while (head < before.length && head < after.length && before[head] === after[head]) head += 1;
  let tail = 0;
  const room = Math.min(before.length, after.length) - head;
  while (tail < room && before.at(-1 - tail) === after.at(-1 - tail)) tail += 1;
  const changed = longest(before.slice(head, before.length - tail), after.slice(head, after.length - tail));
  const parts = [
    ...after.slice(0, head).map((piece) => [piece, false]),
    ...changed,
    ...after.slice(after.length - tail).map((piece) => [piece, false]),
  ];
  return joined(parts);
}

/** The longest common subsequence, as pieces of `after` that are in it or not. */
function longest(before, after) {
  const width = after.length + 1;
  const table = new Uint16Array((before.length + 1) * width);
  for (let i = before.length - 1; i >= 0; i -= 1) {
    for (let j = after.length - 1; j >= 0; j -= 1) {
      table[i * width + j] = before[i] === after[j]
        ? table[(i + 1) * width + j + 1] + 1
        : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  const parts = [];
  let [i, j] = [0, 0];
  while (j < after.length) {
    if (i < before.length && before[i] === after[j]) {
      parts.push([after[j], false]);
      [i, j] = [i + 1, j + 1];
    } else if (i < before.length && table[(i + 1) * width + j] > table[i * width + j + 1]) i += 1;
    else {
      parts.push([after[j], after[j].trim() !== ""]);
      j += 1;
    }
  }
  return parts;
}

function joined(parts) {
  const result = [];
  for (const [piece, differs] of parts) {
    if (result.length && result.at(-1)[1] === differs) result.at(-1)[0] += piece;
    else result.push([piece, differs]);
  }
  return result;
}

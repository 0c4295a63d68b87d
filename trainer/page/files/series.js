// Series of a run by step. Holds what the plots of the page need: at most POINTS for each name.

const POINTS = 600;

export class Series {
  #get;
  #sets = new Map(); // names as one text -> {step, series, reduced, stale}

  constructor(get) {
    this.#get = get;
  }

  /** Everything may have grown: the next `load` asks for what is new. */
  changed() {
    for (const set of this.#sets.values()) set.stale = true;
  }

  /** `{step: [], series: {name: []}, reduced}` of `names`; absent names are left out. */
  async load(names) {
    const key = names.join(",");
    const held = this.#sets.get(key);
    if (held && !held.stale) return held;
    if (!names.length) return { step: [], series: {}, reduced: false };
    // A reduced series has other points after each change: it is asked for whole.
    const since = held && !held.reduced && held.step.length > 2 ? held.step.at(-2) : null;
    const found = await this.#get("series", { names: key, since, points: POINTS });
    const set = since === null ? found : merged(held, found);
    set.stale = false;
    this.#sets.set(key, set);
    return set;
  }
}

/** `held` with the steps of `found` in place of the same steps, and new ones appended. */
function merged(held, found) {
  if (found.reduced || !found.step.length) return found.reduced ? found : { ...held };
  const first = found.step[0];
  let keep = held.step.length;
  while (keep && held.step[keep - 1] >= first) keep -= 1;
  const series = {};
  for (const name of new Set([...Object.keys(held.series), ...Object.keys(found.series)])) {
    const before = held.series[name] ?? new Array(held.step.length).fill(null);
    const after = found.series[name] ?? new Array(found.step.length).fill(null);
    series[name] = [...before.slice(0, keep), ...after];
  }
  return { step: [...held.step.slice(0, keep), ...found.step], series, reduced: false };
}

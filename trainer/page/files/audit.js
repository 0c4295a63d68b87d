// Signs that a reward is being gamed: an audit, not a proof.

import { empty, failure, fill, h } from "./dom.js";
import { label } from "./labels.js";
import { Plot } from "./plots.js";

const LEVELS = { calm: "Calm", watch: "Watch", alarm: "Alarm" };

export function audit(body, app) {
  let plots = [];
  return {
    async update() {
      try {
        const { note, signs } = await app.get("audit");
        plots.forEach((plot) => plot.destroy());
        plots = [];
        if (!signs.length) return fill(body, empty("There is not enough to audit yet.", "It compares the first steps with the newest."));
        const names = [...new Set(signs.map((sign) => sign.series).filter(Boolean))];
        const data = names.length ? await app.series.load(names) : null;
        fill(body, h("p", { class: "quiet-text" }, note), h("div", { class: "signs" }, signs.map((sign) => {
          const plot = sign.series && data?.series[sign.series] ? new Plot({ title: label(sign.series).label, unit: label(sign.series).unit, height: 90, lines: [{ name: sign.series, label: label(sign.series).label, tone: "accent" }] }) : null;
          if (plot) plots.push(plot);
          return h("article", { class: `sign ${sign.level}` }, h("h3", {}, h("span", { class: `level ${sign.level}` }, LEVELS[sign.level] ?? sign.level), sign.name), h("p", {}, sign.sentence), plot?.element);
        })));
        plots.forEach((plot) => plot.update(data));
      } catch (error) {
        fill(body, failure(error));
      }
    },
  };
}

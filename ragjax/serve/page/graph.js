/* Relation paths of a knowledge graph, drawn: entities in columns by their distance from where the paths begin. */

import { counted, h, svg } from "./dom.js";

/** Paths that are drawn, at most; all are listed. */
const MOST = 16;
const [COLUMN, ROW, BOX, HIGH, CHARS] = [250, 44, 136, 26, 18];

const short = (text, most = CHARS) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Entities with their column and row, and the relations between them; each once. */
export function layout(facts) {
  const entities = new Map();
  const edges = new Map();
  const rows = [];
  for (const { steps } of facts) {
    for (let i = 0; i < steps.length; i += 2) {
      if (!entities.has(steps[i])) {
        const column = i / 2;
        // a new entity stands no higher than the one it comes from, so that lines cross less
        const from = i ? entities.get(steps[i - 2]) : null;
        const row = Math.max(rows[column] ?? 0, from?.row ?? 0);
        rows[column] = row + 1;
        entities.set(steps[i], { column, row });
      }
      if (i) edges.set(JSON.stringify(steps.slice(i - 2, i + 1)), steps.slice(i - 2, i + 1));
    }
  }
  return { entities, edges: [...edges.values()], columns: rows.length, rows: Math.max(0, ...rows.filter(Boolean)) };
}

function draw(facts) {
  const { entities, edges, columns, rows } = layout(facts);
  const [width, height] = [(columns - 1) * COLUMN + BOX + 4, rows * ROW + 4];
  const at = (name) => ({ x: 2 + entities.get(name).column * COLUMN, y: 2 + entities.get(name).row * ROW + HIGH / 2 });
  const line = ([head, relation, tail]) => {
    const [from, to] = [at(head), at(tail)];
    const forward = to.x > from.x;
    const [x1, x2] = forward ? [from.x + BOX, to.x] : [from.x, to.x + BOX];
    const middle = (x1 + x2) / 2;
    return svg(
      "g",
      { class: "relation" },
      svg("title", {}, `${head} – ${relation} – ${tail}`),
      svg("path", { d: `M${x1},${from.y} C${middle},${from.y} ${middle},${to.y} ${x2},${to.y}` }),
      svg("text", { x: x2 + (forward ? -8 : 8), y: to.y - 5, "text-anchor": forward ? "end" : "start" }, short(relation)),
    );
  };
  const box = (name) => {
    const { x, y } = at(name);
    const start = facts.some(({ steps }) => steps[0] === name) ? "entity start" : "entity";
    return svg(
      "g",
      { class: start },
      svg("title", {}, name),
      svg("rect", { x, y: y - HIGH / 2, width: BOX, height: HIGH, rx: 6 }),
      svg("text", { x: x + BOX / 2, y: y + 4, "text-anchor": "middle" }, short(name)),
    );
  };
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "Relation paths; listed below" },
    edges.map(line),
    [...entities.keys()].map(box),
  );
}

/** The drawing and the list of a request's relation paths; nothing without any. */
export function paths(facts) {
  if (!facts.length) return null;
  const best = [...facts].sort((a, b) => b.score - a.score).slice(0, MOST);
  const left = facts.length - best.length;
  return h(
    "div",
    { class: "graph" },
    h(
      "div",
      { class: "head" },
      h("h3", {}, "Facts"),
      h("span", { class: "facts" }, counted(facts.length, "relation path"), left ? `, the nearest ${MOST} drawn` : ""),
    ),
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Drawing" }, draw(best)),
    h(
      "details",
      {},
      h("summary", {}, "As a list"),
      h("ol", {}, facts.map(({ steps, score }) => h("li", {}, steps.join(" – "), h("span", { class: "facts" }, ` ${score.toFixed(3)}`)))),
    ),
  );
}

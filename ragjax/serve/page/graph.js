/* Relation paths of a knowledge graph, drawn: entities in columns by their distance from where the paths begin. */

import { counted, h, svg } from "./dom.js";

/** Paths that are drawn, at most; all are listed. */
const MOST = 16;
const [COLUMN, ROW, BOX, HIGH, CHARS] = [266, 44, 136, 26, 18];
/** How far from a box its lines have come apart: their labels stand behind that. */
const APART = 36;

const short = (text, most = CHARS) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/**
 * Entities with their column and row, and the relations between them, each once. The column is the distance from where
 * paths begin; entities stand by the one that they were reached from.
 */
export function layout(facts) {
  const edges = new Map();
  for (const { steps } of facts)
    for (let i = 2; i < steps.length; i += 2) edges.set(JSON.stringify(steps.slice(i - 2, i + 1)), steps.slice(i - 2, i + 1));
  const entities = new Map();
  let column = [...new Set(facts.map(({ steps }) => steps[0]))];
  column.forEach((name, row) => entities.set(name, { column: 0, row }));
  const heights = [column.length];
  while (column.length) {
    const next = [];
    for (const from of column) {
      for (const [head, , tail] of edges.values()) {
        if (head !== from || entities.has(tail)) continue;
        const row = Math.max(entities.get(next.at(-1))?.row + 1 || 0, entities.get(from).row);
        entities.set(tail, { column: heights.length, row });
        next.push(tail);
      }
    }
    if (next.length) heights.push(entities.get(next.at(-1)).row + 1);
    column = next;
  }
  return { entities, edges: [...edges.values()], columns: heights.length, rows: Math.max(...heights) };
}

function draw(facts) {
  const { entities, edges, columns, rows } = layout(facts);
  const [width, height] = [columns * COLUMN, rows * ROW + 4];
  const at = (name) => ({ x: 2 + entities.get(name).column * COLUMN, y: 2 + entities.get(name).row * ROW + HIGH / 2 });
  const line = ([head, relation, tail]) => {
    const [from, to] = [at(head), at(tail)];
    const forward = to.x > from.x;
    // a relation within a column, or back, leaves and arrives at the right
    const [x1, x2] = [from.x + BOX, forward ? to.x : to.x + BOX];
    const bend = forward ? x1 + APART : Math.max(x1, x2) + 40;
    return svg(
      "g",
      { class: "relation" },
      svg("title", {}, `${head} – ${relation} – ${tail}`),
      svg("path", { d: `M${x1},${from.y} C${forward ? bend - 8 : bend},${from.y} ${forward ? x1 + 8 : bend},${to.y} ${forward ? bend : x2},${to.y} H${x2}` }),
      svg("text", { x: forward ? x2 - 8 : bend - 6, y: to.y - 5, "text-anchor": forward ? "end" : "start" }, short(relation)),
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

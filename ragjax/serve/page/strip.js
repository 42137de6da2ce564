/* The prompt as a strip: each segment as wide as it has tokens, each token coloured by what became of its KV. */

import { count, counted, fresh, h, roving, svg } from "./dom.js";

/** What a segment is called. */
export const nameOf = (segment) => segment.title || segment.id;

/** Runs of equal fate: [begin, end, fate], in order, over all tokens of a segment. */
export function fates(segment) {
  const rest = segment.tier ?? "device";
  const marked = segment.recomputed_at.map(([begin, end]) => [begin, end, "recomputed"]);
  const runs = [];
  let at = 0;
  for (const run of marked) {
    if (run[0] > at) runs.push([at, run[0], rest]);
    runs.push(run);
    at = run[1];
  }
  if (at < segment.tokens) runs.push([at, segment.tokens, rest]);
  return runs;
}

/** "97 tokens: 82 reused from host memory, 15 recomputed" */
export function fateInWords(segment) {
  const from = { device: "the device", host: "host memory", disk: "disk", remote: "the shared cache" };
  const parts = [];
  if (segment.reused) parts.push(`${count(segment.reused)} reused from ${from[segment.tier] ?? "the cache"}`);
  if (segment.recomputed) parts.push(`${count(segment.recomputed)} ${segment.reused ? "recomputed" : "computed"}`);
  return `${counted(segment.tokens, "token")}: ${parts.join(", ")}`;
}

function bar(segment) {
  const runs = fates(segment).map(([begin, end, fate]) =>
    svg("rect", { class: `fate ${fate}`, x: begin, y: 0, width: end - begin, height: 1 }),
  );
  return svg(
    "svg",
    { viewBox: `0 0 ${segment.tokens} 1`, preserveAspectRatio: "none", "aria-hidden": "true", focusable: "false" },
    runs,
  );
}

/** The text of a segment, its recomputed tokens marked; one that was computed whole is not marked. */
export function passage(segment) {
  const whole = segment.recomputed === segment.tokens;
  const parts = fates(segment).map(([begin, end, fate]) => {
    let text = segment.pieces.slice(begin, end).join("");
    if (end === segment.tokens) text = text.trimEnd();
    return fate === "recomputed" && !whole ? h("mark", { class: "recomputed" }, text) : text;
  });
  return h("p", { class: "passage" }, parts);
}

function describe(panel, segment) {
  const score = segment.score === null ? null : `similarity to the question ${segment.score.toFixed(3)}`;
  panel.replaceChildren(
    h("h4", {}, nameOf(segment)),
    h("p", { class: "facts" }, [segment.title ? segment.id : null, fateInWords(segment), score].filter(Boolean).join(" · ")),
    passage(segment),
  );
}

const LEGEND = [
  ["device", "reused from the device"],
  ["host", "from host memory"],
  ["disk", "from disk"],
  ["remote", "from the shared cache"],
  ["recomputed", "computed now"],
];

function legend(segments) {
  const seen = new Set(segments.flatMap((segment) => fates(segment).map((run) => run[2])));
  const shown = LEGEND.filter(([fate]) => seen.has(fate));
  return h(
    "ul",
    { class: "legend", "aria-label": "Colours" },
    shown.map(([fate, words]) => h("li", {}, h("span", { class: `swatch ${fate}` }), words)),
  );
}

/**
 * The strip, its legend, and a panel with the passage that is chosen. `opened`: index of the segment that is shown at
 * first (null: none).
 */
export function strip(segments, opened = null) {
  const total = segments.reduce((sum, segment) => sum + segment.tokens, 0);
  const panel = h("div", { class: "panel", role: "tabpanel", id: fresh("passage"), tabindex: 0, hidden: true });
  const tabs = segments.map((segment) =>
    h(
      "button",
      {
        type: "button",
        role: "tab",
        class: "segment",
        id: fresh("segment"),
        tabindex: -1,
        "aria-selected": "false",
        "aria-controls": panel.id,
        "aria-label": `${nameOf(segment)}, ${fateInWords(segment)}`,
        title: `${nameOf(segment)}\n${fateInWords(segment)}`,
        vars: { "flex-grow": segment.tokens },
      },
      bar(segment),
      h("span", { class: "name", "aria-hidden": "true" }, nameOf(segment)),
    ),
  );
  tabs[opened ?? 0].tabIndex = 0;
  const choose = (chosen) => {
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === chosen));
      tab.tabIndex = i === chosen ? 0 : -1;
    });
    panel.hidden = false;
    panel.setAttribute("aria-labelledby", tabs[chosen].id);
    describe(panel, segments[chosen]);
  };
  tabs.forEach((tab, i) => tab.addEventListener("click", () => choose(i)));
  roving(tabs, choose);
  if (opened !== null) choose(opened);
  const dense = segments.length > 40 ? "tabs dense" : "tabs";
  return h(
    "div",
    { class: "strip" },
    h("div", { class: "head" }, h("h3", {}, "Prompt"), h("span", { class: "facts" }, counted(total, "token"))),
    h("div", { class: dense, role: "tablist", "aria-label": "Segments of the prompt" }, tabs),
    legend(segments),
    panel,
  );
}

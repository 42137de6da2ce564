/* What an answer says of itself: whether reuse lost anything, what it cost, where the time went, and its notices. */

import { count, h, milliseconds, percent } from "./dom.js";

const LOSSLESS = {
  full: "the same tokens as full attention",
  dependency: "the same tokens as dependency attention over the graph's paths",
  block: "the same tokens as block attention, which the model was trained for",
  packet: "what passages between their packets give, whatever was cached",
};

/** Strategies that compute each passage behind the passages before it. */
const BEHIND = ["full", "prefix", "set-cache"];

/** Why an answer is approximate. */
function reasons(rag) {
  const passages = rag.segments.filter((segment) => segment.score !== null);
  const apart = passages.length > 1 && !BEHIND.includes(rag.strategy) && rag.recompute_ratio !== 1;
  const found = [
    rag.compression && "the answer sees a part of the prompt",
    apart && "passages that were computed apart have not seen each other",
  ].filter(Boolean);
  if (found.length) return found.join(", and ");
  return "some of the KV is not what full attention computes, for example because the cache keeps it in fewer bits";
}

/** A sentence: how approximate reuse is, as far as it was measured; none if it is lossless. */
export function loss(rag) {
  if (rag.exact_to) return null;
  const measured = rag.predicted
    ? ` Measured for this setting: ${rag.predicted.kl.toFixed(3)} nats a token from full attention, ` +
      `${percent(rag.predicted.top1, 1)} of the likeliest tokens equal.`
    : " How far it is from full attention was not measured for this setting.";
  return h("p", { class: "loss" }, h("strong", {}, "Approximate reuse: "), `${reasons(rag)}.`, measured);
}

function figure(value, label, title = null) {
  return h("div", { title }, h("dt", {}, label), h("dd", {}, value));
}

/** "lossless" is said of the reuse: "exact" would be read as praise of the answer. */
export const reuse = (rag) => (rag.exact_to ? "lossless" : "approximate");

/** The figures that a reader compares. */
export function figures({ rag, usage }) {
  const reused = rag.segments.reduce((sum, segment) => sum + segment.reused, 0);
  const strategy = rag.recompute_ratio === null ? rag.strategy : `${rag.strategy} ${rag.recompute_ratio}`;
  return h(
    "dl",
    { class: "figures" },
    figure(strategy, "Strategy"),
    figure(milliseconds(rag.timings_ms.ttft), "First token after"),
    figure(milliseconds(rag.timings_ms.total), "Whole answer"),
    figure(reuse(rag), "Reuse", LOSSLESS[rag.exact_to] ?? rag.exact_to),
    figure(percent(reused, usage.prompt_tokens), `${count(reused)} of ${count(usage.prompt_tokens)} reused`),
    figure(count(usage.completion_tokens), "Tokens generated"),
  );
}

/** Parts of the time in their order: [name, milliseconds, what it is]. They add up to the whole. */
export function parts(times) {
  const before = times.search_exposed + times.load + times.compile + times.prefill;
  return [
    ["retrieve", times.search_exposed, "search of the knowledge base"],
    ["load", times.load, "cached KV found and loaded"],
    ["compile", times.compile, "programs compiled"],
    ["prefill", times.prefill, "tokens of the prompt computed"],
    ["other", Math.max(0, times.ttft - before), "text to tokens, and waiting for others"],
    ["decode", Math.max(0, times.total - times.ttft), "tokens after the first"],
  ];
}

/** A bar of where the time went. */
export function timings(rag) {
  const shown = parts(rag.timings_ms).filter(([, time]) => time > 0);
  return h(
    "div",
    { class: "times" },
    h("div", { class: "head" }, h("h3", {}, "Time"), h("span", { class: "facts" }, milliseconds(rag.timings_ms.total))),
    h(
      "div",
      { class: "timebar", "aria-hidden": "true" },
      shown.map(([name, time]) => h("span", { class: name, vars: { "flex-grow": time }, title: `${name} ${milliseconds(time)}` })),
    ),
    h(
      "dl",
      { class: "legend" },
      shown.map(([name, time, what]) =>
        h("div", { title: what }, h("dt", {}, h("span", { class: `swatch ${name}` }), name), h("dd", {}, milliseconds(time))),
      ),
    ),
  );
}

/** What did not go as configured. */
export function notices(rag) {
  if (!rag.notices.length) return null;
  return h(
    "div",
    { class: "notices" },
    h("h3", {}, "Notices"),
    h("ul", {}, rag.notices.map((notice) => h("li", {}, notice))),
  );
}

/* Compare: two strategies on one question, one after the other, their answers with differences marked. */

import { ask } from "./api.js";
import { account, cut } from "./ask.js";
import { diff } from "./diff.js";
import { find, h, milliseconds, say } from "./dom.js";
import { body, fillStrategies, onSubmit } from "./form.js";

const SIDES = ["a", "b"];

const nameOf = ({ rag }) => (rag.recompute_ratio === null ? rag.strategy : `${rag.strategy} ${rag.recompute_ratio}`);

/** One answer, its words that the other has not marked. */
function answer(result, runs) {
  const same = runs.every((run) => run.same);
  return [
    h("h3", { class: "side" }, nameOf(result)),
    h("p", { class: "answer" }, runs.map((run) => (run.same ? run.text : h("mark", { class: "differs" }, run.text)))),
    same ? null : h("p", { class: "facts" }, "Marked: what the other answer does not say."),
    cut(result),
    ...account(result),
  ].filter(Boolean);
}

/** What the comparison comes to, in a sentence. */
function verdict([a, b]) {
  const [ta, tb] = [a.rag.timings_ms.ttft, b.rag.timings_ms.ttft];
  const [fast, slow] = ta <= tb ? [a, b] : [b, a];
  const ratio = Math.max(ta, tb) / Math.min(ta, tb);
  const said = a.text === b.text ? "Both answers are the same." : "The answers differ.";
  const speed =
    ratio < 1.05
      ? ` First tokens after about the same time, ${milliseconds(fast.rag.timings_ms.ttft)}.`
      : ` ${nameOf(fast)} had its first token after ${milliseconds(fast.rag.timings_ms.ttft)}, ` +
        `${ratio.toFixed(1)} times as fast as ${nameOf(slow)}.`;
  return said + speed;
}

export function initCompare() {
  const status = find("compare-status");
  const columns = SIDES.map((side) => find(`compare-${side}-result`));

  const one = async (asked, column, warm, signal) => {
    if (warm) {
      say(status, `Warming the cache for ${asked.rag.strategy} …`);
      await ask({ ...asked, max_tokens: 1 }, () => {}, signal);
    }
    say(status, `Asking ${asked.rag.strategy} …`);
    const text = h("p", { class: "answer", "aria-busy": "true" });
    column.replaceChildren(h("h3", { class: "side" }, asked.rag.strategy), text);
    return ask(asked, (piece) => text.append(piece), signal);
  };

  onSubmit("compare", async (signal) => {
    // the form is read once: it may be changed while the first side answers
    const messages = [{ role: "user", content: find("compare-question").value }];
    const asked = SIDES.map((side) => body("compare", messages, `compare-${side}`));
    const warm = find("compare-warm").checked;
    columns.forEach((column) => column.replaceChildren());
    const results = [];
    try {
      for (const [i, column] of columns.entries()) results.push(await one(asked[i], column, warm, signal));
    } finally {
      columns.forEach((column) => column.querySelector(".answer")?.textContent || column.replaceChildren());
    }
    diff(results[0].text, results[1].text).forEach((runs, i) => columns[i].replaceChildren(...answer(results[i], runs)));
    say(status, verdict(results));
  });
}

/** Fill in what the server offers: full attention against what is fastest, unless something else was chosen. */
export function offerCompare(strategies) {
  const other = ["anchor", "naive"].find((name) => strategies.includes(name)) ?? strategies[0];
  fillStrategies(find("compare-a-strategy"), find("compare-a-ratio"), strategies.includes("full") ? "full" : undefined);
  fillStrategies(find("compare-b-strategy"), find("compare-b-ratio"), other);
}

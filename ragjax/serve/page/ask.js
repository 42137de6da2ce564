/* Ask: one question, its answer as it comes, and the account of it. */

import { ask } from "./api.js";
import { figures, loss, notices, reuse, timings } from "./account.js";
import { find, h, milliseconds, say } from "./dom.js";
import { body, fillStrategies, onSubmit } from "./form.js";
import { paths } from "./graph.js";
import { strip } from "./strip.js";

/** What follows an answer: what reuse lost, figures, strip, paths, times, notices. */
export function account(result, opened = null) {
  const { rag } = result;
  const cut = result.reason === "length" ? h("p", { class: "facts" }, "Cut at the most tokens that were asked for.") : null;
  return [cut, loss(rag), figures(result), strip(rag.segments, opened), paths(rag.facts), timings(rag), notices(rag)].filter(Boolean);
}

/** Index of the passage that is best to show first: the one with repaired tokens, or else the first one. */
function telling(segments) {
  const repaired = segments.findIndex((segment) => segment.reused && segment.recomputed && segment.score !== null);
  const passage = segments.findIndex((segment) => segment.score !== null);
  return repaired >= 0 ? repaired : passage >= 0 ? passage : null;
}

export function initAsk() {
  const [status, answer, details] = [find("ask-status"), find("ask-answer"), find("ask-account")];
  const run = onSubmit("ask", async (signal) => {
    find("ask-result").hidden = false;
    answer.replaceChildren();
    answer.setAttribute("aria-busy", "true");
    details.replaceChildren();
    say(status, "Answering …");
    try {
      const result = await ask(body("ask"), (text) => answer.append(text), signal);
      details.replaceChildren(...account(result, telling(result.rag.segments)));
      say(status, `Answered with ${reuse(result.rag)} reuse, first token after ${milliseconds(result.rag.timings_ms.ttft)}.`);
    } finally {
      answer.removeAttribute("aria-busy");
    }
  });
  find("ask-knowledge").addEventListener("change", ({ target }) => (find("ask-topk").disabled = !target.value.startsWith("base:")));
  find("ask-question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    run();
  });
}

/** Fill in what the server offers. */
export function offerAsk() {
  fillStrategies(find("ask-strategy"), find("ask-ratio"));
}

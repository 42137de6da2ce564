/* Ask: one question, its answer as it comes, and the account of it. */

import { ask } from "./api.js";
import { exactness, figures, notices, timings } from "./account.js";
import { find, h, milliseconds } from "./dom.js";
import { body, fillStrategies, wrong } from "./form.js";
import { paths } from "./graph.js";
import { strip } from "./strip.js";

/** What follows an answer: exactness, figures, strip, paths, times, notices. */
export function account(result, opened = null) {
  const { rag } = result;
  const cut = result.reason === "length" ? h("p", { class: "facts" }, "Cut at the most tokens that were asked for.") : null;
  return [cut, exactness(rag), figures(result), strip(rag.segments, opened), paths(rag.facts), timings(rag), notices(rag)].filter(Boolean);
}

/** Index of the passage that is best to show first: the one with repaired tokens, or else the first one. */
function telling(segments) {
  const repaired = segments.findIndex((segment) => segment.reused && segment.recomputed && segment.score !== null);
  const passage = segments.findIndex((segment) => segment.score !== null);
  return repaired >= 0 ? repaired : passage >= 0 ? passage : null;
}

/** Say something in a status line; errors stand out, and are told at once. */
export function say(status, text, kind = "") {
  status.className = `status ${kind}`;
  status.setAttribute("role", kind === "error" ? "alert" : "status");
  status.textContent = text;
}

export function initAsk() {
  const form = find("ask-form");
  const [status, answer, details] = [find("ask-status"), find("ask-answer"), find("ask-account")];
  const [submit, stop] = [find("ask-submit"), find("ask-stop")];
  let running = null;

  const run = async () => {
    const problem = wrong(form);
    if (problem) return say(status, problem, "error");
    running = new AbortController();
    submit.disabled = true;
    stop.disabled = false;
    find("ask-result").hidden = false;
    answer.replaceChildren();
    answer.setAttribute("aria-busy", "true");
    details.replaceChildren();
    say(status, "Answering …");
    try {
      const result = await ask(body("ask"), (text) => answer.append(text), running.signal);
      details.replaceChildren(...account(result, telling(result.rag.segments)));
      const how = result.rag.exact_to ? "exact" : "approximate";
      say(status, `Answered, ${how}, first token after ${milliseconds(result.rag.timings_ms.ttft)}.`);
    } catch (error) {
      if (error.name === "AbortError") say(status, "Stopped.");
      else say(status, error.message, "error");
    } finally {
      answer.removeAttribute("aria-busy");
      if (document.activeElement === stop) find("ask-question").focus();
      submit.disabled = false;
      stop.disabled = true;
      running = null;
    }
  };

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) run();
  });
  stop.addEventListener("click", () => running?.abort());
  find("ask-knowledge").addEventListener("change", ({ target }) => (find("ask-topk").disabled = !target.value.startsWith("base:")));
  find("ask-question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) run();
  });
}

/** Fill in what the server offers. */
export function offerAsk() {
  fillStrategies(find("ask-strategy"), find("ask-ratio"));
}

/* Fields that several forms have: strategies, knowledge, and the body of a request that they make. */

import { find, h, say } from "./dom.js";

/** The server's model, from /v1/models, its knowledge bases, from /v1/vector_stores, and what /health last said. */
export const server = { model: null, stores: [], health: null };

const options = (names, chosen) => names.map((name) => h("option", { value: name, selected: name === chosen }, name));

/**
 * Fill a list of strategies; one that takes a recompute ratio switches the field `ratio` on. What was chosen stays so;
 * `first`: what is chosen in a list that was empty.
 */
export function fillStrategies(select, ratio, first) {
  const { strategies, selective, default_strategy } = server.model.rag;
  const chosen = strategies.includes(select.value) ? select.value : first ?? default_strategy;
  select.replaceChildren(...options(strategies, chosen));
  const settle = () => {
    ratio.disabled = !selective.includes(select.value);
    ratio.placeholder = ratio.disabled ? "not used" : "automatic";
    if (ratio.disabled) ratio.value = "";
  };
  select.onchange = settle; // in place of the one of the list before
  settle();
}

function fillKnowledge(select) {
  const chosen = select.options.length ? select.value : null;
  const group = (label, found, kind) =>
    found.length ? h("optgroup", { label }, found.map(({ id, name }) => h("option", { value: `${kind}:${id}` }, name || id))) : null;
  const filled = [
    group("Knowledge bases", server.stores, "base"),
    group("Knowledge graphs", server.model.rag.graphs.map((id) => ({ id })), "graph"),
    h("option", { value: "" }, "none"),
  ];
  select.replaceChildren(...filled.filter(Boolean));
  if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
}

/** Fill the lists of knowledge bases and graphs; what was chosen stays so if it is still there. */
export function offerKnowledge() {
  for (const view of ["ask", "compare"]) {
    const select = find(`${view}-knowledge`);
    fillKnowledge(select);
    select.dispatchEvent(new Event("change"));
    find(`${view}-submit`).disabled = !find(`${view}-stop`).hidden;
  }
}

/** The knowledge base that a form asks; null: none, or a graph. */
export function knowledgeOf(prefix) {
  const { value } = find(`${prefix}-knowledge`);
  return value.startsWith("base:") ? value.slice(5) : null;
}

const number = (field) => (field.value === "" ? undefined : Number(field.value));

/** The part of `rag` that says what is known; null turns knowledge off. */
function knowledge(value, topK) {
  const [kind, ...name] = value.split(":");
  if (kind === "graph") return { graph: name.join(":") };
  return kind === "base" ? { knowledge: name.join(":"), top_k: topK } : { top_k: 0 };
}

/** Why a form cannot be sent, or null; the field that is wrong gets the focus. */
function wrong(form) {
  const blank = [...form.elements].filter((element) => element.required && !element.value.trim());
  blank.forEach((element) => (element.value = ""));
  const field = [...form.elements].find((element) => !element.disabled && !element.checkValidity());
  if (!field) return null;
  field.closest("details")?.setAttribute("open", "");
  field.focus();
  const label = form.querySelector(`label[for="${field.id}"]`)?.textContent ?? "A field";
  return `${label}: ${field.validationMessage}`;
}

/** The body of a request, from fields whose ids begin with `prefix`. `side`: prefix of strategy and ratio. */
export function body(prefix, messages, side = prefix) {
  const field = (name, of = prefix) => find(`${of}-${name}`);
  const known = field("knowledge").value;
  const strategy = field("strategy", side).value;
  return {
    model: server.model.id,
    messages,
    max_tokens: number(field("tokens")),
    rag: {
      ...knowledge(known, number(field("topk"))),
      strategy,
      recompute_ratio: number(field("ratio", side)),
      compression: field("compression")?.value.trim() || undefined, // comparisons have none
      detail: true,
    },
  };
}

/**
 * Have a form's submission run `work(signal)`, one at a time; the button Stop ends it. Errors stand in the status line.
 * Returns what the form's submission does.
 */
export function onSubmit(prefix, work) {
  const [form, status, submit, stop] = ["form", "status", "submit", "stop"].map((name) => find(`${prefix}-${name}`));
  let running = null;
  const run = async () => {
    if (submit.disabled) return; // it runs, or it is not known yet what can be asked
    const problem = wrong(form);
    if (problem) return say(status, problem, "error");
    running = new AbortController();
    submit.disabled = true;
    stop.hidden = false;
    try {
      await work(running.signal);
    } catch (error) {
      if (error.name === "AbortError") say(status, "Stopped.");
      else say(status, error.message, "error");
    } finally {
      if (document.activeElement === stop) find(`${prefix}-question`).focus();
      submit.disabled = false;
      stop.hidden = true;
      running = null;
    }
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  stop.addEventListener("click", () => running?.abort());
  return run;
}

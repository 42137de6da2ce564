/* Fields that several forms have: strategies, knowledge, and the body of a request that they make. */

import { find, h } from "./dom.js";

/** What the server can do, from /v1/models: the model with its `rag`. */
export const server = { model: null };

const options = (names, chosen) => names.map((name) => h("option", { value: name, selected: name === chosen }, name));

/** Fill a list of strategies; one that takes a recompute ratio switches the field `ratio` on. */
export function fillStrategies(select, ratio, chosen) {
  const { strategies, selective, default_strategy } = server.model.rag;
  select.replaceChildren(...options(strategies, chosen ?? default_strategy));
  const settle = () => {
    ratio.disabled = !selective.includes(select.value);
    ratio.placeholder = ratio.disabled ? "none" : "its own";
    if (ratio.disabled) ratio.value = "";
  };
  select.addEventListener("change", settle);
  settle();
}

/** Fill a list of knowledge bases and graphs. */
export function fillKnowledge(select) {
  const { knowledge, graphs } = server.model.rag;
  const chosen = select.options.length ? select.value : null;
  const group = (label, names, kind) =>
    names.length ? h("optgroup", { label }, names.map((name) => h("option", { value: `${kind}:${name}` }, name))) : null;
  const filled = [
    group("Knowledge bases", knowledge, "base"),
    group("Knowledge graphs", graphs, "graph"),
    h("option", { value: "" }, "none"),
  ];
  select.replaceChildren(...filled.filter(Boolean));
  if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
}

const number = (field) => (field.value === "" ? undefined : Number(field.value));

/** The part of `rag` that says what is known; null turns knowledge off. */
function knowledge(value, topK) {
  const [kind, ...name] = value.split(":");
  if (kind === "graph") return { graph: name.join(":") };
  return kind === "base" ? { knowledge: name.join(":"), top_k: topK } : { top_k: 0 };
}

/** Why a form cannot be sent, or null; the field that is wrong gets the focus. */
export function wrong(form) {
  const field = [...form.elements].find((element) => !element.disabled && !element.checkValidity());
  if (!field) return null;
  field.focus();
  const label = form.querySelector(`label[for="${field.id}"]`)?.textContent ?? "A field";
  return `${label}: ${field.validationMessage}`;
}

/** The body of a request, from fields whose ids begin with `prefix`. `side`: prefix of strategy and ratio. */
export function body(prefix, side = prefix) {
  const field = (name, of = prefix) => find(`${of}-${name}`);
  const known = field("knowledge").value;
  const strategy = field("strategy", side).value;
  return {
    model: server.model.id,
    messages: [{ role: "user", content: field("question").value }],
    max_tokens: number(field("tokens")),
    rag: {
      ...knowledge(known, number(field("topk"))),
      strategy,
      recompute_ratio: number(field("ratio", side)),
      detail: true,
    },
  };
}

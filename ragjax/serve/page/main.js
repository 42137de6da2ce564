/* The page: which view is shown, the API key, and what the server offers. */

import { key, json } from "./api.js";
import { initAsk, offerAsk } from "./ask.js";
import { initCache } from "./cache.js";
import { initCompare, offerCompare } from "./compare.js";
import { initDocuments } from "./documents.js";
import { count, counted, find } from "./dom.js";
import { server } from "./form.js";

const VIEWS = ["ask", "compare", "documents", "cache"];

function show() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const name of VIEWS) {
    find(name).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${find(`${view}-title`).textContent} – ragjax`;
  document.dispatchEvent(new CustomEvent("view", { detail: view }));
}

/** Learn what the server offers, and fill the forms with it. */
async function load() {
  const problem = find("problem");
  try {
    const models = await json("v1/models");
    server.model = models.data.find((model) => model.rag);
    problem.hidden = true;
  } catch (error) {
    problem.hidden = false;
    problem.textContent = error.status === 401 ? "This server wants an API key." : `The server cannot be asked: ${error.message}`;
    return;
  }
  find("model").textContent = server.model.id;
  find("context").textContent = `${count(server.model.context_length)} tokens of context`;
  offerAsk();
  offerCompare(server.model.rag.strategies);
  document.dispatchEvent(new CustomEvent("offered"));
}

/** Say what the server still does before it is at its best, and look again: documents may come. */
async function watch() {
  const line = find("progress");
  let works = [];
  try {
    const { preprocessing: passages, programs_left: programs } = await json("health");
    const preparing = passages?.running && passages.prepared < passages.passages;
    works = [
      programs > 0 && `compiles ${counted(programs, "program")}`,
      preparing && `prepares passages to be reused at any position (${count(passages.prepared)} of ${count(passages.passages)} are ready)`,
    ].filter(Boolean);
    line.textContent = works.length ? `Beside its answers the server ${works.join(" and ")}.` : "";
  } catch {
    works = []; // the next question tells what is wrong
  }
  line.hidden = !works.length;
  setTimeout(watch, works.length ? 1000 : 10000);
}

function initKey() {
  const [form, field, toggle] = [find("key-form"), find("key"), find("key-toggle")];
  const open = (wanted) => {
    form.hidden = !wanted;
    toggle.setAttribute("aria-expanded", String(wanted));
    if (wanted) field.focus();
  };
  const label = () => (toggle.textContent = key.get() ? "API key set" : "API key");
  toggle.addEventListener("click", () => open(form.hidden));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(field.value.trim());
    field.value = "";
    label();
    open(false);
    toggle.focus();
    load();
  });
  document.addEventListener("key-wanted", () => open(true));
  label();
}

initKey();
initAsk();
initCompare();
initDocuments();
initCache();
addEventListener("hashchange", show);
show();
load();
watch();

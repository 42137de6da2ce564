/* The page: which view is shown, the API key, and what the server offers. */

import { key, json } from "./api.js";
import { initAsk, offerAsk } from "./ask.js";
import { initCache } from "./cache.js";
import { initCompare, offerCompare } from "./compare.js";
import { initDocuments, loadStores } from "./documents.js";
import { count, counted, find, h } from "./dom.js";
import { server } from "./form.js";
import { initReader } from "./sources.js";

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
    offerAsk();
    offerCompare(server.model.rag.strategies);
    await loadStores();
    problem.hidden = true;
  } catch (error) {
    const retry = h("button", { type: "button", class: "quiet", onclick: load }, "Retry");
    problem.hidden = false;
    problem.replaceChildren(...(error.status === 401 ? ["This server asks for an API key."] : [error.message, " ", retry]));
    return;
  }
  find("model").textContent = server.model.id;
  find("context").textContent = `${count(server.model.context_length)} tokens of context`;
  document.dispatchEvent(new CustomEvent("offered"));
}

/** What the server still does before it is at its best, in sentences. */
function works({ indexing, preprocessing: passages, programs_left: programs }) {
  const left = indexing?.seconds_left >= 90 ? `, about ${count(indexing.seconds_left / 60)} minutes left` : "";
  return [
    indexing?.running && `Reading your documents: ${count(indexing.files)} of ${counted(indexing.files_total, "file")} can be asked about${left}.`,
    programs > 0 && `Getting faster: ${counted(programs, "program")} still to compile, so first answers may take longer.`,
    passages?.running && passages.prepared < passages.passages && `Preparing passages to be reused anywhere: ${count(passages.prepared)} of ${count(passages.passages)} are ready.`,
  ].filter(Boolean);
}

/** Look at the server's health, again and again: say what it still does, and find it again after it was gone. */
async function watch(gone = false) {
  const line = find("progress");
  let said = [];
  try {
    const reading = server.health?.indexing?.running;
    server.health = await json("health");
    if ((gone && !find("problem").hidden) || (reading && !server.health.indexing?.running)) load();
    gone = false;
    said = works(server.health);
  } catch {
    gone = true; // the next question tells what is wrong
  }
  line.textContent = said.join(" ");
  line.hidden = !said.length;
  setTimeout(watch, said.length ? 1000 : 10000, gone);
}

function initKey() {
  const [form, field, toggle] = [find("key-form"), find("key"), find("key-toggle")];
  const open = (wanted) => {
    form.hidden = !wanted;
    toggle.setAttribute("aria-expanded", String(wanted));
    if (wanted) field.focus();
  };
  const label = () => {
    toggle.textContent = key.get() ? "API key set" : "API key";
    toggle.hidden &&= !key.get();
  };
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
  document.addEventListener("key-wanted", () => {
    toggle.hidden = false; // of no use where no key is asked for
    open(true);
  });
  label();
}

initKey();
initAsk();
initCompare();
initDocuments();
initCache();
initReader();
addEventListener("hashchange", show);
show();
load();
watch();

/* Ask: a conversation. Each turn has its question, the answer as it comes, its sources, and how it was made. */

import { ask, json } from "./api.js";
import { figures, loss, notices, reuse, timings } from "./account.js";
import { count, counted, find, h, milliseconds, percent, say } from "./dom.js";
import { body, fillStrategies, knowledgeOf, onSubmit, server } from "./form.js";
import { paths } from "./graph.js";
import { markdown } from "./markdown.js";
import { sourceList } from "./sources.js";
import { strip } from "./strip.js";

/** Questions that the packaged documents answer, and two of these, by which they are known. */
const DEMO = ["Who is the mayor of Candlehythe?", "How tall is the Saltfinger Lighthouse?", "In what year was the Tolverey Light Railway opened?"];
const DEMO_FILES = ["candlehythe", "light-railway"];

/** Turns of the conversation, oldest first: `{question, text, failed, rag, result, stopped, sources}`. */
let turns = [];
/** Where this tab keeps them, so that they survive a reload, and how many characters; the first turns leave. */
const KEPT = "ragjax-conversation";
const MOST = 2 ** 20;
/** Whether the account of the last answers was opened: it then opens with the next one, too. */
let opened = false;

/** How an answer was made: what reuse lost, figures, strip, times, notices. */
export function account(result, chosen = null) {
  const { rag } = result;
  return [loss(rag), figures(result), strip(rag.segments, chosen), timings(rag), notices(rag)].filter(Boolean);
}

/** Says that an answer is not at its end; null if it is. `where`: the place of the field that limits it. */
export function cut(result, where = "") {
  if (result.reason !== "length") return null;
  return h("p", { class: "facts" }, `Stopped at the token limit (${count(result.usage.completion_tokens)}). Raise it${where} to see more.`);
}

/** Index of the passage that is best to show first: the one with repaired tokens, or else the first one. */
function telling(segments) {
  const repaired = segments.findIndex((segment) => segment.reused && segment.recomputed && segment.score !== null);
  const passage = segments.findIndex((segment) => segment.score !== null);
  return repaired >= 0 ? repaired : passage >= 0 ? passage : null;
}

/** Codes of notices that a reader of the answer must see; the others stand under how it was made. */
const DOUBTS = ["no_passage_fits", "indexing"];

/** Warnings that an answer does not come from the documents, or from a part of them. */
function doubts({ knowledge, top_k }, { sources, facts, notices: told, notice_codes: codes }) {
  const found = told.filter((_, i) => DOUBTS.includes(codes[i])).map((notice) => `${notice[0].toUpperCase()}${notice.slice(1)}.`);
  const searched = knowledge !== undefined && top_k !== 0;
  if (!found.length && searched && !sources.length && !facts.length) found.push("No passage was found: the answer does not come from the documents.");
  return found.map((notice) => h("p", { class: "facts doubt" }, notice));
}

function made(result) {
  const { rag, usage } = result;
  const reused = rag.segments.reduce((sum, segment) => sum + segment.reused, 0);
  const facts = [`first token after ${milliseconds(rag.timings_ms.ttft)}`, `${percent(reused, usage.prompt_tokens)} of the prompt reused`, `${reuse(rag)} reuse`];
  const ontoggle = ({ target }) => (opened = target.open);
  return h("details", { class: "made", open: opened, ontoggle }, h("summary", {}, "How it was made", h("span", { class: "facts" }, ` ${facts.join(" · ")}`)), account(result, telling(rag.segments)));
}

/** The messages of a question behind the turns before it. Turns that failed are left out. */
const messages = (question) => [
  ...turns.filter((turn) => !turn.failed && turn.text).flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.text },
  ]),
  { role: "user", content: question },
];

/** What a wait is for, as far as it is known. */
function waiting(seconds) {
  const compiling = server.health?.programs_left > 0 && seconds >= 2 ? " The server is compiling programs, once after its start: this can take half a minute." : "";
  return `Searching and reading the documents${seconds >= 1 ? `, ${counted(seconds, "second")}` : ""} …${compiling}`;
}

const cure = (error) => (error.code === "context_length_exceeded" ? " Start a new conversation, or ask for fewer passages under Advanced." : "");

/** Keep the top of a turn in sight while it grows, until the reader scrolls. */
function follow(article) {
  let at = null;
  return () => {
    if (at !== null && Math.abs(scrollY - at) > 2) return;
    article.scrollIntoView({ block: "start" });
    at = scrollY;
  };
}

/** What stands under an answer that is whole, or was stopped. */
function under({ text, rag, result, stopped, sources = [] }) {
  if (stopped) return [h("p", { class: "facts" }, stopped), sourceList({ sources, segments: [] })].filter(Boolean);
  const copy = h("button", { type: "button", class: "quiet", onclick: () => copied(text, copy) }, "Copy");
  return [
    text ? null : h("p", { class: "facts" }, "The model gave no answer."),
    cut(result, " under Advanced"),
    ...doubts(rag, result.rag),
    navigator.clipboard ? h("div", { class: "buttons" }, copy) : null,
    sourceList(result.rag),
    paths(result.rag.facts),
    made(result),
  ].filter(Boolean);
}

/** Keep the turns that have come to their end for a reload. */
function keepTurns() {
  const kept = turns.filter((turn) => turn.result || turn.stopped).map((turn) => JSON.stringify(turn));
  while (kept.reduce((sum, turn) => sum + turn.length, 0) > MOST) kept.shift();
  try {
    sessionStorage.setItem(KEPT, `[${kept}]`);
  } catch {
    sessionStorage.removeItem(KEPT); // there is no room: a reload begins anew
  }
}

/** Show the turns from before a reload. */
function restore() {
  turns = JSON.parse(sessionStorage.getItem(KEPT)) ?? [];
  turns.forEach((turn, i) => find("ask-turns").append(articleOf(turn, i, h("div", { class: "answer" }, markdown(turn.text)), h("div", {}, under(turn)))));
  settle();
}

const articleOf = ({ question }, i, ...parts) =>
  h("article", { class: "turn", "aria-label": `Turn ${i + 1}` }, h("h3", { class: "asked" }, question), h("div", { class: "card" }, parts));

/** Ask one question and show its turn. */
async function converse(question, signal) {
  const asked = body("ask", messages(question));
  const turn = { question, text: "", failed: false, rag: asked.rag, result: null, stopped: "", sources: [] };
  const answer = h("div", { class: "answer", "aria-busy": "true", "aria-live": "polite" });
  const wait = h("p", { class: "facts waiting", "aria-hidden": "true" }, waiting(0));
  const after = h("div");
  const article = articleOf(turn, turns.length, wait, answer, after);
  turns.push(turn);
  find("ask-turns").append(article);
  settle();
  const [begin, keep] = [performance.now(), follow(article)];
  const clock = setInterval(() => (wait.textContent = waiting(Math.floor((performance.now() - begin) / 1000))), 1000);
  let [first, frame] = [null, null];
  const draw = () => {
    frame = null;
    answer.replaceChildren(...markdown(turn.text));
    keep();
  };
  const said = (text) => {
    first ??= performance.now();
    wait.hidden = true;
    turn.text += text;
    frame ??= requestAnimationFrame(draw);
  };
  keep();
  try {
    turn.result = await ask(asked, said, signal, (sources) => (turn.sources = sources));
    turn.sources = [];
    after.append(...under(turn));
    say(find("ask-status"), `Answered in ${milliseconds(turn.result.rag.timings_ms.total)}.`);
  } catch (error) {
    if (error.name === "AbortError") {
      const times = first ? `, ${counted(turn.text.split(/\s+/).filter(Boolean).length, "word")}, the first after ${milliseconds(first - begin)}` : "";
      turn.stopped = `Stopped after ${milliseconds(performance.now() - begin)}${times}.`;
      after.append(...under(turn));
    } else {
      turn.failed = true;
      const retry = () => {
        turns = turns.filter((one) => one !== turn);
        article.remove();
        submit(question);
      };
      after.append(h("p", { class: "error", role: "alert" }, `${error.message}${cure(error)}`), h("div", { class: "buttons" }, h("button", { type: "button", onclick: retry }, "Retry")));
    }
    say(find("ask-status"), "");
  } finally {
    clearInterval(clock);
    cancelAnimationFrame(frame);
    wait.remove();
    draw();
    answer.removeAttribute("aria-busy");
    keepTurns();
  }
}

async function copied(text, button) {
  await navigator.clipboard.writeText(text).catch(() => null);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 2000);
}

/** Show what belongs to an empty conversation, or to one with turns. */
function settle() {
  find("ask-new").hidden = !turns.length;
  find("ask-about").hidden = find("ask-examples").hidden = turns.length > 0;
}

let submit = null;

export function initAsk() {
  const [field, knowledge] = [find("ask-question"), find("ask-knowledge")];
  const run = onSubmit("ask", async (signal) => {
    const question = field.value.trim();
    field.value = "";
    await converse(question, signal);
  });
  submit = (question) => {
    field.value = question;
    run();
  };
  knowledge.addEventListener("change", () => {
    find("ask-topk").disabled = !knowledge.value.startsWith("base:");
    introduce();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    run();
  });
  find("ask-new").addEventListener("click", () => {
    find("ask-stop").click();
    turns = [];
    keepTurns();
    find("ask-turns").replaceChildren();
    say(find("ask-status"), "");
    settle();
    field.focus();
  });
  restore();
}

/** The name of a document without its folder and ending, if a question can be made of it. */
function nameable(file) {
  const name = file.split("/").at(-1).replace(/\.\w{1,5}$/, "");
  return /\p{L}{3}/u.test(name) && name.length <= 60 && !/[0-9a-f]{12}/.test(name) ? name : null;
}

async function examples(store) {
  const { data } = await json(`v1/vector_stores/${encodeURIComponent(store.id)}/files?limit=100&order=asc&filter=completed`);
  const ids = data.map((one) => one.id);
  if (DEMO_FILES.every((id) => ids.includes(id))) return DEMO;
  const own = !store.id.startsWith("vs_");
  const names = own ? ids : await Promise.all(ids.slice(0, 3).map(async (id) => (await json(`v1/files/${encodeURIComponent(id)}`)).filename));
  return names.map(nameable).filter(Boolean).slice(0, 3).map((name) => `What does “${name}” say?`);
}

/** Say whose documents are asked, with three questions to begin with. */
async function introduce() {
  const [about, shown] = [find("ask-about"), find("ask-examples")];
  const graph = find("ask-knowledge").value.match(/^graph:(.*)/)?.[1];
  const store = server.stores.find(({ id }) => id === knowledgeOf("ask"));
  const documents = store?.file_counts.completed;
  shown.replaceChildren();
  about.replaceChildren(
    documents
      ? `Answers draw on ${counted(documents, "document")} in “${store.name || store.id}”. `
      : store?.file_counts.in_progress ? `The documents of “${store.name || store.id}” are being read. `
      : store ? "This knowledge base has no documents yet. " : graph ? `Answers draw on the facts of the graph “${graph}”. ` : "The model answers without documents. ",
    h("a", { href: "#documents" }, documents || store?.file_counts.in_progress ? "See the documents" : "Add documents"),
  );
  if (!documents) return;
  const questions = await examples(store).catch(() => []); // they are a help, no more
  if (store.id !== knowledgeOf("ask")) return;
  shown.replaceChildren(...questions.map((question) => h("button", { type: "button", class: "example", onclick: () => submit(question) }, question)));
}

/** Fill in what the server offers. */
export function offerAsk() {
  fillStrategies(find("ask-strategy"), find("ask-ratio"));
}

/* Documents: knowledge bases as OpenAI's vector stores, and the files in them. */

import { call, json, key, Refused } from "./api.js";
import { bytes, count, counted, find, h, say } from "./dom.js";
import { offerKnowledge, server } from "./form.js";

/** Documents of a knowledge base that are listed, at most. */
const MOST = 500;
/** Milliseconds between two looks at a file that is being read. */
const EVERY = 700;
const STATES = { in_progress: "being read", completed: "ready", failed: "failed", cancelled: "cancelled" };

const sleep = (time) => new Promise((done) => setTimeout(done, time));
const path = (...parts) => ["v1", ...parts.map(encodeURIComponent)].join("/");

/** Entries of a list that comes in pages, the oldest first; no more than MOST. */
async function all(address) {
  const found = [];
  for (let after = ""; ; ) {
    const page = await json(`${address}?limit=100&order=asc${after && `&after=${encodeURIComponent(after)}`}`);
    found.push(...page.data);
    if (!page.has_more || found.length >= MOST) return found;
    after = page.last_id;
  }
}

/** Whether a knowledge base was made by a client; the server's own are filled from --knowledge alone. */
const changeable = (store) => store?.id.startsWith("vs_");

/** Delete a file that no knowledge base has any more. */
async function discard(file) {
  const there = (store) => json(path("vector_stores", store.id, "files", file)).then(() => true, () => false);
  const held = await Promise.all(server.stores.filter(changeable).map(there));
  if (!held.includes(true)) await call(path("files", file), { method: "DELETE" });
}

/** Send a file; `progress` is told the share that was sent. fetch cannot tell it. */
function upload(file, progress) {
  const form = new FormData();
  form.append("purpose", "assistants");
  form.append("file", file);
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path("files"));
    if (key.get()) request.setRequestHeader("authorization", `Bearer ${key.get()}`);
    request.responseType = "json";
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onerror = () => reject(new TypeError("the server cannot be reached"));
    request.onload = () =>
      request.status < 400 ? resolve(request.response) : reject(new Refused(request.status, request.response?.error));
    request.send(form);
  });
}

/** Knowledge bases, for this view and for the forms that ask. */
export async function loadStores() {
  server.stores = (await all(path("vector_stores"))).filter((store) => store.status !== "expired");
  offerKnowledge();
}

export function initDocuments() {
  const [status, list, choice, picker] = ["status", "list", "store", "files"].map((name) => find(`documents-${name}`));
  let shown = false;
  const chosen = () => server.stores?.find((store) => store.id === choice.value);

  const fail = (error) => say(status, error.message, "error");

  const remove = async (file, name) => {
    try {
      await call(path("vector_stores", choice.value, "files", file), { method: "DELETE" });
      await discard(file);
      await fill();
      say(status, `${name} was removed.`);
      choice.focus();
    } catch (error) {
      fail(error);
    }
  };

  const row = (entry, name, own) =>
    h(
      "tr",
      {},
      h("td", { class: "text" }, name),
      h("td", { class: "number" }, entry.usage_bytes ? bytes(entry.usage_bytes) : ""),
      h("td", { class: entry.status === "failed" ? "error" : "" }, STATES[entry.status] ?? entry.status, entry.last_error ? `: ${entry.last_error.message}` : ""),
      h("td", {}, own ? null : h("button", { type: "button", class: "quiet", "aria-label": `Remove ${name}`, onclick: () => remove(entry.id, name) }, "Remove")),
    );

  const show = async () => {
    const store = chosen();
    find("documents-upload").hidden = find("documents-delete").hidden = !changeable(store);
    if (!store) return list.replaceChildren(h("p", { class: "facts" }, "There is no knowledge base yet: make one."));
    const [entries, files] = await Promise.all([all(path("vector_stores", store.id, "files")), all(path("files"))]);
    if (store.id !== choice.value) return;
    const names = new Map(files.map((file) => [file.id, file.filename]));
    const own = !changeable(store);
    const total = Math.max(entries.length, store.file_counts.total);
    const more = total > entries.length ? `, the first ${count(entries.length)} listed` : "";
    const head = ["Document", "Size", "State", ""].map((name) => h("th", { scope: "col", class: name === "Size" ? "number" : "" }, name || h("span", { class: "unseen" }, "Remove")));
    const rows = entries.map((entry) => row(entry, names.get(entry.id) ?? entry.id, own));
    list.replaceChildren(...[
      h("p", { class: "facts" }, `${counted(total, "document")}${more}${own ? ", the server's own: they cannot be changed here" : ""}`),
      rows.length ? h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)) : null,
    ].filter(Boolean));
  };

  const fill = async (wanted) => {
    const before = wanted ?? choice.value;
    await loadStores();
    choice.replaceChildren(...server.stores.map((store) => h("option", { value: store.id }, store.name || store.id)));
    if (server.stores.some((store) => store.id === before)) choice.value = before;
    await show();
  };

  /** One file from the disk to its place in the knowledge base, with its progress. */
  const bring = async (file, store) => {
    const bar = h("progress", { max: 1, value: 0, "aria-label": `Progress of ${file.name}` });
    const said = h("span", { class: "facts" }, "sending");
    const line = h("li", {}, h("span", {}, file.name), bar, said);
    find("documents-progress").append(line);
    try {
      const kept = await upload(file, (share) => (bar.value = share));
      bar.removeAttribute("value");
      said.textContent = "being read";
      let entry = await json(path("vector_stores", store, "files"), { method: "POST", body: { file_id: kept.id } });
      while (entry.status === "in_progress") {
        await sleep(EVERY);
        entry = await json(path("vector_stores", store, "files", kept.id));
      }
      if (entry.status !== "completed") throw new Error(entry.last_error?.message ?? `it was ${entry.status}`);
      line.remove();
      return true;
    } catch (error) {
      bar.remove();
      said.className = "error";
      said.setAttribute("role", "alert");
      said.textContent = error.message;
      return false;
    }
  };

  const bringAll = async (files) => {
    const store = choice.value;
    find("documents-progress").replaceChildren();
    say(status, `Adding ${counted(files.length, "document")} …`);
    let added = 0;
    for (const file of files) {
      if (await bring(file, store)) added += 1;
      await show().catch(fail);
    }
    say(status, added === files.length ? `Added ${counted(added, "document")}.` : `Added ${count(added)} of ${counted(files.length, "document")}.`, added < files.length ? "error" : "");
  };

  picker.addEventListener("change", async () => {
    await bringAll([...picker.files]);
    picker.value = "";
  });
  const drop = find("documents-upload");
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    bringAll([...event.dataTransfer.files]);
  });
  choice.addEventListener("change", () => show().catch(fail));
  find("documents-new").addEventListener("submit", async (event) => {
    event.preventDefault();
    const name = find("documents-name");
    try {
      const made = await json(path("vector_stores"), { method: "POST", body: { name: name.value.trim() } });
      name.value = "";
      await fill(made.id);
      say(status, "The knowledge base is made: add documents.");
      picker.focus();
    } catch (error) {
      fail(error);
    }
  });
  const deletion = find("documents-delete");
  const ask = (sure) => {
    deletion.dataset.sure = sure ? "yes" : "";
    deletion.textContent = sure ? "Delete it with its documents?" : "Delete it";
  };
  deletion.addEventListener("blur", () => ask(false));
  deletion.addEventListener("click", async () => {
    if (!deletion.dataset.sure) return ask(true);
    ask(false);
    const store = chosen();
    try {
      const entries = await all(path("vector_stores", store.id, "files"));
      await call(path("vector_stores", store.id), { method: "DELETE" });
      await fill();
      await Promise.all(entries.map((entry) => discard(entry.id)));
      say(status, `The knowledge base “${store.name}” was deleted.`);
      choice.focus();
    } catch (error) {
      fail(error);
    }
  });
  document.addEventListener("view", ({ detail }) => {
    shown = detail === "documents";
    if (shown && server.model) fill().catch(fail);
  });
  document.addEventListener("offered", () => (shown ? fill() : loadStores()).catch(fail));
}

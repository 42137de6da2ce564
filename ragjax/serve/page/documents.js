/* Documents: knowledge bases as OpenAI's vector stores, and the files in them. */

import { call, json, key, Refused, Unreachable } from "./api.js";
import { bytes, count, counted, find, h, say } from "./dom.js";
import { offerKnowledge, server } from "./form.js";
import { openDocument } from "./sources.js";

/** Documents of a knowledge base that are looked at, rows of them that are drawn, and files that are asked for their names together, at most. */
const [MOST, ROWS, NAMES] = [2000, 200, 500];
/** Milliseconds between two looks at a file that is being read. */
const EVERY = 700;
/** Calls at the same time, at most, where many are made. */
const ABREAST = 4;
const STATES = { in_progress: "being read", completed: "", failed: "failed", cancelled: "cancelled" };

const sleep = (time) => new Promise((done) => setTimeout(done, time));
const path = (...parts) => ["v1", ...parts.map(encodeURIComponent)].join("/");

/** Entries of a list that comes in pages, the oldest first; no more pages once there are `most`. */
async function all(address, most = Infinity) {
  const found = [];
  for (let after = ""; ; ) {
    const page = await json(`${address}?limit=100&order=asc${after && `&after=${encodeURIComponent(after)}`}`);
    found.push(...page.data);
    if (!page.has_more || found.length >= most) return found;
    after = page.last_id;
  }
}

/** Whether a knowledge base was made by a client; the server's own are filled from --knowledge alone. */
const changeable = (store) => store?.id.startsWith("vs_");

/** Do `work` on each item, a few at a time; the errors. */
async function each(items, work) {
  const [left, errors] = [items.values(), []];
  const run = async () => {
    for (const item of left) await work(item).catch((error) => errors.push(error));
  };
  await Promise.all(Array.from({ length: ABREAST }, run));
  return errors;
}

/** Delete a file that no knowledge base has any more. The server looks and deletes in one step. */
async function discard(file) {
  try {
    await call(`${path("files", file)}?unattached=true`, { method: "DELETE" });
  } catch (error) {
    if (error.code !== "in_use" && error.status !== 404) throw error;
  }
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
    request.onerror = () => reject(new Unreachable());
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

  const deletion = find("documents-delete");
  /** The knowledge base that the next click on the button deletes. A click need not give a button the focus. */
  let doomed = null;
  const doom = (store) => {
    doomed = store;
    deletion.textContent = store ? "Delete it with its documents?" : "Delete";
  };

  /** Names of files by their ids, as far as they were learned. */
  const names = new Map();
  const learn = async (ids) => {
    const unknown = () => ids.filter((id) => !names.has(id));
    if (!unknown().length) return;
    const newest = await json(`${path("files")}?limit=${NAMES}`);
    newest.data.forEach((file) => names.set(file.id, file.filename));
    // one that cannot be had is shown by its id
    await each(unknown(), async (id) => names.set(id, (await json(path("files", id))).filename));
  };

  /** Delete those of the files that no knowledge base has any more, show what is left, and say what was done. */
  const tidy = async (files, done) => {
    const errors = await each(files, discard);
    await fill();
    if (errors.length) say(status, `${done} ${counted(errors.length, "file")} could not be deleted: ${errors[0].message}`, "error");
    else say(status, done);
    choice.focus();
  };

  const remove = async (store, file, name) => {
    try {
      await call(path("vector_stores", store, "files", file), { method: "DELETE" });
      await tidy([file], `${name} was removed.`);
    } catch (error) {
      fail(error);
    }
  };

  const row = (entry, own, stated) => {
    const [name, ready] = [nameOf(entry), entry.status === "completed"];
    const open = () => openDocument({ knowledge: entry.vector_store_id, file_id: entry.id, filename: name });
    return h(
      "tr",
      {},
      h("td", { class: "text" }, ready ? h("button", { type: "button", class: "link", onclick: open }, name) : name),
      h("td", { class: "number" }, entry.usage_bytes ? bytes(entry.usage_bytes) : ""),
      stated ? h("td", { class: entry.status === "failed" ? "error" : "" }, STATES[entry.status] ?? entry.status, entry.last_error ? `: ${entry.last_error.message}` : "") : null,
      own ? null : h("td", {}, h("button", { type: "button", class: "quiet", "aria-label": `Remove ${name}`, onclick: () => remove(entry.vector_store_id, entry.id, name) }, "Remove")),
    );
  };

  /** The documents of the knowledge base that is shown, and how they are listed. */
  let [entries, order] = [[], { by: "state", up: true }];
  const nameOf = (entry) => names.get(entry.id) ?? entry.id;
  /** Those that need a look come first. */
  const STAGES = ["failed", "cancelled", "in_progress", "completed"];
  const KEYS = { name: () => 0, size: (entry) => entry.usage_bytes, state: (entry) => STAGES.indexOf(entry.status) };
  const filter = h("input", { id: "documents-filter", type: "search", autocomplete: "off", spellcheck: "false", oninput: () => draw() });
  const [table, told] = [h("div"), h("p", { class: "facts", role: "status" })];

  const draw = () => {
    const [store, wanted] = [chosen(), filter.value.trim().toLowerCase()];
    const [own, key] = [!changeable(store), KEYS[order.by]];
    const found = entries.filter((entry) => nameOf(entry).toLowerCase().includes(wanted));
    const compared = (a, b) => key(a) - key(b) || nameOf(a).localeCompare(nameOf(b), "en", { numeric: true });
    found.sort((a, b) => (order.up ? compared(a, b) : compared(b, a)));
    const column = (name, by) => {
      const sort = () => {
        order = { by, up: order.by === by ? !order.up : true };
        draw();
        table.querySelector(`[data-by=${by}]`).focus();
      };
      const state = order.by === by ? (order.up ? "ascending" : "descending") : null;
      return h("th", { scope: "col", "aria-sort": state, class: by === "size" ? "number" : "" }, h("button", { type: "button", "data-by": by, onclick: sort }, name));
    };
    const failed = entries.filter((entry) => entry.status === "failed").length;
    const stated = entries.some((entry) => entry.status !== "completed");
    const head = [column("Document", "name"), column("Size", "size"), stated ? column("State", "state") : null, own ? null : h("th", { scope: "col" }, h("span", { class: "unseen" }, "Remove"))];
    const total = Math.max(entries.length, store.file_counts.total);
    const shown = Math.min(found.length, ROWS);
    told.textContent = [
      wanted ? `${count(found.length)} of ${counted(total, "document")}` : counted(total, "document"),
      failed && `${count(failed)} could not be read`,
      shown < found.length && `the first ${count(shown)} are shown: filter to see others`,
      own && "these come from the server's own folder, and stay as they are",
    ].filter(Boolean).join("; ");
    const rows = found.slice(0, ROWS).map((entry) => row(entry, own, stated));
    table.replaceChildren(...(rows.length ? [h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows))] : []));
  };

  const show = async () => {
    const store = chosen();
    if (doomed !== choice.value) doom(null);
    find("documents-upload").hidden = find("documents-delete").hidden = !changeable(store);
    if (!store) return list.replaceChildren(h("p", { class: "facts" }, "There is no knowledge base yet: create one, then add documents."));
    if (list.dataset.store !== store.id) list.replaceChildren(...[1, 2, 3].map(() => h("span", { class: "skeleton" })));
    const listed = await all(path("vector_stores", store.id, "files"), MOST);
    if (changeable(store)) await learn(listed.map((entry) => entry.id));
    if (store.id !== choice.value) return;
    entries = listed;
    if (list.dataset.store !== store.id || !list.contains(table)) {
      filter.value = "";
      list.dataset.store = store.id;
      list.replaceChildren(h("div", { class: "tools" }, told, h("div", {}, h("label", { for: filter.id }, "Filter by name"), filter)), table);
    }
    filter.parentElement.hidden = entries.length < 2;
    draw();
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
      names.set(kept.id, kept.filename);
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
      said.textContent = error.message.replace(`${file.name}: `, "");
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
  choice.addEventListener("change", () => {
    find("documents-progress").replaceChildren();
    show().catch(fail);
  });
  find("documents-new").addEventListener("submit", async (event) => {
    event.preventDefault();
    const name = find("documents-name");
    try {
      const made = await json(path("vector_stores"), { method: "POST", body: { name: name.value.trim() } });
      name.value = "";
      find("documents-progress").replaceChildren();
      await fill(made.id);
      say(status, `“${made.name}” is created: add documents.`);
      picker.focus();
    } catch (error) {
      fail(error);
    }
  });
  deletion.addEventListener("blur", () => doom(null));
  deletion.addEventListener("click", async () => {
    if (doomed !== choice.value) return doom(choice.value);
    doom(null);
    const store = chosen();
    try {
      const files = (await all(path("vector_stores", store.id, "files"))).map((entry) => entry.id);
      find("documents-progress").replaceChildren();
      say(status, `Deleting ${counted(files.length, "document")} …`);
      await call(path("vector_stores", store.id), { method: "DELETE" });
      await tidy(files, `The knowledge base “${store.name}” was deleted.`);
    } catch (error) {
      fail(error);
    }
  });
  document.addEventListener("view", ({ detail }) => {
    shown = detail === "documents";
    if (shown && server.model) fill().catch(fail);
  });
  document.addEventListener("offered", () => shown && fill().catch(fail));
}

// One page: what the jobs of this store do. A snapshot comes each second while somebody looks.

import { drawMatrix, Throughput } from "./pictures.js";
import { bytes, fillTable, seconds, setText } from "./tables.js";

const at = (id) => document.getElementById(id);
const throughput = new Throughput(at("chart"));
let stream = null;  // ends the one that comes
let followed = null;  // the job
let last = null;
let shownTo = null;

const RANKS = [
  ["rank", (row) => row.rank],
  ["state", (row) => row.state, (row) => row.missing ? "bad" : row.waits_for.length ? "wait" : ""],
  ["does", (row) => row.does],
  ["since", (row) => seconds(row.since_s)],
  ["waits for", (row) => row.waits_for.join(", "), (row) => row.waits_for.length ? "wait" : ""],
  ["loop late by", (row) => seconds(row.late_s)],
  ["host", (row) => row.host],
  ["pid", (row) => row.pid],
];
const STRAGGLERS = [
  ["rank", (row) => row.rank],
  ["operation", (row) => row.operation],
  ["group", (row) => row.group],
  ["last in", (row) => `${row.last} of ${row.operations}`],
  ["others waited", (row) => seconds(row.waited_s)],
];
const LINKS = [
  ["from", (row) => row.from],
  ["to", (row) => row.to],
  ["by", (row) => row.transport],
  ["per second", (row) => bytes(row.bytes_per_s)],
];
const ERRORS = [
  ["when", (row) => new Date(row.time * 1000).toLocaleTimeString()],
  ["rank", (row) => row.rank],
  ["operation", (row) => row.operation],
  ["error", (row) => row.error],
];

const CLIENTS = [
  ["job", (row) => row.namespace],
  ["rank", (row) => row.rank],
  ["client", (row) => row.client],
  ["address", (row) => row.address],
  ["connection", (row) => row.away ? "lost" : "", () => "bad"],
  ["waits for key", (row) => row.waits_for, () => "wait"],
  ["since", (row) => seconds(row.since_s)],
];

function show(look) {
  last = look;
  setText(at("verdict"), look.sentence);
  at("verdict").className = { healthy: "good", unknown: "wait" }[look.verdict] ?? "bad";
  showRanks();
  setText(at("matrix-text"), drawMatrix(at("matrix"), look.size, look.ranks));
  fillTable(at("stragglers"), STRAGGLERS, look.stragglers);
  if (look.back_to !== shownTo) throughput.add(look.back_to, look.bytes_per_s);
  shownTo = look.back_to;
  fillTable(at("links"), LINKS, look.links);
  fillTable(at("errors"), ERRORS, look.errors);
}

function showRanks() {
  if (!last) return;
  const busy = at("waiting").checked;
  const rows = busy ? last.ranks.filter((row) => row.missing || row.waits_for.length) : last.ranks;
  fillTable(at("ranks"), RANKS, rows);
  setText(at("shown"), `${rows.length} of ${last.ranks.length} ranks`);
}

// Not in a cookie, which browsers would send to whoever serves another port of this host.
const ask = (what, more) => fetch(`/page/${what}`, { headers: { Authorization: `Bearer ${sessionStorage.session ?? ""}` }, ...more });
const lost = () => setText(at("link"), "No connection to the store; trying again.");

async function follow(job) {
  stream?.abort();
  if (job !== followed) { last = null; throughput.clear(); }
  followed = job;
  at("look").hidden = at("timeline").hidden = !job;
  at("none").hidden = Boolean(job);
  const mine = stream = job ? new AbortController() : null;
  if (!job) return;
  try {
    const answer = await ask(`events?job=${encodeURIComponent(job)}`, { signal: mine.signal });
    if (!answer.ok) throw new Error(answer.statusText);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = "", part; !(part = await reader.read()).done;) {
      const events = (text + part.value).split("\n\n");
      text = events.pop();
      setText(at("link"), "");
      for (const event of events) show(JSON.parse(event.slice("data: ".length)));
    }
  } catch { /* as where it ends */ }
  if (mine !== stream) return;
  stream = null;  // refresh follows again
  lost();
}

async function refresh() {
  let state;
  try {
    const answer = await ask("state");
    if (!answer.ok) throw new Error(answer.statusText);
    state = await answer.json();
  } catch {
    lost();
    return;
  }
  if (!stream) setText(at("link"), "");
  at("numbers").replaceChildren(...Object.entries(state.numbers).map(([name, number]) => {
    const pair = document.createElement("div");
    const [label, value] = [document.createElement("dt"), document.createElement("dd")];
    label.textContent = name;
    value.textContent = number;
    pair.append(label, value);
    return pair;
  }));
  const open = state.access === "open" || state.access === "logged in";
  at("login").hidden = open;
  at("main").hidden = !open;
  at("logout").hidden = state.access !== "logged in";
  if (state.access === "elsewhere") {
    setText(at("login-why"), "Names are shown on the store's own host only, as a token must not travel unencrypted: "
      + "forward the port (ssh -L) and open it as localhost.");
    for (const part of at("login").querySelectorAll("label, input, button")) part.hidden = true;
  }
  if (!open) {
    stream?.abort();
    stream = null;
    return;
  }
  fillTable(at("clients"), CLIENTS, state.clients);
  const select = at("job");
  const known = [...select.options].map((option) => option.value);
  if (known.join("\n") !== state.jobs.join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...state.jobs.map((job) => new Option(job, job)));
    if (state.jobs.includes(chosen)) select.value = chosen;
  }
  if (select.value !== followed || !stream) follow(select.value);
}

at("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const answer = await ask("login", { method: "POST", body: at("token").value });
  const text = await answer.text();
  at("token").value = "";
  if (answer.ok) sessionStorage.session = text;
  setText(at("login-error"), answer.ok ? "" : text);
  await refresh();
  if (answer.ok) at("main").focus({ preventScroll: true });
});
at("logout").addEventListener("click", async () => {
  await ask("logout", { method: "POST" });
  delete sessionStorage.session;
  await refresh();
});
at("timeline").addEventListener("click", async () => {
  const answer = await ask(`timeline?job=${encodeURIComponent(followed)}`);
  if (!answer.ok) { setText(at("link"), await answer.text()); return; }
  const href = URL.createObjectURL(await answer.blob());
  Object.assign(document.createElement("a"), { href, download: "job.pftrace" }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
});
at("job").addEventListener("change", () => follow(at("job").value));
at("waiting").addEventListener("change", showRanks);

await refresh();
setInterval(refresh, 2000);

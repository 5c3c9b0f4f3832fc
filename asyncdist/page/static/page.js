// One page: what the jobs of this store do. A snapshot comes each second while somebody looks.

import { drawMatrix, Throughput } from "./pictures.js";
import { bytes, fillTable, seconds, setText } from "./tables.js";

const at = (id) => document.getElementById(id);
const throughput = new Throughput(at("chart"));
let events = null;
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

function show(look) {
  last = look;
  setText(at("verdict"), look.sentence);
  at("verdict").className = { healthy: "good", unknown: "wait" }[look.verdict] ?? "bad";
  showRanks();
  setText(at("matrix-text"), drawMatrix(at("matrix"), look.size, look.waits));
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

function follow(job) {
  events?.close();
  events = null;
  last = null;
  throughput.clear();
  at("look").hidden = !job;
  at("none").hidden = Boolean(job);
  at("timeline").hidden = !job;
  if (!job) return;
  at("timeline").href = `/page/timeline?job=${encodeURIComponent(job)}`;
  events = new EventSource(`/page/events?job=${encodeURIComponent(job)}`);
  events.onmessage = (message) => { setText(at("link"), ""); show(JSON.parse(message.data)); };
  events.onerror = () => setText(at("link"), "No connection to the store; trying again.");
}

async function refresh() {
  let state;
  try {
    const answer = await fetch("/page/state");
    if (!answer.ok) throw new Error(answer.statusText);
    state = await answer.json();
  } catch {
    setText(at("link"), "No connection to the store; trying again.");
    return;
  }
  if (!events) setText(at("link"), "");
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
    events?.close();
    events = null;
    return;
  }
  const select = at("job");
  const known = [...select.options].map((option) => option.value);
  if (known.join("\n") !== state.jobs.join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...state.jobs.map((job) => new Option(job, job)));
    if (state.jobs.includes(chosen)) select.value = chosen;
    if (select.value !== chosen || !events) follow(select.value);
  } else if (!events) {
    follow(select.value);
  }
}

at("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const answer = await fetch("/page/login", { method: "POST", body: at("token").value });
  at("token").value = "";
  setText(at("login-error"), answer.ok ? "" : await answer.text());
  await refresh();
  if (answer.ok) at("main").focus({ preventScroll: true });
});
at("logout").addEventListener("click", async () => {
  await fetch("/page/logout", { method: "POST" });
  await refresh();
});
at("job").addEventListener("change", () => follow(at("job").value));
at("waiting").addEventListener("change", showRanks);

await refresh();
setInterval(refresh, 2000);

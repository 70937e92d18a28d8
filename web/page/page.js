"use strict";
// Draws a snapshot of a job. Whatever a process says of itself (host, barrier, error) becomes text, never markup.
const $ = (id) => document.getElementById(id);
const live = !$("data");
const state = { shown: null, open: null, cells: [], signature: "" };

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function kind(process, furthest, named) {
  if (process.state === "CONNECTED" && named.has(process.id)) return "named";
  if (process.state === "CONNECTED") return process.step !== null && furthest - process.step > 1 ? "behind" : "ok";
  return { SILENT: "silent", ERROR: "error", DISCONNECTED: "left" }[process.state] || "absent";
}

const words = { ok: "alive", named: "named above", behind: "behind", silent: "silent", error: "failed", left: "has left", absent: "has not come" };

function draw(shown) {
  state.shown = shown;
  document.title = `${shown.job || "job"}: ${shown.findings.length ? shown.findings[0].text : shown.phase}`;
  $("title").textContent = shown.job ? `${shown.job}, attempt ${shown.attempt}` : "holdfast";
  const furthest = Math.max(-1, ...shown.processes.map((each) => each.step ?? -1));
  const headline = [`${shown.num_processes} processes`, shown.phase, furthest >= 0 ? `step ${furthest}` : "", `up ${Math.round(shown.up_s)} s`,
    `${shown.barriers_passed} barriers passed, ${shown.barriers_failed} failed`];
  say(shown.gone || headline.filter(Boolean).join(" · "), Boolean(shown.gone));
  drawFindings(shown);
  drawGrid(shown.processes, furthest, new Set(shown.findings.flatMap((finding) => finding.processes)));
  drawRoot(shown.root);
  drawBarriers(shown.barriers);
  drawTime(shown);
  drawGoodput(shown.goodput_s, shown.goodput_parts);
  if (state.open !== null) drawProcess();
}

function say(text, gone) {
  $("headline").textContent = text;
  $("headline").className = gone ? "gone" : "";
}

function replaceAll(id, children) {
  $(id).replaceChildren(...children);
}

function drawFindings(shown) {
  const texts = shown.findings.map((finding) => finding.text);
  const signature = texts.join("\n");
  if (signature === state.signature && $("findings").children.length) return; // a screen reader reads what is new
  state.signature = signature;
  replaceAll("findings", texts.length ? texts.map((text) => element("li", text, "wrong")) : [element("li", shown.gone ? "nothing is known to be" : "nothing: the job gets on")]);
}

function drawGrid(processes, furthest, named) {
  const grid = $("grid");
  grid.className = processes.length <= 64 ? "few" : processes.length > 1500 ? "many" : "";
  while (state.cells.length > processes.length) state.cells.pop().remove();
  const added = document.createDocumentFragment();
  while (state.cells.length < processes.length) {
    const cell = element("button");
    cell.type = "button";
    cell.dataset.process = state.cells.length;
    cell.tabIndex = state.cells.length ? -1 : 0;
    state.cells.push(cell);
    added.append(cell);
  }
  grid.append(added);
  processes.forEach((process, number) => {
    const cell = state.cells[number], its = kind(process, furthest, named);
    const label = `process ${process.id}, ${words[its]}, host ${process.host || "unknown"}` + (process.step === null ? "" : `, step ${process.step}`);
    if (cell.dataset.label === label) return;
    cell.dataset.label = label;
    cell.className = `cell ${its}`;
    cell.setAttribute("aria-label", label);
    cell.title = label;
    cell.textContent = processes.length <= 64 ? process.id : "";
  });
}

function openProcess(number) {
  if (state.open !== null && state.cells[state.open]) state.cells[state.open].setAttribute("aria-pressed", "false");
  state.open = number;
  state.cells[number].setAttribute("aria-pressed", "true");
  $("process").hidden = false;
  $("stacks").hidden = true;
  $("ask").hidden = !live;
  drawProcess();
}

function drawProcess() {
  const process = state.shown.processes[state.open];
  if (!process) return;
  $("process-title").textContent = `Process ${process.id}`;
  const known = (value, text) => (value === null || value === undefined ? "unknown" : text(value));
  const facts = {
    host: `${process.host || "unknown"}, pid ${process.pid || "unknown"}`,
    "last heard": process.heard_s < 0 ? "never" : `${process.heard_s} s ago, expected every ${process.expected_s} s`,
    step: known(process.step, (step) => `${step}, ${process.steps_per_second} steps/s`),
    saved: known(process.saved_step, (step) => `step ${step}`),
    "blocked by saves": known(process.blocked_s, (seconds) => `${seconds.toFixed(1)} s`),
    waits: known(process.waiting, (share) => `${Math.round(share * 100)} % of its time`),
    memory: known(process.memory_bytes, (bytes) => `${(bytes / 2 ** 30).toFixed(2)} GiB`),
    note: process.note || "none",
  };
  replaceAll("facts", Object.entries(facts).flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
}

async function showStacks() {
  const number = state.open;
  $("stacks").hidden = false;
  $("stacks").textContent = "asking ...";
  let text;
  try {
    text = await (await fetch(`stacks/${state.shown.processes[number].id}`)).text();
  } catch (error) {
    text = `no answer: ${error}`;
  }
  if (state.open === number) $("stacks").textContent = text;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"], power = bytes ? Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3)) : 0;
  return `${(bytes / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

function drawRoot(root) {
  $("root").hidden = !root;
  if (!root) return;
  $("root-summary").textContent = `${root.path}: ${root.num_steps} ${root.num_steps === 1 ? "step" : "steps"}`;
  replaceAll("steps", [...root.steps].reverse().map((step) => {
    const row = element("tr");
    const survives = `survives the loss of ${step.survives} ${step.survives === 1 ? "host" : "hosts"}`;
    const notes = [step.damaged ? "damaged: a restore has passed it over" : "", step.incremental ? "incremental" : "", step.local ? survives : ""].filter(Boolean);
    row.append(element("td", step.step), element("td", step.bytes ? size(step.bytes) : "unknown"),
      element("td", step.local ? "hosts" : "root"), element("td", notes.join(", ")));
    return row;
  }));
}

function drawBarriers(barriers) {
  replaceAll("barriers", barriers.map((barrier) => {
    const row = element("tr");
    const more = barrier.num_missing > barrier.missing.length ? ` and ${barrier.num_missing - barrier.missing.length} more` : "";
    row.append(element("td", barrier.name), element("td", barrier.waiting), element("td", `${barrier.waited_s} s`),
      element("td", barrier.missing.join(", ") + more));
    return row;
  }));
}

function svg(tag, attributes, title) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (title) made.append(Object.assign(document.createElementNS("http://www.w3.org/2000/svg", "title"), { textContent: title }));
  return made;
}

function drawTime(shown) {
  const events = [...shown.events].sort((a, b) => a.unix_s - b.unix_s);
  const times = [...events.map((event) => event.unix_s), ...shown.samples.map((each) => each[0]), shown.unix_s];
  const first = Math.min(...times), length = Math.max(1, shown.unix_s - first), x = (at) => (1000 * (at - first)) / length;
  const marks = events.map((event) => svg("line", { class: `mark ${event.kind}`, x1: x(event.unix_s), x2: x(event.unix_s), y1: 8, y2: 112 }, event.text));
  const steps = shown.samples.filter((each) => each[1] >= 0), most = Math.max(1, ...steps.map((each) => each[1]));
  const points = steps.map((each) => `${x(each[0]).toFixed(1)},${(112 - (100 * each[1]) / most).toFixed(1)}`).join(" ");
  replaceAll("timeline", [...marks, svg("polyline", { class: "steps", points }, `up to step ${most}`)]);
  const newest = events.length ? `${events.length} ${events[events.length - 1].text}` : "";
  if ($("events").dataset.newest === newest) return;
  $("events").dataset.newest = newest;
  replaceAll("events", events.reverse().map((event) => {
    const item = element("li"), at = new Date(event.unix_s * 1000);
    const when = element("time", at.toLocaleTimeString());
    when.dateTime = at.toISOString();
    item.append(when, element("span", event.text));
    return item;
  }));
}

function drawGoodput(seconds, parts) {
  const total = Object.values(seconds).reduce((sum, each) => sum + each, 0);
  $("goodput").hidden = !total;
  if (!total) return;
  let x = 0;
  const bars = [], words = [];
  for (const [part, text] of Object.entries(parts)) {
    const length = seconds[part] || 0;
    bars.push(svg("rect", { class: part, x: (1000 * x) / total, width: (1000 * length) / total, y: 0, height: 14 }));
    const item = element("li");
    item.append(element("span", "", `key ${part}`), `${text} ${length.toFixed(1)} s`);
    words.push(item);
    x += length;
  }
  replaceAll("parts", bars);
  $("share").textContent = `goodput ${Math.round((100 * (seconds.stepping_s || 0)) / total)} % of ${total.toFixed(1)} s`;
  replaceAll("part-list", words);
}

$("grid").addEventListener("click", (event) => {
  const number = event.target.dataset.process;
  if (number !== undefined) openProcess(Number(number));
});

$("grid").addEventListener("keydown", (event) => {
  const number = Number(event.target.dataset.process);
  const perRow = Math.max(1, state.cells.findIndex((cell) => cell.offsetTop > state.cells[0].offsetTop));
  const to = { ArrowRight: number + 1, ArrowLeft: number - 1, ArrowDown: number + perRow, ArrowUp: number - perRow, Home: 0, End: state.cells.length - 1 }[event.key];
  if (to === undefined || !state.cells[to]) return;
  event.preventDefault();
  state.cells[number].tabIndex = -1;
  state.cells[to].tabIndex = 0;
  state.cells[to].focus();
});

$("ask").addEventListener("click", showStacks);

if (live) {
  const source = new EventSource("events"); // comes back by itself
  source.onmessage = (event) => draw(JSON.parse(event.data));
  source.onerror = () => say("the page's server does not answer; trying again. Is `holdfast web` still running?", true);
} else {
  draw(JSON.parse($("data").textContent));
}

"use strict";
// Draws a snapshot of a job. Whatever a process says of itself (host, barrier, error) becomes text, never markup.
const $ = (id) => document.getElementById(id);
const live = !$("data");
const MOST_ROWS = 16, MOST_GROUPS = 64;
// `rows` are the processes that are known one by one, by their number: the snapshot's, and those of the opened range.
const state = { shown: null, open: null, range: null, members: [], rows: new Map(), cells: [], signature: "", layout: "", at: null };

const looks = {
  Healthy: "good", Finished: "over", Starting: "moving", "Waiting for machines": "moving", Restarting: "moving", Preempting: "moving",
  Preempted: "look", Slow: "look", "In trouble": "look", "Out of reach": "look", Hung: "bad", Failed: "bad",
};
const words = {
  ok: "gets on", waiting: "waits", behind: "is behind", culprit: "named in the diagnosis, failed or silent", left: "has left", absent: "has not come",
};

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function svg(tag, attributes, title) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (title) made.append(Object.assign(document.createElementNS("http://www.w3.org/2000/svg", "title"), { textContent: title }));
  return made;
}

function replaceAll(id, children) {
  $(id).replaceChildren(...children);
}

// --- Words for numbers

const two = (number) => String(number).padStart(2, "0");

function zone() {
  const minutes = -new Date().getTimezoneOffset(), size = Math.abs(minutes);
  return minutes ? `UTC${minutes < 0 ? "-" : "+"}${two(Math.floor(size / 60))}:${two(size % 60)}` : "UTC";
}

function clock(unixS, seconds = true) {
  const at = new Date(unixS * 1000);
  return `${two(at.getHours())}:${two(at.getMinutes())}${seconds ? `:${two(at.getSeconds())}` : ""}`;
}

function day(unixS) {
  const at = new Date(unixS * 1000);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

function span(seconds) {
  const s = Math.max(0, seconds);
  if (s && s < 0.1) return `${Math.max(1, Math.round(1000 * s))} ms`;
  if (s < 10) return `${Number(s.toFixed(1))} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Number((s / 3600).toFixed(1))} h`;
  return `${Number((s / 86400).toFixed(1))} days`;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"], power = bytes ? Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3)) : 0;
  return `${(bytes / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

const few = (number) => (number >= 100 ? String(Math.round(number)) : String(Number(number.toPrecision(2))));
const known = (value) => value !== null && value !== undefined;
const rate = (perSecond) => (known(perSecond) ? few(perSecond) : "–");

// --- First glance

function draw(shown) {
  state.shown = shown;
  const verdict = shown.verdict, step = shown.furthest.step, look = looks[verdict.state] || "look";
  document.title = `${verdict.state} · ${shown.job || "holdfast"}`;
  $("state").textContent = verdict.state;
  document.querySelector("header").className = look;
  const began = shown.began_unix_s ? `since ${day(shown.began_unix_s)} ${clock(shown.began_unix_s)} ${zone()}, ${span(shown.unix_s - shown.began_unix_s)}` : shown.up_s ? `up ${span(shown.up_s)}` : "";
  const attempt = shown.attempt ? `attempt ${shown.attempt}` : "", count = shown.num_processes ? `${shown.num_processes} ${shown.num_processes === 1 ? "process" : "processes"}` : "";
  $("job").textContent = [shown.job, attempt, count, began].filter(Boolean).join(" · ");
  $("command").textContent = shown.command ? `${shown.command}   in ${shown.folder}` : "";
  $("command").hidden = !shown.command;
  say(shown.gone && verdict.state === "Out of reach" ? shown.gone : "");
  drawFigures(shown, step);
  drawFindings(shown, look);
  drawProcesses(shown);
  if (live && state.range !== null) askRange(state.range);
  drawTime(shown);
  drawAttempts(shown.attempts);
  drawGoodput(shown);
  drawRoot(shown);
  drawBarriers(shown.barriers);
  drawEvents(shown.events);
  if (state.open !== null) drawProcess();
}

function say(text) {
  $("gone").textContent = text;
  $("gone").hidden = !text;
}

function figure(name, value, more) {
  const made = element("div"), shown = element("dd", value);
  if (more) shown.append(element("span", more, "more"));
  made.append(element("dt", name), shown);
  return made;
}

function drawFigures(shown, step) {
  const pace = shown.furthest.steps_per_second, last = shown.last_save, at = last.saved_unix_s;
  const seconds = Object.values(shown.goodput_s).reduce((sum, each) => sum + each, 0), share = (shown.goodput_s.stepping_s || 0) / seconds;
  const over = shown.verdict.over;
  replaceAll("figures", [
    figure("step", step >= 0 ? String(step) : "none yet", step >= 0 ? "" : "no process has reported one"),
    figure("steps per second", step >= 0 ? rate(pace) : "–", over ? "it is over" : shown.gone ? "not known now" : ""),
    at
      ? figure("last save", over ? clock(at) : `${span(shown.unix_s - at)} ago`, `step ${last.step}` + (last.took_s ? `, took ${span(last.took_s)}` : ""))
      : figure("last save", last.step >= 0 ? `step ${last.step}` : "none yet", last.step >= 0 ? "before this run" : "no step is saved"),
    seconds && hasSteps(shown.goodput_s) ? figure("goodput", `${Math.round(100 * share)} %`, `of ${span(seconds)}`) : figure("goodput", "–", seconds ? "no step is timed yet" : "known to the launcher alone"),
  ]);
}

function hasSteps(seconds) {
  return ["stepping_s", "redoing_s", "hung_s"].some((part) => seconds[part]);
}

function drawFindings(shown, look) {
  const found = shown.findings.map((finding) => finding.text), verdict = shown.verdict;
  const texts = found.includes(verdict.text) || !verdict.text ? found : [verdict.text, ...found];
  const signature = [look, verdict.advice, ...texts].join("\n").replace(/\d+ s\b/g, "");
  // A screen reader reads what is new, and not that another second has passed.
  $("findings").parentElement.setAttribute("aria-live", signature === state.signature ? "off" : "polite");
  state.signature = signature;
  const kind = { good: "good", over: "good", look: "look", bad: "bad" }[look] || "";
  replaceAll("findings", texts.map((text, number) => element("li", text, number && kind === "good" ? "" : kind)));
  replaceAll("advice", verdict.advice.split("`").map((text, number) => element(number % 2 ? "code" : "span", text)));
  $("advice").hidden = !verdict.advice;
}

// --- Processes

function word(kind) {
  if (kind === "left" && state.shown.verdict.over) return "has ended";
  return kind === "ok" && state.shown.furthest.step < 0 ? "has joined" : words[kind];
}

function drawProcesses(shown) {
  const present = Object.keys(words).filter((kind) => shown.kinds[kind]), ranged = shown.ranges.length > 0;
  replaceAll("legend", present.length ? present.map((kind) => {
    const entry = element("span", undefined, "entry");
    entry.append(element("span", "", `key ${kind}`), `${word(kind)} (${shown.kinds[kind]})`);
    return entry;
  }).concat(ranged && shown.processes.length ? [element("span", "listed: the first that are not as most are")] : []) : [document.createTextNode("The processes stand here once the coordinator is there: step, rate, waiting, memory, host.")]);
  drawRanges(shown.ranges);
  if (!ranged) closeRange();
  state.rows = new Map([...state.members, ...shown.processes].map((process) => [process.id, process]));
  const asRows = ranged || shown.processes.length <= MOST_ROWS;
  drawRows(asRows ? shown.processes : []);
  drawGrid(ranged ? state.members : asRows ? [] : shown.processes);
}

function drawRows(processes) {
  $("rows").hidden = !processes.length;
  const list = $("row-list");
  while (list.children.length > processes.length) list.lastChild.remove();
  while (list.children.length < processes.length) list.append(element("tr"));
  processes.forEach((process, number) => fillRow(list.children[number], process));
}

function groupOf(process) {
  const host = process.host || "no host yet";
  return known(process.slice) ? `slice ${process.slice}, ${host}` : host;
}

function drawGrid(processes) {
  const byHost = processes.map(groupOf), many = new Set(byHost).size > MOST_GROUPS;
  const names = many ? processes.map((process) => (known(process.slice) ? `slice ${process.slice}` : "")) : byHost;
  const groups = new Set(names), grouped = groups.size > 1 && groups.size <= MOST_GROUPS && processes.length > groups.size;
  const layout = JSON.stringify([processes.map((process) => process.id), grouped ? names : []]);
  if (layout !== state.layout) layOut(processes, grouped ? names : null);
  state.layout = layout;
  processes.forEach((process, number) => fillCell(state.cells[number], process));
}

function layOut(processes, names) {
  $("grid").hidden = !processes.length;
  state.cells = processes.map((process, number) => {
    const cell = element("button");
    cell.dataset.process = process.id;
    cell.dataset.number = number;
    return Object.assign(cell, { type: "button", tabIndex: number ? -1 : 0 });
  });
  if (!names) {
    replaceAll("grid", state.cells);
    return;
  }
  const groups = new Map(names.map((name) => [name, []]));
  names.forEach((name, number) => groups.get(name).push(state.cells[number]));
  replaceAll("grid", [...groups].flatMap(([name, its]) => [element("h3", `${name} (${its.length})`), ...its]));
}

// --- Of a large job: ranges of processes, which open at a click

function rangeName(range) {
  return `processes ${range.first} to ${range.last}, ${range.hosts.filter(Boolean).join(" to ") || "no host yet"}`;
}

function drawRanges(ranges) {
  const signature = JSON.stringify([ranges, state.range]);
  if ($("ranges").dataset.signature === signature) return;
  $("ranges").dataset.signature = signature;
  const focused = $("ranges").contains(document.activeElement) ? document.activeElement.dataset.range : undefined;
  $("ranges").hidden = !ranges.length;
  const slices = new Map();
  ranges.forEach((range, number) => {
    const name = known(range.slice) ? `slice ${range.slice}` : "all processes";
    if (!slices.has(name)) slices.set(name, element("div", undefined, "tiles"));
    slices.get(name).append(tile(range, number));
  });
  replaceAll("ranges", [...slices].flatMap(([name, tiles]) => [element("h3", `${name}, in ranges: a click opens one`), tiles]));
  if (focused !== undefined) $("ranges").querySelector(`[data-range="${focused}"]`)?.focus();
}

function tile(range, number) {
  const made = element("button", `${range.first}–${range.last}`, `tile ${range.is}`);
  const counts = Object.entries(range.kinds).map(([kind, count]) => `${count} ${word(kind)}`).join(", ");
  const steps = range.steps.length ? `, steps ${range.steps.join(" to ")}` : "";
  made.type = "button";
  made.dataset.range = number;
  made.title = `${rangeName(range)}: ${counts}${steps}`;
  made.setAttribute("aria-label", made.title);
  made.setAttribute("aria-expanded", String(state.range === number));
  return made;
}

function closeRange() {
  state.range = null;
  state.members = [];
  $("range-title").hidden = true;
}

async function askRange(number) {
  const text = await askFor(`range/${number}`);
  if (state.range !== number || !text.startsWith("[")) return;
  state.members = JSON.parse(text);
  drawProcesses(state.shown);
}

function toggleRange(number) {
  const opens = state.range !== number, range = state.shown.ranges[number];
  closeRange();
  if (opens) {
    state.range = number;
    $("range-title").hidden = false;
    $("range-title").textContent = live ? rangeName(range) : `${rangeName(range)}: status.json beside this report has each of them`;
    if (live) askRange(number);
  }
  drawProcesses(state.shown);
}

function fillCell(cell, process) {
  const kind = process.is;
  const label = `process ${process.id}, ${process.state === "SILENT" ? "silent" : word(kind)}, host ${process.host || "unknown"}` + (process.step === null ? "" : `, step ${process.step}`);
  if (cell.dataset.label === label) return;
  cell.dataset.label = label;
  cell.className = `cell ${kind}`;
  cell.setAttribute("aria-label", label);
  cell.title = label;
}

function fillRow(row, process) {
  const kind = process.is, reported = process.step !== null;
  const status = { SILENT: "silent", ERROR: "failed" }[process.state] || (kind === "culprit" ? "named above" : word(kind));
  const texts = [
    ["number", reported ? String(process.step) : "–"], ["number", reported ? rate(process.steps_per_second) : "–"],
    ["number folds", known(process.waiting) ? `${Math.round(100 * process.waiting)} %` : "–"],
    ["number folds", known(process.memory_bytes) ? `${(process.memory_bytes / 2 ** 30).toFixed(2)} GiB` : "–"], ["note", groupOf(process)],
  ];
  const label = [process.id, kind, status, ...texts.map(([, text]) => text)].join("|");
  if (row.dataset.label === label) return;
  const had = row.contains(document.activeElement);
  row.dataset.label = label;
  row.className = state.open === process.id ? "open" : "";
  const opener = element("button", String(process.id), "open-one");
  opener.type = "button";
  opener.setAttribute("aria-label", `process ${process.id}`);
  opener.dataset.process = process.id;
  opener.setAttribute("aria-pressed", String(state.open === process.id));
  const first = element("td"), is = element("td");
  first.append(opener);
  is.append(element("span", "", `key ${kind}`), status);
  row.replaceChildren(first, is, ...texts.map(([name, text]) => element("td", text, name)));
  if (had) opener.focus();
}

function openProcess(id) {
  mark(false);
  state.open = id;
  mark(true);
  $("process").hidden = false;
  $("stacks").hidden = true;
  $("log").hidden = true;
  $("ask-row").hidden = !live;
  replaceAll("history", []);
  drawProcess();
}

function mark(pressed) {
  for (const button of document.querySelectorAll(`[data-process="${state.open}"]`)) {
    button.setAttribute("aria-pressed", String(pressed));
    button.closest("tr")?.classList.toggle("open", pressed);
  }
}

function drawProcess() {
  const process = state.rows.get(state.open);
  if (!process) return;
  $("process-title").textContent = `Process ${process.id}`;
  const tell = (value, text) => (known(value) ? text(value) : "not reported");
  const facts = {
    host: `${process.host || "unknown"}, pid ${process.pid || "unknown"}`,
    "last heard": !known(process.heard_s) ? "not known now" : process.heard_s < 0 ? "never" : `${span(process.heard_s)} ago, expected every ${span(process.expected_s)}`,
    step: tell(process.step, (step) => (known(process.steps_per_second) ? `${step}, ${few(process.steps_per_second)} steps/s` : `${step}`)),
    saved: tell(process.saved_step, (step) => `step ${step}`),
    "blocked by saves": tell(process.blocked_s, (seconds) => span(seconds)),
    "saves waited for steps": tell(process.waited_s, (seconds) => span(seconds)),
    compiled: tell(process.compiled, (programs) => `${programs} programs, and ${process.loaded} loaded, in ${span(process.compile_s)}`),
    waiting: tell(process.waiting, (share) => `${Math.round(share * 100)} % of its time, for the others`),
    memory: tell(process.memory_bytes, (bytes) => `${(bytes / 2 ** 30).toFixed(2)} GiB`),
  };
  if (known(process.checkpoint_peak_bytes)) {
    const peak = `${(process.checkpoint_peak_bytes / 2 ** 30).toFixed(2)} GiB`;
    facts["saves and restores"] = `held ${peak} of memory at most`;
  }
  if (process.note) facts.said = process.note;
  replaceAll("facts", Object.entries(facts).flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
  if (live) drawHistory(process);
}

const ask = (question) => askFor(`${question}/${state.open}`);

async function askFor(path) {
  try {
    return await (await fetch(path)).text();
  } catch (error) {
    return `no answer: ${error}`;
  }
}

async function drawHistory(process) {
  const number = state.open, text = await ask("history");
  if (state.open !== number || !text.startsWith("[")) return;
  const points = JSON.parse(text);
  const charts = [["steps/s", 1, few], ["memory, GiB", 2, (value) => (value / 2 ** 30).toFixed(2)], ["waiting, %", 3, (value) => String(Math.round(100 * value))]];
  replaceAll("history", charts.map(([name, at, words]) => spark(name, points.filter((point) => point[at] >= 0).map((point) => [point[0], point[at]]), words)));
}

function spark(name, points, words) {
  const made = element("figure"), most = Math.max(1e-9, ...points.map((point) => point[1]));
  if (!points.length) {
    made.append(element("figcaption", `${name}: not reported`));
    return made;
  }
  const first = points[0][0], length = Math.max(1, points.at(-1)[0] - first);
  const line = points.map(([at, value]) => `${((300 * (at - first)) / length).toFixed(1)},${(44 - (40 * value) / most).toFixed(1)}`).join(" ");
  const chart = svg("svg", { class: "spark", viewBox: "0 0 300 48", preserveAspectRatio: "none", role: "img", "aria-label": `${name} over the last ${span(length)}` });
  chart.append(svg("polyline", { class: "steps", points: line, "vector-effect": "non-scaling-stroke" }));
  made.append(element("figcaption", `${name}: ${words(points.at(-1)[1])}, at most ${words(most)} in ${span(length)}`), chart);
  return made;
}

async function showStacks() {
  const number = state.open;
  $("stacks").hidden = false;
  replaceAll("stacks", [element("p", "asking ...", "soft")]);
  const text = await ask("stacks");
  if (state.open !== number) return;
  const [own, count, others] = text.split(/^(\(\d+ more threads?, of holdfast and the runtime\))$/m);
  const shown = element("pre", own.trimEnd());
  shown.tabIndex = 0;
  shown.setAttribute("aria-label", "Stacks of the program's threads");
  const parts = [shown];
  if (count) {
    const folded = element("details"), rest = element("pre", others.trim());
    rest.tabIndex = 0;
    folded.append(element("summary", count.slice(1, -1)), rest);
    parts.push(folded);
  }
  replaceAll("stacks", parts);
}

async function showLog() {
  const number = state.open;
  $("log").hidden = false;
  $("log").textContent = "asking ...";
  const text = await ask("log");
  if (state.open !== number) return;
  $("log").textContent = text || "this process has written nothing";
  $("log").scrollTop = $("log").scrollHeight;
}

// --- Time

function ticks(least, most, wanted) {
  const raw = Math.max(1e-9, most - least) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const distance = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw));
  const found = [];
  for (let at = Math.ceil(least / distance) * distance; at <= most; at += distance) found.push(at);
  return found;
}

function timeTicks(first, last, wanted) {
  const distances = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  const distance = distances.find((each) => (last - first) / each <= wanted) || 2592000;
  const shift = new Date(first * 1000).getTimezoneOffset() * 60, found = [];
  for (let at = Math.ceil((first - shift) / distance) * distance + shift; at <= last; at += distance) found.push(at);
  return [found, distance];
}

function breaksOf(events) {
  return events.filter((event) => /^attempt \d+ is (restarting|rejoining|preempting|running)/.test(event.text)).map((event) => event.unix_s);
}

function partsOf(samples, breaks) {
  const parts = [];
  let last = null;
  for (const each of samples) {
    const broken = last && (each[1] < last[1] || breaks.some((at) => at > last[0] && at <= each[0]));
    if (!last || broken) parts.push([]);
    parts.at(-1).push(each);
    last = each;
  }
  return parts;
}

function stallsOf(part) {
  const changes = [];
  let since = part[0];
  for (const each of part) {
    if (each[1] === since[1]) continue;
    changes.push([since[0], each[0], since[1], (each[0] - since[0]) / (each[1] - since[1])]);
    since = each;
  }
  const usual = changes.map((each) => each[3]).sort((a, b) => a - b)[Math.floor(changes.length / 2)] || 0;
  changes.push([since[0], part.at(-1)[0], since[1], 0]);
  return changes.filter(([from, to]) => to - from > Math.max(8, 4 * usual));
}

function drawTime(shown) {
  const chart = $("timeline");
  const samples = shown.samples.filter((each) => each[1] >= 0), events = [...shown.events].sort((a, b) => a.unix_s - b.unix_s);
  $("time-legend").hidden = !samples.length;
  chart.toggleAttribute("hidden", !samples.length);
  if (!samples.length) {
    $("readout").textContent = "The steps stand here once a process reports one: with saves, stalls and restarts.";
    state.at = null;
    return;
  }
  const width = Math.max(280, chart.clientWidth || 1000), height = chart.clientHeight || 240;
  const left = 52, right = width - 10, top = 10, bottom = height - 26;
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const times = [...samples.map((each) => each[0]), ...events.map((event) => event.unix_s), ...shown.saves.map((each) => each[0])];
  const first = times.reduce((a, b) => Math.min(a, b)), last = Math.max(first + 1, shown.verdict.over ? times.reduce((a, b) => Math.max(a, b)) : shown.unix_s);
  const most = Math.max(1, ...samples.map((each) => each[1])), least = Math.min(most - 1, ...samples.map((each) => each[1]));
  const bottomStep = least < most / 3 ? 0 : least;
  const x = (at) => left + ((right - left) * (at - first)) / (last - first), y = (step) => bottom - ((bottom - top) * (step - bottomStep)) / (most - bottomStep);
  const drawn = [];
  for (const step of ticks(bottomStep, most, 4)) {
    const label = svg("text", { x: left - 8, y: y(step) + 4, "text-anchor": "end" });
    label.textContent = String(step);
    drawn.push(svg("line", { class: "axis", x1: left, x2: right, y1: y(step), y2: y(step) }), label);
  }
  const [instants, distance] = timeTicks(first, last, width / 110);
  for (const at of instants) {
    const label = svg("text", { x: Math.min(x(at), right - 24), y: height - 6, "text-anchor": "middle" });
    label.textContent = distance >= 86400 ? day(at).slice(5) : clock(at, distance < 60);
    drawn.push(svg("line", { class: "axis", x1: x(at), x2: x(at), y1: bottom, y2: bottom + 5 }), label);
  }
  const parts = partsOf(samples, breaksOf(events));
  if (!shown.verdict.over && !shown.gone) parts.at(-1).push([shown.unix_s, samples.at(-1)[1], 0, 0]);
  for (const [from, to, step] of parts.flatMap(stallsOf)) {
    drawn.push(svg("rect", { class: "stall", x: x(from), width: Math.max(2, x(to) - x(from)), y: top, height: bottom - top }, `no step for ${span(to - from)} after step ${step}, from ${clock(from)}`));
  }
  for (const event of events) {
    const kind = event.kind === "lost" || event.kind === "trouble" ? "lost" : /^attempt \d+ is (restarting|rejoining)/.test(event.text) ? "restart" : "";
    if (kind) drawn.push(svg("line", { class: kind, x1: x(event.unix_s), x2: x(event.unix_s), y1: top, y2: bottom }, `${clock(event.unix_s)}: ${event.text}`));
  }
  for (const [at, saved] of shown.saves) drawn.push(svg("line", { class: "save", x1: x(at), x2: x(at), y1: bottom - 14, y2: bottom }, `${clock(at)}: step ${saved} is saved`));
  for (const step of shown.root ? shown.root.steps : []) {
    if (step.took_s && step.saved_unix_s >= first) drawn.push(svg("rect", { class: "took", x: x(step.saved_unix_s - step.took_s), width: Math.max(2, x(step.saved_unix_s) - x(step.saved_unix_s - step.took_s)), y: bottom - 14, height: 14 }, `step ${step.step} saved in ${span(step.took_s)}, at ${clock(step.saved_unix_s)}`));
  }
  for (const part of parts) drawn.push(svg("polyline", { class: "steps", points: part.map((each) => `${x(each[0]).toFixed(1)},${y(each[1]).toFixed(1)}`).join(" ") }));
  replaceAll("timeline", drawn);
  const key = (name, text) => {
    const entry = element("span", undefined, "entry");
    entry.append(element("span", "", `key ${name}`), text);
    return entry;
  };
  replaceAll("time-legend", [key("line", "step (of the furthest process)"), key("saved", "save"), key("stalled", "no step for long"), key("again", "restart"), key("dead", "loss or trouble"), element("span", `times are ${zone()}`)]);
  if (!state.at) $("readout").textContent = "Point at the chart to read it.";
  state.at = { samples, left, right, first, last };
}

function readOut(event) {
  if (!state.at) return;
  const { samples, left, right, first, last } = state.at, box = $("timeline").getBoundingClientRect();
  const at = first + ((event.clientX - box.left - left) / (right - left)) * (last - first);
  const nearest = samples.reduce((best, each) => (Math.abs(each[0] - at) < Math.abs(best[0] - at) ? each : best));
  $("readout").textContent = `${day(nearest[0])} ${clock(nearest[0])}: step ${nearest[1]}, ${few(Math.max(0, nearest[2]))} steps/s` + (nearest[3] >= 0 ? `, step ${nearest[3]} saved` : "");
}

function drawAttempts(attempts) {
  $("attempts-part").hidden = attempts.length < 2;
  replaceAll("attempts", [...attempts].reverse().map((attempt) => {
    const row = element("tr");
    row.append(element("td", attempt.number, "number"), element("td", `${day(attempt.began_unix_s)} ${clock(attempt.began_unix_s)}`),
      element("td", attempt.processes, "note"), element("td", attempt.why, "note"));
    return row;
  }));
}

function drawGoodput(shown) {
  const seconds = shown.goodput_s, total = Object.values(seconds).reduce((sum, each) => sum + each, 0);
  $("parts").toggleAttribute("hidden", !total);
  if (!total) {
    $("share").textContent = "The launcher says here where each second went: steps, starting, saves, waiting, hangs.";
    replaceAll("part-list", []);
    return;
  }
  let x = 0;
  const bars = [], list = [];
  for (const [part, text] of Object.entries(shown.goodput_parts)) {
    const length = seconds[part] || 0;
    if (!length) continue;
    bars.push(svg("rect", { class: part, x: (1000 * x) / total, width: (1000 * length) / total, y: 0, height: 14 }, `${text}: ${span(length)}`));
    const item = element("li");
    item.append(element("span", "", `key ${part}`), `${text} ${span(length)} (${Math.round((100 * length) / total)} %)`);
    list.push(item);
    x += length;
  }
  replaceAll("parts", bars);
  const share = Math.round((100 * (seconds.stepping_s || 0)) / total);
  $("share").textContent = hasSteps(seconds) ? `${share} % of ${span(total)} made new steps` : `No two reports of steps came in ${span(total)}: the goodput is not known.`;
  replaceAll("part-list", list);
}

// --- Tables and the history

function bestOf(steps) {
  const best = new Map();
  for (const step of steps) {
    for (const [name, value] of Object.entries(step.metrics)) {
      const [least, most] = best.get(name) || [value, value];
      best.set(name, [Math.min(least, value), Math.max(most, value)]);
    }
  }
  return best;
}

function drawRoot(shown) {
  const root = shown.root;
  $("root").hidden = !root || !root.steps.length;
  $("root-summary").textContent = root ? `${root.path}: ${root.num_steps} ${root.num_steps === 1 ? "step" : "steps"}${root.num_steps > root.steps.length ? `, the newest ${root.steps.length} here` : ""}` : "The steps stand here once a CheckpointManager is open: when, how long, how large, where, and whether they are whole.";
  if (!root) return;
  const best = bestOf(root.steps), judged = new Set(root.steps.flatMap((step) => step.best));
  replaceAll("steps", [...root.steps].reverse().map((step) => {
    const row = element("tr", undefined, step.damaged ? "bad" : "");
    const where = step.local ? `hosts only: survives the loss of ${step.survives} ${step.survives === 1 ? "host" : "hosts"}` : "root";
    const metrics = element("td", undefined, "note");
    for (const [name, value] of Object.entries(step.metrics)) {
      const [least, most] = best.get(name);
      let extreme = least === most ? "" : value === least ? " (lowest)" : value === most ? " (highest)" : "";
      if (judged.has(name)) extreme = step.best.includes(name) ? " (best)" : "";
      metrics.append(element("span", `${name} ${Number(value.toPrecision(5))}${extreme}`, extreme ? "entry best" : "entry"));
    }
    if (!metrics.childNodes.length) metrics.textContent = "–";
    const whole = step.incremental ? "whole, incremental" : "whole";
    const is = step.damaged ? "damaged: a restore has passed it over" : step.left_behind ? `${whole}; left behind: the job went back to an older step` : whole;
    row.append(element("td", step.step, "number"), element("td", step.saved_unix_s ? `${day(step.saved_unix_s)} ${clock(step.saved_unix_s)}` : step.local ? "–" : "before this run"),
      element("td", step.took_s ? span(step.took_s) : "–", "number"), element("td", step.bytes ? size(step.bytes) : "–", "number"), metrics, element("td", where, "note"), element("td", is, "note"));
    return row;
  }));
}

function drawBarriers(barriers) {
  $("no-barriers").hidden = barriers.length > 0;
  $("barrier-table").hidden = !barriers.length;
  replaceAll("barriers", barriers.map((barrier) => {
    const row = element("tr");
    const more = barrier.num_missing > barrier.missing.length ? ` and ${barrier.num_missing - barrier.missing.length} more` : "";
    row.append(element("td", barrier.name, "note"), element("td", barrier.waiting, "number"), element("td", span(barrier.waited_s), "number"),
      element("td", barrier.missing.join(", ") + more, "note"));
    return row;
  }));
}

function drawEvents(events) {
  const sorted = [...events].reverse(); // they come in order, several of one tenth of a second too
  const newest = sorted.length ? `${sorted.length} ${sorted[0].text}` : "";
  $("no-events").hidden = sorted.length > 0;
  $("events").hidden = !sorted.length;
  if ($("events").dataset.newest === newest) return;
  $("events").dataset.newest = newest;
  replaceAll("events", sorted.map((event) => {
    const item = element("li"), when = element("time", `${day(event.unix_s)} ${clock(event.unix_s)}`);
    when.dateTime = new Date(event.unix_s * 1000).toISOString();
    item.append(when, element("span", event.text));
    return item;
  }));
}

// --- Hands

function onOpen(event) {
  const id = event.target.dataset.process;
  if (id !== undefined) openProcess(Number(id));
}

$("grid").addEventListener("click", onOpen);
$("rows").addEventListener("click", onOpen);
$("ranges").addEventListener("click", (event) => {
  if (event.target.dataset.range !== undefined) toggleRange(Number(event.target.dataset.range));
});

$("grid").addEventListener("keydown", (event) => {
  const number = Number(event.target.dataset.number);
  const perRow = Math.max(1, state.cells.findIndex((cell) => cell.offsetTop > state.cells[0].offsetTop));
  const to = { ArrowRight: number + 1, ArrowLeft: number - 1, ArrowDown: number + perRow, ArrowUp: number - perRow, Home: 0, End: state.cells.length - 1 }[event.key];
  if (to === undefined || !state.cells[to]) return;
  event.preventDefault();
  state.cells[number].tabIndex = -1;
  state.cells[to].tabIndex = 0;
  state.cells[to].focus();
});

$("ask").addEventListener("click", showStacks);
$("ask-log").addEventListener("click", showLog);
$("timeline").addEventListener("pointermove", readOut);
window.addEventListener("resize", () => state.shown && drawTime(state.shown));

if (live) {
  const source = new EventSource("events"); // comes back by itself
  source.onmessage = (event) => draw(JSON.parse(event.data));
  source.onerror = () => {
    if (!state.shown || !state.shown.verdict.over) say("The page's server does not answer; trying again. Is `holdfast web` still running?");
  };
} else {
  draw(JSON.parse($("data").textContent));
}

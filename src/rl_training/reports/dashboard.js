"use strict";
// One page: the list of runs on the left, what is selected on the right. The server is asked for news every second.
const NAMES = {
  "eval/mean_reward": "evaluation return", "rollout/ep_rew_mean": "training return", "time/fps": "steps per second",
  "time/cpu_cores": "CPU cores in use", "time/memory_gib": "memory, GiB", "time/gpu_memory_gib": "GPU memory, GiB",
};
const PLOTS = ["eval/mean_reward", "rollout/ep_rew_mean", "train/loss", "time/fps"];
const COLUMNS = [["run", "Run"], ["score", "Return"], ["progress", "Progress"], ["speed", "Steps/s"]];
const TABS = ["Curves", "Settings", "Media", "Files"];
const COLOURS = 8, SHOWN = 300, SVG = "http://www.w3.org/2000/svg";
const state = {
  runs: [], chosen: new Map(), curves: new Map(), stamps: new Map(), details: new Map(), plots: [...PLOTS], tab: "Curves",
  axis: "steps", group: true, smooth: 0, sort: ["start", -1], at: 0, first: true,
};
const $ = (id) => document.getElementById(id);
const make = (tag, props = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
};
const draw = (tag, attributes, ...children) => {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
const short = (v) => {
  const a = Math.abs(v);
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (a >= limit * 0.9999) return +(v / limit).toPrecision(3) + letter;
  return String(+(a < 1e-12 ? 0 : v).toPrecision(3));
};
const number = (v) => { const a = Math.abs(v); return a >= 1000 ? Math.round(v).toLocaleString("en") : v.toFixed(a >= 10 ? 1 : a >= 0.1 ? 2 : 4); };
const duration = (s) => s < 100 ? `${Math.round(s)} s` : s < 6000 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
const get = async (path) => {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
};
const runQuery = (keys) => keys.map((key) => `run=${key}`).join("&");

// --- news ------------------------------------------------------------------------------------------------------------

async function refresh() {
  try {
    const { runs, root } = await get("api/runs");
    state.runs = runs;
    document.title = `Runs in ${root}`;
    $("live").dataset.state = "on";
    if (state.first) { runs.slice(0, 4).forEach((run) => choose(run.id, true)); state.first = false; }
    for (const id of [...state.chosen.keys()]) if (!runs.some((run) => run.id === id)) state.chosen.delete(id);
    showRows();
    await load();
  } catch (error) {
    $("live").dataset.state = "off";
    $("count").textContent = "The dashboard does not answer. Start it again and open the address it prints.";
  }
  document.documentElement.dataset.ready = "yes";
  setTimeout(refresh, 1000);
}

async function load() {
  const stale = state.runs.filter((run) => state.chosen.has(run.id) && state.stamps.get(run.id) !== run.stamp + state.plots.join());
  if (!stale.length && !state.dirty) return;
  if (stale.length) {
    const keys = stale.map((run) => run.id);
    const found = await get(`api/curves?${runQuery(keys)}&${state.plots.map((name) => `metric=${encodeURIComponent(name)}`).join("&")}`);
    for (const entry of found) state.curves.set(entry.id, entry);
    for (const run of stale) { state.stamps.set(run.id, run.stamp + state.plots.join()); state.details.delete(run.id); }
  }
  state.dirty = false;
  await showPanel();
}

const update = () => { state.dirty = true; return load().then(showRows); };

function choose(id, on) {
  if (!on) state.chosen.delete(id);
  else if (!state.chosen.has(id)) {
    const used = new Set(state.chosen.values());
    let colour = 0;
    while (used.has(colour)) colour++;
    state.chosen.set(id, colour);
  }
  state.dirty = true;
}

// The colour of a run; runs of a group have the colour of the first one that was selected.
function colour(run) {
  const first = state.group ? [...state.chosen.keys()].find((id) => state.runs.find((other) => other.id === id)?.group === run.group) : run.id;
  return state.chosen.get(first) ?? 0;
}

// --- the list --------------------------------------------------------------------------------------------------------

function visible() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (run) => `${run.name} ${run.algo} ${run.env} ${run.status}`.toLowerCase();
  const [key, sign] = state.sort;
  const value = (run) => key === "progress" ? run.step / (run.total || 1) : key === "run" ? run.name : key === "start" ? run.start || "" : run[key] ?? -Infinity;
  const order = (a, b) => value(a) < value(b) ? -sign : value(a) > value(b) ? sign : 0;
  return state.runs.filter((run) => words.every((word) => text(run).includes(word))).sort(order);
}

function showRows() {
  const runs = visible(), shown = runs.slice(0, SHOWN);
  const running = state.runs.filter((run) => run.status === "running").length;
  $("count").textContent = `${state.runs.length} ${state.runs.length === 1 ? "run" : "runs"}, ${running} running, ${state.chosen.size} selected`;
  $("more").textContent = runs.length > SHOWN ? `${runs.length - SHOWN} more runs match; filter to see them.` : "";
  state.at = Math.min(state.at, Math.max(shown.length - 1, 0));
  $("rows").replaceChildren(...shown.map((run, index) => {
    const on = state.chosen.has(run.id), row = make("tr", { className: `s${colour(run) % COLOURS}` });
    row.setAttribute("aria-selected", on);
    row.dataset.id = run.id;
    if (index === state.at) row.classList.add("at");
    const status = make("span", { className: "status", textContent: run.silent ? `${run.status}, silent for ${duration(run.silent)}` : run.status });
    status.dataset.status = run.status;
    const seeds = run.seeds.length === 1 ? `seed ${run.seeds[0]}` : `${run.seeds.length} seeds`;
    const name = make("td", { className: "run", title: run.name }, make("b", {}, make("span", { className: "swatch" }), `${run.algo} · ${run.env}`), make("small", { textContent: `${seeds} · ` }), status, make("small", { textContent: run.status === "running" ? useText(run.use) : "" }));
    const part = run.total ? Math.min(1, run.step / run.total) : 0;
    const meter = make("span", { className: "meter" }, make("i"));
    meter.firstChild.style.width = `${100 * part}%`;
    const progress = make("td", {}, run.eta != null ? `${duration(run.eta)} left` : short(run.step), meter);
    row.append(name, make("td", { textContent: run.score == null ? "–" : number(run.score) }), progress, make("td", { textContent: run.speed ? short(run.speed) : "–" }));
    row.addEventListener("click", () => { state.at = index; choose(run.id, !state.chosen.has(run.id)); update(); });
    return row;
  }));
}

// What a run takes of the machine: " · 1.9 cores, 0.6 GiB".
function useText([cores, memory, gpu]) {
  const parts = [[cores, "cores"], [memory, "GiB"], [gpu, "GiB of the GPU"]].filter(([value]) => typeof value === "number");
  return parts.length ? ` · ${parts.map(([value, unit]) => `${value.toFixed(1)} ${unit}`).join(", ")}` : "";
}

$("head").append(...COLUMNS.map(([key, title]) => {
  const cell = make("th", { textContent: title, className: key === "run" ? "words" : "number", scope: "col" });
  cell.addEventListener("click", () => { state.sort = [key, state.sort[0] === key ? -state.sort[1] : key === "run" ? 1 : -1]; showRows(); });
  return cell;
}));
$("search").addEventListener("input", showRows);
$("none").addEventListener("click", () => { state.chosen.clear(); update(); });

// --- curves ----------------------------------------------------------------------------------------------------------

// What is drawn for a metric: one entry for each run, or for each group of runs that differ only in their seeds.
function entries(metric) {
  const found = new Map();
  for (const id of state.chosen.keys()) {
    const run = state.runs.find((other) => other.id === id), lines = state.curves.get(id)?.curves[metric] || [];
    if (!run || !lines.length) continue;
    const key = state.group ? run.group : id;
    if (!found.has(key)) found.set(key, { name: `${run.algo} · ${run.env}`, title: run.name, colour: colour(run), lines: [] });
    found.get(key).lines.push(...lines.map((line) => ({ x: line[state.axis], y: smoothed(line.values) })));
  }
  const all = [...found.values()], same = (entry) => all.filter((other) => other.name === entry.name).length > 1;
  return all.map((entry) => ({ ...entry, name: same(entry) ? entry.title : entry.name, ...pooled(entry.lines) }));
}

function smoothed(values) {
  if (!state.smooth) return values;
  let mean = values[0];
  return values.map((value) => (mean += (1 - state.smooth) * (value - mean)));
}

function at(line, x) {
  let low = 0, high = line.x.length - 1;
  if (x <= line.x[0]) return line.y[0];
  if (x >= line.x[high]) return line.y[high];
  while (high - low > 1) { const middle = (low + high) >> 1; if (line.x[middle] <= x) low = middle; else high = middle; }
  const share = (x - line.x[low]) / (line.x[high] - line.x[low] || 1);
  return line.y[low] + share * (line.y[high] - line.y[low]);
}

// The mean of the seeds where all of them have values; with five seeds or more also the band of their middle half.
function pooled(lines) {
  if (lines.length === 1) return { mean: lines[0], band: null };
  const first = Math.max(...lines.map((line) => line.x[0])), last = Math.min(...lines.map((line) => line.x[line.x.length - 1]));
  const longest = lines.reduce((a, b) => (a.x.length > b.x.length ? a : b));
  const xs = longest.x.filter((x) => x >= first && x <= last);
  if (!xs.length || xs[xs.length - 1] < last) xs.push(last);
  const columns = xs.map((x) => lines.map((line) => at(line, x)).sort((a, b) => a - b));
  const quantile = (sorted, q) => { const place = q * (sorted.length - 1), low = Math.floor(place); return sorted[low] + (place - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]); };
  const mean = { x: xs, y: columns.map((column) => column.reduce((a, b) => a + b) / column.length) };
  return { mean, band: lines.length >= 5 ? columns.map((column) => [quantile(column, 0.25), quantile(column, 0.75)]) : null };
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

const finite = (values) => values.filter(Number.isFinite);
const range = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);

function plot(metric) {
  const shown = entries(metric), width = 400, height = 250, left = 50, right = 390, top = 8, bottom = 216;
  if (!shown.length) return make("p", { className: "empty", textContent: "The selected runs have not logged this metric." });
  const every = shown.flatMap((entry) => [entry.mean, ...(entry.lines.length < 5 ? entry.lines : [])]);
  let [x0, x1] = range(every.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]));
  let [y0, y1] = range(finite([...every.flatMap((line) => line.y), ...shown.flatMap((entry) => (entry.band || []).flat())]));
  x0 = Math.min(0, x0);
  if (!(x1 > x0)) x1 = x0 + 1;
  const room = 0.05 * (y1 - y0) || 0.05 * Math.abs(y1) || 1;
  y0 -= room; y1 += room;
  const px = (x) => left + (x - x0) / (x1 - x0) * (right - left), py = (y) => bottom - (y - y0) / (y1 - y0) * (bottom - top);
  const points = (line) => line.x.map((x, i) => `${px(x).toFixed(1)},${py(line.y[i]).toFixed(1)}`).join(" ");
  const chart = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": metric });
  const label = (x, y, text, anchor, kind = "tick") => { const node = draw("text", { class: kind, x, y, "text-anchor": anchor }); node.textContent = text; return node; };
  const axis = state.axis === "steps" ? short : duration;
  for (const x of ticks(x0, x1, 5)) chart.append(draw("line", { class: "grid", x1: px(x), x2: px(x), y1: top, y2: bottom }), label(px(x), bottom + 14, axis(x), "middle"));
  for (const y of ticks(y0, y1, 5)) chart.append(draw("line", { class: "grid", x1: left, x2: right, y1: py(y), y2: py(y) }), label(left - 5, py(y) + 4, short(y), "end"));
  chart.append(draw("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }), label((left + right) / 2, height - 4, state.axis === "steps" ? "steps" : "training time", "middle", "label"));
  for (const entry of shown) {
    const group = draw("g", { class: `s${entry.colour % COLOURS}` });
    if (entry.band) group.append(draw("polygon", { class: "band", points: [...entry.mean.x.map((x, i) => `${px(x)},${py(entry.band[i][1])}`), ...entry.mean.x.map((x, i) => `${px(x)},${py(entry.band[i][0])}`).reverse()].join(" ") }));
    else if (entry.lines.length > 1) group.append(...entry.lines.map((line) => draw("polyline", { class: "seed", points: points(line) })));
    group.append(draw("polyline", { class: "line", points: points(entry.mean), "stroke-dasharray": ["", "6 3", "2 3", "8 3 2 3"][Math.floor(entry.colour / COLOURS) % 4] }));
    if (entry.mean.x.length === 1) group.append(draw("circle", { class: "mark", cx: px(entry.mean.x[0]), cy: py(entry.mean.y[0]), r: 4 }));
    chart.append(group);
  }
  const cross = draw("line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
  chart.append(cross);
  const hide = () => { $("tip").hidden = true; cross.setAttribute("visibility", "hidden"); };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect(), place = (event.clientX - box.left) * width / box.width;
    if (place < left || place > right) return hide();
    const x = x0 + (place - left) / (right - left) * (x1 - x0);
    cross.setAttribute("x1", place); cross.setAttribute("x2", place); cross.setAttribute("visibility", "visible");
    const rows = shown.filter((entry) => x >= entry.mean.x[0] && x <= entry.mean.x[entry.mean.x.length - 1]).map((entry) => make("div", { className: `s${entry.colour % COLOURS}` }, make("i"), make("span", { textContent: `${entry.name}: ${number(at(entry.mean, x))}` })));
    $("tip").replaceChildren(make("strong", { textContent: state.axis === "steps" ? Math.round(x).toLocaleString("en") : duration(x) }), ...rows);
    $("tip").hidden = false;
    const size = $("tip").getBoundingClientRect();
    $("tip").style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - size.width - 8))}px`;
    $("tip").style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - size.height - 8))}px`;
  });
  chart.addEventListener("pointerleave", hide);
  return chart;
}

function curvesPanel() {
  const metrics = [...new Set([...state.chosen.keys()].flatMap((id) => state.curves.get(id)?.metrics || []))].sort();
  const toggle = (text, on, change) => { const button = make("button", { type: "button", textContent: text }); button.setAttribute("aria-pressed", on); button.addEventListener("click", change); return button; };
  const smooth = make("select", {}, ...[["0", "no smoothing"], ["0.6", "some smoothing"], ["0.9", "much smoothing"]].map(([value, text]) => make("option", { value, textContent: text, selected: +value === state.smooth })));
  smooth.setAttribute("aria-label", "Smoothing");
  smooth.addEventListener("change", () => { state.smooth = +smooth.value; update(); });
  const legend = make("div", { className: "legend" }, ...entries(state.plots.find((name) => entries(name).length) || "").map((entry) => {
    const line = draw("svg", { viewBox: "0 0 24 8" }, draw("path", { class: "line", d: "M2 4h20" }));
    return make("button", { type: "button", className: `s${entry.colour % COLOURS}`, title: entry.title }, line, `${entry.name}${entry.lines.length > 1 ? ` (${entry.lines.length} seeds)` : ""}`);
  }));
  const figures = state.plots.map((metric, index) => {
    const select = make("select", {}, ...[...new Set([metric, ...metrics])].map((name) => make("option", { value: name, textContent: NAMES[name] || name, selected: name === metric })));
    select.setAttribute("aria-label", "Metric");
    select.addEventListener("change", () => { state.plots[index] = select.value; update(); });
    return make("figure", {}, make("h3", {}, select), plot(metric));
  });
  const bar = make("div", { className: "bar" }, toggle("By training time", state.axis === "seconds", flipAxis), toggle("Group seeds", state.group, flipGroup), smooth, link(`report?${runQuery([...state.chosen.keys()])}`, "Report"));
  return [bar, legend, make("div", { className: "plots" }, ...figures), make("p", { className: "note", textContent: "The line is the mean over seeds. With fewer than five seeds each one is a thin line; with five or more the band is their middle half." })];
}

const flipAxis = () => { state.axis = state.axis === "steps" ? "seconds" : "steps"; update(); };
const flipGroup = () => { state.group = !state.group; update(); };
const link = (href, text) => make("a", { href, textContent: text, target: "_blank", rel: "noopener" });

// --- settings, media, files ------------------------------------------------------------------------------------------

async function details() {
  const missing = [...state.chosen.keys()].filter((id) => !state.details.has(id));
  for (const entry of await Promise.all(missing.map((id) => get(`api/run?run=${id}`)))) state.details.set(entry.id, entry);
  return [...state.chosen.keys()].map((id) => [state.runs.find((run) => run.id === id), state.details.get(id)]);
}

const valueText = (value) => value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);

async function settingsPanel() {
  const found = await details(), keys = [...new Set(found.flatMap(([, detail]) => Object.keys(detail.settings)))];
  const differ = (key) => new Set(found.map(([, detail]) => valueText(detail.settings[key]))).size > 1;
  const rows = [...keys.filter(differ), ...keys.filter((key) => !differ(key))];
  const head = make("thead", {}, make("tr", {}, make("th", { textContent: "setting" }), ...found.map(([run]) => make("th", { textContent: run.name }))));
  const line = (key, values, bold) => make("tr", {}, make("th", { textContent: key, scope: "row" }), ...values.map((value) => make("td", { textContent: value, className: bold ? "differs" : "" })));
  const about = ["start", "end", "command", "versions", "host", "reason"].map((key) => line(key, found.map(([, detail]) => factText(detail.about[key]))));
  const body = make("tbody", {}, ...rows.map((key) => line(key, found.map(([, detail]) => valueText(detail.settings[key])), differ(key))), ...about);
  const note = make("p", { className: "note", textContent: found.length > 1 ? "Settings that differ between the selected runs come first, in bold." : "" });
  return [note, make("div", { className: "scroll", tabIndex: 0 }, make("table", { className: "settings" }, head, body))];
}

// A fact about a run as words: a command as it was typed, a list of versions.
const factText = (value) => Array.isArray(value) ? value.join(" ") : value && typeof value === "object" ? Object.entries(value).map(([key, part]) => `${key} ${valueText(part)}`).join(", ") : value == null ? "–" : String(value);
const path = (run, file) => `file/${run.id}/${file.path.split("/").map(encodeURIComponent).join("/")}`;

const media = make("div", { className: "media" }), figures = new Map();

// Figures that are shown already stay where they are, so that a video goes on playing when there is news.
async function mediaPanel() {
  const found = (await details()).flatMap(([run, detail]) => detail.files.filter((file) => file.kind !== "text").map((file) => [run, file]));
  found.sort(([, a], [, b]) => b.time - a.time);
  if (!found.length) return [make("p", { className: "empty", textContent: "The selected runs have no videos or pictures. With `eval_video: true` a run records each evaluation; `rl-training record --checkpoint RUN --output-dir RUN/videos` records a finished one." })];
  const shown = new Map(found.slice(0, 60).map(([run, file]) => [`${run.id}/${file.path}@${file.time}`, [run, file]]));
  for (const [key, node] of figures) if (!shown.has(key)) { node.remove(); figures.delete(key); }
  let next = media.firstChild;
  for (const [key, [run, file]] of shown) {
    if (!figures.has(key)) figures.set(key, figure(run, file));
    if (figures.get(key) === next) next = next.nextSibling;
    else media.insertBefore(figures.get(key), next);
  }
  return [media];
}

function figure(run, file) {
  const body = file.kind === "video" ? make("video", { src: path(run, file), controls: true, loop: true, muted: true, preload: "metadata", playsInline: true }) : make("img", { src: path(run, file), loading: "lazy", alt: file.path });
  const step = /^videos\/step_(\d+)\.mp4$/.exec(file.path), name = `${run.name}: ${file.path}`;
  const caption = step ? `${run.algo} · ${run.env} after ${(+step[1]).toLocaleString("en")} steps, seed ${run.seeds[0]}` : name;
  return make("figure", { title: name }, body, make("figcaption", { textContent: caption }));
}

async function filesPanel() {
  const rows = (await details()).flatMap(([run, detail]) => detail.files.map((file) => make("tr", {}, make("td", { className: "run" }, link(path(run, file), `${run.name}/${file.path}`)), make("td", { textContent: file.size < 10240 ? `${file.size} B` : `${short(file.size)}B` }))));
  return [make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("tbody", {}, ...rows)))];
}

// --- the panel -------------------------------------------------------------------------------------------------------

async function showPanel() {
  if (document.activeElement?.tagName === "SELECT" && $("panel").contains(document.activeElement)) document.activeElement.blur();
  $("tabs").replaceChildren(...TABS.map((name) => {
    const button = make("button", { type: "button", textContent: name });
    button.setAttribute("role", "tab");
    button.setAttribute("aria-selected", name === state.tab);
    button.addEventListener("click", () => { state.tab = name; update(); });
    return button;
  }));
  const panels = { Curves: curvesPanel, Settings: settingsPanel, Media: mediaPanel, Files: filesPanel };
  const empty = state.runs.length ? "Select runs in the list." : "No runs yet. They appear here when they start.";
  const tab = state.tab, body = state.chosen.size ? await panels[tab]() : [make("p", { className: "empty", textContent: empty })];
  if (tab === state.tab && !(body.length === 1 && body[0] === $("panel").firstChild)) $("panel").replaceChildren(...body);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select")) { if (event.key === "Escape") event.target.blur(); return; }
  const rows = visible().slice(0, SHOWN), move = (by) => {
    state.at = Math.max(0, Math.min(rows.length - 1, state.at + by));
    showRows();
    $("rows").children[state.at]?.scrollIntoView({ block: "nearest" });
  };
  const actions = { "/": () => $("search").focus(), j: () => move(1), k: () => move(-1), t: flipAxis, g: flipGroup, x: () => { const run = rows[state.at]; if (run) { choose(run.id, !state.chosen.has(run.id)); update(); } } };
  TABS.forEach((name, index) => { actions[index + 1] = () => { state.tab = name; update(); }; });
  if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
});

refresh();

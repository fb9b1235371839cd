// The page: what is listed, which study is open, keys and mouse.

import { Film } from "./canvas.js";
import { documentsOf, renderDocuments } from "./documents.js";
import { renderReport, seriesName } from "./report.js";
import { FIRST_GAIN, gainNames, nameOf, recordingsOf, Strip } from "./signals.js";
import { ask, renderDetails, renderInputs, renderSteps } from "./tables.js";

const PAGE_ROWS = 100;
// Center and width in Hounsfield units.
const CT_WINDOWS = {
  lung: [-600, 1500], mediastinum: [40, 400], abdomen: [50, 400], liver: [60, 160], bone: [400, 1800],
  brain: [40, 80], subdural: [80, 200], stroke: [32, 8],
};
const byId = (id) => document.getElementById(id);
const state = { about: null, all: [], recordings: [], isRecording: false, crops: [], rows: [], start: 0, total: 0, study: null, where: "", series: 0, asked: 0, opened: 0 };
const film = new Film(byId("canvas"), describe);
const strip = new Strip(byId("strip"), describeStrip);
let shown = film; // what wheel, keys and slider move

// ---- studies --------------------------------------------------------------------------------------

async function list(start = 0) {
  const asked = ++state.asked;
  const values = { start, count: PAGE_ROWS };
  for (const name of ["text", "split", "modality", "concept", "assertion"]) values[name] = byId(name).value.trim();
  values.where = state.where; // while it is being written it is no expression
  const found = await ask("api/samples", values);
  if (asked !== state.asked) return;
  Object.assign(state, { rows: found.samples, start, total: found.total });
  byId("rows").replaceChildren(...found.samples.map(listed));
  const isPartly = (values.concept || values.assertion) && found.num_read < state.about.num_samples;
  const read = isPartly ? `, ${found.num_read} of ${state.about.num_samples} reports read` : "";
  byId("found").textContent = `${counted(found.total, found.total === 1 ? "study" : "studies")}${read}`;
  const last = Math.min(start + PAGE_ROWS, found.total);
  byId("range").textContent = found.total ? `${start + 1} to ${last}` : "";
  byId("earlier").disabled = start === 0;
  byId("later").disabled = last >= found.total;
  if (isPartly) setTimeout(() => asked === state.asked && list(start), 1000);
}

function listed(sample) {
  const item = document.createElement("li");
  const title = document.createElement("b");
  title.textContent = `${sample.modality || "text"} ${sample.place}`;
  const line = document.createElement("span");
  const size = sample.num_slices ? `${sample.num_slices} x ${sample.rows} x ${sample.columns}` : "no images";
  line.textContent = `${size}${sample.text_bytes ? ", report" : ""}`;
  item.append(title, line);
  item.dataset.row = sample.row;
  item.addEventListener("click", () => open(sample.row).catch(failed));
  return item;
}

async function open(row, crops = []) {
  page("studies");
  const opened = ++state.opened;
  const study = await ask(`api/samples/${row}`);
  if (opened !== state.opened) return; // another one was chosen meanwhile
  state.study = study;
  state.crops = crops;
  history.replaceState(null, "", `#${row}`);
  for (const item of byId("rows").children) {
    item.toggleAttribute("aria-current", +item.dataset.row === row);
    if (+item.dataset.row === row) item.scrollIntoView({ block: "nearest" });
  }
  // What is there counts, not what is said to be: a series has the slices that it has.
  const said = study.study?.series ?? [];
  const series = study.slice_counts.map((count, number) => ({ ...said[number], num_slices: count }));
  state.all = series;
  state.recordings = recordingsOf(study);
  byId("series").replaceChildren(
    ...series.map((one, number) => option(number, `${seriesName(series, number)}: ${[one.modality ?? "?", one.kind].filter(Boolean).join(" ")}, ${counted(one.num_slices, one.num_slices === 1 ? "slice" : "slices")}`)),
    ...state.recordings.map((one, number) => option(series.length + number, nameOf(one))),
  );
  byId("generated").textContent = study.generated;
  renderReport(byId("report"), study, jump);
  renderDetails(byId("about-study"), study);
  renderDocuments(byId("documents"), study);
  byId("documents-tab").hidden = documentsOf(study).length === 0;
  if (byId("documents-tab").hidden && !byId("documents").hidden) side("report");
  const crop = crops.find(({ isChosen }) => isChosen);
  byId("planes").checked = film.wantsPlanes = film.wantsPlanes || Boolean(crop);
  openSeries(crop?.series ?? 0);
  if (crop) film.moveTo([0, 1, 2].map((axis) => mean(crop.corners.map((corner) => corner[axis]))));
}

function openSeries(number, index) {
  const series = state.all?.[number];
  const recording = state.recordings[number - state.all.length];
  byId("preset").replaceChildren();
  state.isRecording = Boolean(recording);
  shown = recording ? strip : film;
  for (const [name, isShown] of [["canvas", !recording], ["slice-tools", !recording], ["strip", recording], ["strip-tools", recording]]) {
    byId(name).hidden = !isShown;
  }
  if (recording) openRecording(number, recording);
  else strip.clear();
  if (!series) {
    film.clear();
    return;
  }
  state.series = number;
  byId("series").value = number;
  const presets = { "as stored": null, ...(series.unit === "HU" ? CT_WINDOWS : {}) };
  state.presets = Object.values(presets);
  byId("preset").append(...Object.keys(presets).map((name, at) => option(at, name)));
  film.open(state.study.row, series, number, regionsOf(state.study, number), state.crops.filter((crop) => crop.series === number));
  if (index !== undefined) film.show(index);
}

function openRecording(number, recording) {
  state.series = number;
  byId("series").value = number;
  strip.open(recording);
  byId("speed").replaceChildren(...strip.speedNames().map((name, at) => option(at, name)));
  byId("speed").value = strip.speeds.indexOf(strip.speed);
  byId("gain").replaceChildren(...gainNames().map((name, at) => option(at, name)));
  byId("gain").value = FIRST_GAIN;
  byId("gain").hidden = !recording.isEcg;
}

function jump(series, index) {
  if (series !== state.series) openSeries(series, index);
  else film.show(index);
}

function regionsOf(study, series) {
  return (study.annotations?.rois ?? [])
    .map((roi, number) => ({ roi, number }))
    .filter(({ roi }) => roi.series === series)
    .map(({ roi, number }) => {
      const places = roi.slices ?? [];
      const boxes = places.flatMap(({ box_px: box }) => (box ? [box] : []));
      const least = (values) => Math.min(...values);
      const most = (values) => Math.max(...values);
      return {
        number,
        roi: roi.roi ?? number,
        hasMask: Boolean(roi.mask),
        hasArea: boxes.length > 0,
        slices: new Map(places.map((place) => [place.slice, place])),
        // First and behind the last along slices, rows and columns.
        extent: [
          [least(places.map(({ slice }) => slice)), most(places.map(({ slice }) => slice)) + 1],
          [least(boxes.map((box) => box[1])), most(boxes.map((box) => box[3]))],
          [least(boxes.map((box) => box[0])), most(boxes.map((box) => box[2]))],
        ],
      };
    });
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function counted(number, name) {
  return `${number.toLocaleString("en")} ${name}`;
}

function option(value, text) {
  return Object.assign(document.createElement("option"), { value, textContent: text });
}

function describeStrip({ shown: recording, index, count, error }) {
  if (!recording) return;
  byId("note").textContent = error;
  byId("scrub").max = Math.max(count - 1, 0);
  byId("scrub").value = index;
  byId("window").textContent = "";
  byId("where").textContent = strip.describe();
}

function describe({ study, index, count, low, high, error, axes, canShowPlanes }) {
  if (state.isRecording) return;
  const without = study ? "This series has no slices." : state.study ? "This sample has no images." : "";
  byId("note").textContent = count ? error : without;
  byId("planes").disabled = !canShowPlanes;
  byId("scrub").max = Math.max(count - 1, 0);
  byId("scrub").value = index;
  byId("window").textContent = study ? `C ${Math.round((low + high) / 2)}  W ${Math.round(high - low)}` : "";
  const facts = study?.series;
  const names = facts && [
    `slice ${index + 1} of ${count}`,
    axes.length > 1 ? `row ${film.at[1] + 1}, column ${film.at[2] + 1}` : "",
    facts.instance_numbers?.[index] != null ? `image ${facts.instance_numbers[index]}` : "",
    facts.slice_spacing_mm ? `every ${facts.slice_spacing_mm.toFixed(2)} mm` : "",
    facts.unit,
    (facts.flags ?? []).join(" "),
  ];
  byId("where").textContent = names ? names.filter(Boolean).join(" \u00b7 ") : "";
}

// ---- keys and mouse -------------------------------------------------------------------------------

function step(number) {
  const at = state.rows.findIndex(({ row }) => row === state.study?.row);
  const next = state.rows[at + number];
  if (next) open(next.row).catch(failed);
}

const KEYS = {
  ArrowUp: () => shown.show(shown.index - 1),
  ArrowDown: () => shown.show(shown.index + 1),
  PageUp: () => shown.show(shown.index - 10),
  PageDown: () => shown.show(shown.index + 10),
  Home: () => shown.show(0),
  End: () => shown.show(shown.count - 1),
  ArrowLeft: () => state.series > 0 && openSeries(state.series - 1),
  ArrowRight: () => openSeries(Math.min(state.series + 1, byId("series").length - 1)),
  j: () => step(1),
  k: () => step(-1),
  i: () => byId("invert").click(),
  r: () => film.resetView(),
  m: () => byId("regions").click(),
  p: () => byId("planes").click(),
  t: () => byId("theme").click(),
  "/": () => byId("text").focus(),
  "?": () => byId("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT)$/.test(event.target.tagName) && event.target.type !== "range";
  if (isTyping || event.ctrlKey || event.metaKey || byId("studies").hidden) return;
  const number = Number(event.key);
  const act = KEYS[event.key] ?? (number >= 1 && number <= 9 ? () => preset(number - 1) : null);
  if (act) {
    event.preventDefault();
    act();
  }
});

function preset(at) {
  if (at >= (state.presets ?? []).length) return;
  byId("preset").value = at;
  const found = state.presets[at];
  if (found) film.setWindow(...found);
  else film.resetView();
}

let wheel = 0;
byId("stage").addEventListener("wheel", (event) => {
  event.preventDefault();
  if (event.ctrlKey && shown === strip) return;
  if (event.ctrlKey) {
    film.zoom = Math.max(0.5, Math.min(16, film.zoom * Math.exp(-event.deltaY / 400)));
    film.draw();
    return;
  }
  // A mouse turns in steps of a hundred, a touch pad in many small ones.
  wheel += event.deltaMode === 1 ? event.deltaY * 33 : event.deltaY;
  const whole = Math.trunc(wheel / 40) || (Math.abs(event.deltaY) >= 40 ? Math.sign(event.deltaY) : 0);
  if (whole) {
    wheel = 0;
    const axis = shown === film ? (film.panelAt(event.offsetX, event.offsetY)?.axis ?? 0) : 0;
    if (axis) film.move(axis, film.at[axis] + Math.sign(whole));
    else shown.show(shown.index + Math.sign(whole));
  }
}, { passive: false });

byId("canvas").addEventListener("pointerdown", (event) => {
  const { low, high, shift } = film;
  const [center, width] = [(low + high) / 2, high - low];
  const [x, y] = [event.clientX, event.clientY];
  event.target.setPointerCapture(event.pointerId);
  const move = (moved) => {
    const [right, down] = [moved.clientX - x, moved.clientY - y];
    if (event.shiftKey || event.button === 1) {
      film.shift = [shift[0] + right, shift[1] + down];
      film.draw();
    } else {
      const per = Math.max(width, 40) / 300;
      film.setWindow(center + down * per, Math.max(1, width + right * per));
    }
  };
  const end = (ended) => {
    if (Math.hypot(ended.clientX - x, ended.clientY - y) < 3) film.point(ended.offsetX, ended.offsetY);
    event.target.removeEventListener("pointermove", move);
    event.target.removeEventListener("pointerup", end);
  };
  event.target.addEventListener("pointermove", move);
  event.target.addEventListener("pointerup", end);
});

// ---- the rest --------------------------------------------------------------------------------------

function page(name) {
  for (const part of document.querySelectorAll(".page")) part.hidden = part.id !== name;
  for (const tab of document.querySelectorAll("[data-page]")) tab.setAttribute("aria-selected", tab.dataset.page === name);
  if (name === "inputs") renderInputs(byId("inputs"), openKey).catch(failed);
  if (name === "steps" && !byId("steps").children.length) renderSteps(byId("steps"), state.about, (row, crops) => open(row, crops).catch(failed));
}

async function openKey(key) {
  const { samples } = await ask("api/samples", { text: key, count: 1 });
  if (samples.length) open(samples[0].row);
}

function side(name) {
  for (const part of document.querySelectorAll(".side")) part.hidden = part.id !== name;
  for (const tab of document.querySelectorAll("[data-side]")) tab.setAttribute("aria-selected", tab.dataset.side === name);
}

function failed(error) {
  byId("found").textContent = error.message;
}

function listen() {
  for (const tab of document.querySelectorAll("[data-page]")) tab.addEventListener("click", () => page(tab.dataset.page));
  for (const tab of document.querySelectorAll("[data-side]")) {
    tab.addEventListener("click", () => side(tab.dataset.side));
  }
  byId("search").addEventListener("submit", (event) => event.preventDefault());
  byId("expression").addEventListener("change", () => {
    state.where = byId("expression").value.trim();
    list().catch(failed);
  });
  byId("search").addEventListener("input", () => list().catch(failed));
  byId("earlier").addEventListener("click", () => list(Math.max(0, state.start - PAGE_ROWS)));
  byId("later").addEventListener("click", () => list(state.start + PAGE_ROWS));
  byId("series").addEventListener("change", (event) => openSeries(+event.target.value));
  byId("preset").addEventListener("change", (event) => preset(+event.target.value));
  byId("scrub").addEventListener("input", (event) => shown.show(+event.target.value));
  byId("speed").addEventListener("change", (event) => strip.setSpeed(+event.target.value));
  byId("gain").addEventListener("change", (event) => strip.setGain(+event.target.value));
  byId("reset").addEventListener("click", () => film.resetView());
  byId("invert").addEventListener("click", () => {
    film.inverted = !film.inverted;
    film.draw();
  });
  byId("regions").addEventListener("change", (event) => {
    film.showRegions = event.target.checked;
    film.refresh();
  });
  byId("planes").addEventListener("change", (event) => {
    film.wantsPlanes = event.target.checked;
    film.refresh();
  });
  byId("keys").addEventListener("click", () => byId("help").showModal());
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.classList.contains("dark") || (!root.classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches);
    root.classList.toggle("dark", !isDark);
    root.classList.toggle("light", isDark);
  });
}

async function findings() {
  const found = await ask("api/findings");
  const chosen = byId("concept").value;
  const counts = new Map();
  for (const { concept, num_samples } of found.findings) counts.set(concept, (counts.get(concept) ?? 0) + num_samples);
  const names = [...counts.keys()].sort();
  byId("concept").replaceChildren(option("", "all findings"), ...names.map((name) => option(name, name)));
  byId("concept").value = chosen;
  if (found.num_read < found.num_samples) setTimeout(findings, 1500);
}

async function start() {
  // A cookie holds the token from here on; the address bar and the history need not.
  if (location.search) history.replaceState(null, "", location.pathname + location.hash);
  listen();
  state.about = await ask("api/dataset");
  const { dataset_id: id, version, num_samples: count, splits, modalities } = state.about;
  document.title = `Dataset ${id.slice(0, 12)}`;
  byId("title").textContent = document.title;
  byId("about").textContent = `version ${version}, ${count.toLocaleString("en")} samples`;
  byId("split").append(...splits.map(({ name, num_samples }) => option(name, `${name} (${num_samples})`)));
  byId("modality").append(...modalities.map((name) => option(name, name)));
  byId("concept").addEventListener("focus", () => findings().catch(failed), { once: true });
  await list();
  const wanted = /^#\d+$/.test(location.hash) ? +location.hash.slice(1) : state.rows[0]?.row;
  if (wanted !== undefined) await open(wanted);
}

start().catch(failed);

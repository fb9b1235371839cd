"use strict";
// Reads out and zooms charts that stand in the page already; without it they can all be seen, along steps.
const numbers = JSON.parse(document.getElementById("numbers").textContent);
const root = document.documentElement;
const readout = document.getElementById("readout");
const UNITS = 10000;
const SVG = "http://www.w3.org/2000/svg";
const shown = { step: [0, 1], time: [0, 1] };
const LEAST_SPAN = 1e-4;

const along = () => root.dataset.by;

function grouped(value, digits) {
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

function duration(seconds) {
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (size < 1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  if (size < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(size);
  const pair = whole < 3600 ? [60, "min", 1, "s"] : whole < 86400 ? [3600, "h", 60, "min"] : [86400, "d", 3600, "h"];
  const rest = Math.floor((whole % pair[0]) / pair[2]);
  return `${Math.floor(whole / pair[0])} ${pair[1]}${rest ? ` ${rest} ${pair[3]}` : ""}`;
}

function show(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "s") return duration(value);
  if (unit === "share") return `${grouped(100 * value, 1)} %`;
  if (unit.startsWith("bytes")) {
    const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let power = 0;
    while (Math.abs(value) >= 1024 && power < names.length - 1) { value /= 1024; power += 1; }
    return `${Number(value.toPrecision(power ? 3 : 4))} ${names[power]}${unit.slice(5)}`;
  }
  const size = Math.abs(value);
  const text = size !== 0 && size < 0.001 ? value.toExponential(2) : size >= 100 ? grouped(value, 0) : String(Number(value.toPrecision(4)));
  return unit ? `${text} ${unit}` : text;
}

function niceStep(span, most, isTime) {
  const wanted = span / most;
  if (isTime && wanted > 1) {
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000];
    return steps.find((one) => one >= wanted) || 864000;
  }
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= wanted * (1 - 1e-9));
  return isTime ? step : Math.max(1, step);
}

function plots(chart) { return chart.querySelectorAll("svg.plot"); }

function box(chart) {
  const plot = plots(chart)[0];
  return { left: plot.x.baseVal.value, width: plot.width.baseVal.value };
}

function drawTicks(chart, low, high) {
  const axis = chart.querySelector("g.x");
  const isTime = along() === "time";
  const bottom = Number(chart.dataset.bottom);
  const { left, width } = box(chart);
  const step = niceStep(high - low, 10, isTime);
  axis.replaceChildren();
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high * (1 + 1e-9); place += 1) {
    const x = left + ((place * step - low) / (high - low)) * width;
    const line = document.createElementNS(SVG, "line");
    for (const [name, value] of [["class", "tick"], ["x1", x], ["x2", x], ["y1", bottom], ["y2", bottom + 4]]) line.setAttribute(name, value);
    const label = document.createElementNS(SVG, "text");
    for (const [name, value] of [["class", "label"], ["x", x], ["y", bottom + 16], ["text-anchor", "middle"]]) label.setAttribute(name, value);
    label.textContent = isTime ? duration(place * step) : grouped(place * step, 0);
    axis.append(line, label);
  }
}

function visible() { return document.querySelectorAll(`svg.chart.by-${along()}`); }

function redraw() {
  const [from, to] = shown[along()];
  for (const chart of visible()) {
    for (const plot of plots(chart)) {
      const height = plot.viewBox.baseVal.height;
      plot.setAttribute("viewBox", `${from * UNITS} 0 ${(to - from) * UNITS} ${height}`);
    }
    const end = Number(chart.dataset.end);
    drawTicks(chart, from * end, to * end);
  }
  const end = numbers.ends[along()];
  const isWhole = from === 0 && to === 1;
  const text = along() === "time" ? [duration(from * end), duration(to * end)] : [grouped(from * end, 0), grouped(to * end, 0)];
  document.getElementById("range").value = isWhole ? "" : `${text[0]} to ${text[1]}`;
  document.getElementById("reset").hidden = isWhole;
  for (const by of ["step", "time"]) document.getElementById(`by-${by}`).setAttribute("aria-pressed", String(along() === by));
}

function look(from, to) {
  const span = Math.min(1, Math.max(LEAST_SPAN, to - from));
  const begin = Math.min(Math.max(0, from), 1 - span);
  shown[along()] = [begin, begin + span];
  hide();
  redraw();
}

// Where the pointer is: 0 to 1 of the plot's width.
function share(chart, event) {
  const area = chart.getBoundingClientRect();
  const { left, width } = box(chart);
  const x = ((event.clientX - area.left) / area.width) * chart.viewBox.baseVal.width;
  return (x - left) / width;
}

function nearest(places, value) {
  let low = 0;
  let high = places.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] < value) low = middle; else high = middle;
  }
  return high >= 0 && Math.abs(places[high] - value) < Math.abs(places[low] - value) ? high : low;
}

function row(colour, label, value) {
  const line = document.createElement("div");
  const name = document.createElement("span");
  if (colour) {
    const chip = document.createElement("i");
    chip.className = colour;
    name.append(chip);
  }
  name.append(label);
  line.append(name, value);
  return line;
}

function chartRows(chart, value) {
  const found = numbers.charts[chart];
  if (!found) return null;
  const rows = [];
  let at = null;
  for (const series of found.series) {
    const places = numbers.places[series.places];
    const index = places[along()].length ? nearest(places[along()], value) : -1;
    if (index < 0 || series.values[index] === null) continue;
    if (at === null) at = [places.step[index], places.time[index]];
    let text = show(series.values[index], found.unit);
    if (series.least && series.most[index] !== series.least[index]) {
      text += ` (${show(series.least[index], found.unit)} to ${show(series.most[index], found.unit)})`;
    }
    rows.push(row(series.colour, series.label, text));
  }
  return at === null ? null : { title: `after ${grouped(at[0], 0)} steps, ${duration(at[1])}`, rows };
}

function heatRows(key, value, part) {
  const map = numbers.heat.maps[key];
  const stops = numbers.heat.stops[along()];
  const rank = Math.floor(part * map.names.length);
  const column = stops.findIndex((stop) => value < stop);
  if (column < 0 || rank < 0 || rank >= map.names.length || numbers.heat.begins[along()][column] > value) return null;
  const text = map.shares[rank][column] === null ? "not among the slowest" : show(map.shares[rank][column], "share");
  const steps = `steps ${grouped(numbers.heat.begins.step[column], 0)} to ${grouped(stops === numbers.heat.stops.step ? stops[column] - 1 : numbers.heat.stops.step[column] - 1, 0)}`;
  return { title: map.names[rank], rows: [row("", map.title.toLowerCase(), text), row("", steps, "")] };
}

function hide() {
  readout.hidden = true;
  for (const line of document.querySelectorAll("line.cursor")) line.remove();
}

function pointAt(part) {
  for (const line of document.querySelectorAll("line.cursor")) line.remove();
  for (const chart of visible()) {
    const { left, width } = box(chart);
    const line = document.createElementNS(SVG, "line");
    const x = left + part * width;
    for (const [name, value] of [["class", "cursor"], ["x1", x], ["x2", x], ["y1", 8], ["y2", chart.dataset.bottom]]) line.setAttribute(name, value);
    chart.append(line);
  }
}

function hover(chart, event) {
  const part = share(chart, event);
  if (part < 0 || part > 1) { hide(); return; }
  const [from, to] = shown[along()];
  const value = (from + part * (to - from)) * Number(chart.dataset.end);
  pointAt(part);
  const figure = chart.closest("figure");
  const area = chart.getBoundingClientRect();
  const plot = plots(chart)[0];
  const y = ((event.clientY - area.top) / area.height) * chart.viewBox.baseVal.height;
  const inside = (y - plot.y.baseVal.value) / plot.height.baseVal.value;
  const found = figure.dataset.heat ? heatRows(figure.dataset.heat, value, inside) : chartRows(figure.dataset.chart, value);
  readout.hidden = found === null;
  if (found === null) return;
  const title = document.createElement("b");
  title.textContent = found.title;
  readout.replaceChildren(title, ...found.rows);
  const wide = readout.offsetWidth;
  const left = event.clientX + 16 + wide > innerWidth ? event.clientX - wide - 16 : event.clientX + 16;
  readout.style.left = `${Math.max(4, left)}px`;
  readout.style.top = `${Math.min(event.clientY + 14, innerHeight - readout.offsetHeight - 6)}px`;
}

let drag = null;

function endDrag(chart, event) {
  if (drag === null || drag.chart !== chart) return;
  const { from, mark } = drag;
  drag = null;
  mark.remove();
  const to = Math.min(1, Math.max(0, share(chart, event)));
  if (Math.abs(to - from) < 0.01) return;
  const [low, high] = shown[along()];
  look(low + Math.min(from, to) * (high - low), low + Math.max(from, to) * (high - low));
}

function listen(chart) {
  chart.addEventListener("pointerdown", (event) => {
    const from = share(chart, event);
    if (event.button !== 0 || from < 0 || from > 1) return;
    const mark = document.createElementNS(SVG, "rect");
    mark.setAttribute("class", "drag");
    chart.append(mark);
    chart.setPointerCapture(event.pointerId);
    drag = { chart, from, mark };
  });
  chart.addEventListener("pointermove", (event) => {
    if (drag !== null && drag.chart === chart) {
      const { left, width } = box(chart);
      const to = Math.min(1, Math.max(0, share(chart, event)));
      const begin = left + Math.min(drag.from, to) * width;
      for (const [name, value] of [["x", begin], ["y", 8], ["width", Math.abs(to - drag.from) * width], ["height", chart.dataset.bottom - 8]]) drag.mark.setAttribute(name, value);
    }
    hover(chart, event);
  });
  chart.addEventListener("pointerup", (event) => endDrag(chart, event));
  chart.addEventListener("pointercancel", () => { if (drag !== null) { drag.mark.remove(); drag = null; } });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("dblclick", () => look(0, 1));
  chart.addEventListener("keydown", (event) => {
    const [from, to] = shown[along()];
    const span = to - from;
    const moves = {
      "+": [from + span / 4, to - span / 4], "=": [from + span / 4, to - span / 4], "-": [from - span / 2, to + span / 2],
      ArrowLeft: [from - span / 4, to - span / 4], ArrowRight: [from + span / 4, to + span / 4], 0: [0, 1], Escape: [0, 1],
    };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    look(move[0], move[1]);
  });
}

const tools = document.getElementById("tools");
if (tools !== null) {
  tools.hidden = false;
  for (const chart of document.querySelectorAll("svg.chart")) listen(chart);
  for (const by of ["step", "time"]) {
    document.getElementById(`by-${by}`).addEventListener("click", () => { root.dataset.by = by; hide(); redraw(); });
  }
  document.getElementById("reset").addEventListener("click", () => look(0, 1));
}

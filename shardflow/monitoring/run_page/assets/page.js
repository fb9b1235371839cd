"use strict";
// Reads out the charts of the page under the pointer; all of them can be seen without it.
const numbers = JSON.parse(document.getElementById("numbers").textContent);
const readout = document.getElementById("readout");
const [LEFT, PLOT_WIDTH, TOP] = [86, 850, 8];

function grouped(value, digits) {
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

function duration(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

function show(value, unit) {
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

function nearest(steps, wanted) {
  let best = -1;
  steps.forEach((step, index) => { if (best < 0 || Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = index; });
  return best;
}

function element(name, className, ...content) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...content);
  return made;
}

function rowsAt(chart, wanted) {
  let at = null;
  const rows = [];
  for (const series of chart.series) {
    const index = nearest(series.steps, wanted);
    if (index < 0 || series.values[index] === null) continue;
    at = at === null ? series.steps[index] : at;
    let text = show(series.values[index], chart.unit);
    if (series.least && series.most[index] !== series.least[index]) {
      text += ` (${show(series.least[index], chart.unit)} to ${show(series.most[index], chart.unit)})`;
    }
    rows.push(element("div", "", element("span", "", element("i", series.color), series.label), text));
  }
  return at === null ? [] : [element("b", "", `after ${grouped(at, 0)} steps`), ...rows];
}

function hide() {
  readout.hidden = true;
  for (const line of document.querySelectorAll("line.cursor")) line.remove();
}

function hover(svg, event) {
  hide();
  const area = svg.getBoundingClientRect();
  const x = ((event.clientX - area.left) / area.width) * svg.viewBox.baseVal.width;
  const share = (x - LEFT) / PLOT_WIDTH;
  if (share < 0 || share > 1) return;
  for (const chart of document.querySelectorAll("svg.chart")) {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [name, value] of [["class", "cursor"], ["x1", x], ["x2", x], ["y1", TOP], ["y2", chart.dataset.bottom]]) line.setAttribute(name, value);
    chart.append(line);
  }
  const rows = rowsAt(numbers.charts[svg.closest("figure").dataset.chart], share * Number(svg.dataset.end));
  if (!rows.length) return;
  readout.replaceChildren(...rows);
  readout.hidden = false;
  const wide = readout.offsetWidth;
  const left = event.clientX + 16 + wide > innerWidth ? event.clientX - wide - 16 : event.clientX + 16;
  readout.style.left = `${Math.max(4, left)}px`;
  readout.style.top = `${Math.min(event.clientY + 14, innerHeight - readout.offsetHeight - 6)}px`;
}

for (const svg of document.querySelectorAll("svg.chart")) {
  svg.addEventListener("pointermove", (event) => hover(svg, event));
  svg.addEventListener("pointerleave", hide);
}

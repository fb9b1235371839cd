// Slices of one series on a canvas, or three planes of its volume: fetched ahead, windowed here, zoomed, with
// regions and crops over them.

const CACHE_BYTES = 384 << 20;
const AHEAD = 12;
const BEHIND = 4;
const MOST_REQUESTS = 6;
const ARRAYS = { uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, float32: Float32Array };
const COLORS = ["#ff5e5e", "#4fc3f7", "#ffd54f", "#81c784", "#ba68c8", "#ff8a65", "#4db6ac", "#f06292"];
const CROP = "#ffb454";
const CHOSEN_CROP = "#ffffff";
const CROSS = "#3d8bfd";
// Axes of a plane on the canvas, down and to the right: slices, rows and columns are 0, 1 and 2.
const DOWN = [1, 0, 0];
const RIGHT = [2, 2, 1];
// Corners of a box that an edge joins: those that differ along one axis.
const EDGES = [[0, 1], [2, 3], [4, 5], [6, 7], [0, 2], [1, 3], [4, 6], [5, 7], [0, 4], [1, 5], [2, 6], [3, 7]];

export class Film {
  constructor(canvas, onChange) {
    this.canvas = canvas;
    this.onChange = onChange;
    this.pixels = new Map();
    this.numBytes = 0;
    this.waiting = new Map();
    this.failed = new Map();
    this.image = document.createElement("canvas");
    this.showRegions = true;
    this.wantsPlanes = false;
    this.clear();
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  clear() {
    this.study = null;
    this.crops = [];
    this.at = [0, 0, 0];
    this.sizes = [0, 0, 0];
    this.moved = { axis: 0, direction: 1 };
    this.error = "";
    for (const controller of this.waiting.values()) controller.abort();
    this.waiting.clear();
    this.draw();
  }

  open(row, series, number, regions, crops) {
    for (const controller of this.waiting.values()) controller.abort();
    this.waiting.clear();
    this.failed.clear();
    this.study = { row, series, number, regions };
    this.crops = crops;
    this.sizes = [series.num_slices, series.rows ?? 0, series.columns ?? 0];
    this.at = this.sizes.map((size) => Math.max(Math.floor(size / 2), 0));
    this.at[0] = Math.min(this.at[0], Math.max(this.count - 1, 0));
    this.resetView();
  }

  get index() {
    return this.at[0];
  }

  get count() {
    return this.sizes[0];
  }

  get canShowPlanes() {
    return this.count > 1 && this.sizes[1] > 0 && (this.study?.series.samples_per_pixel ?? 1) === 1;
  }

  get axes() {
    return this.wantsPlanes && this.canShowPlanes ? [0, 1, 2] : [0];
  }

  resetView() {
    const [low, high] = this.study?.series.display_range ?? [0, 255];
    this.low = low;
    this.high = high > low ? high : low + 1;
    this.inverted = false;
    this.zoom = 1;
    this.shift = [0, 0];
    this.show(this.index);
  }

  setWindow(center, width) {
    this.low = center - width / 2;
    this.high = center + width / 2;
    this.draw();
  }

  show(index) {
    this.move(0, index);
  }

  move(axis, index) {
    const wanted = Math.max(0, Math.min(this.sizes[axis] - 1, index));
    if (wanted !== this.at[axis]) this.moved = { axis, direction: wanted > this.at[axis] ? 1 : -1 };
    this.at[axis] = wanted;
    this.refresh();
  }

  moveTo(place) {
    this.at = place.map((index, axis) => Math.max(0, Math.min(this.sizes[axis] - 1, Math.round(index))));
    this.refresh();
  }

  refresh() {
    if (!this.study || !this.count) return this.draw();
    this.error = this.axes.map((axis) => this.failed.get(this.key(axis, this.at[axis]))).find(Boolean) ?? "";
    this.draw();
    this.fetchAround();
  }

  key(axis, index, region = "") {
    return `${this.study.row}/${this.study.number}/${axis}/${index}/${region}`;
  }

  fetchAround() {
    const wanted = this.axes.map((axis) => [axis, this.at[axis]]);
    const { axis: moved, direction } = this.moved;
    const along = this.axes.includes(moved) ? moved : 0;
    for (let step = 1; step <= AHEAD; step++) {
      wanted.push([along, this.at[along] + step * direction]);
      if (step <= BEHIND) wanted.push([along, this.at[along] - step * direction]);
    }
    const inside = wanted.filter(([axis, index]) => index >= 0 && index < this.sizes[axis]);
    // What is far from here by now is not waited for.
    for (const [key, controller] of this.waiting) {
      if (!inside.some(([axis, index]) => key.startsWith(this.key(axis, index)))) {
        controller.abort();
        this.waiting.delete(key);
      }
    }
    const { row, number } = this.study;
    for (const [axis, index] of inside) {
      const isShown = index === this.at[axis];
      const plane = axis ? `planes/${number}/${axis}/${index}` : `slices/${number}/${index}`;
      this.fetch(this.key(axis, index), `api/samples/${row}/${plane}`, isShown);
      if (!isShown || !this.showRegions) continue;
      for (const region of this.tintedOn(axis)) {
        const address = `api/samples/${row}/regions/${number}/${region.roi}/${axis}/${index}`;
        this.fetch(this.key(axis, index, region.roi), address, true);
      }
    }
  }

  async fetch(key, address, isUrgent) {
    // What could not be read is asked for again when the series is opened again, not in a circle.
    if (this.pixels.has(key) || this.waiting.has(key) || this.failed.has(key)) return;
    if (!isUrgent && this.waiting.size >= MOST_REQUESTS) return;
    const controller = new AbortController();
    this.waiting.set(key, controller);
    try {
      const answer = await fetch(address, { signal: controller.signal });
      if (!answer.ok) throw new Error(await answer.text());
      const head = (name) => answer.headers.get(`X-${name}`);
      const data = new ARRAYS[head("Dtype")](await answer.arrayBuffer());
      this.keep(key, { rows: +head("Rows"), columns: +head("Columns"), channels: +head("Channels"), data });
    } catch (error) {
      if (error.name === "AbortError") return;
      this.failed.set(key, error.message);
      if (this.study && this.axes.some((axis) => key === this.key(axis, this.at[axis]))) this.error = error.message;
    } finally {
      if (this.waiting.get(key) === controller) this.waiting.delete(key);
    }
    if (!this.study) return;
    if (this.axes.some((axis) => key.startsWith(this.key(axis, this.at[axis])))) this.draw();
    this.fetchAround();
  }

  keep(key, value) {
    this.pixels.set(key, value);
    this.numBytes += value.data.byteLength;
    for (const [oldest, { data }] of this.pixels) {
      if (this.numBytes <= CACHE_BYTES) break;
      this.pixels.delete(oldest);
      this.numBytes -= data.byteLength;
    }
  }

  // Regions that a plane crosses, and those of them that are tinted: across slices all that have an area.
  regionsOn(axis) {
    const index = this.at[axis];
    return (this.study?.regions ?? []).filter(({ slices, extent }) =>
      axis ? index >= Math.floor(extent[axis][0]) && index < extent[axis][1] : slices.has(index),
    );
  }

  tintedOn(axis) {
    return this.regionsOn(axis).filter(({ hasMask, hasArea }) => (axis ? hasArea : hasMask));
  }

  // ---- where planes are -------------------------------------------------------------------------

  // Places of the planes on the canvas, in its pixels: slices left, the others above each other at the right.
  panels() {
    const { width, height } = this.canvas;
    if (this.axes.length === 1) return [{ axis: 0, left: 0, top: 0, width, height }];
    const half = Math.round(width / 2);
    const middle = Math.round(height / 2);
    return [
      { axis: 0, left: 0, top: 0, width: half, height },
      { axis: 1, left: half, top: 0, width: width - half, height: middle },
      { axis: 2, left: half, top: middle, width: width - half, height: height - middle },
    ];
  }

  // Millimeters between slices, rows and columns; 1 where they are not known.
  get spacing() {
    const { pixel_spacing_mm: [down, right] = [1, 1], slice_spacing_mm: across } = withoutNulls(this.study.series);
    return [across || right, down, right];
  }

  // How a panel maps voxels to the canvas: scale to the right and down, and where voxel 0 begins.
  placed(panel) {
    const { axis } = panel;
    const scale = window.devicePixelRatio || 1;
    const [columns, rows] = [this.sizes[RIGHT[axis]], this.sizes[DOWN[axis]]];
    const [across, down] = [this.spacing[RIGHT[axis]], this.spacing[DOWN[axis]]];
    const tall = (rows * down) / across;
    const fit = Math.min(panel.width / columns, panel.height / tall) * 0.96 * this.zoom;
    const left = panel.left + (panel.width - columns * fit) / 2 + this.shift[0] * scale;
    const top = panel.top + (panel.height - tall * fit) / 2 + this.shift[1] * scale;
    const isFlipped = axis > 0 && sideOf(this.study.series.affine_lps, DOWN[axis])?.[0] === "H";
    const height = (fit * down) / across;
    return { fit, height: isFlipped ? -height : height, left, top: isFlipped ? top + tall * fit : top, isFlipped };
  }

  panelAt(x, y) {
    const scale = window.devicePixelRatio || 1;
    const inside = ({ left, top, width, height }) =>
      x * scale >= left && x * scale < left + width && y * scale >= top && y * scale < top + height;
    return this.study ? this.panels().find(inside) : undefined;
  }

  // Brings the other planes to the voxel at a place of the canvas, in CSS pixels.
  point(x, y) {
    const panel = this.panelAt(x, y);
    if (!panel || this.axes.length === 1) return;
    const scale = window.devicePixelRatio || 1;
    const { fit, height, left, top } = this.placed(panel);
    const place = [...this.at];
    place[RIGHT[panel.axis]] = Math.floor((x * scale - left) / fit);
    place[DOWN[panel.axis]] = Math.floor((y * scale - top) / height);
    this.moveTo(place);
  }

  // ---- drawing ---------------------------------------------------------------------------------

  draw() {
    const { canvas } = this;
    const scale = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.round(canvas.clientWidth * scale));
    const height = Math.max(1, Math.round(canvas.clientHeight * scale));
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = "#000";
    context.fillRect(0, 0, width, height);
    if (this.study && this.count) {
      const drawn = this.panels().filter((panel) => this.drawPanel(context, panel, scale));
      if (drawn.some(({ axis }) => axis === 0)) {
        canvas.dataset.drawn = `${this.study.row}/${this.study.number}/${this.index}/`;
        canvas.dataset.frames = String(+(canvas.dataset.frames ?? 0) + 1);
      }
      canvas.dataset.planes = drawn.length === 3 ? this.at.join("/") : "";
    }
    this.onChange(this);
  }

  drawPanel(context, panel, scale) {
    const { axis } = panel;
    const found = this.pixels.get(this.key(axis, this.at[axis]));
    if (!found) return false;
    // A series may state another size than its slices have.
    if (axis === 0) this.sizes = [this.count, found.rows, found.columns];
    this.paint(found);
    const { fit, height, left, top, isFlipped } = this.placed(panel);
    context.save();
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.beginPath();
    context.rect(panel.left, panel.top, panel.width, panel.height);
    context.clip();
    context.setTransform(fit, 0, 0, height, left, top);
    context.imageSmoothingEnabled = fit < 3;
    context.drawImage(this.image, 0, 0);
    if (this.showRegions) this.drawRegions(context, axis, fit);
    this.drawCrops(context, axis, fit, height, left, top);
    if (this.axes.length > 1) this.drawCross(context, axis, fit, height, left, top);
    context.setTransform(scale, 0, 0, scale, panel.left, panel.top);
    this.drawMarks(context, panel, fit / scale / this.spacing[RIGHT[axis]], scale, isFlipped);
    context.restore();
    return true;
  }

  paint({ rows, columns, channels, data }) {
    const { image } = this;
    if (image.width !== columns || image.height !== rows) Object.assign(image, { width: columns, height: rows });
    const context = image.getContext("2d");
    const target = context.createImageData(columns, rows);
    const out = new Uint32Array(target.data.buffer);
    const scale = 255 / (this.high - this.low);
    const { low, inverted } = this;
    const grey = (value) => {
      const level = Math.max(0, Math.min(255, (value - low) * scale));
      return inverted ? 255 - level : level;
    };
    if (channels === 3) {
      for (let at = 0; at < out.length; at++) {
        out[at] = 0xff000000 | (data[3 * at + 2] << 16) | (data[3 * at + 1] << 8) | data[3 * at];
      }
    } else if (data instanceof Float32Array) {
      for (let at = 0; at < out.length; at++) out[at] = 0xff000000 | (0x010101 * Math.round(grey(data[at])));
    } else {
      const first = data instanceof Int16Array ? -32768 : 0;
      const table = new Uint32Array(data instanceof Uint8Array ? 256 : 65536);
      for (let at = 0; at < table.length; at++) table[at] = 0xff000000 | (0x010101 * Math.round(grey(at + first)));
      for (let at = 0; at < out.length; at++) out[at] = table[data[at] - first];
    }
    context.putImageData(target, 0, 0);
  }

  drawRegions(context, axis, fit) {
    context.lineWidth = 1.5 / fit;
    for (const region of this.regionsOn(axis)) {
      const color = COLORS[region.number % COLORS.length];
      const mask = this.pixels.get(this.key(axis, this.at[axis], region.roi));
      if (mask) context.drawImage(tinted(mask, color), 0, 0);
      if (axis) continue;
      context.strokeStyle = color;
      const place = region.slices.get(this.index);
      for (const polygon of place.polygons ?? []) {
        context.beginPath();
        polygon.forEach(([x, y], at) => (at ? context.lineTo(x + 0.5, y + 0.5) : context.moveTo(x + 0.5, y + 0.5)));
        context.closePath();
        context.stroke();
      }
      if (!mask && !place.polygons?.length && place.box_px) {
        const [x0, y0, x1, y1] = place.box_px;
        context.strokeRect(x0, y0, x1 - x0, y1 - y0);
      }
    }
  }

  // Boxes of crops as their edges; faint where the plane is beside them.
  drawCrops(context, axis, fit, height, left, top) {
    context.setTransform(1, 0, 0, 1, 0, 0);
    for (const { corners, isChosen } of this.crops) {
      const along = corners.map((corner) => corner[axis]);
      const isCrossed = this.at[axis] >= Math.min(...along) && this.at[axis] <= Math.max(...along);
      const points = corners.map((corner) => [
        left + (corner[RIGHT[axis]] + 0.5) * fit,
        top + (corner[DOWN[axis]] + 0.5) * height,
      ]);
      context.lineWidth = isChosen ? 3 : 1.5;
      context.strokeStyle = isChosen ? CHOSEN_CROP : CROP;
      context.globalAlpha = isCrossed ? 1 : 0.3;
      context.beginPath();
      for (const [from, to] of EDGES) {
        context.moveTo(...points[from]);
        context.lineTo(...points[to]);
      }
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  drawCross(context, axis, fit, height, left, top) {
    const x = left + (this.at[RIGHT[axis]] + 0.5) * fit;
    const y = top + (this.at[DOWN[axis]] + 0.5) * height;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.strokeStyle = CROSS;
    context.globalAlpha = 0.6;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, this.canvas.height);
    context.moveTo(0, y);
    context.lineTo(this.canvas.width, y);
    context.stroke();
    context.globalAlpha = 1;
  }

  drawMarks(context, panel, pixelsPerMm, scale, isFlipped) {
    const [width, height] = [panel.width / scale, panel.height / scale];
    context.font = "13px system-ui, sans-serif";
    context.fillStyle = "#ffd27a";
    const { affine_lps: affine, pixel_spacing_mm: spacing } = this.study.series;
    const across = sideOf(affine, RIGHT[panel.axis]);
    const down = sideOf(affine, DOWN[panel.axis]);
    if (across && down) {
      const [bottom, top] = isFlipped ? [...down].reverse() : down;
      context.textAlign = "center";
      context.fillText(top, width / 2, 18);
      context.fillText(bottom, width / 2, height - 8);
      context.textAlign = "left";
      context.fillText(across[1], 8, height / 2);
      context.textAlign = "right";
      context.fillText(across[0], width - 8, height / 2);
    }
    if (spacing) {
      const mm = [200, 100, 50, 20, 10, 5, 2, 1].find((size) => size * pixelsPerMm < width / 3) ?? 1;
      context.textAlign = "right";
      context.fillRect(width - 12 - mm * pixelsPerMm, height - 26, mm * pixelsPerMm, 2);
      context.fillText(mm >= 10 ? `${mm / 10} cm` : `${mm} mm`, width - 12, height - 32);
    }
  }
}

function withoutNulls(facts) {
  return Object.fromEntries(Object.entries(facts).filter(([, value]) => value !== null));
}

function tinted({ rows, columns, data }, color) {
  const canvas = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
  const context = canvas.getContext("2d");
  const target = context.createImageData(columns, rows);
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const most = data.reduce((one, other) => Math.max(one, other), 1);
  for (let at = 0; at < data.length; at++) {
    if (data[at]) target.data.set([red, green, blue, (90 * data[at]) / most], 4 * at);
  }
  context.putImageData(target, 0, 0);
  return canvas;
}

// Sides of the patient that the end and the beginning of an axis of the stored volume are at; LPS: x to the left,
// y to the back, z to the head. The affine maps column, row, slice.
function sideOf(affine, axis) {
  if (!affine) return null;
  const letters = [["L", "R"], ["P", "A"], ["H", "F"]];
  const parts = [0, 1, 2].map((side) => affine[side][2 - axis]);
  const main = parts.reduce((best, part, at) => (Math.abs(part) > Math.abs(parts[best]) ? at : best), 0);
  return parts[main] > 0 ? letters[main] : [...letters[main]].reverse();
}

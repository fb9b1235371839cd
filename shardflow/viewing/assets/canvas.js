// Slices of one series on a canvas: fetched ahead, windowed here, zoomed, with regions over them.

const CACHE_BYTES = 384 << 20;
const AHEAD = 12;
const BEHIND = 4;
const MOST_REQUESTS = 6;
const ARRAYS = { uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, float32: Float32Array };
const COLORS = ["#ff5e5e", "#4fc3f7", "#ffd54f", "#81c784", "#ba68c8", "#ff8a65", "#4db6ac", "#f06292"];

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
    this.clear();
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  clear() {
    this.study = null;
    this.count = 0;
    this.index = 0;
    this.direction = 1;
    this.error = "";
    for (const controller of this.waiting.values()) controller.abort();
    this.waiting.clear();
    this.draw();
  }

  open(row, series, number, regions) {
    for (const controller of this.waiting.values()) controller.abort();
    this.waiting.clear();
    this.failed.clear();
    this.study = { row, series, number, regions };
    this.count = series.num_slices;
    this.index = Math.min(Math.floor(this.count / 2), Math.max(this.count - 1, 0));
    this.resetView();
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
    if (!this.study || !this.count) return this.draw();
    const wanted = Math.max(0, Math.min(this.count - 1, index));
    if (wanted !== this.index) this.direction = wanted > this.index ? 1 : -1;
    this.index = wanted;
    this.error = this.failed.get(this.key(wanted)) ?? "";
    this.draw();
    this.fetchAround();
  }

  key(index, mask = "") {
    return `${this.study.row}/${this.study.number}/${index}/${mask}`;
  }

  fetchAround() {
    const wanted = [this.index];
    for (let step = 1; step <= AHEAD; step++) {
      wanted.push(this.index + step * this.direction);
      if (step <= BEHIND) wanted.push(this.index - step * this.direction);
    }
    const inside = wanted.filter((index) => index >= 0 && index < this.count);
    // What is far from here by now is not waited for.
    for (const [key, controller] of this.waiting) {
      if (!inside.some((index) => key.startsWith(this.key(index)))) {
        controller.abort();
        this.waiting.delete(key);
      }
    }
    for (const index of inside) {
      const { row, number } = this.study;
      this.fetch(this.key(index), `api/samples/${row}/slices/${number}/${index}`, index === this.index);
      if (index !== this.index || !this.showRegions) continue;
      for (const region of this.regionsOn(index)) {
        if (region.mask === null) continue;
        const address = `api/samples/${row}/masks/${number}/${region.mask}/${index}`;
        this.fetch(this.key(index, region.mask), address, true);
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
      if (this.study && key === this.key(this.index)) this.error = error.message;
    } finally {
      if (this.waiting.get(key) === controller) this.waiting.delete(key);
    }
    if (this.study && key.startsWith(this.key(this.index))) this.draw();
    if (this.study) this.fetchAround();
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

  regionsOn(index) {
    return (this.study?.regions ?? []).filter((region) => region.slices.has(index));
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
    const found = this.study && this.pixels.get(this.key(this.index));
    if (found) {
      this.paint(found);
      const [down, right] = this.study.series.pixel_spacing_mm ?? [1, 1];
      const tall = (found.rows * down) / right;
      const fit = Math.min(width / found.columns, height / tall) * 0.96 * this.zoom;
      const left = (width - found.columns * fit) / 2 + this.shift[0] * scale;
      const top = (height - tall * fit) / 2 + this.shift[1] * scale;
      context.setTransform(fit, 0, 0, (fit * down) / right, left, top);
      context.imageSmoothingEnabled = fit < 3;
      context.drawImage(this.image, 0, 0);
      if (this.showRegions) this.drawRegions(context, fit);
      context.setTransform(scale, 0, 0, scale, 0, 0);
      this.drawMarks(context, width / scale, height / scale, fit / scale / right);
      canvas.dataset.drawn = this.key(this.index);
      canvas.dataset.frames = String(+(canvas.dataset.frames ?? 0) + 1);
    }
    this.onChange(this);
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

  drawRegions(context, fit) {
    context.lineWidth = 1.5 / fit;
    for (const region of this.regionsOn(this.index)) {
      const color = COLORS[region.number % COLORS.length];
      const mask = region.mask === null ? null : this.pixels.get(this.key(this.index, region.mask));
      if (mask) context.drawImage(tinted(mask, color), 0, 0);
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

  drawMarks(context, width, height, pixelsPerMm) {
    context.font = "13px system-ui, sans-serif";
    context.fillStyle = "#ffd27a";
    const sides = sidesOf(this.study.series.affine_lps);
    if (sides) {
      context.textAlign = "center";
      context.fillText(sides.top, width / 2, 18);
      context.fillText(sides.bottom, width / 2, height - 8);
      context.textAlign = "left";
      context.fillText(sides.left, 8, height / 2);
      context.textAlign = "right";
      context.fillText(sides.right, width - 8, height / 2);
    }
    if (this.study.series.pixel_spacing_mm) {
      const mm = [200, 100, 50, 20, 10, 5, 2, 1].find((size) => size * pixelsPerMm < width / 3) ?? 1;
      context.textAlign = "right";
      context.fillRect(width - 12 - mm * pixelsPerMm, height - 26, mm * pixelsPerMm, 2);
      context.fillText(mm >= 10 ? `${mm / 10} cm` : `${mm} mm`, width - 12, height - 32);
    }
  }
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

// Which side of the patient each edge of the picture is; LPS: x to the left, y to the back, z to the head.
export function sidesOf(affine) {
  if (!affine) return null;
  const letters = [["L", "R"], ["P", "A"], ["H", "F"]];
  const end = (column) => {
    const parts = [0, 1, 2].map((axis) => affine[axis][column]);
    const axis = parts.reduce((best, part, at) => (Math.abs(part) > Math.abs(parts[best]) ? at : best), 0);
    const [plus, minus] = letters[axis];
    return parts[axis] > 0 ? [plus, minus] : [minus, plus];
  };
  const [right, left] = end(0);
  const [bottom, top] = end(1);
  return { left, right, top, bottom };
}

// A recording on paper: a row for each channel, millimetres for an ECG, each row's own scale for others.

const LABEL = 74;
const HEAD = 18;
const STEPS = 10; // of a window, that the wheel goes through
const MOST_MM = 3.8;
const LEAST_MM = 1.4;
const ROW_MM = 18;
const MOST_ROW = 200;
const MILLIVOLTS = { V: 1000, mV: 1, uV: 0.001, "\u00b5V": 0.001, "\u03bcV": 0.001, nV: 0.000001 };
const LEAD = /^(ECG |EKG |LEAD )?(I{1,3}|A?V[RLF]|V\d+R?|MLI{1,3}|MCL1?|MV\d|V|D[1-3]|ECG|EKG)$/i;
const ECG_SPEEDS = [12.5, 25, 50];
const SECONDS = [1, 5, 10, 30, 60, 300, 1800];
const GAINS = [2.5, 5, 10, 20];

// Each array of each recording is one to choose.
export function recordingsOf(study) {
  return (study.waveforms?.recordings ?? []).flatMap((recording) =>
    (recording.arrays ?? []).map((array) => ({
      row: study.row,
      recording: recording.recording,
      group: +/\.g(\d+)\./.exec(array.field)[1],
      source: recording.source,
      events: recording.events ?? [],
      flags: recording.flags ?? [],
      rate: array.rate_hz,
      count: array.num_samples,
      begin: array.start_s ?? 0,
      channels: array.channels,
      isEcg: isEcg(array.channels),
      rateOfEvents: recording.arrays[0].rate_hz,
    })),
  );
}

function isEcg(channels) {
  const leads = channels.filter(({ label, unit, gain }) => LEAD.test(label ?? "") && unit in MILLIVOLTS && gain !== null);
  return leads.length > channels.length / 2;
}

export function nameOf(shown) {
  const { recording, source, channels, rate, count } = shown;
  return `${shown.isEcg ? "ECG" : "recording"} ${recording}: ${source}, ${counted(channels)}, ${time(count / rate)}`;
}

export class Strip {
  constructor(canvas, onChange) {
    this.canvas = canvas;
    this.onChange = onChange;
    this.clear();
    new ResizeObserver(() => this.shown && this.show(this.index)).observe(canvas);
  }

  clear() {
    this.shown = null;
    this.index = 0;
    this.count = 0;
    this.stretch = null;
    this.error = "";
    this.asked?.abort();
  }

  open(shown) {
    this.clear();
    this.shown = shown;
    this.speeds = shown.isEcg ? ECG_SPEEDS : [...SECONDS.filter((seconds) => seconds < shown.count / shown.rate), shown.count / shown.rate];
    this.speed = shown.isEcg ? 25 : (this.speeds.find((seconds) => seconds >= 10) ?? this.speeds.at(-1));
    this.gain = 10;
    this.scales = null;
    this.show(0);
  }

  speedNames() {
    return this.speeds.map((one) => (this.shown.isEcg ? `${one} mm/s` : time(one)));
  }

  setSpeed(at) {
    const begin = this.index * this.step();
    this.speed = this.speeds[at];
    this.measure();
    this.show(Math.round(begin / this.step()));
  }

  setGain(at) {
    this.gain = GAINS[at];
    this.draw();
  }

  // How large a millimetre is, and how long what is seen: from the size of the canvas.
  measure() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    this.rowHeight = Math.max(10, Math.min(MOST_ROW, (height - HEAD) / this.shown.channels.length));
    this.mm = Math.max(LEAST_MM, Math.min(MOST_MM, this.rowHeight / ROW_MM));
    this.width = Math.max(1, width - LABEL);
    this.seconds = this.shown.isEcg ? this.width / (this.mm * this.speed) : this.speed;
    const whole = this.shown.count / this.shown.rate;
    this.count = Math.max(1, Math.ceil((whole - this.seconds) / this.step() - 1e-9) + 1);
  }

  step() {
    return this.seconds / STEPS;
  }

  show(index) {
    if (!this.shown) return;
    this.measure();
    this.index = Math.max(0, Math.min(this.count - 1, index));
    this.fetch();
  }

  async fetch() {
    const { row, recording, group, rate } = this.shown;
    this.asked?.abort();
    const controller = (this.asked = new AbortController());
    const start = Math.floor(this.index * this.step() * rate);
    const values = new URLSearchParams({ start, count: Math.ceil(this.seconds * rate) + 1, columns: Math.round(this.width * devicePixelRatio) });
    try {
      const answer = await fetch(`api/samples/${row}/waveforms/${recording}/${group}?${values}`, { signal: controller.signal });
      if (!answer.ok) throw new Error(await answer.text());
      const head = (name) => +answer.headers.get(`X-${name}`);
      const data = new Float32Array(await answer.arrayBuffer());
      this.stretch = { start, columns: head("Columns"), per: head("Per-Column"), data, index: this.index };
      this.error = "";
    } catch (error) {
      if (error.name === "AbortError") return;
      this.stretch = null;
      this.error = error.message;
    }
    if (controller === this.asked) this.draw();
  }

  // A row keeps its place while one scrolls: from what was seen first, and wider where more comes.
  scale() {
    const { columns, data } = this.stretch;
    const seen = this.shown.channels.map((_, at) => {
      let [low, high] = [Infinity, -Infinity];
      for (let place = at * columns * 2; place < (at + 1) * columns * 2; place++) {
        if (data[place] < low) low = data[place];
        if (data[place] > high) high = data[place];
      }
      return [low, high];
    });
    if (!this.scales) {
      this.scales = seen;
      this.middles = seen.map((_, at) => middle(data.subarray(at * columns * 2, (at + 1) * columns * 2)));
    } else {
      this.scales = this.scales.map(([low, high], at) => [Math.min(low, seen[at][0]), Math.max(high, seen[at][1])]);
    }
  }

  draw() {
    const canvas = this.canvas;
    const ratio = devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    pen.fillStyle = this.shown?.isEcg ? "#fff7f5" : "#fbfcfe";
    pen.fillRect(0, 0, width, height);
    if (this.shown && this.stretch) {
      this.scale();
      this.drawPaper(pen, width, height);
      this.shown.channels.forEach((channel, at) => this.drawRow(pen, channel, at));
      this.drawEvents(pen, height);
      canvas.dataset.drawn = `${this.shown.row}/${this.shown.recording}/${this.shown.group}/${this.stretch.index}`;
      canvas.dataset.millimetre = this.mm;
    }
    this.onChange(this);
  }

  at(second) {
    const perSecond = this.shown.isEcg ? this.mm * this.speed : this.width / this.seconds;
    return LABEL + (second - this.stretch.start / this.shown.rate) * perSecond;
  }

  drawPaper(pen, width, height) {
    const begin = this.stretch.start / this.shown.rate;
    if (this.shown.isEcg) {
      const perSquare = 5 / this.speed;
      for (const [every, color] of [[1, "#f6d8d4"], [5, "#e9aaa3"]]) {
        pen.strokeStyle = color;
        pen.lineWidth = every === 1 ? 0.5 : 0.9;
        pen.beginPath();
        const seconds = (every / 5) * perSquare;
        for (let at = Math.ceil(begin / seconds); this.at(at * seconds) < width; at++) line(pen, this.at(at * seconds), HEAD, this.at(at * seconds), height);
        for (let y = HEAD; y < height; y += every * this.mm) line(pen, LABEL, y, width, y);
        pen.stroke();
      }
    }
    const every = [0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 900, 3600].find((one) => this.at(begin + one) - LABEL > 60) ?? 7200;
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = "#59636e";
    pen.strokeStyle = "#d5dbe3";
    pen.lineWidth = 1;
    for (let at = Math.ceil(begin / every - 1e-9); this.at(at * every) < width; at++) {
      const x = this.at(at * every);
      if (!this.shown.isEcg) {
        pen.beginPath();
        line(pen, x, HEAD, x, height);
        pen.stroke();
      }
      pen.fillText(clock(at * every), x + 2, 12);
    }
  }

  drawRow(pen, channel, at) {
    const { columns, per, data } = this.stretch;
    const center = HEAD + (at + 0.5) * this.rowHeight;
    const [low, high] = this.scales[at];
    const millivolts = MILLIVOLTS[channel.unit];
    const isOnPaper = this.shown.isEcg && millivolts !== undefined && channel.gain !== null;
    const perUnit = isOnPaper ? millivolts * this.gain * this.mm : (0.84 * this.rowHeight) / (high - low || 1);
    const zero = isOnPaper ? this.middles[at] : (low + high) / 2;
    pen.fillStyle = "#1b1f24";
    pen.font = "600 12px system-ui, sans-serif";
    pen.fillText(channel.label ?? `channel ${at}`, 6, center + 4, LABEL - 22);
    if (!isOnPaper && this.rowHeight > 34 && Number.isFinite(low)) {
      pen.fillStyle = "#59636e";
      pen.font = "10px system-ui, sans-serif";
      const unit = channel.gain === null ? "stored" : (channel.unit ?? "");
      pen.fillText(`${short(low)} to ${short(high)} ${unit}`, 6, center + 17, LABEL - 8);
    }
    pen.strokeStyle = "#10151b";
    pen.lineJoin = "round";
    if (isOnPaper) this.drawPulse(pen, center);
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, HEAD, this.width, this.canvas.clientHeight - HEAD);
    pen.clip();
    pen.lineWidth = 1.1;
    pen.beginPath();
    let isDown = false;
    for (let column = 0; column < columns; column++) {
      const place = (at * columns + column) * 2;
      const [least, most] = [data[place], data[place + 1]];
      if (Number.isNaN(least)) {
        isDown = false;
        continue;
      }
      const x = this.at((this.stretch.start + column * per) / this.shown.rate);
      if (isDown) pen.lineTo(x, center - (least - zero) * perUnit);
      else pen.moveTo(x, center - (least - zero) * perUnit);
      if (most > least) pen.lineTo(x, center - (most - zero) * perUnit);
      isDown = true;
    }
    pen.stroke();
    pen.restore();
  }

  // What one millivolt is: as high as the trace would be, and a fifth of a second long.
  drawPulse(pen, center) {
    const [left, right] = [LABEL - 14, LABEL - 14 + Math.min(10, 0.2 * this.speed * this.mm)];
    const top = center - this.gain * this.mm;
    pen.lineWidth = 0.9;
    pen.beginPath();
    pen.moveTo(left - 2, center);
    for (const [x, y] of [[left, center], [left, top], [right, top], [right, center], [right + 2, center]]) pen.lineTo(x, y);
    pen.stroke();
  }

  drawEvents(pen, height) {
    const { events, rate, rateOfEvents, begin } = this.shown;
    const from = this.stretch.start / rate;
    pen.font = "10px system-ui, sans-serif";
    let free = 0;
    for (const event of events) {
      const second = (event.start_s ?? (event.samples?.[0] ?? NaN) / rateOfEvents) - begin;
      if (!(second >= from && second <= from + this.seconds)) continue;
      const x = this.at(second);
      pen.strokeStyle = "rgba(47, 111, 222, .45)";
      pen.beginPath();
      line(pen, x, HEAD, x, height);
      pen.stroke();
      const says = String(event.symbol ?? event.kind ?? event.text ?? event.code?.value ?? "");
      if (x < free || !says) continue;
      pen.fillStyle = "#2f6fde";
      pen.fillText(says, x + 2, height - 4);
      free = x + pen.measureText(says).width + 6;
    }
  }

  describe() {
    const { shown, stretch } = this;
    if (!shown || !stretch) return "";
    const begin = stretch.start / shown.rate;
    const end = Math.min(begin + this.seconds, shown.count / shown.rate);
    return [
      `${clock(begin)} to ${clock(end)} of ${time(shown.count / shown.rate)}`,
      `${counted(shown.channels)} at ${short(shown.rate)} Hz`,
      shown.isEcg ? `${this.speed} mm/s, ${this.gain} mm/mV` : "each row in its own scale",
      shown.channels.some(({ gain }) => gain === null) ? "not calibrated" : "",
      shown.flags.join(" "),
    ].filter(Boolean).join(" \u00b7 ");
  }
}

export const gainNames = () => GAINS.map((one) => `${one} mm/mV`);
export const FIRST_GAIN = GAINS.indexOf(10);

function line(pen, x1, y1, x2, y2) {
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
}

function middle(values) {
  const sorted = values.filter((value) => !Number.isNaN(value)).sort();
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}

function counted(channels) {
  return `${channels.length} ${channels.length === 1 ? "channel" : "channels"}`;
}

function short(value) {
  return Number(value.toPrecision(3)).toString();
}

function clock(seconds) {
  const whole = Math.floor(seconds + 1e-6);
  if (whole < 60) return `${Number(seconds.toFixed(1))} s`;
  const parts = [Math.floor(whole / 60) % 60, whole % 60].map((part) => String(part).padStart(2, "0"));
  return whole < 3600 ? `${Math.floor(whole / 60)}:${parts[1]}` : `${Math.floor(whole / 3600)}:${parts.join(":")}`;
}

function time(seconds) {
  if (seconds < 120) return `${Number(seconds.toFixed(1))} s`;
  return seconds < 7200 ? `${Number((seconds / 60).toFixed(1))} min` : `${Number((seconds / 3600).toFixed(1))} h`;
}

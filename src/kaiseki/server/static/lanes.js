// The picture of the last seconds: one lane per request, one mark per chunk, drawn only where it is seen.

export const LANE_PX = 22;
const LABEL_PX = 210;
const TIME_PX = 18;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Lanes {
  constructor(canvas, scroller) {
    this.canvas = canvas;
    this.scroller = scroller;
    this.chunks = new Map(); // request -> [[start_ms, end_ms, tokens, sampled], ...]
    this.marks = new Map(); // request -> [[t_ms, event, reason], ...]
    this.nowMs = 0;
    this.windowMs = 20_000;
  }

  take(event) {
    this.nowMs = event.now_ms;
    for (const [, start, end, ran] of event.slots) {
      for (const [request, tokens, sampled] of ran) this.#push(this.chunks, request, [start, end, tokens, sampled]);
    }
    for (const [t, request, what, reason] of event.marks) this.#push(this.marks, request, [t, what, reason]);
    const oldest = this.nowMs - 65_000;
    for (const kept of [this.chunks, this.marks]) {
      for (const [request, list] of kept) {
        while (list.length && list[0][0] < oldest) list.shift();
        if (!list.length) kept.delete(request);
      }
    }
  }

  #push(map, request, item) {
    if (!map.has(request)) map.set(request, []);
    map.get(request).push(item);
  }

  draw(requests) {
    const ratio = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (this.canvas.width !== width * ratio || this.canvas.height !== height * ratio) {
      this.canvas.width = width * ratio;
      this.canvas.height = height * ratio;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.colour = Object.fromEntries(
      ["prefill", "decode", "waits", "paused", "preempted", "line", "soft", "panel"].map((n) => [n, css(`--${n}`)]));
    const from = this.nowMs - this.windowMs;
    const x = (t) => LABEL_PX + (Math.max(t, from) - from) / this.windowMs * (width - LABEL_PX);
    const top = this.scroller.scrollTop;
    this.#grid(pen, x, width, height);
    const first = Math.max(0, Math.floor(top / LANE_PX));
    const last = Math.min(requests.length, Math.ceil((top + height) / LANE_PX));
    for (let i = first; i < last; i++) this.#lane(pen, requests[i], i * LANE_PX - top, x, from);
    pen.fillStyle = this.colour.panel;
    pen.fillRect(0, height - TIME_PX, width, TIME_PX);
    this.#times(pen, x, width, height);
  }

  #grid(pen, x, width, height) {
    pen.fillStyle = this.colour.line;
    for (let s = 0; s <= 5; s++) pen.fillRect(x(this.nowMs - s / 5 * this.windowMs), 0, 1, height);
  }

  #times(pen, x, width, height) {
    pen.fillStyle = this.colour.soft;
    pen.font = "11px system-ui, sans-serif";
    for (let s = 0; s <= 5; s++) {
      const ago = s / 5 * this.windowMs / 1000;
      pen.textAlign = s === 0 ? "right" : s === 5 ? "left" : "center";
      pen.fillText(s === 0 ? "now" : `−${ago} s`, x(this.nowMs - ago * 1000), height - 5);
    }
  }

  #lane(pen, request, y, x, from) {
    for (const [start, end, colour, slant] of this.#waits(request, from)) {
      this.#hatch(pen, x(start), y + 5, x(end) - x(start), LANE_PX - 10, colour, slant);
    }
    for (const [start, end, tokens, sampled] of this.chunks.get(request.request) ?? []) {
      if (end < from) continue;
      const prefill = tokens > 1 || !sampled;
      pen.fillStyle = prefill ? this.colour.prefill : this.colour.decode;
      const gap = x(end) - x(start) > 4 ? 1 : 0;
      pen.fillRect(x(start), y + (prefill ? 4 : 7), Math.max(1, x(end) - x(start) - gap), LANE_PX - (prefill ? 8 : 14));
    }
    for (const [t, event] of this.marks.get(request.request) ?? []) {
      if (t >= from && event === "preempted") {
        pen.fillStyle = this.colour.preempted;
        pen.fillRect(x(t) - 1.5, y + 1, 3, LANE_PX - 2);
      }
    }
  }

  // From arrival, a preemption or a pause until it is taken (again).
  * #waits(request, from) {
    let since = this.nowMs - request.age_ms;
    let paused = false;
    let waiting = true;
    for (const [t, event] of this.marks.get(request.request) ?? []) {
      const ends = event === "admitted" || event === "resumed";
      const begins = event === "preempted" || event === "retried" || event === "paused";
      if (!ends && !begins) continue;
      if (waiting && t > from) yield [since, t, paused ? this.colour.paused : this.colour.waits, paused ? -1 : 1];
      [since, waiting, paused] = [t, begins, event === "paused"];
    }
    const known = this.marks.has(request.request) || request.state !== "running";
    if (waiting && known) yield [since, this.nowMs, paused ? this.colour.paused : this.colour.waits, paused ? -1 : 1];
  }

  #hatch(pen, x, y, width, height, colour, slant) {
    if (width <= 0) return;
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width, height);
    pen.clip();
    pen.strokeStyle = colour;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (let at = x - height; at < x + width + height; at += 6) {
      pen.moveTo(at, slant > 0 ? y + height : y);
      pen.lineTo(at + height, slant > 0 ? y : y + height);
    }
    pen.stroke();
    pen.restore();
  }
}

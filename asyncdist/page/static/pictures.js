// The matrix of who waits for whom, and throughput over time.

const { uPlot } = globalThis;  // vendor/uPlot.iife.min.js
const KEPT_S = 300;
const TEXTS = 40;

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function drawMatrix(canvas, size, ranks) {
  const waits = ranks.flatMap((row) => row.waits_for.map((awaited) => [row.rank, awaited]));
  const cell = Math.max(1, Math.floor(320 / Math.max(size, 1)));
  canvas.width = canvas.height = Math.max(size * cell, 1);
  const pen = canvas.getContext("2d");
  pen.fillStyle = color("--line");
  for (let rank = 0; rank < size; rank += 1) pen.fillRect(rank * cell, rank * cell, cell, cell);
  pen.fillStyle = color("--bad");
  for (const [waiting, awaited] of waits) pen.fillRect(awaited * cell, waiting * cell, cell, cell);
  const named = waits.slice(0, TEXTS).map(([waiting, awaited]) => `${waiting} for ${awaited}`).join(", ");
  const more = waits.length > TEXTS ? ` and ${waits.length - TEXTS} more` : "";
  const text = waits.length ? `Rank ${named}${more}.` : "No rank waits for another one.";
  canvas.setAttribute("aria-label", `A row for each rank that waits, a column for each that is waited for. ${text}`);
  return text;
}

export class Throughput {
  constructor(place) {
    this.place = place;
    this.times = [];
    this.rates = [];
    this.plot = null;
  }

  clear() {
    this.times = [];
    this.rates = [];
  }

  add(time, rate) {
    this.times.push(time);
    this.rates.push(rate / 2 ** 20);
    while (this.times[0] < time - KEPT_S) { this.times.shift(); this.rates.shift(); }
    this.plot ??= this.make();
    this.plot.setData([this.times, this.rates]);
  }

  make() {
    const axis = { stroke: color("--text"), grid: { stroke: color("--line") } };
    const size = () => ({ width: this.place.clientWidth, height: 180 });
    const plot = new uPlot({
      ...size(),
      series: [{}, { label: "MiB/s", stroke: color("--link"), width: 2 }],
      axes: [axis, { ...axis, size: 60 }],
      legend: { live: false },
    }, [[], []], this.place);
    addEventListener("resize", () => plot.setSize(size()));
    return plot;
  }
}

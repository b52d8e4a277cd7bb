/** Small charts as SVG text: colours of text and axes are the page's own. */

export const COLOURS = ["#3b7dd8", "#d9730d", "#2e9e5b", "#b54708", "#8250df", "#c2255c", "#0b8a9f",
  "#7a7a00"];
const NAMED = 8; // dots that have their names beside them
const WIDEST = 720, LEFT = 64, RIGHT = 18, TOP = 14, BOTTOM = 42;
let width = WIDEST;

/** Draw charts for a window of a number of pixels: text keeps its size on a phone. */
export const fit = (pixels) => { width = Math.min(WIDEST, Math.max(320, pixels - 40)); };

/** Text that may stand in HTML. */
export const safe = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

/** A number as an axis shows it: 1.5K, 2.5M, 0.25. */
export function short(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "K"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${letter}`;
  }
  return `${Number(value.toPrecision(3))}`;
}

/** An axis over values: where each lies, and its ticks. */
function axis(values, start, end, { log = false, zero = false } = {}) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) [low, high] = [low / 1.15, high * 1.15];
  else {
    if (zero) low = Math.min(0, low);
    const room = 0.04 * (high - low) || Math.abs(high) * 0.1 || 1;
    [low, high] = [zero && low >= 0 ? low : low - room, high + room];
  }
  const to = log ? Math.log : (value) => value;
  const at = (value) => {
    const share = (to(Math.max(value, log ? low : -Infinity)) - to(low)) / (to(high) - to(low));
    return start + share * (end - start);
  };
  return { at, ticks: (log ? logTicks : ticks)(low, high) };
}

function ticks(low, high) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((s) => s * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9; k++) found.push(k * step);
  return found;
}

function logTicks(low, high) {
  const steps = Math.log10(high / low) < 2.5 ? [1, 2, 5] : [1], found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
    for (const s of steps) found.push(s * 10 ** p);
  }
  return found.filter((mark) => mark >= low && mark <= high);
}

const text = (x, y, words, anchor = "start", css = "") =>
  `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" text-anchor="${anchor}" class="${css}">${safe(words)}</text>`;
const line = (x1, y1, x2, y2, css, more = "") => `<line x1="${x1.toFixed(1)}" y1="${y1.toFixed(1)}" `
  + `x2="${x2.toFixed(1)}" y2="${y2.toFixed(1)}" class="${css}" ${more}/>`;
const svg = (title, body, height, role = 'role="img"') =>
  `<svg viewBox="0 0 ${width} ${height}" ${role} aria-label="${safe(title)}">${body.join("")}</svg>`;
const isWide = (values) => Math.min(...values) > 0 && Math.max(...values) > 12 * Math.min(...values);

function frame(across, up, xTitle, yTitle, height) {
  const bottom = height - BOTTOM;
  return [
    ...across.ticks.flatMap((t) => [line(across.at(t), TOP, across.at(t), bottom, "grid"),
      text(across.at(t), bottom + 16, short(t), "middle")]),
    ...up.ticks.flatMap((t) => [line(LEFT, up.at(t), width - RIGHT, up.at(t), "grid"),
      text(LEFT - 6, up.at(t) + 4, short(t), "end")]),
    text((LEFT + width - RIGHT) / 2, height - 6, xTitle, "middle"),
    text(6, TOP - 2, yTitle),
  ];
}

/**
 * Dots with ranges; each is a button.
 * @param {{x: Span, y: Span, label: string, place: number, front: boolean, chosen: boolean,
 *   colour: string}[]} points
 */
export function scatter(title, points, xTitle, yTitle) {
  const height = 360, ends = (of) => points.flatMap((p) => [p[of].low, p[of].high]);
  const across = axis(ends("x"), LEFT, width - RIGHT, { log: isWide(ends("x")), zero: true });
  const up = axis(ends("y"), height - BOTTOM, TOP, { log: isWide(ends("y")), zero: true });
  const front = points.filter((p) => p.front).sort((a, b) => a.x.value - b.x.value);
  const path = front.map((p) => `${across.at(p.x.value).toFixed(1)},${up.at(p.y.value).toFixed(1)}`);
  const labels = [];
  const dots = [...points].reverse().map((p) => {
    const x = across.at(p.x.value), y = up.at(p.y.value), left = x > width - 170;
    const free = [-10, 20, -24, 34, -38, 48].find((shift) =>
      !labels.some(([at, height_]) => Math.abs(at - x) < 150 && Math.abs(height_ - y - shift) < 13)) ?? -10;
    labels.push([x, y + free, left ? "end" : "start", p.name.length > 26 ? `${p.name.slice(0, 25)}…` : p.name]);
    return `<g role="button" tabindex="0" class="dot" data-name="${safe(p.name)}" `
      + `aria-pressed="${p.chosen}" aria-label="${safe(p.label)}"><title>${safe(p.label)}</title>`
      + line(across.at(p.x.low), y, across.at(p.x.high), y, "range", `stroke="${p.colour}"`)
      + line(x, up.at(p.y.low), x, up.at(p.y.high), "range", `stroke="${p.colour}"`)
      + `<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="${p.chosen ? 11 : 9}" fill="${p.colour}" `
      + `class="${p.chosen ? "chosen" : ""}"/>`
      + `<text x="${x.toFixed(1)}" y="${(y + 4).toFixed(1)}" text-anchor="middle" class="on">${p.place}</text></g>`;
  });
  const names = points.length > NAMED ? [] : labels.map(([x, y, anchor, name]) =>
    text(anchor === "end" ? x - 12 : x + 12, y, name, anchor, "small"));
  const body = [...frame(across, up, xTitle, yTitle, height),
    `<polyline points="${path.join(" ")}" class="front"/>`, ...dots, ...names];
  return svg(title, body, height, 'role="group"');
}

/** Lines: {name, points: [x, y][], dashed, dots}; a key below. */
export function lines(title, series, xTitle, yTitle, mark = null) {
  const height = 300, xs = series.flatMap((s) => s.points.map(([x]) => x));
  const ys = series.flatMap((s) => s.points.map(([, y]) => y));
  const across = axis(xs, LEFT, width - RIGHT, { log: isWide(xs) });
  const up = axis(ys, height - BOTTOM, TOP, { log: isWide(ys), zero: true });
  const body = frame(across, up, xTitle, yTitle, height);
  series.forEach((s, index) => {
    const colour = COLOURS[index % COLOURS.length];
    const at = s.points.map(([x, y]) => [across.at(x).toFixed(1), up.at(y).toFixed(1)]);
    body.push(`<polyline points="${at.join(" ")}" fill="none" stroke="${colour}" stroke-width="2" `
      + `${s.dashed ? 'stroke-dasharray="6 4"' : ""}><title>${safe(s.name)}</title></polyline>`);
    if (s.dots) for (const [x, y] of at) body.push(`<circle cx="${x}" cy="${y}" r="4" fill="${colour}"/>`);
  });
  if (mark !== null) body.push(line(across.at(mark), TOP, across.at(mark), height - BOTTOM, "mark"));
  return svg(title, body, height) + key(series.map(({ name }) => name));
}

/** Dollars over months: lines with their names at their ends, and where one crosses another. */
export function spending(title, series, mark, months) {
  const wide = Math.min(width, 640), height = 270, right = 150;
  const most = Math.max(...series.flatMap((s) => s.points.map(([, y]) => y)));
  const across = axis([0, months], LEFT, wide - right, { zero: true }), up = axis([0, most], height - BOTTOM, TOP, { zero: true });
  const bottom = height - BOTTOM;
  const body = [
    ...up.ticks.flatMap((t) => [line(LEFT, up.at(t), wide - right, up.at(t), "grid"), text(LEFT - 6, up.at(t) + 4, short(t), "end")]),
    ...across.ticks.map((t) => text(across.at(t), bottom + 16, t ? short(t) : "now", "middle")),
    text((LEFT + wide - right) / 2, height - 6, "months", "middle"),
  ];
  const ends = series.map((s) => ({ s, y: up.at(s.points.at(-1)[1]) })).sort((a, b) => a.y - b.y);
  ends.forEach((end, k) => { if (k) end.y = Math.max(end.y, ends[k - 1].y + 15); });
  for (const { s, y } of ends) {
    const at = s.points.map(([x, usd]) => `${across.at(x).toFixed(1)},${up.at(usd).toFixed(1)}`);
    body.push(`<polyline points="${at.join(" ")}" fill="none" stroke="${s.colour}" stroke-width="2.5"><title>${safe(`${s.name}: ${short(s.points.at(-1)[1])} USD`)}</title></polyline>`);
    body.push(text(wide - right + 6, y + 4, s.name.length > 20 ? `${s.name.slice(0, 19)}…` : s.name, "start", "named"));
  }
  if (mark) {
    const x = across.at(mark.x), y = up.at(mark.y);
    body.push(`<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="5" fill="${COLOURS[0]}"><title>${safe(mark.words)}</title></circle>`);
    const late = x > (LEFT + wide - right) / 2;
    body.push(text(late ? x - 8 : x + 8, y - 10 < TOP + 12 ? y + 18 : y - 10, mark.words, late ? "end" : "start"));
  }
  return `<svg viewBox="0 0 ${wide} ${height}" role="img" aria-label="${safe(title)}">${body.join("")}</svg>`;
}

/** Names with their colours. */
export const key = (names) => `<ul class="key">${names.map((name, index) =>
  `<li><i style="background:${COLOURS[index % COLOURS.length]}"></i>${safe(name)}</li>`).join("")}</ul>`;

/** A bar from a middle, for a row of a table: all rows have one scale. */
export function bar(low, high, now, least, most) {
  const long = 220, at = (value) => 4 + (long - 8) * (value - least) / (most - least || 1);
  const part = (value, colour) => `<rect x="${Math.min(at(value), at(now)).toFixed(1)}" y="4" height="12" `
    + `width="${Math.abs(at(value) - at(now)).toFixed(1)}" fill="${colour}"/>`;
  return `<svg viewBox="0 0 ${long} 20" aria-hidden="true">${part(low, COLOURS[0])}${part(high, COLOURS[1])}`
    + `<line x1="${at(now)}" x2="${at(now)}" y1="0" y2="20" class="mark"/></svg>`;
}

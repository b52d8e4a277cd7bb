/**
 * Probabilities from ranges, and the futures that are drawn.  The twin of chances.py.
 *
 * A figure is log-normal to each side of its value; one outcome in ten lies beyond each end.  Each
 * cause has the same DRAWS quantiles of the normal distribution, in an order of its own.
 *
 * @typedef {import("./uncertain_value.mjs").Span} Span
 */
import { spreads } from "./uncertain_value.mjs";

export const DRAWS = 10000;

/** Quantile of the normal distribution (Wichura, Applied Statistics 37 (1988) 477, AS 241). */
export function inverseNormal(probability) {
  const q = probability - 0.5;
  if (Math.abs(q) <= 0.425) return q * rational(CENTRE, 0.180625 - q * q);
  const r = Math.sqrt(-Math.log(q <= 0 ? probability : 1 - probability));
  const x = r <= 5 ? rational(SHOULDER, r - 1.6) : rational(TAIL, r - 5);
  return q < 0 ? -x : x;
}

const CENTRE = [
  [2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4,
    4.5921953931549871457e4, 1.3731693765509461125e4, 1.9715909503065514427e3,
    1.3314166789178437745e2, 3.387132872796366608],
  [5.226495278852854561e3, 2.8729085735721942674e4, 3.9307895800092710610e4,
    2.1213794301586595867e4, 5.394196021424751108e3, 6.871870074920579083e2,
    4.2313330701600911252e1, 1]];
const SHOULDER = [
  [7.7454501427834140764e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
    1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959,
    1.42343711074968357734],
  [1.05075007164441684324e-9, 5.475938084995344946e-4, 1.51986665636164571966e-2,
    1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940,
    2.05319162663775882187, 1]];
const TAIL = [
  [2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3,
    2.65321895265761230930e-2, 2.96560571828504891230e-1, 1.78482653991729133580,
    5.46378491116411436990, 6.65790464350110377720],
  [2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5,
    7.868691311456132591e-4, 1.48753612908506148525e-2, 1.36929880922735805310e-1,
    5.99832206555887937690e-1, 1]];

function rational([above, below], x) {
  const at = (coefficients) => coefficients.reduce((sum, each) => sum * x + each, 0);
  return at(above) / at(below);
}

/** Standard deviations from the middle to the end of an 80 % range. */
export const TENTH = inverseNormal(0.9);
/** Of the normal distribution, in equal steps of probability. */
export const QUANTILES = Float64Array.from(
  { length: DRAWS }, (_, k) => inverseNormal((k + 0.5) / DRAWS));

/** Probability that a figure is no greater than a limit. */
export function within(span, limit) {
  if (span.value <= 0) return 1;
  if (limit <= 0) return 0;
  const [below, above] = spreads(span);
  const distance = Math.log(limit / span.value), width = distance >= 0 ? above : below;
  if (width === 0) return distance >= 0 ? 1 : 0;
  let first = 0, last = DRAWS; // the first quantile above the limit lies between
  while (first < last) {
    const middle = (first + last) >> 1;
    if (QUANTILES[middle] <= TENTH * distance / width) first = middle + 1;
    else last = middle;
  }
  return first / DRAWS;
}

/** CRC-32 of a text in UTF-8, as zlib has it. */
export function crc32(text) {
  let crc = -1;
  for (const byte of new TextEncoder().encode(text)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return (crc ^ -1) >>> 0;
}

/** Order in which a cause takes the quantiles: k-th key crc32(cause) + k 2654435769, mixed. */
export function orderOf(cause) {
  const seed = crc32(cause), keys = new Float64Array(DRAWS);
  for (let k = 0; k < DRAWS; k++) {
    let key = (Math.imul(k, 2654435769) + seed) >>> 0;
    key = Math.imul(key ^ (key >>> 16), 0x21f0aaad) >>> 0;
    key = Math.imul(key ^ (key >>> 15), 0x735a2d97) >>> 0;
    key = (key ^ (key >>> 15)) >>> 0;
    keys[k] = key * 16384 + k; // below 2 ** 46: exact, and equal keys keep their order
  }
  return keys.sort().map((key) => key % 16384);
}

const drawn = new Map();

/** A cause's futures in standard deviations. @returns {Float64Array} */
export function normals(cause) {
  if (!drawn.has(cause)) drawn.set(cause, orderOf(cause).map((at) => QUANTILES[at]));
  return drawn.get(cause);
}

const MOST_CACHED = 600;
const cached = new Map();

/** A figure's futures over its value, by what it depends on. @returns {Float64Array} */
export function multipliers(span, cause) {
  const [down, up] = spreads(span), key = `${cause}|${down}|${up}`;
  if (!cached.has(key)) {
    if (cached.size >= MOST_CACHED) cached.clear();
    cached.set(key, deviated(down, up, normals(cause)));
  }
  return cached.get(key);
}

/** exp of deviations, each times the width of its side. @returns {Float64Array} */
export const deviated = (down, up, deviations) =>
  deviations.map((normal) => Math.exp((normal < 0 ? down : up) * normal / TENTH));

/**
 * Span: a figure >= 0 with the ends of its 80 % range.  The twin of span.py.
 *
 * @typedef {{value: number, low: number, high: number}} Span
 */

/** A figure without a range. @param {number} value @returns {Span} */
export const exact = (value) => ({ value, low: value, high: value });

/** A figure as the page's data has it: [value, low, high]. @returns {Span} */
export const spanOf = ([value, low, high]) => ({ value, low, high });

/** A multiple by a number that is known exactly. @returns {Span} */
export const times = (span, factor) => ({
  value: span.value * factor, low: span.low * factor, high: span.high * factor,
});

/** One over a figure above 0. @returns {Span} */
export const inverse = (span) => ({
  value: 1 / span.value, low: 1 / span.high, high: 1 / (span.low || span.value),
});

/** Logarithmic distances of value to low and of high to value. @returns {[number, number]} */
export function spreads({ value, low, high }) {
  return value === 0 ? [0, 0] : [Math.log(value / (low || value)), Math.log(high / value)];
}

/** The product of independent figures: distances add in squares. @returns {Span} */
export function product(factors) {
  let value = 1, below = 0, above = 0;
  for (const factor of factors) {
    const [down, up] = spreads(factor);
    value *= factor.value;
    below += down * down;
    above += up * up;
  }
  if (value === 0) return exact(0);
  const low = value * Math.exp(-Math.sqrt(below)), high = value * Math.exp(Math.sqrt(above));
  return { value, low: Math.min(low, value), high: Math.max(high, value) };
}

/** The sum of figures, their ends added as they are. @returns {Span} */
export function total(terms) {
  const sum = (end) => terms.reduce((before, term) => before + term[end], 0);
  return { value: sum("value"), low: sum("low"), high: sum("high") };
}

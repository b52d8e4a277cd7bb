/**
 * Which input flips the first candidate, and where: a tornado of the decision.
 *
 * Each input is moved to both ends of its range, all others staying, and the candidates are compared
 * at their midpoints.  Where another one is first further out, the border is found by bisection.
 */
import { figureOf, ordered } from "./ranking.mjs";

const HALVINGS = 12; // of a factor of 25: to 0.1 %

/**
 * @typedef {{id: string, ids: string[], label: string, unit: string, now: number, low: number, high: number,
 *   least: number, most: number, touches: function(object): boolean}} Input
 *   ids: what moves with it, it too; low, high: its range; least, most: how far a flip is looked for; touches: which candidates
 * @typedef {{input: Input, low: number, high: number, flips: {at: number, to: string}[]}} Bar
 *   low, high: the first candidate's figure at the ends of the range
 */

/**
 * Bars of a tornado, those that flip the decision first.
 * @param {Input[]} inputs
 * @param {object} goal
 * @param {string} by       what candidates are ranked by
 * @param {object[]} base   outcomes as things stand, without draws
 * @param {function(Input, number): object[]} outcomesAt  the outcomes that an input touches at a value
 */
export function tornado(inputs, goal, by, base, outcomesAt) {
  const first = ordered(goal, base, by)[0];
  if (!first) return [];
  const name = first.candidate.name;
  const bars = inputs.map((input) => {
    const at = (value) => {
      const changed = new Map(outcomesAt(input, value).map((o) => [o.candidate.name, o]));
      const all = base.map((outcome) => changed.get(outcome.candidate.name) ?? outcome);
      return { first: ordered(goal, all, by)[0].candidate.name, all };
    };
    const figure = (value) => {
      const one = at(value).all.find((outcome) => outcome.candidate.name === name);
      return figureOf(one, by);
    };
    const flips = [input.least, input.most].flatMap((end) => flip(at, name, input.now, end));
    return { input, low: figure(input.low), high: figure(input.high), flips };
  });
  const now = figureOf(first, by);
  const width = (bar) => Math.max(Math.abs(bar.low - now), Math.abs(bar.high - now));
  const far = (bar) => Math.min(...bar.flips.map(({ at }) => distance(bar.input, at)), Infinity);
  return bars.filter((bar) => width(bar) > 1e-9 * now || bar.flips.length)
    .sort((a, b) => compare(far(a), far(b)) || width(b) - width(a));
}

const compare = (a, b) => (a === b ? 0 : a - b);

/** What the page's controls are where an input has a value. */
export const moved = ({ ids }, value) => Object.fromEntries(ids.map((id) => [id, value]));

/** How far a flip lies, in widths of the input's range to that side. */
function distance({ now, low, high }, at) {
  const end = at > now ? high : low;
  const width = Math.max(Math.abs(Math.log(end / now)), 0.02);
  return Math.abs(Math.log(at / now)) / width;
}

/** The value nearest to now, towards an end, from which another is first. */
function flip(at, name, now, end) {
  if (end === now || at(end).first === name) return [];
  let same = now, other = end;
  for (let k = 0; k < HALVINGS; k++) {
    const middle = same > 0 && other > 0 ? Math.sqrt(same * other) : (same + other) / 2;
    if (at(middle).first === name) same = middle;
    else other = middle;
  }
  return [{ at: other, to: at(other).first }];
}

/** Figures and verdicts of a study in words. */
import { eligible, orderedBy, sure } from "../../whatif/ranking.mjs";
import { load } from "../../whatif/pricing/queueing.mjs";
import { exact, times } from "../../whatif/uncertain_value.mjs";

const OLD_MONTHS = 6;
const CERTAIN = 0.995; // a probability that is written as 1.00, and not said

// Made once: a formatter takes as long to make as hundreds of numbers to format.
const FORMATS = [0, 1, 2, 3].map((digits) => new Intl.NumberFormat("en-US",
  { minimumFractionDigits: digits, maximumFractionDigits: digits }));

/** A number with a separator of thousands. */
export const grouped = (value, digits = 0) => FORMATS[digits].format(value);

const MOST_DIGITS = 12;

/** A figure and its limit, which differ, with as many digits as tell them apart. */
export function apartTexts(figure, limit) {
  let digits = limit >= 100 ? 0 : Math.max(0, 2 - Math.floor(Math.log10(limit)));
  while (digits < MOST_DIGITS && figure.toFixed(digits) === limit.toFixed(digits)) digits++;
  const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return [figure, limit].map((each) => each.toLocaleString("en-US", format));
}

/** A figure with its range. */
export function ranged(span, factor = 1) {
  const { value, low, high } = times(span, factor), digits = value >= 100 ? 0 : value >= 1 ? 1 : 3;
  const [v, l, h] = [value, low, high].map((each) => grouped(each, digits));
  return low === high ? v : `${v} (${l}–${h})`;
}

/** A duration: hours below two days. */
export const duration = (hours) => (hours.value < 48 ? `${ranged(hours)} h`
  : `${ranged(hours, 1 / 24)} days`);

/** A probability in per cent. */
export const percent = (share) => `${(100 * share).toFixed(0)} %`;

/** A price, with as many digits as one signs; of tokens and the like in millions and more. */
export const price = (usd) => (usd >= 1e7 ? large(usd) : usd >= 1000 ? grouped(usd) : usd.toFixed(2));

function large(value) {
  const [size, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([least]) => value >= least);
  return `${Number((value / size).toPrecision(3))} ${letter}`;
}

/** A price with its range, if it has one. */
const priceRange = ({ value, low, high }) => (low === high ? price(value)
  : `${price(value)} (${price(low)}–${price(high)})`);

const WORDS = { cost: "cheapest", time: "fastest", energy: "lowest in energy", carbon: "lowest in CO2",
  weighted: "best by cost and days together" };

/** The verdict in one sentence, and what stands beside it. @param {number} tie  share */
export function verdict(goal, ranks, tie) {
  const [first] = ranks, by = ranks.length ? orderedBy(goal, ranks.map((r) => r.outcome)) : "cost";
  if (!first) return "No candidate that is planned fits; the reasons are below.";
  const { outcome } = first, name = outcome.candidate.name;
  if (!eligible(outcome)) {
    const missed = outcome.misses.map(({ name: goalName, figure, limit, unit }) => `${goalName}: `
      + `${figure === null ? "not known" : `${apartTexts(figure, limit).join(" of ")} ${unit}`}`);
    return `No candidate reaches the goal; ${name} comes closest and misses ${missed.join("; ")}.`;
  }
  const said = [verb(outcome) + name];
  if (outcome.jobs.length) said.push(`${percent(load(outcome.jobs))} of a year's hours used`);
  else if (outcome.hours) {
    said.push(outcome.leadDays ? `result after ${duration(outcome.resultHours)} with delivery`
      : duration(outcome.hours));
  }
  if (outcome.usd) said.push(`${ranged(outcome.usd)} USD`);
  const rivals = ranks.filter((rank) => by in rank.first);
  let sentence = said.join(", ");
  if (by in first.first && rivals.length > 1) {
    const rival = rivals.filter((r) => r !== first)
      .reduce((a, b) => (a.first[by] >= b.first[by] ? a : b));
    sentence += `: ${WORDS[by]} of ${rivals.length} with probability ${first.first[by].toFixed(2)}`
      + ` (next: ${rival.outcome.candidate.name}, ${rival.first[by].toFixed(2)}${unsureText(goal, first, rival)}`
      + `${rival.first[by] > first.first[by] && sure(goal, rival.outcome) ? " at a midpoint that is no lower" : ""})`;
  }
  const ties = ranks.filter((rank) => rank.tied).map((rank) => rank.outcome.candidate.name);
  if (ties.length) sentence += `. Within ${percent(tie)}: ${listed(ties)}`;
  const fits = outcome.plan.fit_probability;
  const fitting = fits >= CERTAIN ? [] : [`fits with probability ${fits.toFixed(2)}`];
  const kept = Object.entries(outcome.chances).map(([goalName, chance]) => goalText(goal, goalName, chance));
  kept.unshift(...fitting);
  if (!sure(goal, outcome)) kept.push(...surestTexts(ranks));
  return `${sentence}. ${kept.length ? `${capital(kept.join("; "))}.` : ""}`.trim();
}

const goalText = ({ confidence }, name, chance) => `${name} met with probability ${chance >= confidence
  ? chance.toFixed(2) : `${Number(chance.toPrecision(3))}, less than the ${confidence} asked for`}`;

/** The candidate that meets the goal most surely, where it is another. @returns {string[]} */
function surestTexts([first, ...others]) {
  const surest = others.map((rank) => rank.outcome).filter((o) => !o.candidate.hypothetical)
    .reduce((a, b) => (a.chance >= b.chance ? a : b), first.outcome);
  const usd = surest.usd ? `, ${ranged(exact(surest.usd.value))} USD` : "";
  return surest === first.outcome ? []
    : [`most surely by ${surest.candidate.name}, ${Number(surest.chance.toPrecision(3))}${usd}`];
}

/** Why a rival is not the first although it may be so oftener: it meets a goal too seldom. */
function unsureText(goal, first, { outcome }) {
  if (sure(goal, outcome) || !sure(goal, first.outcome)) return "";
  const [name, chance] = Object.entries(outcome.chances).reduce((a, b) => (a[1] <= b[1] ? a : b));
  return `, which meets the ${name} with probability ${chance.toFixed(2)} only`;
}

const MOST_NAMES = 5;

/** Names, five at most; a name with a comma stands in quotes. */
const listed = (names) => names.slice(0, MOST_NAMES).map((name) => (name.includes(", ") ? `"${name}"` : name)).join(", ")
  + (names.length > MOST_NAMES ? ` and ${names.length - MOST_NAMES} more` : "");

const capital = (text) => text[0].toUpperCase() + text.slice(1);

/** What signing means on a candidate's terms. */
function verb({ candidate: { terms } }) {
  if (terms.lease) return "Lease: ";
  if (terms.bought) return "Buy: ";
  if (terms.kind === "owned") return "Use: ";
  return terms.commitment === "reserved" ? "Reserve: " : "Rent: ";
}

/** Months between a price's date and today. */
export function monthsSince(month, today) {
  const [year, number] = month.split("-").map(Number);
  return Math.max(0, 12 * (today.getFullYear() - year) + today.getMonth() + 1 - number);
}

/**
 * What the first candidate's price rests on, and whether it is old.
 * @param {Date|string} today
 * @returns {{text: string, warning: string}}
 */
export function provenance(outcome, today) {
  const { how, dates, undated, terms } = outcome.candidate, hourly = outcome.usdPerDeviceHour;
  const unit = terms.lease ? "USD per device and month" : terms.bought ? "USD per device" : "USD per device-hour";
  const asked = terms.quote ? `${priceRange(terms.quote)} ${unit}. ` : "";
  const useful = hourly && (terms.bought || terms.commitment === "reserved")
    ? `${price(hourly.value)} USD per useful device-hour. ` : "";
  const ages = dates.map((month) => monthsSince(month, new Date(today)));
  const oldest = Math.max(...ages);
  const warnings = [];
  if (terms.quote && (undated || !dates.length)) {
    warnings.push(dates.length ? "One of these prices has no date: ask for a quote."
      : "The price has no date: ask for a quote.");
  }
  if (oldest > OLD_MONTHS) {
    warnings.push(`The oldest of these prices is ${oldest} months old: ask for a new quote.`);
  }
  return { text: `Price: ${asked}${useful}${capital(how)}.`, warning: warnings.join(" ") };
}

/** The nearest flips in a sentence. @param {number} compared  candidates */
export function flipText(bars, by, compared) {
  if (compared < 2) return "No other candidate can be the first, so no input changes it.";
  const flips = bars.filter((bar) => bar.flips.length).slice(0, 3).map(({ input, flips: [first, ...rest] }) => {
    const near = rest.reduce((a, b) => (Math.abs(Math.log(b.at / input.now))
      < Math.abs(Math.log(a.at / input.now)) ? b : a), first);
    const priced = input.label.startsWith("Price: ") && input.label.slice(7);
    const what = priced === near.to ? "its price" : priced ? `the price of ${priced}` : `"${input.label}"`;
    return `${near.to} comes first if ${what} ${near.at > input.now
      ? "rises above" : "falls below"} ${price(near.at)} (now ${price(input.now)})`;
  });
  return flips.length ? `What would change it: ${flips.join("; ")}.`
    : `No single input changes the ${WORDS[by]} within twice its range, all others staying.`;
}

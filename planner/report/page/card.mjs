/** The page's first screen: the decision, its terms side by side, money over time. */
import { load } from "../../whatif/pricing/queueing.mjs";
import { eligible, orderedBy, sure } from "../../whatif/ranking.mjs";
import { COLOURS, safe, spending } from "./charts.mjs";
import { apartTexts, duration, monthsSince, percent, price } from "./words.mjs";

const OLD_MONTHS = 6, DAY_MS = 864e5, MONTH_H = 730;
const WORDS = { cost: "cheapest", time: "fastest", energy: "lowest in energy", carbon: "lowest in CO2",
  weighted: "best by cost and days" };

/** Dollars in few characters. */
export function money(usd) {
  for (const [size, letter] of [[1e9, " G"], [1e6, " M"], [1e3, " K"]]) {
    if (Math.abs(usd) >= size) return `${Number((usd / size).toPrecision(3))}${letter} USD`;
  }
  return `${Number(usd.toPrecision(3))} USD`;
}

/** A range of dollars in few characters. */
export function moneyRange({ low, high }) {
  if (low === high) return "fixed";
  const [a, b] = [low, high].map(money), unit = b.replace(/^\S+/, "");
  return a.endsWith(unit) ? `${a.slice(0, -unit.length)} to ${b}` : `${a} to ${b}`;
}

/** A probability in words. */
export function chanceWords(share) {
  if (share >= 0.975) return "nearly all futures";
  if (share < 0.025) return "hardly any future";
  if (share >= 0.925) return "19 in 20";
  return share < 0.075 ? "1 in 20" : `${Math.round(10 * share)} in 10`;
}

const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });

/** The date by which some hours after the page was made are over. */
export const dayAfter = (made, hours) => DAY.format(new Date(Date.parse(made) + Math.ceil(hours / 24) * DAY_MS));

/** On what terms a candidate is had: rent, reserve, buy, lease, own. */
export function termsOf({ candidate: { terms } }) {
  if (terms.lease) return "Lease";
  if (terms.bought) return "Buy";
  if (terms.kind === "owned") return "Use";
  return terms.commitment === "reserved" ? "Reserve" : terms.commitment === "spot" ? "Rent on spot" : "Rent";
}

/** A candidate as people call it: 64 H200 SXM; by its name where that says more. */
export function called({ candidate: { name, devices, accelerator, terms } }) {
  const plain = /^[\dx]*x/.test(name) && name.replace(/^[\dx]*x/, "").split(" ")[0] === accelerator;
  if (!plain || accelerator.includes("+")) return name;
  return `${devices} ${accelerator.toUpperCase().replaceAll("-", " ")}${terms.years ? ` for ${terms.years === 1 ? "a year"
    : `${Number((12 * terms.years).toPrecision(3))} months`}` : ""}`;
}

const OWN_WORDS = /^(rent(ed)?|reserved?|bought|buy|leased?|own(ed)?|use|spot|on demand|paid|loan)\b/i;
const TERMS_AFTER = /\s+(rented|bought|owned|leased)(?=$|\s+(from|for)\b)/i;

/** What to do, in words; a name that says its terms is not told them again. */
export function actOf(outcome) {
  const name = called(outcome);
  return OWN_WORDS.test(name) ? name[0].toUpperCase() + name.slice(1)
    : `${termsOf(outcome)} ${name.replace(TERMS_AFTER, "")}`;
}

const ages = ({ candidate: { dates } }, today) => dates.map((month) => monthsSince(month, new Date(today)));

/** What is signed for, and how it is paid. @returns {[string, string]} */
function cheque(outcome) {
  const { usd, capitalUsd, outlayUsd, assumed, candidate: { terms }, jobs } = outcome;
  if (!usd) return ["not known", outcome.candidate.how];
  const each = jobs.length ? " a year" : "";
  if (terms.bought && !terms.lease && capitalUsd) {
    return [money(capitalUsd), `hardware; with ${Number(assumed.years.toPrecision(2))} years of power, hosting and staff `
      + `${outlayUsd ? money(outlayUsd.value) : "more"}. This work's part: ${money(usd.value)}${each}`];
  }
  if (capitalUsd) return [money(capitalUsd), `fixed, used or not${usd.value > 1.01 * capitalUsd ? `; the run takes ${money(usd.value)}` : ""}`];
  return [money(usd.value) + each, terms.kind === "owned" ? "to run what is owned"
    : `${moneyRange(usd)}, paid by the hour`];
}

/** When the result is there. @returns {[string, string]} */
function when({ resultHours, leadDays, jobs, hours }, made) {
  if (jobs.length) return [percent(load(jobs)), "of a year's hours used"];
  if (!resultHours) return ["no goal", "give tokens for a date"];
  const { value, low, high } = resultHours;
  const waits = leadDays ? `; ${duration({ value: 24 * leadDays.value, low: 24 * leadDays.low, high: 24 * leadDays.high })} until delivery, then ${duration(hours)}`
    : `; ${duration(hours)}`;
  return [dayAfter(made, value), `${dayAfter(made, low)} to ${dayAfter(made, high)}${waits}`];
}

/** How sure: the best of all, each goal, fitting. */
function howSure(goal, ranks, by) {
  const [{ outcome, first }] = ranks, rivals = ranks.filter((rank) => by in rank.first);
  const said = by in first && rivals.length > 1
    ? [`${WORDS[by]} of ${rivals.length}: ${chanceWords(first[by])}`] : [];
  for (const [name, chance] of Object.entries(outcome.chances)) {
    said.push(`${name === "deadline" ? "in time" : name === "budget" ? "within budget" : `${name} kept`}: ${chanceWords(chance)}`);
  }
  said.push(`fits: ${chanceWords(outcome.plan.fit_probability)}`);
  return `How sure: ${said.join("; ")}` + (sure(goal, outcome) ? "" : ": less sure than asked for");
}

const part = ([label, value, note, css = ""]) => `<div><p class="k">${safe(label)}</p>`
  + `<p class="${label.startsWith("Do ") || label.startsWith("Closest") ? "do" : "v"} ${css}">${safe(value)}</p>${note ? `<p class="n">${safe(note)}</p>` : ""}</div>`;

/** The parts of the card: decision, cheque, date, age of the price. @returns {string[][]} */
export function decisionParts(data, goal, ranks, today) {
  const [first] = ranks;
  if (!first) return [["Do this", "Nothing fits", "the reasons are below"]];
  const { outcome } = first, by = orderedBy(goal, ranks.map((rank) => rank.outcome));
  const missed = outcome.misses.map(({ name, figure, limit, unit }) => `misses ${name}: `
    + (figure === null ? "not known" : `${apartTexts(figure, limit).join(" of ")} ${unit}`));
  const name = called(outcome), own = name === outcome.candidate.name ? "" : ` (${outcome.candidate.name})`;
  const old = Math.max(0, ...ages(outcome, today)), quote = outcome.candidate.terms.quote;
  const ageWords = !quote ? "none" : !outcome.candidate.dates.length ? "no date"
    : old < 1 ? "this month" : old === 1 ? "a month" : `${old} months`;
  const asked = quote ? `${price(quote.value)} USD ${outcome.candidate.terms.lease ? "a device and month"
    : outcome.candidate.terms.bought ? "a device" : "a device and hour"}` : outcome.candidate.how;
  return [
    eligible(outcome)
      ? ["Do this", actOf(outcome), `${howSure(goal, ranks, by)}${own}`]
      : ["Closest; none reaches the goal", actOf(outcome), missed.join("; ")],
    ["You sign for", ...cheque(outcome)],
    ["Result", ...when(outcome, data.made)],
    ["Price age", ageWords, asked, old > OLD_MONTHS || ageWords === "no date" ? "warn" : ""],
  ];
}

export const decisionHtml = (parts) => parts.map(part).join("");

/** The best of each kind of terms, or of all where there is one kind. */
export function sideBySide(ranks) {
  const sold = ranks.filter(({ outcome }) => outcome.usd && !outcome.candidate.hypothetical), best = new Map();
  for (const rank of sold) {
    const kind = termsOf(rank.outcome);
    if (!best.has(kind)) best.set(kind, rank);
  }
  return best.size > 1 ? [...best.values()].slice(0, 3) : sold.slice(0, 3);
}

/** Cards of what is side by side, with their costs on one scale. */
export function optionsHtml(data, ranks, today) {
  const shown = sideBySide(ranks), most = Math.max(...shown.map(({ outcome }) => outcome.usd.high));
  const kinds = new Set(shown.map(({ outcome }) => termsOf(outcome)));
  return shown.map((rank) => {
    const { outcome } = rank, { usd, leadDays, candidate } = outcome, at = (value) => (100 * value / most).toFixed(1);
    const old = Math.max(0, ...ages(outcome, today)), dated = candidate.dates[0];
    const badge = rank === ranks[0] && eligible(outcome) ? '<span class="badge best">first</span>'
      : `<span class="badge ${old > OLD_MONTHS ? "old" : ""}" title="when its price was asked">${safe(dated ? `price of ${dated}` : "no dated price")}</span>`;
    const said = [moneyRange(usd), leadDays ? `delivered in ${duration({ value: 24 * leadDays.value, low: 24 * leadDays.low, high: 24 * leadDays.high })}` : "starts now",
      ...outcome.misses.map(({ name }) => `misses the ${name}`),
      ...Object.entries(outcome.chances).filter(([name]) => !outcome.misses.some((miss) => miss.name === name))
        .map(([name, chance]) => `${name} in ${chanceWords(chance)}`)];
    const source = candidate.how.replace(/^\w/, (letter) => letter.toUpperCase()).split("; ")[0];
    return `<section class="card option ${rank === ranks[0] ? "best" : ""}"><h2>${safe(kinds.size > 1 ? actOf(outcome) : candidate.name)} ${badge}</h2>`
      + `<p class="v">${safe(money(usd.value))}</p><div class="gauge" aria-hidden="true"><i style="left:${at(usd.low)}%;width:${at(usd.high - usd.low)}%"></i><b style="left:${at(usd.value)}%"></b></div>`
      + `<p class="n">${safe(said.join(" · "))}</p><p class="n">${safe(source)}</p></section>`;
  }).join("");
}

/** Dollars spent by a month after signing. @returns {(month: number) => number} */
export function spentBy(outcome) {
  const { usd, hours, leadDays, capitalUsd, outlayUsd, assumed, candidate: { terms }, jobs } = outcome;
  const begins = leadDays ? leadDays.value * 24 / MONTH_H : 0, runs = jobs.length ? 12 : Math.max(0.01, hours.value / MONTH_H);
  const through = (month, length) => Math.min(1, Math.max(0, month / length));
  if (terms.bought && capitalUsd && outlayUsd) {
    const kept = 12 * assumed.years;
    return (month) => capitalUsd + Math.max(0, outlayUsd.value - capitalUsd) * through(month, kept);
  }
  if (terms.years && capitalUsd) {
    const term = 12 * terms.years, terms_ = Math.max(1, Math.round(usd.value / capitalUsd));
    return (month) => Array.from({ length: terms_ }, (_, k) => k).reduce((sum, k) => sum + (month < k * term ? 0
      : capitalUsd * (terms.prepaid + (1 - terms.prepaid) * through(month - k * term, term))), 0);
  }
  return jobs.length ? (month) => usd.value * month / 12 : (month) => usd.value * through(month - begins, runs);
}

/** Money over time of what is side by side, with the first crossover of the first. */
export function spentChart(ranks) {
  const shown = sideBySide(ranks).map(({ outcome }) => outcome).filter((outcome) => outcome.hours);
  if (!shown.length) return "";
  const ends = shown.map((o) => Math.max(o.jobs.length ? 36 : (o.resultHours?.value ?? 0) / MONTH_H, 12 * (o.candidate.terms.years ?? 0)));
  const last = Math.min(60, Math.max(1, Math.ceil(Math.max(...ends)))), steps = 120;
  const months = Array.from({ length: steps + 1 }, (_, k) => last * k / steps);
  const kinds = new Set(shown.map(termsOf));
  const series = shown.map((outcome, index) => {
    const spent = spentBy(outcome);
    return { name: kinds.size > 1 ? termsOf(outcome).toLowerCase() : outcome.candidate.name,
      colour: COLOURS[index], points: months.map((month) => [month, spent(month)]) };
  });
  let mark = null;
  for (const other of series.slice(1)) {
    const gaps = months.map((_, k) => series[0].points[k][1] - other.points[k][1]);
    const at = gaps.findIndex((gap, k) => k > 1 && gap * gaps[k - 1] < 0);
    if (at > 0 && (mark === null || months[at] < mark.x)) {
      const dearer = gaps[at] > 0 ? series[0] : other;
      mark = { x: months[at], y: dearer.points[at][1], words: `${dearer.name} costs more from month ${Math.ceil(months[at])}` };
    }
  }
  return spending("Money spent over time", series, mark, last);
}

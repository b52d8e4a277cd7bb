/**
 * What the reader has changed: controls, their place in the study's document, all candidates priced.
 *
 * `data` is what page_data.py writes.  `values` has by a control's id what the reader set; what is not
 * in it stands as the study has it.
 */
import { evaluate, tokensOf } from "../../whatif/evaluate.mjs";
import { exact, spanOf, times } from "../../whatif/uncertain_value.mjs";

/**
 * @typedef {{id: string, label: string, unit: string, now: ?number, least: number, most: number,
 *   ranged: boolean, path: string[]}} Control  now: as the study has it; path: in the document
 */
const CONTROLS = [
  { id: "tokens", label: "Tokens to train", unit: "tokens", path: ["goal", "tokens"], least: 1e6,
    most: 1e16, now: (data) => data.goal.tokens },
  { id: "deadline", label: "Deadline", unit: "days", path: ["goal", "deadline_days"], least: 0.01,
    most: 1e4, now: (data) => data.goal.deadline_days },
  { id: "budget", label: "Budget", unit: "USD", path: ["goal", "budget_usd"], least: 1, most: 1e12,
    now: (data) => data.goal.budget_usd },
  { id: "day", label: "What a day sooner is worth", unit: "USD", path: ["goal", "day_usd"], least: 0.01,
    most: 1e9, now: (data) => data.goal.day_usd },
  { id: "utilisation", label: "Utilisation of what is bought or reserved", unit: "share of hours",
    path: ["assumptions", "utilisation"], least: 0.001, most: 1,
    now: ({ assumed, used }) => (assumed.shared ? assumed.utilisation : used ?? assumed.utilisation) },
  { id: "electricity", label: "Electricity", unit: "USD/kWh", ranged: true, least: 0.001, most: 10,
    path: ["assumptions", "electricity_usd_per_kwh"],
    now: (data) => data.assumed.electricity_usd_per_kwh.value },
  { id: "years", label: "Years until resale, or compared", unit: "years", least: 0.1, most: 20,
    path: ["assumptions", "years"], now: (data) => data.assumed.years },
  { id: "residual", label: "Residual value left each year", unit: "share", ranged: true,
    path: ["assumptions", "owning", "retained_a_year"], least: 0.01, most: 1,
    now: (data) => data.assumed.owning.retained_a_year.value },
  { id: "interest", label: "Interest a year", unit: "share", least: 0, most: 1,
    path: ["assumptions", "interest"], now: (data) => data.assumed.interest },
  { id: "lead", label: "Delivery of purchases", unit: "days", ranged: true, least: 0, most: 2000,
    path: ["assumptions", "lead_days"], now: (data) => data.assumed.lead_days.value },
];

const OF_DATA = [
  { id: "stored", label: "Data stored beside rented clusters", unit: "TB", least: 0, most: 1e7,
    path: ["assumptions", "data", "stored_tb"], now: (data) => data.assumed.data.stored_tb },
  { id: "moved", label: "Data moved for a run", unit: "TB", least: 0, most: 1e7,
    path: ["assumptions", "data", "moved_tb"], now: (data) => data.assumed.data.moved_tb },
];
const OF_ONE_RUN = ["tokens", "deadline", "budget", "day", "utilisation"];
const RUNS = { id: "runs", label: "Runs of all jobs", unit: "times the study's", path: [], ranged: false,
  least: 0.01, most: 100, now: 1 };

/** Id of the price that a candidate has in common with others of its offer. */
export function priceId(data, { place, provider }) {
  const each = data.document.offers[place].rent?.each_provider;
  return `price.${place}${each ? `.${provider}` : ""}`;
}

/** All controls of a study's page. @returns {Control[]} */
export function controlsOf(data) {
  const jobs = data.document.jobs?.length > 0; // which use what they take, and have no deadline
  const counted = data.assumed.data.stored_tb || data.assumed.data.moved_tb;
  const all = [...CONTROLS, ...(counted ? OF_DATA : [])];
  const assumed = all.filter(({ id }) => !(jobs && OF_ONE_RUN.includes(id)))
    .map((c) => ({ ranged: false, ...c, now: c.now(data) ?? null }));
  if (jobs) assumed.unshift(RUNS);
  const prices = new Map();
  for (const candidate of data.candidates) {
    const { kind, bought, commitment, quote, lease } = candidate.terms, id = priceId(data, candidate);
    if (kind === "owned" || prices.has(id) || (kind === "none" && commitment === "reserved")) continue;
    const provider = data.document.offers[candidate.place].rent?.each_provider
      ? ` at ${candidate.provider}` : "";
    const offer = data.document.offers[candidate.place];
    prices.set(id, {
      id, label: `${(offer.name ?? offer.cluster).replace("{n}x", "nodes of ").replace("{n}", "n")}${provider}`, ranged: true, path: [],
      unit: lease ? "USD per device and month" : bought ? "USD per device" : `USD per device-hour, ${commitment.replace("_", " ")}`,
      now: quote === null ? null : quote.value, least: bought ? 1 : 0.001, most: bought ? 1e7 : 1e4,
    });
  }
  return [...prices.values(), ...assumed];
}

/** A span moved to another value: its ends keep their ratio to it. */
export function scaled(span, value, most = Infinity) {
  if (!span || span.value === 0) return exact(value);
  const moved = times(span, value / span.value);
  return { value, low: Math.min(moved.low, value), high: Math.min(Math.max(moved.high, value), most) };
}

/** What a set price is called: it is a quote of its own. */
const sourceOf = (place) => `set on the page for offer ${place + 1}`;

/** The candidate at the price that the reader set for its offer. */
function repriced(data, candidate, value) {
  const { terms, place } = candidate, first = firstOf(data, candidate);
  const words = terms.lease
    ? `leased for ${terms.lease.term_months} months, ${data.made}, ${sourceOf(place)}`
    : `${terms.commitment.replace("_", " ")}, ${data.made}, ${sourceOf(place)}`;
  const whole = [words, terms.term_words, terms.loan_words].filter(Boolean).join(", ");
  const how = terms.kind === "part" ? terms.words_beside.join(whole) : whole;
  return {
    ...candidate, how, dates: [data.made.slice(0, 7)],
    cause: terms.kind === "part" && terms.bought ? "" : `${words} at ${value.toFixed(6)}`, undated: false, hypothetical: false,
    terms: {
      ...terms, kind: terms.kind === "none" ? (terms.bought ? "bought" : "rented") : terms.kind,
      quote: scaled(first.terms.quote, value),
    },
  };
}

/** The first candidate of a price: its relative range is the one that a set price has. */
const firstOf = (data, candidate) => data.candidates.find(
  (other) => priceId(data, other) === priceId(data, candidate));

/** Assumptions as the reader set them, but for what an offer assumes for itself. */
export function assumptionsOf(base, values, own = []) {
  const set = (id, name) => (id in values && !own.includes(name) ? values[id] : undefined);
  const moved = { ...base, owning: { ...base.owning } };
  for (const name of ["utilisation", "years", "interest"]) moved[name] = set(name, name) ?? base[name];
  if (set("utilisation", "utilisation") !== undefined) moved.shared = true;
  const electricity = set("electricity", "electricity_usd_per_kwh");
  if (electricity !== undefined) {
    moved.electricity_usd_per_kwh = scaled(base.electricity_usd_per_kwh, electricity);
  }
  const lead = set("lead", "lead_days"), retained = set("residual", "owning.retained_a_year");
  if (lead !== undefined) moved.lead_days = scaled(base.lead_days, lead);
  if (retained !== undefined) {
    moved.owning.retained_a_year = scaled(base.owning.retained_a_year, retained, 1);
    if (!own.includes("owning.residual_by_age")) moved.owning.residual_by_age = [];
  }
  const stored = set("stored", "data.stored_tb"), transferred = set("moved", "data.moved_tb");
  moved.data = {
    ...base.data, stored_tb: stored ?? base.data.stored_tb, moved_tb: transferred ?? base.data.moved_tb,
  };
  if ("lost" in values) moved.failures = { ...base.failures, other: exact(values.lost) };
  return moved;
}

/** Goals as the reader set them; a limit that was emptied is null. */
export function goalOf({ goal }, values) {
  const moved = { ...goal };
  if ("tokens" in values) {
    Object.assign(moved, { tokens: values.tokens, tokens_per_parameter: null, epochs: null });
  }
  if ("runs" in values) moved.tokens = goal.tokens * values.runs;
  if ("deadline" in values) moved.deadline_days = values.deadline;
  if ("budget" in values) moved.budget_usd = values.budget;
  if ("day" in values) moved.day_usd = values.day;
  if ("by" in values) moved.by = values.by;
  if (moved.by === "weighted" && !(moved.day_usd && tokensOf(moved, 1))) moved.by = "cost";
  return moved;
}

/** Outcomes of one model's candidates, priced as the reader set it. */
export function outcomesOf(data, model, values, { drawn = true, only = () => true } = {}) {
  const goal = goalOf(data, values), assumed = assumptionsOf(data.assumed, values);
  const shared = drawn && JSON.stringify(
    Object.entries(values).filter(([id]) => !id.startsWith("price.")));
  return data.candidates.filter((c) => c.model === model && only(c)).map((candidate) => {
    const price = values[priceId(data, candidate)], key = drawn && `${shared} ${price}`;
    const known = drawn && remembered.get(candidate);
    if (known?.key === key) return known.outcome;
    const moved = price === undefined ? candidate : repriced(data, candidate, price);
    const step_s = times(spanOf(moved.plan.step_s), values[`step ${moved.accelerator}`] ?? 1);
    const own = candidate.assumed ? assumptionsOf(candidate.assumed, values, candidate.own) : assumed;
    const outcome = evaluate({ ...moved, plan: { ...moved.plan, step_s } }, own, goal, drawn);
    if (drawn) remembered.set(candidate, { key, outcome });
    return outcome;
  });
}

const remembered = new WeakMap(); // by candidate its last outcome, and of which values

/** The study's document with what the reader set, to be planned again. */
export function changedDocument(data, values) {
  const document = structuredClone(data.document), source = "set on the page";
  const put = ([part, ...path], value) => {
    let place = (document[part] ??= {});
    for (const name of path.slice(0, -1)) place = (place[name] ??= {});
    if (value === null) delete place[path.at(-1)];
    else place[path.at(-1)] = value;
  };
  for (const { id, path, ranged } of [...CONTROLS, ...OF_DATA].filter((control) => control.id in values)) {
    const moved = ranged && quantities(assumptionsOf(data.assumed, values))[id];
    put(path, ranged ? { ...moved, source } : values[id]);
  }
  if ("runs" in values) {
    for (const job of document.jobs) job.runs_a_year *= values.runs;
  }
  if ("tokens" in values) {
    for (const name of ["tokens_per_parameter", "epochs", "dataset_tokens"]) delete document.goal[name];
  }
  if ("residual" in values) delete document.assumptions.owning.residual_by_age;
  if ("by" in values || "day" in values) put(["goal", "by"], goalOf(data, values).by);
  document.offers = document.offers.flatMap((offer, place) => pricedOffers(data, values, offer, place));
  return document;
}

const quantities = (assumed) => ({
  electricity: assumed.electricity_usd_per_kwh, residual: assumed.owning.retained_a_year,
  lead: assumed.lead_days,
});

/** An offer at the set price; one of every provider becomes an offer of each. */
function pricedOffers(data, values, offer, place) {
  const mine = data.candidates.filter((candidate) => candidate.place === place);
  const ids = new Set(mine.map((candidate) => priceId(data, candidate)));
  if (![...ids].some((id) => id in values)) return [offer];
  if (!offer.rent?.each_provider) return [withPrice(data, offer, mine[0], values[[...ids][0]])];
  return [...ids].map((id) => {
    const candidate = mine.find((one) => priceId(data, one) === id);
    const name = `${offer.name ?? offer.cluster} at ${candidate.provider}`;
    const { each_provider: _, ...rent } = offer.rent;
    if (!(id in values)) return { ...offer, name, rent: { ...rent, provider: candidate.provider } };
    return withPrice(data, { ...offer, name, rent }, candidate, values[id]);
  });
}

function withPrice(data, offer, candidate, value) {
  const { quote, bought } = candidate.terms, moved = scaled(quote, value);
  const said = {
    [bought ? "usd_per_device" : "usd_per_device_hour"]: moved.value,
    low: moved.low, high: moved.high, date: data.made, source: sourceOf(candidate.place),
  };
  if (offer.buy?.lease) {
    const { currency: _, ...lease } = offer.buy.lease;
    const { usd_per_device: usd_per_device_month, ...quoted } = said;
    return { ...offer, buy: { ...offer.buy, lease: { ...lease, ...quoted, usd_per_device_month } } };
  }
  const part = bought ? "buy" : "rent";
  const { provider: _, region: __, currency: ___, ...terms } = offer[part] ?? {};
  if (terms.commitment === "reserved" && candidate.terms.years) {
    terms.term_months ??= candidate.terms.years * 12;
    terms.prepaid ??= candidate.terms.prepaid;
  }
  return { ...offer, [part]: { ...terms, ...said } };
}

/** What the reader set, as a URL's fragment. */
export const fragmentOf = (values) => new URLSearchParams(
  Object.entries(values).map(([id, value]) => [id, value === null ? "" : String(value)])).toString();

/** Values from a URL's fragment: of known controls, within their bounds. */
export function valuesFrom(fragment, controls) {
  const values = {};
  for (const [id, text] of new URLSearchParams(fragment)) {
    if (id === "by" && ["cost", "time", "energy", "carbon", "weighted"].includes(text)) values.by = text;
    const control = controls.find((one) => one.id === id);
    if (control && text === "" && clearable(id)) values[id] = null;
    const number = Number(text);
    if (control && text !== "" && number >= control.least && number <= control.most) {
      values[id] = number;
    }
  }
  return values;
}

/** Whether a control may be left empty: a limit that is not set. */
export const clearable = (id) => ["deadline", "budget", "day"].includes(id);

/** The page of a study: everything below the controls is drawn again when one moves. */
import { bond, breakEven, cashUsd, comparable, overYears, presentValueUsd } from "../../whatif/pricing/break_even.mjs";
import { hourlyAt } from "../../whatif/pricing/economics.mjs";
import { load, shortestFirstH, waitH } from "../../whatif/pricing/queueing.mjs";
import { dataUsdOf } from "../../whatif/evaluate.mjs";
import { figureOf, orderedBy, ranked, sure } from "../../whatif/ranking.mjs";
import { moved, tornado } from "../../whatif/sensitivity.mjs";
import { times } from "../../whatif/uncertain_value.mjs";
import { planAgain } from "./again.mjs";
import { chanceWords, dayAfter, decisionHtml, decisionParts, money, moneyRange, optionsHtml, sideBySide, spentChart } from "./card.mjs";
import { bar, COLOURS, fit, key, lines, safe, scatter, short } from "./charts.mjs";
import { csvText, yamlText } from "./documents.mjs";
import { inputsOf, midpointGoal } from "./inputs.mjs";
import {
  changedDocument, clearable, controlsOf, fragmentOf, goalOf, outcomesOf, priceId, valuesFrom,
} from "./state.mjs";
import {
  duration, flipText, grouped, percent, price, provenance, ranged, verdict,
} from "./words.mjs";

const MOST_DOTS = 40, MOST_BARS = 12, MOST_CASH = 6, MOST_LINES = 8, MOST_PAIRS = 4, MOST_COMPARED = 10,
  MOST_YEARS = 3;
const SLIDER = 200, REACH = 5; // steps of a slider, and how far it goes either way
const UNITS = { cost: "USD", time: "hours", energy: "kWh", carbon: "kg of CO2", weighted: "USD, days counted" };

const at = (id) => document.getElementById(id);
const data = JSON.parse(at("data").textContent);
const controls = controlsOf(data);
const page = {
  model: modelFrom(location.hash) ?? data.model, values: valuesFrom(location.hash.slice(1), controls), chosen: new Set(),
  sort: { column: 0, down: false },
};

/** The model that an address names, if the study has it. */
function modelFrom(hash) {
  const named = new URLSearchParams(hash.slice(1)).get("model");
  return data.models.includes(named) ? named : null;
}

const COLUMNS = [
  ["place", (r) => r.place, (r) => `${r.tied ? "=" : ""}${r.place}${r.pareto ? "*" : ""}`],
  ["candidate", (r) => r.outcome.candidate.name, (r) => r.outcome.candidate.name],
  data.document.jobs?.length ? ["hours used", (r) => r.outcome.resultHours?.value, (r) => r.outcome.resultHours && duration(r.outcome.resultHours)]
    : ["result", (r) => r.outcome.resultHours?.value,
      (r) => r.outcome.resultHours && dayAfter(data.made, r.outcome.resultHours.value)],
  ["cost", (r) => r.outcome.usd?.value, (r) => r.outcome.usd && money(r.outcome.usd.value)],
  ["range", (r) => r.outcome.usd?.high, (r) => r.outcome.usd && moneyRange(r.outcome.usd), "wide"],
  ...(data.document.jobs?.length ? [
    ["share of hours", (r) => load(r.outcome.jobs), (r) => percent(load(r.outcome.jobs))],
    ["mean wait", (r) => waitH(r.outcome.jobs), (r) => hoursText(waitH(r.outcome.jobs))],
  ] : []),
  ...(data.assumed.data.stored_tb || data.assumed.data.moved_tb ? [["storage and transfers, USD",
    (r) => dataUsdOf(r.outcome).value, (r) => grouped(dataUsdOf(r.outcome).value)]] : []),
  ["cheapest in", (r) => r.first.cost, (r) => (r.first.cost === undefined ? "" : chanceWords(r.first.cost)), "wide"],
  ["goals", (r) => r.outcome.chance, goalsText],
  ["fits", (r) => r.outcome.plan.fit_probability, (r) => percent(r.outcome.plan.fit_probability), "wide"],
  ["USD an hour", (r) => r.outcome.usdPerDeviceHour?.value,
    (r) => r.outcome.usdPerDeviceHour && price(r.outcome.usdPerDeviceHour.value), "wide"],
];

const GLOSSARY = {
  place: "1 is the first; = is tied with it; * no other is better in time, cost and energy together",
  result: "the day on which training has ended, delivery and start included",
  cost: "what this work pays; what is bought or reserved is paid whole unless a utilisation is set",
  range: "80 of 100 futures lie within",
  "cheapest in": "of ten futures in which all candidates are drawn together, those in which it costs least",
  goals: "of ten futures, those in which it keeps each goal",
  fits: "probability that the plan fits into the devices' memory",
  "USD an hour": "price of a useful hour of a device, all that its terms fix included",
};

function goalsText({ outcome }) {
  const missed = outcome.misses.map(({ name }) => `misses ${name}`);
  const surely = Object.entries(outcome.chances).filter(([name]) =>
    !outcome.misses.some((miss) => miss.name === name));
  const sold = outcome.candidate.hypothetical ? ["not sold"] : [];
  return [...sold, ...missed, ...surely.map(([name, chance]) => `${name} ${chanceWords(chance)}`)].join("; ");
}

/** Draw everything as the values stand. */
function update() {
  const began = performance.now();
  fit(innerWidth);
  const goal = goalOf(data, page.values);
  const outcomes = outcomesOf(data, page.model, page.values);
  const orders = [...new Set(["cost", "time", goal.by])];
  const ranks = ranked(goal, outcomes, data.assumed.tie, orders);
  page.ranks = ranks;
  const by = ranks.length ? orderedBy(goal, outcomes) : "cost";
  at("verdict").textContent = (data.models.length > 1 ? `${page.model}. ` : "")
    + verdict(goal, ranks, data.assumed.tie);
  at("decided").innerHTML = decisionHtml(decisionParts(data, goal, ranks, new Date()));
  at("options").innerHTML = optionsHtml(data, ranks, new Date());
  at("options").hidden = !sideBySide(ranks).length;
  const spent = spentChart(ranks);
  at("spent").innerHTML = spent;
  at("over-time").hidden = !spent;
  at("trains").textContent = ranks.length ? `, trained with ${ranks[0].outcome.plan.framework}` : "";
  const found = ranks.length ? provenance(ranks[0].outcome, new Date()) : { text: "", warning: "" };
  at("price").textContent = found.text;
  at("warning").textContent = found.warning;
  drawChoice(ranks);
  drawTornado(ranks, by);
  drawYear(ranks);
  drawCash(ranks);
  drawUse(ranks);
  drawSizes(ranks);
  drawTable(ranks);
  const changed = Object.keys(page.values).length;
  if (at("asked")) at("asked").hidden = changed > 0; // it is the study's
  at("changed").textContent = changed ? `${changed} figure${changed > 1 ? "s" : ""} changed from the study`
    : "As the study has it";
  page.again();
  document.documentElement.dataset.ms = (performance.now() - began).toFixed(1);
}

function drawChoice(ranks) {
  const shown = ranks.filter(({ outcome }) => outcome.resultHours && outcome.usd).slice(0, MOST_DOTS);
  at("choice").hidden = !shown.length;
  if (!shown.length) return;
  const kinds = [...new Set(shown.map((r) => r.outcome.candidate.accelerator))];
  const points = shown.map((rank) => {
    const { outcome } = rank, { name, accelerator } = outcome.candidate;
    return {
      name, x: times(outcome.resultHours, 1 / 24), y: outcome.usd, place: rank.place,
      front: rank.pareto, chosen: page.chosen.has(name),
      colour: COLOURS[kinds.indexOf(accelerator) % COLOURS.length],
      label: `${rank.place} ${name}: ${duration(outcome.resultHours)}, ${ranged(outcome.usd)} USD`,
    };
  });
  const focused = document.activeElement?.dataset?.name;
  at("scatter").innerHTML = scatter("Cost against time to result", points,
    data.document.jobs?.length ? "days used of a year" : "days to the result", "USD")
    + key(kinds);
  for (const dot of at("scatter").querySelectorAll(".dot")) {
    if (dot.dataset.name === focused) dot.focus();
  }
}

function drawTornado(ranks, by) {
  const { values, model } = page;
  const near = ranks.filter(({ outcome }) => !outcome.candidate.hypothetical).slice(0, MOST_COMPARED);
  const asSure = near.filter(({ outcome }) => !outcome.misses.length && sure(goalOf(data, values), outcome));
  const compared = new Set((asSure.includes(near[0]) ? asSure : near).map((r) => r.outcome.candidate.name));
  const goal = midpointGoal(data, values);
  const light = (moved, touches) => outcomesOf(data, model, moved, {
    drawn: false, only: (c) => compared.has(c.name) && touches(c),
  });
  const base = light(values, () => true);
  const known = base.length && figureOf(near[0].outcome, by) < Infinity;
  const found = known ? tornado(inputsOf(data, model, values, base), goal, by, base,
    (input, value) => light({ ...values, ...moved(input, value) }, input.touches)) : [];
  at("flips").textContent = found.length ? flipText(found, by, compared.size) : "";
  at("decision").hidden = !found.length;
  if (!found.length) return;
  const first = base.find((o) => o.candidate.name === near[0].outcome.candidate.name);
  const now = figureOf(first, by), rows = found.slice(0, MOST_BARS);
  const ends = [now, ...rows.flatMap(({ low, high }) => [low, high])].filter(Number.isFinite);
  const [least, most] = [Math.min(...ends), Math.max(...ends)];
  at("tornado-head").textContent = `${first.candidate.name}: ${short(least)} to ${short(most)} ${UNITS[by]}, `
    + `now ${short(now)}`;
  at("tornado").innerHTML = rows.map((row) => {
    const { input, low, high, flips } = row;
    const said = flips.map(({ at: value, to }) =>
      `${to} ${value > input.now ? "above" : "below"} ${price(value)}`).join("; ");
    return `<tr><th scope="row">${safe(input.label)}</th><td>${bar(low, high, now, least, most)}</td>`
      + `<td>${safe(`${price(input.now)} (${price(input.low)}–${price(input.high)}) ${input.unit}`)}</td>`
      + `<td>${safe(said)}</td></tr>`;
  }).join("");
}

/** What share of hours a year of jobs uses on the chosen candidates, or the first, and what waits. */
function drawYear(ranks) {
  const chosen = ranks.filter((r) => page.chosen.has(r.outcome.candidate.name));
  const shown = (chosen.length ? chosen : ranks).slice(0, MOST_YEARS).map((r) => r.outcome);
  at("year").hidden = !shown.some(({ jobs }) => jobs.length);
  if (at("year").hidden) return;
  const rows = shown.flatMap(({ candidate, plan, jobs }) => {
    const used = load(jobs), mean = waitH(jobs), shortest = shortestFirstH(jobs);
    return jobs.map(([runs, hours], k) => [
      candidate.name, plan.jobs[k].name, grouped(runs, 1), hoursText(hours), percent(used),
      hoursText(mean), hoursText(shortest && shortest[k])]);
  });
  at("year-table").innerHTML = tableHtml("One job at a time has the whole cluster; jobs come at random. "
    + "Waits are means; one that has begun is not interrupted", ["candidate", "job", "runs a year",
    "a run", "hours used", "wait in order", "wait, shortest first"], rows);
}

const hoursText = (hours) => (hours === null ? "longer and longer"
  : hours < 48 ? `${grouped(hours, 1)} h` : `${grouped(hours / 24, 1)} days`);

/** Those that are shown over years: the chosen ones, or the first few. */
function overYearsShown(ranks, most) {
  const known = ranks.map((r) => r.outcome).filter(comparable);
  const chosen = known.filter((o) => page.chosen.has(o.candidate.name));
  return (chosen.length ? chosen : known).slice(0, most);
}

function drawCash(ranks) {
  const shown = overYearsShown(ranks, MOST_CASH);
  at("years").hidden = !ranks.some(({ outcome }) => bond(outcome));
  if (at("years").hidden) return;
  const rows = shown.map((o) => ({ o, cash: cashUsd(o), present: presentValueUsd(o) }));
  const most = Math.max(...rows.map(({ cash }) => cash.length));
  const head = ["candidate", "first day", ...Array.from({ length: most - 1 }, (_, k) => `year ${k + 1}`),
    "TCO", "NPV"];
  const body = rows.map(({ o, cash, present }) => [
    o.candidate.name, ...Array.from({ length: most }, (_, k) => (k in cash ? grouped(cash[k]) : "")),
    grouped(cash.reduce((a, b) => a + b, 0)), ranged(present)]);
  at("cash").innerHTML = tableHtml("USD paid by all devices over the years, before tax: capex on the "
    + "first day, opex in each year, TCO in all; the last year has the residual value; NPV at the interest set", head, body);
}

function drawUse(ranks) {
  const shown = overYearsShown(ranks, MOST_LINES);
  if (at("years").hidden || !shown.length) return;
  const shares = Array.from({ length: 19 }, (_, k) => (10 + 5 * k) / 100);
  const series = shown.map((o) => ({
    name: o.candidate.name,
    points: shares.map((share) => [100 * share, hourlyAt(overYears(o), share).value]),
  }));
  at("use").innerHTML = lines("Price of a useful device-hour over utilisation", series, "% of hours used",
    "USD per useful device-hour", 100 * shown[0].assumed.utilisation);
  const pairs = shown.flatMap((one) => shown.filter((other) => bond(other) < bond(one)
    && other.candidate.accelerator === one.candidate.accelerator).map((other) => [one, other]));
  at("pairs").replaceChildren(...pairs.slice(0, MOST_PAIRS).map(([one, other]) => {
    const item = document.createElement("li");
    item.textContent = pairText(one, other);
    return item;
  }));
}

function pairText(one, other) {
  const { share, low, high } = breakEven(one, other), word = (s) => (s === null ? "never" : percent(s));
  const names = `${one.candidate.name} is cheaper than ${other.candidate.name}`;
  if (share === null) {
    return `${one.candidate.name} costs more than ${other.candidate.name} at any utilisation.`;
  }
  return share === 0 ? `${names} at any utilisation.`
    : `${names} above ${percent(share)} utilisation (${word(low)} to ${word(high)} over its cost range).`;
}

function drawSizes(ranks) {
  const offers = new Map();
  for (const { outcome: o } of ranks) {
    const id = priceId(data, o.candidate);
    if (o.usd) offers.set(id, [...(offers.get(id) ?? []), o]);
  }
  const several = [...offers.values()].filter((of) => new Set(of.map((o) => o.devices)).size > 1);
  at("sizes").hidden = !several.length;
  if (!several.length) return;
  const series = (figure) => several.slice(0, MOST_LINES).map((of) => ({
    name: offerName(of[0].candidate), dots: true, dashed: true,
    points: of.map((o) => [o.devices, figure(o)]).sort(([a], [b]) => a - b),
  }));
  at("by-size").innerHTML = lines("Cost by size", series((o) => o.usd.value), "devices", "USD")
    + lines("Time to result by size", series((o) => o.resultHours.value / 24), "devices", "days");
}

/** What an offer of several sizes is called. */
function offerName({ place, cluster, provider }) {
  const { name, rent } = data.document.offers[place];
  return `${name ?? cluster}${rent?.each_provider ? ` at ${provider}` : ""}`;
}

const tableHtml = (caption, head, body) => `<table><caption>${safe(caption)}</caption><thead><tr>`
  + head.map((h, k) => `<th scope="col"${k ? ' class="n"' : ""}>${safe(h)}</th>`).join("") + "</tr></thead><tbody>"
  + body.map((row) => `<tr>${row.map((c, k) => (k ? `<td class="n">${safe(c)}</td>`
    : `<th scope="row">${safe(c)}</th>`)).join("")}</tr>`).join("") + "</tbody></table>";

function drawTable(ranks) {
  const { column, down } = page.sort, [, value] = COLUMNS[column];
  const shown = page.chosen.size ? ranks.filter((r) => page.chosen.has(r.outcome.candidate.name)) : [...ranks];
  shown.sort((a, b) => {
    const [x, y] = [value(a), value(b)].map((v) => v ?? Infinity);
    return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
  });
  at("all").hidden = !page.chosen.size;
  at("rows").innerHTML = shown.map((rank) => `<tr>${COLUMNS.map(([name, , words, css = ""], k) => {
    const said = safe(words(rank) ?? "");
    if (k === 1) return `<th scope="row">${said}</th>`;
    return `<td class="${css} ${name === "goals" ? "" : "n"}">${said}</td>`;
  }).join("")}</tr>`).join("");
  [...at("head").children].forEach((th, k) => {
    if (k === column) th.setAttribute("aria-sort", down ? "descending" : "ascending");
    else th.removeAttribute("aria-sort");
  });
}

function buildTable() {
  at("head").replaceChildren(...COLUMNS.map(([name, , , css = ""], k) => {
    const th = document.createElement("th"), button = document.createElement("button");
    button.textContent = name;
    button.type = "button";
    button.addEventListener("click", () => {
      page.sort = { column: k, down: page.sort.column === k && !page.sort.down };
      drawTable(page.ranks);
    });
    th.scope = "col";
    th.className = `${css} ${k === 1 || name === "goals" ? "" : "n"}`;
    if (GLOSSARY[name]) button.title = GLOSSARY[name];
    th.append(button);
    return th;
  }));
}

const OF_OWNING = ["electricity", "years", "residual", "interest", "lead"], MOST_DECIDERS = 3;

/** Whether an input can move any figure that is shown. */
function matters(id) {
  const kinds = data.candidates.map(({ terms }) => terms);
  const bound = kinds.some(({ bought, kind, commitment }) => bought || kind === "part" || commitment === "reserved");
  if (id === "utilisation") return bound;
  return !OF_OWNING.includes(id) || kinds.some(({ bought, kind }) => bought || kind === "owned" || kind === "part");
}

/** The inputs that rank another candidate first, the nearest first; utilisation before all. */
function decidersOf() {
  const goal = goalOf(data, {}), outcomes = outcomesOf(data, page.model, {}, { drawn: false });
  const by = outcomes.length ? orderedBy(goal, outcomes) : "cost";
  const known = outcomes.some((outcome) => figureOf(outcome, by) < Infinity);
  const found = known ? tornado(inputsOf(data, page.model, {}, outcomes), midpointGoal(data, {}), by, outcomes,
    (input, value) => outcomesOf(data, page.model, moved(input, value), { drawn: false, only: input.touches })) : [];
  const ids = found.flatMap(({ input }) => input.ids.slice(0, 1));
  const first = ["utilisation", ...ids, "tokens", "runs", ...controls.map(({ id }) => id)]
    .filter((id) => matters(id) && controls.some((control) => control.id === id && control.now));
  return [...new Set(first)].slice(0, MOST_DECIDERS);
}

/** Controls: a number and, where the study has a figure, a slider around it. */
function buildControls() {
  for (const control of controls) {
    const row = document.createElement("div"), label = document.createElement("label");
    const number = document.createElement("input"), slider = document.createElement("input");
    row.className = "control";
    number.type = "number";
    number.id = `set-${control.id}`;
    Object.assign(number, { min: control.least, max: control.most, step: "any" });
    label.htmlFor = number.id;
    label.textContent = `${control.label}, ${control.unit}`;
    slider.type = "range";
    Object.assign(slider, { min: -SLIDER, max: SLIDER });
    slider.setAttribute("aria-label", `${control.label}, slider`);
    number.addEventListener("input", () => set(control, number.value, number));
    slider.addEventListener("input", () => set(control, String(slid(control, slider.value)), slider));
    row.append(label, number, ...(control.now ? [slider] : []));
    row.hidden = !matters(control.id);
    const place = deciders.includes(control.id) ? "deciders" : control.id.startsWith("price.") ? "prices" : "assumptions";
    at(place).append(row);
    control.show = (source) => {
      const value = control.id in page.values ? page.values[control.id] : control.now;
      if (source !== number) number.value = value === null ? "" : short4(value);
      if (source !== slider && control.now && value) slider.value = SLIDER * Math.log(value / control.now) / Math.log(REACH);
      row.classList.toggle("set", control.id in page.values);
    };
  }
}

/** Four digits, and an exponent where a field would cut the number. */
const short4 = (value) => (Math.abs(value) < 1e7 ? String(Number(value.toPrecision(4)))
  : Number(value.toPrecision(4)).toExponential().replace("e+", "e"));

const slid = ({ now, least, most }, steps) => Number(
  Math.min(most, Math.max(least, now * REACH ** (steps / SLIDER))).toPrecision(4));

function set(control, text, source) {
  const value = text === "" ? null : Number(text);
  if (value === null && !clearable(control.id)) return;
  if (value !== null && !(value >= control.least && value <= control.most)) return;
  if (value === control.now) delete page.values[control.id];
  else page.values[control.id] = value;
  control.show(source);
  changed();
}

let waiting = false;

/** Draw once a frame, and keep the state in the address. */
function changed() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    const named = page.model === data.model ? {} : { model: page.model };
    history.replaceState(null, "", `#${fragmentOf({ ...page.values, ...named })}`);
    update();
  });
}

function choose(name) {
  if (page.chosen.has(name)) page.chosen.delete(name);
  else page.chosen.add(name);
  update();
}

function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function csv() {
  const ends = (span) => (span ? [span.value, span.low, span.high] : [null, null, null]);
  const triple = (name) => [name, `${name}_low`, `${name}_high`];
  return csvText([
    ["place", "model", "candidate", "devices", ...triple("hours_to_result"), ...triple("usd"),
      ...triple("usd_per_device_hour"), ...triple("outlay_usd"), "tokens_in_budget",
      "probability_cheapest", "probability_fastest", "probability_goals", "energy_kwh", "carbon_kg", "price"],
    ...page.ranks.map((r) => [r.place, page.model, r.outcome.candidate.name, r.outcome.devices,
      ...ends(r.outcome.resultHours), ...ends(r.outcome.usd), ...ends(r.outcome.usdPerDeviceHour),
      ...ends(r.outcome.outlayUsd), r.outcome.tokensInBudget, r.first.cost, r.first.time,
      r.outcome.chance, r.outcome.energyKwh?.value, r.outcome.carbonKg?.value, r.outcome.candidate.how]),
  ]);
}

function bind() {
  const scatterOf = at("scatter");
  scatterOf.addEventListener("click", ({ target }) => {
    const dot = target.closest(".dot");
    if (dot) choose(dot.dataset.name);
  });
  scatterOf.addEventListener("keydown", (event) => {
    const dot = event.target.closest(".dot");
    if (!dot || ![" ", "Enter"].includes(event.key)) return;
    event.preventDefault();
    choose(dot.dataset.name);
  });
  at("all").addEventListener("click", () => { page.chosen.clear(); update(); });
  at("reset").addEventListener("click", () => {
    page.values = {};
    for (const control of controls) control.show();
    at("by").value = data.goal.by;
    changed();
  });
  at("yaml").addEventListener("click", () => save("study.yaml", "application/yaml",
    `${yamlText(changedDocument(data, page.values))}\n`));
  at("csv").addEventListener("click", () => save("study.csv", "text/csv", csv()));
  at("model").addEventListener("change", ({ target }) => {
    page.model = target.value;
    page.chosen.clear();
    changed();
  });
  at("by").addEventListener("change", ({ target }) => {
    if (target.value === data.goal.by) delete page.values.by;
    else page.values.by = target.value;
    changed();
  });
  addEventListener("resize", () => requestAnimationFrame(update));
  addEventListener("hashchange", () => {
    page.values = valuesFrom(location.hash.slice(1), controls);
    page.model = modelFrom(location.hash) ?? data.model;
    at("model").value = page.model;
    for (const control of controls) control.show();
    update();
  });
}

/** The card as a picture: into the clipboard, or as a file where that is not allowed. */
async function copyPicture() {
  const parts = decisionParts(data, goalOf(data, page.values), page.ranks, new Date());
  const canvas = document.createElement("canvas"), style = getComputedStyle(document.body);
  Object.assign(canvas, { width: 1200, height: 630 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, 1200, 630);
  let y = 70;
  const write = (words, size, colour, weight = 400) => {
    pen.font = `${weight} ${size}px ${style.fontFamily}`;
    pen.fillStyle = colour;
    let line = "";
    for (const word of String(words ?? "").split(" ")) {
      if (pen.measureText(`${line} ${word}`).width > 1080 && line) {
        pen.fillText(line, 60, y);
        y += 1.3 * size;
        line = word;
      } else line = line ? `${line} ${word}` : word;
    }
    pen.fillText(line, 60, y);
    y += 1.45 * size;
  };
  write(document.querySelector("h1").textContent, 26, "#525d6b", 600);
  for (const [k, [label, value, note]] of parts.entries()) {
    write(k ? `${label}: ${value}` : value, k ? 28 : 46, "#14181f", 650);
    write(note, 20, "#525d6b");
  }
  write(at("flips").textContent, 20, "#0a5fb4");
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  try {
    await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
    told("picture", "Copied");
  } catch {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = "study.png";
    link.click();
    told("picture", "Saved");
  }
}

/** Copy the address, which keeps what is set. */
async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    told("link", "Copied");
  } catch {
    told("link", "Copy the address bar");
  }
}

function told(id, words) {
  const was = at(id).textContent;
  at(id).textContent = words;
  setTimeout(() => { at(id).textContent = was; }, 1500);
}

page.again = planAgain(() => yamlText(changedDocument(data, page.values)));
buildTable();
const deciders = decidersOf();
buildControls();
for (const id of deciders) at("deciders").append(at(`set-${id}`).parentElement); // in their order
const others = controls.filter(({ id }) => matters(id) && !deciders.includes(id)).length;
at("more-count").textContent = `${others} more inputs`;
at("link").addEventListener("click", copyLink);
at("picture").addEventListener("click", copyPicture);
for (const control of controls) control.show();
at("by").value = page.values.by ?? data.goal.by;
at("model").value = page.model;
bind();
update();
globalThis.meshwright = { // what a test reads
  csv, yaml: () => yamlText(changedDocument(data, page.values)),
};

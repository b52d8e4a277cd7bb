// Calls functions of the page's modules: node compare.mjs FOLDER < CALLS.json > RESULTS.json
//
// FOLDER has planner/.  A call is {module, name, arguments}; a study is {data, model, values}, which
// gives every outcome, its place, what flips the first and the changed document.
import { readFileSync } from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const load = (name) => import(pathToFileURL(path.resolve(process.argv[2], name)).href);
const { calls, studies } = JSON.parse(readFileSync(0, "utf8"));
const [state, documents, ranking, years, inputs, sensitivity] = await Promise.all(
  ["planner/report/page/state.mjs", "planner/report/page/documents.mjs",
    "planner/whatif/ranking.mjs", "planner/whatif/pricing/break_even.mjs",
    "planner/report/page/inputs.mjs", "planner/whatif/sensitivity.mjs"].map(load));

const queue = await load("planner/whatif/pricing/queueing.mjs");
const results = [];
for (const { module, name, arguments: given } of calls) {
  const found = (await load(`planner/whatif/${module}.mjs`))[name](...given);
  results.push(ArrayBuffer.isView(found) ? [...found] : found);
}

const worked = studies.map(({ data, model, values }) => {
  const goal = state.goalOf(data, values), outcomes = state.outcomesOf(data, model, values);
  const ranks = ranking.ranked(goal, outcomes, data.assumed.tie).map((rank) => ({
    ...rank, outcome: undefined, candidate: rank.outcome.candidate.name,
  }));
  const figures = outcomes.map((o) => ({
    candidate: o.candidate.name, hours: o.hours, usd: o.usd, outlayUsd: o.outlayUsd,
    capitalUsd: o.capitalUsd, watts: o.watts, energyKwh: o.energyKwh, carbonKg: o.carbonKg,
    usdPerDeviceHour: o.usdPerDeviceHour, goodput: o.goodput, tokensInBudget: o.tokensInBudget,
    load: queue.load(o.jobs), wait: queue.waitH(o.jobs), shortest: queue.shortestFirstH(o.jobs),
    chances: o.chances, misses: o.misses.map(({ name }) => name),
    cash: years.comparable(o) ? years.cashUsd(o) : null,
    presentValue: years.comparable(o) ? years.presentValueUsd(o) : null,
  }));
  const light = (moved, only) => state.outcomesOf(data, model, moved, { drawn: false, only });
  const base = light(values, () => true);
  const bars = sensitivity.tornado(inputs.inputsOf(data, model, values, base),
    inputs.midpointGoal(data, values), "cost", base,
    (input, value) => light({ ...values, ...sensitivity.moved(input, value) }, input.touches));
  const flips = Object.fromEntries(bars.map((bar) => [bar.input.id, bar.flips]));
  return { figures, ranks, flips, document: documents.yamlText(state.changedDocument(data, values)) };
});
process.stdout.write(JSON.stringify({ results, studies: worked }));

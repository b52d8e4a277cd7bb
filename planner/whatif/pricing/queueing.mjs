/**
 * How long jobs wait for a cluster that one of them has at a time.  The twin of queue.py, which has the
 * formulas.
 *
 * @typedef {[number, number]} Arrivals  of a class of jobs: runs a year, hours of a run
 */
import { HOURS_PER_YEAR } from "./economics.mjs";

const sum = (jobs, figure) => jobs.reduce((before, job) => before + figure(job), 0);

/** Share of a year's hours that jobs take. @param {Arrivals[]} jobs */
export const load = (jobs) => sum(jobs, ([runs, hours]) => runs * hours) / HOURS_PER_YEAR;

const begunH = (jobs) => sum(jobs, ([runs, hours]) => runs * hours * hours) / 2 / HOURS_PER_YEAR;

/** Mean hours that a job waits, first come, first served; null: the queue grows for ever. */
export const waitH = (jobs) => (load(jobs) >= 1 ? null : begunH(jobs) / (1 - load(jobs)));

/** Mean hours that each class waits where the shortest of the waiting jobs goes first; or null. */
export const shortestFirstH = (jobs) => (load(jobs) >= 1 ? null : jobs.map(([, hours]) => {
  const shorter = load(jobs.filter((job) => job[1] < hours));
  const noLonger = load(jobs.filter((job) => job[1] <= hours));
  return begunH(jobs) / (1 - shorter) / (1 - noLonger);
}));

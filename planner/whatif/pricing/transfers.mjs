/** What storing and moving data costs beside devices.  The twin of transfers.py. */
import { HOURS_PER_YEAR } from "./economics.mjs";
import { times } from "../uncertain_value.mjs";

const HOURS_PER_MONTH = HOURS_PER_YEAR / 12;

/** USD of an hour of what is stored. */
export const storedUsdPerHour = (data) => times(data.usd_per_tb_month, data.stored_tb / HOURS_PER_MONTH);

/** USD of what a run moves. */
export const movedUsd = (data) => times(data.usd_per_tb_moved, data.moved_tb);

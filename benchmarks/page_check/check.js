// Opens reports in headless Chromium with the network off, light and dark, 390 to 1,920 pixels:
//
//     apt-get install chromium; npm install; node check.js REPORT.html ...
//
// Fails on console errors, on any fault of accessibility (axe), on pages wider than the window, on a
// page that the keyboard does not reach, and on files of 400 kB or more.  Of a study's page each
// control is moved a few times: the page must follow within 50 ms, the address must keep the
// state, a reset must restore every figure, and a printed page must be one.  SHOTS=FOLDER also keeps
// pictures.
const { opened } = require("./browser");
const fs = require("fs");
const path = require("path");

const VIEWS = [["light", 1280], ["dark", 1280], ["light", 390], ["dark", 390], ["light", 1920]];
const MOST_BYTES = 400e3, MOST_MS = 50, MOST_MOVES = 12;

async function faults(browser, file, colorScheme, width) {
  const context = await browser.newContext({
    offline: true, colorScheme, viewport: { width, height: 900 },
  });
  const page = await context.newPage();
  const found = [];
  page.on("console", (message) => {
    if (message.type() === "error") found.push(`console: ${message.text()}`);
  });
  page.on("pageerror", (error) => found.push(`script: ${error}`));
  await page.goto(`file://${path.resolve(file)}`);
  await page.waitForTimeout(500);
  if (process.env.SHOTS) {
    const name = `${path.basename(file, ".html")}-${colorScheme}-${width}.png`;
    await page.screenshot({ path: path.join(process.env.SHOTS, name), fullPage: true });
  }
  const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document));
  for (const { id, impact, nodes } of violations) {
    found.push(`${impact}: ${id}, ${nodes.length} times, ${nodes[0].html.slice(0, 100)}`);
  }
  const over = await page.evaluate(
    () => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  if (over > 0) found.push(`${over} pixels wider than the window of ${width}`);
  await page.keyboard.press("Tab");
  const reached = await page.evaluate(() => document.activeElement !== document.body);
  if (!reached) found.push("the keyboard reaches nothing");
  const study = await page.evaluate(() => Boolean(document.getElementById("verdict")));
  if (study && width === 1280 && colorScheme === "light") found.push(...await moved(page, file));
  await context.close();
  return [...new Set(found)].map((text) => `${file}, ${colorScheme}, ${width} pixels: ${text}`);
}

/** Move every control of a study's page. */
async function moved(page, file) {
  const found = [], ids = await page.evaluate(
    () => [...document.querySelectorAll("aside .control:not([hidden]) input[type=number]")].map(({ id }) => id));
  const unfold = () => page.evaluate(() => { document.getElementById("more").open = true; });
  await unfold();
  const figures = () => page.evaluate(() => globalThis.meshwright.csv());
  const before = await figures(), times = [];
  for (const id of ids) {
    const value = await page.inputValue(`[id="${id}"]`);
    const unset = Math.max(90, 2 * await page.evaluate((of) => Number(document.getElementById(of).min), id));
    const limit = ["set-utilisation", "set-residual"].includes(id) ? 0.77 * Number(value) : 1.3 * Number(value);
    const took = [];
    // Other work of the machine delays some moves: what counts is the fastest of a few.
    for (let k = 0; k < MOST_MOVES && (k < 3 || Math.min(...took) > MOST_MS); k++) {
      await page.fill(`[id="${id}"]`, String((1 - k / 100) * (limit || unset)));
      await page.waitForTimeout(100);
      took.push(await page.evaluate(() => Number(document.documentElement.dataset.ms)));
    }
    times.push(Math.min(...took));
    const address = await page.evaluate(() => decodeURIComponent(location.hash));
    if (!address.includes(id.slice("set-".length))) found.push(`${id}: the address does not keep it`);
  }
  const changed = await figures();
  if (changed === before) found.push("no figure follows the controls");
  const address = await page.evaluate(() => location.href);
  await page.goto("about:blank");
  await page.goto(address);
  if (await figures() !== changed) found.push("the address does not restore the state");
  await unfold();
  await page.click("#reset");
  await page.waitForTimeout(150);
  if (await figures() !== before) found.push("a reset leaves something changed");
  times.sort((a, b) => a - b);
  console.log(`${path.basename(file)}: ${ids.length} controls, redrawn in ${times[0]} to ${times.at(-1)} ms`);
  if (times.at(-1) > MOST_MS) found.push(`redrawn in ${times.at(-1)} ms`);
  await page.focus(".dot");
  await page.keyboard.press("Enter");
  const rows = await page.evaluate(() => document.querySelectorAll("#rows tr").length);
  if (rows !== 1) found.push(`a candidate chosen by the keyboard leaves ${rows} rows`);
  await page.click("#all");
  const pdf = await page.pdf({ format: "A4", preferCSSPageSize: true });
  const pages = pdf.toString("latin1").match(/\/Type\s*\/Page[^s]/g).length;
  if (pages !== 1) found.push(`prints ${pages} pages`);
  if (process.env.SHOTS) {
    fs.writeFileSync(path.join(process.env.SHOTS, `${path.basename(file, ".html")}.pdf`), pdf);
  }
  return found;
}

(async () => {
  const browser = await opened();
  const all = [];
  for (const file of process.argv.slice(2)) {
    const size = fs.statSync(file).size;
    if (size >= MOST_BYTES) all.push(`${file}: ${size} bytes are not below ${MOST_BYTES}`);
    for (const [scheme, width] of VIEWS) all.push(...await faults(browser, file, scheme, width));
  }
  await browser.close();
  for (const fault of all) console.log(fault);
  console.log(`${process.argv.length - 2} pages, ${all.length} faults`);
  process.exit(all.length ? 1 : 0);
})();

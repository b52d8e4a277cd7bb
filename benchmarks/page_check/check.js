// Opens reports in headless Chromium with the network off, light and wide, dark and narrow:
//
//     apt-get install chromium; npm install; node check.js REPORT.html ...
//
// Fails on console errors, on serious faults of accessibility (axe), on pages wider than the
// window, on figures of the wide table that are cut off at 1,280 pixels, and on files above 6 MB,
// or 1.5 MB where a page has no script.  SHOTS=FOLDER also keeps pictures of every view.
const { chromium } = require("playwright-core");
const fs = require("fs");
const path = require("path");

const ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const VIEWS = [["light", 1280], ["dark", 1280], ["light", 390], ["dark", 390]];
const MOST_BYTES = 6e6, MOST_WITHOUT_SCRIPT = 1.5e6;

async function faults(browser, file, colorScheme, width) {
  const context = await browser.newContext({
    offline: true, colorScheme, viewport: { width, height: 800 },
  });
  const page = await context.newPage();
  const found = [];
  page.on("console", (message) => {
    if (message.type() === "error") found.push(`console: ${message.text()}`);
  });
  page.on("pageerror", (error) => found.push(`script: ${error}`));
  await page.goto(`file://${path.resolve(file)}`);
  await page.waitForTimeout(1000);
  await page.addScriptTag({ path: require.resolve("axe-core/axe.min.js") });
  const { violations } = await page.evaluate(() => axe.run(document));
  for (const { id, impact, nodes } of violations) {
    if (impact === "serious" || impact === "critical") {
      found.push(`${impact}: ${id}, ${nodes.length} times, ${nodes[0].html.slice(0, 100)}`);
    }
  }
  const over = await page.evaluate(
    () => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  if (over > 0) found.push(`${over} pixels wider than the window of ${width}`);
  if (width === 1280) {
    const cut = await page.evaluate(() => [...document.querySelectorAll("table.wide")].filter(
      (table) => table.scrollWidth > table.parentElement.clientWidth + 1).length);
    if (cut) found.push(`${cut} wide tables are cut off`);
  }
  if (process.env.SHOTS) {
    const name = `${path.basename(file, ".html")}-${colorScheme}-${width}.png`;
    await page.screenshot({ path: path.join(process.env.SHOTS, name), fullPage: true });
  }
  await page.keyboard.press("Tab");
  const reached = await page.evaluate(() => document.activeElement !== document.body);
  if (!reached) found.push("the keyboard reaches nothing");
  await context.close();
  return found.map((text) => `${file}, ${colorScheme}, ${width} pixels: ${text}`);
}

(async () => {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: ARGUMENTS,
  });
  const all = [];
  for (const file of process.argv.slice(2)) {
    const size = fs.statSync(file).size;
    const most = /<script/.test(fs.readFileSync(file, "utf8")) ? MOST_BYTES : MOST_WITHOUT_SCRIPT;
    if (size > most) all.push(`${file}: ${size} bytes are more than ${most}`);
    for (const [scheme, width] of VIEWS) all.push(...await faults(browser, file, scheme, width));
  }
  await browser.close();
  for (const fault of all) console.log(fault);
  console.log(`${process.argv.length - 2} pages, ${all.length} faults`);
  process.exit(all.length ? 1 : 0);
})();

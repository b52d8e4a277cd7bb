// Pictures of a plan's or a study's page for the documents, light and dark, wide and narrow:
//
//     apt-get install chromium; npm install; node shots.js REPORT.html FOLDER
//
// Of each view the first screen (answer, alternatives, mesh), and the one with the timeline and the
// memory over a step.  `pictures.py FOLDER docs/pictures` makes them small.
const { opened } = require("./browser");
const path = require("path");

const VIEWS = [["light", 1280, 860], ["dark", 1280, 860], ["light", 390, 860], ["dark", 390, 860]];

(async () => {
  const [file, folder] = process.argv.slice(2);
  const browser = await opened();
  for (const [colorScheme, width, height] of VIEWS) {
    const context = await browser.newContext({
      offline: true, colorScheme, viewport: { width, height },
    });
    const page = await context.newPage();
    await page.goto(`file://${path.resolve(file)}`);
    await page.waitForTimeout(1500);
    const study = await page.evaluate(() => Boolean(document.getElementById("decided")));
    const name = (part) => path.join(folder, `${study ? "study" : "plan"}-${part}-${colorScheme}-${width}.png`);
    await page.screenshot({ path: name("top") });
    if (study) {
      await context.close();
      continue;
    }
    await page.evaluate(() => [...document.querySelectorAll("h2")].find(
      (head) => head.textContent === "Pipeline timeline").scrollIntoView());
    await page.waitForTimeout(300);
    await page.screenshot({ path: name("timeline") });
    await context.close();
  }
  await browser.close();
})();

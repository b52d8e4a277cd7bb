// Pictures of the first screens of pages, light and dark, wide and narrow:
//
//     apt-get install chromium; npm install; node shots.js FOLDER PICTURES
//
// Of each page its first screen at 1,280 x 800 and its first screen and a half at 390 pixels; of a
// plan with a pipeline the screen with its timeline too.  `pictures.py PICTURES docs/pictures` makes
// them small; `alike.js PICTURES KEPT` compares two folders.
const { opened } = require("./browser");
const fs = require("fs");
const path = require("path");

const VIEWS = [["light", 1280, 800], ["dark", 1280, 800], ["light", 390, 1200], ["dark", 390, 1200]];

(async () => {
  const [folder, pictures] = process.argv.slice(2);
  fs.mkdirSync(pictures, { recursive: true });
  const browser = await opened();
  for (const file of fs.readdirSync(folder).filter((name) => name.endsWith(".html")).sort()) {
    for (const [colorScheme, width, height] of VIEWS) {
      const context = await browser.newContext({
        offline: true, colorScheme, viewport: { width, height },
      });
      const page = await context.newPage();
      await page.goto(`file://${path.resolve(folder, file)}`);
      await page.waitForTimeout(600);
      const name = (part) => path.join(pictures, `${path.basename(file, ".html")}-${part}-${colorScheme}-${width}.png`);
      await page.screenshot({ path: name("top") });
      const timeline = await page.evaluate(() => {
        const head = [...document.querySelectorAll("h2")].find((h) => h.textContent === "Pipeline timeline");
        head?.scrollIntoView();
        return Boolean(head);
      });
      if (timeline) {
        await page.waitForTimeout(300);
        await page.screenshot({ path: name("timeline") });
      }
      await context.close();
    }
  }
  await browser.close();
})();

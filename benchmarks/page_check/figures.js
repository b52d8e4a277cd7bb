// A study's page in headless Chromium with figures set: its table as CSV, and the study that it is.
//
//     echo '["", "utilisation=0.5"]' | node figures.js PAGE.html
//
// Standard input is a list of fragments of the page's address; a list of {csv, yaml} is printed.
const { opened } = require("./browser");
const fs = require("fs");
const path = require("path");

(async () => {
  const browser = await opened(), found = [];
  for (const fragment of JSON.parse(fs.readFileSync(0, "utf8"))) {
    const page = await (await browser.newContext({ offline: true })).newPage();
    await page.goto(`file://${path.resolve(process.argv[2])}#${fragment}`);
    found.push(await page.evaluate(
      () => ({ csv: globalThis.meshwright.csv(), yaml: globalThis.meshwright.yaml() })));
    await page.close();
  }
  await browser.close();
  console.log(JSON.stringify(found));
})();

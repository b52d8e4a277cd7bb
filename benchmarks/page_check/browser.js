// Headless Chromium of this machine: CHROMIUM, or /usr/bin/chromium.
const { chromium } = require("playwright-core");

const ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync"];

exports.opened = () => chromium.launch({
  executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: ARGUMENTS,
});

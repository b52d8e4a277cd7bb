// Compares pictures of pages with kept ones of the same names: node alike.js PICTURES KEPT
//
// Both are drawn at a tenth of their size, so that a word, a date or a font moves little, and a card
// that is gone, a colour that is wrong or a page that is empty moves much.  Prints how far each is
// off, in hundredths of black to white; fails above MOST, or where a kept picture has no new one.
const { opened } = require("./browser");
const fs = require("fs");
const path = require("path");

const MOST = 6;

const data = (file) => `data:image/${path.extname(file).slice(1)};base64,${fs.readFileSync(file).toString("base64")}`;

/** Mean difference of two pictures, in the browser. */
async function off([first, second]) {
  const drawn = async (source) => {
    const image = new Image();
    image.src = source;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.width, image.height].map((side) => Math.ceil(side / 10));
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    return context.getImageData(0, 0, canvas.width, canvas.height);
  };
  const [one, other] = [await drawn(first), await drawn(second)];
  if (one.width !== other.width || one.height !== other.height) return 100;
  const gaps = one.data.map((value, k) => Math.abs(value - other.data[k]));
  return 100 * gaps.reduce((sum, gap) => sum + gap, 0) / gaps.length / 255 * 4 / 3;
}

(async () => {
  const [pictures, kept] = process.argv.slice(2);
  const browser = await opened();
  const page = await (await browser.newContext({ offline: true })).newPage();
  let faults = 0;
  for (const file of fs.readdirSync(kept).filter((name) => /-top-.*\.webp$/.test(name)).sort()) {
    const picture = path.join(pictures, file.replace(/webp$/, "png"));
    const far = fs.existsSync(picture)
      ? await page.evaluate(off, [data(picture), data(path.join(kept, file))]) : 100;
    if (far > MOST) faults++;
    console.log(`${file} ${far.toFixed(1)}`);
  }
  await browser.close();
  console.log(`${faults} faults`);
  process.exit(faults ? 1 : 0);
})();

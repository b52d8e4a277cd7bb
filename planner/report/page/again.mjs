/** Where a server made the page: the changed study is planned again, and the page loads its answer. */

const POLL_MS = 500;

/**
 * Fill the study's text whenever it changes, and plan it when asked; nothing on a page that is a file.
 * @param {function(): string} documentText  the changed study as YAML
 * @returns {function(): void} what to call after a control has moved
 */
export function planAgain(documentText) {
  const text = document.getElementById("document"), said = document.getElementById("progress");
  if (!text) return () => {};
  let edited = false;
  text.addEventListener("input", () => { edited = true; });
  document.getElementById("plan").addEventListener("click", () => plan(text.value, said));
  return () => { if (!edited) text.value = documentText(); };
}

async function plan(study, said) {
  const answer = await fetch("plan", { method: "POST", body: study });
  const { error } = await answer.json();
  if (error) said.textContent = error;
  else await follow(said);
}

async function follow(said) {
  const { busy, done, total, error } = await (await fetch("progress")).json();
  said.textContent = error || (total ? `${done} of ${total} candidates` : "planning");
  if (busy) setTimeout(() => follow(said), POLL_MS);
  else if (!error) location.replace(location.pathname);
}

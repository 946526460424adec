// The few sentences that scripts say, translated by the server into <template id="words">.
const words = document.getElementById("words")?.dataset ?? {};

export const word = (name) => words[name] ?? "";

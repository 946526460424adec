// Passkeys: <form data-passkey="create|get"> has the server's options in data-options, or asks data-options-from for
// them, and sends what the browser's dialog gives as its field `credential`.
const bytes = (text) => Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
const text = (buffer) =>
  btoa(String.fromCharCode(...new Uint8Array(buffer))).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");

const named = (list) => (list || []).map((one) => ({ ...one, id: bytes(one.id) }));

function forBrowser(options) {
  const challenge = bytes(options.challenge);
  if (!options.user) return { ...options, challenge, allowCredentials: named(options.allowCredentials) };
  return {
    ...options,
    challenge,
    user: { ...options.user, id: bytes(options.user.id) },
    excludeCredentials: named(options.excludeCredentials),
    // A passkey that can, signs in alone; one that can't is a second step.
    authenticatorSelection: { ...options.authenticatorSelection, residentKey: "preferred", userVerification: "preferred" },
  };
}

function forServer(credential) {
  const { response } = credential;
  const parts = {};
  for (const name of ["clientDataJSON", "attestationObject", "authenticatorData", "signature", "userHandle"]) {
    if (response[name]) parts[name] = text(response[name]);
  }
  if (response.getTransports) parts.transports = response.getTransports();
  return {
    id: credential.id,
    rawId: text(credential.rawId),
    type: credential.type,
    authenticatorAttachment: credential.authenticatorAttachment,
    clientExtensionResults: credential.getClientExtensionResults(),
    response: parts,
  };
}

async function optionsOf(form) {
  const { options, optionsFrom } = form.dataset;
  if (options) return JSON.parse(options);
  const answer = await fetch(optionsFrom, { headers: { Accept: "application/json" } });
  if (!answer.ok) throw new Error(`${answer.status}`);
  return (await answer.json()).request_options;
}

async function use(form) {
  const error = form.querySelector("[data-passkey-error]");
  error.textContent = "";
  try {
    const { publicKey } = await optionsOf(form);
    const credential = await navigator.credentials[form.dataset.passkey]({ publicKey: forBrowser(publicKey) });
    form.elements.credential.value = JSON.stringify(forServer(credential));
    form.submit();
  } catch (problem) {
    error.textContent = error.dataset[problem.name === "InvalidStateError" ? "known" : "cancelled"];
  }
}

// Browsers have them on HTTPS and on localhost, and never for the number of an address.
const can = Boolean(window.PublicKeyCredential) && !/^[\d.]+$|^\[/.test(location.hostname);
for (const form of document.querySelectorAll("[data-passkey]")) {
  form.hidden = !can && form.hidden;
  if (!can) {
    const error = form.querySelector("[data-passkey-error]");
    error.textContent = error.dataset.missing;
    form.querySelector("[type=submit]").disabled = true;
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (can) use(form);
  });
}

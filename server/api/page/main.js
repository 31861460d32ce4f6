// Asks for /server_info once a second while the page is visible, and draws it.

import { $ } from "./dom.js";
import { startChat } from "./chat.js";
import { Rates } from "./rates.js";
import { draw, drawStatus } from "./view.js";

const INTERVAL_MS = 1000;
const rates = new Rates();
let key = sessionStorage.getItem("pdserve-key");

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

async function update() {
  let response;
  try {
    response = await fetch("server_info", { headers: headers(), signal: AbortSignal.timeout(5000) });
  } catch {
    drawStatus("not reachable", false);
    $("main").classList.add("stale");
    return;
  }
  const refused = response.status === 401;
  $("key-form").hidden = !refused;
  $("main").hidden = refused;
  $("main").classList.toggle("stale", !response.ok);
  if (refused) {
    drawStatus(key ? "wrong API key" : "locked", false);
    return;
  }
  if (!response.ok) {
    drawStatus(`error ${response.status}`, false);
    return;
  }
  const info = await response.json();
  const now = rates.add(info);
  draw(info, now, rates.history);
}

async function poll() {
  for (;;) {
    const next = new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
    if (!document.hidden) await update().catch((error) => console.error(error));
    await next;
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("pdserve-key", key);
});

startChat(headers);
poll();

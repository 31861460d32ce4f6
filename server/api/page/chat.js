// The chat box: streams through /v1/chat/completions, as any client does.

import { $, element } from "./dom.js";

export function startChat(headers) {
  const history = [];
  let answering = null;

  const show = (role, text) => {
    const line = element("p", role, text);
    $("messages").append(line);
    $("messages").scrollTop = $("messages").scrollHeight;
    return line;
  };

  $("reset").addEventListener("click", () => {
    answering?.abort();
    history.length = 0;
    $("messages").replaceChildren();
  });

  $("chat-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (answering) {
      answering.abort();
      return;
    }
    const text = $("message").value.trim();
    if (!text) return;
    $("message").value = "";
    history.push({ role: "user", content: text });
    show("user", text);
    const reasoning = show("reasoning", "");
    const line = show("assistant", "");
    answering = new AbortController();
    $("send").textContent = "Stop";
    try {
      await stream(history, headers(), answering.signal, (choice) => {
        reasoning.textContent += choice.delta.reasoning_content ?? "";
        line.textContent += choice.delta.content ?? "";
        if (choice.finish_reason === "length") show("note", "The answer was cut off at the limit of tokens.");
        $("messages").scrollTop = $("messages").scrollHeight;
      });
    } catch (error) {
      if (error.name !== "AbortError") show("note", error.message);
    }
    if (line.textContent && line.isConnected) history.push({ role: "assistant", content: line.textContent });
    else { // no answer, or Reset has removed it
      line.remove();
      history.pop();
    }
    answering = null;
    $("send").textContent = "Send";
  });
}

async function stream(messages, headers, signal, take) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { ...headers, "Content-Type": "application/json" },
    body: JSON.stringify({ messages, stream: true }),
    signal,
  });
  if (!response.ok) {
    const reply = await response.json().catch(() => null);
    throw new Error(reply?.error?.message ?? `the server answered ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      take(chunk.choices[0]);
    }
  }
}

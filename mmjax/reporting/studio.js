"use strict";
const at = id => document.getElementById(id);
const known = {live: 0, asked: 0};
const control = at("control");

async function poll() {
  let pause = 1000;
  try {
    if (!document.hidden) {
      const reply = await fetch(`state?live=${known.live}&asked=${known.asked}`);
      if (!reply.ok) throw new Error(reply.status);
      const state = await reply.json();
      at("error").textContent = state.error;
      at("age").textContent = state.age;
      for (const kind in known) if (kind in state) {
        known[kind] = state[kind].version;
        for (const part in state[kind].parts) at(part).innerHTML = state[kind].parts[part];
      }
      if (control) at("output").textContent = state.output;
      if (state.more) pause = 50;
    }
  } catch (error) {
    at("error").textContent = "The server does not answer: has mmjax studio been ended?";
  }
  setTimeout(poll, pause);
}

async function ask(question) {
  at("refusal").textContent = "";
  const form = document.forms[0];
  const numbers = {max_tokens: form.max_tokens.valueAsNumber, temperature: form.temperature.valueAsNumber};
  try {
    const reply = await fetch("ask", {method: "POST", body: JSON.stringify({...numbers, ...question})});
    at("refusal").textContent = (await reply.json()).error;
  } catch (error) {
    at("refusal").textContent = "The question did not arrive.";
  }
}

async function act(action) {
  at("control_refusal").textContent = "";
  const body = {action, changes: at("changes").value, name: at("name").value};
  try {
    const reply = await fetch("control", {method: "POST", body: JSON.stringify(body)});
    at("control_refusal").textContent = (await reply.json()).error;
  } catch (error) {
    at("control_refusal").textContent = "The command did not arrive.";
  }
}

const encoded = file => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve({kind: file.type.split("/")[0], name: file.name, data: reader.result.split(",")[1] || ""});
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

document.forms[0].onsubmit = async event => {
  event.preventDefault();
  const form = event.target;
  ask({question: form.question.value, media: await Promise.all([...form.media.files].map(encoded))});
};
at("samples").ontoggle = async event => {
  if (!event.target.open) return;
  const reply = await fetch("samples");
  event.target.querySelector("div").innerHTML = await reply.text();
};
// An image of a sample becomes the question's file, a sample's button asks its own question.
at("samples").onclick = async event => {
  if (event.target.dataset.sample) ask({sample: event.target.dataset.sample});
  if (event.target.alt === "image") {
    const files = new DataTransfer();
    files.items.add(new File([await (await fetch(event.target.src)).blob()], "sample.png", {type: "image/png"}));
    document.forms[0].media.files = files.files;
    document.forms[0].question.focus();
  }
};
if (control) control.onclick = event => {
  if (event.target.dataset.action) act(event.target.dataset.action);
};
poll();

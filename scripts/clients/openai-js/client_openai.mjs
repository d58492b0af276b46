// OpenAI's JavaScript client: both routes, whole and streamed, log probabilities, choices, stops, errors.
// `node client_openai.mjs '{"model": {"url", "key", "model"}, …}'`: a line a check, exit code 1 if one failed.

import assert from "node:assert/strict";
import OpenAI from "openai";

const AT = JSON.parse(process.argv[2]);
const QUESTION = [{ role: "user", content: "What is the capital of France?" }];
const FRANCE = "The capital of France is";
const STORY = "Once upon a time";

const client = (at, options = {}) =>
  new OpenAI({ baseURL: `${at.url}/v1`, apiKey: at.key, maxRetries: 0, timeout: 120_000, ...options });
const [MODEL, SCRIPTED, BUSY] = [AT.model, AT.scripted, AT.busy].map((at) => client(at));

const chat = (fields = {}) =>
  MODEL.chat.completions.create({
    model: AT.model.model, messages: QUESTION, temperature: 0, max_tokens: 16, ...fields,
  });
const complete = (fields = {}) =>
  MODEL.completions.create({ model: AT.model.model, prompt: FRANCE, temperature: 0, max_tokens: 8, ...fields });
const scripted = (text, fields = {}) =>
  SCRIPTED.chat.completions.create({ model: AT.scripted.model, messages: [{ role: "user", content: text }], ...fields });
const busy = () =>
  BUSY.chat.completions.create({
    model: AT.busy.model, messages: [{ role: "user", content: "forever" }], stream: true,
  });

async function collected(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

// The text of each choice by its index, joined from the chunks of either route.
function texts(chunks) {
  const joined = {};
  for (const choice of chunks.flatMap((chunk) => chunk.choices)) {
    joined[choice.index] = (joined[choice.index] ?? "") + (choice.text ?? choice.delta?.content ?? "");
  }
  return joined;
}

function near(found, wanted, within) {
  assert.ok(Math.abs(found - wanted) <= within, `${found} is not ${wanted} within ${within}`);
}

async function rejected(promise, kind, expected) {
  const error = await promise.then(
    () => assert.fail(`nothing was thrown, wanted ${kind.name}`),
    (thrown) => thrown,
  );
  assert.ok(error instanceof kind, `${error.constructor.name}: ${error.message}`);
  for (const [name, value] of Object.entries(expected)) assert.equal(error[name], value, name);
  return error;
}

const checks = {
  "models are listed and found": async () => {
    const listed = await collected(MODEL.models.list());
    assert.deepEqual(listed.map((card) => card.id), [AT.model.model]);
    assert.equal((await MODEL.models.retrieve(AT.model.model)).max_model_len, 512);
  },

  "chat: the answer is Paris, its usage adds up": async () => {
    const whole = await chat();
    assert.match(whole.choices[0].message.content, /Paris/);
    assert.equal(whole.choices[0].finish_reason, "stop");
    assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  },

  "chat: streamed text equals the whole answer, events in order": async () => {
    const whole = await chat();
    const chunks = await collected(await chat({ stream: true, stream_options: { include_usage: true } }));
    assert.deepEqual(texts(chunks), { 0: whole.choices[0].message.content });
    assert.equal(chunks[0].choices[0].delta.role, "assistant");
    assert.deepEqual(chunks.at(-1).choices, []);
    assert.equal(chunks.at(-1).usage.total_tokens, whole.usage.total_tokens);
    assert.equal(chunks.at(-2).choices[0].finish_reason, "stop");
  },

  "chat: the client's own stream helper puts the answer together": async () => {
    const stream = MODEL.chat.completions.stream({ model: AT.model.model, messages: QUESTION, temperature: 0 });
    let heard = "";
    stream.on("content", (piece) => (heard += piece));
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.content, heard);
    assert.equal(final.choices[0].finish_reason, "stop");
    assert.match(heard, /Paris/);
  },

  "chat: log probabilities: the greedy token heads its own list": async () => {
    const choice = (await chat({ logprobs: true, top_logprobs: 4 })).choices[0];
    const entries = choice.logprobs.content;
    const visible = entries.map((entry) => entry.token).filter((token) => !token.includes("<|"));
    assert.equal(visible.join(""), choice.message.content);
    for (const entry of entries) {
      assert.equal(entry.top_logprobs.length, 4);
      assert.deepEqual([entry.top_logprobs[0].token, entry.top_logprobs[0].logprob], [entry.token, entry.logprob]);
      assert.equal(Buffer.from(entry.bytes).toString(), entry.token);
    }
  },

  "chat: streamed log probabilities equal the whole answer's": async () => {
    const whole = (await chat({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content;
    const chunks = await collected(await chat({ logprobs: true, top_logprobs: 2, stream: true }));
    const streamed = chunks.flatMap((chunk) => chunk.choices[0]?.logprobs?.content ?? []);
    assert.deepEqual(streamed.map((entry) => entry.token), whole.map((entry) => entry.token));
    streamed.forEach((entry, index) => near(entry.logprob, whole[index].logprob, 1e-4));
  },

  "completions: greedy text begins with Paris, streamed or not": async () => {
    const whole = await complete();
    assert.ok(whole.choices[0].text.startsWith(" Paris"), whole.choices[0].text);
    assert.equal(whole.choices[0].finish_reason, "length");
    assert.deepEqual(texts(await collected(await complete({ stream: true }))), { 0: whole.choices[0].text });
  },

  "completions: log probabilities as columns, and echo scores as generating did": async () => {
    const made = (await complete({ logprobs: 3 })).choices[0];
    const columns = made.logprobs;
    assert.equal(columns.tokens.join(""), made.text);
    columns.tokens.forEach((token, index) => {
      assert.equal(columns.top_logprobs[index][token], columns.token_logprobs[index]);
      assert.equal(Math.max(...Object.values(columns.top_logprobs[index])), columns.token_logprobs[index]);
    });
    const fields = { prompt: FRANCE + made.text, echo: true, logprobs: 0, max_tokens: 0 };
    const scored = (await complete(fields)).choices[0];
    assert.equal(scored.text, FRANCE + made.text);
    assert.equal(scored.logprobs.token_logprobs[0], null);
    const tail = scored.logprobs.token_logprobs.slice(-columns.tokens.length);
    tail.forEach((value, index) => near(value, columns.token_logprobs[index], 1e-4));
  },

  "completions: n=3 with a seed: different choices, the same each time, streamed or not": async () => {
    const fields = { prompt: STORY, temperature: 1, seed: 7, n: 3, max_tokens: 12 };
    const [first, again] = [await complete(fields), await complete(fields)];
    const found = Object.fromEntries(first.choices.map((choice) => [choice.index, choice.text]));
    assert.deepEqual(Object.keys(found), ["0", "1", "2"]);
    assert.equal(new Set(Object.values(found)).size, 3, JSON.stringify(found));
    assert.deepEqual(Object.fromEntries(again.choices.map((choice) => [choice.index, choice.text])), found);
    assert.deepEqual(texts(await collected(await complete({ ...fields, stream: true }))), found);
    assert.equal(first.usage.completion_tokens, 36);
  },

  "chat: n=3 with a seed, whole and streamed": async () => {
    const fields = { temperature: 1.2, seed: 5, n: 3, max_tokens: 12 };
    const choices = (await chat(fields)).choices;
    const whole = Object.fromEntries(choices.map((choice) => [choice.index, choice.message.content]));
    assert.ok(new Set(Object.values(whole)).size > 1, JSON.stringify(whole));
    assert.deepEqual(texts(await collected(await chat({ ...fields, stream: true }))), whole);
  },

  "stop strings: the text ends before them, streamed or not": async () => {
    const free = (await complete()).choices[0].text;
    const stop = free.slice(3, 6);
    const whole = (await complete({ stop: [stop] })).choices[0];
    assert.deepEqual([whole.text, whole.finish_reason], [free.slice(0, free.indexOf(stop)), "stop"]);
    assert.deepEqual(texts(await collected(await complete({ stop, stream: true }))), { 0: whole.text });
  },

  "scripted: characters of several tokens are never torn, stops are cut out": async () => {
    const chunks = await collected(await scripted("unicode", { stream: true }));
    assert.deepEqual(texts(chunks), { 0: "Ä 🫠 日本 ok" });
    const stopped = (await scripted("stopping", { stop: "STOP" })).choices[0];
    assert.deepEqual([stopped.message.content, stopped.finish_reason], ["one two ", "stop"]);
  },

  "async: eight streams at once equal the lone answers": async () => {
    const prompts = Array.from({ length: 8 }, (_, index) => `${FRANCE} not number ${index}`);
    const alone = [];
    for (const prompt of prompts) alone.push((await complete({ prompt })).choices[0].text);
    const ask = async (prompt) => texts(await collected(await complete({ prompt, stream: true })))[0];
    assert.deepEqual(await Promise.all(prompts.map(ask)), alone);
  },

  "errors: 400, 401 and 404 as the client's classes": async () => {
    await rejected(chat({ temperature: 5 }), OpenAI.BadRequestError, { status: 400, param: "temperature" });
    const long = complete({ prompt: "word ".repeat(600) });
    await rejected(long, OpenAI.BadRequestError, { code: "context_length_exceeded" });
    const wrong = client(AT.model, { apiKey: "wrong" }).models.retrieve(AT.model.model);
    await rejected(wrong, OpenAI.AuthenticationError, { status: 401 });
    await rejected(chat({ model: "another" }), OpenAI.NotFoundError, { status: 404, code: "model_not_found" });
  },

  "errors: 503 while full, with Retry-After": async () => {
    const stream = await busy();
    await stream[Symbol.asyncIterator]().next();
    const error = await rejected(busy(), OpenAI.InternalServerError, { status: 503, code: "overloaded" });
    assert.ok(Number(error.headers.get("retry-after")) >= 1);
    stream.controller.abort();
  },
};

const oneLine = (error) => `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 600);

let failed = 0;
for (const [name, run] of Object.entries(checks)) {
  const start = performance.now();
  try {
    await run();
    console.log(`ok   ${name} (${((performance.now() - start) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL ${name}: ${oneLine(error)}`);
  }
}
process.exit(failed ? 1 : 0);

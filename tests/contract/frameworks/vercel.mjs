// The Vercel AI SDK with its default for OpenAI, the Responses API: URL MODEL COLUMNS.
// Prints a JSON line per column, like run.py.
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const [root, name, columns] = process.argv.slice(2);
const calls = [];
const parameters = { description: "Add two numbers.", inputSchema: z.object({ a: z.int(), b: z.int() }) };
const add = tool({
  ...parameters,
  execute: async ({ a, b }) => {
    calls.push([a, b]);
    return a + b;
  },
});

const drivers = {
  chat: async (model) => (await generateText({ model, prompt: "Say hello." })).text,
  stream: async (model) => {
    const parts = [];
    for await (const part of streamText({ model, prompt: "Say hello." }).textStream) parts.push(part);
    return parts;
  },
  tools: async (model) => {
    const stopWhen = isStepCount(5);
    return (await generateText({ model, prompt: "What is 2 + 3?", tools: { add }, stopWhen })).text;
  },
  forced: async (model) => {
    const toolChoice = { type: "tool", toolName: "add" };
    const tools = { add: tool(parameters) };
    return (await generateText({ model, prompt: "Call the tool.", tools, toolChoice })).toolCalls[0].input;
  },
  structured: async (model) => {
    const output = Output.object({ schema: z.object({ value: z.int(), even: z.boolean() }) });
    return (await generateText({ model, prompt: "Describe a number.", output })).output;
  },
  turns: async (model) => {
    const messages = [{ role: "user", content: "I am Ada." }];
    messages.push(...(await generateText({ model, messages })).response.messages);
    messages.push({ role: "user", content: "What is my name?" });
    return (await generateText({ model, messages })).text;
  },
};
const right = {
  chat: (got) => got === "Hello there.",
  stream: (got) => got.length > 1 && got.join("") === "Hello there.",
  tools: (got) => got === "The answer is 5." && JSON.stringify(calls) === "[[2,3]]",
  forced: (got) => Number.isInteger(got.a) && Number.isInteger(got.b),
  structured: (got) => Number.isInteger(got.value) && typeof got.even === "boolean",
  turns: (got) => got === "You are Ada.",
};

for (const column of columns.split(",")) {
  if (!(column in drivers)) continue;
  const provider = createOpenAI({ baseURL: `${root}/rollouts/vercel-${column}/v1`, apiKey: "any" });
  let error = "";
  try {
    const got = await drivers[column](provider(name));
    if (!right[column](got)) error = `got ${JSON.stringify(got)}, calls ${JSON.stringify(calls)}`;
  } catch (problem) {
    error = String(problem);
  }
  console.log(JSON.stringify({ framework: "vercel", column, error }));
}

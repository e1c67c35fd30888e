// Vercel's AI SDK: generateText and streamText with tools, structured output, errors.
// Arguments: "chat" for @ai-sdk/openai-compatible, "responses" for @ai-sdk/openai.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { BASE_URL, API_KEY, MODEL, HAS_STORE } = process.env;
const isCompatible = process.argv[2] === "chat";
const options = { baseURL: `${BASE_URL}/v1`, apiKey: API_KEY };
const provider = isCompatible
  ? createOpenAICompatible({ name: "local", supportsStructuredOutputs: true, includeUsage: true, ...options })
  : createOpenAI(options);
// Without a store every request has the whole conversation; with one it refers to texts of earlier answers.
const store = Boolean(HAS_STORE);
const question = { role: "user", content: "What is the weather in Oslo, and what time is it?" };
const key = isCompatible ? "local" : "openai";

const tools = {
  get_weather: tool({
    description: "Weather of a city",
    inputSchema: z.object({ city: z.enum(["Oslo"]) }),
    execute: async () => ({ sky: "clear" }),
  }),
  get_time: tool({
    description: "Time of a zone",
    inputSchema: z.object({ zone: z.enum(["UTC"]) }),
    execute: async () => ({ time: "12:00" }),
  }),
};

function request({ parallel = true, ...others } = {}) {
  const settings = isCompatible ? { parallel_tool_calls: parallel } : { parallelToolCalls: parallel, store };
  return {
    model: provider(MODEL),
    messages: [question],
    tools,
    stopWhen: stepCountIs(5),
    maxRetries: 0,
    providerOptions: { [key]: settings },
    ...others,
  };
}

// The calls of each step that has any.
function turns(steps) {
  return steps.map((step) => step.toolCalls.map((call) => [call.toolName, call.input])).filter((calls) => calls.length);
}

async function error(others) {
  try {
    await generateText(request(others));
    return "no error";
  } catch (error) {
    return `${error.name} ${error.statusCode} ${error.data?.error?.code}`;
  }
}

const schema = z.object({ city: z.enum(["Oslo"]), sky: z.enum(["clear"]) });
const parallel = await generateText(request());
const followUp = await generateText(request({ messages: [question, ...parallel.response.messages, question] }));
const refers = JSON.stringify(followUp.steps[0].request.body).includes("item_reference");
if (refers !== store) throw new Error(`the second question refers to stored items: ${refers}, with a store: ${store}`);
const oneByOne = await generateText(request({ parallel: false }));
const forced = await generateText(
  request({ toolChoice: { type: "tool", toolName: "get_time" }, stopWhen: stepCountIs(1) }),
);
const structured = await generateText(request({ output: Output.object({ schema }) }));

const stream = streamText(request());
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);

const facts = {
  parallel: turns(parallel.steps),
  follow_up: turns(followUp.steps),
  one_by_one: turns(oneByOne.steps),
  forced: turns(forced.steps),
  answer: structured.output,
  stream: turns(await stream.steps),
  stream_text: pieces.join(""),
  stream_in_pieces: pieces.length > 1,
  errors: {
    model: await error({ model: provider("unknown") }),
    length: await error({ messages: [{ role: "user", content: "word ".repeat(9000) }] }),
  },
};
console.log(JSON.stringify(facts));

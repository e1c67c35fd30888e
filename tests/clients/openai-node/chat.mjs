// Chat completions with `openai` for Node: runTools, parsed answers, streams, errors.
import OpenAI from "openai";

const { BASE_URL, API_KEY, MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: API_KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Oslo, and what time is it?" }];

function tool(name, properties, result) {
  const parameters = { type: "object", properties, required: Object.keys(properties), additionalProperties: false };
  return { type: "function", function: { name, parameters, parse: JSON.parse, function: async () => result } };
}
const tools = [
  tool("get_weather", { city: { type: "string", enum: ["Oslo"] } }, '{"sky": "clear"}'),
  tool("get_time", { zone: { type: "string", enum: ["UTC"] } }, '{"time": "12:00"}'),
];
const answer = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo"] }, sky: { type: "string", enum: ["clear"] } },
  required: ["city", "sky"],
  additionalProperties: false,
};

// The calls of each answer that has any.
function turns(runner) {
  const called = runner.messages.filter((message) => message.tool_calls?.length);
  return called.map(({ tool_calls }) => tool_calls.map(({ function: f }) => [f.name, JSON.parse(f.arguments)]));
}

async function loop(options) {
  const runner = client.chat.completions.runTools({ model, messages, tools, ...options });
  return [await runner.finalContent(), turns(runner)];
}

async function error(options) {
  try {
    await client.chat.completions.create({ model, messages, ...options });
    return "no error";
  } catch (error) {
    return `${error.constructor.name} ${error.status} ${error.code}`;
  }
}

const [, parallel] = await loop({});
const [, oneByOne] = await loop({ parallel_tool_calls: false });
const [, forced] = await loop({ tool_choice: { type: "function", function: { name: "get_time" } } });
const [content] = await loop({
  response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema: answer } },
});

const pieces = [];
const runner = client.chat.completions.runTools({ model, messages, tools, stream: true });
runner.on("content", (delta) => pieces.push(delta));
const text = await runner.finalContent();
if (text !== pieces.join("")) throw new Error(`${text} in pieces is ${pieces.join("")}`);

const facts = {
  parallel,
  one_by_one: oneByOne,
  forced,
  answer: JSON.parse(content),
  stream: turns(runner),
  stream_text: text,
  stream_in_pieces: pieces.length > 1,
  errors: {
    model: await error({ model: "unknown" }),
    length: await error({ messages: [{ role: "user", content: "word ".repeat(9000) }] }),
  },
};
console.log(JSON.stringify(facts));

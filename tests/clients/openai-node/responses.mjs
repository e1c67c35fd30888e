// Responses with `openai` for Node: function calling, text.format, streams, a store, errors.
import OpenAI from "openai";

const { BASE_URL, API_KEY, MODEL: model, HAS_STORE } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: API_KEY, maxRetries: 0 });
const question = { role: "user", content: "What is the weather in Oslo, and what time is it?" };

function schema(values) {
  const properties = Object.fromEntries(
    Object.entries(values).map(([name, value]) => [name, { type: "string", enum: [value] }]),
  );
  return { type: "object", properties, required: Object.keys(values), additionalProperties: false };
}
const tools = [
  { type: "function", name: "get_weather", strict: true, parameters: schema({ city: "Oslo" }) },
  { type: "function", name: "get_time", strict: true, parameters: schema({ zone: "UTC" }) },
];
const answer = { type: "json_schema", name: "answer", strict: true, schema: schema({ city: "Oslo", sky: "clear" }) };

// Asks until an answer has no calls; with a store each request has the new items only.
async function loop(ask, options = {}) {
  let [input, kept] = [[question], {}];
  const turns = [];
  for (;;) {
    const response = await ask({ model, input, tools, ...kept, ...options });
    const calls = response.output.filter((item) => item.type === "function_call");
    if (calls.length) turns.push(calls.map((call) => [call.name, JSON.parse(call.arguments)]));
    if (!calls.length || options.tool_choice) return [turns, response];
    const results = calls.map(({ call_id }) => ({ type: "function_call_output", call_id, output: '{"sky": "clear"}' }));
    if (HAS_STORE) [input, kept] = [results, { previous_response_id: response.id }];
    else input = [...input, ...response.output, ...results];
  }
}

let pieces = [];
async function stream(body) {
  pieces = [];
  const events = client.responses.stream(body);
  for await (const event of events) if (event.type === "response.output_text.delta") pieces.push(event.delta);
  return events.finalResponse();
}
const create = (body) => client.responses.create(body);

async function error(body) {
  try {
    await create({ model, input: [question], ...body });
    return "no error";
  } catch (error) {
    return `${error.constructor.name} ${error.status} ${error.code}`;
  }
}

const [parallel] = await loop(create);
const [oneByOne] = await loop(create, { parallel_tool_calls: false });
const [forced] = await loop(create, { tool_choice: { type: "function", name: "get_time" } });
const [, structured] = await loop(create, { text: { format: answer } });
const [streamed, last] = await loop(stream);
if (last.output_text !== pieces.join("")) throw new Error(`${last.output_text} in pieces is ${pieces.join("")}`);

const facts = {
  parallel,
  one_by_one: oneByOne,
  forced,
  answer: JSON.parse(structured.output_text),
  stream: streamed,
  stream_text: last.output_text,
  stream_in_pieces: pieces.length > 1,
  errors: {
    model: await error({ model: "unknown" }),
    length: await error({ input: "word ".repeat(9000) }),
  },
};
console.log(JSON.stringify(facts));

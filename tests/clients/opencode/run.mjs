// opencode: `opencode run` with a provider and an MCP server of its configuration, a session that goes on, errors.
import { spawnSync } from "node:child_process";
import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";

const TOOLS = { get_weather: ["city", "Oslo", "clear"], get_time: ["zone", "UTC", "12:00"] };

// An MCP server of two tools, each with one possible call.
function serveTools() {
  const schema = (key, value) => ({ type: "object", properties: { [key]: { enum: [value] } }, required: [key] });
  const results = {
    initialize: ({ protocolVersion }) => ({
      protocolVersion,
      capabilities: { tools: {} },
      serverInfo: { name: "facts", version: "1" },
    }),
    "tools/list": () => ({
      tools: Object.entries(TOOLS).map(([name, [key, value]]) => ({ name, inputSchema: schema(key, value) })),
    }),
    "tools/call": ({ name }) => ({ content: [{ type: "text", text: TOOLS[name][2] }] }),
  };
  createInterface({ input: process.stdin }).on("line", (line) => {
    const { id, method, params } = JSON.parse(line);
    const result = results[method]?.(params) ?? {};
    if (id !== undefined) console.log(JSON.stringify({ jsonrpc: "2.0", id, result }));
  });
}

function main() {
  const { BASE_URL, API_KEY, MODEL, PATH } = process.env;
  const home = join(process.cwd(), "home");
  rmSync(home, { recursive: true, force: true });
  mkdirSync(home);
  const models = Object.fromEntries([MODEL, "unknown"].map((name) => [name, { tool_call: true, limit: { context: 4096, output: 500 } }]));
  const options = { baseURL: `${BASE_URL}/v1`, apiKey: API_KEY };
  const config = {
    autoupdate: false,
    enabled_providers: ["local"],
    small_model: `local/${MODEL}`,
    provider: { local: { npm: "@ai-sdk/openai-compatible", options, models } },
    mcp: { facts: { type: "local", command: [process.execPath, process.argv[1], "tools"] } },
    // Its own prompt and tools have more tokens than the model takes.
    agent: { brief: { mode: "primary", prompt: "Answer.", tools: { "*": false, "facts_*": true } } },
  };
  writeFileSync(join(home, "opencode.json"), JSON.stringify(config));
  const opencode = join(process.cwd(), "node_modules", "opencode-linux-x64", "bin", "opencode");

  // Ask, and return the events.
  function ask(words, model = MODEL) {
    const { stdout } = spawnSync(
      opencode,
      ["run", "--format", "json", "--agent", "brief", "--title", "t", "--model", `local/${model}`, ...words],
      {
        env: { PATH, HOME: home, OPENCODE_DISABLE_AUTOUPDATE: "1", OPENCODE_DISABLE_MODELS_FETCH: "1" },
        cwd: home,
        encoding: "utf8",
        stdio: ["ignore", "pipe", "inherit"],
      },
    );
    return stdout.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  }

  // The calls of each answer that has any.
  function turns(events) {
    const found = {};
    for (const { part } of events.filter(({ type }) => type === "tool_use"))
      (found[part.messageID] ??= []).push([part.tool.replace("facts_", ""), part.state.input]);
    return Object.values(found).map((calls) => calls.sort().reverse()); // it sorts tools by their names
  }

  const text = (events) => events.findLast(({ type }) => type === "text")?.part.text;
  const error = (events) => {
    const { name, data } = events.find(({ type }) => type === "error")?.error ?? {};
    return `${name} ${data?.statusCode} ${JSON.parse(data?.responseBody ?? "{}").error?.code}`;
  };

  const first = ask(["What is the weather in Oslo, and what time is it?"]);
  const facts = {
    stream: turns(first),
    stream_text: text(first),
    follow_up: turns(ask(["--continue", "And now?"])),
    errors: { model: error(ask(["Hello"], "unknown")), length: error(ask(["word ".repeat(9000)])) },
  };
  console.log(JSON.stringify(facts));
}

if (process.argv[2] === "tools") serveTools();
else main();

// Codex CLI: `codex exec` with a provider of the configuration, a session that goes on, errors.
// Its own tools have free arguments, which the prescribed server does not call.
import { spawnSync } from "node:child_process";
import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const { BASE_URL, MODEL } = process.env;
const home = join(process.cwd(), "home"), folder = join(process.cwd(), "project");
rmSync(home, { recursive: true, force: true });
for (const path of [home, folder]) mkdirSync(path, { recursive: true });
writeFileSync(join(home, "instructions.md"), "Answer briefly."); // its own have more tokens than the model takes
writeFileSync(
  join(home, "config.toml"),
  `model_provider = "local"
model_instructions_file = "${join(home, "instructions.md")}"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.local]
name = "local"
base_url = "${BASE_URL}/v1"
env_key = "API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`,
);

// Ask, and return the events of the session.
function ask(words, model = MODEL) {
  const options = ["--skip-git-repo-check", "--json", "--model", model];
  const codex = join("node_modules", "@openai", "codex", "bin", "codex.js");
  const { stdout } = spawnSync(process.execPath, [codex, "exec", ...words.slice(0, -1), ...options, words.at(-1)], {
    env: { ...process.env, CODEX_HOME: home, PWD: folder },
    encoding: "utf8",
    stdio: ["ignore", "pipe", "inherit"],
  });
  return stdout.split("\n").filter(Boolean).map((line) => JSON.parse(line));
}

const text = (events) => events.find(({ item }) => item?.type === "agent_message")?.item.text;
const error = (events) => events.find(({ type }) => type === "turn.failed")?.error.message.match(/does not exist|ran out of room/)?.[0];

const facts = {
  stream_text: text(ask(["What is the weather in Oslo?"])),
  follow_up: text(ask(["resume", "--last", "What time is it?"])),
  errors: {
    model: error(ask(["Hello"], "unknown")),
    length: error(ask(["word ".repeat(9000)])),
  },
};
console.log(JSON.stringify(facts));

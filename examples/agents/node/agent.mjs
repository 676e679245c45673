// An agent in Node.js with the npm package openai, for a swarm door: node agent.mjs http://127.0.0.1:7800
import OpenAI from "openai";

const [door, token] = [process.argv[2], process.env.ASTRAFLOW_TOKEN];
const client = `node-${crypto.randomUUID()}`;
const headers = { "content-type": "application/json", ...(token && { authorization: `Bearer ${token}` }) };
const parameters = { type: "object", properties: { expr: { type: "string" } }, required: ["expr"] };
const tools = [{ type: "function", function: { name: "calc", parameters } }];

function calc(expr) {
  const sum = /^(\d)([-+*])(\d)$/.exec(expr);
  if (!sum) return "<?>";
  const [a, b] = [Number(sum[1]), Number(sum[3])];
  return `<${{ "+": a + b, "-": a - b, "*": a * b }[sum[2]]}>`;
}

function grade(task, calls, answer) {
  const result = calc(calls[0] ?? "");
  if (result === "<?>") return 0;
  const right = [...calls[0]].filter((c, i) => c === task.text[i]).length / 3;
  return 0.5 * right + (answer === `${result.slice(1, -1)}.` ? 0.5 : 0);
}

async function solve(task, baseURL, apiKey) {
  const openai = new OpenAI({ baseURL, apiKey });
  const [messages, calls] = [[{ role: "user", content: task.text }], []];
  for (let turn = 0; turn < 2; turn++) {
    const { message } = (await openai.chat.completions.create({ model: "actor", messages, tools })).choices[0];
    messages.push(message);
    if (!message.tool_calls) break;
    for (const call of message.tool_calls) {
      calls.push(JSON.parse(call.function.arguments).expr);
      messages.push({ role: "tool", tool_call_id: call.id, content: calc(calls.at(-1)) });
    }
  }
  return grade(task, calls, messages.at(-1).content);
}

async function ask(path, body) {
  const reply = await fetch(door + path, { method: "POST", headers, body: JSON.stringify({ client, ...body }) });
  if (!reply.ok) throw Object.assign(new Error(await reply.text()), { status: reply.status });
  return reply.json();
}

async function play({ episode_id, attempt, task, base_url, api_key }) {
  const end = (how, what) => ask(`/swarm/episodes/${episode_id}/${how}`, { attempt, ...what });
  try {
    await end("finish", { reward: await solve(task.fields, base_url, api_key) });
  } catch (error) {
    console.error(`${episode_id}: ${error.message}`);
    await end("fail", { error: `workflow: ${error.message}` }).catch(() => {}); // it may not be ours any more
  }
}

for (;;) {
  const reply = await ask("/swarm/leases", { count: 16 }).catch((error) => error);
  if (reply.status === 410) break; // the run is over
  if (reply instanceof Error) throw reply;
  await Promise.all(reply.leases.map(play));
}

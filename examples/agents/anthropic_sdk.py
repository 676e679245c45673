"""An agent of the Anthropic SDK."""

from anthropic import AsyncAnthropic
from calculator import TOOLS, calc, grade

CLIENT = AsyncAnthropic(api_key="of the episode")  # one per process: to make one takes 20 ms
SCHEMAS = [{"name": "calc", "input_schema": TOOLS[0]["function"]["parameters"]}]


async def solve(task, llm):
    client = CLIENT.with_options(base_url=llm["actor"].base_url, api_key=llm["actor"].api_key)
    messages, calls = [{"role": "user", "content": task["text"]}], []
    for _ in range(2):
        reply = await client.messages.create(model="actor", messages=messages, tools=SCHEMAS, max_tokens=16)
        messages.append({"role": "assistant", "content": reply.content})
        if reply.stop_reason != "tool_use":
            break
        results = []
        for block in reply.content:
            if block.type == "tool_use":
                calls.append(block.input["expr"])
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": calc(calls[-1])})
        messages.append({"role": "user", "content": results})
    return grade(task, calls, "".join(block.text for block in reply.content if block.type == "text"))

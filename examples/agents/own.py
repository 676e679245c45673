"""AstraFlow's own workflow API: `llm["actor"]` is a client already."""

from calculator import TOOLS, calc, grade


async def solve(task, llm):
    messages, calls = [{"role": "user", "content": task["text"]}], []
    for _ in range(2):
        reply = await llm["actor"].chat(messages, tools=TOOLS)
        messages.append(reply.message)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            calls.append(call.arguments["expr"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calc(calls[-1])})
    return grade(task, calls, reply.content)

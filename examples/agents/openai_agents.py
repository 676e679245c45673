"""An agent of the OpenAI Agents SDK (which speaks OpenAI's Responses)."""

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from calculator import calc, grade
from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(api_key="of the episode")  # one per process: to make one takes 20 ms
set_tracing_disabled(True)  # traces go to OpenAI otherwise


async def solve(task, llm):
    calls = []

    @function_tool(name_override="calc")
    def calculator(expr: str) -> str:
        """Evaluate one sum, such as 3*4."""
        calls.append(expr)
        return calc(expr)

    client = CLIENT.with_options(base_url=llm["actor"].base_url, api_key=llm["actor"].api_key)
    agent = Agent(name="pupil", model=OpenAIResponsesModel("actor", client), tools=[calculator])
    try:
        run = await Runner.run(agent, task["text"], max_turns=2)
    except (MaxTurnsExceeded, ModelBehaviorError):
        # It asks and asks, or comes to no end in `max_tokens`: that is the policy's doing, so a reward and no error.
        return grade(task, calls, "")
    return grade(task, calls, run.final_output)

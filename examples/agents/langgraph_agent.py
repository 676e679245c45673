"""An agent of LangGraph: a node that calls the model, a node that runs its tools, until it answers."""

from calculator import calc, grade
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


async def solve(task, llm):
    calls = []

    @tool("calc")
    def calculator(expr: str) -> str:
        """Evaluate one sum, such as 3*4."""
        calls.append(expr)
        return calc(expr)

    model = ChatOpenAI(model="actor", base_url=llm["actor"].base_url, api_key=llm["actor"].api_key)
    model = model.bind_tools([calculator])

    async def agent(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    try:
        end = await graph.compile().ainvoke({"messages": [HumanMessage(task["text"])]}, {"recursion_limit": 4})
    except GraphRecursionError:  # it asks and asks: that is the policy's doing, so a reward and no error
        return grade(task, calls, "")
    return grade(task, calls, end["messages"][-1].content)

"""From what was sampled to what is captured, and to what the agent gets."""

from __future__ import annotations

from msgspec import UNSET

from astraflow.rollout.gateway.calls.run import Run, Sample
from astraflow.rollout.gateway.contexts import Reply, agent_of
from astraflow.rollout.gateway.dialect import (
    AssistantMessage,
    ChatCompletion,
    Choice,
    Logprobs,
    TokenLogprob,
    Usage,
)
from astraflow.rollout.gateway.endpoint import Chat
from astraflow.rollout.gateway.messages import assistant_key
from astraflow.rollout.gateway.reading.decoding import TextStream
from astraflow.rollout.gateway.reading.live import LiveReply, LogprobRow, Words
from astraflow.rollout.gateway.reading.stops import StopScanner
from astraflow.rollout.gateway.tools import Opening, PlainReader, ReplyReader
from astraflow.types import Call, Generation


def live_reply(run: Run, choice: int, index: int, stops: tuple[str, ...]) -> LiveReply:
    """A reply that is read while it is sampled."""
    capture = run.capture
    endpoint = capture.endpoint
    hidden = frozenset((*endpoint.eos_texts, *capture.sampling.stop_token_ids))
    reader, skip = _reader(run, index) or PlainReader(), not endpoint.tool_parser.always
    live = LiveReply(choice, TextStream(endpoint.chat, hidden, skip), StopScanner(stops), reader)
    live.one_call = run.request.parallel_tool_calls is False
    if run.request.logprobs:
        live.with_logprobs(_row(endpoint.chat))
    return live


def capture(run: Run, sample: Sample, generation: Generation) -> tuple[Words, int]:
    """Record a sample and its context; its words, and how many malformed tool calls they hold."""
    of = run.capture
    endpoint, sampled = of.endpoint, generation.token_ids
    last = int(sampled[-1]) if len(sampled) and generation.finish_reason == "stop" else -1
    eos_text = endpoint.eos_texts.get(last)
    if sample.live is not None:
        words, malformed = sample.live.words, sample.live.num_malformed
    else:
        hidden = eos_text is not None or last in of.sampling.stop_token_ids
        ids = sampled[:-1] if hidden else sampled
        words, malformed = _read(run, sample, endpoint.chat.decode(ids, not endpoint.tool_parser.always))
    agent = agent_of(run.request.model)
    of.calls.append(
        Call(of.policy, sample.index, run.prompt.ids, generation, sample.sampling, run.prompt.forked, agent)
    )  # fmt: skip
    key = assistant_key(words.content, words.calls, words.reasoning)
    reply = Reply(key, sampled, words.text + (eos_text or ""), eos_text is not None, sample.index)
    of.remember(agent, run.prompt, reply)
    return words, malformed


def choice_of(run: Run, sample: Sample, words: Words, generation: Generation) -> Choice:
    """What the agent gets of one sample."""
    request = run.request
    message = AssistantMessage(content=words.content)
    if words.reasoning:
        message.reasoning_content = words.reasoning
    if words.calls:
        message.content, message.tool_calls = words.content or None, words.calls
    choice = Choice(
        index=sample.choice, message=message, finish_reason=finish_reason(words, generation),
        stop_sequence=UNSET if words.stop is None else words.stop,
    )  # fmt: skip
    if request.logprobs:
        row = _row(run.capture.endpoint.chat)
        columns = zip(generation.token_ids.tolist(), generation.logprobs.tolist(), strict=True)
        choice.logprobs = Logprobs([row(token, logprob) for token, logprob in columns])
    if request.return_token_ids:
        choice.token_ids = generation.token_ids.tolist()
    return choice


def finish_reason(words: Words, generation: Generation) -> str:
    """As OpenAI names it."""
    return "tool_calls" if words.calls else generation.finish_reason


def completion_of(run: Run, choices: list[Choice]) -> ChatCompletion:
    """The whole answer. The prompt counts once, however many choices it has."""
    num_prompt = len(run.prompt.ids)
    num_sampled = 0
    for sample in run.samples:
        if sample.generation is not None:
            num_sampled += len(sample.generation.token_ids)
    completion = ChatCompletion(
        id=run.id, created=run.created, model=run.request.model, choices=choices,
        usage=Usage(num_prompt, num_sampled, num_prompt + num_sampled),
    )  # fmt: skip
    if run.request.return_token_ids:
        completion.prompt_token_ids = run.prompt.ids.tolist()
    return completion


def _read(run: Run, sample: Sample, text: str) -> tuple[Words, int]:
    reader = _reader(run, sample.index)
    if reader is None:
        return Words(text, text), 0
    words = Words(text)
    words.add(reader.feed(text) + reader.end())
    return words, reader.num_malformed


def _reader(run: Run, index: int) -> ReplyReader | None:
    """None: all text is content."""
    request, parser = run.request, run.capture.endpoint.tool_parser
    if run.prompt.node is None or not (parser.always or (request.tools and request.tool_choice != "none")):
        return None
    tools = (request.tools or []) if request.tool_choice != "none" else []
    return parser.open(Opening(tools, index, run.prompt.text))


def _row(chat: Chat) -> LogprobRow:
    def row(token: int, logprob: float) -> TokenLogprob:
        text = chat.decode([token])
        return TokenLogprob(text, logprob, None if "�" in text else list(text.encode()), [])

    return row

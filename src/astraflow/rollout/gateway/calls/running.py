"""The requests that run: from a request to its samples, through the engine, to what is captured and answered.

    begin ──► submit each sample ──► on_tokens (of live replies) ──► on_end ──► all samples there: recorded, settled
                                          │ stop string, only call      │ error, deadline, nobody reads any more
                                          └─► engine stopped            └─► cut or failed: the engine is stopped

All methods run on one event loop; engines report through `Wakeups`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from astraflow.errors import AstraFlowError, EngineError, GatewayError
from astraflow.rollout.gateway.calls.answer import capture, choice_of, completion_of, finish_reason, live_reply
from astraflow.rollout.gateway.calls.events import ChoiceEnded, Event, Finished
from astraflow.rollout.gateway.calls.options import check_options, has_options
from astraflow.rollout.gateway.calls.run import Run, Sample
from astraflow.rollout.gateway.calls.wakeups import Wakeups
from astraflow.rollout.gateway.dialect import ChatCompletion, ChatRequest, Choice
from astraflow.rollout.gateway.episode import OpenEpisode, PolicyCapture
from astraflow.rollout.gateway.reading.live import LiveReply
from astraflow.rollout.gateway.sampling import effective, for_choice, overridden, single_token_stops, stop_strings
from astraflow.types import Generation, Sampling

log = logging.getLogger("astraflow.node")
MAX_CALLS = 32767  # of one policy in one episode: call_index travels as int16
_COUNTERS = (
    "calls", "cancelled", "engine_failures", "forks", "overlong", "sampling_overridden", "malformed_tool_calls",
    "retries", "streams_cut", "prompt_tokens", "encoded_tokens", "sampled_tokens", "dropped_tokens",
)  # fmt: skip


class Running:
    """The requests of all episodes of one gateway."""

    def __init__(self, call_timeout_s: float) -> None:
        """`call_timeout_s`: a request that takes longer fails; 0: none does."""
        self._call_timeout_s = call_timeout_s
        self._wakeups = Wakeups()
        self.counters = dict.fromkeys(_COUNTERS, 0.0)

    def begin(self, episode: OpenEpisode, capture: PolicyCapture, request: ChatRequest, stream: bool = False) -> Run:
        """Ask the engine for every sample of a request."""
        plain = not has_options(request)
        if not plain:
            check_options(request)
        run = Run(request, capture, capture.prompt(request))
        stops = () if plain else stop_strings(request)
        sampling = self._admit(episode, run, stops, plain)
        live = stream or bool(stops) or (request.parallel_tool_calls is False and bool(request.tools))
        for choice in range(request.n or 1):
            index = capture.next_index
            capture.next_index += 1
            request_id = f"{episode.lease.episode_id}/{episode.lease.attempt}/{capture.policy}/{index}"
            reply = live_reply(run, choice, index, stops) if live else None
            own = for_choice(sampling, choice) if choice else sampling
            run.samples.append(Sample(choice, index, request_id, own, reply))
        episode.runs.append(run)
        if stream:
            run.events.append(run.started())
        for sample in run.samples:
            self._submit(episode, run, sample)
        if self._call_timeout_s and run.outcome is None:
            run.deadline = asyncio.get_running_loop().call_later(self._call_timeout_s, self._expire, episode, run)
        return run

    def _admit(self, episode: OpenEpisode, run: Run, stops: tuple[str, ...], plain: bool) -> Sampling:
        """The sampling of a request that may run; counts it."""
        request, capture, counters = run.request, run.capture, self.counters
        endpoint, length, num = capture.endpoint, len(run.prompt.ids), run.request.n or 1
        room = endpoint.max_context - length
        if room < 1:
            counters["overlong"] += 1
            raise GatewayError(
                "messages", length,
                f"tokens are too many: this model's maximum context length is {endpoint.max_context} tokens, however "
                f"your messages resulted in {length} tokens (policy '{request.model}')",
                "shorten the messages or the tools", 400, "context_length_exceeded",
            )  # fmt: skip
        if capture.next_index + num > MAX_CALLS:
            raise GatewayError("calls", capture.next_index, f"must be <= {MAX_CALLS} in one episode", "end the episode")
        sampling = capture.sampling
        if not plain or room < sampling.max_tokens:
            stop_ids = single_token_stops(endpoint.chat, stops) if stops else ()
            chosen = endpoint.agents_choose
            counters["sampling_overridden"] += overridden(request, sampling, chosen)
            sampling = effective(request, episode.lease, sampling, room, stop_ids, chosen)
        counters["calls"] += num
        counters["prompt_tokens"] += length * num
        counters["encoded_tokens"] += run.prompt.encoded
        if run.prompt.forked:
            counters["forks"] += 1
        return sampling

    def _submit(self, episode: OpenEpisode, run: Run, sample: Sample) -> None:
        if run.outcome is not None:
            return  # another choice has failed already
        engine, sink = run.capture.endpoint.engine, None
        if sample.live is not None:
            loop = asyncio.get_running_loop()
            sink = partial(self._wakeups.post, loop, self._on_tokens, episode, run, sample)
        try:
            future = engine.submit(sample.request_id, run.prompt.ids, sample.sampling, sink)
        except EngineError as error:
            self._fail(episode, run, self._engine_failure(str(error)))
            return
        if future.done():
            self._on_end(episode, run, sample, future)
        else:
            loop = asyncio.get_running_loop()
            future.add_done_callback(partial(self._wakeups.post, loop, self._on_end, episode, run, sample))

    def _on_tokens(
        self, episode: OpenEpisode, run: Run, sample: Sample, ids: Sequence[int], logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> None:  # fmt: skip
        """Tokens of a running sample. What comes after its end is dropped; its future says how many they were."""
        if sample.generation is not None or run.outcome is not None or sample.live is None:
            return
        try:
            events = sample.live.feed(ids, logprobs, versions)
            if sample.live.stopped:
                # A stop string or the only tool call is complete: what is sampled beyond it is not of this call.
                run.capture.endpoint.engine.cancel(sample.request_id)
                generation = sample.live.generation("stop")
                self._say_end(run, sample, sample.live, generation, events + sample.live.end())
                self._sampled(episode, run, sample, generation)
            elif events and run.events:
                run.publish(events)
        except Exception as error:
            self._broken(episode, run, error)

    def _on_end(self, episode: OpenEpisode, run: Run, sample: Sample, future: Future[Generation]) -> None:
        """The engine has ended a request."""
        try:
            generation = future.result()
        except Exception as error:  # CancelledError of a future is one too
            if run.outcome is None and sample.generation is None:
                self._fail(episode, run, self._engine_failure(str(error) or "dropped the request"))
            return
        if sample.generation is not None or run.outcome is not None:
            kept = 0 if sample.generation is None else len(sample.generation.token_ids)
            self.counters["dropped_tokens"] += max(0, len(generation.token_ids) - kept)
            return
        try:
            if generation.finish_reason in ("cancelled", "error"):
                self._lost(episode, run, sample, generation)
            elif sample.live is None:
                self._sampled(episode, run, sample, generation)
            else:
                self._ended(episode, run, sample, sample.live, generation)
        except Exception as error:
            self._broken(episode, run, error)

    def _lost(self, episode: OpenEpisode, run: Run, sample: Sample, generation: Generation) -> None:
        self.counters["dropped_tokens"] += len(generation.token_ids)
        if generation.finish_reason == "error":
            self._fail(episode, run, self._engine_failure("the generation ended in an error"))
            return
        error = GatewayError("request", sample.request_id, "was cancelled", "ask again if the episode goes on", 499)
        self._fail(episode, run, error)

    def _ended(self, episode: OpenEpisode, run: Run, sample: Sample, live: LiveReply, generation: Generation) -> None:
        """The end of a reply that is read while it is sampled."""
        events = live.feed_rest(generation) + live.end()
        if live.stopped:
            self.counters["dropped_tokens"] += len(generation.token_ids) - len(live)
            generation = live.generation("stop")
        self._say_end(run, sample, live, generation, events)
        self._sampled(episode, run, sample, generation)

    def _say_end(self, run: Run, sample: Sample, live: LiveReply, generation: Generation, events: list[Event]) -> None:
        if run.events:
            reason = finish_reason(live.words, generation)
            run.publish([*events, ChoiceEnded(sample.choice, reason, live.words.stop, live.rest_of_logprobs())])

    def _sampled(self, episode: OpenEpisode, run: Run, sample: Sample, generation: Generation) -> None:
        """A sample is whole; with the last of them, so is the answer."""
        sample.generation = generation
        if len(run.samples) == 1:
            choices = [self._record(run, sample)]
        elif any(other.generation is None for other in run.samples):
            return
        else:
            choices = [self._record(run, each) for each in run.samples]
        completion = completion_of(run, choices)
        if run.events:
            run.events.append(Finished(completion))
        self._over(episode, run, completion)

    def _record(self, run: Run, sample: Sample) -> Choice:
        generation = sample.generation
        assert generation is not None
        words, malformed = capture(run, sample, generation)
        if malformed:
            self.counters["malformed_tool_calls"] += malformed
        self.counters["sampled_tokens"] += len(generation.token_ids)
        return choice_of(run, sample, words, generation)

    def _fail(self, episode: OpenEpisode, run: Run, error: Exception) -> None:
        """End a run by an error: nothing of it is captured."""
        for sample in run.samples:
            if sample.generation is None:
                run.capture.endpoint.engine.cancel(sample.request_id)
            else:
                self.counters["dropped_tokens"] += len(sample.generation.token_ids)
        self._over(episode, run, error)

    def cut(self, episode: OpenEpisode, run: Run, error: Exception) -> None:
        """End a run for which nobody waits any more. An agent that has got a part of a stream acts on it, so what was
        sampled until then is captured; nobody has seen anything of another run."""
        self.counters["cancelled"] += sum(sample.generation is None for sample in run.samples)
        if not run.shown:
            self._fail(episode, run, error)
            return
        self.counters["streams_cut"] += 1
        try:
            for sample in run.samples:
                if sample.generation is None:
                    run.capture.endpoint.engine.cancel(sample.request_id)
                    if sample.live is None or not len(sample.live):
                        continue
                    sample.live.end()
                    sample.generation = sample.live.generation("cancelled")
                self._record(run, sample)
        except Exception as fault:  # of a tool parser of the user, who must not keep an episode from closing
            self._broken(episode, run, fault)
            return
        self._over(episode, run, error)

    def leave(self, episode: OpenEpisode, run: Run) -> None:
        run.readers -= 1
        if not run.readers and run.outcome is None:
            self.cut(episode, run, GatewayError("connection", "closed", "was closed by the agent", "ask again", 499))

    def _expire(self, episode: OpenEpisode, run: Run) -> None:
        if run.outcome is None:
            self.counters["cancelled"] += sum(sample.generation is None for sample in run.samples)
            limit = f"{self._call_timeout_s:.3g} s"
            self._fail(episode, run, GatewayError(
                "call", limit, "is all that a call may take",
                "ask for fewer tokens, or raise workflow.call_timeout_s", 504, "call_timeout",
            ))  # fmt: skip

    def _over(self, episode: OpenEpisode, run: Run, outcome: ChatCompletion | Exception) -> None:
        episode.runs.remove(run)
        if run.deadline is not None:
            run.deadline.cancel()
        run.settle(outcome)
        episode.called = run.ended_s

    def _broken(self, episode: OpenEpisode, run: Run, error: Exception) -> None:
        """A fault of the gateway itself is the error of this request, and of no other."""
        log.error("a call of %s failed inside the gateway", episode.lease.episode_id, exc_info=error)
        if run.outcome is None:
            problem = f"gateway={type(error).__name__} inside; see the log of the node"
            self._fail(episode, run, AstraFlowError(problem))

    def _engine_failure(self, reason: str) -> GatewayError:
        self.counters["engine_failures"] += 1
        return GatewayError(
            "engine", "unavailable", f"could not serve the request ({reason})", "see the log of the node", 503,
            "engine_unavailable",
        )  # fmt: skip

"""The engine's side of the server: messages in, one scheduler step, messages out, without a pause."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from diptych.shared.config.parallel import check_can_pause
from diptych.shared.engine.build.assembly import Assembly
from diptych.shared.engine.processes.split_engine import split_scheduler
from diptych.shared.engine.python_runtime import gc_freeze_of_process
from diptych.shared.engine.requests.diffusion import accept_diffusion
from diptych.shared.engine.requests.embedding import check_pooling
from diptych.shared.engine.requests.images import received_images, why_no_images
from diptych.shared.engine.requests.input_embeds import embeds_prompt, rows_of_bytes
from diptych.shared.engine.requests.lora_adapters import LoraAdapters, adapters_of, cache_namespace
from diptych.shared.engine.weight_updates import WeightUpdates
from diptych.shared.grammar.queue import GrammarQueue
from diptych.shared.server.engine.load_log import LoadLog, load_of
from diptych.shared.server.engine.messages import (
    VERSION,
    Abort,
    Channel,
    Control,
    Dead,
    Generate,
    Heartbeat,
    Load,
    Ready,
    Reply,
    RequestOutput,
    Unreadable,
    finish_of,
    in_messages,
    refusal,
)
from diptych.shared.server.engine.profiler import Profiler
from diptych.shared.server.engine.tree_shape import shape_of_tree
from diptych.shared.server.engine.warm_up import warm_up
from diptych.shared.server.engine.weight_actions import WeightActions
from diptych.shared.types import FinishAbort, Req, StepOutput
from diptych.shared.types.lora import LoraAdapter

IDLE_TICK = 0.1
"""Seconds that an idle engine waits for a message before it looks at its clock again."""
GRAMMAR_TICK = 0.005
"""The same while a request waits for its grammar."""
HEARTBEAT_INTERVAL = 0.25
"""Seconds between heartbeats; the API's picture of the load is at most this old."""
MAX_MESSAGES_PER_STEP = 512
"""Messages read between two steps: a flood of them must not keep running requests waiting."""


class EngineLoop:
    """Drives one scheduler until `stop` is called or the API asks for it. `import_seconds`: before the
    assembly, for the report of the start."""

    def __init__(self, assembly: Assembly, channel: Channel, import_seconds: float = 0.0) -> None:
        self.assembly = assembly
        self.import_seconds = import_seconds
        self.scheduler = assembly.scheduler
        self.channel = channel
        self.is_paused = False
        self._is_stopping = False
        self._counter, self._last_heartbeat = 0, 0.0
        self.grammar_queue = GrammarQueue(assembly.grammars)
        self._live: dict[str, Req | None] = {}  # the request until its first output, then None
        self._refused: list[RequestOutput] = []  # requests that the scheduler did not take
        self.weight_actions = WeightActions(WeightUpdates(assembly, self._deliver))
        self.profiler = Profiler(assembly.parts.timeline, assembly.parts.allocator.device)
        self.load_log = LoadLog(assembly.config.decode_log_interval, assembly.parts.allocator.size)

    # --8<-- [start:engine-loop]
    def run(self) -> None:
        """Serve until stopped. An error of the engine is reported as `Dead`, and raised."""
        try:
            self._prepare()
            self.channel.send(self._ready())
            with gc_freeze_of_process():
                while not self._is_stopping:
                    self._read_messages()
                    self._admit_compiled()
                    self._step()
                    self._look_at_steps()
                    self._beat()
            for feature in self.assembly.parts.features:
                feature.engine_ends()
        except BaseException as error:
            with contextlib.suppress(Exception):
                self.channel.send(Dead(reason=f"{type(error).__name__}: {error}"))
            raise
        finally:
            self.assembly.grammars.close()
            self.scheduler.close()

    # --8<-- [end:engine-loop]

    def _prepare(self) -> None:
        """Compile kernels before the first client comes; make the scheduler of a split server."""
        engine, config, parts = self.assembly, self.assembly.config, self.assembly.parts
        if str(config.device).startswith("cuda") and not config.skip_warmup:
            if not engine.model_config.num_labels:  # a reward model generates nothing
                assert config.context_len is not None
                max_tokens = min(config.context_len, parts.allocator.size)
                warm_up(self.scheduler, max_tokens, parts.num_token_ids)
            engine.compilations.ready()
        self.scheduler = split_scheduler(engine)

    def _look_at_steps(self) -> None:
        self.load_log.look(self.scheduler)
        if self.profiler.last_step is not None:
            self.profiler.look(self.scheduler.stats().num_steps)

    # ---- messages in ----

    def _read_messages(self) -> None:
        is_busy = self.scheduler.has_work() and not self.is_paused
        idle_tick = GRAMMAR_TICK if self.grammar_queue else IDLE_TICK
        timeout = 0.0 if is_busy or self._refused else idle_tick
        for _ in range(MAX_MESSAGES_PER_STEP):
            message = self.channel.receive(timeout)
            if message is None:
                return
            timeout = 0.0
            if isinstance(message, Generate):
                self._on_generate(message)
            elif isinstance(message, Unreadable):
                self._refused.append(refusal(message.rid, FinishAbort(message.problem, 400)))
            elif isinstance(message, Abort):
                for rid in message.rids:
                    self._abort(rid)
            else:
                self._on_control(message)
            if self._is_stopping:
                return

    def _on_generate(self, message: Generate) -> None:
        adapter: LoraAdapter | None = None
        extra_key: Any = message.extra_key
        if message.lora is not None:
            try:
                adapter = self._adapters().get(message.lora)
            except ValueError as error:  # it was unloaded meanwhile
                self._refused.append(refusal(message.rid, FinishAbort(str(error), 404)))
                return
        if adapter is not None or message.diffusion is not None:
            extra_key = cache_namespace(message.extra_key, adapter, message.diffusion)
        req = Req(
            rid=message.rid,
            origin_input_ids=message.input_ids,
            sampling_params=message.params,
            seed=message.seed,
            eos_token_ids=self.assembly.eos_token_ids,
            extra_key=extra_key,
            priority=message.priority,
            routing_key=message.routing_key,
            prefill_server=message.prefill_server,
            lora=adapter,
            is_pooling=message.is_pooling,
            diffusion=message.diffusion,
        )
        try:
            check_pooling(req.is_pooling, self.assembly.config, self.assembly.model_config)
            if message.input_embeds:
                rows = rows_of_bytes(message.input_embeds, len(message.input_ids))
                config, model = self.assembly.config, self.assembly.model_config
                req.embeds = embeds_prompt(rows, message.params, config, model, self.assembly.dtype)[1]
            if message.images:
                req.embeds = received_images(message.input_ids, message.images, self.assembly.vision)
            if message.diffusion is not None:
                others = (req.embeds,)
                accept_diffusion(message.diffusion, message.params, message.input_ids, others, self.assembly)
            if not self.grammar_queue.add(req, message.client):
                self._add_request(req)
        except ValueError as error:
            self._refused.append(refusal(message.rid, FinishAbort(str(error), 400)))
        except Exception as error:  # of the vision tower, for one: the scheduler has nothing of the request
            problem = f"the request cannot be prepared: {error!r}"
            self._refused.append(refusal(message.rid, FinishAbort(problem, 500)))

    def _add_request(self, req: Req) -> None:
        self.scheduler.add_request(req)
        self._live[req.rid] = req
        self.profiler.came(req.rid)

    def _admit_compiled(self) -> None:
        """Requests whose grammar is there now, or cannot be."""
        for req, problem in self.grammar_queue.take_ready():
            if problem is None:
                try:
                    self._add_request(req)
                except ValueError as error:
                    problem = FinishAbort(str(error), 400)
            if problem is not None:
                self._refused.append(refusal(req.rid, problem))

    def _abort(self, rid: str) -> bool:
        """False when the request has ended or never was. The scheduler reports the end in its next step, for
        which the client of a paused engine does not wait."""
        if self.grammar_queue.drop(rid):
            self._refused.append(refusal(rid, FinishAbort("aborted")))
            return True
        if not self.scheduler.abort(rid):
            return False
        if self.is_paused:
            self._live.pop(rid, None)
            self._refused.append(refusal(rid, FinishAbort("aborted")))
        return True

    def _on_control(self, message: Control) -> None:
        name = f"on_{message.action}"
        handler: Callable[..., dict[str, Any]] | None = getattr(
            self, name, getattr(self.weight_actions, name, None)
        )
        try:
            if handler is None:
                raise ValueError(f"unknown action {message.action!r}")
            reply = Reply(call_id=message.call_id, result=handler(**message.args))
        except (ValueError, TypeError) as error:
            reply = Reply(call_id=message.call_id, error=str(error))
        self.channel.send(reply)

    # ---- the actions of Control ----

    def on_stop(self) -> dict[str, Any]:
        """End the loop after this message."""
        self._is_stopping = True
        return {}

    def on_flush_cache(self) -> dict[str, Any]:
        """Forget cached prefixes and compiled grammars; `flushed` is False while requests are alive."""
        is_flushed = not self.grammar_queue and self.scheduler.flush_cache()
        if is_flushed:
            self.assembly.grammars.clear()
        return {"flushed": is_flushed}

    def on_abort_all(self) -> dict[str, Any]:
        """End every live request."""
        return {"num_aborted": sum(self._abort(rid) for rid in [*self.grammar_queue, *self._live])}

    def on_load_lora(self, name: str, path: str) -> dict[str, Any]:
        """Read an adapter from a folder of this computer."""
        try:
            self._adapters().load(name, path, self.scheduler)
        except ValueError:
            raise
        except Exception as error:  # nothing has changed yet: running requests go on
            raise ValueError(f"adapter {name!r} cannot be loaded: {error!r}") from error
        return {}

    def on_unload_lora(self, name: str) -> dict[str, Any]:
        """Forget an adapter; refused while requests use it."""
        self._adapters().unload(name, self.scheduler)
        return {}

    def _adapters(self) -> LoraAdapters:
        return adapters_of(self.assembly.lora)

    def on_pause(self, mode: str = "in_place") -> dict[str, Any]:
        """Run no step until `continue`. in_place: requests keep their memory; retract: they return to the
        queue and give it back; abort: they end."""
        if mode not in ("in_place", "retract", "abort"):
            raise ValueError(f"mode must be in_place, retract or abort, got {mode!r}")
        check_can_pause(self.assembly.config)
        if mode == "abort":
            self.on_abort_all()
            self._drain()
        elif mode == "retract":
            for rid in list(self._live):
                self.scheduler.retract(rid)
        self.is_paused = True
        return {}

    def on_continue(self) -> dict[str, Any]:
        """Run steps again."""
        self.is_paused = False
        return {}

    def on_start_profile(self, file: str, num_steps: int, nvtx: bool) -> dict[str, Any]:
        """Record the engine's work, for Perfetto."""
        return self.profiler.start(file, num_steps, self.scheduler.stats().num_steps, nvtx, self._live)

    def on_stop_profile(self) -> dict[str, Any]:
        """Write what was recorded."""
        return self.profiler.stop()

    def on_load(self) -> dict[str, Any]:
        """The snapshot of a heartbeat, now."""
        load = self._load()
        return {name: getattr(load, name) for name in load.__struct_fields__}

    def on_cache_tree(self, max_nodes: int = 200, max_tokens: int = 100_000) -> dict[str, Any]:
        """The nodes of the prefix cache, parents first. Both limits bound the pause between two steps."""
        try:
            return shape_of_tree(self.assembly.parts.tree_cache.nodes(), max_nodes, max_tokens)
        except (RuntimeError, AssertionError) as error:  # the first of several replicas works in a thread
            raise ValueError(f"the prefix cache has changed while it was read: {error!r}") from error

    # ---- steps and messages out ----

    # --8<-- [start:engine-step]
    def _step(self) -> None:
        outputs, self._refused = self._refused, []
        if self.scheduler.has_work() and not self.is_paused:
            outputs += self._step_outputs()
        if outputs:
            for message in in_messages(outputs):
                self.channel.send(message)
        elif self.scheduler.problem is not None and not self.scheduler.has_work():
            raise RuntimeError(self.scheduler.problem)

    # --8<-- [end:engine-step]

    def _deliver(self, outputs: list[StepOutput], weight_version: int) -> None:
        """Send outputs that come outside of a step."""
        for message in in_messages(self._outputs(outputs, weight_version)):
            self.channel.send(message)

    def _drain(self) -> None:
        """Steps until no request is left: for requests that have just been aborted."""
        while self.scheduler.has_work():
            self._deliver(self.scheduler.step(), self.assembly.weights.version)

    def _step_outputs(self) -> list[RequestOutput]:
        """Run one step and return its outputs, without the ends that were reported during a pause."""
        return self._outputs(self.scheduler.step(), self.assembly.weights.version)

    def _outputs(self, outputs: list[StepOutput], version: int) -> list[RequestOutput]:
        return [self._output(output, version) for output in outputs if output.rid in self._live]

    def _output(self, output: StepOutput, weight_version: int) -> RequestOutput:
        input_logprobs, queue_time = [], None
        req = self._live.get(output.rid)
        if req is not None and (output.new_token_ids or output.finished_reason is not None):
            self._live[output.rid] = None
            if req.sampling_params.logprob_start_len >= 0:
                input_logprobs = output.input_logprobs
            if req.run_start_time is not None:
                queue_time = req.run_start_time - req.arrival_time
        finish = None
        if output.finished_reason is not None:
            finish = finish_of(output.finished_reason)
            self._live.pop(output.rid, None)
        self.profiler.has_output(output.rid, finish is not None)
        return RequestOutput(
            rid=output.rid,
            new_token_ids=output.new_token_ids,
            finish=finish,
            output_logprobs=output.output_logprobs,
            input_logprobs=input_logprobs,
            num_cached_tokens=output.num_cached_tokens,
            num_accepted_tokens=output.speculation.num_accepted_tokens,
            queue_time=queue_time,
            embedding=output.embedding if finish is not None else None,
            weight_version=weight_version,
        )

    def _beat(self) -> None:
        self._counter += 1
        now = time.monotonic()
        if now - self._last_heartbeat >= HEARTBEAT_INTERVAL:
            self._last_heartbeat = now
            self.channel.send(Heartbeat(counter=self._counter, load=self._load()))

    def _load(self) -> Load:
        return load_of(
            self.scheduler,
            num_waiting_for_grammar=len(self.grammar_queue),
            num_compiled_kernels=self.assembly.compilations.num_after_ready,
            is_paused=self.is_paused,
            weight_version=self.assembly.weights.version,
        )

    def _ready(self) -> Ready:
        assembly = self.assembly
        queue = assembly.config.max_queued_requests
        assert assembly.config.context_len is not None
        return Ready(
            version=VERSION,
            context_len=assembly.config.context_len,
            vocab_size=assembly.model_config.vocab_size,
            num_token_ids=assembly.parts.num_token_ids,
            max_total_tokens=assembly.parts.allocator.size * assembly.config.dp,
            max_running_requests=assembly.config.max_running_requests,
            max_queued_requests=None if queue is None else queue * assembly.config.dp,
            eos_token_ids=sorted(self.assembly.eos_token_ids),
            num_labels=assembly.model_config.num_labels,
            vision=assembly.vision.config if assembly.vision is not None else None,
            no_images=why_no_images(assembly.config, assembly.model_config, assembly.vision),
            description={**assembly.selection, **assembly.memory.rows()},
            prefill_port=getattr(self.scheduler, "port", None),
            startup_seconds={"imports": self.import_seconds, **assembly.seconds},
        )

"""One request on its way into the scheduler: its checks, and the `Req` of each of its samples."""

from __future__ import annotations

from typing import Any

from diptych.shared import registry
from diptych.shared.engine.build.assembly import Assembly
from diptych.shared.engine.requests.diffusion import check_diffusion
from diptych.shared.engine.requests.embedding import check_pooling
from diptych.shared.engine.requests.lora_adapters import adapters_of, cache_namespace
from diptych.shared.engine.requests.prompts import Prompt, encode_prompt
from diptych.shared.interfaces import Detokenizer
from diptych.shared.sampling.processors import LogitProcessor
from diptych.shared.scheduling.admission import check_fields
from diptych.shared.types import DiffusionParams, Req, SamplingParams


class Submission:
    """A checked request, whose grammar is compiled. Its fields are those of `LLM.submit`. Raises `ValueError`
    for a bad one."""

    def __init__(
        self,
        assembly: Assembly,
        prompt: Prompt,
        params: SamplingParams,
        *,
        rid: str | None = None,
        extra_key: str | None = None,
        priority: int = 0,
        routing_key: str | None = None,
        logit_processor: LogitProcessor | None = None,
        lora: str | None = None,
        diffusion: DiffusionParams | None = None,
        is_pooling: bool = False,
    ) -> None:
        with assembly.parts.timeline.span("tokenise"):
            self.prompt_ids, self.embeds = encode_prompt(prompt, params, assembly)
        if (params.stop or params.stop_regex) and assembly.tokenizer is None:
            raise ValueError("this model has no tokenizer: stop and stop_regex need one")
        check_fields(rid, extra_key, priority, routing_key, logit_processor)
        if is_pooling or assembly.model_config.num_labels:
            check_pooling(is_pooling, assembly.config, assembly.model_config)
        if diffusion is not None:
            others, num_token_ids = (self.embeds, logit_processor), assembly.parts.num_token_ids
            check_diffusion(diffusion, params, self.prompt_ids, others, assembly.config, num_token_ids)
            registry.load_part("block_diffusion").serve_blocks(assembly.scheduler)
        self.compiled = assembly.grammars.submit(params) if params.given_grammars else None
        if self.compiled is not None:
            self.compiled.result()  # before the engine is locked, so that other threads continue
        self.assembly = assembly
        self.params = params
        self.rid, self.extra_key = rid, extra_key
        self.priority, self.routing_key = priority, routing_key
        self.logit_processor = logit_processor
        self.lora = lora
        self.diffusion = diffusion
        self.is_pooling = is_pooling

    def req(self, rid: str, seed: int) -> Req:
        """The request of one sample, as the scheduler takes it."""
        adapter = None if self.lora is None else adapters_of(self.assembly.lora).get(self.lora)
        namespace: Any = self.extra_key
        if adapter is not None or self.diffusion is not None:
            namespace = cache_namespace(self.extra_key, adapter, self.diffusion)
        # --8<-- [start:make-req]
        req = Req(
            rid=rid,
            origin_input_ids=self.prompt_ids,
            sampling_params=self.params,
            seed=seed,
            eos_token_ids=self.assembly.eos_token_ids,
            extra_key=namespace,
            priority=self.priority,
            routing_key=self.routing_key,
            logit_processor=self.logit_processor,
            lora=adapter,
            diffusion=self.diffusion,
            embeds=self.embeds,
            is_pooling=self.is_pooling,
        )
        # --8<-- [end:make-req]
        if self.compiled is not None:
            req.grammar = self.assembly.grammars.grammar_for(req, self.compiled.result())
        return req

    def detokenizer(self) -> Detokenizer | None:
        if self.assembly.tokenizer is None:
            return None
        text_ids = self.prompt_ids if self.embeds is None or self.embeds.has_token_ids else []
        return self.assembly.detokenizer(self.assembly.tokenizer, self.params, text_ids)

# mypy: ignore-errors
# ruff: noqa: F821
class FixedBuffers:
    def size_for(self, batch: ForwardBatch) -> int | None:
        if batch.forward_mode is not ForwardMode.DECODE:
            return None
        return next((size for size in self.sizes if size >= batch.batch_size), None)

    def load(self, batch: ForwardBatch, size: int) -> ForwardBatch:
        num, padding = batch.batch_size, size - batch.batch_size
        heads = {}
        for name, tensor in self.tensors.items():
            heads[name] = head = tensor[:size]
            head[:num] = getattr(batch, name)
            head[num:] = 1 if name == "seq_lens" else 0  # slot 0 and row 0 are the dummy page's
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            **heads,
            extend_seq_lens=torch.ones_like(heads["seq_lens"]),
            extend_start_loc=torch.arange(size, device=heads["seq_lens"].device),
            seq_lens_cpu=(*batch.seq_lens_cpu, *[1] * padding),
            extend_seq_lens_cpu=(1,) * size,
        )


class ModelRunner:
    def _launch(self, forward_batch: ForwardBatch) -> LogitsOutput:
        if forward_batch.forward_mode is ForwardMode.IDLE:
            logits = torch.empty(0, self.model.config.vocab_size, device=forward_batch.input_ids.device)
            return LogitsOutput(logits, None, no_hidden_states(self.model, self.capture_hidden))
        attention = BatchAttention(
            backend=self.attention,
            plan=self.attention.plan(forward_batch),
            kv_pool=self.kv_pool,
            out_cache_loc=forward_batch.out_cache_loc,
        )
        hidden, captured = run_model(self.model, forward_batch, attention, self.capture_hidden)
        is_verify = forward_batch.forward_mode is ForwardMode.TARGET_VERIFY
        logits = self.model.compute_logits(hidden if is_verify else hidden[forward_batch.last_token_rows])
        logprobs = None
        if forward_batch.input_logprob_rows is not None:
            logprobs = input_logprobs_of(forward_batch, hidden, self.model.compute_logits)
        return LogitsOutput(logits, logprobs, captured)

    def _padded(self, buffers: FixedBuffers, forward_batch: ForwardBatch) -> LogitsOutput:
        size = buffers.size_for(forward_batch)
        if size is None:
            return self._launch(forward_batch)
        output, num = self._launch(buffers.load(forward_batch, size)), forward_batch.batch_size
        hidden = None if output.hidden_states is None else output.hidden_states[:num]
        return LogitsOutput(output.next_token_logits[:num], None, hidden)

    @torch.inference_mode()
    def forward_and_sample(
        self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
    ) -> tuple[LogitsOutput, SampleOutput]:
        output = self.forward(forward_batch)
        logits = output.next_token_logits[:, :num_token_ids]
        return output, sampler.sample(logits, info, forward_batch.sampled_positions)

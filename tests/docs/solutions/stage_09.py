# mypy: ignore-errors
# ruff: noqa: F821
class MyScheduler:
    def step(self) -> list[StepOutput]:
        requests = self.requests
        requests.finish_overdue()
        num_ahead = self._num_ahead()
        self._catch_up(num_ahead)
        batch = self._choose()
        is_launched = batch is not None and self._launch(batch)
        self._catch_up(num_ahead if is_launched else 0)
        if not requests.live:
            self._catch_up(0)
            self.new_token_ratio.current = self.new_token_ratio.initial
        return requests.take_outputs()

    def _launch(self, batch: ScheduleBatch) -> bool:
        requests = self.requests
        requests.num_steps += 1
        requests.num_overlapped += bool(self.pipeline)
        try:
            self.decoding.run(batch, requests.chunked_req)
        except BaseException as error:
            self._fail(batch, error)
            return False
        for req in batch.reqs[: batch.num_extend_reqs]:
            self.parts.tree_cache.cache_unfinished_req(req)
            if req is not requests.chunked_req:
                requests.running.append(req)
        return True

    def _catch_up(self, num_left: int) -> None:
        batches = self.pipeline.batches
        while len(batches) > num_left:
            oldest = batches[0]
            outputs = self._results_of(oldest)
            if outputs is None:
                continue
            reqs = list(oldest.rows)
            try:
                batches.popleft()
                self.process_batch_result(oldest, self.decoding.finish(oldest, outputs))
            except BaseException as error:
                self.requests.finish_with_error(reqs, error)
        self._sample_next()

    def get_batch_decode(self) -> ScheduleBatch | None:
        decodable = self._decodable()
        if not decodable:
            return None
        batch = self.decoding.prepare(decodable, self.config.num_continuous_decode_steps)
        if batch is None:
            return None if self.pipeline else self._retract_to_decode()
        self.new_token_ratio.decay()
        return batch

    def process_batch_result(self, batch: InFlight, result: BatchResult) -> None:
        for req, token_ids, logprobs in zip(batch.batch.reqs, result.token_ids, result.logprobs):
            if not token_ids:
                continue
            if batch.rows.pop(req, None) is not None:
                self.requests.append_tokens(req, token_ids, logprobs)
            if token_ids[0] < 0 and req in batch.prompts and held_nan(req, self.parts.num_token_ids):
                self._discard(batch.prompts[req], batch)

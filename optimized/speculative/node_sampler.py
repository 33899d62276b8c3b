"""Model and sampler over the nodes of draft trees.

The sampling parameters of a request are repeated for its nodes. If a grammar or a logit processor reads the
drafts, they are copied to the CPU, and it reads them while the model runs.
"""

from __future__ import annotations

from dataclasses import replace

from diptych.optimized.overlap.in_flight import Pipeline
from diptych.shared.interfaces import SchedulerParts
from diptych.shared.speculation.node_sampling import EarlyBans, expand_to_nodes, with_texts
from diptych.shared.types import DraftTree, ForwardBatch, LogitsOutput, Req, SampleOutput, SamplingBatchInfo


class NodeSampler:
    def __init__(self, parts: SchedulerParts, pipeline: Pipeline) -> None:
        self.parts = parts
        self.pipeline = pipeline
        self._last_info: tuple[SamplingBatchInfo, int, SamplingBatchInfo] | None = None  # of nodes, the last

    def run(
        self,
        reqs: list[Req],
        forward_batch: ForwardBatch,
        info: SamplingBatchInfo,
        tree: DraftTree,
        bans: EarlyBans | None,
    ) -> tuple[LogitsOutput, SampleOutput]:
        """The logits of all nodes, and a token sampled behind each. `info` and `bans`: for the token behind
        node 0 of each request."""
        runner, sampler, num_token_ids = self.parts.model_runner, self.parts.sampler, self.parts.num_token_ids
        if not any(req.needs_output for req in reqs):
            info = self._info_of_nodes(info, tree, bans)
            return runner.forward_and_sample(forward_batch, sampler, info, num_token_ids)
        drafts = self.pipeline.streams.copy((tree.token_ids, tree.parents, tree.num_nodes))
        info = expand_to_nodes(info, tree, bans)
        logits_output = runner.forward(forward_batch)
        token_ids, parents, num_nodes = drafts.wait()
        on_cpu = replace(tree, token_ids=token_ids, parents=parents, num_nodes=num_nodes)
        info = with_texts(info, reqs, on_cpu, num_token_ids)
        logits = logits_output.next_token_logits[:, :num_token_ids]
        return logits_output, sampler.sample(logits, info, forward_batch.sampled_positions)

    def _info_of_nodes(
        self, info: SamplingBatchInfo, tree: DraftTree, bans: EarlyBans | None
    ) -> SamplingBatchInfo:
        """The sampling info of the nodes; that of the previous round if the inputs are the same and nothing
        depends on outputs."""
        num_nodes = tree.num_draft_tokens
        if self._last_info is not None and self._last_info[0] is info and self._last_info[1] == num_nodes:
            return self._last_info[2]
        nodes = expand_to_nodes(info, tree, bans)
        depends = bans is not None or info.output_counts is not None
        self._last_info = None if depends else (info, num_nodes, nodes)
        return nodes

"""Prefill steps in pieces: the layers between two attention calls are replayed from a CUDA graph.

Differs from reference: for few tokens, launching the ten kernels of a layer takes the CPU longer than running
them takes the GPU. So a step is padded to one of a list of sizes. For each size the model is captured as one
graph up to the first attention, one from there to the next, and so on to the end. Attention is planned and
launched for the batch without its padding and writes to where the next graph reads, so any backend and any
lengths work. The model is unchanged: the attention backend that it gets ends one graph and begins the next.
Without graphs (a flag, a CPU, recording hooks) the same padded tokens go through the same kernels, so results
are bit-identical. Assumes that a row's result does not depend on other rows. Loses where the GPU takes longer
than the CPU, because it computes the padding too: steps above the largest size run without graphs. Mixed
steps are replayed whole where attention can be captured for them (mixed_graph.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from diptych.optimized.graphs.cuda_graph import CudaGraphs, Cut, warn_of_launches
from diptych.optimized.graphs.steps import Layers, Steps
from diptych.optimized.graphs.token_buffers import Heads, TokenBuffers
from diptych.shared.interfaces import AttentionBackend, CausalLM, TokenToKVPool
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.forward import run_model
from diptych.shared.sampling.logprobs import input_logprobs_of
from diptych.shared.types import ForwardBatch, LogitsOutput
from diptych.shared.types.attention import AttentionLayer


@dataclass
class Piece:
    """A graph, and the attention call that is launched after it, over memory that the graph writes."""

    replay: Callable[[], None]
    layer: AttentionLayer
    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None


@dataclass
class Pieces:
    """All pieces for one number of tokens."""

    up_to_attention: list[Piece]  # none: attention is in the graph
    replay_rest: Callable[[], None]
    outputs: list[torch.Tensor]  # borrowed buffers: valid until any other graph is replayed

    # --8<-- [start:replay-pieces]
    def __call__(self, attention: AttentionBackend, plan: Any) -> list[torch.Tensor]:
        for piece in self.up_to_attention:
            piece.replay()
            attention.run(piece.q, piece.layer, plan, k=piece.k, v=piece.v)
        self.replay_rest()
        return self.outputs

    # --8<-- [end:replay-pieces]


class RealRows(AttentionBackend):
    """Attention of a padded step: the backend computes the first tokens; the padding rows of `heads` do not
    change."""

    def __init__(self, backend: AttentionBackend, num_tokens: int, heads: Heads) -> None:
        self.backend = backend
        self.num_tokens = num_tokens
        self.heads = heads  # of `size` rows, the same memory for all layers with heads of one size

    def plan(self, forward_batch: ForwardBatch) -> Any:
        return self.backend.plan(forward_batch)

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: Any,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is None  # a model gives none
        n, heads = self.num_tokens, self.heads[layer.output_dim]
        k, v = (None if x is None else x[:n] for x in (k, v))
        real = heads[:n]
        output = self.backend.run(q[:n], layer, plan, k=k, v=v, out=real)
        assert output is real, f"{type(self.backend).__name__} did not write to out"
        return heads


class CutHere(AttentionBackend):
    """Replaces attention while a model is captured: one piece ends here, the next reads `heads`."""

    def __init__(self, cut: Cut, heads: Heads) -> None:
        self.cut = cut
        self.heads = heads
        self.pieces: list[Piece] = []

    def plan(self, forward_batch: ForwardBatch) -> None:
        """No plan: it is made for each replayed batch."""

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: Any,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is None
        replay, tensors = self.cut([x for x in (q, k, v) if x is not None])
        self.pieces.append(Piece(replay, layer, *tensors, *[None] * (3 - len(tensors))))
        return self.heads[layer.output_dim]


class ExtendSteps(Steps):
    """Prefill steps, padded to a captured number of tokens. The graphs hold the layers; logits are launched,
    because their number of rows differs."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv_pool: TokenToKVPool,
        tokens: TokenBuffers,
        num_logprob_rows: int,
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv_pool = kv_pool
        self.tokens = tokens
        self.num_logprob_rows = num_logprob_rows
        self.captured: dict[int, Pieces] = {}  # by size
        self.captured_layers: Layers = None  # whose inputs the pieces give

    def takes(self, batch: ForwardBatch) -> bool:
        return (
            batch.forward_mode.is_prefill
            and batch.custom_mask is None
            and batch.embeds is None
            and self.tokens.size_for(batch.num_tokens) is not None
        )

    def run(self, batch: ForwardBatch, layers: Layers, replay: bool) -> LogitsOutput:
        hidden_states, captured = self.run_layers(batch, layers, replay)
        logits = self.model.compute_logits(hidden_states[batch.last_token_rows])
        input_logprobs = None
        if batch.input_logprob_rows is not None:
            input_logprobs = input_logprobs_of(
                batch, hidden_states, self.model.compute_logits, self.num_logprob_rows
            )
        return LogitsOutput(logits, input_logprobs, captured)

    def run_layers(
        self, batch: ForwardBatch, layers: Layers, replay: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output of `run_model`."""
        n = batch.num_tokens
        size = self.tokens.size_for(n)
        assert size is not None
        self.tokens.load(batch, size)
        attention = self.attention_of(batch, size)
        plan = attention.plan(batch)
        if replay and size in self.captured and layers == self.captured_layers:
            outputs = self.captured[size](attention, plan)
            self.num_replays += 1
        else:
            outputs = self.launch(size, attention, plan, layers)
        return outputs[0][:n], outputs[1][:n] if len(outputs) > 1 else None

    def attention_of(self, batch: ForwardBatch, size: int) -> AttentionBackend:
        """The attention of the padded step, which is planned for the batch."""
        return RealRows(self.attention, batch.num_tokens, self.tokens.heads_of(size))

    def launch(self, size: int, attention: AttentionBackend, plan: Any, layers: Layers) -> list[torch.Tensor]:
        """Hidden states, and the captured ones if requested."""
        batch = self.tokens.batch_of(size)
        handle = BatchAttention(attention, plan, self.kv_pool, batch.out_cache_loc)
        hidden_states, captured = run_model(self.model, batch, handle, layers)
        return [hidden_states] if captured is None else [hidden_states, captured]

    def capture(self, graphs: CudaGraphs, size: int) -> None:
        self.tokens.inputs.zero_()
        last: list[CutHere] = []

        def run(cut: Cut) -> list[torch.Tensor]:
            last[:] = [CutHere(cut, self.tokens.heads_of(size))]
            return self.launch(size, last[0], None, self.captured_layers)

        replay_rest, outputs = graphs.capture_pieces(run, bool(self.captured))
        self.captured[size] = Pieces(last[0].pieces, replay_rest, outputs)


@torch.inference_mode()
def capture_prefill_steps(all_steps: Sequence[ExtendSteps], graphs: CudaGraphs, layers: Layers) -> None:
    """Capture all sizes of all kinds, largest first, because smaller ones reuse the memory."""
    for steps in all_steps:
        steps.captured_layers = layers
    sizes = all_steps[0].tokens.sizes[::-1] if all_steps else ()
    for size in tqdm(sizes, desc="capture CUDA graphs of prompts", unit="size", leave=False, delay=1.0):
        try:
            for steps in all_steps:
                steps.capture(graphs, size)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            warn_of_launches("prefill", "the model makes the CPU wait for the GPU")
            return

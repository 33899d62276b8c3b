# mypy: ignore-errors
# ruff: noqa: F821
class TopK:
    def __call__(
        self, router_logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> TopKOutput:
        config = self.config
        logits = router_logits.to(torch.float32)
        is_sigmoid = config.routing in ("biased-grouped", "sigmoid")
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
        choice = logits if config.routing == "sigmoid" else scores
        if correction_bias is not None:
            choice = scores + correction_bias.to(torch.float32)
        if config.routing in ("grouped", "biased-grouped"):
            choice = self._mask_groups(choice)
        order = choice.sort(dim=-1, descending=True, stable=True).indices
        ids = order[:, : config.num_experts_per_tok]
        weights = scores.gather(1, ids)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return TopKOutput(weights * config.routed_scaling_factor, ids.to(torch.int32))

    def _mask_groups(self, choice: torch.Tensor) -> torch.Tensor:
        grouped = choice.unflatten(-1, (self.config.num_expert_groups, -1))
        num_best = min(2 if self.config.routing == "biased-grouped" else 1, grouped.shape[-1])
        scores = grouped.topk(num_best, dim=-1).values.sum(-1)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        is_out = torch.ones_like(scores, dtype=torch.bool)
        is_out.scatter_(1, order[:, : self.config.topk_group], False)
        return grouped.masked_fill(is_out[..., None], float("-inf")).flatten(1)


class FusedExperts:
    def forward(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        y = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for expert in topk.topk_ids.unique().tolist():
            if expert < 0:
                continue
            tokens, places = (topk.topk_ids == expert).nonzero(as_tuple=True)
            b13, b2 = (None if b is None else b[expert] for b in (self.b13, self.b2))
            gate, up = F.linear(x[tokens], self.w13[expert], b13).chunk(2, dim=-1)
            result = F.linear(self.act_fn(gate, up), self.w2[expert], b2).to(y.dtype)
            y.index_add_(0, tokens, result * topk.topk_weights[tokens, places, None])
        return y.to(x.dtype)


class MoE:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        topk, routed_x = self.topk(self.gate(x), self.correction_bias), x
        if self.weight_on_input:
            routed_x = x * topk.topk_weights.to(x.dtype)
            topk = TopKOutput(torch.ones_like(topk.topk_weights), topk.topk_ids)
        y = self.experts(routed_x, topk)
        if self.shared_experts is None:
            return y
        shared = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x).sigmoid()
        return y + shared

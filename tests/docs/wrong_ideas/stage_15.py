"""Wrong ideas in stage 15. The first is caught quickly."""

from tests.docs.wrong_ideas import wrong_idea as W

# ruff: noqa: E501
# fmt: off
W("15", "a token adds its value to what is there",
  "prompt", "prompts", "what S has under k", (("beta[:, None] * (v - remembered)", "beta[:, None] * v"),))
W("15", "a token reads before it writes", "prompt", "prompts", "q reads the new S",
  (("    state = state + k[:, :, None] * correction[:, None, :]\n    return state, (state * q[:, :, None]).sum(1)",
    "    output = (state * q[:, :, None]).sum(1)\n    return state + k[:, :, None] * correction[:, None, :], output"),))
W("15", "the difference is to what S had before the decay", "prompt", "prompts", "exp(g) S first",
  (("    state = g.exp()[:, None, None] * state\n    remembered = (state * k[:, :, None]).sum(1)\n",
    "    remembered = (state * k[:, :, None]).sum(1)\n    state = g.exp()[:, None, None] * state\n"),))
W("15", "q and k may have any length", "prompt", "prompts", "divided by their lengths",
  (("    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))\n", ""),))
W("15", "value heads take turns with key heads", "prompt", "prompts", "read key head 0",
  (("x.repeat_interleave(repeats, dim=1)", "x.repeat(1, repeats, 1)"),))
W("15", "a new request finds a clean row",
  "prompt", "prompts", "earlier request left", (("if tokens.is_first:", "if False:"),))
W("15", "zero times what a row holds is zero", "prompt", "prompts", "times zero",
  (("torch.zeros_like(inputs[tokens.row]), torch.zeros_like(states[tokens.row])",
    "0 * inputs[tokens.row], 0 * states[tokens.row]"),))
W("15", "the convolution begins anew in each step", "steps", "chunks", "does not begin anew",
  (("        return inputs[tokens.row], states[tokens.row]",
    "        return torch.zeros_like(inputs[tokens.row]), states[tokens.row]"),))
W("15", "a step keeps inputs of its own tokens", "steps", "chunks", "older than the step",
  (("= seen[tokens.end - tokens.start :]",
    "= torch.cat((0 * seen[: len(seen)], seen[layer.config.conv_kernel - 1 :]))[1 - layer.config.conv_kernel :]"),))
W("15", "the inputs of a checkpoint are the last ones of the step",
  "checkpoints", "stores", "not the last ones",
  (("seen[n : n + layer.config.conv_kernel - 1]", "seen[1 - layer.config.conv_kernel :]"),))

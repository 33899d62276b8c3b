# --8<-- [start:toy-plan]
def plan_step(prompts, num_decoding, chunk_size):
    """One step: a token per decoding request, then prompt tokens up to the budget.

    prompts: [name, tokens left], changed in place -> [(name, tokens computed now)].
    """
    budget = chunk_size - num_decoding
    step = []
    for prompt in prompts:
        name, left = prompt
        num_tokens = min(left, budget)
        if num_tokens == 0:
            break
        step.append((name, num_tokens))
        prompt[1] -= num_tokens
        budget -= num_tokens
    prompts[:] = [prompt for prompt in prompts if prompt[1] > 0]
    return step
    # --8<-- [end:toy-plan]


# --8<-- [start:toy-simulation]
def simulate(prompt_lens, num_decoding, chunk_size, ms_per_step=5.0, ms_per_token=0.026):
    """(ITLs of the decoding requests, TTFT of the last prompt), in ms."""
    prompts = [[f"p{i}", length] for i, length in enumerate(prompt_lens)]
    latencies = []
    while prompts:
        step = plan_step(prompts, num_decoding, chunk_size)
        latencies.append(ms_per_step + ms_per_token * sum(num_tokens for _, num_tokens in step))
    return latencies, sum(latencies)
    # --8<-- [end:toy-simulation]

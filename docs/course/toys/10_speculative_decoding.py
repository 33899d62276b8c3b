# --8<-- [start:toy-verify]
def decode(target, context, num_tokens):
    """One call of the target per token."""
    tokens = list(context)
    for _ in range(num_tokens):
        tokens.append(target(tokens))
    return tokens[len(context) :], num_tokens


def verify(target, tokens, drafts):
    """A step of the target over all drafts: its samples while drafts are right."""
    kept = []
    for draft in [*drafts, None]:
        sample = target(tokens + kept)  # in one batch: all drafts are known
        kept.append(sample)
        if sample != draft:
            break  # what follows was computed behind a wrong token
    return kept  # the accepted drafts and one bonus token
    # --8<-- [end:toy-verify]


# --8<-- [start:toy-speculate]
def speculate(target, drafter, context, num_tokens, num_drafts):
    """The same tokens, and the number of steps of the target."""
    tokens, num_steps = list(context), 0
    while len(tokens) < len(context) + num_tokens:
        drafts = []
        for _ in range(num_drafts):
            drafts.append(drafter(tokens + drafts))
        tokens += verify(target, tokens, drafts)
        num_steps += 1
    return tokens[len(context) : len(context) + num_tokens], num_steps
    # --8<-- [end:toy-speculate]

"""Every component in eager PyTorch. It defines what the engine means."""

if __name__ != "diptych.reference":  # a module under two names would exist twice
    raise ImportError(
        "this package is diptych.reference: import it by that name, from the repository's root or installed"
    )

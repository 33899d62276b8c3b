"""The common parts of both panels, the server, and the tools around the engine."""

if __name__ != "diptych.shared":  # a module under two names would exist twice
    raise ImportError(
        "this package is diptych.shared: import it by that name, from the repository's root or installed"
    )

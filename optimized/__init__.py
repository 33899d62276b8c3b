"""Fast implementations of components, for NVIDIA GPUs."""

if __name__ != "diptych.optimized":  # a module under two names would exist twice
    raise ImportError(
        "this package is diptych.optimized: import it by that name, from the repository's root or installed"
    )

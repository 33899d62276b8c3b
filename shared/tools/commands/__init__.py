"""One file per subcommand of `diptych`. Importing them imports neither torch nor the engine."""

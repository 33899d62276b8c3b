"""`python -m diptych`: the command."""

if __name__ == "__main__":
    from diptych.shared.tools.cli import main

    main()

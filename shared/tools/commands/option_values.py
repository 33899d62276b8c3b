"""Values of options that are written as one text: numbers, names, pairs."""

from collections.abc import Sequence

LARGEST_SEED = 2**62
"""torch has seeds of 64 bits; seeds that are computed from a seed fit too."""


def integers(option: str, text: str, separator: str = ",") -> tuple[int, ...]:
    try:
        return tuple(int(piece) for piece in text.split(separator))
    except ValueError:
        raise ValueError(f"{option} takes numbers separated by {separator!r}, got {text!r}") from None


def named_folders(text: str) -> dict[str, str]:
    """ "name=folder,name=folder" -> a mapping."""
    folders: dict[str, str] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, folder = item.partition("=")
        if not (name and equals and folder) or name in folders:
            raise ValueError(f"--lora-paths takes NAME=FOLDER, each name once, got {item!r}")
        folders[name] = folder
    return folders


def chunk_size(number: int | None) -> int | None:
    """Convert -1, the notation of other engines, to None, which a command line cannot express."""
    if number is not None and number < 1 and number != -1:
        raise ValueError(
            f"chunked_prefill_size must be an integer >= 1, or -1 to never cut a prompt, got {number}"
        )
    return None if number == -1 else number


def names_among(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in allowed]
    if wrong or not names:
        raise ValueError(f"{option} takes {', '.join(allowed)}, separated by commas, got {text!r}")
    return names

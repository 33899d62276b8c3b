"""Command-line options that several subcommands share: the flags of the engine and of the sampler.

None means "not given": defaults live in `EngineConfig` and `SamplingParams`, which also check the values.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from diptych.shared import registry

MODEL, MEMORY, SCHEDULING, SAMPLING = "Model", "Memory", "Scheduling", "Sampling"
SPECULATION, LORA, GRAPHS = "Speculative decoding", "LoRA adapters", "CUDA graphs"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One option for every field of `EngineConfig`, under the same name."""

    model: Annotated[
        str | None,
        _option(
            MODEL, "Built-in model, local folder or Hugging Face id. Default: tiny-dense.", "--model", "-m"
        ),
    ] = None
    tokenizer: Annotated[
        str | None, _option(MODEL, "Folder or id of the tokenizer. Default: the model's.")
    ] = None
    load_format: Annotated[
        str | None, _option(MODEL, "auto, or dummy: random weights, only config.json is needed.")
    ] = None
    panel: Annotated[
        str | None, _option(MODEL, "reference or optimized. Default: the best this machine can run.")
    ] = None
    use: Annotated[
        list[str] | None,
        _option(
            MODEL,
            "Take a component from elsewhere: a panel, a backend or package.module:Class. "
            "Repeat it, or separate by commas.",
            metavar="COMPONENT=IMPLEMENTATION",
        ),
    ] = None
    device: Annotated[str | None, _option(MODEL, "cpu, mps, cuda or cuda:1.")] = None
    dtype: Annotated[
        str | None,
        _option(MODEL, "auto, float32, bfloat16 or float16. Default: auto, float32 on a CPU."),
    ] = None
    quantization: Annotated[
        str | None,
        _option(MODEL, "Quantize linear layers while loading: fp8, fp8-block, int8 or int4."),
    ] = None
    moe_runner_backend: Annotated[
        str | None,
        _option(MODEL, "What computes experts: auto, triton, triton_kernel, deep_gemm ..."),
    ] = None
    random_seed: Annotated[
        int | None, _option(MODEL, "Seed of dummy weights and of requests without a seed.")
    ] = None
    deterministic: Annotated[
        bool | None,
        _option(MODEL, "Bits of an answer that depend on its request alone (slower).", "--deterministic"),
    ] = None

    tp: Annotated[
        int | None,
        _option(MODEL, "Tensor parallelism: ranks that have a part of the model each. Default: 1."),
    ] = None
    pp: Annotated[
        int | None,
        _option(MODEL, "Pipeline parallelism: ranks that have some of the layers each. Default: 1."),
    ] = None
    dp: Annotated[int | None, _option(MODEL, "Data parallelism: replicas of the model. Default: 1.")] = None
    dp_policy: Annotated[
        str | None,
        _option(
            MODEL, "Replica of a request: round-robin, least-requests or least-tokens. Default: least-tokens."
        ),
    ] = None
    dp_attention: Annotated[
        bool | None,
        _option(MODEL, "With --dp: replicas of attention, which share the experts.", "--dp-attention"),
    ] = None
    ep: Annotated[
        int | None,
        _option(MODEL, "Expert parallelism: parts of ranks with some of the experts each. Default: 1."),
    ] = None
    ep_num_redundant_experts: Annotated[
        int | None, _option(MODEL, "With --ep: places for replicas of experts in a layer. Default: 0.")
    ] = None
    eplb_rebalance_num_iterations: Annotated[
        int | None, _option(MODEL, "With --ep: steps between two rebalances of experts. Default: never.")
    ] = None
    disaggregation: Annotated[
        bool | None, _option(MODEL, "Prefill and decode in two engines, a process each.", "--disaggregation")
    ] = None

    kv_cache_dtype: Annotated[
        str | None, _option(MEMORY, "auto, the model's, or fp8_e4m3: half the bytes of bfloat16.")
    ] = None
    page_size: Annotated[int | None, _option(MEMORY, "Tokens of a KV page. Default: 1.")] = None
    context_len: Annotated[int | None, _option(MEMORY, "Longest sequence. Default: the model's.")] = None
    max_total_tokens: Annotated[
        int | None, _option(MEMORY, "Tokens of the KV pool. Default: from free memory.")
    ] = None
    mem_fraction_static: Annotated[
        float | None, _option(MEMORY, "Share of the GPU's memory for weights and KV pool.")
    ] = None
    max_running_requests: Annotated[int | None, _option(MEMORY, "Most concurrent requests.")] = None
    disable_radix_cache: Annotated[
        bool | None, _option(MEMORY, "Never reuse the KV of an earlier prompt.", "--disable-radix-cache")
    ] = None
    eviction_policy: Annotated[
        str | None, _option(MEMORY, "lru, lfu, fifo, mru, filo, priority or slru.")
    ] = None

    hicache_tokens: Annotated[
        int | None, _option(MEMORY, "Tokens whose KV is kept in the computer's memory. Default: none.")
    ] = None
    hicache_dir: Annotated[
        str | None, _option(MEMORY, "Folder of a tier on disk, below the one in memory.")
    ] = None
    hicache_dir_tokens: Annotated[
        int | None, _option(MEMORY, "Tokens whose KV is kept there. Default: 1,000,000.")
    ] = None

    schedule_policy: Annotated[
        str | None, _option(SCHEDULING, "fcfs, lpm, dfs-weight, lof, random or routing-key.")
    ] = None
    schedule_conservativeness: Annotated[
        float | None, _option(SCHEDULING, "Larger: fewer concurrent requests, fewer retractions.")
    ] = None
    max_prefill_tokens: Annotated[
        int | None, _option(SCHEDULING, "Most prompt tokens of one step, over all requests.")
    ] = None
    chunked_prefill_size: Annotated[
        int | None, _option(SCHEDULING, "Prompt tokens of one step before a prompt is cut; -1: never cut.")
    ] = None
    enable_mixed_chunk: Annotated[
        bool | None, _option(SCHEDULING, "Decode in the same step as a prefill.", "--enable-mixed-chunk")
    ] = None
    enable_priority_scheduling: Annotated[
        bool | None, _option(SCHEDULING, "Honour priorities.", "--enable-priority-scheduling")
    ] = None
    priority_preemption_threshold: Annotated[
        int | None, _option(SCHEDULING, "Preempt only what is less important by more than this.")
    ] = None
    max_queued_requests: Annotated[int | None, _option(SCHEDULING, "Most requests waiting.")] = None
    in_batch_prefix_check_threshold: Annotated[
        int | None, _option(SCHEDULING, "Look for prefixes shared in the queue when this few are cached.")
    ] = None
    in_batch_prefix_deprioritize_threshold: Annotated[
        int | None, _option(SCHEDULING, "... and defer requests that share at least so many tokens.")
    ] = None
    waiting_timeout: Annotated[float | None, _option(SCHEDULING, "Seconds in the queue.")] = None
    running_timeout: Annotated[float | None, _option(SCHEDULING, "Seconds since first scheduled.")] = None

    speculative: Annotated[
        str | None,
        _option(
            SPECULATION, "Draft with eagle, eagle3, nextn, standalone or ngram, and verify. Default: no."
        ),
    ] = None
    speculative_draft_model: Annotated[
        str | None, _option(SPECULATION, "Folder or id of the draft model.")
    ] = None
    speculative_num_steps: Annotated[
        int | None, _option(SPECULATION, "Deepest draft. Default: by algorithm.")
    ] = None
    speculative_topk: Annotated[
        int | None, _option(SPECULATION, "Beams kept while drafting; 1: a chain. Default: by algorithm.")
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None, _option(SPECULATION, "Tokens verified at once, the newest one included.")
    ] = None
    speculative_auto: Annotated[
        bool | None,
        _option(
            SPECULATION, "Draft less while little is accepted, up to the numbers above.", "--speculative-auto"
        ),
    ] = None

    lora_paths: Annotated[
        list[str] | None,
        _option(
            LORA,
            "An adapter to load at start. Repeat it, or separate by commas.",
            metavar="NAME=FOLDER",
        ),
    ] = None
    max_loras_per_batch: Annotated[
        int | None, _option(LORA, "Adapters in one batch. Default: 8 with --lora-paths, else none.")
    ] = None
    max_lora_rank: Annotated[
        int | None, _option(LORA, "Largest rank of an adapter loaded later. Default: by --lora-paths.")
    ] = None

    disable_cuda_graph: Annotated[
        bool | None, _option(GRAPHS, "Decode by launching every kernel anew.", "--disable-cuda-graph")
    ] = None
    cuda_graph_max_bs: Annotated[
        int | None, _option(GRAPHS, "Largest captured batch. Default: --max-running-requests, at most 512.")
    ] = None
    cuda_graph_bs: Annotated[
        str | None,
        _option(
            GRAPHS,
            "Captured batch sizes, separated by commas. Default: 1, 2, 4, 8, 12, 16, then every eighth.",
            metavar="N,N,...",
        ),
    ] = None
    cuda_graph_max_tokens: Annotated[
        int | None,
        _option(GRAPHS, "Largest captured prefill step, in tokens; 0: none. Default: by the model's size."),
    ] = None

    skip_warmup: Annotated[
        bool | None, _option(GRAPHS, "Serve without warm-up requests.", "--skip-warmup")
    ] = None

    check_invariants: Annotated[
        bool | None, _option(SCHEDULING, "Check every pool after every step (slow).", "--check-invariants")
    ] = None
    check_idle: Annotated[
        bool | None, _option(SCHEDULING, "Check every pool whenever no request is left.", "--check-idle")
    ] = None

    def to_flags(self) -> dict[str, Any]:
        """The given options as keyword arguments of `LLM`."""
        flags = _given(self)
        if "use" in flags:
            flags["use"] = registry.parse_use(",".join(flags["use"]))
        if "lora_paths" in flags:
            flags["lora_paths"] = named_folders(",".join(flags["lora_paths"]))
        if "chunked_prefill_size" in flags:
            flags["chunked_prefill_size"] = chunk_size(flags["chunked_prefill_size"])
        if "cuda_graph_bs" in flags:
            flags["cuda_graph_bs"] = integers("--cuda-graph-bs", flags["cuda_graph_bs"])
        return flags

    def to_arguments(self) -> list[str]:
        """The given options as arguments of another `diptych` command."""
        arguments = []
        for name, value in _given(self).items():
            option = "--" + name.replace("_", "-")
            for each in value if isinstance(value, list) else [value]:
                arguments += [option] if each is True else [option, str(each)]
        return arguments


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options for the fields of `SamplingParams` that make sense on a command line."""

    max_new_tokens: Annotated[
        int | None, _option(SAMPLING, "Longest answer. Default: 128.", "--max-new-tokens", "-n")
    ] = None
    min_new_tokens: Annotated[int | None, _option(SAMPLING, "Shortest answer.")] = None
    temperature: Annotated[
        float, _option(SAMPLING, "0: always the likeliest token. Default: 0.", "--temperature", "-t")
    ] = 0.0
    top_k: Annotated[int | None, _option(SAMPLING, "Keep so many tokens; -1: all.")] = None
    top_p: Annotated[float | None, _option(SAMPLING, "Keep the likeliest up to this probability.")] = None
    min_p: Annotated[float | None, _option(SAMPLING, "Keep what is at least so likely as the best.")] = None
    frequency_penalty: Annotated[float | None, _option(SAMPLING, "Per repetition in the answer.")] = None
    presence_penalty: Annotated[float | None, _option(SAMPLING, "Once per token in the answer.")] = None
    repetition_penalty: Annotated[float | None, _option(SAMPLING, "Divides what is in prompt or answer.")] = (
        None
    )
    seed: Annotated[int | None, _option(SAMPLING, "The same seed gives the same answer.")] = None
    stop: Annotated[list[str] | None, _option(SAMPLING, "End before this text. May be repeated.")] = None
    stop_regex: Annotated[list[str] | None, _option(SAMPLING, "End where this matches.")] = None
    ignore_eos: Annotated[bool | None, _option(SAMPLING, "Go on to the longest answer.", "--ignore-eos")] = (
        None
    )

    def to_params(self) -> dict[str, Any]:
        """The given options as keyword arguments of `SamplingParams`."""
        params = _given(self)
        return {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Expand a command's parameters for typer: a parameter of one of the classes above becomes one option per
    field."""
    signature = inspect.signature(command, eval_str=True)
    groups = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.annotation in (EngineOptions, SamplingOptions)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(groups[name])
        ]

    def call(**values: Any) -> None:
        arguments = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **arguments)

    call.__name__ = command.__name__
    call.__doc__ = command.__doc__
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


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


def _given(options: EngineOptions | SamplingOptions) -> dict[str, Any]:
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    # typer gives an empty list for a repeatable option that was not given.
    return {name: value for name, value in values.items() if value is not None and value != []}

"""Flags of several ranks: valid combinations."""

from __future__ import annotations

from diptych.shared.flags.engine_flags import EngineFlags

ONE_ENGINE: tuple[tuple[str, bool | None], ...] = (("disaggregation", False), ("disaggregation_mode", None))
"""Flags that divide prefill and decode among engines, and their values that do not."""


def check_can_pause(flags: EngineFlags) -> None:
    """Raise `ValueError` if the engine steps in several processes, which do not step together."""
    replicas = () if flags.dp_attention else (("dp", 1),)
    for name, only in (*ONE_ENGINE, *replicas):
        if getattr(flags, name) != only:
            flag = f"{name}={getattr(flags, name)}"
            raise ValueError(f"an engine with {flag} cannot pause: it steps in several processes")


DECIDES_BEHIND_EACH_STEP = (
    *(("pp", (1,)), ("dp_attention", (False,)), ("speculative", (None,))),
    *(("disaggregation", (False,)), ("disaggregation_mode", (None, "prefill"))),
)
"""Flags, and their values with which decode steps can be launched together."""


def check_decode_steps(flags: EngineFlags) -> None:
    """Raise `ValueError` for flags with which each decode step needs a decision."""
    for name, works in DECIDES_BEHIND_EACH_STEP:
        if getattr(flags, name) not in works:
            raise ValueError(
                f"num_continuous_decode_steps={flags.num_continuous_decode_steps} does not work with "
                f"{name}={getattr(flags, name)}: it decides anew behind each step"
            )


def check_parallel_flags(flags: EngineFlags) -> None:
    """Raise `ValueError` for flags that exclude each other."""
    if flags.num_lora_slots:
        for name, only in (("tp", 1), ("pp", 1), ("dp", 1), ("dp_attention", False), *ONE_ENGINE):
            if getattr(flags, name) != only:
                why = ": a rank would need its part of each adapter" if name in ("tp", "pp") else ""
                raise ValueError(
                    f"LoRA adapters (max_loras_per_batch={flags.num_lora_slots}) do not work with "
                    f"{name}={getattr(flags, name)}{why}"
                )
    if flags.hicache_tokens:
        alone = (("tp", 1), ("pp", 1), ("dp_attention", False), ("disable_radix_cache", False), *ONE_ENGINE)
        for name, only in alone:
            if getattr(flags, name) != only:
                why = ": ranks would have to agree on what the tier has" if name in ("tp", "pp") else ""
                flag = f"hicache_tokens={flags.hicache_tokens}"
                raise ValueError(f"{flag} does not work with {name}={getattr(flags, name)}{why}")
    elif flags.hicache_dir is not None:
        raise ValueError(f"hicache_dir={flags.hicache_dir} needs hicache_tokens, the tier above it")
    if flags.pp > 1:
        one_token = ": stages pass on one token of a request a step"
        for name, value, only, why in (
            ("ep", flags.ep, 1, ": a stage has no map of the experts of its layers"),
            ("speculative", flags.speculative, None, one_token),
        ):
            if value != only:
                raise ValueError(f"pp={flags.pp} does not work with {name}={value}; it must be {only}{why}")
    if flags.two_batch_tokens:
        num_ranks = flags.dp * flags.tp if flags.dp_attention else flags.tp
        flag = f"two_batch_tokens={flags.two_batch_tokens}"
        if num_ranks == 1:
            raise ValueError(
                f"{flag} needs several ranks that share layers: tp > 1, or dp > 1 with dp_attention"
            )
        if flags.pp > 1:
            why = "micro-batches already compute while others travel"
            raise ValueError(f"{flag} does not work with pp={flags.pp}; it must be 1: {why}")
    if flags.elastic_ep:
        _check_elastic_ep(flags)
    if flags.dp_attention:
        _check_dp_attention(flags)
    elif flags.tp % flags.ep != 0:
        raise ValueError(
            f"ep={flags.ep} needs tp to be a multiple of it, and tp is {flags.tp}: expert parallelism places "
            f"experts on the ranks of tensor parallelism"
        )
    for split, without in ONE_ENGINE:
        if getattr(flags, split) != without:
            _check_split_engine(flags, f"{split}={getattr(flags, split)}")
    if flags.prefill_servers is not None:
        _check_addresses(flags)
    for name in ("ep_num_redundant_experts", "eplb_rebalance_num_iterations"):
        if getattr(flags, name) and flags.ep == 1:
            raise ValueError(f"{name}={getattr(flags, name)} needs ep > 1, and ep is 1")


def _check_split_engine(flags: EngineFlags, split: str) -> None:
    for name in ("tp", "pp", "dp") if flags.disaggregation else ("pp", "dp"):
        if getattr(flags, name) > 1:
            raise ValueError(
                f"{split} does not work with {name}={getattr(flags, name)}: KV comes over one connection, "
                "and only the ranks of tp agree on what has come, with disaggregation_mode"
            )
    for name in (
        *("dp_attention", "disable_radix_cache", "check_invariants", "check_idle"),
        *("enable_priority_scheduling", "max_queued_requests", "waiting_timeout"),
    ):
        if getattr(flags, name) not in (None, False):
            raise ValueError(f"{split} does not work with {name}={getattr(flags, name)}")
    if flags.disaggregation_mode is not None and flags.disaggregation:
        raise ValueError(f"{split} is one of two servers, and disaggregation=True starts both in one")
    transport = flags.use.get("transport", "reference")
    if flags.disaggregation_mode is not None and transport != "reference":
        raise ValueError(f"{split} does not work with transport={transport}, only with reference")


def _check_addresses(flags: EngineFlags) -> None:
    if flags.disaggregation_mode != "decode":
        raise ValueError(f"prefill_servers={flags.prefill_servers} needs disaggregation_mode=decode")
    for address in str(flags.prefill_servers).split(","):
        host, _, port = address.rpartition(":")
        if not host or not (port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"prefill_servers must be HOST:PORT, separated by commas, got {address!r}")


def _check_elastic_ep(flags: EngineFlags) -> None:
    part = "a dead replica would take a part of each expert with it"
    for name, value, needed, why in (
        ("dp_attention", flags.dp_attention, True, part),
        ("ep", flags.ep, flags.dp * flags.tp, part),
        ("two_batch_tokens", flags.two_batch_tokens, None, "one half of a pass may have ended"),
    ):
        if value != needed:
            raise ValueError(f"elastic_ep=True does not work with {name}={value}, it needs {needed}: {why}")
    if flags.dp == 1:
        raise ValueError("elastic_ep=True needs dp > 1, and dp is 1: no replica would be left")


def _check_dp_attention(flags: EngineFlags) -> None:
    if flags.dp * flags.tp % flags.ep != 0:
        num = f"dp * tp to be a multiple of it: dp is {flags.dp}, tp is {flags.tp}"
        raise ValueError(f"dp_attention with ep={flags.ep} needs {num}")
    if flags.pp > 1:
        raise ValueError(f"dp_attention has all layers on each rank: pp is {flags.pp}")

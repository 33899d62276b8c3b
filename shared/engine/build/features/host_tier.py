"""The feature `hicache_tokens`: tiers of the prefix cache below the device, their sizes and the keys of their
pages."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import psutil

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.features import Extras, Feature, Pools
from diptych.shared.engine.build.features.beside_model import num_kept_states
from diptych.shared.interfaces import DiskTier, HostPool, SchedulerFeature, TokenToKVPool
from diptych.shared.loading.gguf_reader import parts_of
from diptych.shared.loading.gguf_weights import LINK as GGUF_LINK
from diptych.shared.scheduling.host_cache import HostCache, HostLoader
from diptych.shared.scheduling.host_states import StatefulHostCache, StateRows
from diptych.shared.scheduling.pages import round_up_to_page

MIN_PAGE_LEN = 16
"""The least number of tokens of a host page, because each page has a digest and a separate copy."""


class HostTier(Feature):
    """Copies of cached KV in CPU memory, and on disk."""

    def check(self) -> None:
        config = self.plan.config
        if not self.plan.model_config.linear_attention:
            return
        if config.hicache_dir is not None:
            raise ValueError("hicache_dir does not work with linear attention: its files have no states")
        if num_kept_states(config) == 0:
            raise ValueError(
                f"hicache_tokens={config.hicache_tokens} does not work with linear attention and "
                "max_kept_states=0: without states no KV would be found"
            )

    def host_tier(self, kv_pool: TokenToKVPool, extras: Extras) -> HostCache:
        classes = self.plan.component("host_pool"), self.plan.component("disk_tier")
        return make_host_cache(self.plan.config, self.plan.folder, *classes, kv_pool, extras)

    def in_scheduler(self, extras: Extras, pools: Pools) -> list[SchedulerFeature]:
        assert pools.host is not None
        return [HostLoader(pools.host, pools.tree_cache, pools.allocator)]


def make_host_cache(
    config: EngineConfig,
    folder: Path,
    pool_class: type[HostPool],
    disk_class: type[DiskTier],
    kv_pool: TokenToKVPool,
    extras: Extras,
) -> HostCache:
    """Make the host tier. Raises `ValueError` for sizes that do not fit and settings that are not
    supported."""
    assert config.hicache_tokens is not None
    drafter, states = extras.drafter, extras.states
    if drafter is not None and drafter.num_kv_bytes_per_token:
        raise ValueError(
            f"hicache_tokens does not work with speculative={config.speculative}: the draft model's KV would "
            "not be loaded"
        )
    page_len = round_up_to_page(MIN_PAGE_LEN, config.page_size)
    page_num_bytes = page_len * kv_pool.num_bytes_per_token
    num_pages = config.hicache_tokens // page_len
    num_bytes, num_states, with_states = num_pages * page_num_bytes, 0, ""
    if states is not None:
        num_states = max(num_bytes // (2 * states.pool.num_bytes_per_state), 1)
        num_bytes += num_states * states.pool.num_bytes_per_state
        with_states = f", with {num_states} states of {states.pool.num_bytes_per_state} bytes"
    free = psutil.virtual_memory().available
    if not (num_pages >= 1 and num_bytes <= free):
        raise ValueError(
            f"hicache_tokens={config.hicache_tokens} is {num_pages} pages of {page_len} tokens and "
            f"{page_num_bytes} bytes{with_states}; at least one is needed, and {free / 1e9:.1f} GB of memory "
            "are free"
        )
    below: DiskTier | None = None
    if config.hicache_dir is not None:
        num_disk_pages = max(config.hicache_dir_tokens // page_len, 1)
        try:
            below = disk_class(config.hicache_dir, num_disk_pages, page_num_bytes)
        except OSError as error:
            raise ValueError(f"hicache_dir={config.hicache_dir}: {error.strerror}") from None
    seed = f"{model_digest(folder, config)} {kv_pool.dtype} {list(kv_pool.kv_scales)} {page_len}"
    pool = pool_class(kv_pool, num_pages, page_len)
    if states is None:
        return HostCache(pool, seed, below)
    rows: Any = StateRows(states.pool)
    return StatefulHostCache(pool, seed, states, pool_class(rows, num_states, 1))


def model_digest(folder: Path, config: EngineConfig) -> str:
    """A digest of everything that determines KV: the config, the weights, dtypes, and components that are not
    ours. Weights are read where pages outlive the engine: other weights of equal size and time must not find
    them."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder, config):
        digest.update(repr((path.name, path.stat().st_size)).encode())
        with open(path, "rb") as file:
            while config.hicache_dir is not None and (piece := file.read(2**24)):
                digest.update(piece)
    flags = config.dtype, config.quantization, config.load_format, config.random_seed, config.context_len
    digest.update(repr(flags).encode())
    for component, choice in sorted(config.use.items()):
        if registry.is_target(choice) or registry.is_lab(choice):
            digest.update(f"{component}={choice}".encode())
            if (code := Path(choice.partition(":")[0])).suffix == ".py":
                digest.update(code.read_bytes())
    return digest.hexdigest()


def weight_files(folder: Path, config: EngineConfig) -> list[Path]:
    """All files of weights that the model may be loaded from. Raises `ValueError` if there is none."""
    if (folder / GGUF_LINK).is_file():
        return parts_of((folder / GGUF_LINK).resolve())
    files = sorted(folder.glob("*.safetensors"))
    if not files and config.load_format != "dummy":
        raise ValueError(f"{folder}: no file of weights, whose digest names the pages of hicache_tokens")
    return files

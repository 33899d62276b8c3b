"""Which algorithms of cuBLAS are worth a look for a GEMM: what it proposes itself, every tile it has, and
what lies near the best of those.

The library proposes some eight of the thousands that it would run. What else there is shows by asking: a tile
or a cluster that it does not have for this problem is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p, sizeof
from itertools import product

from optimized.kernels.cublas_lt import Config, Library, Problem
from optimized.kernels.cublas_lt_api import (
    CONFIG_TYPES,
    Algorithm,
    Candidate,
    Cap,
    Preference,
    Reduction,
)

MAX_WORKSPACE = 32 * 2**20
"""Bytes."""
CLUSTERS = tuple(range(2, 12))
"""cublasLtClusterShape_t: blocks of threads side by side that share what they read, 1 to 16 of them."""
SMALL_CLUSTERS = (*CLUSTERS[:2], 5)  # 1 x 1, 2 x 1 and 1 x 2
SPLITS = (2, 3, 4)
SWIZZLES = (0, 1, 2)
MAX_SPLIT_TILES = 1600
"""Of 64 x 64. A GEMM of more has work for every multiprocessor without being split."""

Times = dict[Config, float]


def search(
    library: Library, problem: Problem, known: list[Config] | None, measure: Callable[[list[Config]], Times]
) -> Times:
    """How long what was tried takes; `measure` leaves out what cannot run. With `known` it begins with
    these and what the library proposes, and looks no farther than what is near the best of them."""
    proposed = proposals(library, problem)
    times: Times = {}

    def attempt(configs: Iterable[Config]) -> None:
        times.update(measure([config for config in dict.fromkeys(configs) if config not in times]))

    attempt([*proposed, *(known or ())])
    if known is None:
        attempt(tiles(library, problem, proposed))
        attempt(split(problem, best(times, 60)))
    max_option = max((options(library, problem, config) for config in best(times, 1)), default=0)
    attempt(
        config for near in best(times, 14 if known is None else 4) for config in neighbours(near, max_option)
    )
    if known is None:
        attempt(config for near in best(times, 6) for config in relatives(near, max_option))
    return times


def best(times: Times, count: int) -> list[Config]:
    return sorted(times, key=times.__getitem__)[:count]


def proposals(library: Library, problem: Problem, most: int = 64) -> list[Config]:
    """The library's own, its first choice first."""
    preference, size = c_void_p(), c_uint64(MAX_WORKSPACE)
    library.call("cublasLtMatmulPreferenceCreate", byref(preference))
    number = Preference.MAX_WORKSPACE_BYTES
    library.call("cublasLtMatmulPreferenceSetAttribute", preference, number, byref(size), sizeof(size))
    found, count = (Candidate * most)(), c_int()
    description = library.describe(problem)
    arguments = description.product, *description.layouts(), preference, most, found, byref(count)
    library.call("cublasLtMatmulAlgoGetHeuristic", library.handle, *arguments)
    library.call("cublasLtMatmulPreferenceDestroy", preference)
    configs = [config_of(library, one.algorithm) for one in found[: count.value] if one.state == 0]
    return [config for config in configs if config.sums_in_float32]


def config_of(library: Library, algorithm: Algorithm) -> Config:
    numbers = []
    for number, kind in enumerate(CONFIG_TYPES):
        value, written = kind(), c_size_t()
        get_attribute = "cublasLtMatmulAlgoConfigGetAttribute"
        library.call(get_attribute, byref(algorithm), number, byref(value), sizeof(value), byref(written))
        numbers.append(value.value)
    return Config(*numbers)


def tiles(library: Library, problem: Problem, proposed: list[Config]) -> Iterator[Config]:
    """Every tile of every kind of algorithm that was proposed, in small clusters."""
    whole = {
        "splitk_num": 1,
        "reduction_scheme": Reduction.NONE.value,
        "cta_swizzling": 0,
        "custom_option": 0,
        "tile_id": 0,
    }
    kinds = {config._replace(**whole, cluster_shape_id=0): config for config in proposed}
    for kind, config in kinds.items():
        tile_ids = library.caps(library.algorithm(problem, config), Cap.TILE_IDS, most=4096)
        for tile_id, cluster, option in product(tile_ids, SMALL_CLUSTERS, (0, 1)):
            yield kind._replace(tile_id=tile_id, cluster_shape_id=cluster, custom_option=option)


def options(library: Library, problem: Problem, config: Config) -> int:
    """The largest custom option."""
    return library.caps(library.algorithm(problem, config), Cap.CUSTOM_OPTION_MAX)[0]


def split(problem: Problem, configs: list[Config]) -> Iterator[Config]:
    """The same in parts."""
    if -(-problem.num_tokens // 64) * -(-problem.out_features // 64) > MAX_SPLIT_TILES:
        return
    scheme = Reduction.COMPUTE_TYPE.value
    for config, parts, cluster in product(configs, SPLITS, SMALL_CLUSTERS[:2]):
        yield config._replace(
            splitk_num=parts, reduction_scheme=scheme, cluster_shape_id=cluster, custom_option=0
        )


def neighbours(config: Config, max_option: int) -> Iterator[Config]:
    """Those that differ in one number."""
    for option in range(max_option + 1):
        yield config._replace(custom_option=option)
    for cluster in CLUSTERS:
        yield config._replace(cluster_shape_id=cluster)
    for swizzle in SWIZZLES:
        yield config._replace(cta_swizzling=swizzle)


def relatives(config: Config, max_option: int) -> Iterator[Config]:
    """Those of the same tile."""
    for option, cluster in product(range(max_option + 1), CLUSTERS[:5]):
        yield config._replace(custom_option=option, cluster_shape_id=cluster)

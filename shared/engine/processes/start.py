"""Starts the engine of a configuration: in this process, or on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from diptych.shared.config import EngineConfig
from diptych.shared.config.engine import for_prompts
from diptych.shared.engine.build.assembly import Assembly, assemble

T = TypeVar("T")


def start_assembly(config: EngineConfig) -> Assembly:
    """Start the engine. Raises `ValueError` for a configuration that cannot run. On a launched rank other
    than 0 it does not return; the process ends with rank 0."""
    assembly = _started(config)
    assembly.compilations.ready()
    return assembly


def _started(config: EngineConfig) -> Assembly:
    if config.disaggregation_mode == "prefill":
        config = for_prompts(config)
    if config.disaggregation:
        from diptych.shared.engine.processes.disaggregated import assemble_disaggregated

        return assemble_disaggregated(config)
    if config.tp == config.pp == config.dp == 1 and not config.dp_attention:
        return assemble(config)
    try:
        from diptych.shared.engine.processes.launcher import assemble_launched
        from diptych.shared.engine.processes.ranks import assemble_ranks
        from diptych.shared.engine.processes.replicas import assemble_replicas
        from diptych.shared.engine.processes.replicas_in_step import assemble_in_step
        from diptych.shared.parallel.meeting import is_launched
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{config.num_ranks} ranks, dp={config.dp}: need {error.name}: pip install 'diptych[parallel]'"
        ) from None
    if config.dp_attention:
        return assemble_in_step(config)
    if config.dp > 1:
        return assemble_replicas(config, start_assembly)
    return assemble_launched(config) if is_launched() else assemble_ranks(config)


def on_every_rank(assembly: Assembly, function: Callable[..., T], *arguments: Any) -> T:
    """`function(assembly, *arguments)` on every rank of an idle engine; the result of rank 0. Of replicas
    only the first calls it. `function`: of a module. `arguments`: what JSON has."""
    if assembly.config.num_ranks == 1 or assembly.config.dp > 1:
        return function(assembly, *arguments)
    scheduler: Any = assembly.scheduler
    result: T = scheduler.run(function, assembly, *arguments)
    return result

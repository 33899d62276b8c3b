"""No code of the engine and the server runs what it reads, and no channel between processes pickles."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import pytest
from tree import nodes, python_files

CODE = ("shared", "reference", "optimized")
MODULES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"),
    *("multiprocessing.connection", "multiprocessing.reduction", "multiprocessing.shared_memory"),
    *("torch.multiprocessing", "torch.package"),
}
CALLS = {"eval", "exec", "yaml.load", "os.system"}
QUEUES = {"Queue", "SimpleQueue", "Pool"}
"""Of multiprocessing they pickle; of `queue` and `asyncio` they stay in the process."""
ATTRIBUTES = {
    *("Pipe", "Manager", "JoinableQueue", "ProcessPoolExecutor"),  # they pickle
    *("send_object", "recv_object", "all_gather_object", "gather_object", "send_pyobj", "recv_pyobj"),
    *("TCPStore", "ForkingPickler", "unsafe_load", "full_load"),
}


def unsafe(found: Iterable[ast.AST]) -> Iterator[str]:
    for node in found:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
            is_local = node.module.split(".")[0] != "multiprocessing"
            loaders = {name for name in names if name in CALLS or name == "torch.load"}
            forbidden = ATTRIBUTES if is_local else ATTRIBUTES | QUEUES
            yield from names & MODULES or loaders or {each.name for each in node.names} & forbidden
        elif isinstance(node, ast.Attribute):
            is_queue = node.attr in QUEUES and ast.unparse(node.value) not in ("queue", "asyncio")
            if node.attr in ATTRIBUTES or node.attr.endswith("_object_list") or is_queue:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            is_loose = name == "torch.load" and given.get("weights_only") != "True"
            runs = {"allow_pickle", "trust_remote_code", "shell"} & {
                k for k, v in given.items() if v != "False"
            }
            if name in CALLS or is_loose or runs:
                yield name


def is_of_the_engine(parts: tuple[str, ...]) -> bool:
    """Not a tool beside it: these run the user's own code. Commands start the engine and the server. `tune`
    compiles in processes of its own, which inherit their pipes."""
    return (parts[:2] != ("shared", "tools") or parts[2] == "commands") and parts[:2] != ("optimized", "tune")


def test_the_engine_and_the_server_run_nothing_that_they_read() -> None:
    paths = [path for path in python_files(*CODE) if is_of_the_engine(path.parts)]
    found = {path.as_posix(): list(unsafe(nodes(path))) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing.connection import Listener",
        "from multiprocessing import connection",
        "from multiprocessing.reduction import ForkingPickler",
        "import marshal",
        "eval(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "ours, theirs = context.Pipe()",
        "messages = multiprocessing.Queue()",
        "messages = multiprocessing.get_context('spawn').SimpleQueue()",
        "from multiprocessing import Queue",
        "from multiprocessing.queues import SimpleQueue",
        "from multiprocessing.pool import Pool",
        "from concurrent.futures import ProcessPoolExecutor",
        "futures.ProcessPoolExecutor(2)",
        "from torch import load",
        "from yaml import load",
        "AutoConfig.from_pretrained(folder, trust_remote_code=True)",
        "subprocess.run(text, shell=True)",
        "distributed.broadcast_object_list(found)",
        "from torch.distributed import TCPStore",
    ],
)
def test_what_is_found(source: str) -> None:
    assert len(list(unsafe(ast.walk(ast.parse(source))))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "model.eval()",
        "from queue import SimpleQueue",
        "queue.SimpleQueue()",
        "asyncio.Queue()",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=False)",
    ],
)
def test_what_is_allowed(source: str) -> None:
    assert list(unsafe(ast.walk(ast.parse(source)))) == []

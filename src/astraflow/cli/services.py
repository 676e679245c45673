"""`astraflow dataflow`, `node`, `trainer`, `stage`, `relay`: each service by hand, one command each."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.cli.run import AcceptDamage, Recipe, open_run

if TYPE_CHECKING:
    from astraflow.config.schema import EngineSection

Parent = Annotated[int, typer.Option("--parent", hidden=True, help="Die with this process.")]
Url = Annotated[str, typer.Option("--dataflow", help="URL that the dataflow service printed.")]
Threads = Annotated[int, typer.Option(help="Intra-op threads of torch; 0: as the run file says.")]
Watch = Annotated[bool, typer.Option("--watch", help="Take up edits of the workflow's files.")]
WorkerMemory = Annotated[int, typer.Option(min=64 << 20, help="Of a worker and what it started; then it is killed.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File that holds the token; default: the variable ASTRAFLOW_TOKEN.")
]


def dataflow(
    ctx: typer.Context,
    recipe: Recipe,
    host: Annotated[str | None, typer.Option(help="Beyond loopback needs a token.")] = None,
    port: Annotated[int | None, typer.Option(help="0: any free port.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Default: runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the directory.")] = False,
    accept_damage: AcceptDamage = False,
    ready_file: Annotated[Path | None, typer.Option(help="Written with the URL once the service answers.")] = None,
    token_file: TokenFile = None,
    parent: Parent = 0,
) -> None:
    """Start the dataflow service of a run; change any setting after the recipe."""
    tie(parent)
    from astraflow.launch.claim import claim
    from astraflow.launch.rundir import RunDirectory, write_ready
    from astraflow.observe.logs import setup_logging
    from astraflow.wire.app import bind, check_bind

    config, token = open_run(recipe, ctx.args), read_token(token_file)
    host, port = config.dataflow.host if host is None else host, config.dataflow.port if port is None else port
    check_bind(host, token, "dataflow.host")
    with ExitStack() as taken:
        sock = taken.enter_context(closing(bind(host, port, "dataflow.port")))  # a used port takes no run name
        if parent and run_dir is not None:  # the launcher holds the directory and saved the settings
            directory = RunDirectory(run_dir.resolve())
        else:
            directory = taken.enter_context(claim(config, resume=resume, path=run_dir, accept_damage=accept_damage))
        setup_logging("dataflow", directory.path, secrets=(token,))

        def on_ready(url: str) -> None:
            typer.echo(f"dataflow answers at {url}; nodes join with: astraflow node --dataflow {joining(url)}")
            for path in filter(None, {directory.ready_file, ready_file}):
                write_ready(path, url)

        from astraflow.dataflow.service import run_service

        run_service(config, directory.path, sock, token=token, on_ready=on_ready, accept_damage=accept_damage)


def joining(url: str) -> str:
    """The URL for other hosts of a service bound to all addresses."""
    for every in ("//0.0.0.0:", "//[::]:"):
        url = url.replace(every, "//<address of this host>:")
    return url


def trainer(
    dataflow: Url,
    policy: Annotated[str, typer.Option(help="The policy to train; several with commas between them, in turn.")],
    run_dir: Annotated[Path, typer.Option(help="Where weights and checkpoints of the run lie, for all ranks.")],
    threads: Threads = 0,
    ranks: Annotated[int, typer.Option(help="Processes that share the model; 0: as the run file says.")] = 0,
    rank: Annotated[int, typer.Option(help="Which of them this is; -1: start them all here.")] = -1,
    rendezvous: Annotated[str, typer.Option(help="Where ranks meet: tcp://HOST:PORT of rank 0, file:///PATH.")] = "",
    token_file: TokenFile = None,
    parent: Parent = 0,
) -> None:
    """Start the trainer of a policy; it goes on from its newest checkpoint. Also a command for torchrun."""
    tie(parent)
    from astraflow.observe.logs import setup_logging

    token, place = read_token(token_file), rank_place(rank, ranks, rendezvous)
    number = 0 if place is None else place[0]
    process = f"trainer-{policy.replace(',', '+')}" + (f".{number}" if number else "")
    setup_logging(process, run_dir, secrets=(token,))
    if place is None and "," not in policy and (wanted := ranks or _ranks_of_run(dataflow, policy, token)) > 1:
        words = [f"--dataflow={dataflow}", f"--policy={policy}", f"--run-dir={run_dir}", f"--threads={threads}"]
        start_ranks(f"trainer of {policy}", wanted, ["trainer", *words], token)
        return
    with ExitStack() as stack:
        if parent and rank >= 0:  # `run_ranks` started it
            from astraflow.training.parallel.launch import signs_of_life

            stack.enter_context(signs_of_life(rank, rendezvous))
        from astraflow.training.parallel.ranks import RankPlace
        from astraflow.training.trainer import run_trainer

        found = None if place is None or place[1] == 1 else RankPlace(*place)
        run_trainer(dataflow, policy, run_dir.resolve(), threads=threads, token=token, place=found)


def rank_place(rank: int, ranks: int, rendezvous: str) -> tuple[int, int, str, int] | None:
    """Rank, number of ranks, rendezvous and rank on this host, as the command line or torchrun says."""
    from astraflow.config.env import torchrun_rank
    from astraflow.errors import LaunchError

    if rank >= 0:
        if rank >= ranks or not rendezvous:
            raise LaunchError(
                "--rank", rank, "needs --ranks above it and --rendezvous", "give all three to each rank, or none"
            )
        return rank, ranks, rendezvous, rank
    if (found := torchrun_rank()) is None:
        return None
    return found[0], found[1], "env://", found[2]


def _ranks_of_run(dataflow: str, policy: str, token: str | None) -> int:
    from astraflow.training.feed.session import TrainerSession

    with TrainerSession(dataflow, policy, token=token) as session:
        return session.config.policies[policy].trainer.ranks


def start_ranks(what: str, num_ranks: int, words: Sequence[str], token: str | None) -> None:
    """`astraflow <words>` as that many processes; see `run_ranks`."""
    from astraflow.config.env import child_environment
    from astraflow.observe.process import stop_signals
    from astraflow.training.parallel.launch import run_ranks

    with stop_signals() as stop:
        run_ranks(what, num_ranks, words, child_environment(token), stop)


def node(
    dataflow: Url,
    name: Annotated[str, typer.Option(help="For people; need not be unique.")] = "",
    concurrency: Annotated[int, typer.Option(help="Episodes played at once.")] = 64,
    min_concurrency: Annotated[
        int, typer.Option(min=0, help="To which the load of the engines may lower it; 0: it stays.")
    ] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Worker processes that run workflow code; 0: clients only.")] = 1,
    watch: Watch = False,
    worker_memory_bytes: WorkerMemory = 8 << 30,
    threads: Threads = 0,
    engine: Annotated[
        list[str] | None, typer.Option(help="What serves a policy here: POLICY.type=vllm, POLICY.dtype=bfloat16, ...")
    ] = None,
    serves: Annotated[
        str, typer.Option(help="Policies that have an engine here, with commas between them; default: all.")
    ] = "",
    listen: Annotated[str, typer.Option(help="HOST:PORT where other nodes reach its engines.")] = "",
    delay_s: Annotated[float, typer.Option(help="Added to every call: a slow node.")] = 0.0,
    swarm: Annotated[
        str, typer.Option(help="HOST:PORT of a door for clients that play elsewhere; port 0: any free one.")
    ] = "",
    swarm_ready_file: Annotated[Path | None, typer.Option(hidden=True)] = None,
    token_file: TokenFile = None,
    parent: Parent = 0,
) -> None:
    """Join the pool of a run as a rollout node; it only opens outward connections, unless --swarm opens a door."""
    tie(parent)
    from astraflow.errors import LaunchError
    from astraflow.launch.rundir import write_ready
    from astraflow.rollout.node import NodeOptions, run_node
    from astraflow.rollout.pool import PoolLimits

    token = read_token(token_file)
    if not workers and not (swarm or serves or listen):
        raise LaunchError(
            "--workers", workers, "leaves nobody who plays",
            "give at least 1, open a door by --swarm, or let other nodes use its engines by --serves or --listen",
        )  # fmt: skip

    def on_door(url: str) -> None:
        typer.echo(f"swarm clients join at {joining(url)}")
        if swarm_ready_file is not None:
            write_ready(swarm_ready_file, url)

    options = NodeOptions(
        dataflow_url=dataflow, token=token, name=name or socket.gethostname(), concurrency=concurrency,
        min_concurrency=min_concurrency, workers=workers, threads=max(1, threads), delay_s=delay_s, watch=watch,
        limits=PoolLimits(memory_bytes=worker_memory_bytes), door=_door(swarm, token) if swarm else None,
        on_door=on_door, engines=_engines(engine or []), serves=[name for name in serves.split(",") if name],
        listen=_checked_address(listen),
    )  # fmt: skip
    run_node(options)


def _engines(words: list[str]) -> dict[str, EngineSection]:
    """Raises: ConfigError: they are not `POLICY.setting=value`."""
    from pydantic import ValidationError

    from astraflow.config.load import read_overrides
    from astraflow.config.schema import EngineSection
    from astraflow.config.sections.base import component_of
    from astraflow.errors import ConfigError

    raw, problems = read_overrides([f"--{word}" for word in words])
    engines = {}
    for name, value in raw.items():
        try:
            engines[name] = EngineSection.model_validate(component_of(value))
        except ValidationError as error:
            problems.append(f"{name}={value!r} is no engine ({error.errors()[0]['msg']}); write {name}.type=local")
    if problems:
        raise ConfigError("--engine", problems)
    return engines


def _checked_address(listen: str) -> str:
    """Raises: LaunchError: others could not reach it."""
    from pydantic import TypeAdapter, ValidationError

    from astraflow.config.schema import Address
    from astraflow.errors import LaunchError

    try:
        return TypeAdapter(Address).validate_python(listen)
    except ValidationError as error:
        rule = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise LaunchError("--listen", listen, rule, "for example 127.0.0.1:0") from error


def _door(address: str, token: str | None) -> socket.socket:
    """Raises: LaunchError: no address, used, or beyond loopback without a token."""
    from astraflow.errors import LaunchError
    from astraflow.wire.app import bind, check_bind

    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65535:
        raise LaunchError("--swarm", address, "must be HOST:PORT", "for example 127.0.0.1:7800, or 0.0.0.0:0")
    check_bind(host, token, "--swarm")
    return bind(host, int(port), "--swarm")


def stage(
    name: Annotated[str, typer.Argument(help="A stage of the run file.")],
    dataflow: Url,
    threads: Threads = 0,
    token_file: TokenFile = None,
    parent: Parent = 0,
) -> None:
    """Work for a stage: pull rows that wait for it, add its columns; start as many as you like, anywhere."""
    tie(parent)
    from astraflow.observe.logs import setup_logging
    from astraflow.stages.worker import run_stage

    token = read_token(token_file)
    setup_logging(f"stage-{name}", secrets=(token,))
    run_stage(dataflow, name, threads=threads, token=token)


def relay(
    dataflow: Url,
    directory: Annotated[Path, typer.Option(help="Where versions are kept; a relay that starts again goes on there.")],
    host: Annotated[str, typer.Option(help="Beyond loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port.")] = 0,
    url: Annotated[str, typer.Option(help="By which nodes reach this relay; default: as it listens.")] = "",
    token_file: TokenFile = None,
    parent: Parent = 0,
) -> None:
    """Fetch each version of the weights once and serve it to the nodes nearby; they find it by themselves."""
    tie(parent)
    from astraflow.observe.logs import setup_logging
    from astraflow.observe.process import stop_signals
    from astraflow.weights.relay import RelayOptions, run_relay

    token = read_token(token_file)
    setup_logging("relay", secrets=(token,))
    with stop_signals() as stop:
        run_relay(dataflow, RelayOptions(directory.absolute(), host, port, url), token=token, stop=stop)


def retriever(
    corpus: Annotated[str, typer.Option(help="A JSON Lines file, perhaps .gz, or one that ships.")] = "wiki2hop",
    id_key: Annotated[str, typer.Option(help="Key of a row that holds its id.")] = "id",
    title_key: Annotated[str, typer.Option(help='Its title; "": there is none.')] = "title",
    text_key: Annotated[str, typer.Option(help="Its text.")] = "text",
    vectors: Annotated[str, typer.Option(help=".npy of one vector per passage.")] = "",
    encoder: Annotated[str, typer.Option(help="Of queries, to search by vectors: FILE.py:NAME.")] = "",
    host: Annotated[str, typer.Option(help="Beyond loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port.")] = 0,
    window_ms: Annotated[float, typer.Option(help="How long a batch waits for more queries.")] = 0.0,
    max_batch: Annotated[int, typer.Option(help="Queries of one batch.")] = 256,
    ready_file: Annotated[Path | None, typer.Option(help="Written with the URL once the service answers.")] = None,
    token_file: TokenFile = None,
    parent: Parent = 0,
) -> None:
    """Serve a corpus to be searched by many workers: POST /retrieve, /access; GET /health, /metrics."""
    tie(parent)
    from astraflow.launch.rundir import write_ready
    from astraflow.observe.logs import setup_logging
    from astraflow.retrieval.retriever import open_retriever, settings_of
    from astraflow.retrieval.serving.service import run_retriever
    from astraflow.wire.app import bind, check_bind

    token = read_token(token_file)
    setup_logging("retriever", secrets=(token,))
    check_bind(host, token, "--host")
    fields = {"id": id_key, "title": title_key, "text": text_key}
    settings = settings_of({"corpus": corpus, "fields": fields, "vectors": vectors, "encoder": encoder}, "retriever")

    def on_ready(url: str) -> None:
        typer.echo(f'retriever answers at {url}; environments search there by url = "{joining(url)}"')
        if ready_file is not None:
            write_ready(ready_file, url)

    with closing(bind(host, port, "--port")) as sock:  # a used port is told before the index is made
        opened = open_retriever(settings, "retriever")
        run_retriever(opened, sock, token=token, on_ready=on_ready, window_s=window_ms / 1e3, max_batch=max_batch)


def read_token(token_file: Path | None) -> str | None:
    """The bearer token of the run, or None."""
    from astraflow.config.env import checked_token, token_from_env
    from astraflow.errors import LaunchError

    if token_file is None:
        return token_from_env()
    try:
        token = checked_token(token_file.read_text(encoding="utf-8", errors="replace"), "token-file")
    except OSError as error:
        raise LaunchError(
            "token-file", str(token_file), f"cannot be read ({error.strerror})", "give a readable file"
        ) from error
    if not token:
        raise LaunchError("token-file", str(token_file), "is empty", "write the token of the run into it")
    return token


def tie(parent: int) -> None:
    """The process ends with this one (0: it does not), and with any of its own threads that dies."""
    from astraflow.observe.process import end_with_own_threads

    end_with_own_threads()
    if parent:
        from astraflow.launch.lifeline import tie_to_parent

        tie_to_parent(parent)

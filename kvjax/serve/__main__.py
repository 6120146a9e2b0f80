"""`python -m kvjax.serve`: serve one model over OpenAI's API, with a KV cache that a policy compresses."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cli.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError, shown_bytes, whole_number

if TYPE_CHECKING:
    from jax.sharding import Mesh

API_KEY_VARIABLE = "KVJAX_API_KEY"
LENGTHS = 2048, 8192, 32768, 131072
"""Request lengths, in tokens, for which the command prints how many requests fit at once."""


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Serve a model over OpenAI's API: chats and completions, streamed or whole. If the environment variable
    KVJAX_API_KEY is set, requests must bring that key."""

    model: str = "builtin"
    """A model folder, a GGUF file, a hub id, or `builtin`."""
    policy: str = "full"
    """The policy: methods joined by +, each with its arguments, such as snapkv:ratio=0.25 or
    wgkv+quest:ratio=0.5. `python -m kvjax.policies` lists them."""
    gates: str | None = None
    """The trained parameters of the policy: a training run's --out or the folder that it exported, a file of the
    method's authors, the hub id of either (Jang-Hyun/Fast-KVzip), or `builtin` for those of the built-in model."""
    name: str | None = None
    """The model's name in requests; by default its hub id, or the name of its folder or file."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in."""
    port: int = 8000
    """Port to listen on."""
    slots: int = 16
    """The most answers that are decoded at once."""
    max_length: int | None = None
    """The most tokens of a prompt with its answer; by default the limit that the model declares."""
    capacity: str | None = None
    """The pool's size: entries per kv head (4096), bytes (2GiB) or a share of device memory (30%). By default as
    much as all slots are expected to need at --max-length."""
    page_size: int | None = None
    """Tokens per page; by default 64 on a TPU (128 of int8 entries) and 16 elsewhere and with a selection."""
    chunk: int = 2048
    """Prompt tokens read between two blocks of decoding."""
    queue: int = 64
    """The most requests that wait for a slot. Further ones are refused with status 429."""
    force: bool = False
    """Accept gates and patterns that were made for another model of the same shape."""
    mesh: MeshShape = MeshShape()
    """Devices, along the tensor axis only: tensor=4."""
    dtype: str | None = None
    """float32, bfloat16 or float16; by default the weights' dtype."""
    weights: str | None = None
    """int8 or fp8: store the layers' matrices in 8 bits, rounded on loading; by default as in the files."""
    kv_cache_dtype: str | None = None
    """int8: store entries in 8 bits; by default in the model's dtype."""


def run(config: ServeConfig) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises UserError for mistakes in the configuration."""
    if missing := [
        package
        for package in ("starlette", "uvicorn", "prometheus_client")
        if not importlib.util.find_spec(package)
    ]:
        raise UserError(f"the server needs {', '.join(missing)}: pip install 'kvjax[serve]'")
    if config.mesh.count > config.mesh.tensor * config.mesh.replica:
        raise UserError(f"--mesh {config.mesh}: a server can only split heads, as in tensor=4")
    whole_number("serve", "--slots", config.slots)
    whole_number("serve", "--queue", config.queue, 0)
    whole_number("serve", "--port", config.port, 0, 65535)

    from kvjax.models.shapes import fit_mesh_to

    mesh = start(fit_mesh_to(config.mesh, config.model))

    import jax

    # An address that is taken is reported before the model is loaded.
    listening = _bind(config.host, config.port) if jax.process_index() == 0 else contextlib.nullcontext()
    with listening as listener:
        _serve(config, mesh, listener)


def _serve(config: ServeConfig, mesh: "Mesh", listener: socket.socket | None) -> None:
    """Load the model and serve it; without a listener follow the process that has it."""
    import jax
    import uvicorn

    from kvjax.cache import parse_capacity
    from kvjax.engine import Engine
    from kvjax.llm import LLM
    from kvjax.models.folder import find_model
    from kvjax.models.shapes import warn_if_too_long
    from kvjax.serve.app import Server
    from kvjax.serve.body import recommended_sampling
    from kvjax.serve.leading import LeadingEngine, follow

    sampling = recommended_sampling(find_model(config.model))
    llm = LLM(
        config.model, config.policy, gates=config.gates, mesh=mesh, dtype=config.dtype, weights=config.weights,
        kv_cache_dtype=config.kv_cache_dtype, max_length=config.max_length, force=config.force,
    )  # fmt: skip
    capacity = None if config.capacity is None else parse_capacity(config.capacity)
    engine_class = LeadingEngine if listener is not None and jax.process_count() > 1 else Engine
    engine = engine_class(
        llm.model, llm.policy, tokenizer=llm.tokenizer, slots=config.slots, max_length=config.max_length,
        capacity=capacity, page_size=config.page_size, chunk=config.chunk,
    )  # fmt: skip
    warn_if_too_long(
        llm.model.config, engine.max_length, f"--max-length: {engine.max_length:,} tokens are more"
    )
    grammars = None
    if importlib.util.find_spec("llguidance"):
        from kvjax.serve.grammar import Grammars

        grammars = Grammars(llm.tokenizer, llm.model.config.vocab_size, llm.model.config.eos_ids)
    counts = {tokens: engine.holds(tokens) for tokens in sorted({min(x, engine.max_length) for x in LENGTHS})}
    if not any(kept for kept, _ in counts.values()):
        raise UserError(
            f"--capacity {config.capacity}: a request of {min(counts):,} tokens does not fit; expected more (4096 "
            "entries per KV head, 2GiB, or 30% of a device's memory) or a smaller --max-length"
        )
    if listener is None:
        follow(engine, None if grammars is None else grammars.format)
        jax.distributed.shutdown()
        return
    path = Path(config.model)
    name = config.name or (Path(os.path.abspath(path)).name if path.exists() else config.model)
    server = Server(
        engine,
        llm.tokenizer,
        name,
        queue=config.queue,
        sampling=sampling,
        key=os.environ.get(API_KEY_VARIABLE) or None,
        grammar=None if grammars is None else grammars.schema,
        say=functools.partial(print, flush=True),
    )
    print(
        f"{name} with {llm.policy.name}: {shown_bytes(engine.pool_bytes)} of keys and values on each device."
    )
    for tokens, (kept, full) in counts.items():
        print(f"  Requests of {tokens:,} tokens that fit: {kept}, with a full cache {full}.")
    print(f"  At most {config.slots} are answered at once (--slots).")
    if sampling:
        values = ", ".join(f"{field} {value}" for field, value in sampling.items())
        print(f"  Sampling, unless a request says otherwise: {values} (generation_config.json).")
    port = listener.getsockname()[1]  # that of --port 0 is chosen by the system
    print(f"Warming up, then listening on http://{config.host}:{port}/v1", flush=True)
    try:
        uvicorn.Server(uvicorn.Config(server.app, log_level="warning", timeout_keep_alive=30)).run([listener])
    finally:
        # The other processes only follow between compilation and an error. Otherwise they end with this process.
        if isinstance(engine, LeadingEngine) and server.worker.ready and server.worker.failure is None:
            engine.release()
            # Wait for the others: they would take the end of this process for a failure.
            jax.distributed.shutdown()


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Raises UserError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error}") from None
    return listener


def main() -> None:
    """Run the command."""
    run(parse_command(ServeConfig))


if __name__ == "__main__":
    run_command(main)

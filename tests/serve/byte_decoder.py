"""A decoder whose tokens are bytes, and a server of it in this process."""

import contextlib
import threading
import time

import httpx
from flax import nnx

from shardlib.data.tokenizer import BytesTokenizer
from shardlib.engine import Engine
from shardlib.errors import ModelError
from shardlib.registry import DataSpec
from shardlib.serve.app import Service
from shardlib.serve.batch_jobs import BatchJobs
from shardlib.serve.bodies import Speaker
from shardlib.serve.engine_thread import EngineThread
from shardlib.serve.file_store import FileStore
from shardlib.serve.server import Server
from shardlib_models.transformer import FAMILY
from shardlib_models.transformer_config import TransformerConfig

TEXT = BytesTokenizer()


class Served:
    """A model whose tokens are bytes."""

    family, scope, tokenizer, end_tokens = FAMILY, None, TEXT, (TEXT.eot,)

    def __init__(self):
        config = TransformerConfig(
            embed_dim=64, num_layers=1, num_heads=4, mlp_dim=64, vocab_size=257, max_positions=256
        )
        self.model = FAMILY.make(config, DataSpec(), nnx.Rngs(0))
        self.model.eval()
        self.config = self.model.config


def chat(messages, tools):
    named = "".join(f"[{one['function']['name']}]" for one in tools or ())
    return TEXT.encode(named + "".join(f"<{one['role']}>{one['content']}" for one in messages))


SPEAKER = Speaker("tiny", lambda ids: TEXT.decode(ids), chat)


def new_engine(**options):
    return Engine(Served(), **{"slots": 4, "context": 128, "chunk": 64} | options)


LONG = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}


class Slow(Engine):
    """An engine with steps that take time."""

    def step(self):
        time.sleep(0.02)
        return super().step()


class Small(Engine):
    """An engine whose queue refuses prompts of a hundred tokens or more."""

    def enqueue(self, request):
        if len(request.sequence.prompt) >= 100:
            raise ModelError("the prompt needs more pages than there are")
        return super().enqueue(request)


@contextlib.contextmanager
def serving(engine=None, *, queue=8, files=None, speaker=SPEAKER, **options):
    """Yields a service and the address of its server, whose model may be slow to compile."""
    thread = EngineThread(engine or new_engine(), most_waiting=queue)
    jobs = None if files is None else BatchJobs(FileStore(files), thread, speaker)
    service = Service(thread, speaker, jobs=jobs, **options)
    server = Server(service, port=0)
    runner = threading.Thread(target=server.run)
    service.start()
    runner.start()
    try:
        wait_until(lambda: server.started and thread.is_ready)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield service, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        service.stop()
        runner.join(20)


def wait_until(holds, seconds=60.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)


def client(address, **options):
    return httpx.Client(base_url=address, timeout=30, trust_env=False, **options)

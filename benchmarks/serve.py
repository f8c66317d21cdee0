"""What the server costs beside the engine: tokens a second of many clients over HTTP, and of the engine alone.

    python benchmarks/serve.py [--clients 64] [--requests 256] [--rounds 3] [--out FILE.json]

A model with random weights (6 layers of 256) answers requests of 32 + 64 tokens. Each round asks
the engine directly, then the same requests over HTTP from clients in a process of their own, each of which sends
its next request when it has the answer to the last; streams are read to their end. Printed are tokens a second, their
ratio, and the time to the first token (median and 99th percentile). The target: at least 90 % of the engine alone.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

PROMPT = 32
NEW = 64


def clients(address: str, count: int, requests: int) -> None:
    """In a process of its own: asks, and prints seconds, tokens and times to the first token as JSON."""
    import aiohttp

    async def ask(session, i: int, first: list[float]) -> int:
        body = {"prompt": prompt_of(i), "max_tokens": NEW, "seed": i, "stream": True, "return_token_ids": True}
        began = time.perf_counter()
        tokens = 0
        async with session.post(f"{address}/v1/completions", json=body) as response:
            if response.status != 200:
                raise SystemExit(await response.text())
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                if not tokens:
                    first.append(time.perf_counter() - began)
                tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])
        return tokens

    async def main() -> dict:
        todo = iter(range(requests))
        first: list[float] = []
        total = 0
        connector = aiohttp.TCPConnector(limit=count)
        async with aiohttp.ClientSession(connector=connector) as session:
            began = time.perf_counter()

            async def client() -> None:
                nonlocal total
                for i in todo:
                    sampled = await ask(session, i, first)
                    total += sampled

            await asyncio.gather(*(client() for _ in range(count)))
            return {"seconds": time.perf_counter() - began, "tokens": total, "first": first}

    print(json.dumps(asyncio.run(main())))


def prompt_of(i: int) -> list[int]:
    """The tokens of request i."""
    return [(7 * i + 11 * t) % 350 + 20 for t in range(PROMPT)]


def alone(engine, requests: int) -> dict:
    """The same requests without a server."""
    from tunix_lite.rollout.live import DrawSettings, LiveSequence

    ended = threading.Semaphore(0)
    tokens = 0

    def on_tokens(new) -> None:
        nonlocal tokens
        tokens += len(new.tokens)
        if new.reason is not None:
            ended.release()

    began = time.perf_counter()
    engine.submit([LiveSequence(prompt_of(i), DrawSettings(seed=i), NEW, on_tokens) for i in range(requests)])
    for _ in range(requests):
        ended.acquire()
    return {"seconds": time.perf_counter() - began, "tokens": tokens}


def make_engine(slots: int, requests: int):
    """An engine with random weights, and the tokenizer of the bundled model."""
    from dataclasses import replace

    from tunix_lite.inference.language_model import load
    from tunix_lite.inference.live import live_engine
    from tunix_lite.models.source import ModelConfig
    from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

    bundled = load("bundled")
    wide = replace(bundled.cfg, num_layers=6, embed_dim=256, mlp_dim=1024, head_dim=64, window=512)
    model = load(ModelConfig(weights="random", architecture=wide, tokenizer="bundled"))
    generation = GenerationConfig(max_prompt_length=PROMPT, max_new_tokens=NEW)
    rollout = RolloutConfig(num_slots=slots, chunk=8)
    return live_engine(model, generation, rollout, max_waiting=requests), model.tokenizer


async def serve(engine, tokenizer, ready, stop) -> None:
    from aiohttp import web

    from tunix_lite.serving.app import Server, ServerSettings
    from tunix_lite.serving.calls import Limits

    server = Server(engine, tokenizer, Limits("random", PROMPT, NEW, PROMPT + NEW), ServerSettings())
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await stop.wait()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--out", type=Path, help="file for the figures, JSON")
    parser.add_argument("--client-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client_of:
        clients(args.client_of, args.clients, args.requests)
        return

    engine, tokenizer = make_engine(args.slots, args.requests)
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    addresses: list[str] = []
    listens = threading.Event()

    def ready(address: str) -> None:
        addresses.append(address)
        listens.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(engine, tokenizer, ready, stop)))
    thread.start()
    listens.wait()
    # A first round compiles: with all requests, as prompts that join later compile programs of their own.
    alone(engine, args.requests)
    rounds = []
    for _ in range(args.rounds):
        one = {"alone": alone(engine, args.requests)}
        words = [sys.executable, __file__, "--client-of", addresses[0]]
        words += ["--clients", str(args.clients), "--requests", str(args.requests)]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        one["http"] = json.loads(done.stdout)
        rounds.append(one)
        rate = {name: each["tokens"] / each["seconds"] for name, each in one.items()}
        print(f"engine {rate['alone']:,.0f} tokens/s, HTTP {rate['http']:,.0f}: {rate['http'] / rate['alone']:.0%}")
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    engine.close()

    shares = [
        one["http"]["tokens"] / one["http"]["seconds"] * one["alone"]["seconds"] / one["alone"]["tokens"]
        for one in rounds
    ]
    first = sorted(value for one in rounds for value in one["http"]["first"])
    median = statistics.median(first)
    high = first[int(0.99 * (len(first) - 1))]
    print(f"share of the engine alone: median {statistics.median(shares):.0%} of {len(shares)} rounds")
    print(f"time to the first token: median {median:.3f} s, 99th percentile {high:.3f} s")
    if args.out:
        for one in rounds:
            del one["http"]["first"]
        figures = {"rounds": rounds, "share": shares, "first_token": {"median": median, "p99": high}}
        machine = {"cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}
        asked = {"clients": args.clients, "requests": args.requests, "slots": args.slots}
        args.out.write_text(json.dumps({"benchmark": "serve", "machine": machine, **asked, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A server of aiohttp in a thread of its own, for tests that talk to it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_thread(application) -> Iterator[str]:
    """The address of an aiohttp application. Signals are the main thread's, so it ends by an event."""
    from aiohttp import web

    loop = asyncio.new_event_loop()
    address = []
    ready = threading.Event()
    stop = asyncio.Event()

    async def main():
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()

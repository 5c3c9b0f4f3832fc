"""kill -9 under load: every change that was asked for is made exactly once; `make soak` does hundreds."""

from __future__ import annotations

import asyncio
from pathlib import Path

from journal_kit import daemon

from asyncdist.store import TCPStore

KILLS = 3
WRITERS = 8
CHANGES_BETWEEN_KILLS = 200
DEADLINE_S = 60.0


async def test_changes_under_load_are_made_once(tmp_path: Path) -> None:
    with daemon(tmp_path / "data") as running:
        running.start()
        stores = [TCPStore("127.0.0.1", running.port, namespace="job") for _ in range(WRITERS)]
        made = [0] * WRITERS
        over, goal, enough = False, 0, asyncio.Event()

        async def write(writer: int) -> None:
            store = stores[writer]
            while not over:
                number = made[writer]
                added, _, _ = await asyncio.gather(
                    store.add(f"sum/{writer}", 1),
                    store.append(f"log/{writer}", b"%d," % number),
                    store.queue_push("queue", b"%d:%d" % (writer, number)),
                )
                assert added == number + 1
                popped.append(await store.queue_pop("queue"))
                made[writer] += 1
                if sum(made) >= goal:
                    enough.set()

        popped: list[bytes] = []
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            for writer in range(WRITERS):
                tasks.create_task(write(writer))
            for _ in range(KILLS):
                goal = sum(made) + CHANGES_BETWEEN_KILLS
                enough.clear()
                await enough.wait()
                await asyncio.get_running_loop().run_in_executor(None, running.kill)
                await asyncio.get_running_loop().run_in_executor(None, running.start)
            over = True
        for writer, store in enumerate(stores):
            assert await store.add(f"sum/{writer}", 0) == made[writer]
            log = await store.get(f"log/{writer}")
            assert log == b"".join(b"%d," % number for number in range(made[writer]))
        assert await stores[0].queue_len("queue") == 0
        expected = [b"%d:%d" % (writer, number) for writer in range(WRITERS) for number in range(made[writer])]
        assert sorted(popped) == sorted(expected)
        for store in stores:
            await store.close()
        running.stop()

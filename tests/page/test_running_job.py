"""The page of a real daemon, and ranks that hang."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import forked
import pytest
from jobs import start_ranks
from page_kit import TOKEN

HANGS = """
async def main():
    async with dist.init_process_group() as group:
        for _ in range(10):
            await group.all_reduce(np.ones(1000))
        print("formed", flush=True)
        if group.rank == 2:
            time.sleep(60)
        await group.all_reduce(np.ones(1000))

dist.run(main())
"""


@pytest.mark.thorough
@pytest.mark.slow("starts a daemon, ranks and a browser")
def test_the_daemon_shows_who_hangs(browser: Any, tmp_path: Path) -> None:
    environ = {"ASYNCDIST_TOKEN": TOKEN}
    command = [forked.sys.executable, "-m", "asyncdist_server", "--port", "0", "--http-port", "0"]
    with forked.Popen(command, stdout=forked.subprocess.PIPE, text=True, env=forked.os.environ | environ) as daemon:
        try:
            words = daemon.stdout.readline().replace(")", "").split()
            store, http = words[3], words[5]
            ranks = start_ranks(HANGS, 3, {"ASYNCDIST_STORE": store, **environ})
            try:
                for rank in ranks:
                    assert rank.stdout.readline() == "formed\n"
                tab = browser.new_page()
                tab.goto(f"http://localhost:{http.rpartition(':')[2]}/")
                tab.get_by_label("Token").fill(TOKEN)
                tab.keyboard.press("Enter")
                tab.locator("#verdict").get_by_text("Rank 2 has not called all_reduce #10").wait_for()
                ranks[2].send_signal(signal.SIGSTOP)
                tab.locator("#ranks tbody tr").nth(2).get_by_text("stopped", exact=True).wait_for()
                with tab.expect_download() as download:
                    tab.get_by_role("button", name="Timeline").click()
                assert Path(download.value.path()).stat().st_size > 1000
                tab.close()
            finally:
                for rank in ranks:
                    rank.kill()
                for rank in ranks:
                    rank.communicate()
        finally:
            daemon.kill()
